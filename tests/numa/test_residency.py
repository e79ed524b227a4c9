"""Which node each tensor lies on, held against move_pages."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

import gguf_files as g
import unimem as um
from numa.books import node_bytes, page_nodes
from unimem.system.placement import Pages
from unimem.weights.opened import Weights

MB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
SIZES = (100, 3 * MB, 5000, 2 * MB + 4, 40_000, 12)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors, offset = [], 0
    for i, nbytes in enumerate(SIZES):
        tensors.append(g.tensor(f"tensor {i}", (nbytes // 4,), g.F32, offset))
        offset += -(-nbytes // 32) * 32
    path = tmp_path / "model.gguf"
    path.write_bytes(g.with_data(g.head(len(SIZES), 0), *tensors, nbytes=offset)[0])
    return path


def check_each_tensor(weights: Weights) -> None:
    look = weights.residency()
    for tensor in weights.tensors.values():
        first = tensor.address // PAGE * PAGE
        nodes = page_nodes(first, tensor.address + tensor.nbytes - first, PAGE)
        expected: Counter[int] = Counter()
        for i, node in enumerate(nodes.tolist()):
            low, high = first + i * PAGE, first + (i + 1) * PAGE
            inside = min(high, tensor.address + tensor.nbytes) - max(low, tensor.address)
            expected[node] += inside
        part = look.tensors[tensor.name]
        assert {node: nbytes for node, nbytes in part.nodes.items() if nbytes} == dict(expected)
        assert part.mapped_bytes == part.nbytes == tensor.nbytes


@pytest.mark.parametrize("pages", ["4k", "thp", "2m"])
@pytest.mark.parametrize("numa", ["interleave:0,1", "bind:2"])
def test_each_tensor_of_a_copy(model: Path, pages: Pages, numa: str) -> None:
    with um.open_weights(model, load="copy", pages=pages, numa=numa, strict=True) as weights:
        check_each_tensor(weights)
        nodes = {node for node, nbytes in weights.residency().nodes.items() if nbytes}
        assert nodes == ({2} if numa == "bind:2" else {0, 1})


def test_each_tensor_of_a_mapped_file(model: Path) -> None:
    with um.open_weights(model, load="map", warm=True) as weights:
        (block,) = weights.blocks
        check_each_tensor(weights)
        kernel, ours = node_bytes(block.address, block.nbytes), weights.residency().nodes
        # The kernel counts the file's last page whole.
        assert set(kernel) == {node for node, nbytes in ours.items() if nbytes}
        assert sum(kernel.values()) - sum(ours.values()) == -block.nbytes % PAGE
