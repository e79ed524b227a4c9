"""How the memory of a process has grown while it was watched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from unimem.accounting.samples import Sample

__all__ = ["GrowthPoint", "MemoryGrowth"]

_MOST = 240  # points that are kept: an even number


class GrowthPoint(NamedTuple):
    """What was in RAM at one time.

    Attributes
    ----------
    seconds : float
        On a clock that is never set.
    resident_bytes : dict of str to int
        Of each category of main memory, by share (Pss).
    """

    seconds: float
    resident_bytes: dict[str, int]


@dataclass(slots=True)
class MemoryGrowth:
    """What was in RAM over time, in at most 242 points, however long it is watched. For one thread.

    Of many samples every second, fourth, eighth ... is kept, so that points are as far from each
    other as samples were, and the last one in any case.
    """

    _kept: list[GrowthPoint] = field(default_factory=list)
    _last: GrowthPoint | None = None
    _n: int = 0
    _every: int = 1

    def take(self, sample: Sample) -> None:
        """Take the next sample; one whose report was read before is no new point."""
        if self._last is not None and sample.report_seconds <= self._last.seconds:
            return
        rows = (row for row in sample.report.rows if row.device is None)
        sizes = {row.category: row.resident_bytes or 0 for row in rows}
        self._last = GrowthPoint(sample.report_seconds, sizes)
        if self._n % self._every == 0:
            self._kept.append(self._last)
            if len(self._kept) > _MOST:
                del self._kept[1::2]
                self._every *= 2
        self._n += 1

    @property
    def points(self) -> tuple[GrowthPoint, ...]:
        """The points, by time."""
        last = self._last
        if last is None or self._kept[-1] is last:
            return tuple(self._kept)
        return (*self._kept, last)
