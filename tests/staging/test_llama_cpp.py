"""The weights that llama.cpp repacks, by type, shape and CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.files import gguf_files as gf
from unimem.staging.llama_cpp import cpu_features, find_repacked
from unimem.weights.files import open_model

Q4_0, Q8_0 = 2, 8
ROW = {Q4_0: 18, Q8_0: 34}  # bytes of 32 values


def write(path: Path, *names: str, kind: int, rows: int) -> Path:
    nbytes = ROW[kind] * rows
    step = -(-nbytes // 32) * 32
    tensors = [gf.tensor(name, (32, rows), kind, i * step) for i, name in enumerate(names)]
    raw, _ = gf.with_data(gf.head(len(names), 0), *tensors, nbytes=step * len(names))
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    ("kind", "rows", "features", "n_copied"),
    [
        (Q4_0, 16, {"avx2"}, 1),
        (Q4_0, 12, {"avx2"}, 0),  # no multiple of 8
        (Q4_0, 12, {"asimddp"}, 1),
        (Q8_0, 16, {"avx2", "avx512f"}, 0),
        (Q8_0, 32, {"amx_int8"}, 1),
        (Q4_0, 16, set(), 0),
    ],
)
def test_types_of_each_cpu(
    tmp_path: Path, kind: int, rows: int, features: set[str], n_copied: int
) -> None:
    names = ("token_embd.weight", "blk.0.ffn_up.weight", "output.weight")
    for given in (names[:2], names):  # a lone table of embeddings is a matrix, too
        with open_model(write(tmp_path / "m.gguf", *given, kind=kind, rows=rows)) as model:
            found = find_repacked(model, frozenset(features))
        assert found.nbytes == 2 * n_copied * ROW[kind] * rows
        assert found.total_bytes == len(given) * ROW[kind] * rows


def test_features_of_this_cpu() -> None:
    assert cpu_features() & {"sse2", "asimd"}
