"""Grids of a GPU: where cells and free list lie, what they cost.

The behaviour of all grids is tested in tests/_core/test_grid.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.gpu.host_gpu import HostDriver, numpy_of
from unimem._core.status import device_ledger, ledger

pytestmark = pytest.mark.usefixtures("gives_memory_back")


@pytest.mark.parametrize(
    ("cell_bytes", "n_cells", "nbytes"),
    [(1, 1, 64), (64, 10, 640), (100, 3, 384), (4096, 5, 20480)],
)
def test_the_device_holds_the_cells_and_nothing_else(
    cuda: Any, host_gpu: HostDriver, cell_bytes: int, n_cells: int, nbytes: int
) -> None:
    with cuda.Grid(cell_bytes, n_cells) as grid:
        assert list(host_gpu.allocated.values()) == [nbytes]
        assert grid.tape.total_bytes == grid.tape.used_bytes == nbytes
        cells = [grid.take() for _ in range(n_cells)]
        for cell in cells:
            numpy_of(cell.as_array())[:] = 0xFF  # no link lies here
        last = max(cell.address for cell in cells)
        assert last + -(-cell_bytes // 64) * 64 == grid.tape.block.address + nbytes
        for cell in cells:
            grid.give(cell)
        assert len({grid.take().id for _ in range(n_cells)}) == n_cells
        assert host_gpu.calls == []


def test_placement_and_category(cuda: Any) -> None:
    with cuda.Grid(1000, 4, name="g", category="staging") as grid:
        assert device_ledger()[("cuda:0", "staging")]["nbytes"] == 4096
        grid.take()
        assert repr(grid).startswith("Grid('g', 3 of 4 cells of 1000 bytes free, device, 4.0 KiB")
    before = ledger()["scratch"]["mapped_bytes"]
    with cuda.Grid(1000, 4, pinned=True, pages="4k") as grid:
        assert ledger()["scratch"]["mapped_bytes"] == before + 4096
        cell = grid.take()
        offset = cell.address - grid.tape.block.address
        numpy_of(cell.as_array("float16", 500))[:] = 2
        host = grid.tape.block.host.as_array("float16", 500, offset)
        assert np.all(host == 2)
        del host
