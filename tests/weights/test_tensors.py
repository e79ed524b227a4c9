"""Metadata, tensors and fingerprints of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.files import gguf_files as gf
from support.models.make import TINY, write_model
from unimem.errors import ClosedError
from unimem.weights.opened import Weights, open_weights

pytestmark = pytest.mark.usefixtures("gives_memory_back", "leaves_no_descriptor")


def test_weights_are_a_mapping_of_their_tensors(weights: Weights) -> None:
    assert isinstance(weights, Mapping)
    assert list(weights) == list(weights.tensors)
    assert len(weights) == 4
    assert weights["one"] == weights.tensors["one"]
    assert dict(weights.items()) == dict(weights.tensors)
    assert ("one" in weights, "none" in weights, weights.get("none")) == (True, False, None)
    with pytest.raises(KeyError, match=r"none.*tensors"):
        weights["none"]
    with open_weights(weights.files[0]) as same:
        assert weights == weights  # noqa: PLR0124 - and no other
        assert weights != same
        assert len({weights, same}) == 2
    weights.close()
    assert weights, "true, and neither empty nor closed to this"
    for use in (lambda: len(weights), lambda: list(weights), lambda: "one" in weights):
        with pytest.raises(ClosedError):
            use()


def test_metadata_and_tensors_are_read_only_mappings(weights: Weights) -> None:
    metadata: Any = weights.metadata
    tensors: Any = weights.tensors
    assert metadata["general.architecture"] == "none"
    assert len(metadata) == len(list(metadata)) == 5 + 2 * len(gf.CODES)
    assert list(tensors) == ["scalar", "one", "empty", "four"]
    assert tensors["one"] == tensors["one"]
    for mapping, text in ((metadata, "metadata"), (tensors, "tensors")):
        assert mapping.get("missing") is None
        assert "missing" not in mapping
        assert text in repr(mapping)
        with pytest.raises(KeyError, match=f"missing.*{text}"):
            mapping["missing"]
        with pytest.raises(TypeError):
            mapping["one"] = 1
        with pytest.raises(TypeError):
            del mapping["one"]
    with pytest.raises(ValueError, match="read-only"):
        metadata[f"array.{gf.UINT32}"][0] = 1


def test_tensor(weights: Weights, path: Path) -> None:
    four = weights.tensors["four"]
    assert (four.name, four.type, four.ggml_type) == ("four", "f16", gf.F16)
    assert (four.ne, four.shape) == ((2, 3, 1, 2), (2, 1, 3, 2))
    assert four.nbytes == 24
    assert four.offset % 64 == 0
    assert four.file == str(path)
    assert four.address == weights.blocks[0].address + four.offset
    assert four.as_array().tobytes() == path.read_bytes()[four.offset : four.offset + 24]
    with pytest.raises(AttributeError):
        four.offset = 0  # type: ignore[misc]
    assert "four" in repr(four)


def test_arrays_are_views_of_one_mapping(weights: Weights) -> None:
    for tensor in weights.tensors.values():
        array = tensor.as_array()
        assert array.ctypes.data == tensor.address or array.size == 0
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            array.flags.writeable = True
    one = weights.tensors["one"]  # whose blocks come as rows of bytes
    assert (one.shape, one.as_array().shape) == ((64,), (68,))
    assert one.as_array().dtype == np.uint8


def test_numpy_takes_a_tensor(weights: Weights) -> None:
    four, one = weights.tensors["four"], weights.tensors["one"]
    array = np.asarray(four)
    assert (array.ctypes.data, array.dtype.name, array.shape) == (
        four.address,
        "float16",
        four.shape,
    )
    assert not array.flags.writeable
    assert np.asarray(four, "float16", copy=False).ctypes.data == four.address
    assert np.shares_memory(np.asarray(one), one.as_array())  # bytes, as as_array gives them
    for copied in (np.array(four), np.asarray(four, "float32")):
        assert copied.flags.writeable
        assert np.array_equal(copied, array)
    with pytest.raises(ValueError, match="'four': expected dtype float16 without a copy"):
        np.asarray(four, "float32", copy=False)
    with pytest.raises(TypeError, match=r"no type q8_0.*dequantize\(\) gives float32"):
        np.asarray(one, "float32")
    assert np.array_equal(np.negative(four), -array)


def test_fingerprint_is_of_header_and_size(path: Path, tmp_path: Path) -> None:
    def fingerprint(raw: bytes) -> str:
        (tmp_path / "other.gguf").write_bytes(raw)
        with open_weights(tmp_path / "other.gguf") as w:
            return w.fingerprint

    raw = path.read_bytes()
    with open_weights(path) as w:
        first = w.fingerprint
    assert (len(first), fingerprint(raw)) == (32, first)
    assert fingerprint(raw[:-1] + b"\xff") == first  # data is not read
    assert fingerprint(raw + b"\0") != first
    assert fingerprint(raw.replace(b"strings", b"Strings")) != first


def test_the_fingerprint_is_of_all_parts(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf (extra test) writes the models")
    parts = gf.split(write_model(tmp_path / "m.gguf", shape=TINY, kind="q8_0"), 8)
    with open_weights(parts[0]) as weights:
        first = weights.fingerprint
    with parts[-1].open("ab") as file:
        file.write(b"\0")
    with open_weights(parts[0]) as weights:
        assert weights.fingerprint != first
        assert len(weights.fingerprint) == 32
