# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""How many threads compute a token, chosen by what tokens took.

All threads meet behind each node of a graph. Where another process is on one of their cores, all
wait for the thread that it keeps away, and fewer threads are faster. What a token takes says so,
whatever the reason is: a neighbour, a quota, a core that is slow.
"""

cdef enum:
    # What is compared is a look: so many tokens, and so long, since a time slice is milliseconds.
    LOOK_TOKENS = 2
    LOOK_NS = 10_000_000
    # A trial is at most as many looks.
    TRIAL_LOOKS = 8
    # A token is given up after twice what it should take, and this.
    GRACE_NS = 1_000_000
    # A trial that loses time is not repeated before this many times of what it lost. Trials of
    # fewer threads, which find nothing on a quiet machine, come less and less often.
    PATIENCE = 64
    # Trials of more come sooner at first: what took away a thread may have been an accident.
    HASTE = 8
    MOST_PATIENCE = 1 << 16


cdef class ThreadCount:
    """Chooses how many threads compute the next token.

    One count is settled. Now and then another one, next to it, is tried for some tokens, and kept
    where they take at least 3 % less. Durations scatter by a fifth also where nobody else works, so
    a small gain has to hold for 16 tokens, and one of a third for 2. One that is fewer is tried at
    the beginning, and as soon as tokens take a quarter longer than they did; one that is more,
    again and again. The choice is a function of the durations that were noted, and of nothing else.

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

    def __cinit__(self, int most, *, bint adapts):
        if not 1 <= most < 1 << 30:
            raise ValueError(f"most: expected at least one thread, got {most}")
        cdef int less = 1
        self.most, self.adapts = most, adapts
        self._counts[0] = most
        # Neighbours take one core or a few: of many threads, one fewer is much better than half.
        while self._counts[self._last] > 1:
            self._counts[self._last + 1] = max(most - less, self._counts[self._last] // 2)
            self._last += 1
            less *= 2
        self._tried = -1
        self._looks = 1
        self._patience = PATIENCE
        self._patience_more = HASTE

    @property
    def n(self):
        """How many threads compute the next token."""
        return self.next_count()

    @property
    def limit_ns(self):
        """After how many nanoseconds the next token is given up and computed anew; 0: never."""
        return self.limit()

    def note(self, int64_t ns, *, bint given_up=False):
        """Note what a token took with `n` threads.

        Parameters
        ----------
        ns : int
            Nanoseconds.
        given_up : bool
            Whether it was given up after these. It is computed anew with `n` threads, which may be
            another number now.
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
            # The first token finds nothing in the caches.
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
            # The more looks, the smaller a gain that is no accident.
            gain = self._cost - mean
            if gain <= self._cost // 32:
                self._end_trial(mean, False)
            elif gain > self._cost // (3 * self._looks) or self._looks == TRIAL_LOOKS:
                self._end_trial(mean, True)
            else:
                self._looks += 1
            return
        # One look is too few to tell a neighbour from an accident; the average of some is not.
        self._cost = mean if self._usual == 0 else self._cost + (mean - self._cost) // 4
        is_slow = self._usual > 0 and self._cost > self._usual + self._usual // 4
        # Longer contexts, and neighbours who stay, become what is usual.
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
            # Further on the same way at once, and back later.
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
