"""What a token of a runtime in C costs on memory of unimem, beside the same loops on malloc's.

The runtime is that of examples/c: a llama in plain C, with the plainest products. One pinned
thread, in CPU time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import unimem as um
from unimem_bench import models, states
from unimem_bench.suite import Measure, Suite, costs

SUITE = Suite("runtime", "What does a token of a runtime in C cost?", passes=5, quick_passes=2)

MALLOC = "malloc"
SHAPE = "15m"
N_TOKENS, FIRST = 16, 1
ROUNDS = 21


@cache
def _library() -> ctypes.CDLL:
    path = Path(um.get_library()).with_name("libunimem-bench-runtime.so")
    library = ctypes.CDLL(str(path), use_errno=True)
    library.bench_runtime_open.restype = ctypes.c_void_p
    library.bench_runtime_talk.restype = ctypes.c_double
    return library


class Runtime:
    """A llama in C, and one conversation.

    It computes GGUF models of architecture ``llama``, of F32, F16 and Q8_0. With `on_heap`, all
    memory is malloc's, and the weights are read into it. OSError if the model is missing, or of
    another kind.
    """

    def __init__(self, path: str | Path, *, on_heap: bool) -> None:
        opened = _library().bench_runtime_open(os.fsencode(path), ctypes.c_int(on_heap))
        if not opened:
            code = ctypes.get_errno()
            raise OSError(code, f"expected a llama of F32, F16 and Q8_0: {os.strerror(code)}", path)
        self._opened = ctypes.c_void_p(opened)

    def talk(self, n: int, first: int = FIRST) -> tuple[float, list[int]]:
        """Start with a token; return CPU seconds for the n that follow, and the tokens."""
        tokens = (ctypes.c_uint32 * n)()
        begin = ctypes.c_uint32(first), ctypes.c_size_t(n)
        seconds = float(_library().bench_runtime_talk(self._opened, *begin, tokens))
        if seconds < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"expected a token of the model, and room: {os.strerror(code)}")
        return seconds, list(tokens)

    def close(self) -> None:
        """Give all memory back."""
        _library().bench_runtime_close(self._opened)


@contextmanager
def runtimes(path: Path) -> Iterator[tuple[Runtime, Runtime]]:
    """Open a model on memory of unimem and on malloc's; both compute the same tokens."""
    ours = Runtime(path, on_heap=False)
    try:
        theirs = Runtime(path, on_heap=True)
        try:
            if ours.talk(N_TOKENS)[1] != theirs.talk(N_TOKENS)[1]:
                raise AssertionError("the two sides compute different tokens")
            yield ours, theirs
        finally:
            theirs.close()
    finally:
        ours.close()


def milliseconds_a_token(runtime: Runtime) -> float:
    """Return the time of a token, as the mean of several in a row."""
    return 1e3 * runtime.talk(N_TOKENS)[0] / N_TOKENS


def compare(measure: Measure, kind: models.Kind) -> None:
    """Compare unimem's memory with malloc's: the same functions, tapes and cache over both.

    The weights are mapped from the page cache, or read into memory of malloc. All memory is touched
    first.
    """
    path = models.write_model(measure.folder, SHAPE, kind)
    states.read_through(path)
    with runtimes(path) as (ours, theirs):
        measure.compare(
            {"unimem": partial(milliseconds_a_token, ours)},
            {MALLOC: partial(milliseconds_a_token, theirs)},
            rounds=ROUNDS,
            warmup=1,
        )


MEASURED: tuple[models.Kind, ...] = ("f16", "q8_0")
for kind in MEASURED:
    SUITE.case(
        f"token, {kind}",
        f"What does a token take in plain C, with weights of {kind} and 15 million parameters?",
        unit="ms",
        targets=[costs(MALLOC, 1.1, issue=23)],
    )(partial(compare, kind=kind))
