"""The method that all benchmarks share: two or more sides that alternate in one run.

The machines these run on are shared and noisy: an absolute figure moves by a factor of two within
an hour. What a benchmark claims is therefore a ratio. In each round every side runs once, the side
that begins changes from round to round, and the ratio is taken inside the round, so that whatever
slows one side slows the other as well. Reported are medians with the 5th and 95th percentile.

A benchmark is a module with ``main``, run as ``python -m bench.NAME``::

    def main() -> int:
        bench = Bench("calls", __doc__)
        bench.parse()
        pin(1)
        samples = bench.compare("take", {"ours": run_ours, "theirs": run_theirs}, unit="ns")
        bench.at_least("take", "theirs / ours", ratios(samples["theirs"], samples["ours"]), 2.0)
        return bench.finish()
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

__all__ = ["Bench", "Spread", "Target", "machine", "pin", "ratios", "spread", "stopwatch"]


@dataclass(frozen=True)
class Spread:
    """Median of a sample with its 5th and 95th percentile."""

    median: float
    p5: float
    p95: float

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.p5)} to {_short(self.p95)})"


@dataclass(frozen=True)
class Target:
    """One claim: the median of `measured` must not be on the wrong side of `limit`."""

    title: str
    what: str
    measured: Spread
    at_least: bool
    limit: float

    @property
    def met(self) -> bool:
        """Whether the median keeps the limit."""
        value = self.measured.median
        return value >= self.limit if self.at_least else value <= self.limit


def _short(value: float) -> str:
    """Four significant digits, without an exponent for the sizes that occur here."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def spread(values: Sequence[float]) -> Spread:
    """Median and 5th to 95th percentile of `values` (of one value: that value three times)."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return Spread(statistics.median(values), cuts[0], cuts[-1])


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Quotients of the two values of each round; a ratio of medians would mix rounds."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def pin(n_cpus: int = 1) -> list[int]:
    """Pin this process to `n_cpus` of the CPUs it may use, the last ones, and return them.

    The last ones, because CPU 0 usually serves more interrupts. Two unpinned threads may share one
    core, and a migrated one loses its caches.

    Raises
    ------
    ValueError
        If the process may use fewer CPUs than that.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if n_cpus > len(allowed):
        raise ValueError(f"{n_cpus} CPUs wanted, this process may use {len(allowed)}: {allowed}")
    chosen = allowed[-n_cpus:]
    os.sched_setaffinity(0, chosen)
    return chosen


def stopwatch(
    statement: str, n: int, names: Mapping[str, object], before: Callable[[], object] | None = None
) -> Callable[[], float]:
    """Return a function that runs `statement` `n` times and returns nanoseconds per run.

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


def machine() -> dict[str, Any]:
    """Facts about this machine that a recorded figure cannot be read without."""
    cpu = platform.processor()
    flags: list[str] = []
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            cpu = value.strip()
        elif key.strip() in {"flags", "Features"}:
            flags = value.split()
            break
    thp = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp", "sve")
    return {
        "cpu": cpu,
        "cpu_features": [name for name in wanted if name in flags],
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "thp": thp.read_text().strip() if thp.exists() else "unknown",
        "python": platform.python_version(),
        "load_average": list(os.getloadavg()),
    }


class Bench:
    """One run of one benchmark: its options, its tables, its targets and its exit status.

    Parameters
    ----------
    name : str
        Name of the benchmark, as in ``python -m bench.NAME``.
    description : str or None
        Text for ``--help``; the first paragraph is used.
    """

    def __init__(self, name: str, description: str | None) -> None:
        self.name = name
        self.facts: dict[str, Any] = {}
        self.targets: list[Target] = []
        self.tables: list[dict[str, Any]] = []
        self.parser = argparse.ArgumentParser(
            prog=f"python -m bench.{name}", description=(description or "").partition("\n\n")[0]
        )
        self.parser.add_argument("--quick", action="store_true", help="few rounds, to see it run")
        self.parser.add_argument("--json", type=Path, metavar="FILE", help="record the run in FILE")
        self.options = argparse.Namespace()

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Read the command line; add options of your own to `parser` before."""
        self.options = self.parser.parse_args(arguments)
        return self.options

    def compare(
        self,
        title: str,
        sides: Mapping[str, Callable[[], float]],
        *,
        unit: str,
        rounds: int = 301,
        warmup: int = 5,
    ) -> dict[str, list[float]]:
        """Run all sides alternately and print a table of what they returned.

        Parameters
        ----------
        title : str
            What is compared.
        sides : mapping of str to callable
            Each call is one measurement and returns its figure, in `unit`.
        unit : str
            For the table.
        rounds : int
            Measurements of each side; ``--quick`` takes a tenth.
        warmup : int
            Rounds before those, which are thrown away.

        Returns
        -------
        dict of str to list of float
            The figures of each side, in the order of the rounds.
        """
        if self.options.quick:
            rounds, warmup = max(3, rounds // 10), 1
        order = list(sides)
        samples: dict[str, list[float]] = {name: [] for name in order}
        for index in range(warmup + rounds):
            for name in order:
                figure = sides[name]()
                if index >= warmup:
                    samples[name].append(figure)
            order.append(order.pop(0))
        self.show(title, samples, unit=unit)
        return samples

    def show(self, title: str, samples: Mapping[str, Sequence[float]], *, unit: str) -> None:
        """Print one table, a row for each side, and keep it for the record."""
        rows = {name: spread(values) for name, values in samples.items()}
        rounds = len(next(iter(samples.values())))
        print(f"\n{title}: {unit}, median (5 % to 95 %) of {rounds} rounds")
        width = max(map(len, rows))
        for name, row in rows.items():
            print(f"  {name:<{width}}  {row}")
        self.tables.append(
            {
                "title": title,
                "unit": unit,
                "rounds": rounds,
                "sides": {name: asdict(row) for name, row in rows.items()},
            }
        )

    def at_least(self, title: str, what: str, values: Sequence[float], limit: float) -> None:
        """Claim that the median of `values` is `limit` or more."""
        self._claim(Target(title, what, spread(values), True, limit))

    def at_most(self, title: str, what: str, values: Sequence[float], limit: float) -> None:
        """Claim that the median of `values` is `limit` or less."""
        self._claim(Target(title, what, spread(values), False, limit))

    def _claim(self, target: Target) -> None:
        self.targets.append(target)
        word = "at least" if target.at_least else "at most"
        verdict = "met" if target.met else "MISSED"
        print(f"  {target.what}: {target.measured}, {word} {target.limit:g}: {verdict}")

    def finish(self) -> int:
        """Write the record if one was asked for; return the exit status, 1 for a missed target."""
        missed = [target for target in self.targets if not target.met]
        if self.options.json:
            record = {
                "bench": self.name,
                "when": datetime.now(UTC).isoformat(timespec="seconds"),
                "quick": self.options.quick,
                "machine": machine(),
                "facts": self.facts,
                "tables": self.tables,
                "targets": [{**asdict(target), "met": target.met} for target in self.targets],
            }
            self.options.json.parent.mkdir(parents=True, exist_ok=True)
            self.options.json.write_text(json.dumps(record, indent=1) + "\n")
        kept = len(self.targets) - len(missed)
        print(f"\n{kept} of {len(self.targets)} targets met")
        for target in missed:
            print(f"  missed: {target.title}, {target.what}")
        return 1 if missed else 0
