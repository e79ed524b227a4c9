"""An opened model: its figures, how long it lives, and what stays after it."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")

from support.files.weight_bytes import LOADS, n_descriptors
from support.project.checkout import STORIES, needs_stories
from unimem._core.status import ledger
from unimem.errors import ClosedError
from unimem.weights.opened import Weights, open_weights

pytestmark = pytest.mark.usefixtures("gives_memory_back", "leaves_no_descriptor")


def n_mappings() -> dict[str, int]:
    return {name: row["n_mappings"] for name, row in ledger().items()}


def test_figures(weights: Weights, path: Path) -> None:
    assert weights.by_type() == {"f32": 4, "q8_0": 68, "f16": 24}
    assert (weights.nbytes, weights.mapped_bytes) == (96, path.stat().st_size)
    assert weights.files == (str(path),)
    for text in (str(path), "4 tensors", "q8_0"):
        assert text in repr(weights)


def test_mapping_is_in_the_ledger(path: Path) -> None:
    gc.collect()
    before, fds = ledger()["weights"], n_descriptors()
    with open_weights(path):
        assert n_descriptors() == fds
        during = ledger()["weights"]
        assert during["n_mappings"] == before["n_mappings"] + 1
        assert during["mapped_bytes"] >= before["mapped_bytes"] + path.stat().st_size


@needs_stories
def test_a_real_model() -> None:
    with open_weights(STORIES) as w:
        assert w.metadata["general.architecture"] == "llama"
        tokens = w.metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list)
        embedding = w.tensors["token_embd.weight"]
        assert embedding.shape[0] == len(tokens)
        assert np.isfinite(embedding.as_array()).all()


@pytest.mark.parametrize("load", LOADS)
def test_close_is_refused_under_live_views(path: Path, load: Any) -> None:
    w = open_weights(path, load=load)
    array = w.tensors["four"].as_array()
    part = array[0]
    del array
    with pytest.raises(BufferError, match="live users"):
        w.close()
    assert w.tensors["one"].as_array().size == 68  # nothing was closed
    del part
    w.close()
    w.close()
    assert w.closed


def test_use_after_close(path: Path) -> None:
    w = open_weights(path)
    tensor, metadata, tensors = w.tensors["four"], w.metadata, w.tensors
    w.close()
    names = ("metadata", "tensors", "nbytes", "mapped_bytes", "blocks", "fingerprint")
    uses: list[Callable[[], object]] = [
        *(lambda name=name: getattr(w, name) for name in names),
        w.residency,
        w.warm,
        w.lock,
        w.evict,
        w.content_hash,
        w.by_type,
        w.__enter__,
        tensor.dequantize,
        tensor.as_array,
        tensors["one"].as_array,
        lambda: tensor.address,
        lambda: metadata["general.architecture"],  # the copy of the header is given back, too
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="closed"):
            use()
    assert "closed" in repr(w)
    # Decoded values stay.
    assert tensor.shape == (2, 1, 3, 2)
    assert tensors["four"] == tensor
    assert list(metadata)


@pytest.mark.parametrize("load", LOADS)
def test_leaving_never_raises_and_views_stay_readable(path: Path, load: Any) -> None:
    before = n_mappings()
    with open_weights(path, load=load) as w:
        array = w.tensors["one"].as_array()
        expected = array.tobytes()
    assert w.closed
    assert n_mappings() == before | {"weights": before["weights"] + 1}
    assert array.tobytes() == expected
    del array
    assert n_mappings() == before


def test_collected_while_open_warns_and_gives_the_memory_back(path: Path) -> None:
    before = n_mappings()
    w = open_weights(path)
    assert w.tensors["four"].shape
    assert w.metadata["strings"]
    with pytest.warns(ResourceWarning, match="unclosed"):
        del w  # at once: there is no cycle that would wait for the collector
    assert n_mappings() == before


def test_weights_do_not_pickle(weights: Weights) -> None:
    with pytest.raises(TypeError, match="open the file"):
        pickle.dumps(weights)
