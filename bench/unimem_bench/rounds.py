"""The method: sides that alternate, on pinned CPUs, in undisturbed rounds.

The machines are shared and noisy: an absolute figure moves by a factor of two within an hour. So
claims are ratios. In each round every side runs once, the first side changes from round to round,
and the ratio is taken inside the round: whatever slows one side slows the other as well.

pyperf and asv, which do much of this well, measure one side after the other; their rounds cannot be
paired.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

from unimem.system import limits

Side = Callable[[], float]
Key = TypeVar("Key", bound=Hashable)

# What may be taken from a round. The kernel counts CPU time in ticks;
# other processes always take one or two.
LATE_SHARE = 0.02
OTHERS_SHARE = 0.05
OTHERS_TICKS = 3
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
MOST_TRIES = 2  # times as many rounds as wanted
FEWEST = 3  # rounds, also where time is up


@dataclass(frozen=True, slots=True)
class Rounds(Generic[Key]):
    """The result of `alternate`."""

    figures: dict[Key, list[float]]  # of each side, in the order of the rounds
    n_dropped: int  # rounds that were discarded, since other processes took CPU time
    n_disturbed: int  # rounds that were disturbed but kept, for lack of quieter ones


def alternate(
    sides: Mapping[Key, Side],
    *,
    rounds: int,
    warmup: int,
    cpus: Sequence[int],
    pids: Sequence[int] = (),
    until: float = math.inf,
) -> Rounds[Key]:
    """Measure sides in rounds; every side runs once in each.

    Each call of a side is one measurement, and returns its figure. After `warmup` rounds, up to
    twice `rounds` are run, until `rounds` of them were undisturbed; otherwise the least disturbed
    are kept. A round is disturbed by CPU time that other processes take on `cpus`; `pids` are
    processes that work for the sides, beside this one and its children. After `until`, by
    `time.monotonic`, no round begins once there are three.
    """
    order = list(sides)
    for _ in range(warmup):
        for name in order:
            sides[name]()
    kept: list[tuple[float, int, dict[Key, float]]] = []  # what was taken, number, figures
    for index in range(rounds * MOST_TRIES):
        before = Uses.now(cpus, pids)
        figures = {name: sides[name]() for name in order}
        kept.append((before.taken_since(Uses.now(cpus, pids)), index, figures))
        order.append(order.pop(0))
        if sum(taken == 0 for taken, _, _ in kept) == rounds:
            break
        if len(kept) >= min(rounds, FEWEST) and time.monotonic() > until:
            break
    n_run = len(kept)
    kept = sorted(sorted(kept)[:rounds], key=lambda each: each[1])
    return Rounds(
        {name: [figures[name] for _, _, figures in kept] for name in sides},
        n_dropped=n_run - len(kept),
        n_disturbed=sum(taken > 0 for taken, _, _ in kept),
    )


class Uses(NamedTuple):
    """Clocks at one moment, in seconds."""

    wall: float  # time
    late: float  # that this thread has waited for a CPU
    busy: float  # CPU time of all processes and the hypervisor on our CPUs
    ours: float  # CPU time of this process, its children, and processes that work for it
    n_cpus: int  # that we use

    @classmethod
    def now(cls, cpus: Sequence[int], pids: Sequence[int]) -> Uses:
        """Read the clocks."""
        times = os.times()
        ours = times.user + times.system + times.children_user + times.children_system
        ours += sum(map(_cpu_seconds, pids))
        return cls(time.perf_counter(), _late_seconds(), _busy_seconds(cpus), ours, len(cpus))

    def taken_since(self, after: Uses) -> float:
        """Return the share of a round that other processes took; 0 if it is no more than usual."""
        wall = after.wall - self.wall
        late = after.late - self.late
        others = (after.busy - self.busy) - (after.ours - self.ours)
        if others < OTHERS_TICKS * TICK_S or others < OTHERS_SHARE * wall * self.n_cpus:
            others = 0.0
        if late < LATE_SHARE * wall:
            late = 0.0
        return (late + others / self.n_cpus) / wall


def _late_seconds() -> float:
    """Return how long this thread was ready but did not run; 0 if the kernel does not say."""
    try:
        text = Path("/proc/thread-self/schedstat").read_text()
    except OSError:
        return 0.0
    return int(text.split()[1]) * 1e-9


def _busy_seconds(cpus: Sequence[int]) -> float:
    """Return CPU seconds of user, nice, system and stolen time on some CPUs."""
    wanted = {f"cpu{cpu}" for cpu in cpus}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *counts = line.split()
        if name in wanted:
            user, nice, system, _, _, _, _, steal = map(int, counts[:8])
            ticks += user + nice + system + steal
    return ticks * TICK_S


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process; 0 if it has ended."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text()
        return sum(map(int, text.rpartition(")")[2].split()[11:13])) * TICK_S
    return 0.0


def pin(n_cpus: int | None = 1) -> list[int]:
    """Pin this process to `n_cpus` of the CPUs it may use, and return them.

    Each is on a core of its own while there are cores; the last CPUs first, since CPU 0 usually
    serves more interrupts. Unpinned threads may share a core, and migrated ones lose their caches.
    Running threads keep their CPUs. None means as many as can compute at once: a CPU of each core,
    less if a quota says so. ValueError if the process may use fewer.
    """
    n_cpus = _N_CORES if n_cpus is None else n_cpus
    if n_cpus > len(_ALLOWED):
        raise ValueError(
            f"needs {n_cpus} CPUs, this process may use {len(_ALLOWED)}: {sorted(_ALLOWED)}"
        )
    chosen = sorted(_ALLOWED[:n_cpus])
    os.sched_setaffinity(0, chosen)
    return chosen


def thread_counts(most: int) -> list[int]:
    """Return 1, 2, 4 and so on, and finally `most`: the sizes of a case about threads."""
    return sorted({most, *(1 << i for i in range(most.bit_length()))})


def by_preference(cpus: Iterable[int]) -> list[int]:
    """Order CPUs as `pin` takes them: one of each core, then the second of each, ..."""
    n_before: Counter[tuple[str, str]] = Counter()  # of each core
    keys = {}
    for cpu in sorted(cpus, reverse=True):
        core = limits.core_of(cpu)
        keys[cpu] = (n_before[core], -cpu)
        n_before[core] += 1
    return sorted(keys, key=keys.__getitem__)


# Before anything is pinned.
_ALLOWED = by_preference(os.sched_getaffinity(0))
_N_CORES = limits.thread_count()


def milliseconds(run: Callable[[], object]) -> float:
    """Time one call on the wall clock."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def stopwatch(
    statement: str, n: int, names: Mapping[str, object], before: Callable[[], object] | None = None
) -> Side:
    """Return a side that runs `statement` `n` times; ns for each run.

    The statement is Python source that sees `names` as locals, and the number of the run as ``i``.
    `before` is called before each measurement, untimed.

    The cost of the loop is measured too, and subtracted: it is a quarter of a call of 20 ns. The
    time is CPU time of the thread, unaffected by other processes on its CPU, so statements must
    neither wait nor start threads. The garbage collector is off meanwhile.
    """
    timed = _loop(statement, n, names)
    empty = _loop("pass", n, {})

    def run() -> float:
        if before is not None:
            before()
        collecting = gc.isenabled()
        gc.disable()
        try:
            overhead = min(empty() for _ in range(3))
            return (timed() - overhead) / n * 1e9
        finally:
            if collecting:
                gc.enable()

    return run


def warm_stopwatch(
    statement: str, n: int, names: Mapping[str, object], before: Callable[[], object] | None = None
) -> Side:
    """Return a side as `stopwatch` does, which measures the second of two equal runs.

    The first run brings code and data back into the caches after the other sides.
    """
    first = stopwatch(statement, n, names, before)

    def again() -> None:
        first()
        if before is not None:
            before()

    return stopwatch(statement, n, names, again)


def _loop(statement: str, n: int, names: Mapping[str, object]) -> Callable[[], float]:
    """Compile a function that returns the seconds that `n` runs of `statement` take."""
    arguments = ", ".join(f"{name}={name}" for name in names)
    source = (
        f"def loop({arguments}):\n"
        f"    start = clock()\n"
        f"    for i in range({n}):\n"
        f"        {statement}\n"
        f"    return clock() - start\n"
    )
    scope: dict[str, Any] = {**names, "clock": time.thread_time}
    exec(source, scope)
    return cast(Callable[[], float], scope["loop"])
