"""Blocks, tapes and grids: made once, closed once, and there as long as somebody looks at them."""

from __future__ import annotations

import copy
import gc
import mmap
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import unimem as um
from support.gpu.devices import Device
from support.kernel import proc_maps
from support.kernel.os_faults import os_faults
from unimem._core.status import ledger

PAGE = mmap.PAGESIZE
KINDS = [("host", "Block"), *((d, kind) for d in ("host", "cuda") for kind in ("Tape", "Grid"))]
of_every_kind = pytest.mark.parametrize(("device", "kind"), KINDS, indirect=["device"])

pytestmark = pytest.mark.usefixtures("gives_memory_back")


def make(device: Device, kind: str, **options: Any) -> Any:
    sizes = (64, 2) if kind == "Grid" else (PAGE,)
    return getattr(device.package, kind)(*sizes, **options)


def block_of(thing: Any, kind: str) -> Any:
    return thing if kind == "Block" else thing.block if kind == "Tape" else thing.tape.block


TAKE: dict[str, Callable[[Any], Any]] = {
    "Block": lambda block: block.as_array("float32"),
    "Tape": lambda tape: tape.take(16),
    "Grid": lambda grid: grid.take().as_array("float32"),
}


@of_every_kind
def test_views_keep_the_memory(device: Device, kind: str) -> None:
    thing = make(device, kind)
    view = TAKE[kind](thing)[2:]
    address = device.address_of(view)
    # A view of CuPy's keeps the array that it was made of.
    with pytest.raises(BufferError, match="live" if device.name == "cuda" else "1 live"):
        thing.close()
    assert not thing.closed
    with thing:
        device.seen(view)[:] = 5  # nothing was closed
    assert thing.closed
    assert device.is_there(address)
    assert (device.seen(view) == 5).all()
    del view
    gc.collect()
    assert not device.is_there(address)


@of_every_kind
def test_closing_gives_the_memory_back_at_once(device: Device, kind: str) -> None:
    thing = make(device, kind)
    address = block_of(thing, kind).address
    assert device.is_there(address)
    thing.close()
    assert not device.is_there(address)
    thing.close()  # twice is no error


USES: dict[str, list[Callable[[Any], Any]]] = {
    "Block": [
        lambda b: b.__enter__(),
        lambda b: b.address,
        lambda b: b.nbytes,
        lambda b: b.requested,
        lambda b: b.granted,
        lambda b: b.as_array(),
        memoryview,
        lambda b: b.__array__(),
        lambda b: b.__dlpack__(),
        lambda b: b.__dlpack_device__(),
        lambda b: b.warm(),
        lambda b: b.verify(),
        um.Tape,
    ],
    "Tape": [
        lambda t: t.__enter__(),
        lambda t: t.take(1),
        lambda t: t.take((1, 1)),
        lambda t: t.take_bytes(1),
        lambda t: t.take_address(1),
        lambda t: t.clear(),
        lambda t: t.keep(),
        lambda t: t.mark(),
        lambda t: t.rewind(0),
        lambda t: t.frame().__enter__(),
        lambda t: t.freeze(),
        lambda t: t.thaw(),
        lambda t: t.warm(),
        lambda t: t.owns(0),
        lambda t: t.used_bytes,
        lambda t: t.available_bytes,
        lambda t: t.high_water_bytes,
        lambda t: t.block,
    ],
    "Grid": [lambda g: g.__enter__(), lambda g: g.take()],
}


@of_every_kind
def test_what_is_closed_says_so(device: Device, kind: str) -> None:
    thing = make(device, kind, name="mine")
    thing.close()
    for use in USES[kind]:
        with pytest.raises(um.ClosedError, match="mine"):
            use(thing)
    assert repr(thing) == f"{kind}('mine', closed)"


def test_cells_of_a_closed_grid_say_so(device: Device) -> None:
    grid = make(device, "Grid", name="mine")
    cell, other = grid.take(), grid.take()
    grid.close()
    uses: list[Callable[[], Any]] = [lambda: cell.address, cell.as_array, lambda: grid.give(cell)]
    for use in uses:
        with pytest.raises(um.ClosedError, match="mine"):
            use()
    assert repr(other) == "Cell(1, 64)"


