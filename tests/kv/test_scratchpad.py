"""A scratchpad holds the rows that NumPy would hold, where they were written first."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import invariant
from numpy.typing import NDArray

import proc_maps
import unimem as um
from conftest import Run
from os_faults import os_faults
from pad_model import (
    DTYPES,
    TAKEN,
    PadAgainstModel,
    awkward,
    check_that_it_is_closed,
    converted,
    dtype_of,
    same_bits,
)
from tiers import examples
from unimem._core.status import counters, ledger

pytestmark = pytest.mark.usefixtures("gives_memory_back")

Array = NDArray[Any]


@pytest.fixture
def pad() -> Iterator[um.Scratchpad]:
    with um.Scratchpad(8, 4) as pad:
        yield pad


def rows(n: int, dim: int = 4, dtype: str = "float32") -> Array:
    return np.random.default_rng(n).normal(size=(n, dim)).astype(dtype_of(dtype))


# ---- what is stored ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize("n_values", [15, 33, 20_000])  # the last ones without the GIL
def test_rows_are_converted_as_numpy_converts(dtype: str, given: str, n_values: int) -> None:
    values = awkward(given, (2, n_values))
    with um.Scratchpad(5, n_values, dtype) as pad:
        if given not in TAKEN[dtype]:
            for call, argument in ((pad.append, values[0]), (pad.append_batch, values)):
                with pytest.raises(TypeError, match=rf"of {dtype}: expected.*got {given}"):
                    call(argument)
            assert pad.is_empty
            return
        pad.append(values[0])
        pad.append_batch(values)
        pad.append_batch(values[:0])
        expected = converted(values[[0, 0, 1]], dtype)
        assert same_bits(pad.as_array(), expected)
        nan = np.full(n_values, np.nan, dtype_of(given))
        pad.append(nan)
        assert np.isnan(pad.as_array()[3].astype(np.float32)).all()


def test_values_of_the_pads_own_dtype_keep_their_bits() -> None:
    every = np.arange(65536, dtype=np.uint16)
    for dtype in ("float16", "bfloat16"):
        with um.Scratchpad(1, 65536, dtype) as pad:
            pad.append(every.view(dtype_of(dtype)))  # NaNs of every kind as well
            assert pad.as_array().tobytes() == every.tobytes()


def test_float64_holds_every_float32_exactly() -> None:
    bits = np.random.default_rng(2).integers(0, 2**32, 4000, dtype=np.uint64)
    values = bits.astype(np.uint32).view(np.float32)
    with um.Scratchpad(1, 4000, "float64") as pad:
        pad.append(values)
        with np.errstate(invalid="ignore"):
            assert np.array_equal(pad.as_array()[0], values.astype(np.float64), equal_nan=True)


@pytest.mark.parametrize("dtype", [np.float16, np.dtype("float16"), "float16", np.dtype(">f2")])
def test_ways_to_name_a_dtype(dtype: Any) -> None:
    with um.Scratchpad(2, 3, dtype) as pad:
        assert pad.dtype == np.float16
        assert pad.dtype.isnative
        assert pad.as_array().dtype == np.float16


def test_the_rows_are_one_array_that_can_be_written(pad: um.Scratchpad) -> None:
    assert pad.as_array().shape == (0, 4)
    pad.append_batch(rows(3))
    view = pad.as_array()
    assert view.flags.c_contiguous
    view[1] = 7
    assert (pad.as_array()[1] == 7).all()
    pad.append(rows(1)[0])
    assert view.shape == (3, 4)  # a view does not grow
    assert proc_maps.address_of(view) == proc_maps.address_of(pad.as_array())
    del view


def test_rows_that_were_cut_off_may_be_appended_again(pad: um.Scratchpad) -> None:
    given = rows(8)
    pad.append_batch(given)
    old = pad.as_array()[3:]
    pad.crop(1)
    pad.append_batch(old)  # over itself
    del old
    assert same_bits(pad.as_array(), given[[0, 3, 4, 5, 6, 7]])


# ---- a call that fails changes nothing ----


def wrong_calls() -> list[tuple[str, type[Exception], str, Callable[[um.Scratchpad], Any]]]:
    good = rows(2)
    return [
        ("width", ValueError, r"\(4,\), got \(3,\)", lambda p: p.append(good[0, :3])),
        ("no dimension", ValueError, r"got \(\)", lambda p: p.append(good[0, 0, ...])),
        ("a batch for a row", ValueError, "append:", lambda p: p.append(good)),
        ("a row for a batch", ValueError, "append_batch:", lambda p: p.append_batch(good[0])),
        ("batch width", ValueError, r"\(n, 4\)", lambda p: p.append_batch(good[:, :3])),
        ("three dimensions", ValueError, "shape", lambda p: p.append_batch(good[None])),
        ("int", TypeError, "got int32", lambda p: p.append(good[0].astype("int32"))),
        ("bool", TypeError, "got bool", lambda p: p.append_batch(good.astype(bool))),
        ("uint16", TypeError, "got uint16", lambda p: p.append(good[0].astype("uint16"))),
        ("object", TypeError, "got object", lambda p: p.append(good[0].astype(object))),
        ("complex", TypeError, "got complex64", lambda p: p.append(good[0].astype("complex64"))),
        ("list", TypeError, "NumPy array, got list", lambda p: p.append(good[0].tolist())),
        ("None", TypeError, "NumPy array, got NoneType", lambda p: p.append_batch(None)),
        ("too many", um.CacheFull, "6 tokens", lambda p: p.append_batch(rows(6))),
        (
            "far too many",
            um.CacheFull,
            "tokens",
            lambda p: p.append_batch(np.broadcast_to(good[0], (2**44, 4))),
        ),
        ("crop above", ValueError, "0 to 3, got 4", lambda p: p.crop(4)),
        ("crop below", ValueError, "0 to 3, got -1", lambda p: p.crop(-1)),
        ("crop far", ValueError, "0 to 3", lambda p: p.crop(2**70)),
        ("crop a half", TypeError, "integer", lambda p: p.crop(0.5)),
        ("crop None", TypeError, "integer", lambda p: p.crop(None)),
    ]


@pytest.mark.parametrize("case", wrong_calls(), ids=lambda case: case[0])
def test_a_call_that_fails_changes_nothing(
    pad: um.Scratchpad, case: tuple[str, type[Exception], str, Callable[[um.Scratchpad], Any]]
) -> None:
    given = rows(3)
    pad.append_batch(given)
    before = pad.tape.block.as_array().copy()
    with pytest.raises(case[1], match=case[2]):
        case[3](pad)
    assert len(pad) == 3
    assert same_bits(pad.tape.block.as_array(), before)  # no byte behind the rows, either


def test_a_full_pad_names_the_figures(pad: um.Scratchpad) -> None:
    pad.append_batch(rows(6))
    with pytest.raises(um.CacheFull, match=r"'scratchpad'.*3 tokens.*6 of 8") as caught:
        pad.append_batch(rows(3))
    assert (caught.value.limit, caught.value.used, caught.value.asked) == (8, 6, 3)
    pad.append_batch(rows(2))  # what fits, fits
    with pytest.raises(um.CacheFull, match="8 of 8"):
        pad.append(rows(1)[0])
    pad.append_batch(rows(0))
    assert len(pad) == 8


def test_without_memory_for_a_copy_of_the_argument_nothing_is_appended(run_python: Run) -> None:
    done = run_python("""
        import resource
        import numpy as np, unimem as um

        for make in um.Scratchpad, um.PagedScratchpad:
            with make(1 << 16, 1 << 10) as pad:
                row = np.ones(1 << 10, "float32")
                pad.append(row)
                before = resource.getrlimit(resource.RLIMIT_AS)
                held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (held + (64 << 20), before[1]))
                try:
                    pad.append_batch(np.broadcast_to(row, (60_000, 1 << 10)))
                except MemoryError:
                    print("refused", pad)
                finally:
                    resource.setrlimit(resource.RLIMIT_AS, before)
                pad.append(row)
                assert len(pad) == 2 and (pad.as_array() == 1).all()
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "refused Scratchpad(len=1, capacity=65536, dim=1024)",
        "refused PagedScratchpad(len=1, capacity=65536, dim=1024, blocks=1/4096)",
    ]


