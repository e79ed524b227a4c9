"""A scratchpad of a GPU queues copies and kernels, over a driver in main memory.

The contract tests the behaviour of all caches; these tests check the calls of the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

import unimem as um
from support.contracts.pad_model import (
    DTYPES,
    TAKEN,
    awkward,
    check_that_it_is_closed,
    converted,
    dtype_of,
    same_bits,
)
from support.gpu.host_gpu import HostDriver, array_of, numpy_of
from unimem._core.status import device_ledger

pytestmark = pytest.mark.usefixtures("cuda", "gives_memory_back")

Array = NDArray[Any]
STREAM = 1234


def rows(n: int, dim: int = 4, dtype: str = "float32") -> Array:
    return np.random.default_rng(n).normal(size=(n, dim)).astype(dtype_of(dtype))


def address_of(pad: Any) -> int:
    return int(pad.as_array().data.ptr)


# ---- what is queued ----


def test_a_token_is_one_copy(cuda: Any, host_gpu: HostDriver) -> None:
    with cuda.Scratchpad(8, 4) as pad:
        base, given = address_of(pad), [rows(1)[0], rows(3)]
        first, more = map(array_of, given)
        host_gpu.calls.clear()
        pad.append(first, stream=STREAM)
        pad.append_batch(more)
        pad.append_batch(more[:0], stream=STREAM)  # nothing
        assert host_gpu.calls == [
            ("copy", base, first.data.ptr, 16, STREAM),
            ("copy", base + 16, more.data.ptr, 48, 0),
        ]
        assert same_bits(numpy_of(pad.as_array()), np.concatenate([given[0][None], given[1]]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", DTYPES)
def test_conversion_is_one_launch(cuda: Any, host_gpu: HostDriver, dtype: str, given: str) -> None:
    values = awkward(given, (2, 333))
    with cuda.Scratchpad(5, 333, dtype) as pad:
        host_gpu.calls.clear()
        tokens = array_of(values)
        calls: list[Callable[[], None]] = [
            lambda: pad.append(tokens[0], stream=STREAM),
            lambda: pad.append_batch(tokens, stream=STREAM),
            lambda: pad.append_batch(tokens[::-1], stream=STREAM),
        ]
        if given not in TAKEN[dtype]:
            for call in calls:
                with pytest.raises(TypeError, match=rf"of {dtype}: expected.*got {given}"):
                    call()
            assert (host_gpu.calls, pad.is_empty) == ([], True)
            return
        for call in calls:
            call()
        assert same_bits(numpy_of(pad.as_array()), converted(values[[0, 0, 1, 1, 0]], dtype))
        kinds = [call[0] for call in host_gpu.calls]
        straight = "copy" if given == dtype else "launch"
        assert kinds == [straight, straight, "launch"]
        assert {call[-1] for call in host_gpu.calls} == {STREAM}


def test_kernels_are_compiled_when_the_pad_is_made(
    cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = Mock(side_effect=RuntimeError("no compiler"))
    with monkeypatch.context() as patch:
        patch.setattr(host_gpu, "module", refuse)
        with pytest.raises(RuntimeError, match="no compiler"):
            cuda.Scratchpad(8, 4, "float16")
        assert host_gpu.allocated == {}
    with cuda.Scratchpad(8, 4, "float16") as pad:
        monkeypatch.setattr(host_gpu, "module", refuse)
        pad.append(array_of(rows(1)[0]))
        assert len(pad) == 1


@pytest.mark.parametrize("given", ["float32", "float16"])
def test_when_the_device_refuses_nothing_is_appended(
    cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    refuse = Mock(side_effect=RuntimeError("an illegal memory access was encountered"))
    token = array_of(rows(1, dtype=given)[0])
    with cuda.Scratchpad(8, 4) as pad:
        with monkeypatch.context() as patch:
            patch.setattr(host_gpu, "copy", refuse)
            patch.setattr(host_gpu, "launching", refuse)
            with pytest.raises(RuntimeError, match="illegal"):
                pad.append(token)
            assert len(pad) == 0
        pad.append(token)
        assert len(pad) == 1


def test_other_calls_are_refused_while_rows_are_queued(
    cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of CUDA releases the interpreter's lock, so that other threads run."""
    token, copy = array_of(rows(1)[0]), host_gpu.copy
    refused: list[str] = []

    def meanwhile(*arguments: Any) -> None:
        for call in (lambda: pad.append(token), pad.clear, pad.close):
            with pytest.raises((RuntimeError, BufferError)) as caught:
                call()
            refused.append(str(caught.value))
        copy(*arguments)

    with cuda.Scratchpad(8, 4) as pad:
        monkeypatch.setattr(host_gpu, "copy", meanwhile)
        pad.append(token)
        assert [text.partition(": ")[2][:14] for text in refused[:2]] == ["another thread"] * 2
        assert "live views" in refused[2]
        assert len(pad) == 1


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_that_would_overlap_themselves(cuda: Any, host_gpu: HostDriver, dtype: str) -> None:
    with cuda.Scratchpad(8, 4, dtype) as pad:
        given = rows(8, dtype=dtype)
        pad.append_batch(array_of(given))
        old = pad.as_array()
        pad.crop(2)
        host_gpu.calls.clear()
        as_other = old.view("float16" if dtype == "float32" else "bfloat16")[:, :4]
        for overlapping in (old[1:3], old[2:4], old[3:6], old[1:4][::-1], as_other[1:3]):
            with pytest.raises(ValueError, match="got rows that overlap them: append a copy"):
                pad.append_batch(overlapping)
        assert (len(pad), host_gpu.calls) == (2, [])
        pad.append_batch(old[4:6])  # beside them
        pad.append_batch(old[:2][::-1, ::-1])
        expected = np.concatenate([given[[0, 1, 4, 5]], given[:2][::-1, ::-1]])
        assert same_bits(numpy_of(pad.as_array()), expected)
        del old, as_other, overlapping


