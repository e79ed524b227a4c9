"""Grids: every cell is somebody's or free, whoever takes and gives in whatever order.

What holds for grids of main memory and of a GPU's is tested for both.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import unimem as um
from support.gpu.devices import Device
from support.processes.at_once import at_once
from support.project.tiers import examples
from unimem._core.status import ledger

pytestmark = pytest.mark.usefixtures("gives_memory_back")


@pytest.fixture
def grid(device: Device) -> Iterator[Any]:
    with device.package.Grid(100, 4, name="g") as grid:
        yield grid


def test_cells_are_aligned_and_apart(device: Device, grid: Any) -> None:
    cells = [grid.take() for _ in range(4)]
    assert {(cell.id, cell.nbytes) for cell in cells} == {(n, 100) for n in range(4)}
    addresses = sorted(cell.address for cell in cells)
    assert addresses[0] % 64 == 0
    assert [b - a for a, b in itertools.pairwise(addresses)] == [128] * 3
    assert all(grid.tape.owns(cell.address + 99) for cell in cells)
    for n, cell in enumerate(cells):
        device.seen(cell.as_array())[:] = n
    for n, cell in enumerate(cells):
        assert (device.seen(cell.as_array()) == n).all()


def test_the_size_of_a_cell_may_be_text(device: Device) -> None:
    with device.package.Grid("1K", 2) as grid:
        assert (grid.cell_bytes, grid.take().nbytes) == (1024, 1024)
    with pytest.raises(ValueError, match="cell_bytes: "):
        device.package.Grid("1 cell", 2)


def test_a_full_grid_names_the_figures(grid: Any) -> None:
    cells = [grid.take() for _ in range(4)]
    with pytest.raises(um.GridFull, match=r"'g'.*cells") as caught:
        grid.take()
    assert (caught.value.limit, caught.value.used, caught.value.asked) == (4, 4, 1)
    assert isinstance(caught.value, MemoryError)
    grid.give(cells[2])
    assert grid.take().id == 2
    assert grid.n_available == 0


def test_what_was_given_back_cannot_be_used(device: Device, grid: Any) -> None:
    cell = grid.take()
    grid.give(cell)
    for use in (lambda: cell.address, lambda: cell.nbytes, cell.as_array, lambda: grid.give(cell)):
        with pytest.raises(um.ClosedError, match="given back"):
            use()
    assert grid.n_available == 4
    assert "given back" in repr(cell)
    again = grid.take()
    assert again.id == cell.id  # the old cell object stays of no use
    with pytest.raises(um.ClosedError):
        grid.give(cell)
    assert grid.n_available == 3
    device.seen(again.as_array())[:] = 1


def test_a_cell_of_another_grid_is_refused(device: Device, grid: Any) -> None:
    with device.package.Grid(100, 4) as other:
        cell = other.take()
        with pytest.raises(ValueError, match="another grid"):
            grid.give(cell)
        assert (grid.n_available, other.n_available) == (4, 3)
    for wrong in (None, 0):
        with pytest.raises(TypeError):
            grid.give(wrong)


def test_arrays_of_a_cell(device: Device, grid: Any) -> None:
    cells = [grid.take() for _ in range(4)]
    cell = cells[0]
    for dtype, n in (("uint8", 100), ("float32", 25), ("float64", 12)):
        assert cell.as_array(dtype).shape == (n,)
    assert cell.as_array("float32", (5, 5)).shape == (5, 5)
    assert cell.as_array(np.float16, 50).nbytes == 100
    assert device.address_of(cell.as_array("float64", 3)) == cell.address
    assert isinstance(cell.as_array(), type(grid.tape.take(0)))
    for shape in (26, (5, 6), 2**40):
        with pytest.raises(ValueError, match="bytes"):
            cell.as_array("float32", shape)
    for shape in (26, -1, (2**40, 2**40)):
        with pytest.raises(ValueError):  # noqa: PT011 - by what it exceeds depends on the cell
            cells[-1].as_array("float32", shape)
    assert cell.as_array("f16").shape == (50,)


class GridAgainstModel(RuleBasedStateMachine):
    """The same calls on a grid and on a dict of what each cell holds."""

    N_CELLS = 5

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.grid = device.package.Grid(24, self.N_CELLS)
        self.taken: dict[int, tuple[um.Cell, int]] = {}
        self.given: list[um.Cell] = []
        self.count = 0

    def teardown(self) -> None:
        self.grid.close()

    @rule()
    def take(self) -> None:
        if len(self.taken) == self.N_CELLS:
            with pytest.raises(um.GridFull):
                self.grid.take()
            return
        cell = self.grid.take()
        assert cell.id not in self.taken
        self.count = (self.count + 1) % 256
        self.device.seen(cell.as_array())[:] = self.count
        self.taken[cell.id] = cell, self.count

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        cell, _ = self.taken.pop(data.draw(st.sampled_from(sorted(self.taken))))
        self.grid.give(cell)
        self.given.append(cell)

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def give_again(self, data: st.DataObject) -> None:
        with pytest.raises(um.ClosedError):
            self.grid.give(data.draw(st.sampled_from(self.given)))

    @invariant()
    def agree(self) -> None:
        assert self.grid.n_cells == self.N_CELLS
        assert self.grid.n_available == self.N_CELLS - len(self.taken)
        for cell, value in self.taken.values():
            assert (self.device.seen(cell.as_array()) == value).all()


def test_grid_against_model(device: Device) -> None:
    run_state_machine_as_test(
        partial(GridAgainstModel, device),  # type: ignore[arg-type]
        settings=settings(max_examples=examples(40), stateful_step_count=40, deadline=None),
    )


def test_threads_never_hold_the_same_cell(device: Device) -> None:
    def work(n: int) -> None:
        rng = random.Random(n)
        held: list[um.Cell] = []
        for _ in range(200):
            if held and rng.random() < 0.5:
                cell = held.pop(rng.randrange(len(held)))
                assert (device.seen(cell.as_array()) == n).all()
                shared.give(cell)
            else:
                with contextlib.suppress(um.GridFull):
                    held.append(shared.take())
                    device.seen(held[-1].as_array())[:] = n
        for cell in held:
            assert (device.seen(cell.as_array()) == n).all()
            shared.give(cell)

    with device.package.Grid(16, 20) as shared:
        at_once(6, work)
        assert shared.n_available == 20
        assert sorted(shared.take().id for _ in range(20)) == list(range(20))


def test_repr_placement_and_category() -> None:
    before = ledger()["staging"]["n_mappings"]
    with um.Grid(1000, 4, name="g", category="staging", pages="4k", warm=True) as grid:
        assert ledger()["staging"]["n_mappings"] == before + 1
        cell = grid.take()
        assert repr(cell) == "Cell(0, 1000)"
        assert repr(grid) == "Grid('g', 3 of 4 cells of 1000 bytes free, 4k, 8.0 KiB in RAM)"


def test_taking_and_giving_make_no_system_call_and_no_allocation(device: Device, grid: Any) -> None:
    before = device.costs()
    for _ in range(50):
        cell = grid.take()
        device.seen(cell.as_array("float32", (5, 5)))[:] = 1
        grid.give(cell)
    assert device.costs() == before
