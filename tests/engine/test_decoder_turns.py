"""Turns of a decoder: closing it, ending the interpreter and forking while it computes."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from conftest import Run
from support.models.decoders import Computation, computing_by
from support.processes.forks import in_child
from unimem.backends import ggml
from unimem.engine import Decoder, embedded_model

SECONDS = 100  # for calls that end at once


@contextmanager
def computing(decoder: Decoder) -> Iterator[tuple[Any, list[Any]]]:
    """Have another thread within ggml until the event is set; then note its exception."""
    begun, go, raised = threading.Event(), threading.Event(), []

    def wait_first(compute: Callable[[], int], _given: Computation) -> int:
        begun.set()
        assert go.wait(SECONDS)
        return compute()

    def work() -> None:
        try:
            for _ in range(1000):
                decoder.prefill([1, 5])
                decoder.reset()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    with computing_by(decoder, wait_first):
        thread.start()
        try:
            assert begun.wait(SECONDS)
            yield go, raised
        finally:
            go.set()
            thread.join(SECONDS)
    assert not thread.is_alive()


def test_close_refuses_while_another_thread_computes() -> None:
    with Decoder(embedded_model(), ctx=64) as decoder:
        with computing(decoder) as (go, raised):
            with pytest.raises(BufferError, match="another thread computes"):
                decoder.close()
            assert not decoder.layout.closed
            assert decoder.addresses()
            go.set()
            decoder.__exit__()
        (error,) = raised
        assert isinstance(error, um.ClosedError)


def test_leaving_a_with_waits_for_the_token_in_flight() -> None:
    decoder = Decoder(embedded_model(), ctx=64)
    with computing(decoder) as (go, raised):
        leaves = threading.Thread(target=decoder.__exit__)
        leaves.start()
        leaves.join(0.05)
        assert not decoder.layout.closed
        go.set()
        leaves.join(SECONDS)
        assert decoder.layout.closed
    (error,) = raised
    assert isinstance(error, um.ClosedError)


def test_a_server_of_asyncio_may_cancel_a_generation() -> None:
    """The thread of a cancelled task goes on until the next conversation begins."""
    begun, go, raised = threading.Event(), threading.Event(), []

    def wait_first(compute: Callable[[], int], _given: Computation) -> int:
        begun.set()
        assert go.wait(SECONDS)
        return compute()

    def text(n: int) -> list[str]:
        return list(decoder.generate("Once", n))

    def work() -> None:
        try:
            text(40)
        except RuntimeError as error:
            raised.append(str(error))

    async def serve() -> list[str]:
        cancelled = asyncio.create_task(asyncio.to_thread(work))
        await asyncio.to_thread(begun.wait, SECONDS)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        again = asyncio.create_task(asyncio.to_thread(text, 4))
        while not decoder._turn.n_waiting:
            await asyncio.sleep(0.001)
        go.set()
        return await asyncio.wait_for(again, SECONDS)

    with Decoder(embedded_model(), ctx=64, threads=1) as decoder:
        expected = text(4)
        with computing_by(decoder, wait_first):
            assert asyncio.run(serve()) == expected  # it ends with its threads
        assert raised == ["a new conversation has begun; this one cannot go on"]
        assert text(4) == expected


def test_a_forked_child_does_not_wait() -> None:
    def ends() -> bool:
        decoder.__exit__()
        return decoder.layout.closed

    with Decoder(embedded_model(), ctx=64, threads=1) as decoder, computing(decoder) as (go, _):
        assert in_child(ends)
        go.set()
        decoder.__exit__()


# The first `atexit` function runs last, after the engine's.
AT_THE_END = """
    import atexit, ctypes, threading, time
    calls = []
    atexit.register(lambda: print(calls.count("begun"), calls.count("done")))
    from unimem.base import turns
    from unimem.engine import Decoder, embedded_model
    from unimem.backends import ggml

    address = ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(ctypes.c_int, address, address, ctypes.c_int, address, address)
    compute, begun = kind(ggml.compute_address), threading.Event()

    @kind
    def slow(*arguments):
        calls.append("begun")
        begun.set()
        time.sleep({seconds})
        status = compute(*arguments)
        calls.append("done")
        return status

    ggml.compute_address = ctypes.cast(slow, ctypes.c_void_p).value
    turns._END_SECONDS = {bound}
    decoder = Decoder(embedded_model(), ctx=256, threads=2)
    work = lambda: list(decoder.generate("Once upon a time", 200))
    threading.Thread(target=work, daemon=True).start()
    begun.wait()
