"""Tensors as float32, bit by bit as ggml and gguf-py convert them, for every type."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import unimem.weights.dequantize as module
from support.files import gguf_files as gf
from support.files import safetensors_files as sf
from unimem import Tape
from unimem.errors import ClosedError
from unimem.weights.gguf import tensor_type
from unimem.weights.loading import Load
from unimem.weights.opened import open_weights
from unimem.weights.tensors import Tensor

gguf = pytest.importorskip("gguf", reason="gguf (extra test) writes the files")
ggml = pytest.importorskip(
    "unimem_ggml.binding", reason="ggml (extra run) is one side of the comparison"
)

Array = NDArray[Any]
Kind = gguf.GGMLQuantizationType
KINDS = [kind for kind in Kind if ggml.has_to_float(int(kind))]
BY_GGUF_PY = [kind for kind in KINDS if kind in gguf.quants._type_traits]
# ggml needs seconds to quantize to these. All bytes are valid for them.
SLOW = [kind for kind in KINDS if kind.name.startswith(("IQ1", "IQ2", "IQ3"))]
# Types of ggml without values: it makes them while it computes.
WITHOUT_VALUES = [Kind.Q8_1, Kind.Q8_K]


def by_ggml(data: Array, number: int) -> Array:
    """Convert all blocks in one call of ggml."""
    _, block_values, block_bytes = tensor_type(number)
    data = np.ascontiguousarray(data).view(np.uint8)
    out = np.empty(data.nbytes // block_bytes * block_values, np.float32)
    ggml.to_float(number, data.ctypes.data, out.ctypes.data, out.size)
    return out


def quantized(kind: Any, n_rows: int, n_values: int) -> NDArray[np.uint8]:
    """Return normal values that ggml has quantized."""
    values = np.random.default_rng(kind).standard_normal((n_rows, n_values), np.float32)
    importance = np.ones(n_values, np.float32)
    _, block_values, block_bytes = tensor_type(kind)
    out = np.empty((n_rows, n_values // block_values * block_bytes), np.uint8)
    addresses = values.ctypes.data, out.ctypes.data
    written = ggml.quantize(int(kind), *addresses, n_rows, n_values, importance.ctypes.data)
    assert written == out.nbytes
    return out


def same(a: Array, b: Array) -> bool:
    """Whether all bits are the same, except those of NaNs."""
    a, b = a.reshape(-1), b.reshape(-1)
    assert a.dtype == b.dtype == np.float32
    nan = np.isnan(a)
    return bool(
        np.array_equal(nan, np.isnan(b))
        and np.array_equal(a.view(np.uint32)[~nan], b.view(np.uint32)[~nan])
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of each type that ggml converts, with quantized values and with random bytes."""
    path = tmp_path_factory.mktemp("dequantize") / "all.gguf"
    tensors: dict[str, tuple[Any, Any]] = {}
    for kind in KINDS:
        _, block_values, block_bytes = tensor_type(kind)
        row = 512 // block_values * block_bytes
        data = gf.random_bytes(40 * row, kind).reshape(40, row)
        values = quantized(kind, 3, 512) if kind not in SLOW else data[:3]
        tensors[f"{kind.name}.values"] = values, kind
        tensors[f"{kind.name}.bytes"] = data, kind
    gf.write_with_gguf_py(path, {}, tensors)
    return path


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that are small, so that small tensors have several."""
    monkeypatch.setattr(module, "_PIECE_BYTES", 1000)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_blocks_are_as_ggml_and_gguf_py_read_them(files: Path, kind: Any) -> None:
    with open_weights(files) as w:
        for part in ("values", "bytes"):
            tensor = w.tensors[f"{kind.name}.{part}"]
            data = tensor.as_array().view(np.uint8)
            found = tensor.dequantize()
            assert found.shape == tensor.shape
            assert found.flags.writeable
            assert not np.may_share_memory(found, data)
            assert same(found, by_ggml(data, kind))
            if kind in BY_GGUF_PY:
                with np.errstate(all="ignore"):
                    assert same(found, gguf.quants.dequantize(data, kind))
        if kind in SLOW:
            return
        values = np.random.default_rng(kind).standard_normal((3, 512), np.float32)
        error = np.abs(w.tensors[f"{kind.name}.values"].dequantize() - values).mean()
        assert error < 0.9 * np.abs(values).mean()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_type_without_ggml(files: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_by_ggml", lambda number: "ggml is not here")
    with open_weights(files) as w:
        for part in ("values", "bytes"):
            tensor = w.tensors[f"{kind.name}.{part}"]
            assert same(tensor.dequantize(), by_ggml(tensor.as_array(), kind))


def test_a_type_that_gguf_py_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    _, block_values, block_bytes = tensor_type(42)
    data = gf.random_bytes(200 * block_bytes)
    monkeypatch.setattr(module, "_by_ggml", lambda number: "ggml is not here")
    out = np.empty(200 * block_values, np.float32)
    module.dequantize(data, "q2_0", 42, out, name="t", path="file")
    assert same(out, by_ggml(data, 42))


def test_missing_libraries_are_named(files: Path, run_python: Any) -> None:
    answer = run_python(
        """
        import os, sys
        sys.modules["gguf"] = sys.modules["unimem.backends.ggml"] = None
        from unimem.weights.opened import open_weights
        with open_weights(os.environ["MODEL"]) as w:
            try:
                w.tensors["Q4_K.values"].dequantize()
            except NotImplementedError as error:
                print(error)
            print(w.tensors["F16.values"].dequantize().dtype)
        """,
        MODEL=str(files),
    )
    assert answer.stderr == ""
    told, dtype = answer.stdout.splitlines()
    assert re.search("^tensor 'Q4_K.values' is q4_K: .*ggml.*pip install gguf", told)
    assert dtype == "float32"


@pytest.mark.parametrize("kind", WITHOUT_VALUES, ids=lambda kind: kind.name)
def test_types_without_values_are_refused(tmp_path: Path, kind: Any) -> None:
    _, block_values, block_bytes = tensor_type(kind)
    raw, _ = gf.with_data(
        gf.head(1, 0), gf.tensor("t", (block_values,), kind, 0), nbytes=block_bytes
    )
    (tmp_path / "file.gguf").write_bytes(raw)
    with open_weights(tmp_path / "file.gguf") as w:
        with pytest.raises(NotImplementedError, match=r"'t' is q8_(1|K): .*ggml.*gguf-py") as e:
            w.tensors["t"].dequantize()
        assert "install" not in str(e.value)


SAFETENSORS: dict[str, Any] = {
    "BOOL": np.bool_,
    **{f"U{8 * n}": np.dtype(f"u{n}") for n in (1, 2, 4, 8)},
    **{f"I{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    **{f"F{8 * n}": np.dtype(f"f{n}") for n in (2, 4, 8)},
    "BF16": ml_dtypes.bfloat16,
    **{"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2},
    **{"F8_E8M0": ml_dtypes.float8_e8m0fnu, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz},
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}
RANDOM = gf.random_bytes(1 << 19)


def write_safetensors(
    path: Path, dtype: str, shape: tuple[int, ...], data: bytes, before: int = 0
) -> Path:
    """Write a file of a tensor behind `before` bytes of another one."""
    header = {
        "before": {"dtype": "U8", "shape": [before], "data_offsets": [0, before]},
        "t": {"dtype": dtype, "shape": shape, "data_offsets": [before, before + len(data)]},
    }
    text = json.dumps(header)
    path.write_bytes(sf.file(text + " " * (-len(text) % 8), bytes(before) + data))
    return path


@pytest.mark.parametrize("dtype", SAFETENSORS)
@pytest.mark.parametrize("before", [0, 1], ids=["aligned", "at any byte"])
def test_numbers(tmp_path: Path, dtype: str, before: int) -> None:
    item = np.dtype(SAFETENSORS[dtype]).itemsize
    # Each value of a byte, and more than a piece of others.
    data = np.concatenate([np.arange(256, dtype=np.uint8).repeat(item), RANDOM])
    if dtype == "BOOL":
        data &= 1
    values = data.view(SAFETENSORS[dtype]).reshape(2, -1)
    path = tmp_path / "file.safetensors"
    with open_weights(write_safetensors(path, dtype, values.shape, data.tobytes(), before)) as w:
        array = w.tensors["t"].as_array()
        assert (array.dtype, array.tobytes()) == (values.dtype, data.tobytes())
        found = w.tensors["t"].dequantize()
    with np.errstate(all="ignore"):
        expected = values.astype(np.float32)
    assert found.shape == values.shape
    assert same(found, expected)


@pytest.mark.parametrize("dtype", ["C64", "F4", "F6_E2M3", "F6_E3M2"])
def test_types_that_nothing_converts(tmp_path: Path, dtype: str) -> None:
    data = bytes(sf.BITS[dtype])  # of 8 values
    path = write_safetensors(tmp_path / "file.safetensors", dtype, (8,), data)
    why = "complex" if dtype == "C64" else "packed"
    told = f"'t' is {dtype.lower()}.*{why}.*as_array"
    with open_weights(path) as w, pytest.raises(NotImplementedError, match=told):
        w.tensors["t"].dequantize()


@pytest.mark.parametrize("mode", ["map", "copy", "direct"])
def test_shapes_without_rows(tmp_path: Path, mode: Load) -> None:
    (tmp_path / "file.gguf").write_bytes(gf.everything())
    with open_weights(tmp_path / "file.gguf", load=mode) as w:
        for name, shape in (("scalar", ()), ("empty", (0, 4)), ("four", (2, 1, 3, 2))):
            found = w.tensors[name].dequantize()
            assert found.shape == shape
            assert same(found, w.tensors[name].as_array().astype("f4"))


def test_an_array_that_is_given(files: Path) -> None:
    with open_weights(files) as w, Tape("16M") as tape:
        tensor = w["Q4_K.values"]
        out = tape.take(tensor.shape, "f4")
        assert tensor.dequantize(out) is out
        assert same(out, tensor.dequantize())
        for wrong, error in (
            (out[:, ::2], ValueError),
            (out.astype("f8"), ValueError),
            (out.reshape(-1), ValueError),
            (out.tolist(), TypeError),
        ):
            with pytest.raises(error, match="out: expected a "):
                tensor.dequantize(wrong)


def test_a_truncated_file_is_an_error(tmp_path: Path, files: Path) -> None:
    path = tmp_path / "file.gguf"
    path.write_bytes(files.read_bytes())
    with open_weights(path, load="map") as w:
        last: Tensor = max(w.tensors.values(), key=lambda tensor: tensor.offset)
        os.truncate(path, last.offset)
        with pytest.raises(OSError, match=r"file\.gguf") as caught:
            last.dequantize()
        assert caught.value.errno == errno.EIO
        first = w.tensors["F16.values"]
        assert same(first.dequantize(), first.as_array().astype("f4"))
        w.close()  # the error keeps nothing
    with pytest.raises(ClosedError):
        last.dequantize()
