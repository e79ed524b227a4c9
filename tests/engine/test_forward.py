"""A step without Python: its calls, threads meanwhile, and how it ends."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import unimem as um
from support.models.decoders import Computation, computing_by, greedy, interrupted, tokens
from support.models.make import TINY, write_model
from unimem.accounting.published import Tally
from unimem.engine import Decoder
from unimem.engine.forward import ForwardPass
from unimem.engine.graph import Graph
from unimem.engine.thread_count import ThreadCount

SUCCESS, ABORTED, FAILED = 0, 1, -1  # of ggml_status


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf", shape=TINY, kind="f32")


@pytest.fixture
def decoder(model: Path) -> Iterator[Decoder]:
    with Decoder(model, ctx=300, threads=1) as decoder:
        decoder.prefill(tokens(5))
        yield decoder


def calls_of(function: Callable[[], object]) -> list[str]:
    """Return the names of the Python functions that are called."""
    called: list[str] = []

    def note(frame: Any, event: str, _argument: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return called


def test_a_token_runs_no_python(decoder: Decoder) -> None:
    check_no_python(decoder)


def test_a_token_of_layers_that_differ_runs_no_python(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "gemma3", replace(TINY, layers=7), "f32")
    with Decoder(path, ctx=300, threads=1) as decoder:
        assert len(decoder._history.parts) == 2
        decoder.prefill(tokens(5))
        check_no_python(decoder)


def check_no_python(decoder: Decoder) -> None:
    # Attention's length changes at 256 rows.
    decoder.prefill(tokens(248))
    step, prompt = decoder._forward.step, np.array(tokens(9))
    for _ in range(4):
        assert calls_of(lambda: step(3)) == ["<lambda>"]
        assert calls_of(decoder.generate_next_token) == ["generate_next_token"]
    assert decoder._decode.masks[0].n_kv > 256
    decoder.reset()
    decoder._forward.prefill(prompt)  # makes the graph for this number of tokens
    again = calls_of(lambda: decoder._forward.prefill(prompt))
    assert set(again) <= {"<lambda>", "ascontiguousarray"}


def test_another_thread_runs_meanwhile(decoder: Decoder) -> None:
    """`sem_wait` computes until another Python thread posts."""
    libc = ctypes.CDLL(None)
    semaphore = (ctypes.c_char * 64)()
    assert libc.sem_init(semaphore, 0, 0) == 0
    names = ("plan_address", "masks", "n_tokens", "batch")
    ours = {name: getattr(decoder._decode, name) for name in names}
    graph = SimpleNamespace(address=ctypes.addressof(semaphore), **ours)
    last = np.zeros(1, np.int32)
    inputs = SimpleNamespace(
        tokens=decoder._tokens.ctypes.data,
        positions=decoder._positions.ctypes.data,
        rows=[decoder._rows[0].ctypes.data],
        last=last.ctypes.data,
    )
    ids = np.zeros(300, np.int32)
    history = SimpleNamespace(kv=decoder.kv, parts=(decoder.kv._body,), windows=(300,))
    made_of: Any = (graph, graph, history, inputs, decoder.logits, ids)
    forward = ForwardPass(*made_of, threads=ThreadCount(1, adapts=False), turn=decoder._turn)
    forward.tally = decoder._tally
    forward.compute_address = ctypes.cast(libc.sem_wait, ctypes.c_void_p).value or 0
    begun = threading.Event()
    calls: list[Callable[[], None]] = [
        lambda: forward.step(3),
        lambda: forward.prefill(np.array([4])),
    ]
    for call in calls:
        begun.clear()
        post = threading.Thread(target=lambda: begun.wait() and libc.sem_post(semaphore))
        post.start()
        before = decoder.kv.seq_len
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000)  # the other thread runs only if the lock is released
        try:
            begun.set()
            call()
        finally:
            sys.setswitchinterval(interval)
        post.join()
        assert decoder.kv.seq_len == before + 1


@pytest.mark.parametrize("prompt", [[3], tokens(7)], ids=["a step", "a batch"])
def test_a_graph_that_fails_counts_no_token(decoder: Decoder, prompt: list[int]) -> None:
    expected = greedy(decoder, 3)
    decoder.kv.crop(5)
    for status in (FAILED, ABORTED):

        def fail(_compute: Callable[[], int], _given: Computation, status: int = status) -> int:
            return status

        expected_error = pytest.raises(RuntimeError, match=rf"\(status {status}\)")
        with computing_by(decoder, fail), expected_error:
            decoder.prefill(prompt)
        assert decoder.kv.seq_len == 5
        with pytest.raises(RuntimeError, match="no logits"):
            decoder.generate_next_token()
    decoder.kv.crop(4)
    decoder.prefill(tokens(5)[-1:])
    assert greedy(decoder, 3) == expected


@contextmanager
def handling(handler: Callable[..., None]) -> Iterator[None]:
    """Have SIGINT call a handler."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("prompt", [[3], tokens(7)], ids=["a step", "a batch"])
