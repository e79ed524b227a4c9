"""Policies of a cache of pieces, simulated: how often each lacks a piece that is asked for.

A trace is a list of calls, each of which asks for some pieces of one layer; a policy is given the
calls in order and says how many pieces it had to read. Pieces of one call never evict each other.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Trace = list[list[int]]

N_LAYERS, N_EXPERTS, N_USED = 24, 64, 8
ZIPF, STAY = 0.9, 0.3


def uniform_trace(n_tokens: int, seed: int = 1) -> Trace:
    """Draw a trace that uses all experts of each layer alike."""
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((n_tokens, N_LAYERS, N_EXPERTS)), -1)[..., :N_USED]
    return as_trace(experts, N_EXPERTS)


def skewed_trace(n_tokens: int, seed: int = 1) -> Trace:
    """Draw experts by Zipf's law; each expert of a token stays for the next with `STAY`."""
    rng = np.random.default_rng(seed)
    shares = np.arange(1, N_EXPERTS + 1) ** -ZIPF
    shares /= shares.sum()
    order = np.array([rng.permutation(N_EXPERTS) for _ in range(N_LAYERS)])
    trace: Trace = []
    before: list[list[int]] = [[] for _ in range(N_LAYERS)]
    for _ in range(n_tokens):
        for layer in range(N_LAYERS):
            used = [expert for expert in before[layer] if rng.random() < STAY]
            # The order in which numbers of this law are drawn without being put back.
            drawn = np.argsort(rng.exponential(size=N_EXPERTS) / shares)
            others = [each for each in order[layer, drawn].tolist() if each not in used]
            before[layer] = used = used + others[: N_USED - len(used)]
            trace.append([layer * N_EXPERTS + expert for expert in used])
    return trace


def as_trace(experts: NDArray[np.integer], n_experts: int) -> Trace:
    """Turn the experts of tokens, of shape (tokens, layers, used), into a trace."""
    numbers = experts + n_experts * np.arange(experts.shape[1])[:, None]
    return [call for token in numbers.tolist() for call in token]


class Policy(Protocol):
    """A cache of a number of slots."""

    def call(self, ids: Sequence[int]) -> int:
        """Ask for pieces; return how many of them had to be read."""


def miss_share(policy: Policy, trace: Trace) -> float:
    """Return the share of the uses that had to be read, after the first third of a trace."""
    begin = len(trace) // 3
    misses = [policy.call(ids) for ids in trace]
    return sum(misses[begin:]) / sum(map(len, trace[begin:]))


class Lru:
    """The piece that was not used for the longest time goes."""

    def __init__(self, n_slots: int, trace: Trace) -> None:
        self._n_slots = n_slots
        self._slots: OrderedDict[int, None] = OrderedDict()

    def call(self, ids: Sequence[int]) -> int:
        """As `Policy.call`."""
        missing = [each for each in ids if each not in self._slots]
        for each in ids:
            self._slots[each] = None
            self._slots.move_to_end(each)
        while len(self._slots) > self._n_slots:
            self._slots.popitem(last=False)
        return len(missing)


class Lfu:
    """The piece that was used least goes; of several, the one not used for the longest time.

    Uses are counted for pieces that are not there as well.
    """

    def __init__(self, n_slots: int, trace: Trace) -> None:
        self._n_slots, self._n_calls = n_slots, 0
        self._slots: set[int] = set()
        self._counts: Counter[int] = Counter()
        self._heap: list[tuple[int, int, int]] = []  # count, last use, piece; old ones as well
        self._last: dict[int, int] = {}

    def call(self, ids: Sequence[int]) -> int:
        """As `Policy.call`."""
        self._n_calls += 1
        missing = [each for each in ids if each not in self._slots]
        for each in ids:
            self._counts[each] += 1
            self._last[each] = self._n_calls
            heapq.heappush(self._heap, (self._counts[each], self._n_calls, each))
        self._slots.update(missing)
        kept = []
        while len(self._slots) > self._n_slots:
            entry = heapq.heappop(self._heap)
            count, last, piece = entry
            if piece in self._slots and (count, last) == (self._counts[piece], self._last[piece]):
                if last == self._n_calls:
                    kept.append(entry)
                else:
                    self._slots.remove(piece)
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return len(missing)


