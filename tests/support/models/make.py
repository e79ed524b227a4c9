"""Writes GGUF models of random weights that unimem and llama.cpp both load.

PYTHONPATH=tests python -m support.models.make OUT.gguf [ARCHITECTURE] [small|1.1b] [TYPE]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from unimem_bench import models as bench

Shape = bench.ModelShape
FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "bf16": 32}

OAI_SCALING: dict[str, Any] = {"type": "yarn", "factor": 32.0, "original_context_length": 256}

TINY = Shape(hidden=64, layers=2, heads=4, kv_heads=2, inner=128, vocab=320, ctx=600)
SMALL = Shape(hidden=256, layers=4, heads=8, kv_heads=2, inner=768, vocab=1024, ctx=1024)
SHAPES = {"tiny": TINY, "small": SMALL, "1.1b": bench.SHAPES["1.1b"], "wide": bench.SHAPES["wide"]}


def own_metadata(arch: str, shape: Shape, experts: tuple[int, int] | None) -> dict[str, Any]:
    """Return what the metadata of an architecture have beside those of a llama."""
    own: dict[str, Any] = {}
    if arch in ("qwen3", "gemma3", "qwen3moe", "gpt-oss"):
        own = {"attention.key_length": shape.head, "attention.value_length": shape.head}
    if arch == "gemma3":
        own |= {"attention.sliding_window": 48, "rope.freq_base": 1e6}
    if arch == "gpt-oss":
        own |= {"attention.sliding_window": 48, "rope.freq_base": 150000.0}
        own |= {f"rope.scaling.{name}": value for name, value in OAI_SCALING.items()}
    if experts is not None:
        own |= {"expert_count": experts[0], "expert_used_count": experts[1]}
        own |= {"expert_feed_forward_length": shape.inner}
    return own


def write_model(
    path: Path,
    arch: str = "llama",
    shape: Shape = SMALL,
    kind: str = "q8_0",
    *,
    tied: bool = False,
    bias: bool = False,
    rope_factors: bool = False,
    gain: float = 0.3,
    experts: tuple[int, int] = (8, 3),
    metadata: dict[str, Any] | None = None,
    eos: int = 2,
    random_bits: bool = False,
    dequantized: bool = False,
    seed: int = 0,
) -> Path:
    """Write a model.

    A gemma3 or gpt-oss slides over 48 tokens where `metadata` says nothing else. Of a mixture,
    `experts` says how many there are, and how many a token uses; `inner` of the shape is inside of
    one. A gpt-oss has positions beyond 256 by YaRN.

    `metadata` adds keys (without the architecture's prefix) or replaces them. `gain` is what a
    block adds, beside what it adds it to. Quantizing activations turns a difference of one bit
    between two builds of ggml into one of a quantum, which a model of gain 1 makes larger from
    layer to layer, and a small gain does not. With `random_bits` matrices are bytes without
    meaning, of any type that ggml knows; with `dequantized` they are f32, of values `kind` has.
    """
    rng = np.random.default_rng(seed)
    w = gguf.GGUFWriter(path, arch)
    is_mixture, is_oai = arch in ("qwen3moe", "gpt-oss"), arch == "gpt-oss"
    own = own_metadata(arch, shape, experts if is_mixture else None)
    bench.add_metadata(w, shape, own | (metadata or {}))
    w.add_file_type(FILE_TYPES.get(kind, 0))
    bench.add_tokenizer(w, shape.vocab, eos)

    def matrix(
        name: str, n_out: int, n_in: int, std: float, *, n: int | None = None
    ) -> NDArray[Any] | None:
        """Add a matrix, or a stack of n."""
        dims = (n_out,) if n is None else (n, n_out)
        n_out *= n or 1
        if random_bits:
            number = GGMLQuantizationType[kind.upper()]
            block_values, block_bytes = gguf.GGML_QUANT_SIZES[number]
            row_bytes = n_in // block_values * block_bytes
            bits = rng.integers(0, 256, (n_out, row_bytes), np.uint8)
            w.add_tensor(name, bits.reshape(*dims, -1), raw_dtype=number)
            return None
        if kind == "q8_0" and n_out * n_in > 1 << 22:
            # Random blocks directly: quantizing a billion values takes minutes.
            blocks = rng.integers(0, 256, (n_out, n_in // 32, 34), np.uint8)
            blocks[..., :2] = np.frombuffer(np.float16(std / 73.9).tobytes(), np.uint8)
            w.add_tensor(name, blocks.reshape(*dims, -1), raw_dtype=GGMLQuantizationType.Q8_0)
            return None
        values = rng.standard_normal((n_out, n_in), dtype=np.float32) * np.float32(std)
        if name == "output.weight" and embedding is not None:
            # Each token has a likely successor, so that the likeliest token is seldom in doubt by
            # less than rounding.
            values += np.roll(embedding, 1, axis=0) * np.float32(std / 3 / embedding_std)
        if kind in ("f32", "f16"):
            plain = values.astype({"f32": np.float32, "f16": np.float16}[kind])
            w.add_tensor(name, plain.reshape(*dims, n_in))
        else:
            number = GGMLQuantizationType[kind.upper()]
            try:
                data = gguf.quants.quantize(values, number)
            except NotImplementedError:  # gguf makes only the simple types
                from support.files.quantized import quantize

                data = quantize(values, number)
            if dequantized:
                w.add_tensor(name, gguf.quants.dequantize(data, number).reshape(*dims, n_in))
            else:
                w.add_tensor(name, data.reshape(*dims, -1), raw_dtype=number)
        return values

    def vector(name: str, n: int | tuple[int, ...], mean: float, std: float) -> None:
        w.add_tensor(name, (mean + std * rng.standard_normal(n)).astype(np.float32))

    hidden, std = shape.hidden, shape.hidden**-0.5
    q, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    # The graph multiplies it by the root of its size.
    embedding_std = std if arch == "gemma3" else 1.0
    embedding = None
    embedding = matrix("token_embd.weight", shape.vocab, hidden, embedding_std)
    if rope_factors:
        factors = np.linspace(1, 8, shape.head // 2, dtype=np.float32)
        w.add_tensor("rope_freqs.weight", factors)
    for i in range(shape.layers):
        blk = f"blk.{i}"
        vector(f"{blk}.attn_norm.weight", hidden, 1, 0.1)
        for name, n_out, scale in (("attn_q", q, 1.5), ("attn_k", kv, 1.5), ("attn_v", kv, 1)):
            matrix(f"{blk}.{name}.weight", n_out, hidden, std * scale)
            if bias or is_oai or arch == "qwen2":
                vector(f"{blk}.{name}.bias", n_out, 0, 0.2)
        if arch in ("qwen3", "gemma3", "qwen3moe"):
            vector(f"{blk}.attn_q_norm.weight", shape.head, 1, 0.1)
            vector(f"{blk}.attn_k_norm.weight", shape.head, 1, 0.1)
        matrix(f"{blk}.attn_output.weight", hidden, q, q**-0.5 * gain)
        if is_oai:
            for name, dims, mean, scale in (
                ("attn_sinks.weight", (shape.heads,), 1, 1),
                ("attn_output.bias", (hidden,), 0, 0.2 * gain),
                ("ffn_gate_inp.bias", experts[:1], 0, 0.2),
                ("ffn_gate_exps.bias", (experts[0], shape.inner), 0, 0.2),
                ("ffn_up_exps.bias", (experts[0], shape.inner), 0, 0.2),
                ("ffn_down_exps.bias", (experts[0], hidden), 0, 0.2 * gain),
            ):
                vector(f"{blk}.{name}", dims, mean, scale)
        ffn_norm = "post_attention_norm" if is_oai else "ffn_norm"
        vector(f"{blk}.{ffn_norm}.weight", hidden, 1, 0.1)
        # Rounding must not change which experts are chosen.
        n, exps = (experts[0], "_exps") if is_mixture else (None, "")
        if n is not None:
            router = 4 * std * rng.standard_normal((n, hidden), dtype=np.float32)
            w.add_tensor(f"{blk}.ffn_gate_inp.weight", router)
        down_std = shape.inner**-0.5 * gain
        matrix(f"{blk}.ffn_gate{exps}.weight", shape.inner, hidden, std, n=n)
        matrix(f"{blk}.ffn_up{exps}.weight", shape.inner, hidden, std, n=n)
        matrix(f"{blk}.ffn_down{exps}.weight", hidden, shape.inner, down_std, n=n)
        if arch == "gemma3":
            for name in ("post_attention_norm", "post_ffw_norm"):
                vector(f"{blk}.{name}.weight", hidden, gain, gain / 10)
    vector("output_norm.weight", hidden, 1, 0.1)
    if not tied:
        matrix("output.weight", shape.vocab, hidden, std * 3)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def small(**changes: Any) -> Shape:
    """Return the small shape with other dimensions."""
    return replace(SMALL, **changes)


if __name__ == "__main__":
    arguments = dict(enumerate(sys.argv[1:]))
    write_model(
        Path(arguments[0]),
        arguments.get(1, "llama"),
        SHAPES[arguments.get(2, "small")],
        arguments.get(3, "q8_0"),
    )
