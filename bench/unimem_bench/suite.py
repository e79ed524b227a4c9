"""How a suite says what it measures.

A suite is a module in `unimem_bench.suites` with a `Suite` called ``SUITE``, and a function for
each case, which is one question::

    SUITE = Suite("calls", "What do the hot calls cost from Python?", passes=5)

    @SUITE.case(
        "take", "What does an uninitialised array of 16 KiB cost?", unit="ns",
        targets=[faster("np.empty", 2.0, issue=2)],
    )
    def take(measure: Measure) -> None:
        with um.Tape(nbytes) as tape:
            measure.compare(
                ours={"unimem": stopwatch("take(4096, 'f4')", n, {"take": tape.take}, tape.clear)},
                peers={"np.empty": stopwatch("empty(4096, 'f4')", n, {"empty": np.empty})},
            )
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from unimem_bench.record import BEST, CaseRecord, Role, SideRecord, Target
from unimem_bench.rounds import Side, alternate, pin

OURS = "unimem"

Place = tuple[str, float | None]  # name and size of a side


class NotMeasured(Exception):  # noqa: N818 - it is an answer
    """A case cannot be measured here; the text says what it needs, and what there is."""


def faster(other: str, limit: float, *, issue: int, side: str = OURS) -> Target:
    """Claim that a side is at least `limit` times as fast as another one."""
    return Target("speed", side, other, True, limit, issue)


def faster_than_best(limit: float, *, issue: int, side: str = OURS) -> Target:
    """Claim that a side is at least `limit` times as fast as the best peer.

    The even rounds choose that peer, and the odd ones compare: with the same rounds for both, the
    luckiest of several equal sides would win.
    """
    return Target("speed", side, BEST, True, limit, issue)


def costs(other: str, limit: float, *, issue: int, side: str = OURS) -> Target:
    """Claim that a side costs at most `limit` times as much as another one."""
    return Target("cost", side, other, False, limit, issue)


def at_most(limit: float, *, issue: int, side: str = OURS) -> Target:
    """Claim that a figure is no more than `limit`, in the unit of the case."""
    return Target("figure", side, None, False, limit, issue)


def at_least(limit: float, *, issue: int, side: str = OURS) -> Target:
    """Claim that a figure is no less than `limit`, in the unit of the case."""
    return Target("figure", side, None, True, limit, issue)


def grows(limit: float, *, issue: int, side: str = OURS) -> Target:
    """Claim that a figure grows no faster than the size to the power of `limit`."""
    return Target("exponent", side, None, False, limit, issue)


class Measure:
    """What the function of a case measures with; made for each case and each pass.

    `quick` asks for smaller sizes (fewer rounds are taken automatically). `cpus` are those that
    this process is pinned to. `folder` has the files that all passes share; a case makes missing
    ones. `builds` says whether it may build what it compares with, which takes minutes. No round
    begins after `until`, by `time.monotonic`, but for the fewest that say something.
    """

    def __init__(
        self,
        case: Case,
        *,
        quick: bool,
        folder: Path,
        builds: bool = False,
        until: float = math.inf,
    ) -> None:
        self.quick = quick
        self.builds = builds
        self.folder = folder
        self.until = until
        self.cpus: list[int] = []
        self._case = case
        self._record = case.empty()
        self._dropped = self._disturbed = 0

    def pin(self, n_cpus: int | None) -> list[int]:
        """Pin this process to `n_cpus` and return them; a case begins with one.

        None pins to as many as can compute at once; see `unimem_bench.rounds.pin`. NotMeasured if
        the process may use fewer.
        """
        try:
            self.cpus = pin(n_cpus)
        except ValueError as error:
            raise NotMeasured(str(error)) from None
        return self.cpus

    def compare(
        self,
        ours: Mapping[str, Side],
        peers: Mapping[str, Side] | None = None,
        limits: Mapping[str, Side] | None = None,
        *,
        rounds: int = 51,
        quick_rounds: int | None = None,
        warmup: int = 2,
        at: float | None = None,
        pids: Sequence[int] = (),
    ) -> dict[str, list[float]]:
        """Run all sides alternately; see `unimem_bench.rounds.alternate`.

        Each call of a side is one measurement, and returns its figure in the unit of the case. All
        are compared with the first of ours. `rounds` are those of one pass, a third of them in a
        quick run unless `quick_rounds` says otherwise; `warmup` rounds before are discarded. `at`
        is the size if the case scales. `pids` are other processes that work for this case. Returns
        the figures of each side, by round.
        """
        groups = [
            {(name, at): side for name, side in (group or {}).items()}
            for group in (ours, peers, limits)
        ]
        figures = self._alternate(groups, rounds, quick_rounds, warmup, pids)
        return {name: each for (name, _), each in figures.items()}

    def scale(
        self,
        ours: Mapping[str, Mapping[float, Side]],
        peers: Mapping[str, Mapping[float, Side]] | None = None,
        limits: Mapping[str, Mapping[float, Side]] | None = None,
        *,
        rounds: int = 21,
        quick_rounds: int | None = None,
        warmup: int = 2,
    ) -> None:
        """Run all sides at all sizes alternately, so that each round has a slope of its own.

        Measured one size after the other, the slope would include the drift of the machine. Sides
        map sizes to measurements as in `compare`, and need not have all sizes.
        """
        groups: list[dict[Place, Side]] = [
            {(name, size): side for name, by in (group or {}).items() for size, side in by.items()}
            for group in (ours, peers, limits)
        ]
        self._alternate(groups, rounds, quick_rounds, warmup, ())

    def _alternate(
        self,
        groups: Sequence[Mapping[Place, Side]],
        rounds: int,
        quick_rounds: int | None,
        warmup: int,
        pids: Sequence[int],
    ) -> dict[Place, list[float]]:
        roles: dict[Place, Role] = {}
        sides: dict[Place, Side] = {}
        for role, group in zip(get_args(Role), groups, strict=True):
            for place, side in group.items():
                roles[place], sides[place] = role, side
        if self.quick:
            rounds = max(3, rounds // 3) if quick_rounds is None else quick_rounds
            warmup = min(warmup, 1)
        measured = alternate(
            sides, rounds=rounds, warmup=warmup, cpus=self.cpus, pids=pids, until=self.until
        )
        for (name, at), figures in measured.figures.items():
            # No clock has more digits, and records are a third as long.
            kept = [float(f"{figure:.7g}") for figure in figures]
            self._record.sides.append(SideRecord(name, roles[name, at], [kept], at))
        self._dropped += measured.n_dropped
        self._disturbed += measured.n_disturbed
        return measured.figures

    def count(self, name: str, values: Sequence[float], role: Role = "unimem") -> None:
        """Record figures that were counted, not timed, or measured elsewhere."""
        self._record.sides.append(SideRecord(name, role, [[float(value) for value in values]]))

    def leave_out(self, peer: str, reason: str) -> None:
        """Record that a peer is not measured, and why."""
        self._record.left_out[peer] = reason

    def installed(self, package: str, *peers: str) -> bool:
        """Say whether a package is installed; if not, leave out the peers that need it.

        By default that is the peer with the name of the package.
        """
        if importlib.util.find_spec(package) is not None:
            return True
        for peer in peers or (package,):
            self.leave_out(peer, f"{package} is not installed")
        return False

    def fact(self, name: str, value: Any) -> None:
        """Record a fact needed to read the figures; its type must be known to JSON."""
        self._record.facts[name] = value

    def record(self, failed: str | None = None, *, is_error: bool = False) -> CaseRecord:
        """Return the measurements of this pass."""
        return replace(
            self._record,
            rounds_dropped=self._dropped,
            rounds_disturbed=self._disturbed,
            failed=failed,
            is_error=is_error,
        )


@dataclass(frozen=True, slots=True)
class Case:
    """One question, and the function that answers it."""

    suite: str  # fields without a comment are as in `CaseRecord`
    name: str
    question: str
    unit: str
    run: Callable[[Measure], None]  # may raise `NotMeasured`
    x: str | None = None
    targets: tuple[Target, ...] = ()
    in_quick: bool = True  # whether a quick run has it

    def empty(self) -> CaseRecord:
        """Return a record without figures."""
        return CaseRecord(
            self.suite, self.name, self.question, self.unit, self.x, targets=list(self.targets)
        )


@dataclass(slots=True)
class Suite:
    """Cases that belong together, and are measured in the same process."""

    name: str  # as on the command line
    question: str  # of all cases, in a sentence
    # Processes that measure it, one after the other: the layout of memory differs between them, and
    # the interval of a ratio includes that spread.
    passes: int = 1
    quick_passes: int = 1
    in_quick: bool = True  # whether it can measure in its share of a quick run of all suites
    cases: list[Case] = field(default_factory=list)  # in the order of their declaration

    def case(
        self,
        name: str,
        question: str,
        *,
        unit: str,
        x: str | None = None,
        targets: Sequence[Target] = (),
        in_quick: bool = True,
    ) -> Callable[[Callable[[Measure], None]], Callable[[Measure], None]]:
        """Declare a case; decorates its function, or takes a `functools.partial` of one."""

        def declare(run: Callable[[Measure], None]) -> Callable[[Measure], None]:
            if any(case.name == name for case in self.cases):
                raise ValueError(f"the suite {self.name!r} has two cases {name!r}")
            self.cases.append(
                Case(self.name, name, question, unit, run, x, tuple(targets), in_quick)
            )
            return run

        return declare

    def chosen(self, *, quick: bool, case: str = "") -> list[Case]:
        """Choose the cases of a run: those with `case` in ``suite/name``."""
        cases = [each for each in self.cases if each.in_quick or not quick]
        return [each for each in cases if case in f"{each.suite}/{each.name}"]

    def n_passes(self, *, quick: bool) -> int:
        """Count the processes that measure it."""
        return self.quick_passes if quick else self.passes