"""


def test_the_interpreter_waits_for_the_token_of_a_daemon_thread(run_python: Run) -> None:
    ended = run_python(AT_THE_END.format(seconds=0.1, bound=60))
    assert (ended.returncode, ended.stderr) == (0, "")
    begun, done = ended.stdout.split()
    assert begun == done


def test_the_interpreter_waits_no_longer_than_a_minute(run_python: Run) -> None:
    ended = run_python(AT_THE_END.format(seconds=1000, bound=0.1))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1 0\n", "")


DAEMON = """
    import threading
    from unimem.engine import Decoder, embedded_model

    def work(decoder):
        for _ in range(1000):
            for _ in decoder.generate("Once upon a time", 200):
                begun.set()

    begun = threading.Event()
    threading.excepthook = lambda _: None  # that the decoder is closed
    {make}
        threading.Thread(target=work, args=(decoder,), daemon=True).start()
        begun.wait()
"""


@pytest.mark.parametrize(("make", "threads"), [
    ("with {}as decoder:", 2),
    ("if decoder := {}:", 1),
    pytest.param("with {}as decoder:", 1, marks=pytest.mark.slow),
    pytest.param("if decoder := {}:", 2, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_daemon_thread_kills_no_process(run_python: Run, make: str, threads: int) -> None:
    made = make.format(f"Decoder(embedded_model(), ctx=256, threads={threads}) ")
    ended = run_python(DAEMON.format(make=made))
    assert (ended.returncode, ended.stderr) == (0, "")


FORKS = """
    import os, signal, sys
    import unimem as um
    from unimem.engine import Decoder, embedded_model

    def text(threads):
        with Decoder(embedded_model(), ctx=64, threads=threads) as decoder:
            return "".join(decoder.generate("Once", 4))

    def in_child(use, *arguments):
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(100)  # where it would wait for ever
            try:
                said = use(*arguments)
            except um.ClosedError as error:
                said = str(error)
            os.write(theirs, said.encode())
            os._exit(0)
        os.close(theirs)
        assert os.waitpid(child, 0)[1] == 0
        return os.read(ours, 4096).decode()

    with Decoder(embedded_model(), ctx=64, threads={threads}) as decoder:
        again = lambda: "".join(decoder.generate("Once", 4))
        unused = in_child(text, 2)
        first = again()
        refused = {threads} > 1
        # ggml's own threads are made with the decoder, and those of OpenMP when it computes.
        assert "spawn" in unused if refused and {owns} else unused == first, unused
        assert in_child(text, 1) == first
        for said in (in_child(text, 2), in_child(again)):
            assert "spawn" in said and "threads=1" in said if refused else said == first, said
        assert in_child(lambda: str(decoder.close())) == "None"
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_child_computes_or_raises_at_once(run_python: Run, threads: int) -> None:
    """The child would wait for the parent's threads, which it does not have."""
    if not ggml._team.is_kept:
        pytest.skip("this ggml has an OpenMP that handles forks")
    # Newer versions of Python warn of the other threads.
    ended = run_python(
        FORKS.format(threads=threads, owns=ggml._HAS_OWN_THREADS),
        "-W",
        "ignore::DeprecationWarning",
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def names_of(kind: type) -> set[str]:
    """List the public methods and properties of a class, and what closes it."""
    return {name for name in vars(kind) if not name.startswith("_")} | {"__exit__", "__repr__"}


def put_aside(decoder: Decoder, path: Path) -> None:
    """Put a conversation aside, and go on with it."""
    with um.KVStore(f"{path}.store", ram_bytes=0, disk_bytes=1 << 26) as store:
        decoder.put_aside(store)
        decoder.generate_next_token()


# Every public name of a decoder, and whether it waits for the token of another thread.
CALLS: dict[str, tuple[bool, Callable[[Decoder, Path], object]]] = {
    "__exit__": (True, lambda decoder, _: decoder.__exit__()),
    "__repr__": (False, lambda decoder, _: repr(decoder)),
    "addresses": (False, lambda decoder, _: decoder.addresses()),
    "close": (False, lambda decoder, _: decoder.close()),
    "detokenize": (False, lambda decoder, _: decoder.detokenize([5])),
    "generate": (True, lambda decoder, _: list(decoder.generate("Once", 2))),
    "generate_next_token": (True, lambda decoder, _: decoder.generate_next_token()),
    "give_back": (True, lambda decoder, _: decoder.give_back()),
    "logits": (False, lambda decoder, _: decoder.logits),
    "put_aside": (True, put_aside),
    "prefill": (True, lambda decoder, _: decoder.prefill([1, 5])),
    "report": (False, lambda decoder, _: decoder.report()),
    "reset": (True, lambda decoder, _: decoder.reset()),
    "resume": (True, lambda decoder, path: decoder.resume(path)),
    "save_session": (True, lambda decoder, path: decoder.save_session(f"{path}.again")),
    "set_tokens": (True, lambda decoder, _: decoder.set_tokens([1, 5])),
    "token_ids": (True, lambda decoder, _: decoder.token_ids),
    "tokenize": (False, lambda decoder, _: decoder.tokenize("Once")),
    "tokenizer": (False, lambda decoder, _: decoder.tokenizer),
}


def test_every_public_name_is_in_the_table_of_turns() -> None:
    assert names_of(Decoder) == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_calls_wait_for_the_token_of_another_thread(name: str, tmp_path: Path) -> None:
    waits, call = CALLS[name]
    with Decoder(embedded_model(), ctx=64, threads=1) as decoder:
        decoder.prefill([1, 5])
        decoder.save_session(tmp_path / "talk")

        def work() -> None:
            with suppress(BufferError, RuntimeError):
                call(decoder, tmp_path / "talk")

        thread = threading.Thread(target=work)
        with computing(decoder) as (go, _):
            thread.start()
            while not decoder._turn.n_waiting and thread.is_alive():
                thread.join(0.001)
            assert thread.is_alive() == waits
            go.set()
            thread.join(SECONDS)


def test_pairs_of_calls_at_once_end_no_process(run_python: Run, tmp_path: Path) -> None:
    ended = run_python(f"""
        import itertools, pathlib, sys, threading, warnings
        sys.path[:0] = {sys.path!r}
        import unimem as um
        from engine.test_decoder_turns import CALLS
        from support.processes.at_once import at_once
        from unimem.engine import Decoder, embedded_model

        def repeat(name):
            for _ in range(3):
                try:
                    CALLS[name][1](decoder, path)
                except (BufferError, RuntimeError, um.CapacityError):
                    pass

        path = pathlib.Path({str(tmp_path)!r}) / "talk"
        make = lambda: Decoder(embedded_model(), ctx=64, threads=1)
        decoder = make()
        decoder.prefill([1, 5])
        decoder.save_session(path)
        said = list(decoder.generate("Once", 4))
        for pair in itertools.combinations_with_replacement(sorted(CALLS), 2):
            at_once(2, lambda i: repeat(pair[i]))
            if {{"close", "__exit__"}} & {{*pair}}:
                decoder.__exit__()
                decoder = make()
            assert list(decoder.generate("Once", 4)) == said, pair
        decoder.close()
    """)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_end_of_the_interpreter_lets_no_thread_end_within_a_library(run_python: Run) -> None:
    ended = run_python("""
        import threading
        import unimem as um
        from unimem.engine import embedded_model
        from unimem.engine.text.tokenizer import Tokenizer

        def work():
            while True:
                tokenizer.encode("once upon a time " * 10)
                begun.set()

        with um.open_weights(embedded_model()) as weights:
            tokenizer = Tokenizer.from_metadata(weights.metadata)
        begun = threading.Event()
        for _ in range(4):
            threading.Thread(target=work, daemon=True).start()
        begun.wait()
    """)
    assert (ended.returncode, ended.stderr) == (0, "")
