"""The nodes that have the kernel read mapped weights: what they ask for, and nothing else."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.models import decoders  # noqa: F401 - skips where something is missing
from unimem._core.block import Block
from unimem.backends import ggml
from unimem.engine.advice_op import FileAdvice, experts_address, layer_address

N, PAGES = 8, 4  # experts of as many pages
EXPERT = PAGES * mmap.PAGESIZE


@pytest.fixture
def block(tmp_path: Path) -> Iterator[Block]:
    """A mapped file that is not in the page cache."""
    path = tmp_path / "experts"
    path.write_bytes(os.urandom(2 * N * EXPERT))
    with open(path, "r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with Block._map_fd(file.fileno(), 0, 2 * N * EXPERT, "r", str(path)) as block:
            if block._resident_range(0, block.nbytes):
                pytest.skip("this file system keeps its files in memory")
            yield block


def compute(ids: list[list[int]], function: int, data: int) -> None:
    """Compute a node over the numbers of chosen experts."""
    memory = ctypes.create_string_buffer(1 << 16)
    context = ggml.new_context(-(-ctypes.addressof(memory) // 64) * 64, 1 << 15)
    chosen = np.array(ids, np.int32)
    tensor = ggml.new_tensor(context, ggml.I32, *chosen.shape[::-1])
    node = ggml.map_custom1_inplace(context, tensor, function, 1, data)
    for header in (tensor, node):
        ggml.Tensor.at(header).data = chosen.ctypes.data
    graph = ggml.new_graph(context, 8)
    ggml.expand(graph, node)
    plan = ctypes.create_string_buffer(ggml.PLAN_BYTES)
    ggml.plan(ctypes.addressof(plan), graph, 1)
    assert ggml.compute(graph, ctypes.addressof(plan), 1) == 0
    np.testing.assert_array_equal(chosen, ids)
    ggml.free(context)


def in_cache(block: Block) -> set[int]:
    """The numbers of experts in the page cache; of the second tensor, from N on."""
    return {i for i in range(2 * N) if block._resident_range(i * EXPERT, EXPERT) == EXPERT}


def wait_for(block: Block, wanted: set[int]) -> None:
    end = time.monotonic() + 20
    while not wanted <= in_cache(block) and time.monotonic() < end:
        time.sleep(0.01)
    assert in_cache(block) == wanted


def test_chosen_experts_are_read(block: Block) -> None:
    half = N * EXPERT
    advice = FileAdvice([(block, 0, half), (block, half, half)], N)
    compute([[2, 5]], experts_address, advice.address)
    wait_for(block, {2, 5, N + 2, N + 5})


def test_a_batch_has_all_experts_read(block: Block) -> None:
    advice = FileAdvice([(block, 0, N * EXPERT)], N)
    compute([[0, 1]] * N, experts_address, advice.address)
    wait_for(block, set(range(N)))


def test_a_layer_is_read_whatever_the_values_are(block: Block) -> None:
    advice = FileAdvice([(block, EXPERT, EXPERT), (block, 4 * EXPERT, 2 * EXPERT)])
    compute([[7]], layer_address, advice.address)
    wait_for(block, {1, 4, 5})
