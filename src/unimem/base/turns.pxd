# A decoder's turn, for forward.pyx.
cdef class Turn:
    cdef object __weakref__
    cdef public bint is_over
    cdef unsigned long _owner
    cdef int _depth
    cdef list _waiting  # threads, and the lock that each of them waits in

    cdef bint is_taken_by(self, unsigned long me) noexcept
    cdef bint stop_waiting(self, tuple waiter) except -1
    # Wait until no other thread has the turn; raise ClosedError after `end`.
    cdef int enter(self) except -1
    cdef void leave(self) noexcept
