"""Moving tokens of a GPU's KV cache, with calls meanwhile: nothing is lost silently.

Over a driver in main memory. A call of CUDA releases the interpreter's lock, and around it a
signal's handler may raise.
"""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

import unimem as um
from support.contracts.kv_model import given, same_bits
from support.gpu.host_gpu import HostDriver, array_of, numpy_of
from support.gpu.kv_twins import DIM, HEADS, LAYERS, ROWS, Twins

pytestmark = pytest.mark.usefixtures("cuda", "gives_memory_back")

Array = NDArray[Any]
STREAM = 1234


# ---- tokens that move ----


def test_tokens_move_in_pieces_on_the_stream_that_needs_the_rows(host_gpu: HostDriver) -> None:
    with Twins(dtype="f32") as twins:
        twins.append(ROWS)
        twins.do("trim_to", ROWS - 5)
        k, v = twins.tokens(5)
        host_gpu.calls.clear()
        for layer in range(LAYERS):
            twins.host.append(layer, k, v)
            twins.cuda.append(layer, array_of(k), array_of(v), stream=STREAM)
        moved = [call for call in host_gpu.calls if call[0] == "copy"]
        row = twins.cuda.row_bytes
        # Seven rows by five: five, then two, in each of four lanes, forwards.
        assert [call[3] for call in moved] == [5 * row, 2 * row] * (2 * LAYERS)
        assert [call[2] - call[1] for call in moved] == [5 * row] * len(moved)
        assert {call[4] for call in moved} == {STREAM}
        twins.check()

        # The first eight rows move to before the last one, backwards, on the current stream.
        host_gpu.calls.clear()
        twins.cuda.trim_to(1, keep_first=8)
        twins.host.trim_to(1, keep_first=8)
        moved = [call for call in host_gpu.calls if call[0] == "copy"]
        assert [call[3] for call in moved] == [3 * row, 3 * row, 2 * row] * (2 * LAYERS)
        assert [call[1] - call[2] for call in moved] == [3 * row] * len(moved)
        assert {call[4] for call in moved} == {0}
        twins.check()


@pytest.mark.parametrize(("dtype", "batch"), [("f16", 1), ("q8_0", 2)])
def test_tokens_do_not_move_over_views(dtype: str, batch: int) -> None:
    def views(layer: int, part: int) -> tuple[Any, Any]:
        return twins.host.layer(layer)[part], twins.cuda.layer(layer)[part]

    with Twins(dtype=dtype, batch=batch) as twins:
        k, _ = twins.tokens(1)
        twins.append(ROWS)
        for part in range(2):
            held = views(1, part)
            assert twins.do("trim_to", 3, keep_first=1)[0] is BufferError
            del held
        twins.do("trim_to", 3)
        held = views(0, 0)
        twins.do("append", 0, k, k)  # to before them
        twins.do("rollback")
        twins.append(ROWS - 3)
        twins.do("trim_to", ROWS - 1)
        held = views(0, 0)
        assert twins.do("append", 0, k, k)[0] is BufferError
        assert twins.do("reserve", 1)[0] is BufferError
        del held
        assert twins.do("append", 0, k, k)[0] is None


