# cython: language_level=3, boundscheck=False, wraparound=False
"""Which thread uses a decoder's memory: one computation at a time, or the end of the decoder.

ggml computes without the interpreter's lock, so another thread may close a decoder, or end the
interpreter, meanwhile. Python's RLock would cost more per token than anything else around ggml. A
waiting thread blocks in a lock of its own, and so never wakes after the end of the interpreter.
"""
import atexit
import os
import time
from _thread import allocate_lock
from weakref import WeakSet

from unimem.errors import ClosedError

cimport cython

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident()

# How long the end of the interpreter waits for the tokens in flight, of all decoders together.
_END_SECONDS = 60.0

_turns = WeakSet()


cdef class Turn:
    """A decoder's turn: one thread has it at a time, and may take it again.

    Attributes
    ----------
    is_over : bool
        Whether `end` was called: `__enter__` raises ClosedError then.
    """

    def __cinit__(self):
        self._waiting = []
        _turns.add(self)

    @property
    def n_waiting(self) -> int:
        """The number of waiting threads."""
        return len(self._waiting)

    def take(self, seconds: float | None = None) -> bool:
        """Wait for the turn, at most this many seconds; return whether this thread has it.

        Signals are handled meanwhile.
        """
        cdef unsigned long me = PyThread_get_thread_ident()
        with cython.critical_section(self):
            if self.is_taken_by(me):
                return True
            handed = allocate_lock()
            handed.acquire()
            waiter = me, handed
            self._waiting.append(waiter)
        try:
            handed.acquire(timeout=-1 if seconds is None else seconds)
        except BaseException:
            if not self.stop_waiting(waiter):
                self.leave()
            raise
        return not self.stop_waiting(waiter)

    def give(self) -> None:
        """Undo one `take`."""
        self.leave()

    def end(self) -> None:
        """Refuse every further computation, and take the turn after the one in flight."""
        self.is_over = True
        self.take()

    @cython.critical_section
    def begin_anew(self) -> None:
        """Forget the owner and all waiters, which a forked child does not have."""
        self._depth = 0
        self._waiting = []

    cdef bint is_taken_by(self, unsigned long me) noexcept:
        """Take the turn for a thread unless another one has it. Needs the critical section."""
        if self._depth and self._owner != me:
            return False
        self._owner = me
        self._depth += 1
        return True

    @cython.critical_section
    cdef bint stop_waiting(self, tuple waiter) except -1:
        """Return True if the thread was still waiting, False if it was handed the turn."""
        if waiter not in self._waiting:
            return False
        self._waiting.remove(waiter)
        return True

    cdef int enter(self) except -1:
        cdef unsigned long me = PyThread_get_thread_ident()
        cdef bint is_ours
        with cython.critical_section(self):
            is_ours = self.is_taken_by(me)
        if not is_ours:
            self.take()
        if self.is_over:
            self.leave()
            raise ClosedError("the Decoder is closed")
        return 0

    @cython.critical_section
    cdef void leave(self) noexcept:
        if self._depth:  # a child may have begun anew meanwhile
            self._depth -= 1
            if self._depth == 0 and self._waiting:
                # Hand it over: a thread that computes one token after another would win every race.
                self._owner, handed = self._waiting.pop(0)
                self._depth = 1
                handed.release()

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *_error: object) -> None:
        self.leave()


def _end_all():
    """Wait for the tokens of daemon threads, and keep these threads from their next turn."""
    deadline = time.monotonic() + _END_SECONDS
    for turn in list(_turns):
        turn.take(max(0.0, deadline - time.monotonic()))


def _begin_anew():
    """Free all turns in a forked child."""
    for turn in list(_turns):
        turn.begin_anew()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_begin_anew)
