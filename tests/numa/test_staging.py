"""Staged models on several NUMA nodes: where their pages are, whoever maps them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from numa.books import node_bytes

MB = 1 << 20
TINY = Path(um.__file__).parent / "engine" / "models" / "tiny.gguf"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    shutil.copy(TINY, path)
    os.truncate(path, 8 * MB)
    return path


@pytest.mark.parametrize(
    ("backing", "pages"),
    [("tmpfs", "4k"), ("tmpfs", "thp"), ("memfd", "4k"), ("memfd", "auto"), ("shm", "auto")],
)
@pytest.mark.parametrize(
    ("numa", "expected"),
    [
        ("bind:1", {1: 8 * MB}),
        ("bind:2", {2: 8 * MB}),  # which is memory alone
        ("interleave:0,1", {0: 4 * MB, 1: 4 * MB}),
        ("weighted:0,2", {0: 4 * MB, 2: 4 * MB}),
        ("preferred:1", {1: 8 * MB}),
    ],
)
def test_pages_are_where_they_were_asked_for(
    backing: Any, pages: Any, numa: str, expected: dict[int, int], model: Path
) -> None:
    with um.stage(model, backing=backing, pages=pages, numa=numa, strict=True) as staged:
        assert staged.granted.nodes == expected
        with um.Block.map(staged.path) as block:
            block.warm()
            assert node_bytes(block.address, block.nbytes) == expected
