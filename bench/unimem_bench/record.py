"""What a run has measured, as it was measured: figures, and what they cannot be read without.

A record holds no medians and no verdicts; `unimem_bench.stats` makes these, of a new record as of
an old one. As JSON it is ``unimem.bench/1`` (docs/schemas/bench-1.json).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

__all__ = [
    "BEST", "CaseRecord", "Record", "Role", "SideRecord", "SuiteRecord", "Target", "case_from_dict",
]  # fmt: skip

SCHEMA = "unimem.bench/1"

# As the other side of a target: the fastest of the peers.
BEST = "the best peer"

Role = Literal["unimem", "peer", "limit"]


@dataclass(frozen=True, slots=True)
class Target:
    """A claim about a case; `unimem_bench.suite` has a function for each kind."""

    # What is claimed: how many times as fast `side` is as `other`, how many times as much it costs,
    # the figure of `side` itself, or the exponent of its growth.
    kind: Literal["speed", "cost", "figure", "exponent"]
    side: str  # a side of the case
    other: str | None  # the side that it is compared with; `BEST` stands for the fastest peer
    at_least: bool  # whether the limit is a lower one
    limit: float  # what the median must keep
    issue: int  # the issue of unimem that asks for it


@dataclass(frozen=True, slots=True)
class SideRecord:
    """The figures of one side, or in a case of scaling, of one side at one size."""

    name: str  # as tables and plots show it
    role: Role  # unimem's own way, what one would use instead, or what the machine can do at best
    # For each pass, which is a process of its own, the figure of each round, in the unit of the
    # case. Round i of a pass is the same round for all sides of the case. Empty where a pass has
    # not measured it.
    passes: list[list[float]]
    # In a case of scaling the size, number of threads or whatever else is on the x axis.
    at: float | None = None


@dataclass(frozen=True, slots=True)
class CaseRecord:
    """What one case has measured."""

    suite: str
    name: str  # the case is ``suite/name``
    question: str  # what it answers, in a sentence
    # Of the figures. Of one that ends in ``/s`` more is better, of all others less.
    unit: str
    # In a case of scaling what `SideRecord.at` is, with its unit, as an axis is labelled.
    x: str | None = None
    # The first one of role "unimem" is what the others are compared with.
    sides: list[SideRecord] = field(default_factory=list)
    # What is claimed, also where it could not be measured.
    targets: list[Target] = field(default_factory=list)
    # Rounds that were thrown away, since something else took CPU time from them.
    rounds_dropped: int = 0
    # Rounds that are among the figures nevertheless, for want of quieter ones.
    rounds_disturbed: int = 0
    left_out: dict[str, str] = field(default_factory=dict)  # peers that were not measured, and why
    facts: dict[str, Any] = field(default_factory=dict)  # what the figures cannot be read without
    # Why nothing was measured, or not in all passes: what the machine lacks, or the error.
    failed: str | None = None
    is_error: bool = False  # whether that is an error

    @property
    def higher_is_better(self) -> bool:
        """Whether the figures are speeds."""
        return self.unit.endswith("/s")

    def side(self, name: str, at: float | None = None) -> SideRecord | None:
        """Find a side, in a case of scaling at one size."""
        return next((side for side in self.sides if (side.name, side.at) == (name, at)), None)


@dataclass(frozen=True, slots=True)
class SuiteRecord:
    """What one suite has measured."""

    name: str  # as on the command line
    question: str  # what its cases are about, in a sentence
    n_passes: int  # processes that measured it, one after the other
    seconds: float  # what all of them took
    cases: list[CaseRecord]  # in the order in which the suite declares them
    # Of each pass what pyperf says of the machine in that moment, as CPU frequencies and load.
    conditions: list[dict[str, Any]] = field(default_factory=list)
    # The run that measured it, where that is another than the record's: its begin, and on what CPU.
    run: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """A run of `unimem bench`."""

    when: str  # its begin, in UTC
    quick: bool  # whether it was one of ``--quick``, with smaller sizes and fewer rounds
    seconds: float  # what it took
    machine: dict[str, Any]  # as `unimem.doctor` has it
    versions: dict[str, str]  # of unimem, Python, and all packages that were measured
    suites: list[SuiteRecord]  # in the order in which they ran

    def cases(self) -> Iterator[CaseRecord]:
        """Give the cases of all suites."""
        for suite in self.suites:
            yield from suite.cases

    def to_dict(self) -> dict[str, Any]:
        """Return what `to_json` writes."""
        return {"schema": SCHEMA, **asdict(self)}

    def to_json(self) -> str:
        """Return it as a JSON document, with the figures of a pass in a line."""
        text = json.dumps(self.to_dict(), indent=1)
        # A string has no line break of its own in JSON: what has one is a list.
        return re.sub(r"\[\n[-+.\deE,\s]+\]", lambda found: " ".join(found[0].split()), text)

    def with_suites_of(self, later: Record) -> Record:
        """Return this record with the suites of a later run in the place of its own.

        Raises
        ------
        ValueError
            If one is a quick run and the other a whole one: their sizes differ.
        """
        if self.quick != later.quick:
            raise ValueError("expected two whole runs, or two with --quick, got one of each")
        run = f"{later.when}, {(later.machine.get('cpu') or {}).get('model', 'unknown CPU')}"
        found = {suite.name: replace(suite, run=suite.run or run) for suite in later.suites}
        suites = [found.pop(suite.name, suite) for suite in self.suites]
        versions = self.versions | later.versions
        return replace(self, versions=versions, suites=[*suites, *found.values()])

    @classmethod
    def from_dict(cls, document: Any) -> Record:
        """Make a record of what `to_dict` gave.

        Raises
        ------
        ValueError
            If it is not a document of this schema.
        """
        found = document.get("schema") if isinstance(document, Mapping) else None
        if found != SCHEMA:
            raise ValueError(
                f"not a record of `unimem bench`: expected the schema {SCHEMA!r}, found {found!r}"
            )
        try:
            rest = {key: value for key, value in document.items() if key != "schema"}
            suites = [_suite(each) for each in rest.pop("suites")]
            made = cls(suites=suites, **rest)
            _check(made)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"a damaged record of `unimem bench`: {error}") from error
        return made

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a record from a file.

        Raises
        ------
        OSError
            If it cannot be read.
        ValueError
            If it holds no record.
        """
        try:
            document = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: expected a record in JSON: {error}") from error
        try:
            return cls.from_dict(document)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _suite(document: Mapping[str, Any]) -> SuiteRecord:
    return SuiteRecord(
        **{**document, "cases": [case_from_dict(each) for each in document["cases"]]}
    )


def case_from_dict(document: Mapping[str, Any]) -> CaseRecord:
    """Make the record of a case of what `dataclasses.asdict` gave of one."""
    sides = [SideRecord(**each) for each in document["sides"]]
    targets = [Target(**each) for each in document["targets"]]
    return CaseRecord(**{**document, "sides": sides, "targets": targets})


def _check(made: Any) -> None:
    """Refuse a record, or a part of one, with a field of another type than is declared."""
    for name, hint in get_type_hints(type(made)).items():
        value = getattr(made, name)
        if not _is(value, hint):
            raise TypeError(f"{name!r} cannot be {value!r:.40}")


def _is(value: Any, hint: Any) -> bool:
    kind, parts = get_origin(hint), get_args(hint)
    if kind is list:
        return isinstance(value, list) and all(_is(each, parts[0]) for each in value)
    if kind is dict:
        return isinstance(value, dict) and all(_is(each, parts[1]) for each in value.values())
    if kind is Literal:
        return value in parts
    if kind is UnionType:
        return any(_is(value, each) for each in parts)
    if is_dataclass(hint):
        _check(value)
        return True
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return hint is Any or (is_number if hint is float else isinstance(value, hint))
