"""Planning offsets in one arena: buffers whose lives do not overlap share bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from types import MappingProxyType

from unimem.base.arguments import integer

_TRIES = 200  # orders tried, at most
_VISITS = 2_000_000  # visits of neighbours in all tries: some tenths of a second


@dataclass(frozen=True)
class BufferUse:
    """The size of a buffer, and the first and last step that uses it. Immutable.

    Parameters
    ----------
    name : str
        The buffer's name, unique in a plan.
    nbytes : int
        Its size; 0 is allowed.
    first, last : int
        The first and the last step that uses it, inclusive, from 0 on. A buffer written in step 3
        and read in step 5 has `first` 3 and `last` 5, and shares no byte with one written in
        step 5.

    Raises
    ------
    ValueError
        The name is no string, a number no integer or negative, or `last` is before `first`.

    Examples
    --------
    >>> import unimem as um
    >>> um.BufferUse("gate", 4096, first=3, last=5).nbytes
    4096
    """

    name: str
    nbytes: int
    first: int
    last: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"name: expected a string, got {self.name!r}")
        for field, least in (("nbytes", 0), ("first", 0), ("last", self.first)):
            try:
                value = integer(getattr(self, field))
            except TypeError as error:
                raise ValueError(f"{field} of {self.name!r}: {error}") from None
            object.__setattr__(self, field, value)
            if value < least:
                start = " (its first use)" if field == "last" else ""
                raise ValueError(
                    f"{field} of {self.name!r}: expected at least {least}{start}, got {value}"
                )


class BufferPlan:
    """Offsets in one arena for buffers of known lifetimes, apart if they live at once. Immutable.

    A plan takes no memory: take `total_bytes` from a tape, and add an offset to the address.

    Parameters
    ----------
    uses : iterable of BufferUse
        The buffers, in any order.
    align : int, default 64
        The alignment of every offset, a power of two. Sizes are rounded up to it.

    Raises
    ------
    TypeError
        One of `uses` is no `BufferUse`.
    ValueError
        Two buffers have the same name, or `align` is no power of two.

    Attributes
    ----------
    uses : tuple of BufferUse
        The buffers, as given.
    align : int
        As given.
    offsets : mapping of str to int
        Where each buffer begins, in bytes, in the order of `uses`; 0 for a buffer without bytes.
    total_bytes : int
        Size of the arena: where the last buffer ends, rounded up.
    lower_bound_bytes : int
        The least that any plan needs: the most bytes that live at one step, sizes rounded up.

    Notes
    -----
    Finding the smallest arena is NP-hard (dynamic storage allocation; Garey and Johnson, problem
    SR2). A plan is the best of up to 200 greedy ones. Each takes the buffers in some order and puts
    each into a gap that is free for all of its life: the lowest, or the tightest.

    - The first orders are by size and by first use, each with both kinds of gaps (Pisarchyk and
      Lee, *Efficient memory management for deep neural net inference*, 2020), so no plan is above
      one of these four; then by size x life, by size x size x life, and by the most bytes that live
      beside the buffer. Ties keep the order of `uses`.
    - Buffers that end above the middle between a plan's total and the lower bound move halfway to
      the front of its order, which is tried again: squeaky wheel optimization (Joslin and Clements,
      1999). Orders derived from the lowest plan are tried first.
    - The search ends at the lower bound, as most plans of transformers do with the first order, or
      after a counted amount of work.

    So equal input gives equal output on any machine. Time and memory grow with the number of pairs
    of buffers that live at once. docs/buffers.md has results of ``unimem bench buffers``.

    Examples
    --------
    >>> import unimem as um
    >>> plan = um.BufferPlan(
    ...     [
    ...         um.BufferUse("residual", 256, first=0, last=3),
    ...         um.BufferUse("normed", 256, first=1, last=2),
    ...         um.BufferUse("gate", 1000, first=2, last=3),
    ...         um.BufferUse("down", 256, first=3, last=4),
    ...     ]
    ... )
    >>> dict(plan.offsets)
    {'residual': 1024, 'normed': 1280, 'gate': 0, 'down': 1280}
    >>> plan.total_bytes, plan.lower_bound_bytes
    (1536, 1536)
    """

    def __init__(self, uses: Iterable[BufferUse], align: int = 64) -> None:
        try:
            self._align = integer(align)
        except TypeError:
            raise ValueError(f"align: expected a power of two, got {align!r}") from None
        if self._align < 1 or self._align.bit_count() != 1:
            raise ValueError(f"align: expected a power of two, got {align!r}")
        try:
            self._uses = tuple(uses)
        except TypeError:
            raise TypeError(f"uses: expected an iterable of BufferUse, got {uses!r:.60}") from None
        names: set[str] = set()
        for number, use in enumerate(self._uses):
            if not isinstance(use, BufferUse):
                raise TypeError(f"uses[{number}]: expected a BufferUse, got {use!r:.60}")
            if use.name in names:
                raise ValueError(f"uses[{number}]: expected a name of its own, got {use.name!r}")
            names.add(use.name)
        self._offsets = dict.fromkeys((use.name for use in self._uses), 0)
        placed = [use for use in self._uses if use.nbytes]
        problem = _Problem(placed, self._align)
        begins, self._total_bytes = problem.solve()
        self._offsets.update((use.name, at) for use, at in zip(placed, begins, strict=True))
        self._lower_bound_bytes = problem.bound

    def __repr__(self) -> str:
        return (
            f"<BufferPlan: {len(self._uses)} buffers in {self._total_bytes} bytes, "
            f"lower bound {self._lower_bound_bytes}>"
        )

    @property
    def uses(self) -> tuple[BufferUse, ...]:
        """The buffers, as given."""
        return self._uses

    @property
    def align(self) -> int:
        """The alignment of every offset."""
        return self._align

    @property
    def offsets(self) -> Mapping[str, int]:
        """Where each buffer begins, in bytes."""
        return MappingProxyType(self._offsets)

    @property
    def total_bytes(self) -> int:
        """Size of the arena."""
        return self._total_bytes

    @property
    def lower_bound_bytes(self) -> int:
        """The most bytes that live at one step, each size rounded up to `align`."""
        return self._lower_bound_bytes


class _Problem:
    """Buffers by number, in the order of their uses; all of them have bytes."""

    def __init__(self, uses: Sequence[BufferUse], align: int) -> None:
        self.uses = uses
        self.sizes = [-(-use.nbytes // align) * align for use in uses]
        self.bound = 0
        self.neighbours: list[list[int]] = [[] for _ in uses]
        # The most bytes that live at once during each buffer's life.
        self.crowds = [0] * len(uses)
        living: list[int] = []
        for i in sorted(range(len(uses)), key=lambda i: uses[i].first):
            living = [j for j in living if uses[j].last >= uses[i].first]
            self.neighbours[i] += living
            for j in living:
                self.neighbours[j].append(i)
            living.append(i)
            crowd = sum(self.sizes[j] for j in living)
            for j in living:
                self.crowds[j] = max(self.crowds[j], crowd)
            self.bound = max(self.bound, crowd)

    def solve(self) -> tuple[list[int], int]:
        """Return where each buffer begins, and where the last one ends."""
        starts = self._starts()
        visits = sum(map(len, self.neighbours)) + len(self.uses)
        tries = min(_TRIES, max(len(starts), _VISITS // max(visits, 1)))
        # Orders derived from the lowest plan are tried first; numbers break ties.
        numbers = count()
        heap = [(0, next(numbers), order, tightest) for order, tightest in starts]
        seen = set(starts)
        best: list[int] = []
        least: int | None = None
        while heap and tries and least != self.bound:
            tries -= 1
            _, _, order, tightest = heappop(heap)
            begins = self._place(order, tightest)
            ends = [begin + size for begin, size in zip(begins, self.sizes, strict=True)]
            total = max(ends, default=0)
            if least is None or total < least:
                best, least = begins, total
            following = _promote(order, ends, (self.bound + total) // 2)
            if (following, tightest) not in seen:
                seen.add((following, tightest))
                heappush(heap, (total, next(numbers), following, tightest))
        return best, least or 0

    def _starts(self) -> list[tuple[tuple[int, ...], bool]]:
        """Return the first orders, best first, and whether each takes the tightest gaps."""
        uses, sizes, crowds = self.uses, self.sizes, self.crowds
        lives = [use.last - use.first + 1 for use in uses]

        def most(*keys: Sequence[int]) -> tuple[int, ...]:
            return tuple(sorted(range(len(uses)), key=lambda i: tuple(-key[i] for key in keys)))

        largest, earliest = most([use.nbytes for use in uses]), most([-use.first for use in uses])
        areas = [size * life for size, life in zip(sizes, lives, strict=True)]
        return [
            (largest, False),
            (most([size * area for size, area in zip(sizes, areas, strict=True)]), False),
            (most(crowds, lives, sizes), False),
            (most(areas), False),
            (largest, True),
            (earliest, False),
            (earliest, True),
        ]

    def _place(self, order: Sequence[int], tightest: bool) -> list[int]:
        """Put each buffer into a gap between placed buffers that live at the same time."""
        sizes = self.sizes
        begins = [-1] * len(order)
        ends = [-1] * len(order)
        for i in order:
            size = sizes[i]
            beside = [j for j in self.neighbours[i] if ends[j] > 0]
            uppers = sorted([begins[j] for j in beside])
            lowers = sorted([ends[j] for j in beside])
            # A gap lies between the k-th end and the next beginning, both sorted.
            chosen = lowers[-1] if beside else 0
            smallest = 0
            for low, high in zip([0, *lowers], uppers, strict=False):
                gap = high - low
                if gap >= size and (not smallest or gap < smallest):
                    chosen, smallest = low, gap
                    if not tightest:
                        break
            begins[i] = chosen
            ends[i] = chosen + size
        return begins


def _promote(order: Sequence[int], ends: Sequence[int], high: int) -> tuple[int, ...]:
    """Move buffers that end above `high` halfway to the front."""
    rank = [0] * len(order)
    for number, i in enumerate(order):
        rank[i] = number - 1 if ends[i] > high else 2 * number
    return tuple(sorted(order, key=rank.__getitem__))
