"""The tensors that llama.cpp copies, by types and shapes, and as llama.cpp reports."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.models import llama_cpp
from support.models.make import Shape, write_model
from unimem.staging.llama_cpp import RepackedByLlamaCpp, cpu_features, find_repacked
from unimem.weights.files import open_model

SHAPE = Shape(hidden=256, layers=1, heads=8, kv_heads=4, inner=256, vocab=512, ctx=256)
AVX2, AVX512, AMX = {"avx2"}, {"avx2", "avx512f"}, {"avx2", "avx512f", "amx_int8"}
DOT, OLD_ARM = {"asimd", "asimddp", "i8mm"}, {"asimd"}


def model(*tensors: tuple[str, str, tuple[int, ...]]) -> Any:
    """A model of these tensors, of 100 bytes each."""
    header = SimpleNamespace(
        tensor_names=lambda: {name: i for i, (name, _, _) in enumerate(tensors)},
        tensor=lambda i: (tensors[i][2], tensors[i][1], 0, 0, 100),
    )
    return SimpleNamespace(files=[SimpleNamespace(header=header)])


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("q4_0", [AVX2, AVX512, AMX, DOT]),
        ("q4_K", [AVX2, AVX512, AMX, DOT]),
        ("iq4_nl", [AVX2, AVX512, AMX, DOT, OLD_ARM]),
        ("mxfp4", [AVX2, AVX512, AMX, DOT]),
        ("q2_K", [AVX512, AMX]),
        ("q5_K", [AMX, DOT]),
        ("q6_K", [AMX, DOT]),
        ("q8_0", [AMX, DOT]),
        ("iq4_xs", [AMX]),
        ("q4_1", [AMX]),
        *((kind, []) for kind in ("f32", "f16", "bf16", "q3_K")),
    ],
)
def test_each_cpu_repacks_its_types(kind: str, where: list[set[str]]) -> None:
    one = model(("output.weight", kind, (256, 64)))
    for features in (AVX2, AVX512, AMX, DOT, OLD_ARM, set()):
        found = find_repacked(one, frozenset(features))
        assert found == RepackedByLlamaCpp(100 if features in where else 0, 100), features


OUTPUT = ("output.weight", "f32", (256, 64))


@pytest.mark.parametrize(
    ("name", "ne", "nbytes"),
    [
        ("blk.0.attn_q.weight", (256, 64), 100),
        ("blk.0.attn_q.weight", (256, 60), 0),  # rows that 8 does not divide
        ("blk.0.attn_q.bias", (256,), 0),
        ("blk.0.ffn_up_exps.weight", (256, 64, 8), 100),
        ("token_embd.weight", (256, 64), 0),
        ("per_layer_token_embd.weight", (256, 64), 0),
    ],
)
def test_tensors_are_chosen_by_name_and_shape(name: str, ne: tuple[int, ...], nbytes: int) -> None:
    found = find_repacked(model(OUTPUT, (name, "q4_0", ne)), frozenset(AVX2))
    assert found == RepackedByLlamaCpp(nbytes, 200)


def test_tied_embeddings_are_repacked() -> None:
    found = find_repacked(model(("token_embd.weight", "q4_0", (256, 64))), frozenset(AVX2))
    assert found == RepackedByLlamaCpp(100, 100)


KINDS = ("q4_0", "q2_K", "q4_K", "iq4_nl", "mxfp4", "q5_K", "q6_K", "q8_0")


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        ("q4_0", False),
        ("q4_0", True),
        ("q8_0", False),
        *(
            pytest.param(kind, tied, marks=pytest.mark.slow)
            for kind in KINDS
            for tied in (False, True)
            if kind != "q4_0" and (kind, tied) != ("q8_0", False)
        ),
    ],
)
def test_bytes_are_those_that_llama_cpp_reports(kind: str, tied: bool, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf (extra test) writes models")
    path = write_model(
        tmp_path / "m.gguf", shape=SHAPE, kind=kind.lower(), tied=tied, random_bits=True
    )
    with open_model(path) as opened:
        found = find_repacked(opened, cpu_features())
    # llama.cpp reports hundredths of a MiB.
    assert llama_cpp.repacked_mib(path) == pytest.approx(found.nbytes / (1 << 20), abs=0.006)