# ---- making one ----


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_seq_len": 2**31, "dim": 2**31}, ValueError, "too large"),
        ({"pages": "9m", "pinned": True}, ValueError, "pages"),
    ],
)
def test_a_refused_pad_leaves_nothing(
    cuda: Any, host_gpu: HostDriver, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        cuda.Scratchpad(**{"max_seq_len": 8, "dim": 4} | options)
    assert host_gpu.allocated == {}


def test_a_pad_on_a_borrowed_tape(cuda: Any) -> None:
    with cuda.Tape(1 << 12, name="history") as tape:
        tape.take(1)
        pad = cuda.Scratchpad(8, 4, "float16", tape=tape, device=0)
        assert pad.tape is tape
        assert address_of(pad) == tape.block.address + 256
        assert tape.used_bytes == 256 + 8 * 4 * 2
        with pytest.raises(ValueError, match="device, pinned, pages not accepted beside tape="):
            cuda.Scratchpad(8, 4, tape=tape, device=3, pinned=True, pages="4k")
        with (
            um.Tape(1 << 12) as other,
            pytest.raises(TypeError, match=r"a unimem\.cuda\.Tape, got unimem\.Tape$"),
        ):
            cuda.Scratchpad(8, 4, tape=other)
        with pytest.raises(TypeError):
            um.Scratchpad(8, 4, tape=tape)
        with pytest.raises(um.TapeFull):
            cuda.Scratchpad(1000, 4, tape=tape)
        pad.append(array_of(rows(1)[0]))
        view = pad.as_array()
        assert tape.owns(view)
        pad.close()  # the memory is the tape's
        assert (pad.closed, tape.closed) == (True, False)
        del view
        tape.freeze()
        with pytest.raises(um.FrozenError):
            cuda.Scratchpad(8, 4, tape=tape)
        tape.thaw()
        other_pad = cuda.Scratchpad(8, 4, tape=tape)
    assert other_pad.closed
    for use in (lambda: other_pad.append(array_of(rows(1)[0])), other_pad.as_array):
        with pytest.raises(um.ClosedError, match="history"):
            use()


def test_a_pad_that_was_never_made_is_closed(cuda: Any) -> None:
    with cuda.Tape(64) as tape:
        pad = cuda.Scratchpad.__new__(cuda.Scratchpad)
        with pytest.raises(um.TapeFull):
            pad.__init__(64, 8, tape=tape)
        check_that_it_is_closed(pad, array_of(np.ones(8, "float32")))


def test_memory_ledger_and_name(cuda: Any, host_gpu: HostDriver) -> None:
    with cuda.Scratchpad(100, 8, "float64", name="mine") as pad:
        assert list(host_gpu.allocated.values()) == [6400]
        assert device_ledger()[("cuda:0", "history")]["nbytes"] == 6400
        assert (pad.capacity, pad.dim, pad.dtype, pad.name) == (100, 8, np.float64, "mine")
        assert address_of(pad) % 256 == 0
        with pytest.raises(um.CacheFull, match="'mine'"):
            pad.append_batch(array_of(rows(101, 8, "float64")))
        assert repr(pad) == "Scratchpad(len=0, capacity=100, dim=8)"
    assert repr(pad) == "Scratchpad(closed)"
    assert host_gpu.allocated == {}


def test_the_other_byte_order_is_refused(cuda: Any) -> None:
    for dtype, given in (("float32", ">f4"), ("float32", ">f2"), ("float64", ">f8")):
        with cuda.Scratchpad(4, 8, dtype) as pad:
            rows = array_of(np.ones((2, 8), given))
            for append, a in ((pad.append_batch, rows), (pad.append, rows[0])):
                with pytest.raises(TypeError, match=f"expected .* byte order, got {given}"):
                    append(a)
            assert pad.is_empty
