"""Tapes: what a model in Python would do, whatever is taken, kept, rewound and frozen.

What holds for tapes of main memory and of a GPU's is tested for both.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
from collections.abc import Iterator
from functools import partial
from typing import Any

import ml_dtypes
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

PAGE = mmap.PAGESIZE
KIB = 1024


@pytest.fixture
def tape(device: Device) -> Iterator[Any]:
    with device.package.Tape(64 * KIB, name="t") as tape:
        yield tape


def figures(tape: Any) -> tuple[int, int, int, int]:
    return tape.used_bytes, tape.high_water_bytes, tape.n_takes, tape.available_bytes


# ---- taking ----


SHAPES: list[Any] = [5, (), (2, 3), [2, 3], (2, 0, 3), 0, (1,) * 64]
SHAPES += [np.int64(4), (np.int32(4), np.uint8(1)), np.array([2, 2])]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device: Device, tape: Any, shape: Any) -> None:
    array = tape.take(shape)
    assert array.shape == tuple(map(int, np.atleast_1d(shape)))
    assert array.dtype == np.float32
    assert array.flags.c_contiguous
    assert device.seen(array).flags.writeable
    assert tape.used_bytes == array.nbytes
    assert device.address_of(array) == tape.block.address


DTYPES: list[Any] = "float16 float32 float64 uint8 int64 bool complex64 >f4 e bfloat16".split()
DTYPES += [np.float16, np.dtype("int16"), np.dtype([("d", "<f2"), ("qs", "i1", 32)]), int]
DTYPES += [ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(device: Device, tape: Any, dtype: Any) -> None:
    expected = np.ones(7, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for _ in range(2):  # the second time from memory
        array = tape.take(7, dtype)
        assert (array.dtype, array.nbytes) == (expected.dtype, expected.nbytes)
        device.seen(array)[...] = expected
        assert device.seen(array).tobytes() == expected.tobytes()


def test_an_array_says_whether_it_is_aligned() -> None:
    with um.Tape(PAGE) as tape:
        tape.take_bytes(1)
        loose = tape.take(4, "float32", align=1)
        assert not loose.flags.aligned
        loose[:] = 2
        assert loose.sum() == 8
        assert tape.take(4, "float32", align=4).flags.aligned


def test_take_bytes_and_take_address(device: Device, tape: Any) -> None:
    array = tape.take_bytes(100)
    assert (array.dtype, array.shape) == (np.uint8, (100,))
    address = tape.take_address(100)
    assert address == device.address_of(array) + 128
    assert tape.take_address(1, 1) == address + 100
    assert tape.used_bytes == 229
    assert device.address_of(tape.take_bytes(1)) % device.align == 0
    assert tape.n_takes == 4
    with device.package.Tape(1 << 18) as large:  # of the address, beyond what a block begins at
        large.take_bytes(1)
        assert large.take_address(1, 1 << 15) % (1 << 15) == 0
        assert device.address_of(large.take(3, align=1 << 15)) % (1 << 15) == 0


# Shapes of bytes, types of one element, and alignments of one byte.
REFUSED: dict[type[Exception], tuple[list[Any], list[Any], list[Any]]] = {
    um.TapeFull: (
        [64 * KIB + 1, 2**63 - 1, 2**64, 2**200, (2**32, 2**32), (np.int32(2**30),) * 2],
        [],
        [1 << 62],
    ),
    ValueError: (
        [(0, 2**63), (2**62, 0, 2**62), (1,) * 65, -1, (3, -1), (-3, -1)],
        [object, "V0", "U"],
        [0, 3, -64],
    ),
    TypeError: ([1.0, (1, 1.5), "3", None], ["no such type"], [1.5]),
}
CASES = [
    (error, case)
    for error, (shapes, dtypes, aligns) in REFUSED.items()
    for case in (
        *((shape, "uint8", 64) for shape in shapes),
        *((1, dtype, 64) for dtype in dtypes),
        *((1, "uint8", align) for align in aligns),
    )
]
LARGE = [(16 * KIB + 1, "f4"), (2**61, "f8"), (2**62, "f4"), ((2**31, 2**31, 4), "f4")]
CASES += [(um.TapeFull, (*case, 64)) for case in (*LARGE, ((np.int64(2**40),) * 2, "f4"))]


@pytest.mark.parametrize(("error", "case"), CASES)
def test_a_refusal_takes_nothing(tape: Any, error: Any, case: tuple[Any, Any, Any]) -> None:
    tape.take_bytes(5)
    before = figures(tape)
    with pytest.raises(error):
        tape.take(*case[:2], align=case[2])
    assert figures(tape) == before


def test_refusals_say_what_is_wrong(tape: Any) -> None:
    for dtype in ("<f16", ">f16", "=f16"):
        for _ in range(2):
            with pytest.raises(ValueError, match="expected 'float16'"):
                tape.take(1, dtype)
    for nbytes in (64 * KIB + 1, 2**63 - 1):
        with pytest.raises(um.TapeFull):
            tape.take_address(nbytes)
        with pytest.raises(ValueError, match="nbytes"):
            tape.take_address(-nbytes)
    assert tape.used_bytes == 0


def test_a_full_tape_names_the_figures(device: Device, tape: Any) -> None:
    tape.take_bytes(60 * KIB)
    for take in (tape.take_bytes, tape.take_address, lambda n: tape.take((1, n), "uint8")):
        with pytest.raises(um.TapeFull) as caught:
            take(5 * KIB)
        error = caught.value
        assert (error.limit, error.used, error.asked) == (64 * KIB, 60 * KIB, 5 * KIB)
        for part in ("'t'", str(64 * KIB), str(60 * KIB), str(5 * KIB), f": {4 * KIB} left"):
            assert part in str(error)
    with pytest.raises(um.TapeFull) as caught:
        tape.take((2**40, 2**40))
    error = caught.value
    assert (error.limit, error.used, error.asked) == (64 * KIB, 60 * KIB, 4 * 2**80)
    tape.take_bytes(4 * KIB)  # the last byte
    assert tape.available_bytes == 0
    tape.take_bytes(0, align=1)
    with device.package.Tape(100) as small:  # which has not all that its pages have
        assert small.total_bytes == 100
        small.take_bytes(100)
        with pytest.raises(um.TapeFull):
            small.take_bytes(1, align=1)


# ---- clearing ----


def test_after_clear_the_same_memory_comes_again_as_it_was(device: Device, tape: Any) -> None:
    first = tape.take(100)
    device.seen(first)[:] = 3
    address = device.address_of(first)
    tape.clear()
    assert tape.used_bytes == 0
    again = tape.take(100)
    assert device.address_of(again) == address
    assert (device.seen(again) == 3).all()  # clear zeroes nothing


# `TapeAgainstModel` tries what these do to a tape in any order.


def test_marks_that_are_none(tape: Any) -> None:
    tape.take_bytes(256)
    for bad in (257, -1, 2**70):
        with pytest.raises(ValueError, match="mark"):
            tape.rewind(bad)
    with pytest.raises(TypeError):
        tape.rewind(1.5)
    assert tape.used_bytes == 256


def test_a_frame_whose_tape_was_cleared_or_closed_inside(tape: Any) -> None:
    tape.take_bytes(256)
    with tape.frame() as inner:
        assert inner is tape
        with tape.frame():
            tape.take_bytes(256)
        assert tape.used_bytes == 256
        tape.clear()
    assert tape.used_bytes == 0
    with tape.frame():
        tape.close()


def test_a_frozen_tape_says_so(tape: Any) -> None:
    tape.freeze()
    assert "frozen" in repr(tape)
    for take in (tape.take, tape.take_address, tape.take_bytes):
        for n in (0, 1):
            with pytest.raises(um.FrozenError, match=r"is frozen: asked for \d+ bytes, .* thaw\("):
                take(n)
    tape.thaw()
    tape.take(1)


def test_no_cache_on_a_tape_that_is_frozen_or_closed() -> None:
    with um.Tape(PAGE) as tape:
        tape.freeze()
        with pytest.raises(um.FrozenError):
            um.KVCache(1, 1, 8, 4, tape=tape)
        assert tape.n_takes == 0
    with pytest.raises(um.ClosedError):
        um.KVCache(1, 1, 8, 4, tape=tape)


def test_owns(device: Device, tape: Any) -> None:
    array, start = tape.take(8), tape.block.address
    own = (array, array[3:], array.view("uint8").reshape(4, 8).T)
    assert all(map(tape.owns, (*own, start, start + 64 * KIB - 1, np.int64(start))))
    for address in (start - 1, start + 64 * KIB, 0, -1, start + 2**64, 2**200):
        assert not tape.owns(address)
    with device.package.Tape(PAGE) as other:
        assert not tape.owns(other.take(8))
    for numbers in (np.zeros(8), np.zeros(1, "int64"), np.array(start)):
        assert not tape.owns(numbers)
    for thing in ("x", None, 1.5, [1]):
        with pytest.raises(TypeError):
            tape.owns(thing)


class TapeAgainstModel(RuleBasedStateMachine):
    """The same calls on a tape and on a few lines of Python."""

    TOTAL = 4096

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.tape = device.package.Tape(self.TOTAL)
        self.base = self.tape.block.address
        self.used = self.kept = self.peak = self.n_takes = 0
        self.limit: int | None = None
        self.marks: list[int] = []
        self.live: list[tuple[int, int]] = []

    def teardown(self) -> None:
        self.tape.close()

    def fall_to(self, floor: int) -> None:
        self.used = max(floor, self.kept)
        self.live = [(start, end) for start, end in self.live if end <= self.used]

    @rule(
        nbytes=st.one_of(st.integers(0, 300), st.integers(0, 5000)),
        log_align=st.integers(0, 12),
        as_array=st.booleans(),
    )
    def take(self, nbytes: int, log_align: int, as_array: bool) -> None:
        align = 1 << log_align
        start = -(-(self.base + self.used) // align) * align - self.base
        fits = start + nbytes <= self.TOTAL
        if self.limit is not None:
            fits = self.limit > 0 and start + nbytes <= self.limit
        expected = contextlib.nullcontext() if fits else pytest.raises(self.refusal(nbytes))
        with expected:
            if as_array:
                array = self.tape.take(nbytes, "uint8", align=align)
                address = self.device.address_of(array)
                assert array.shape == (nbytes,)
                self.device.seen(array)[:] = 1
            else:
                address = self.tape.take_address(nbytes, align)
            assert address == self.base + start
        if fits:
            assert all(end <= start or start + nbytes <= first for first, end in self.live)
            self.live.append((start, start + nbytes))
            self.used = start + nbytes
            self.peak = max(self.peak, self.used)
            self.n_takes += 1

    def refusal(self, nbytes: int) -> tuple[type[Exception], ...]:
        # What would not even fit into an empty tape is full, frozen or not.
        if self.limit is None:
            return (um.TapeFull,)
        return (um.FrozenError, um.TapeFull) if nbytes > self.TOTAL else (um.FrozenError,)

    @rule()
    def clear(self) -> None:
        self.tape.clear()
        self.fall_to(0)

    @rule()
    def keep(self) -> None:
        self.tape.keep()
        self.kept = self.used

    @rule()
    def mark(self) -> None:
        mark = self.tape.mark()
        assert mark == self.used
        self.marks.append(mark)

    @precondition(lambda self: self.marks)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        mark = data.draw(st.sampled_from(self.marks))
        if mark > self.used:
            with pytest.raises(ValueError, match="mark"):
                self.tape.rewind(mark)
        else:
            self.tape.rewind(mark)
            self.fall_to(mark)

    @rule(nbytes=st.integers(0, 100), fails=st.booleans())
    def frame(self, nbytes: int, fails: bool) -> None:
        before = self.used
        with contextlib.suppress(MemoryError, RuntimeError, KeyError), self.tape.frame():
            self.tape.take_bytes(nbytes, align=1)
            self.n_takes += 1
            self.peak = max(self.peak, before + nbytes)
            if fails:
                raise KeyError
        self.fall_to(before)

    @rule(at_high_water=st.booleans())
    def freeze(self, at_high_water: bool) -> None:
        self.limit = self.peak if at_high_water else 0
        self.tape._freeze_at(self.limit)

    @rule()
    def thaw(self) -> None:
        self.tape.thaw()
        self.limit = None

    @invariant()
    def figures_agree(self) -> None:
        assert figures(self.tape) == (self.used, self.peak, self.n_takes, self.TOTAL - self.used)
        assert self.tape.frozen == (self.limit is not None)


def test_tape_against_model(device: Device) -> None:
    run_state_machine_as_test(
        partial(TapeAgainstModel, device),  # type: ignore[arg-type]
        settings=settings(max_examples=examples(60), stateful_step_count=40, deadline=None),
    )


def test_threads_never_get_the_same_memory(device: Device) -> None:
    n_threads, n_takes = 6, 200
    got: list[list[tuple[int, int]]] = [[] for _ in range(n_threads)]

    def work(n: int) -> None:
        for i in range(n_takes):
            nbytes = 1 + (n * 31 + i * 17) % 90
            array = shared.take_bytes(nbytes, align=1 << i % 7)
            device.seen(array)[:] = n
            got[n].append((device.address_of(array), nbytes))

    with device.package.Tape(1 << 20) as shared:
        at_once(n_threads, work)
        assert shared.n_takes == n_threads * n_takes
        taken = sorted(item for items in got for item in items)
        assert len(taken) == n_threads * n_takes
        for (address, nbytes), (following, _) in itertools.pairwise(taken):
            assert address + nbytes <= following
        memory = device.seen(shared.block.as_array())
        for n, items in enumerate(got):
            for address, nbytes in items:
                at = address - shared.block.address
                assert (memory[at : at + nbytes] == n).all()
        del memory


def test_taking_makes_no_system_call_and_no_allocation(device: Device) -> None:
    with device.package.Tape(1 << 20) as tape:
        tape.warm()
        before = device.costs()
        for _ in range(100):
            x = tape.take((4, 100), "float16")
            tape.take_address(1000)
            device.seen(x)[:] = 0
            with tape.frame():
                tape.take_bytes(1000)
        tape.clear()
        assert device.costs() == before


# ---- debug mode ----


@pytest.mark.parametrize("debug", ["1", "0", "", None])
def test_debug_mode_poisons(device: Device, monkeypatch: pytest.MonkeyPatch, debug: Any) -> None:
    monkeypatch.delenv("UNIMEM_DEBUG", raising=False)
    if debug is not None:
        monkeypatch.setenv("UNIMEM_DEBUG", debug)

    def holds(array: Any, value: int) -> bool:
        return bool((device.seen(array) == value).all())

    def take(value: int) -> Any:
        array = own.take_bytes(100)
        device.seen(array)[:] = value
        return array

    poison = 0xDB if debug == "1" else None
    with device.package.Tape(4096) as own:
        kept = take(1)
        own.keep()
        first, mark, second = take(2), own.mark(), take(3)
        own.rewind(mark)
        assert holds(second, poison or 3)
        with pytest.raises(ValueError, match="mark"):
            own.rewind(mark + 1)
        assert holds(first, 2)
        own.clear()
        assert holds(first, poison or 2)
        assert holds(kept, 1)
        with own.frame():
            inside = take(4)
        assert holds(inside, poison or 4)
        del kept, first, second, inside


# ---- blocks and lifetime ----


def test_a_tape_over_a_block(device: Device, tape: Any) -> None:
    with pytest.raises(BufferError):  # its own is not closed under it, either
        tape.block.close()
    with device.package.Block(10_000, name="ground") as block:
        tape = device.package.Tape(block)
        assert (tape.name, tape.total_bytes) == ("ground", block.nbytes)
        assert tape.block is block
        array = tape.take(4)
        assert device.address_of(array) == block.address
        with pytest.raises(BufferError, match="live"):
            block.close()
        tape.close()  # the block is not the tape's: views may live on
        assert tape.closed
        device.seen(array)[:] = 1
        assert (device.seen(block.as_array("float32", 4)) == 1).all()
        with pytest.raises(ValueError, match="pages"):
            device.package.Tape(block, pages="4k")
        del array
        tape = device.package.Tape(block)
    device.seen(tape.take(4))[:] = 1  # the memory is there as long as the tape is
    assert "its block closed" in repr(tape)
    with pytest.raises(um.ClosedError):
        tape.warm()
    tape.close()


def test_placement_and_category() -> None:
    before = ledger()["history"]["mapped_bytes"]
    with um.Tape(3 * PAGE, category="history", pages="4k", warm=True) as tape:
        assert tape.block.granted.resident_bytes == 3 * PAGE
        assert tape.block.requested["pages"] == "4k"
        assert ledger()["history"]["mapped_bytes"] == before + 3 * PAGE
        assert repr(tape) == "Tape('tape', 0 B of 12.0 KiB used, 4k, 12.0 KiB in RAM)"
    with um.Tape(64 * KIB) as tape:
        assert tape.block.verify().resident_bytes == 0
        tape.warm(2)
        assert tape.block.granted.resident_bytes == 64 * KIB
