"""Tokens of a GPU's KV cache move, and others come meanwhile: nothing is lost in silence.

Over a driver in main memory. A call of CUDA releases the interpreter's lock, and around it a
signal's handler may raise.
"""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import unimem as um
from host_gpu import HostDriver, array_of, numpy_of
from kv_model import KV_DTYPES, given, same_bits
from kv_twins import DIM, HEADS, LAYERS, ROWS, Twins

pytestmark = pytest.mark.usefixtures("cuda", "gives_memory_back")

Array = NDArray[Any]
STREAM = 1234


@pytest.fixture(params=[1, 2], ids=["batch1", "batch2"])
def batch(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=KV_DTYPES)
def twins(request: pytest.FixtureRequest, cuda: Any, batch: int) -> Iterator[Twins]:
    with Twins(batch=batch, dtype=request.param) as twins:
        yield twins


# ---- tokens that move ----


def test_tokens_move_in_pieces_on_the_stream_that_needs_the_rows(
    cuda: Any, host_gpu: HostDriver
) -> None:
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

        # Six of the first to before the last one, backwards, on the current stream.
        host_gpu.calls.clear()
        twins.cuda.trim_to(1, keep_first=8)
        twins.host.trim_to(1, keep_first=8)
        moved = [call for call in host_gpu.calls if call[0] == "copy"]
        assert [call[3] for call in moved] == [3 * row, 3 * row, 2 * row] * (2 * LAYERS)
        assert [call[1] - call[2] for call in moved] == [3 * row] * len(moved)
        assert {call[4] for call in moved} == {0}
        twins.check()


def test_tokens_do_not_move_over_views(twins: Twins) -> None:
    twins.append(ROWS)
    k = given(twins.rng, (twins.batch, HEADS, 1, DIM), "float32")
    for part in range(2):
        views = twins.host.layer(1)[part], twins.cuda.layer(1)[part]
        assert twins.do("trim_to", 3, keep_first=1)[0] is BufferError
        del views
    twins.do("trim_to", 3)
    views = twins.host.layer(0)[0], twins.cuda.layer(0)[0]
    twins.do("append", 0, k, k)  # to before them
    twins.do("rollback")
    twins.append(ROWS - 3)
    twins.do("trim_to", ROWS - 1)
    views = twins.host.layer(0)[0], twins.cuda.layer(0)[0]
    assert twins.do("append", 0, k, k)[0] is BufferError
    assert twins.do("reserve", 1)[0] is BufferError
    del views
    assert twins.do("append", 0, k, k)[0] is None


@pytest.mark.parametrize("use", ["trim_to", "append", "reserve"])
def test_when_moving_fails_nothing_is_dropped(
    cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch, use: str
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

        def refuse(*_: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(host_gpu, "copy", refuse)
            with pytest.raises(RuntimeError) as caught:
                uses[use]()
            assert caught.value is error
        twins.check()
        assert "nothing is reserved" in twins.do("commit", 1)[1]  # not once more what was raised
        twins.append(2)
        twins.do("trim_to", 1, keep_first=1)


# ---- interrupts, and devices that fail ----

HELD = ROWS - 2  # tokens that have to move for the next ones, two rows by two rows
# How many copies that are, in each lane.
N_PIECES = {"append": 5, "append_all": 5, "reserve": 5, "trim_to": 8}


class Fault:
    """Lets the nth copy raise: before or behind it, from a signal's handler, or from there on."""

    def __init__(self, host_gpu: HostDriver, nth: int, when: str, error: BaseException) -> None:
        self._copy, self._left, self._when = host_gpu.copy, nth, when
        self._error = error
        self.n_copies = 0

    def copy(self, *arguments: Any) -> None:
        self._left -= 1
        at = self._when if self._left == 0 else "later" if self._left < 0 else ""
        if at == "signal":
            signal.raise_signal(signal.SIGALRM)
        if at == "before" or (at and self._when == "always"):
            raise self._error
        self._copy(*arguments)
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
    """What moves the tokens of one of the two."""
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
    """Call it on the device's cache: what it raised."""
    try:
        moves(twins)[use](twins.cuda)
    except (KeyboardInterrupt, TimeoutError) as error:
        return error
    return None


def check_tokens(twins: Twins) -> None:
    """Both hold the same, wherever it lies."""
    assert twins.cuda.seq_len == twins.host.seq_len
    assert twins.cuda.next_position == twins.host.next_position
    for layer in range(LAYERS):
        for there, here in zip(twins.cuda.layer(layer), twins.host.layer(layer), strict=True):
            assert same_bits(numpy_of(there), here)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TimeoutError("too late")])
