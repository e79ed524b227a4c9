"""What an opened model file promises: no copy, read-only, views keep it, errors that say why."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gguf_files as gf
from project import STORIES
from unimem._core.status import ledger
from unimem.errors import ClosedError, GGUFError
from unimem.weights.opened import Weights, open_weights


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "file.gguf"
    file.write_bytes(gf.everything())
    return file


@pytest.fixture
def weights(path: Path) -> Iterator[Weights]:
    with open_weights(path) as w:
        yield w


# ---- what it holds ----


def test_metadata_is_a_read_only_mapping(weights: Weights) -> None:
    metadata: Any = weights.metadata
    assert metadata["general.architecture"] == "none"
    assert metadata.get("missing") is None
    assert "missing" not in metadata
    assert len(metadata) == len(list(metadata)) == 5 + 2 * len(gf.CODES)
    with pytest.raises(KeyError, match="missing"):
        metadata["missing"]
    with pytest.raises(TypeError):
        metadata["general.architecture"] = "other"
    numbers = metadata[f"array.{gf.UINT32}"]
    with pytest.raises(ValueError, match="read-only"):
        numbers[0] = 1


def test_tensors_are_a_read_only_mapping(weights: Weights) -> None:
    tensors: Any = weights.tensors
    assert list(tensors) == ["scalar", "one", "empty", "four"]
    assert "missing" not in tensors
    with pytest.raises(KeyError, match="missing"):
        tensors["missing"]
    with pytest.raises(TypeError):
        del tensors["one"]
    assert tensors["one"] == tensors["one"]


def test_tensor(weights: Weights, path: Path) -> None:
    four = weights.tensors["four"]
    assert (four.name, four.type, four.ggml_type) == ("four", "f16", gf.F16)
    assert (four.ne, four.shape) == ((2, 3, 1, 2), (2, 1, 3, 2))
    assert four.nbytes == 24
    assert four.offset % 64 == 0
    assert four.file == str(path)
    assert four.address == weights.blocks[0].address + four.offset
    raw = path.read_bytes()
    assert four.as_array().tobytes() == raw[four.offset : four.offset + 24]
    with pytest.raises(AttributeError):
        four.offset = 0  # type: ignore[misc]
    assert "four" in repr(four)


def test_arrays_are_views_of_one_mapping(weights: Weights) -> None:
    for tensor in weights.tensors.values():
        array = tensor.as_array()
        assert array.ctypes.data == tensor.address or array.size == 0
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            array.flags.writeable = True


def test_blocks_come_as_rows_of_bytes(weights: Weights) -> None:
    one = weights.tensors["one"]
    array = one.as_array()
    assert (one.shape, array.shape) == ((64,), (68,))
    assert array.dtype == np.uint8


def test_figures(weights: Weights, path: Path) -> None:
    assert weights.by_type() == {"f32": 4, "q8_0": 68, "f16": 24}
    assert weights.nbytes == 96
    assert weights.mapped_bytes == path.stat().st_size
    assert weights.files == (str(path),)
    for text in (str(path), "4 tensors", "q8_0"):
        assert text in repr(weights)


def test_mapping_is_in_the_ledger(path: Path) -> None:
    before = ledger()["weights"]
    with open_weights(path):
        during = ledger()["weights"]
        assert during["n_mappings"] == before["n_mappings"] + 1
        assert during["mapped_bytes"] >= before["mapped_bytes"] + path.stat().st_size
    assert ledger()["weights"]["mapped_bytes"] == before["mapped_bytes"]


def test_fingerprint_is_of_header_and_size(path: Path, tmp_path: Path) -> None:
    def fingerprint(raw: bytes) -> str:
        other = tmp_path / "other.gguf"
        other.write_bytes(raw)
        with open_weights(other) as w:
            return w.fingerprint

    raw = path.read_bytes()
    with open_weights(path) as w:
        first = w.fingerprint
        assert first == w.fingerprint
    assert len(first) == 32
    assert fingerprint(raw) == first
    assert fingerprint(raw[:-1] + b"\xff") == first  # data is not read
    assert fingerprint(raw + b"\0") != first
    assert fingerprint(raw.replace(b"strings", b"Strings")) != first


def test_a_real_model() -> None:
    if not STORIES.exists():
        pytest.skip(f"{STORIES.name} is not on this machine")
    with open_weights(STORIES) as w:
        assert w.metadata["general.architecture"] == "llama"
        tokens = w.metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list)
        embedding = w.tensors["token_embd.weight"]
        assert embedding.shape[0] == len(tokens)
        assert np.isfinite(embedding.as_array()).all()


# ---- lifetime ----


def test_close_is_refused_under_live_views(path: Path) -> None:
    w = open_weights(path)
    array = w.tensors["four"].as_array()
    part = array[0]
    del array
    with pytest.raises(BufferError, match="live users"):
        w.close()
    assert not w.closed
    assert w.tensors["one"].as_array().size == 68  # nothing was closed
    del part
    w.close()
    w.close()
    assert w.closed


def test_use_after_close(path: Path) -> None:
    w = open_weights(path)
    tensor, metadata, tensors = w.tensors["four"], w.metadata, w.tensors
    w.close()
    for use in (
        lambda: w.metadata,
        lambda: w.tensors,
        lambda: w.nbytes,
        lambda: w.mapped_bytes,
        lambda: w.blocks,
        w.residency,
        w.warm,
        w.lock,
        w.evict,
        w.content_hash,
        tensor.dequantize,
        lambda: w.fingerprint,
        w.by_type,
        w.__enter__,
        tensor.as_array,
        lambda: tensor.address,
        tensors["one"].as_array,
        lambda: metadata["general.architecture"],  # the copy of the header is given back, too
    ):
        with pytest.raises(ClosedError, match="closed"):
            use()
    assert "closed" in repr(w)
    # What was decoded stays.
    assert tensor.shape == (2, 1, 3, 2)
    assert tensors["four"] == tensor
    assert list(metadata)


def test_leaving_never_raises_and_views_stay_readable(path: Path) -> None:
    before = ledger()["weights"]["n_mappings"]
    with open_weights(path) as w:
        array = w.tensors["one"].as_array()
        expected = array.tobytes()
    assert w.closed
    with pytest.raises(ClosedError):
        _ = w.tensors
    assert ledger()["weights"]["n_mappings"] == before + 1
    assert array.tobytes() == expected
    del array
    assert ledger()["weights"]["n_mappings"] == before


def test_collected_while_open_warns_and_gives_the_memory_back(path: Path) -> None:
    before = {name: row["n_mappings"] for name, row in ledger().items()}
    w = open_weights(path)
    assert w.tensors["four"].shape
    assert w.metadata["strings"]
    with pytest.warns(ResourceWarning, match="unclosed"):
        del w  # at once: there is no cycle that would wait for the collector
    assert {name: row["n_mappings"] for name, row in ledger().items()} == before


def test_closed_weights_are_collected_silently(path: Path) -> None:
    w = open_weights(path)
    gone = weakref.ref(w)
    w.close()
    del w
    gc.collect()
    assert gone() is None


def test_failing_to_open_leaves_nothing(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(gf.everything()[:-250])
    before = {name: row["n_mappings"] for name, row in ledger().items()}
    n_files = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(GGUFError):
            open_weights(bad)
    assert {name: row["n_mappings"] for name, row in ledger().items()} == before
    assert len(os.listdir("/proc/self/fd")) == n_files


def test_no_file_stays_open(path: Path) -> None:
    n_files = len(os.listdir("/proc/self/fd"))
    with open_weights(path):
        assert len(os.listdir("/proc/self/fd")) == n_files


def test_weights_do_not_pickle(weights: Weights) -> None:
    with pytest.raises(TypeError, match="open the file"):
        pickle.dumps(weights)


def test_metadata_survives_a_truncation_of_the_file(path: Path) -> None:
    """In a process of its own: it would die if the header were read from the mapping."""
    program = """
import os, sys
from unimem.weights.opened import open_weights
with open_weights(sys.argv[1]) as w:
    os.truncate(sys.argv[1], 0)
    values = list(w.metadata.values())
    print(len(values), w.metadata["general.architecture"], len(w.fingerprint), len(w.tensors))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(5 + 2 * len(gf.CODES)), "none", "32", "4"]
