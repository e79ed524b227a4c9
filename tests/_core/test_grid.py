"""Grids: every cell is somebody's or free, whoever takes and gives in whatever order.

What holds for grids of main memory and of a GPU's is tested for both.
"""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
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
from devices import Device
from tiers import examples
from unimem._core.status import ledger

pytestmark = pytest.mark.usefixtures("gives_memory_back")


@pytest.fixture
def grid(device: Device) -> Iterator[Any]:
    with device.package.Grid(100, 4, name="g") as grid:
        yield grid


def test_cells_are_aligned_and_apart(device: Device, grid: Any) -> None:
    cells = [grid.take() for _ in range(4)]
    assert sorted(cell.id for cell in cells) == [0, 1, 2, 3]
    addresses = sorted(cell.address for cell in cells)
    assert [address % 64 for address in addresses] == [0] * 4
    assert [b - a for a, b in itertools.pairwise(addresses)] == [128] * 3
    assert all(grid.tape.owns(cell.address + 99) for cell in cells)
    assert [cell.nbytes for cell in cells] == [100] * 4
    for n, cell in enumerate(cells):
        device.seen(cell.as_array())[:] = n
    for n, cell in enumerate(cells):
        assert (device.seen(cell.as_array()) == n).all()


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
    uses: list[Callable[[], Any]] = [
        lambda: cell.address,
        lambda: cell.nbytes,
        cell.as_array,
        lambda: grid.give(cell),
    ]
    for use in uses:
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
        assert grid.n_available == 4
        assert other.n_available == 3
        for wrong in (None, 0):
            with pytest.raises(TypeError):
                grid.give(wrong)


def test_arrays_of_a_cell(device: Device, grid: Any) -> None:
    cell = grid.take()
    assert cell.as_array().shape == (100,)
    assert cell.as_array("float32").shape == (25,)
    assert cell.as_array("float64").shape == (12,)
    assert cell.as_array("float32", (5, 5)).shape == (5, 5)
    assert cell.as_array(np.float16, 50).nbytes == 100
    assert device.address_of(cell.as_array("float64", 3)) == cell.address
    assert isinstance(cell.as_array(), type(grid.tape.take(0)))
    for shape in (26, (5, 6), 2**40):
        with pytest.raises(ValueError, match="bytes"):
            cell.as_array("float32", shape)
    last = [grid.take() for _ in range(3)][-1]
    for shape in (26, -1, (2**40, 2**40)):
        with pytest.raises(ValueError):  # noqa: PT011 - by what it exceeds depends on the cell
            last.as_array("float32", shape)
    with pytest.raises(ValueError, match="float16"):
        cell.as_array("f16")