# ---- making one ----


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((0, 4), ValueError, "max_seq_len"),
        ((-1, 4), ValueError, "max_seq_len"),
        ((8, 0), ValueError, "dim"),
        ((1.5, 4), TypeError, "integer"),
        (("8", 4), TypeError, "integer"),
        ((2**63, 4), ValueError, "max_seq_len"),
        ((2**31, 2**31), ValueError, "too large"),
        ((2**40, 2**7), MemoryError, "asked for|does not fit"),
        ((8, 4, "int8"), ValueError, "float32, float16, bfloat16, float64, got 'int8'"),
        ((8, 4, "q8_0"), ValueError, "dtype"),
        ((8, 4, np.int32), ValueError, "dtype"),
        ((8, 4, None), ValueError, "got None"),
        ((8, 4, 5), TypeError, "data type"),
    ],
)
def test_a_refused_pad_leaves_nothing(
    arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    before = ledger()["history"]["mapped_bytes"]
    with pytest.raises(error, match=text):
        um.Scratchpad(*arguments)
    with um.Tape(1 << 16) as tape:
        with pytest.raises(error, match=text):
            um.Scratchpad(*arguments, tape=tape)
        assert tape.used_bytes == 0
    assert ledger()["history"]["mapped_bytes"] == before


def test_every_system_call_of_the_constructor_may_fail() -> None:
    before, nth = ledger(), 0
    with os_faults() as faults:
        while True:
            nth += 1
            faults.arm(nth)
            try:
                pad = um.Scratchpad(1000, 10, pages="4k")
            except (MemoryError, OSError):
                assert faults.failed
                assert ledger()["history"]["mapped_bytes"] == before["history"]["mapped_bytes"]
                continue
            finally:
                faults.disarm()
            break
    pad.append(rows(1, 10)[0])
    pad.close()
    assert nth > 1
    assert ledger()["history"]["mapped_bytes"] == before["history"]["mapped_bytes"]


def test_a_pad_on_a_tape_of_somebody_else() -> None:
    with um.Tape(1 << 12, name="history") as tape:
        pad = um.Scratchpad(8, 4, "float16", tape=tape)
        assert pad.tape is tape
        assert tape.used_bytes == 8 * 4 * 2
        with pytest.raises(ValueError, match="pages, strict"):
            um.Scratchpad(8, 4, tape=tape, pages="4k", strict=True)
        with pytest.raises(um.TapeFull):
            um.Scratchpad(1000, 4, tape=tape)
        with pytest.raises(TypeError):
            um.Scratchpad(8, 4, tape="history")  # type: ignore[arg-type]
        pad.append(rows(1)[0])
        assert tape.owns(pad.as_array())
        view = pad.as_array()
        pad.close()  # the memory is the tape's
        assert (pad.closed, tape.closed) == (True, False)
        del view
        tape.freeze()
        with pytest.raises(um.FrozenError):
            um.Scratchpad(8, 4, tape=tape)
        tape.thaw()
        other = um.Scratchpad(8, 4, tape=tape)
    assert other.closed
    for use in (lambda: other.append(rows(1)[0]), other.as_array, lambda: len(other)):
        with pytest.raises(um.ClosedError, match="history"):
            use()


def test_a_new_talk_clears_an_attached_pad() -> None:
    with um.Layout(4096, 4096, 4096) as layout:
        pad = um.Scratchpad(8, 4)
        layout.attach(pad)
        pad.append(rows(1)[0])
        layout.clear_talk()
        assert pad.is_empty
        layout.freeze()
        pad.append(rows(1)[0])  # into memory that is there
        layout.thaw()
        pad.close()


def test_placement_category_and_name() -> None:
    before = ledger()["history"]
    with um.Scratchpad(1000, 8, pages="4k", warm=True, name="mine") as pad:
        now = ledger()["history"]
        assert now["n_mappings"] == before["n_mappings"] + 1
        assert now["mapped_bytes"] - before["mapped_bytes"] == 32768  # 1000 x 8 x 4, whole pages
        assert pad.tape.block.verify().resident_bytes == 32768
        assert (pad.capacity, pad.dim, pad.name) == (1000, 8, "mine")
        with pytest.raises(um.CacheFull, match="'mine'"):
            pad.append_batch(rows(1001, 8))
    with pytest.raises(um.ClosedError, match="'mine' is closed"):
        pad.clear()


def test_a_pad_that_was_never_made_is_closed() -> None:
    """Its constructor raised, and somebody kept it all the same."""
    with um.Tape(64) as tape:
        pad = um.Scratchpad.__new__(um.Scratchpad)
        with pytest.raises(um.TapeFull):
            pad.__init__(64, 8, tape=tape)  # type: ignore[misc]
        check_that_it_is_closed(pad, np.ones(8, "float32"))
    paged = um.PagedScratchpad.__new__(um.PagedScratchpad)
    with pytest.raises(ValueError, match="block_tokens"):
        paged.__init__(64, 8, block_tokens=0)  # type: ignore[misc]
    check_that_it_is_closed(paged, np.ones(8, "float32"))


def test_a_tape_under_a_pad_is_made_once() -> None:
    with um.Tape(1 << 12) as tape, um.Scratchpad(8, 4, tape=tape) as pad:
        pad.append(rows(1)[0])
        with pytest.raises(RuntimeError, match="the Tape is made already"):
            tape.__init__(1 << 12)  # type: ignore[misc]
        pad.append(rows(1)[0])
        assert same_bits(pad.as_array(), rows(1)[[0, 0]])


def test_a_tape_of_another_kind() -> None:
    wrong: Any = um.Block(4096)
    with (
        wrong,
        pytest.raises(TypeError, match=r"^tape: expected a unimem\.Tape, got unimem\.Block$"),
    ):
        um.Scratchpad(8, 4, tape=wrong)


def test_repr() -> None:
    with um.Scratchpad(64, 8) as pad:
        pad.append_batch(rows(3, 8))
        assert repr(pad) == "Scratchpad(len=3, capacity=64, dim=8)"
    assert repr(pad) == "Scratchpad(closed)"


# ---- threads ----


@pytest.mark.parametrize("make", [um.Scratchpad, um.PagedScratchpad])
@pytest.mark.parametrize("copy", ["in", "out"])
def test_nobody_closes_a_pad_while_rows_are_copied(make: type[Any], copy: str) -> None:
    batch = np.ones((2048, 1024), "float16")
    for _ in range(3):
        pad = make(2048, 1024)
        copied: list[Array] = []
        if copy == "out":
            pad.append_batch(batch)

        def work(pad: Any = pad, copied: list[Array] = copied) -> None:
            with suppress(um.ClosedError):
                if copy == "in":
                    pad.append_batch(batch)
                else:
                    copied.append(pad.as_array().copy())

        thread = threading.Thread(target=work)
        thread.start()
        while not pad.closed:
            with suppress(BufferError):
                pad.close()
        thread.join()
        assert all((rows == 1).all() for rows in copied)


# ---- the steady state ----


@pytest.mark.parametrize("given", ["float32", "float16", "bfloat16"])
def test_appending_makes_no_system_call_no_allocation_and_moves_nothing(given: str) -> None:
    with um.Scratchpad(100, 512, warm=True) as pad:
        row, batch = rows(1, 512, given)[0], rows(40, 512, given)  # the batch without the GIL
        address, before = proc_maps.address_of(pad.as_array()), counters()
        for _ in range(20):
            pad.append(row)
            pad.append_batch(batch)
            pad.append_batch(batch)
            pad.as_array()
            pad.crop(41)
            pad.clear()
        assert counters() == before
        assert proc_maps.address_of(pad.as_array()) == address


def test_a_pad_that_is_dropped_open_warns_and_gives_the_memory_back() -> None:
    pad = um.Scratchpad(8, 4, name="forgotten")
    pad.append(rows(1)[0])
    address, view = proc_maps.address_of(pad.as_array()), pad.as_array()
    with pytest.warns(ResourceWarning, match="forgotten"):
        del pad
    assert proc_maps.is_mapped(address)
    assert same_bits(view, rows(1))
    del view
    gc.collect()
    assert not proc_maps.is_mapped(address)


class ScratchpadAgainstModel(PadAgainstModel):
    def new_pad(self, dtype: str) -> um.Scratchpad:
        self.pad = um.Scratchpad(self.CAPACITY, self.DIM, dtype)
        self.address = proc_maps.address_of(self.pad.as_array())
        return self.pad

    def view(self, at: int) -> Array:
        return self.pad.as_array()[at : at + 1]

    @invariant()
    def agree(self) -> None:
        super().agree()
        if hasattr(self, "pad"):
            assert proc_maps.address_of(self.pad.as_array()) == self.address


TestScratchpadAgainstModel = ScratchpadAgainstModel.TestCase
TestScratchpadAgainstModel.settings = settings(
    max_examples=examples(100), stateful_step_count=40, deadline=None
)