@pytest.mark.parametrize("use", ["trim_to", "append", "reserve"])
def test_when_moving_fails_nothing_is_dropped(
    host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    with Twins(dtype="f16") as twins:
        twins.append(ROWS)
        twins.do("trim_to", 4)
        k, v = map(array_of, twins.tokens(2))
        uses: dict[str, Callable[[], Any]] = {
            "trim_to": lambda: twins.cuda.trim_to(1, keep_first=1),
            "append": lambda: twins.cuda.append(0, k, v),
            "reserve": lambda: twins.cuda.reserve(2),
        }
        error = RuntimeError("an illegal memory access was encountered")
        with monkeypatch.context() as patch:
            patch.setattr(host_gpu, "copy", Mock(side_effect=error))
            with pytest.raises(RuntimeError) as caught:
                uses[use]()
            assert caught.value is error
        twins.check()
        assert "nothing is reserved" in twins.do("commit", 1)[1]  # the error is not raised again
        twins.append(2)
        twins.do("trim_to", 1, keep_first=1)


# ---- interrupts, and devices that fail ----

HELD = ROWS - 2  # tokens that must move, two rows at a time, to make room
# The number of copies in each lane.
N_PIECES = {"append": 5, "append_all": 5, "reserve": 5, "trim_to": 8}


USES = [(1, use) for use in N_PIECES] + [(2, "append")]


class TooLateError(Exception):
    """An exception of a signal handler."""


class Fault:
    """Lets the nth copy or launch raise before or after it, by a signal, or from then on."""

    def __init__(self, host_gpu: HostDriver, nth: int, when: str, error: BaseException) -> None:
        self._copy, self._left, self._when = host_gpu.copy, nth, when
        self._error = error
        self.n_copies = 0

    def copy(self, *arguments: Any) -> None:
        self._run(self._copy, *arguments)

    def launching(self, name: str) -> None:
        self._run(str, name)

    def _run(self, call: Callable[..., object], *arguments: Any) -> None:
        self._left -= 1
        at = self._when if self._left == 0 else "later" if self._left < 0 else ""
        if at == "signal":
            signal.raise_signal(signal.SIGALRM)
        if at == "before" or (at and self._when == "always"):
            raise self._error
        call(*arguments)
        self.n_copies += 1
        if at == "behind":
            raise self._error

    def handler(self, *_: Any) -> None:
        raise self._error


def before_a_move(batch: int) -> Twins:
    twins = Twins(batch=batch, dtype="f16")
    twins.append(ROWS)
    twins.do("trim_to", HELD)
    return twins


def moves(twins: Twins) -> dict[str, Callable[[Any], Any]]:
    """Calls that move the tokens of one of the caches."""
    two = twins.tokens(2, "float16", token_major=twins.batch == 1)
    all_layers = [given(twins.rng, (LAYERS, HEADS, DIM), "float16") for _ in "kv"]

    def own(kv: Any, arrays: list[Array]) -> list[Any]:
        return arrays if kv is twins.host else list(map(array_of, arrays))

    return {
        "append": lambda kv: kv.append(0, *own(kv, two)),
        "append_all": lambda kv: kv.append_all(*own(kv, all_layers)),
        "reserve": lambda kv: (kv.reserve(2), kv.rollback()),
        "trim_to": lambda kv: kv.trim_to(1, keep_first=8),
    }


def interrupted(twins: Twins, use: str) -> BaseException | None:
    """Call it on the device's cache, and return the exception."""
    try:
        moves(twins)[use](twins.cuda)
    except (KeyboardInterrupt, TooLateError) as error:
        return error
    return None


def check_tokens(twins: Twins) -> None:
    """Both hold the same tokens."""
    assert twins.cuda.seq_len == twins.host.seq_len
    assert twins.cuda.next_position == twins.host.next_position
    for layer in range(LAYERS):
        for there, here in zip(twins.cuda.layer(layer), twins.host.layer(layer), strict=True):
            assert same_bits(numpy_of(there), here)


@pytest.mark.parametrize(
    ("when", "kind"),
    [("before", KeyboardInterrupt), ("behind", TooLateError), ("signal", KeyboardInterrupt)],
)
@pytest.mark.parametrize(("batch", "use"), USES)
def test_an_interrupt_loses_no_token(
    host_gpu: HostDriver, batch: int, use: str, when: str, kind: type[BaseException]
) -> None:
    n_moved = N_PIECES[use] * 2 * LAYERS * batch
    n_copies = n_moved + (use in {"append", "append_all"})  # and a launch
    for nth in range(1, n_copies + 2):
        with before_a_move(batch) as twins, pytest.MonkeyPatch.context() as patch:
            error = kind()
            fault = Fault(host_gpu, nth, when, error)
            patch.setattr(host_gpu, "copy", fault.copy)
            patch.setattr(host_gpu, "launching", fault.launching)
            handler = signal.signal(signal.SIGALRM, fault.handler)
            try:
                found = interrupted(twins, use)
            finally:
                signal.signal(signal.SIGALRM, handler)
            assert found is (error if nth <= n_copies else None)
            if found is None:
                assert fault.n_copies == n_copies
                continue
            assert fault.n_copies >= n_moved  # all of it, and some of it twice
            if use == "trim_to":
                twins.host.trim_to(1, keep_first=8)
            check_tokens(twins)
            # The cache is usable.
            twins.do("clear")
            twins.append(ROWS)


@pytest.mark.parametrize(("batch", "use"), USES)
@pytest.mark.parametrize("nth", [2, 19])
def test_a_device_that_fails_half_way_has_lost_tokens(
    host_gpu: HostDriver, tmp_path: Path, batch: int, use: str, nth: int
) -> None:
    error = RuntimeError("an illegal memory access was encountered")
    with before_a_move(batch) as twins:
        kv = twins.cuda
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_gpu, "copy", Fault(host_gpu, nth, "always", error).copy)
            with pytest.raises(RuntimeError) as caught:
                moves(twins)[use](kv)
        assert caught.value is error
        k, v = map(array_of, twins.tokens(1, "float16"))
        one = array_of(np.ones((LAYERS, HEADS, DIM), "float16"))
        row = array_of(np.zeros(1, "int32"))
        uses: list[Callable[[], Any]] = [
            lambda: kv.append(0, k, v),
            lambda: kv.append_at(0, k, v, row),
            lambda: kv.layer(0),
            lambda: kv.layer(0, "float32"),
            lambda: kv.seq_len,
            lambda: kv.reserve(1),
            lambda: kv.trim_to(1),
            lambda: kv.crop(0),
            lambda: kv.save(tmp_path / "session"),
            lambda: kv.address(0, "k"),
            kv.__enter__,
            kv.copy,
            kv.clear,
            kv.rollback,
        ]
        if batch == 1:
            uses.append(lambda: kv.append_all(one, one))
        for call in uses:
            with pytest.raises(RuntimeError, match="KVCache 'kv' has lost tokens: the device"):
                call()
        assert not (tmp_path / "session").exists()
        assert repr(kv).startswith(f"KVCache({HELD} of")
        kv.close()
        assert kv.closed


