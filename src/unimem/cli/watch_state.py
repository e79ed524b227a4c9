"""What a watch knows: what was read of a process, what that is a second, and what to show."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from unimem.accounting.report import Report
from unimem.system.limits import Limit
from unimem.system.placement import Placement
from unimem.system.pressure import Pressure
from unimem.system.process import Counters

__all__ = ["INTERVALS", "SORTS", "Line", "Rates", "Sample", "Sort", "State", "rates"]

Sort = Literal["category", "size", "resident", "growth"]
SORTS: tuple[Sort, ...] = ("category", "size", "resident", "growth")

# What + and - choose among, in seconds.
INTERVALS = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

_REMEMBERED = 120  # samples that pictures over time have room for


@dataclass(frozen=True, slots=True)
class Sample:
    """What was read of a process and its machine at one time. It never changes.

    Attributes
    ----------
    seconds : float
        When, on a clock that is never set.
    clock : float
        When, in seconds since 1970.
    up_seconds : float
        How long the process has lived.
    counters : Counters
        What it has done so far.
    report : Report
        Its memory.
    report_seconds : float
        When that was read.
    report_rest : float
        Seconds for which it is not read again, since reading it takes so much of a core.
    published : mapping of str to int
        What a process that uses unimem tells of itself.
    paged_in_bytes : int or None
        What the machine has read from disks.
    pressure : tuple of Pressure
        On the machine, and on the process's cgroup.
    limits : tuple of Limit
        On the memory of the process, that of the machine first.
    """

    seconds: float
    clock: float
    up_seconds: float
    counters: Counters
    report: Report
    report_seconds: float
    report_rest: float = 0.0
    published: Mapping[str, int] = field(default_factory=dict)
    paged_in_bytes: int | None = None
    pressure: tuple[Pressure, ...] = ()
    limits: tuple[Limit, ...] = ()


class Rates(NamedTuple):
    """What happened a second; None is not known.

    Attributes
    ----------
    minor_faults, major_faults : float or None
        Page faults.
    read_bytes : float or None
        What the process had read from disks.
    paged_in_bytes : float or None
        What the machine has read from disks.
    cpu_seconds : float or None
        How many cores were busy with the process.
    prompt_tokens, generated_tokens : float or None
        What its decoders have read and made.
    """

    minor_faults: float | None = None
    major_faults: float | None = None
    read_bytes: float | None = None
    paged_in_bytes: float | None = None
    cpu_seconds: float | None = None
    prompt_tokens: float | None = None
    generated_tokens: float | None = None


def rates(before: Sample | None, now: Sample) -> Rates:
    """Compute what happened a second between two samples.

    Parameters
    ----------
    before, now : Sample
        Without one before, nothing is known; nor where no time has passed, where a count is missing
        in one of them, or where it went back.

    Returns
    -------
    Rates
    """
    if before is None or now.seconds <= before.seconds:
        return Rates()
    seconds = now.seconds - before.seconds

    def rate(count: Callable[[Sample], float | None]) -> float | None:
        then, later = count(before), count(now)
        if then is None or later is None or later < then:
            return None
        return (later - then) / seconds

    return Rates(
        minor_faults=rate(lambda sample: sample.counters.minor_faults),
        major_faults=rate(lambda sample: sample.counters.major_faults),
        read_bytes=rate(lambda sample: sample.counters.read_bytes),
        paged_in_bytes=rate(lambda sample: sample.paged_in_bytes),
        cpu_seconds=rate(lambda sample: sample.counters.cpu_seconds),
        prompt_tokens=rate(lambda sample: sample.published.get("n_prompt_tokens")),
        generated_tokens=rate(lambda sample: sample.published.get("n_generated_tokens")),
    )


class Line(NamedTuple):
    """One row or one mapping.

    Attributes
    ----------
    key : tuple
        What it is the same by in another report.
    category, name : str
        Of a mapping, what most of it is, and what is mapped; the name of a row is empty.
    nbytes : int
        Its size.
    resident_bytes : int or None
        What of it is in RAM, by share.
    change_bytes, since_start_bytes : int
        What came to be in RAM since the last report, and since the first.
    granted : Placement or None
        As of the row or mapping.
    active_bytes : int or None
        What is in use.
    address : int
        Of a mapping.
    """

    key: tuple[str | int | None, ...]
    category: str
    name: str
    nbytes: int
    resident_bytes: int | None
    change_bytes: int
    since_start_bytes: int
    granted: Placement | None
    active_bytes: int | None = None
    address: int = 0


@dataclass(slots=True)
class State:
    """What is shown and how; keys and samples change it. For one thread.

    Attributes
    ----------
    pid : int
        The process.
    interval : float
        Seconds from one sample to the next.
    sort, shows_mappings, is_paused, shows_help, top
        What the keys have chosen; `top` is the first line of the table that is shown.
    first, before, now : Sample or None
        The first one, and the last two.
    reports : tuple of Report
        The last two that differ.
    n_samples : int
        So many were taken.
    ended : str
        Why no more will come; empty while the process lives.
    late_seconds : float
        How long a sample has been waited for.
    has_quit : bool
        Whether that was asked for.
    history : deque of Rates
        The last ones.
    """

    pid: int
    interval: float = 1.0
    sort: Sort = "category"
    shows_mappings: bool = False
    is_paused: bool = False
    shows_help: bool = False
    top: int = 0
    first: Sample | None = None
    before: Sample | None = None
    now: Sample | None = None
    reports: tuple[Report, ...] = ()
    n_samples: int = 0
    ended: str = ""
    late_seconds: float = 0.0
    has_quit: bool = False
    history: deque[Rates] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _sorted: tuple[Report, Sort, bool, list[Line]] | None = None

    # ---- samples ----

    def take(self, sample: Sample) -> None:
        """Take the next sample; of another process with the same number, none."""
        if self.first is None:
            self.first = sample
        elif sample.counters.started != self.first.counters.started:
            self.end("it has ended, and its number is another process's now")
            return
        self.before, self.now = self.now, sample
        if not self.reports or sample.report is not self.reports[-1]:
            self.reports = (*self.reports[-1:], sample.report)
        self.history.append(self.rates())
        self.n_samples += 1

    def end(self, reason: str) -> None:
        """Take note that no sample will come."""
        self.ended = reason

    def rates(self) -> Rates:
        """Compute what happened a second between the last two samples."""
        return Rates() if self.now is None else rates(self.before, self.now)

    # ---- keys ----

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
            case "up" | "down" | "page up" | "page down" | "home" | "end":
                far = 1 << 30  # what is shown ends where the lines do
                step = {"up": -1, "down": 1, "page up": -10, "page down": 10}.get(key, far)
                self.top = 0 if key == "home" else max(0, self.top + step)

    # ---- memory ----

    def lines(self) -> list[Line]:
        """Give the rows, or the mappings, in the order that was chosen.

        They are the same until the memory is read again, since there may be thousands.
        """
        if self.now is None or self.first is None:
            return []
        report, chosen = self.now.report, (self.sort, self.shows_mappings)
        if self._sorted is None or self._sorted[0] is not report or self._sorted[1:3] != chosen:
            self._sorted = report, *chosen, self._lines(self.first.report, report)
        return self._sorted[3]

    def _lines(self, start: Report, report: Report) -> list[Line]:
        find = _mappings if self.shows_mappings else _rows
        first, before = (_resident(find(each)) for each in (start, self.reports[0]))
        found = []
        for line in find(report):
            held = _held(line)
            found.append(
                line._replace(
                    change_bytes=held - before.get(line.key, 0),
                    since_start_bytes=held - first.get(line.key, 0),
                )
            )
        places = {name: i for i, name in enumerate(dict.fromkeys(r.category for r in report.rows))}
        orders: dict[Sort, Callable[[Line], int]] = {
            "category": lambda line: places.get(line.category, len(places)),
            "size": lambda line: -line.nbytes,
            "resident": lambda line: -_held(line),
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
        return Line((), "total", "", nbytes, now, now - before, now - first, None)

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


def _rows(report: Report) -> list[Line]:
    return [
        Line(
            (row.category, row.device),
            row.category if row.device is None else f"{row.category} on {row.device}",
            "",
            row.nbytes,
            row.resident_bytes,
            0,
            0,
            row.granted,
            row.active_bytes,
        )
        for row in report.rows
    ]


def _mappings(report: Report) -> list[Line]:
    return [
        Line(
            (mapping.address,),
            max(mapping.parts, key=lambda part: mapping.parts[part], default=mapping.category),
            mapping.path or mapping.name,
            mapping.nbytes,
            mapping.granted.pss_bytes,
            0,
            0,
            mapping.granted,
            address=mapping.address,
        )
        for mapping in report.mappings
    ]


def _held(line: Line) -> int:
    """Give what a line grows by: memory of a GPU is all there."""
    return line.nbytes if line.resident_bytes is None else line.resident_bytes


def _resident(lines: list[Line]) -> dict[tuple[str | int | None, ...], int]:
    return {line.key: _held(line) for line in lines}
