"""Tensors in other libraries, without a copy: NumPy, ml_dtypes and torch."""

from __future__ import annotations

import ctypes
import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from support.files import gguf_files as gf
from support.files import safetensors_files as sf
from unimem._core import dlpack
from unimem.weights.loading import Load
from unimem.weights.opened import Weights, open_weights

# Type, and the name in NumPy or ml_dtypes, and in torch.
TYPES: dict[str, str] = {
    **{f"u{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"i{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"},
    **{"bool": "bool", "c64": "complex64"},
    **{"f8_e4m3": "float8_e4m3fn", "f8_e4m3fnuz": "float8_e4m3fnuz"},
    **{"f8_e5m2": "float8_e5m2", "f8_e5m2fnuz": "float8_e5m2fnuz", "f8_e8m0": "float8_e8m0fnu"},
}
OF_ML_DTYPES = [kind for kind, name in TYPES.items() if not hasattr(np, name)]
PACKED = ["f4", "f6_e2m3", "f6_e3m2"]


def dtype_of(kind: str) -> np.dtype[Any]:
    name = TYPES[kind]
    found: np.dtype[Any] = np.dtype(getattr(np, name, None) or getattr(ml_dtypes, name))
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A safetensors file with a tensor of each type, of each packed one, and without dimensions."""
    path = tmp_path_factory.mktemp("interop") / "model.safetensors"
    shapes: dict[str, tuple[str, sf.Shape]] = {
        kind: (kind.upper(), (2, 3, 4)) for kind in (*TYPES, *PACKED)
    }
    shapes |= {f"{kind} scalar": (kind.upper(), ()) for kind in TYPES}
    shapes |= {f"{kind} empty": (kind.upper(), (2, 0)) for kind in TYPES}
    widest_first = sorted(shapes.items(), key=lambda item: -sf.BITS[item[1][0]])
    path.write_bytes(sf.write(dict(widest_first)))
    return path


@pytest.fixture
def weights(path: Path) -> Iterator[Weights]:
    with open_weights(path, load="map") as w:
        yield w


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch (extra torch) is not installed")


@pytest.mark.parametrize("kind", TYPES)
def test_arrays_are_typed(weights: Weights, kind: str) -> None:
    assert {kind.lower() for kind in sf.BITS} == {*TYPES, *PACKED}
    tensor = weights.tensors[kind]
    array = tensor.as_array()
    assert array.dtype == dtype_of(kind)
    assert array.shape == tensor.shape == (2, 3, 4)
    assert array.ctypes.data == tensor.address
    assert not array.flags.writeable
    assert array.tobytes() == ctypes.string_at(tensor.address, tensor.nbytes)
    assert weights.tensors[f"{kind} scalar"].as_array().shape == ()
    # Old consumers, which lack a read-only flag, get no read-only memory.
    with pytest.raises(BufferError, match="readonly"):
        tensor.__dlpack__()
    assert tensor.__dlpack_device__() == (1, 0)
    if kind not in OF_ML_DTYPES:  # NumPy takes it without a copy
        array = np.from_dlpack(tensor)
        assert (array.dtype, array.ctypes.data) == (dtype_of(kind), tensor.address)
        assert not array.flags.writeable


def test_types_that_dlpack_lacks_are_refused() -> None:
    with pytest.raises(BufferError, match="DLPack"):
        dlpack.export(np.zeros(2, ml_dtypes.int4), max_version=(1, 0))


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_torch_takes_it_without_a_copy(weights: Weights, torch: Any, kind: str) -> None:
    tensor = weights.tensors[kind]
    theirs = torch.from_dlpack(tensor)
    assert theirs.dtype == getattr(torch, TYPES[kind])
    assert tuple(theirs.shape) == tensor.shape
    assert theirs.data_ptr() == torch.from_dlpack(tensor.as_array()).data_ptr() == tensor.address
    assert theirs.is_contiguous()
    assert bytes(theirs.view(torch.uint8).flatten().tolist()) == tensor.as_array().tobytes()
    assert torch.from_dlpack(weights.tensors[f"{kind} scalar"]).shape == ()
    assert torch.from_dlpack(weights.tensors[f"{kind} empty"]).shape == (2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "f32"])
def test_torch_copies_when_it_is_asked_to(weights: Weights, torch: Any, kind: str) -> None:
    tensor = weights.tensors[kind]
    copy = torch.from_dlpack(tensor, copy=True)
    assert copy.dtype == getattr(torch, TYPES[kind])
    assert copy.data_ptr() != tensor.address
    copy.zero_()
    legacy = torch.from_dlpack(tensor.__dlpack__(copy=True))
    assert legacy.dtype == getattr(torch, TYPES[kind])
    assert torch.equal(legacy.view(torch.uint8), torch.from_dlpack(tensor).view(torch.uint8))
    assert tensor.as_array().tobytes() != bytes(tensor.nbytes)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["map", "copy"])
def test_torch_keeps_the_memory(path: Path, torch: Any, mode: Load) -> None:
    w = open_weights(path, load=mode)
    expected = w.tensors["bf16"].as_array().tobytes()
    theirs = torch.from_dlpack(w.tensors["bf16"])
    with pytest.raises(BufferError):
        w.close()
    with w:
        pass
    assert bytes(theirs.view(torch.uint8).flatten().tolist()) == expected
    assert w.closed
    del theirs
    gc.collect()


@pytest.mark.slow
def test_blocks_are_bytes_in_torch(tmp_path: Path, torch: Any) -> None:
    (tmp_path / "file.gguf").write_bytes(gf.everything())
    with open_weights(tmp_path / "file.gguf") as w:
        tensor = w.tensors["one"]  # of q8_0
        theirs = torch.from_dlpack(tensor)
        assert (theirs.dtype, tuple(theirs.shape)) == (torch.uint8, (68,))
        assert theirs.data_ptr() == tensor.address


@pytest.mark.slow
def test_torch_writes_to_mapped_pages_at_its_peril(path: Path, torch: Any, run_python: Any) -> None:
    """Torch has no read-only tensors; read-only pages protect the file."""
    before = path.read_bytes()
    answer = run_python(
        """
        import os
        import torch
        from unimem.weights.opened import open_weights
        with open_weights(os.environ["MODEL"], load="map") as w:
            torch.from_dlpack(w.tensors["f32"]).zero_()
        """,
        MODEL=str(path),
    )
    assert (answer.returncode, path.read_bytes()) == (-signal.SIGSEGV, before)
