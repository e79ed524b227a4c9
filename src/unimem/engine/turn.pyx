# cython: language_level=3, boundscheck=False, wraparound=False
"""Which thread uses a decoder's memory.

With its code and data out of the caches, Python's RLock costs a token more than anything else
around ggml. The interpreter's lock guards these few fields as well, and where there is none a
critical section. Who has to wait does so in a lock of its own, and so never wakes after the end of
the interpreter.
"""
from _thread import allocate_lock

from unimem.errors import ClosedError

cimport cython

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident()


cdef class Ownership:
    """Owned by one thread at a time, which may take it again.

    Attributes
    ----------
    is_over : bool
        Whether `__enter__` refuses.
    """

    def __cinit__(self):
        self._waiting = []

    @property
    def n_waiting(self):
        """Threads that wait."""
        return len(self._waiting)

    def take(self, seconds=None):
        """Wait until no other thread owns it, at most so many seconds; return whether it is ours.

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

    def give(self):
        """Undo one `take`."""
        self.leave()

    @cython.critical_section
    def begin_anew(self):
        """Take it from whoever owns it: in a forked child, which does not have that thread."""
        self._depth = 0
        self._waiting = []

    cdef bint is_taken_by(self, unsigned long me) noexcept:
        """Take it for a thread, where nobody else owns it. Wants the critical section."""
        if self._depth and self._owner != me:
            return False
        self._owner = me
        self._depth += 1
        return True

    @cython.critical_section
    cdef bint stop_waiting(self, tuple waiter) except -1:
        """Whether it waited still: else it has been handed over."""
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
                # Handed over: who computes token after token would always be first to take it.
                self._owner, handed = self._waiting.pop(0)
                self._depth = 1
                handed.release()

    def __enter__(self):
        self.enter()

    def __exit__(self, *_error):
        self.leave()
