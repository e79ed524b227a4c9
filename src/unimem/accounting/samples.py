"""Samples of a process and its machine: their rates, and how memory grows over many of them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from unimem.accounting.published import published
from unimem.accounting.report import Report, report
from unimem.system.limits import Limit, memory_limits
from unimem.system.pressure import Pressure, memory_pressure, paged_in_bytes
from unimem.system.process import Counters, counters

# The share of a core that reading the memory of a process may take. Large processes are read less
# often than asked.
_SHARE = 0.04
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Of what engines publish, in the order of `Rates`.
_COUNTED = (
    "n_prompt_tokens n_generated_tokens piece_hits piece_misses piece_read_bytes piece_waited_ns"
).split()
_MOST_POINTS = 240  # of a growth: an even number


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of a process and its machine at one time. It never changes."""

    seconds: float  # on a clock that is never set
    clock: float  # in seconds since 1970
    up_seconds: float  # how long the process has lived
    counters: Counters
    report: Report
    report_seconds: float  # when that was read
    report_rest: float = 0.0  # seconds until it is read again, as reading takes a core's time
    published: Mapping[str, int] = field(default_factory=dict)  # by unimem in the process
    paged_in_bytes: int | None = None  # read from disks by the machine
    pressure: tuple[Pressure, ...] = ()  # on the machine, and on the process's cgroup
    limits: tuple[Limit, ...] = ()  # on the process's memory, that of the machine first


class Rates(NamedTuple):
    """Events per second; None is unknown."""

    minor_faults: float | None = None
    major_faults: float | None = None
    read_bytes: float | None = None  # by the process, from disks
    paged_in_bytes: float | None = None  # by the machine, from disks
    cpu_seconds: float | None = None
    prompt_tokens: float | None = None
    generated_tokens: float | None = None
    piece_hits: float | None = None  # of streamed weights, as the next three
    piece_misses: float | None = None
    piece_read_bytes: float | None = None
    piece_waited_ns: float | None = None  # the sum over threads


def rates(before: Sample | None, now: Sample) -> Rates:
    """Compute the events per second between two samples.

    All rates are unknown for the first sample or if no time has passed; a rate is unknown if its
    count is missing in either sample or has decreased.
    """
    if before is None or now.seconds <= before.seconds:
        return Rates()
    seconds = now.seconds - before.seconds

    def rate(then: float | None, later: float | None) -> float | None:
        known = then is not None and later is not None and later >= then
        return (later - then) / seconds if known else None  # type: ignore[operator]

    return Rates(*map(rate, _counts(before), _counts(now)))


def _counts(sample: Sample) -> tuple[float | None, ...]:
    done, shown = sample.counters, sample.published
    return (
        done.minor_faults,
        done.major_faults,
        done.read_bytes,
        sample.paged_in_bytes,
        done.cpu_seconds,
        *(shown.get(name) for name in _COUNTED),
    )


class Sampler:
    """A reader of samples of one process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._report: Report | None = None
        self._report_seconds = self._report_rest = 0.0

    def sample(self) -> Sample:
        """Read the current state."""
        done = counters(self._pid)
        seconds, clock = time.monotonic(), time.time()
        if self._report is None or seconds >= self._report_seconds + self._report_rest:
            start = time.thread_time()
            self._report, self._report_seconds = report(self._pid), seconds
            self._report_rest = (time.thread_time() - start) / _SHARE
        shown = published(self._pid)
        return Sample(
            seconds=seconds,
            clock=clock,
            up_seconds=time.clock_gettime(time.CLOCK_BOOTTIME) - done.started / _TICKS_PER_SECOND,
            counters=done,
            report=self._report,
            report_seconds=self._report_seconds,
            report_rest=self._report_rest,
            published={} if shown is None else shown.counters,
            paged_in_bytes=paged_in_bytes(),
            pressure=memory_pressure(self._pid),
            limits=memory_limits(self._pid),
        )


class GrowthPoint(NamedTuple):
    """The memory in RAM at one time.

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
    """The memory in RAM over time, in at most 242 points. For one thread.

    A long watch keeps every second, fourth, eighth ... sample, so that points stay evenly spaced,
    and always the last one.
    """

    _kept: list[GrowthPoint] = field(default_factory=list)
    _last: GrowthPoint | None = None
    _n: int = 0
    _every: int = 1

    def take(self, sample: Sample) -> None:
        """Take the next sample. A sample that repeats the last report adds no point."""
        if self._last is not None and sample.report_seconds <= self._last.seconds:
            return
        rows = (row for row in sample.report.rows if row.device is None)
        sizes = {row.category: row.resident_bytes or 0 for row in rows}
        self._last = GrowthPoint(sample.report_seconds, sizes)
        if self._n % self._every == 0:
            self._kept.append(self._last)
            if len(self._kept) > _MOST_POINTS:
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
