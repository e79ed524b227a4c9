# The owner of a decoder's memory, for forward.pyx.
cdef class Ownership:
    cdef object __weakref__
    cdef public bint is_over
    cdef unsigned long _owner
    cdef int _depth
    cdef list _waiting  # threads, and the lock that each of them waits in

    cdef bint is_taken_by(self, unsigned long me) noexcept
    cdef bint stop_waiting(self, tuple waiter) except -1
    # Waits until no other thread owns it; ClosedError where it is over.
    cdef int enter(self) except -1
    cdef void leave(self) noexcept
