"""What a watch shows, and how: samples and keys change it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from unimem.accounting.growth import MemoryGrowth
from unimem.accounting.report import Report
from unimem.accounting.samples import Rates, Sample, rates
from unimem.system.placement import Placement

__all__ = ["INTERVALS", "SORTS", "Line", "Sort", "State"]

Sort = Literal["category", "size", "resident", "growth"]
SORTS: tuple[Sort, ...] = get_args(Sort)

# What + and - choose among, in seconds.
INTERVALS = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

_REMEMBERED = 120  # samples that pictures over time have room for
_STEPS = {"up": -1, "down": 1, "page up": -10, "page down": 10, "end": 1 << 30}


class Line(NamedTuple):
    """One row or one mapping."""

    key: tuple[str | int | None, ...]  # what it is the same by in another report
    category: str
    name: str  # what is mapped; the name of a row is empty
    nbytes: int
    resident_bytes: int | None
    granted: Placement | None = None
    active_bytes: int | None = None
    address: int = 0
    change_bytes: int = 0  # what came to be in RAM since the last report
    since_start_bytes: int = 0  # and since the first

    @property
    def held_bytes(self) -> int:
        """What it grows by: memory of a GPU is all there."""
        return self.nbytes if self.resident_bytes is None else self.resident_bytes


@dataclass(slots=True)
class State:
    """What is shown and how; keys and samples change it. For one thread."""

    pid: int
    interval: float = 1.0  # from one sample to the next
    sort: Sort = "category"
    shows_mappings: bool = False
    is_paused: bool = False
    shows_help: bool = False
    top: int = 0  # the first line of the table that is shown
    first: Sample | None = None
    before: Sample | None = None
    now: Sample | None = None
    reports: tuple[Report, ...] = ()  # the last two that differ
    n_samples: int = 0
    ended: str = ""  # why no more samples will come
    late_seconds: float = 0.0  # how long a sample has been waited for
    has_quit: bool = False
    history: deque[Rates] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    growth: MemoryGrowth = field(default_factory=MemoryGrowth)
    _sorted: tuple[Report, Sort, bool, list[Line]] | None = None

    def take(self, sample: Sample) -> None:
        """Take the next sample; of another process with the same number, none."""
        if self.first is None:
            self.first = sample
        elif sample.counters.started != self.first.counters.started:
            self.ended = "it has ended, and its number is another process's now"
            return
        self.before, self.now = self.now, sample
        if not self.reports or sample.report is not self.reports[-1]:
            self.reports = (*self.reports[-1:], sample.report)
        self.history.append(self.rates())
        self.growth.take(sample)
        self.n_samples += 1

    def rates(self) -> Rates:
        """Compute what happened a second between the last two samples."""
        return Rates() if self.now is None else rates(self.before, self.now)

    def press(self, key: str) -> None:
        """Do what a key stands for; one that stands for nothing does nothing."""
        if self.shows_help:
            self.shows_help = False
            if key != "q":
                return
        match key:
            case "q":
                self.has_quit = True
            case "s":
                self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
                self.top = 0
            case "m":
                self.shows_mappings = not self.shows_mappings
                self.top = 0
            case "p":
                self.is_paused = not self.is_paused
            case "h" | "?":
                self.shows_help = True
            case "+" | "=":
                self.interval = next((i for i in INTERVALS if i > self.interval), self.interval)
            case "-":
                shorter = [i for i in INTERVALS if i < self.interval]
                self.interval = shorter[-1] if shorter else self.interval
            case "home":
                self.top = 0
            case _ if key in _STEPS:
                self.top = max(0, self.top + _STEPS[key])  # what is shown ends where the lines do

    def lines(self) -> list[Line]:
        """Give the rows or the mappings, of which there may be thousands: sorted once a report."""
        if self.now is None or self.first is None:
            return []
        report, chosen = self.now.report, (self.sort, self.shows_mappings)
        if self._sorted is None or self._sorted[0] is not report or self._sorted[1:3] != chosen:
            self._sorted = report, *chosen, self._lines(self.first.report, report)
        return self._sorted[3]

    def _lines(self, start: Report, report: Report) -> list[Line]:
        find = _mappings if self.shows_mappings else _rows
        first, before = (
            {line.key: line.held_bytes for line in find(each)} for each in (start, self.reports[0])
        )
        found = [
            line._replace(
                change_bytes=line.held_bytes - before.get(line.key, 0),
                since_start_bytes=line.held_bytes - first.get(line.key, 0),
            )
            for line in find(report)
        ]
        places = {name: i for i, name in enumerate(dict.fromkeys(r.category for r in report.rows))}
        orders: dict[Sort, Callable[[Line], int]] = {
            "category": lambda line: places.get(line.category, len(places)),
            "size": lambda line: -line.nbytes,
            "resident": lambda line: -line.held_bytes,
            "growth": lambda line: -line.since_start_bytes,
        }
        return sorted(found, key=orders[self.sort])

    def total(self) -> Line:
        """Sum up the rows of main memory, and what has come and gone."""
        assert self.now is not None
        assert self.first is not None
        reports = (self.first.report, self.reports[0], self.now.report)
        first, before, now = (report.resident_bytes for report in reports)
        nbytes = self.now.report.total_bytes
        return Line((), "total", "", nbytes, now)._replace(
            change_bytes=now - before, since_start_bytes=now - first
        )

    def document(self) -> dict[str, Any]:
        """Give the last sample and its rates, as for JSON."""
        now, counted = self.now, self.rates()
        assert now is not None
        return {
            "pid": self.pid,
            "time": now.clock,
            "seconds": None if self.before is None else now.seconds - self.before.seconds,
            "rates": {f"{name}_per_second": rate for name, rate in counted._asdict().items()},
            "counters": asdict(now.counters) | {"paged_in_bytes": now.paged_in_bytes},
            "decoders": dict(now.published) or None,
            "pressure": [pressure._asdict() for pressure in now.pressure],
            "limits": [asdict(limit) | {"room_bytes": limit.room_bytes} for limit in now.limits],
            "report_age_seconds": now.seconds - now.report_seconds,
            "report": now.report.to_dict(),
        }


def _rows(report: Report) -> Iterator[Line]:
    for row in report.rows:
        name = row.category if row.device is None else f"{row.category} on {row.device}"
        key, active = (row.category, row.device), row.active_bytes
        yield Line(key, name, "", row.nbytes, row.resident_bytes, row.granted, active)


def _mappings(report: Report) -> Iterator[Line]:
    for each in report.mappings:
        kind = max(each.parts, key=lambda part: each.parts[part], default=each.category)
        name, held = each.path or each.name, each.granted.pss_bytes
        key, address = (each.address,), each.address
        yield Line(key, kind, name, each.nbytes, held, each.granted, address=address)
