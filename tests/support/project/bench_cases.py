"""Cases of the benchmarks, run once each, without regard to their speed."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from support.project import tiers
from unimem_bench import llama_build, suite, suites
from unimem_bench.record import BEST, CaseRecord
from unimem_bench.rounds import Rounds, Side
from unimem_bench.suite import Case, Measure


def cases_of(*names: str, slow: Collection[str] = ()) -> list[Any]:
    """Return the cases of suites as parameters of a test, with their names in tables as ids."""
    cases = [case for name in names for case in suites.load_suite(name).cases]
    named = {f"{case.suite}/{case.name}": case for case in cases}
    return [
        pytest.param(case, id=name, marks=[pytest.mark.slow] if name in slow else [])
        for name, case in named.items()
    ]


def case_of(name: str) -> Case:
    suite, _, own = name.partition("/")
    (case,) = (case for case in suites.load_suite(suite).cases if case.name == own)
    return case


def roles(record: CaseRecord) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {"unimem": [], "peer": [], "limit": []}
    for side in record.sides:
        names[side.role].append(side.name)
    return names


def run_case(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> CaseRecord:
    """Run a case as a quick run does, with every side called once."""

    def once(sides: Mapping[Any, Side], **_options: Any) -> Rounds[Any]:
        return Rounds({name: [side()] for name, side in sides.items()}, 0, 0)

    monkeypatch.setattr(suite, "alternate", once)
    if not tiers.everything:  # its import is slower than all cases
        uninstall(monkeypatch, "torch")
    measure = Measure(case, quick=True, folder=folder, builds=tiers.everything)
    cpus = os.sched_getaffinity(0)
    try:
        measure.pin(1)
        case.run(measure)
    finally:
        os.sched_setaffinity(0, cpus)
    return measure.record()


def pretend_llama_cpp(monkeypatch: pytest.MonkeyPatch, *, is_built: bool) -> None:
    """Let cases find a library of llama.cpp, which is none, or find that it is not built."""

    def library(variant: str = "native", *, build: bool = False) -> Path:
        if not is_built:
            raise llama_build.NoPeer("not built")
        return Path("libunimem-peer.so")

    monkeypatch.setattr(llama_build, "library", library)
    monkeypatch.setattr(llama_build, "facts", lambda library: {"ggml": "0"})


def check_case(case: Case, record: CaseRecord) -> None:
    """Check that a case has measured what it declares.

    One of its sides is unimem's. Sides have sizes if and only if the case has an x axis, one role
    at all sizes, and the same number of rounds. Each target names existing sides, or a peer left
    out with a reason.
    """
    assert (record.suite, record.name) == (case.suite, case.name)
    roles = {side.name: side.role for side in record.sides}
    assert "unimem" in roles.values()
    places = [(side.name, side.at) for side in record.sides]
    assert len(set(places)) == len(places), "a side was measured twice"
    for side in record.sides:
        assert (side.at is not None) == (case.x is not None), side.name
        assert side.role == roles[side.name], side.name
        assert len(side.passes) == 1, side.name
        assert side.passes[0], side.name
        assert all(map(math.isfinite, side.passes[0])), side.name
    assert all(record.left_out.values()), "a peer is left out without a reason"
    assert not roles.keys() & record.left_out.keys(), "measured, and left out"
    for target in case.targets:
        assert roles.get(target.side) == "unimem", target
        if target.other == BEST:
            assert "peer" in roles.values() or record.left_out, target
        elif target.other is not None:
            assert target.other in roles.keys() | record.left_out.keys(), target
        if target.kind == "exponent":
            assert sum(name == target.side for name, _ in places) > 1, target


def uninstall(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Make `Measure.installed` report packages as missing."""
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name in packages else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
