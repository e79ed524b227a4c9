# How many threads compute a token, for forward.pyx.
from libc.stdint cimport int64_t

cdef enum:
    MOST_COUNTS = 64  # all threads, 1, 2, 4, ... fewer down to the half, and halves down to 1

cdef class ThreadCount:
    cdef readonly int most
    cdef readonly bint adapts
    cdef int _counts[MOST_COUNTS]
    cdef int _last  # index of the count 1
    cdef int _at, _tried  # index of the settled count, and of the one on trial or -1
    cdef int64_t _cost, _usual
    cdef int64_t _look_ns, _look_n
    cdef int _looks  # how many looks are compared next: 1, or the length of a trial so far
    cdef int64_t _wait_fewer, _wait_more
    cdef int _patience, _patience_more
    cdef bint _is_slow

    # As `n`, `limit_ns` and `note` of the class.
    cdef int next_count(self) noexcept nogil
    cdef int64_t limit(self) noexcept nogil
    cdef void note_token(self, int64_t ns, bint given_up) noexcept nogil
    cdef void _end_trial(self, int64_t mean, bint is_faster) noexcept nogil
    cdef void _start_trial(self, int step) noexcept nogil
