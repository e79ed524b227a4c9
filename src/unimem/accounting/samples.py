"""Samples of a process: what was read of it and of its machine at one time, and rates."""

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

__all__ = ["Rates", "Sample", "Sampler", "rates"]

# Reading the memory of a large process is work for the kernel: it gets this share of a core, and
# is read less often than asked where that is not enough.
_SHARE = 0.04
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sample:
    """What was read of a process and its machine at one time. It never changes."""

    seconds: float  # on a clock that is never set
    clock: float  # in seconds since 1970
    up_seconds: float  # how long the process has lived
    counters: Counters
    report: Report
    report_seconds: float  # when that was read
    report_rest: float = 0.0  # it is not read again for so long, as it takes so much of a core
    published: Mapping[str, int] = field(default_factory=dict)  # by a process that uses unimem
    paged_in_bytes: int | None = None  # what the machine has read from disks
    pressure: tuple[Pressure, ...] = ()  # on the machine, and on the process's cgroup
    limits: tuple[Limit, ...] = ()  # on the process's memory, that of the machine first


class Rates(NamedTuple):
    """What happened a second; None is not known."""

    minor_faults: float | None = None
    major_faults: float | None = None
    read_bytes: float | None = None  # by the process, from disks
    paged_in_bytes: float | None = None  # by the machine, from disks
    cpu_seconds: float | None = None
    prompt_tokens: float | None = None
    generated_tokens: float | None = None


def rates(before: Sample | None, now: Sample) -> Rates:
    """Compute what happened a second between two samples.

    Nothing is known without one before, nor where no time has passed, where a count is missing in
    one of them, or where it went back.
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
        shown.get("n_prompt_tokens"),
        shown.get("n_generated_tokens"),
    )


class Sampler:
    """Reads samples of a process, one after the other.

    Parameters
    ----------
    pid : int
        Its number.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._report: Report | None = None
        self._report_seconds = self._report_rest = 0.0

    def sample(self) -> Sample:
        """Read what there is now."""
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
