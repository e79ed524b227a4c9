"""Who uses a decoder's memory: one computation at a time, or what closes the decoder.

ggml computes without the interpreter's lock, so another thread may close a decoder, or end the
interpreter, meanwhile.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

from unimem.engine.turn import Ownership

__all__ = ["Turn", "in_turn"]

_END_SECONDS = 60.0
"""How long the interpreter's end waits for the tokens in flight, of all decoders together."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
_turns: WeakSet[Turn] = WeakSet()


class Turn(Ownership):
    """A decoder's turn: entered for each computation, and no more once `end` was called.

    A thread that has it may enter it again.
    """

    def __init__(self) -> None:
        _turns.add(self)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep others from computing.

        Raises
        ------
        BufferError
            Another thread computes.
        """
        if not self.take(0):
            raise BufferError("another thread computes with the Decoder: let it end first")
        try:
            yield
        finally:
            self.give()

    def end(self) -> None:
        """Refuse every further computation, and wait for the one in flight."""
        self.is_over = True
        self.take()
        self.give()


class _HasTurn(Protocol):
    _turn: Turn


_Owner = TypeVar("_Owner", bound=_HasTurn)


def in_turn(method: Callable[Concatenate[_Owner, _P], _T]) -> Callable[Concatenate[_Owner, _P], _T]:
    """Make a method of a decoder compute in the decoder's turn."""

    @functools.wraps(method)
    def run(self: _Owner, /, *args: _P.args, **options: _P.kwargs) -> _T:
        with self._turn:
            return method(self, *args, **options)

    return run


def _end_all() -> None:
    """Wait for what is computed in daemon threads, and leave them waiting for their next turn."""
    deadline = time.monotonic() + _END_SECONDS
    for turn in list(_turns):
        turn.take(max(0.0, deadline - time.monotonic()))


def _begin_anew() -> None:
    """Take all turns from the threads that a forked child does not have."""
    for turn in list(_turns):
        turn.begin_anew()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_begin_anew)
