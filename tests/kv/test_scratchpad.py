"""Scratchpads, in one piece and paged, hold the rows that NumPy would hold, where they were first.

What they share with all caches is in the contract: tests/support/contracts/conformance.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import invariant
from numpy.typing import NDArray

import unimem as um
from conftest import Run
from support.contracts import pad_model as pm
from support.contracts.kv_caches import check_that_making_it_may_fail
from support.contracts.pad_model import DTYPES, converted, dtype_of, same_bits
from support.kernel import proc_maps
from support.project.tiers import examples
from unimem._core.status import counters, ledger

pytestmark = pytest.mark.usefixtures("gives_memory_back")

Array = NDArray[Any]
both = pytest.mark.parametrize("make", [um.Scratchpad, um.PagedScratchpad])


@pytest.fixture
def pad() -> Iterator[um.Scratchpad]:
    with um.Scratchpad(8, 4) as pad:
        yield pad


def rows(n: int, dim: int = 4, dtype: str = "float32") -> Array:
    return np.random.default_rng(n).normal(size=(n, dim)).astype(dtype_of(dtype))


def mapped() -> int:
    return ledger()["history"]["mapped_bytes"]


# ---- what is stored ----


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize("n_values", [15, 33, 20_000])  # the last ones without the GIL
def test_rows_are_converted_as_numpy_converts(
    make: type[Any], dtype: str, given: str, n_values: int
) -> None:
    values = pm.awkward(given, (2, n_values))
    with make(5, n_values, dtype) as pad:
        if given not in pm.TAKEN[dtype]:
            for call, argument in ((pad.append, values[0]), (pad.append_batch, values)):
                with pytest.raises(TypeError, match=rf"of {dtype}: expected.*got {given}"):
                    call(argument)
            assert pad.is_empty
            return
        pad.append(values[0])
        pad.append_batch(values)
        pad.append_batch(values[:0])
        assert same_bits(pad.as_array(), converted(values[[0, 0, 1]], dtype))
        pad.append(np.full(n_values, np.nan, dtype_of(given)))
        assert np.isnan(pad.as_array()[3].astype(np.float32)).all()


@both
def test_values_of_the_pads_own_dtype_keep_their_bits(make: type[Any]) -> None:
    every = np.arange(65536, dtype=np.uint16)
    for dtype in ("float16", "bfloat16"):
        with make(1, 65536, dtype) as pad:
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
        assert pad.dtype == pad.as_array().dtype == np.float16
        assert pad.dtype.isnative


def test_rows_that_were_cut_off_may_be_appended_again(pad: um.Scratchpad) -> None:
    given = rows(8)
    pad.append_batch(given)
    old = pad.as_array()[3:]
    pad.crop(1)
    pad.append_batch(old)  # over itself
    del old
    assert same_bits(pad.as_array(), given[[0, 3, 4, 5, 6, 7]])


# ---- a call that fails changes nothing ----

GOOD = rows(2)
# Beside what the contract has.
WRONG: dict[str, tuple[type[Exception], str, Callable[[Any], Any]]] = {
    "a batch for a row": (ValueError, "append:", lambda p: p.append(GOOD)),
    "a row for a batch": (ValueError, "append_batch:", lambda p: p.append_batch(GOOD[0])),
    "batch width": (ValueError, r"\(n, 4\)", lambda p: p.append_batch(GOOD[:, :3])),
    "three dimensions": (ValueError, "shape", lambda p: p.append_batch(GOOD[None])),
    "object": (TypeError, "got object", lambda p: p.append(GOOD[0].astype(object))),
    "too many": (um.CacheFull, "6 tokens.*3 of 8", lambda p: p.append_batch(rows(6))),
    "far too many": (
        um.CacheFull,
        "tokens",
        lambda p: p.append_batch(np.broadcast_to(GOOD[0], (2**44, 4))),
    ),
    "crop": (ValueError, "0 to 3, got 4", lambda p: p.crop(4)),
    "crop a half": (TypeError, "integer", lambda p: p.crop(0.5)),
}


@both
@pytest.mark.parametrize(("error", "match", "call"), WRONG.values(), ids=WRONG)
def test_a_call_that_fails_changes_nothing(
    make: type[Any], error: type[Exception], match: str, call: Callable[[Any], Any]
) -> None:
    with make(8, 4) as pad:
        pad.append_batch(rows(3))
        before = pad.tape.block.as_array().copy()
        with pytest.raises(error, match=match):
            call(pad)
        assert len(pad) == 3
        # No byte behind the rows, and no block's place in the table, either.
        assert same_bits(pad.tape.block.as_array(), before)


@both
def test_a_full_pad_names_the_figures(make: type[Any]) -> None:
    with make(8, 4, name="mine") as pad:
        pad.append_batch(rows(6))
        with pytest.raises(um.CacheFull, match=r"'mine'.*3 tokens.*6 of 8") as caught:
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

REFUSED: dict[type[Any], list[tuple[tuple[Any, ...], type[Exception], str]]] = {
    um.Scratchpad: [
        *(((n, 4), ValueError, "max_seq_len") for n in (0, -1, 2**63)),
        *(((n, 4), TypeError, "integer") for n in (1.5, "8")),
        ((8, 0), ValueError, "dim"),
        ((2**31, 2**31), ValueError, r"too large: expected below 2\*\*63 bytes, got \d{20}"),
        ((2**40, 2**7), MemoryError, "asked for|does not fit"),
        ((8, 4, "int8"), ValueError, "float32, float16, bfloat16, float64, got 'int8'"),
        *(((8, 4, dtype), ValueError, "dtype") for dtype in ("q8_0", np.int32)),
        ((8, 4, None), ValueError, "got None"),
        ((8, 4, 5), ValueError, "got 5"),
    ],
    um.PagedScratchpad: [
        ((0, 4), ValueError, "max_tokens"),
        ((8, 0), ValueError, "dim"),
        ((8, 1.5), TypeError, "integer"),
        ((8, 4, "int8"), ValueError, "got 'int8'"),
        *(((8, 4, {"block_tokens": n}), ValueError, "block_tokens") for n in (0, -1, 2**62)),
        ((2**32, 4, {"block_tokens": 1}), ValueError, "too many"),
        ((2**31 - 1, 2**32, {"block_tokens": 1}), ValueError, "too large"),
        ((2**40, 2**7, {"block_tokens": 2**20}), MemoryError, "does not fit"),
        ((8, 4, {"pages": "3k"}), ValueError, "pages"),
        ((8, 4, {"tape": None}), TypeError, "tape"),
    ],
}


@pytest.mark.parametrize(
    ("make", "arguments", "error", "text"),
    [pytest.param(make, *case, id=str(case[0])) for make in REFUSED for case in REFUSED[make]],
)
def test_a_refused_pad_leaves_nothing(
    make: type[Any], arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    before = mapped()
    options = arguments[-1] if isinstance(arguments[-1], dict) else {}
    arguments = arguments[: len(arguments) - bool(options)]
    with pytest.raises(error, match=text):
        make(*arguments, **options)
    if make is um.Scratchpad:
        with um.Tape(1 << 16) as tape:
            with pytest.raises(error, match=text):
                make(*arguments, tape=tape)
            assert tape.used_bytes == 0
    assert mapped() == before


@both
def test_every_system_call_of_the_constructor_may_fail(make: type[Any]) -> None:
    before = mapped()
    with check_that_making_it_may_fail(lambda: make(1000, 10, pages="4k")) as pad:
        pad.append(rows(1, 10)[0])
    assert mapped() == before


def test_a_pad_on_a_tape_of_somebody_else() -> None:
    with um.Tape(1 << 12, name="history") as tape:
        pad = um.Scratchpad(8, 4, "float16", tape=tape)
        assert pad.tape is tape
        assert tape.used_bytes == 8 * 4 * 2
        with pytest.raises(ValueError, match="pages, strict"):
            um.Scratchpad(8, 4, tape=tape, pages="4k", strict=True)
        with pytest.raises(um.TapeFull):
            um.Scratchpad(1000, 4, tape=tape)
        for wrong in ("history", tape.block):
            with pytest.raises(TypeError, match=r"^tape: expected a unimem\.Tape, got "):
                um.Scratchpad(8, 4, tape=wrong)  # type: ignore[arg-type]
        pad.append(rows(1)[0])
        assert tape.owns(pad.as_array())
        with pytest.raises(RuntimeError, match="the Tape is made already"):
            tape.__init__(1 << 12)  # type: ignore[misc]
        assert same_bits(pad.as_array(), converted(rows(1), "float16"))
        pad.close()
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


@both
def test_placement_category_and_name(make: type[Any]) -> None:
    # 1000 x 8 x 4 bytes in whole pages; or 63 blocks of 512 bytes, each with a link and an entry.
    nbytes = 32768 if make is um.Scratchpad else 36864
    before = ledger()["history"]
    with make(1000, 8, pages="4k", warm=True, name="mine") as pad:
        now = ledger()["history"]
        assert now["n_mappings"] == before["n_mappings"] + 1
        assert now["mapped_bytes"] - before["mapped_bytes"] == nbytes
        assert pad.tape.block.verify().resident_bytes == nbytes
        assert (pad.capacity, pad.dim, pad.name) == (1000, 8, "mine")
    with pytest.raises(um.ClosedError, match="'mine' is closed"):
        pad.clear()
    assert repr(pad) == f"{make.__name__}(closed)"


def test_a_pad_that_was_never_made_is_closed() -> None:
    """Its constructor raised, and somebody kept it all the same."""
    with um.Tape(64) as tape:
        pad = um.Scratchpad.__new__(um.Scratchpad)
        with pytest.raises(um.TapeFull):
            pad.__init__(64, 8, tape=tape)  # type: ignore[misc]
        pm.check_that_it_is_closed(pad, np.ones(8, "float32"))
    paged = um.PagedScratchpad.__new__(um.PagedScratchpad)
    with pytest.raises(ValueError, match="block_tokens"):
        paged.__init__(64, 8, block_tokens=0)  # type: ignore[misc]
    pm.check_that_it_is_closed(paged, np.ones(8, "float32"))


# ---- threads ----


@both
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


@both
@pytest.mark.parametrize("given", ["float32", "float16", "bfloat16"])
@pytest.mark.usefixtures("no_collection")
def test_large_appends_make_no_system_call_and_no_allocation(make: type[Any], given: str) -> None:
    with make(100, 512, warm=True) as pad:
        row, batch = rows(1, 512, given)[0], rows(40, 512, given)  # the batch without the GIL
        before = counters()
        for _ in range(20):
            pad.append(row)
            pad.append_batch(batch)
            pad.append_batch(batch)
            pad.as_array()
            pad.crop(41)
            pad.clear()
        assert counters() == before


class ScratchpadAgainstModel(pm.PadAgainstModel):
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
            assert self.pad.as_array().flags.c_contiguous


TestScratchpadAgainstModel = ScratchpadAgainstModel.TestCase
TestScratchpadAgainstModel.settings = settings(
    max_examples=examples(100), stateful_step_count=40, deadline=None
)
