"""The method: sides that alternate, on pinned CPUs, in rounds that nothing else disturbed.

The machines this runs on are shared and noisy: an absolute figure moves by a factor of two within
an hour. What is claimed is therefore a ratio. In each round every side runs once, the side that
begins changes from round to round, and the ratio is taken inside the round, so that whatever slows
one side slows the other as well.

pyperf and asv, which do much of this well, measure one side after the other; their rounds cannot be
paired.
"""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

from unimem.system import limits

__all__ = [
    "Rounds", "Side", "alternate", "by_preference", "milliseconds", "pin", "stopwatch",
    "thread_counts", "warm_stopwatch",
]  # fmt: skip

Side = Callable[[], float]
Key = TypeVar("Key", bound=Hashable)

# What may be taken from a round. The kernel counts the CPU time of others in ticks, of which one or
# two are always taken by other processes.
LATE_SHARE = 0.02
OTHERS_SHARE = 0.05
OTHERS_TICKS = 3
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
MOST_TRIES = 2  # as many rounds as were asked for, so many times


@dataclass(frozen=True, slots=True)
class Rounds(Generic[Key]):
    """What `alternate` gives."""

    figures: dict[Key, list[float]]  # of each side, in the order of the rounds
    n_dropped: int  # rounds that were thrown away, since something else took CPU time from them
    # Rounds among the figures from which something was taken, for want of quieter ones.
    n_disturbed: int


def alternate(
    sides: Mapping[Key, Side],
    *,
    rounds: int,
    warmup: int,
    cpus: Sequence[int],
    pids: Sequence[int] = (),
) -> Rounds[Key]:
    """Measure sides in rounds, in each of which every side runs once.

    Parameters
    ----------
    sides : mapping to callable
        Each call is one measurement, and returns its figure. Keys are names, or names and sizes.
    rounds : int
        How many to keep. Up to twice as many are run, until so many were undisturbed; where that is
        not enough the least disturbed of the others are kept.
    warmup : int
        Rounds before those.
    cpus : sequence of int
        Where they run: what other processes do there disturbs.
    pids : sequence of int
        Processes that work for the sides, beside this one and its children.
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
    n_run = len(kept)
    kept = sorted(sorted(kept)[:rounds], key=lambda each: each[1])
    return Rounds(
        {name: [figures[name] for _, _, figures in kept] for name in sides},
        n_dropped=n_run - len(kept),
        n_disturbed=sum(taken > 0 for taken, _, _ in kept),
    )


class Uses(NamedTuple):
    """Clocks of a moment, in seconds."""

    wall: float  # time
    late: float  # what this thread has waited for a CPU that another one had
    busy: float  # CPU time of all processes on the CPUs that we use, with what a hypervisor took
    ours: float  # CPU time of this process, of its children, and of those that work for it
    n_cpus: int  # of those that we use

    @classmethod
    def now(cls, cpus: Sequence[int], pids: Sequence[int]) -> Uses:
        """Read them."""
        times = os.times()
        ours = times.user + times.system + times.children_user + times.children_system
        ours += sum(map(_cpu_seconds, pids))
        return cls(time.perf_counter(), _late_seconds(), _busy_seconds(cpus), ours, len(cpus))

    def taken_since(self, after: Uses) -> float:
        """Give the share of a round that others took; 0 where that is no more than usual."""
        wall = after.wall - self.wall
        late = after.late - self.late
        others = (after.busy - self.busy) - (after.ours - self.ours)
        if others < OTHERS_TICKS * TICK_S or others < OTHERS_SHARE * wall * self.n_cpus:
            others = 0.0
        if late < LATE_SHARE * wall:
            late = 0.0
        return (late + others / self.n_cpus) / wall


def _late_seconds() -> float:
    """Seconds that this thread was ready to run and did not; 0 where the kernel does not say."""
    try:
        text = Path("/proc/thread-self/schedstat").read_text()
    except OSError:
        return 0.0
    return int(text.split()[1]) * 1e-9


def _busy_seconds(cpus: Sequence[int]) -> float:
    """CPU seconds of user, nice, system, and of what was stolen, over some CPUs."""
    wanted = {f"cpu{cpu}" for cpu in cpus}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *counts = line.split()
        if name in wanted:
            user, nice, system, _, _, _, _, steal = map(int, counts[:8])
            ticks += user + nice + system + steal
    return ticks * TICK_S


def _cpu_seconds(pid: int) -> float:
    """CPU seconds of a process; 0 where it has ended."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text()
        return sum(map(int, text.rpartition(")")[2].split()[11:13])) * TICK_S
    return 0.0


def pin(n_cpus: int | None = 1) -> list[int]:
    """Pin this process to some of the CPUs it may use, and return them.

    Each on a core of its own as long as there are cores; and the last ones, because CPU 0 usually
    serves more interrupts. Two unpinned threads may share one core, and a migrated one loses its
    caches. Threads that run already keep the CPUs they have.

    Parameters
    ----------
    n_cpus : int or None
        How many; None for as many as can compute at the same time, which is a CPU of each core,
        less where a quota says so.

    Raises
    ------
    ValueError
        If the process may use fewer CPUs than that.
    """
    n_cpus = _N_CORES if n_cpus is None else n_cpus
    if n_cpus > len(_ALLOWED):
        raise ValueError(
            f"{n_cpus} CPUs wanted, this process may use {len(_ALLOWED)}: {sorted(_ALLOWED)}"
        )
    chosen = sorted(_ALLOWED[:n_cpus])
    os.sched_setaffinity(0, chosen)
    return chosen


def thread_counts(most: int) -> list[int]:
    """Return 1, 2, 4 and so on, and `most` in the end: the sizes of a case about threads."""
    return sorted({most, *(1 << i for i in range(most.bit_length()))})


def by_preference(cpus: Iterable[int]) -> list[int]:
    """Order CPUs as `pin` takes them: one of each core, then the second one of each, ..."""
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
    """Measure one call, by the clock on the wall."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def stopwatch(
    statement: str, n: int, names: Mapping[str, object], before: Callable[[], object] | None = None
) -> Side:
    """Return a side that runs `statement` `n` times and gives nanoseconds per run.

    Parameters
    ----------
    statement : str
        Python source; it sees `names` as locals, and the number of the run as ``i``.
    n : int
        Runs in one measurement.
    names : mapping of str to object
        What the statement uses.
    before : callable, optional
        Called before each measurement, outside of the measured time.

    Notes
    -----
    The cost of the loop itself is measured next to it, and taken off: of a call of 20 ns it is a
    quarter. Measured is the CPU time of the thread, which another process on the same CPU does not
    add to; this is for statements that neither wait nor start threads. The garbage collector is
    off meanwhile.
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
    """As `stopwatch`, of the second of two equal runs.

    The first brings code and data back into the caches, from where the other sides have driven
    them.
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
