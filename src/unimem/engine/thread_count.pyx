# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""How many threads compute a token, chosen by the durations of tokens.

All threads meet after each node of a graph. If another process occupies one of their cores, all
wait for the thread on it, and fewer threads are faster. Durations show that for every cause: a
neighbour, a quota, a slow core.
"""

cdef enum:
    # Samples ("looks") have at least LOOK_TOKENS tokens and LOOK_NS: a time slice is milliseconds.
    LOOK_TOKENS = 2
    LOOK_NS = 10_000_000
    TRIAL_LOOKS = 8  # the longest trial
    # A token is given up after twice its usual duration plus this.
    GRACE_NS = 1_000_000
    # After a failed trial, wait this many times the time that it lost. Trials of fewer threads,
    # which fail on a quiet machine, become less and less frequent.
    PATIENCE = 64
    # Trials of more threads are sooner at first: the slow thread may have been an accident.
    HASTE = 8
    MOST_PATIENCE = 1 << 16


cdef class ThreadCount:
    """Chooses how many threads compute the next token.

    One count is settled. Now and then a neighbouring count is tried for some tokens, and kept if
    they take at least 3 % less. Durations scatter by a fifth even on a quiet machine, so a small
    gain has to hold for 16 tokens, and a gain of a third for 2. A smaller count is tried at the
    beginning, and whenever tokens become a quarter slower; a larger count again and again. The
    choice depends on the noted durations alone.

    Parameters
    ----------
    most : int
        The most threads.
    adapts : bool
        Whether there may be fewer.

    Attributes
    ----------
    most, adapts
        As given.

    Examples
    --------
    >>> count = ThreadCount(2, adapts=True)
    >>> for _ in range(6):  # a token takes 90 ms with two threads, and 50 ms with one
    ...     count.note(90_000_000 if count.n == 2 else 50_000_000)
    >>> count.n
    1
    """
    #: def __init__(self, most: int, *, adapts: bool) -> None: ...

    def __cinit__(self, int most, *, bint adapts):
        if not 1 <= most < 1 << 30:
            raise ValueError(f"most: expected at least one thread, got {most}")
        cdef int less = 1
        self.most, self.adapts = most, adapts
        self._counts[0] = most
        # Other work takes one core or a few: of many threads, one fewer is much better than half.
        while self._counts[self._last] > 1:
            self._counts[self._last + 1] = max(most - less, self._counts[self._last] // 2)
            self._last += 1
            less *= 2
        self._tried = -1
        self._looks = 1
        self._patience = PATIENCE
        self._patience_more = HASTE

    @property
    def n(self) -> int:
        """How many threads compute the next token."""
        return self.next_count()

    @property
    def limit_ns(self) -> int:
        """Nanoseconds after which the next token is given up and computed anew; 0 for never."""
        return self.limit()

    def note(self, int64_t ns, *, bint given_up=False) -> None:
        """Note the nanoseconds of a token with `n` threads, or those after which it was given up.

        A token that is given up is computed anew with `n` threads, which may have changed.
        """
        self.note_token(ns, given_up)

    cdef int next_count(self) noexcept nogil:
        return self._counts[self._at if self._tried < 0 else self._tried]

    cdef int64_t limit(self) noexcept nogil:
        if not self.adapts or self._cost == 0 or self.next_count() == 1:
            return 0
        return 2 * self._cost + GRACE_NS

    cdef void note_token(self, int64_t ns, bint given_up) noexcept nogil:
        cdef int64_t mean, gain
        cdef bint is_slow
        if not self.adapts:
            return
        if self._cost == 0:
            # The first token runs with cold caches.
            self._cost = ns
            return
        if self._tried < 0:
            self._wait_fewer -= ns
            self._wait_more -= ns
        self._look_ns += ns
        if given_up:
            if self._tried >= 0:
                self._end_trial(ns, False)
            else:
                self._cost = max(self._cost, ns)
                self._patience = PATIENCE
                self._start_trial(1)
            return
        self._look_n += 1
        if self._look_n < self._looks * LOOK_TOKENS or self._look_ns < self._looks * LOOK_NS:
            return
        mean = self._look_ns // self._look_n
        if self._tried >= 0:
            # With more looks, a smaller gain is significant.
            gain = self._cost - mean
            if gain <= self._cost // 32:
                self._end_trial(mean, False)
            elif gain > self._cost // (3 * self._looks) or self._looks == TRIAL_LOOKS:
                self._end_trial(mean, True)
            else:
                self._looks += 1
            return
        # A running average: a single look may be an accident.
        self._cost = mean if self._usual == 0 else self._cost + (mean - self._cost) // 4
        is_slow = self._usual > 0 and self._cost > self._usual + self._usual // 4
        # Longer contexts, and lasting neighbours, become usual.
        self._usual = (
            mean if self._usual == 0 else min(self._cost, self._usual + self._usual // 64)
        )
        if is_slow and not self._is_slow:
            self._wait_fewer = 0
            self._patience = PATIENCE
        self._is_slow = is_slow
        self._look_ns = self._look_n = 0
        if self._at < self._last and self._wait_fewer <= 0:
            self._start_trial(1)
        elif self._at > 0 and self._wait_more <= 0:
            self._start_trial(-1)

    cdef void _start_trial(self, int step) noexcept nogil:
        self._tried = self._at + step
        self._look_ns = self._look_n = 0
        self._looks = 1

    cdef void _end_trial(self, int64_t mean, bint is_faster) noexcept nogil:
        cdef bint is_fewer = self._tried > self._at
        cdef int64_t lost = max(self._look_ns - self._look_n * self._cost, self._look_ns // 8)
        if is_faster:
            self._at = self._tried
            self._cost = self._usual = mean
            self._is_slow = False
            self._patience = PATIENCE
            self._patience_more = HASTE
            # Go on in the same direction at once, and back later.
            self._wait_fewer = 0 if is_fewer else PATIENCE * self._look_ns
            self._wait_more = 4 * self._look_ns if is_fewer else 0
        elif is_fewer:
            self._wait_fewer = self._patience * lost
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        else:
            self._wait_more = self._patience_more * lost
            self._patience_more = min(2 * self._patience_more, PATIENCE)
        self._tried = -1
        self._look_ns = self._look_n = 0
        self._looks = 1