@of_every_kind
def test_what_is_dropped_open_warns_and_gives_the_memory_back(device: Device, kind: str) -> None:
    thing = make(device, kind, name="forgotten")
    address = block_of(thing, kind).address
    with pytest.warns(ResourceWarning) as caught:
        del thing
    owner = "Tape" if kind == "Grid" else kind
    assert [str(w.message).partition(",")[0] for w in caught] == [f"unclosed {owner}('forgotten'"]
    caught.clear()  # the warning holds what it is about
    gc.collect()
    assert not device.is_there(address)
    closed = make(device, kind)
    closed.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del closed
        gc.collect()


def test_a_cell_holds_its_grid(device: Device) -> None:
    grid = make(device, "Grid", name="forgotten")
    cell = grid.take()
    address = cell.address
    del grid
    gc.collect()
    assert device.is_there(address)
    device.seen(cell.as_array())[:] = 1
    with pytest.warns(ResourceWarning, match="forgotten") as caught:
        del cell
    caught.clear()
    gc.collect()
    assert not device.is_there(address)


VALUES, TYPES = ValueError, TypeError
SIZES: dict[str, dict[Any, type[Exception]]] = {
    "Block": {0: VALUES, -1: VALUES, 2**70: VALUES, 2**62: MemoryError, 1.5: TYPES, "x": VALUES},
    "Tape": {0: VALUES, -1: VALUES, 1.5: TYPES, "a": VALUES},
    "Grid": {
        **dict.fromkeys([(0, 1), (-1, 1), (1, 0), (1, -1), (1, 2**32 - 2)], VALUES),
        **dict.fromkeys([(2**70, 1), (1, 2**70), (2**60, 2**20)], VALUES),
        **{(2**40, 2**20): MemoryError, (1.5, 1): TYPES, (1, 1.5): TYPES},
    },
}


@of_every_kind
def test_refused_sizes_leave_nothing(device: Device, kind: str) -> None:
    before = device.held()
    for sizes, error in SIZES[kind].items():
        with pytest.raises(error):
            getattr(device.package, kind)(*(sizes if kind == "Grid" else (sizes,)))
        assert device.held() == before


@of_every_kind
def test_it_is_made_once(device: Device, kind: str) -> None:
    with make(device, kind) as thing, make(device, "Tape") as other:
        view = TAKE[kind](thing)
        before, block = repr(thing), block_of(thing, kind)
        others = [(64, 8)] if kind == "Grid" else [(2 * PAGE,), (other.block,)]
        for arguments in others if kind != "Block" else others[:1]:
            with pytest.raises(RuntimeError, match=f"the {kind} is made already"):
                thing.__init__(*arguments)
            gc.collect()
            assert repr(thing) == before
            assert block_of(thing, kind) is block
        assert block.address == device.address_of(view)
        del view


@of_every_kind
def test_what_was_never_made_is_closed(device: Device, kind: str) -> None:
    made = getattr(device.package, kind)
    thing = made.__new__(made)
    with pytest.raises(ValueError, match="bytes"):
        thing.__init__(*((0, 8) if kind == "Grid" else (-1,)))
    assert thing.closed
    assert repr(thing).endswith("closed)")
    for use in USES[kind]:
        with pytest.raises(um.ClosedError):
            use(thing)
    thing.close()
    thing.__exit__()


@pytest.mark.parametrize("use", [pickle.dumps, copy.copy, copy.deepcopy])
@of_every_kind
def test_it_does_not_pickle(device: Device, kind: str, use: Callable[[Any], Any]) -> None:
    with make(device, kind) as thing:
        for memory in (thing, thing.take()) if kind == "Grid" else (thing,):
            with pytest.raises(TypeError, match="memory of this process"):
                use(memory)


def test_leaving_a_with_passes_exceptions_on() -> None:
    views = []

    def fail() -> None:
        with um.Block(PAGE) as block:
            views.append(block.as_array())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not views[0].any()


def test_what_cannot_be_unmapped_is_tried_again() -> None:
    """The kernel refuses at the limit of mappings; nobody could be told by what is collected."""
    before = ledger()["other"]["mapped_bytes"]
    block = um.Block(PAGE, pages="4k")
    address = block.address
    with os_faults() as faults:
        faults.arm(1)
        block.close()
        assert faults.failed == "munmap"
    assert ledger()["other"]["mapped_bytes"] == before + PAGE
    assert proc_maps.is_mapped(address)
    um.Block(PAGE, pages="4k").close()
    assert ledger()["other"]["mapped_bytes"] == before
    assert not proc_maps.is_mapped(address)
