"""A run: the passes of all suites, each in a process of its own, one after the other.

Pass 1 of every suite precedes pass 2 of any, so that the passes of a suite are spread over the run,
and slow changes of the machine show in their spread.
"""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from unimem.system.doctor import doctor
from unimem_bench import llama_build
from unimem_bench.record import CaseRecord, Record, SideRecord, SuiteRecord, case_from_dict
from unimem_bench.suite import Case, Suite
from unimem_bench.suites import load_suite
from unimem_bench.worker import TIME_IS_UP

# Packages that are measured, or take part in it.
_PACKAGES = tuple(
    """
    unimem-llm numpy torch safetensors gguf unimem-ggml cupy cupy-cuda12x cupy-cuda13x
    pyperf
""".split()
)
_END_S = 10.0  # that a child has to end in order when interrupted
# A quick run of all suites. Each pass has a share of the seconds that are left; what it does not
# take is for the others. Rounds end with the share, and everything else long after it.
QUICK_S, MOST_QUICK_S = 115.0, 180.0
_LEAST_S = 2.0  # of a share
_WITH_MODELS = "snapshot load decode".split()  # three shares


class Interrupted(KeyboardInterrupt):
    """A run was interrupted; `record` has what had been measured."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record


class Pass(NamedTuple):
    """A pass to run: its suite, its number, and how many the suite has."""

    suite: Suite
    number: int
    n: int

    @property
    def shares(self) -> int:
        """The shares of a bounded run that it has: writing a model takes time."""
        return 3 if self.suite.name in _WITH_MODELS else 1

    def __str__(self) -> str:
        return self.suite.name + (f", pass {self.number} of {self.n}" if self.n > 1 else "")


def schedule(suites: Sequence[str], *, quick: bool, case: str = "") -> list[Pass]:
    """List the passes of a run, in their order; ValueError if no case is chosen."""
    chosen = [load_suite(name) for name in suites]
    counts = {
        suite.name: suite.n_passes(quick=quick)
        for suite in chosen
        if suite.chosen(quick=quick, case=case)
    }
    if not counts:
        raise ValueError(
            f"no case of {', '.join(suites)} has {case!r} in its name; `unimem bench --list` "
            "shows all cases"
        )
    return [
        Pass(suite, number, n)
        for number in range(1, max(counts.values()) + 1)
        for suite in chosen
        if number <= (n := counts.get(suite.name, 0))
    ]


def run(
    suites: Sequence[str],
    *,
    quick: bool,
    folder: Path,
    case: str = "",
    bounded: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> Record:
    """Measure suites, named as in `unimem_bench.suites.NAMES`.

    `quick` takes smaller sizes and fewer rounds. `folder` is for files, which later runs use again.
    Only cases with `case` in ``suite/name`` are measured; the record has all of them, even if
    nothing was measured. If `bounded`, it takes about `QUICK_S`. `progress` receives a line
    before each pass. ValueError if no case is chosen; Interrupted has the record so far.
    """
    passes = schedule(suites, quick=quick, case=case)
    chosen = [each.suite for each in passes if each.number == 1]
    when = datetime.now(UTC).isoformat(timespec="seconds")
    start = time.monotonic()
    results = {suite.name: _Result(suite, suite.chosen(quick=quick, case=case)) for suite in chosen}
    # Before measurements change what is free.
    machine = doctor().to_dict()

    def record() -> Record:
        suites = [results[suite.name].record() for suite in chosen]
        return Record(when, quick, time.monotonic() - start, machine, versions(), suites)

    try:
        for i, each in enumerate(passes):
            if bounded and each.number > 1 and time.monotonic() > start + QUICK_S:
                break  # every suite has had a pass
            progress(str(each))
            limits = _limits(passes[i:], start) if bounded else None
            results[each.suite.name].add_pass(quick=quick, folder=folder, case=case, limits=limits)
    except KeyboardInterrupt:
        raise Interrupted(record()) from None
    return record()


class _Result:
    """The results of the passes of one suite so far."""

    def __init__(self, suite: Suite, cases: Sequence[Case]) -> None:
        self._suite = suite
        self._cases = {case.name: case.empty() for case in cases}
        self._conditions: list[dict[str, Any]] = []
        self._n_passes = 0
        self._seconds = 0.0

    def add_pass(
        self, *, quick: bool, folder: Path, case: str, limits: tuple[float, float] | None
    ) -> None:
        """Start a process, and read what it prints; end it at the second of the limits."""
        # -P: nothing is imported from the current folder.
        command = [sys.executable, "-P", "-m", "unimem_bench.worker", self._suite.name]
        command += ["--dir", str(folder), "--case", case, *(["--quick"] if quick else [])]
        start = time.monotonic()
        missing = set(self._cases)
        time_is_up = threading.Event()
        until, most = limits or (math.inf, math.inf)
        if limits is not None:
            command += ["--until", f"{until:.3f}"]
        # In a group of its own, or Ctrl-C at a terminal would interrupt it twice.
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as child:
            timer = threading.Timer(max(0, most - start), _stop, [child, time_is_up])
            try:
                if limits is not None:
                    timer.start()
                assert child.stdout is not None
                self._conditions.append(json.loads(child.stdout.readline() or "{}"))
                for line in child.stdout:
                    record = case_from_dict(json.loads(line))
                    missing.discard(record.name)
                    self._merge(record)
            except BaseException:
                _end(child)
                raise
            finally:
                timer.cancel()
        for name in missing:
            reason = f"the process that measured it ended with status {child.returncode}"
            reason = TIME_IS_UP if time_is_up.is_set() else reason
            is_error = reason != TIME_IS_UP
            self._merge(replace(self._cases[name], sides=[], failed=reason, is_error=is_error))
        self._n_passes += 1
        self._seconds += time.monotonic() - start

    def _merge(self, record: CaseRecord) -> None:
        self._cases[record.name] = merge(self._cases[record.name], record, self._n_passes)

    def record(self) -> SuiteRecord:
        about, took = (self._suite.name, self._suite.question), (self._n_passes, self._seconds)
        return SuiteRecord(*about, *took, [*map(_settled, self._cases.values())], self._conditions)


def _limits(passes: Sequence[Pass], start: float) -> tuple[float, float]:
    """Return until when the first of the passes that are left has time, and when it is ended.

    Starting a process takes a second. So the first passes have all of the time, in which each suite
    measures more of its cases, and what they leave is for the second ones.
    """
    now = time.monotonic()
    same = sum(each.shares for each in passes if each.number == passes[0].number)
    left = (start + QUICK_S - now) * passes[0].shares / same
    share = max(_LEAST_S, left)
    return now + share, min(now + 2 * share + _LEAST_S, max(now, start + MOST_QUICK_S))


def _settled(case: CaseRecord) -> CaseRecord:
    """Return a case that is whole if some of its passes had the time to measure it."""
    return replace(case, failed=None) if case.failed == TIME_IS_UP and case.sides else case


def merge(before: CaseRecord, new: CaseRecord, n_before: int) -> CaseRecord:
    """Add a pass to `n_before` earlier ones; a side that it has not measured is empty there."""
    sides = {(side.name, side.at): side for side in before.sides}
    added = {(side.name, side.at): side for side in new.sides}
    merged = []
    for key in dict.fromkeys([*sides, *added]):
        side = sides.get(key) or replace(added[key], passes=[[] for _ in range(n_before)])
        more = added[key].passes if key in added else [[]]
        merged.append(SideRecord(side.name, side.role, [*side.passes, *more], side.at))
    return replace(
        before,
        sides=merged,
        rounds_dropped=before.rounds_dropped + new.rounds_dropped,
        rounds_disturbed=before.rounds_disturbed + new.rounds_disturbed,
        left_out=before.left_out | new.left_out,
        facts=before.facts | new.facts,
        failed=before.failed or new.failed,
        is_error=before.is_error or new.is_error,
    )


def _stop(child: subprocess.Popen[str], time_is_up: threading.Event) -> None:
    time_is_up.set()
    _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    """Interrupt a child, so that it ends its own processes and deletes its files."""
    with suppress(OSError):
        child.terminate()
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)


def versions() -> dict[str, str]:
    """Look up the versions of all packages that are measured."""
    found = {"python": platform.python_version(), "kernel": os.uname().release}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    with suppress(llama_build.NoPeer):
        built = llama_build.facts(llama_build.library())
        found["llama.cpp"] = f"{built['llama_cpp']} with ggml {built['ggml']}"
        found["llama.cpp's CPU features"] = " ".join(sorted(built["features"]))
    return found