@pytest.mark.parametrize("when", ["before", "behind", "signal"])
@pytest.mark.parametrize(("batch", "use"), [(1, use) for use in N_PIECES] + [(2, "append")])
def test_an_interrupt_loses_no_token(
    cuda: Any, host_gpu: HostDriver, batch: int, use: str, when: str, error: BaseException
) -> None:
    n_moved = N_PIECES[use] * 2 * LAYERS * batch
    n_copies = n_moved + (2 if use == "append" and batch == 1 else 0)  # K and V of the tokens
    for nth in range(1, n_copies + 2):
        with before_a_move(batch) as twins, pytest.MonkeyPatch.context() as patch:
            fault = Fault(host_gpu, nth, when, error)
            patch.setattr(host_gpu, "copy", fault.copy)
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
            # And it goes on.
            twins.do("clear")
            twins.append(ROWS)


@pytest.mark.parametrize(("batch", "use"), [(1, use) for use in N_PIECES] + [(2, "append")])
@pytest.mark.parametrize("nth", [2, 3, 19])
def test_a_device_that_fails_half_way_has_lost_tokens(
    cuda: Any, host_gpu: HostDriver, tmp_path: Path, batch: int, use: str, nth: int
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


def test_who_comes_while_rows_are_queued(
    cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of CUDA releases the interpreter's lock, so that other threads may come."""
    from unimem.cuda.kernels import RowKernels

    copy = host_gpu.copy
    refused: list[str] = []

    def meanwhile(*arguments: int) -> None:
        calls = [lambda: kv.append(0, k, k), lambda: kv.append_at(0, k, k, row), kv.clear, kv.close]
        for call in calls:
            with pytest.raises((RuntimeError, BufferError)) as caught:
                call()
            refused.append(str(caught.value))
        copy(*arguments)

    with cuda.KVCache(1, HEADS, DIM, ROWS) as kv:
        k = array_of(np.ones((1, HEADS, DIM), "float16"))
        row = array_of(np.zeros(1, "int32"))
        with monkeypatch.context() as patch:
            patch.setattr(host_gpu, "copy", meanwhile)
            kv.append(0, k, k)
        assert ["another thread appends" in text for text in refused] == [
            True,
            True,
            True,
            False,
        ] * 2
        assert "live views" in refused[3]
        assert len(kv) == 1
        kv.append(0, k, k)
        assert len(kv) == 2
        refused.clear()
        many = array_of(np.ones((ROWS - 2, HEADS, DIM), "float16"))
        kv.append(0, many, many)
        with monkeypatch.context() as patch:
            patch.setattr(host_gpu, "copy", meanwhile)
            kv.trim_to(1, keep_first=1)
        assert ["another thread appends" in text for text in refused] == [
            True,
            True,
            True,
            False,
        ] * 2
        assert "live views" in refused[3]
        kv.clear()
        refused.clear()
        append = RowKernels.append

        def meanwhile_at_a_launch(self: RowKernels, *arguments: Any) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(RowKernels, "append", append)
                meanwhile(0, 0, 0, 0)
            append(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(RowKernels, "append", meanwhile_at_a_launch)
            kv.append_at(0, k, k, row)
        assert ["another thread appends" in text for text in refused] == [True, True, True, False]
        assert "live views" in refused[3]


def test_who_leaves_the_cache_while_tokens_move(
    cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = before_a_move(1)
    twins.host.close()
    copy = host_gpu.copy

    def leave(*arguments: Any) -> None:
        twins.cuda.__exit__()
        gc.collect()
        assert host_gpu.allocated  # what is copied to is there still
        copy(*arguments)

    monkeypatch.setattr(host_gpu, "copy", leave)
    with pytest.raises(um.ClosedError):
        twins.cuda.reserve(1)
    assert host_gpu.allocated == {}


@pytest.mark.parametrize("use", ["append", "append_at", "layer", "copy"])
def test_who_leaves_the_cache_while_something_is_queued(
    cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    from unimem.cuda.kernels import RowKernels

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

    for owner, name in ((RowKernels, "append"), (RowKernels, "read"), (host_gpu, "copy")):
        monkeypatch.setattr(owner, name, leaving(getattr(owner, name)))
    uses: dict[str, Callable[[], Any]] = {
        "append": lambda: kv.append(0, k, k),
        "append_at": lambda: kv.append_at(0, k, k, row),
        "layer": lambda: kv.layer(0, "float32"),
        "copy": lambda: kv.copy().close(),
    }
    with contextlib.suppress(um.ClosedError):
        uses[use]()
    assert n_calls
    gc.collect()
    assert address not in host_gpu.allocated


def test_no_row_moves_while_another_thread_reads(
    cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unimem.cuda.kernels import RowKernels

    with Twins(dtype="f16") as twins:
        twins.append(ROWS)
        twins.do("trim_to", 3)
        read = RowKernels.read

        def meanwhile(self: RowKernels, *arguments: Any) -> None:
            with pytest.raises(BufferError, match="another thread that copies"):
                twins.cuda.reserve(1)
            read(self, *arguments)

        monkeypatch.setattr(RowKernels, "read", meanwhile)
        there = twins.cuda.layer(0, "float32")
        for a, b in zip(there, twins.host.layer(0, "float32"), strict=True):
            assert same_bits(numpy_of(a), b)
        twins.do("reserve", 1)