def test_a_handler_may_end_the_decoder(model: Path, prompt: list[int]) -> None:
    decoder = Decoder(model, ctx=300, threads=1)
    with (
        handling(lambda *_: decoder.__exit__()),
        interrupted(decoder, raised=um.ClosedError),
    ):
        decoder.prefill(prompt)
    assert decoder.layout.closed


@pytest.mark.parametrize("prompt", [[3], tokens(7)], ids=["a step", "a batch"])
def test_a_handler_cannot_change_the_conversation(
    decoder: Decoder, prompt: list[int], tmp_path: Path
) -> None:
    session, new = tmp_path / "session", tokens(9, seed=1)
    decoder.save_session(session)
    with um.KVStore(tmp_path / "store", ram_bytes=0, disk_bytes=1 << 20) as store:
        for call in (
            decoder.reset,
            lambda: decoder.resume(session),
            lambda: decoder.put_aside(store),
            lambda: decoder.set_tokens(new),
            lambda: decoder.prefill(new),
        ):

            def refused(*_: object, call: Callable[[], object] = call) -> None:
                with pytest.raises(RuntimeError, match="while tokens are computed"):
                    call()
                raise KeyboardInterrupt

            with handling(refused), interrupted(decoder):
                decoder.prefill(prompt)
            assert decoder.token_ids.tolist() == tokens(5)
    with handling(lambda *_: decoder.kv.clear()), interrupted(decoder, raised=ArithmeticError):
        with pytest.raises(RuntimeError, match="dropped, by clear or rollback"):
            decoder.prefill(prompt)
        raise ArithmeticError
    assert not len(decoder.token_ids)
    expected = decoder.prefill(new).copy()
    decoder.reset()
    assert np.array_equal(decoder.prefill(new), expected)


def test_a_conversation_that_begins_between_batches_stays_as_it_is(model: Path) -> None:
    with Decoder(model, ctx=300, window=50, threads=1) as decoder:

        def begin_anew(*_: int) -> None:  # as a signal handler would
            holds.stop()
            decoder.reset()
            decoder.prefill([5])

        holds = patch.object(Tally, "hold", begin_anew)
        holds.start()
        with pytest.raises(RuntimeError, match="signal handler began another conversation"):
            decoder.prefill(tokens(200))
        assert decoder.token_ids.tolist() == [5]


def test_a_graph_that_was_half_made_is_made_anew(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = decoder.prefill(tokens(9)).copy()
    for half, n in ((6, 6), (8, 9)):
        decoder.kv.crop(5)
        with monkeypatch.context() as patch:
            patch.setattr(Graph, "_bind", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                decoder.prefill(tokens(half))
        assert decoder.kv.seq_len == 5
        decoder.prefill(tokens(n))
    np.testing.assert_array_equal(decoder.logits, logits)


# ---- fewer threads -----------------------------------------------------------------------


def test_threads_that_were_asked_for_are_kept(model: Path) -> None:
    for threads, adapts in ((None, True), (2, False)):
        with Decoder(model, ctx=64, threads=threads) as decoder:
            count = decoder._forward.threads
            assert (count.most, count.adapts) == (decoder.threads, adapts)


def test_a_token_that_is_given_up_is_computed_with_fewer(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "unimem.engine.decoder.ThreadCount", lambda most, adapts: ThreadCount(most, adapts=True)
    )
    used: list[tuple[int, bool]] = []

    with Decoder(model, ctx=300, threads=2) as ours, Decoder(model, ctx=300, threads=1) as one:

        def late(compute: Callable[[], int], given: Computation) -> int:
            """Call ggml after the deadline: it ends after its first node."""
            used.append((given.n_threads, bool(given.is_over)))
            if given.is_over:
                until = time.monotonic_ns() + ours._forward.threads.limit_ns
                while time.monotonic_ns() <= until:
                    pass
            return compute()

        with computing_by(ours, late):
            for token in tokens(2):
                ours._forward.step(token)
                np.testing.assert_array_equal(ours.logits, one.prefill([token]))
        # The first token has no deadline, and a second attempt has none.
        assert used == [(2, False), (2, True), (1, False)]
        assert ours.kv.seq_len == 2
