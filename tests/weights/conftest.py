"""A small GGUF file with every type of metadata, and what an opened model may leave open."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.files import gguf_files as gf
from support.files.weight_bytes import n_descriptors
from unimem.weights.opened import Weights, open_weights


@pytest.fixture
def leaves_no_descriptor() -> Iterator[None]:
    gc.collect()  # an earlier test may have left some to the collector
    before = n_descriptors()
    yield
    assert n_descriptors() == before


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "file.gguf"
    file.write_bytes(gf.everything())
    return file


@pytest.fixture
def weights(path: Path) -> Iterator[Weights]:
    with open_weights(path) as w:
        yield w