class Arc:
    """Adaptive replacement [1]_, which balances recent and frequent pieces.

    .. [1] N. Megiddo, D. Modha: ARC: a self-tuning, low overhead replacement cache. FAST 2003.
    """

    def __init__(self, n_slots: int, trace: Trace) -> None:
        self._n_slots, self._target = n_slots, 0.0
        # Pieces used once, and more often; those in slots, and those that were evicted.
        self._once: OrderedDict[int, None] = OrderedDict()
        self._often: OrderedDict[int, None] = OrderedDict()
        self._gone_once: OrderedDict[int, None] = OrderedDict()
        self._gone_often: OrderedDict[int, None] = OrderedDict()

    def call(self, ids: Sequence[int]) -> int:
        """As `Policy.call`."""
        return sum(self._use(each, set(ids)) for each in ids)

    def _use(self, piece: int, held: set[int]) -> bool:
        for slots in (self._once, self._often):
            if piece in slots:
                del slots[piece]
                self._often[piece] = None
                return False
        n_once, n_often = len(self._gone_once), len(self._gone_often)
        was_often = piece in self._gone_often
        if piece in self._gone_once:
            self._target = min(self._n_slots, self._target + max(1.0, n_often / n_once))
            del self._gone_once[piece]
            into = self._often
        elif was_often:
            self._target = max(0.0, self._target - max(1.0, n_once / n_often))
            del self._gone_often[piece]
            into = self._often
        else:
            into = self._once
        if len(self._once) + len(self._often) >= self._n_slots:
            self._evict(held, was_often=was_often)
        into[piece] = None
        while len(self._once) + len(self._gone_once) > self._n_slots and self._gone_once:
            self._gone_once.popitem(last=False)
        while len(self._gone_once) + len(self._gone_often) > self._n_slots:
            (self._gone_often or self._gone_once).popitem(last=False)
        return True

    def _evict(self, held: set[int], *, was_often: bool) -> None:
        n = len(self._once)
        first = n > 0 and (n > self._target or (was_often and n == self._target))
        ways = [(self._once, self._gone_once), (self._often, self._gone_often)]
        for slots, gone in ways if first else ways[::-1]:
            for piece in slots:
                if piece not in held:
                    del slots[piece]
                    gone[piece] = None
                    return


class Belady:
    """The piece that is used latest again goes, which needs the future: no policy does better."""

    def __init__(self, n_slots: int, trace: Trace) -> None:
        self._n_slots, self._n_calls = n_slots, 0
        self._slots: set[int] = set()
        self._uses: defaultdict[int, list[int]] = defaultdict(list)  # still to come, last first
        for number in range(len(trace) - 1, -1, -1):
            for piece in trace[number]:
                self._uses[piece].append(number)
        self._heap: list[tuple[int, int]] = []  # minus the next use, piece; old ones as well

    def call(self, ids: Sequence[int]) -> int:
        """As `Policy.call`."""
        missing = [each for each in ids if each not in self._slots]
        self._slots.update(missing)
        for each in ids:
            self._uses[each].pop()
            heapq.heappush(self._heap, (-self._next(each), each))
        kept = []
        while len(self._slots) > self._n_slots:
            entry = heapq.heappop(self._heap)
            when, piece = entry
            if piece in self._slots and -when == self._next(piece):
                if piece in ids:
                    kept.append(entry)
                else:
                    self._slots.remove(piece)
        for entry in kept:
            heapq.heappush(self._heap, entry)
        self._n_calls += 1
        return len(missing)

    def _next(self, piece: int) -> int:
        uses = self._uses[piece]
        return uses[-1] if uses else 1 << 60


POLICIES: dict[str, Callable[[int, Trace], Policy]] = {"LRU": Lru, "LFU": Lfu, "ARC": Arc}