# ---- others that come meanwhile ----


def test_other_calls_are_refused_while_rows_are_queued(
    cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of CUDA releases the interpreter's lock, so that other threads run."""
    is_meanwhile = False
    n_refused = 0

    def meanwhile(call: Callable[..., None]) -> Callable[..., None]:
        def refusing(*arguments: Any) -> None:
            nonlocal is_meanwhile, n_refused
            assert not is_meanwhile
            is_meanwhile = True
            for use in (append, append_at, kv.clear):
                with pytest.raises(RuntimeError, match="another thread appends"):
                    use()
            with pytest.raises(BufferError, match="live views"):
                kv.close()
            n_refused += 1
            is_meanwhile = False
            call(*arguments)

        return refusing

    k = array_of(np.ones((1, HEADS, DIM), "float16"))
    many = array_of(np.ones((ROWS - 1, HEADS, DIM), "float16"))
    row = array_of(np.zeros(1, "int32"))

    def append() -> None:
        kv.append(0, k, k)

    def append_at() -> None:
        kv.append_at(0, k, k, row)

    for name in ("copy", "launching"):
        monkeypatch.setattr(host_gpu, name, meanwhile(getattr(host_gpu, name)))
    with cuda.KVCache(1, HEADS, DIM, ROWS) as kv:
        append()
        assert (len(kv), n_refused) == (1, 1)
        kv.append(0, many, many)
        assert (len(kv), n_refused) == (ROWS, 2)
        kv.trim_to(1, keep_first=1)
        assert (len(kv), n_refused) == (2, 4)
        kv.clear()
        append_at()
        assert (len(kv), n_refused) == (0, 5)


def test_the_cache_may_end_while_rows_move(
    host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = before_a_move(1)
    twins.host.close()
    copy = host_gpu.copy

    def leave(*arguments: Any) -> None:
        if not twins.cuda.closed:
            twins.cuda.__exit__()
            gc.collect()
        assert host_gpu.allocated  # the memory still exists
        copy(*arguments)

    monkeypatch.setattr(host_gpu, "copy", leave)
    with pytest.raises(um.ClosedError):
        twins.cuda.reserve(1)
    assert host_gpu.allocated == {}


@pytest.mark.parametrize("use", ["append", "append_at", "layer", "copy"])
def test_the_cache_may_end_while_work_is_queued(
    cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    kv = cuda.KVCache(1, HEADS, DIM, ROWS)
    k = array_of(np.ones((1, HEADS, DIM), "float32"))
    row = array_of(np.zeros(1, "int32"))
    kv.append(0, k, k)
    address = kv.address(0, "k")
    n_calls = 0

    def leaving(call: Callable[..., None]) -> Callable[..., None]:
        def left(*arguments: Any) -> None:
            nonlocal n_calls
            n_calls += 1
            if n_calls == 1 and use != "append":
                with pytest.raises(BufferError):
                    kv.close()
            kv.__exit__()
            gc.collect()
            assert address in host_gpu.allocated
            call(*arguments)

        return left

    for name in ("launching", "copy"):
        monkeypatch.setattr(host_gpu, name, leaving(getattr(host_gpu, name)))
    uses: dict[str, Callable[[], Any]] = {
        **{"append": lambda: kv.append(0, k, k), "append_at": lambda: kv.append_at(0, k, k, row)},
        **{"layer": lambda: kv.layer(0, "float32"), "copy": lambda: kv.copy().close()},
    }
    with contextlib.suppress(um.ClosedError):
        uses[use]()
    assert n_calls
    gc.collect()
    assert address not in host_gpu.allocated


def test_no_row_moves_while_others_read(
    host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Twins(dtype="f16") as twins:
        twins.append(ROWS)
        twins.do("trim_to", 3)

        def meanwhile(name: str) -> None:
            assert name == "read_f16_f32"
            with pytest.raises(BufferError, match="another thread that copies"):
                twins.cuda.reserve(1)

        with monkeypatch.context() as patch:
            patch.setattr(host_gpu, "launching", meanwhile)
            there = twins.cuda.layer(0, "float32")
        for a, b in zip(there, twins.host.layer(0, "float32"), strict=True):
            assert same_bits(numpy_of(a), b)
        twins.do("reserve", 1)
