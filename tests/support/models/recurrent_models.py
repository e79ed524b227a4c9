"""Small models with recurrent states, which llama.cpp runs: mamba, and lfm2 with attention."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from unimem_bench import models as bench

SHAPE = bench.ModelShape(hidden=64, layers=2, heads=4, kv_heads=2, inner=128, vocab=320, ctx=600)


def write_recurrent(path: Path, arch: str) -> Path:
    """Write a model of ``mamba``, or of ``lfm2``, whose layer 1 has attention and layer 0 a state.

    Weights are random.
    """
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    hidden, inner, states, rank, kernel = SHAPE.hidden, 2 * SHAPE.hidden, 16, 4, 4
    bench.add_metadata(writer, SHAPE, {})
    bench.add_tokenizer(writer, SHAPE.vocab)
    if arch == "mamba":
        for name, value in {
            **{"conv_kernel": kernel, "inner_size": inner},
            **{"state_size": states, "time_step_rank": rank},
        }.items():
            writer.add_uint32(f"mamba.ssm.{name}", value)
    else:
        writer.kv_data[0].pop("lfm2.attention.head_count_kv")
        writer.add_array("lfm2.attention.head_count_kv", [0, SHAPE.kv_heads])
        writer.add_uint32("lfm2.shortconv.l_cache", 3)

    def add(name: str, *shape: int, mean: float = 0.0) -> None:
        values = mean + shape[-1] ** -0.5 * rng.standard_normal(shape)
        writer.add_tensor(name, values.astype(np.float32))

    add("token_embd.weight", SHAPE.vocab, hidden)
    add("output_norm.weight" if arch == "mamba" else "token_embd_norm.weight", hidden, mean=1)
    for i in range(SHAPE.layers):
        add(f"blk.{i}.attn_norm.weight", hidden, mean=1)
        if arch == "mamba":
            add(f"blk.{i}.ssm_in.weight", 2 * inner, hidden)
            add(f"blk.{i}.ssm_conv1d.weight", inner, kernel)
            add(f"blk.{i}.ssm_conv1d.bias", inner)
            add(f"blk.{i}.ssm_x.weight", rank + 2 * states, inner)
            add(f"blk.{i}.ssm_dt.weight", inner, rank)
            add(f"blk.{i}.ssm_dt.bias", inner)
            add(f"blk.{i}.ssm_a", inner, states, mean=-1)
            add(f"blk.{i}.ssm_d", inner)
            add(f"blk.{i}.ssm_out.weight", hidden, inner)
            continue
        add(f"blk.{i}.ffn_norm.weight", hidden, mean=1)
        for name, n_out, n_in in (
            ("gate", 128, hidden),
            ("up", 128, hidden),
            ("down", hidden, 128),
        ):
            add(f"blk.{i}.ffn_{name}.weight", n_out, n_in)
        if i == 0:
            add("blk.0.shortconv.conv.weight", hidden, 3)
            add("blk.0.shortconv.in_proj.weight", 3 * hidden, hidden)
            add("blk.0.shortconv.out_proj.weight", hidden, hidden)
            continue
        head = hidden // SHAPE.heads
        for name, n_out in (("q", hidden), ("k", 2 * head), ("v", 2 * head), ("output", hidden)):
            add(f"blk.{i}.attn_{name}.weight", n_out, hidden)
        for name in "qk":
            add(f"blk.{i}.attn_{name}_norm.weight", head, mean=1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