@pytest.mark.parametrize(
    ("cell_bytes", "n_cells", "error"),
    [
        (0, 1, ValueError),
        (-1, 1, ValueError),
        (1, 0, ValueError),
        (1, -1, ValueError),
        (1, 2**32 - 2, ValueError),
        (2**70, 1, ValueError),
        (1, 2**70, ValueError),
        (2**60, 2**20, ValueError),
        (2**40, 2**20, MemoryError),
        (1.5, 1, TypeError),
        (1, 1.5, TypeError),
    ],
)
def test_a_refused_grid_leaves_nothing(
    device: Device, cell_bytes: Any, n_cells: Any, error: type[Exception]
) -> None:
    before = device.held()
    with pytest.raises(error):
        device.package.Grid(cell_bytes, n_cells)
    assert device.held() == before


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
    n_threads, n_rounds = 6, 400
    shared = device.package.Grid(16, 20)
    errors: list[BaseException] = []
    start = threading.Barrier(n_threads)

    def work(n: int) -> None:
        rng = random.Random(n)
        held: list[um.Cell] = []
        try:
            start.wait()
            for _ in range(n_rounds):
                if held and rng.random() < 0.5:
                    cell = held.pop(rng.randrange(len(held)))
                    assert (device.seen(cell.as_array()) == n).all()
                    shared.give(cell)
                else:
                    try:
                        cell = shared.take()
                    except um.GridFull:
                        continue
                    device.seen(cell.as_array())[:] = n
                    held.append(cell)
            for cell in held:
                assert (device.seen(cell.as_array()) == n).all()
                shared.give(cell)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with shared:
            threads = [threading.Thread(target=work, args=(n,)) for n in range(n_threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert errors == []
            assert shared.n_available == 20
            assert sorted(shared.take().id for _ in range(20)) == list(range(20))
    finally:
        sys.setswitchinterval(interval)


def test_views_keep_the_memory(device: Device) -> None:
    grid = device.package.Grid(64, 2)
    cell = grid.take()
    address, view = cell.address, cell.as_array("float32")[2:]
    with pytest.raises(BufferError, match="live"):
        grid.close()
    assert not grid.closed
    with grid:
        device.seen(view)[:] = 5
    assert grid.closed
    assert device.is_there(address)
    assert (device.seen(view) == 5).all()
    del view
    gc.collect()
    assert not device.is_there(address)


def test_a_closed_grid_says_so(device: Device) -> None:
    grid = device.package.Grid(64, 2, name="mine")
    cell, other = grid.take(), grid.take()
    grid.close()
    grid.close()
    uses: list[Callable[[], Any]] = [
        grid.take,
        lambda: grid.give(cell),
        lambda: cell.address,
        cell.as_array,
        grid.__enter__,
    ]
    for use in uses:
        with pytest.raises(um.ClosedError, match="mine"):
            use()
    assert repr(grid) == "Grid('mine', closed)"
    assert repr(other) == "Cell(1, 64)"


def test_a_grid_that_is_dropped_open_warns_and_gives_the_memory_back(device: Device) -> None:
    grid = device.package.Grid(64, 2, name="forgotten")
    cell = grid.take()
    address = cell.address
    del grid
    gc.collect()
    assert device.is_there(address)  # the cell holds it
    device.seen(cell.as_array())[:] = 1
    with pytest.warns(ResourceWarning, match="forgotten") as caught:
        del cell
    assert len(caught) == 1
    caught.clear()  # the warning holds the tape
    gc.collect()
    assert not device.is_there(address)


@pytest.mark.parametrize("use", [pickle.dumps, copy.copy, copy.deepcopy])
def test_neither_grid_nor_cell_pickles(grid: Any, use: Callable[[Any], Any]) -> None:
    for thing in (grid, grid.take()):
        with pytest.raises(TypeError, match="memory of this process"):
            use(thing)


def test_a_grid_is_made_once(device: Device, grid: Any) -> None:
    cell, before = grid.take(), (grid.n_cells, grid.n_available - 1, grid.tape)
    with pytest.raises(RuntimeError, match="the Grid is made already"):
        grid.__init__(64, 8)
    assert (grid.n_cells, grid.n_available - 1, grid.tape) == before
    grid.give(cell)


def test_a_grid_that_was_never_made_is_closed(device: Device) -> None:
    grid = device.package.Grid.__new__(device.package.Grid)
    with pytest.raises(ValueError, match="cell_bytes"):
        grid.__init__(0, 8)
    assert grid.closed
    assert repr(grid) == "Grid(closed)"
    for call in (grid.take, grid.__enter__):
        with pytest.raises(um.ClosedError, match="never made"):
            call()
    grid.close()
    grid.__exit__()


def test_repr_placement_and_category() -> None:
    before = ledger()["staging"]["n_mappings"]
    with um.Grid(1000, 4, name="g", category="staging", pages="4k", warm=True) as grid:
        assert ledger()["staging"]["n_mappings"] == before + 1
        cell = grid.take()
        assert repr(cell) == "Cell(0, 1000)"
        assert repr(grid) == ("Grid('g', 3 of 4 cells of 1000 bytes free, 4k, 8.0 KiB resident)")


def test_taking_and_giving_make_no_system_call_and_no_allocation(device: Device, grid: Any) -> None:
    before = device.costs()
    for _ in range(50):
        cell = grid.take()
        device.seen(cell.as_array("float32", (5, 5)))[:] = 1
        grid.give(cell)
    assert device.costs() == before
