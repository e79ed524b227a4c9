"""What a run has measured: figures, and the facts needed to read them.

A record holds no medians and no verdicts; `unimem_bench.stats` computes these, for new records and
old ones alike. As JSON it is ``unimem.bench/1`` (docs/schemas/bench-1.json).
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

SCHEMA = "unimem.bench/1"

# As the other side of a target: the fastest of the peers.
BEST = "the best peer"

Role = Literal["unimem", "peer", "limit"]


@dataclass(frozen=True, slots=True)
class Target:
    """A claim about a case; `unimem_bench.suite` has a function for each kind."""

    # How many times as fast `side` is as `other`, how many times as much it costs, the figure of
    # `side` itself, or the exponent of its growth.
    kind: Literal["speed", "cost", "figure", "exponent"]
    side: str
    other: str | None  # `BEST` stands for the fastest peer
    at_least: bool  # whether the limit is a lower one
    limit: float  # that the median must keep
    issue: int  # the issue of unimem that sets it


@dataclass(frozen=True, slots=True)
class SideRecord:
    """The figures of one side; if the case scales, of one side at one size."""

    name: str  # as tables and plots show it
    role: Role  # unimem's own way, an alternative, or the best that the machine can do
    # For each pass, which is a process of its own, the figure of each round. Round i of a pass is
    # the same round for all sides of the case. Empty if a pass has not measured it.
    passes: list[list[float]]
    at: float | None = None  # if the case scales, the value on the x axis


@dataclass(frozen=True, slots=True)
class CaseRecord:
    """The measurements of one case."""

    suite: str
    name: str  # the case is ``suite/name``
    question: str  # in a sentence
    unit: str  # of the figures; more is better if it ends in ``/s``, else less
    x: str | None = None  # if the case scales, the label of the x axis
    # All are compared with the first of role "unimem".
    sides: list[SideRecord] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    rounds_dropped: int = 0  # discarded, since other processes took CPU time
    rounds_disturbed: int = 0  # disturbed but kept, for lack of quieter ones
    left_out: dict[str, str] = field(default_factory=dict)  # peers that were not measured, and why
    facts: dict[str, Any] = field(default_factory=dict)  # needed to read the figures
    failed: str | None = None  # why nothing was measured, or not in all passes
    is_error: bool = False  # whether that is an error

    @property
    def higher_is_better(self) -> bool:
        """Whether the figures are speeds."""
        return self.unit.endswith("/s")

    def side(self, name: str, at: float | None = None) -> SideRecord | None:
        """Find a side; if the case scales, at one size."""
        return next((side for side in self.sides if (side.name, side.at) == (name, at)), None)


@dataclass(frozen=True, slots=True)
class SuiteRecord:
    """The measurements of one suite."""

    name: str  # as on the command line
    question: str  # of all cases, in a sentence
    n_passes: int  # processes that measured it, one after the other
    seconds: float  # that they took
    cases: list[CaseRecord]  # in the order in which the suite declares them
    # For each pass, the CPU frequencies, load and so on that pyperf found.
    conditions: list[dict[str, Any]] = field(default_factory=list)
    run: str | None = None  # the begin and CPU of the run that measured it, if not the record's


@dataclass(frozen=True, slots=True)
class Record:
    """A run of `unimem bench`."""

    when: str  # its begin, in UTC
    quick: bool  # whether it had smaller sizes and fewer rounds
    seconds: float  # that it took
    machine: dict[str, Any]  # the document of `unimem.doctor`
    versions: dict[str, str]  # of unimem, Python, and all packages that were measured
    suites: list[SuiteRecord]  # in the order in which they ran

    def cases(self) -> Iterator[CaseRecord]:
        """Yield the cases of all suites."""
        for suite in self.suites:
            yield from suite.cases

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `to_json` writes."""
        return {"schema": SCHEMA, **asdict(self)}

    def to_json(self) -> str:
        """Return a JSON document, with the figures of a pass on one line."""
        text = json.dumps(self.to_dict(), indent=1)
        # In JSON, no string has a line break: a match is a list.
        return re.sub(r"\[\n[-+.\deE,\s]+\]", lambda found: " ".join(found[0].split()), text)

    def with_suites_of(self, later: Record) -> Record:
        """Return this record with the suites of a later run in place of its own.

        ValueError if one is a quick run and the other is not: their sizes differ.
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
        """Make a record from the result of `to_dict`; ValueError if it is another document."""
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
        """Read a record from a file; ValueError if it holds no record."""
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
    """Make the record of a case from the result of `dataclasses.asdict`."""
    sides = [SideRecord(**each) for each in document["sides"]]
    targets = [Target(**each) for each in document["targets"]]
    return CaseRecord(**{**document, "sides": sides, "targets": targets})


def _check(made: Any) -> None:
    """Refuse a record, or a part of one, if a field does not have the declared type."""
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
