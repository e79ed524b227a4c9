"""The suite `exec`: each case measures one program with and without `unimem exec`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import unimem_exec as launch
from support.models.llama_cpp import llama_library
from support.project.bench_cases import (
    case_of,
    cases_of,
    check_case,
    pretend_llama_cpp,
    run_case,
)
from unimem.engine import embedded_model
from unimem_bench import decoding, states
from unimem_bench.suite import Case, NotMeasured
from unimem_bench.suites import exec as suite
from unimem_bench.suites.exec import WITH, WITHOUT
from unimem_bench.timed import TimedProcess, TimedProcessError

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.skipif(
    launch.find_library() is None, reason="libunimem-exec.so is not installed: make install"
)


@pytest.fixture
def tiny(monkeypatch: Patch) -> None:
    """Use the model in the package, on a machine in any state."""
    monkeypatch.setattr(decoding, "model", lambda measure, kind: Path(embedded_model()))
    monkeypatch.setattr(decoding, "require_room", lambda n, path: None)
    monkeypatch.setattr(states, "heat", lambda path: None)
    monkeypatch.setattr(states, "ready", lambda nbytes, cpus: None)
    monkeypatch.setattr(suite, "REST_S", 0.0)


class Invented:
    """A process under exec, with this process's memory."""

    def __init__(self, words: list[str]) -> None:
        self.pid, self.is_exec = os.getpid(), "exec" in words
        self.facts = {"start_s": 0.5 if "--prefault" in words else 0.25 if self.is_exec else 1.0}

    def tokens(self, n: int, seconds: float) -> Mapping[str, Any]:
        return {"ms": [10.0 if self.is_exec else 20.0] * n}

    def __enter__(self) -> Invented:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-start", {WITH: 250, f"{WITH} --prefault": 500, WITHOUT: 1000}),
        ("llama-start-rested", {WITH: 250, f"{WITH} --prefault": 500, WITHOUT: 1000}),
        ("llama-decode", {WITH: 100, WITHOUT: 50}),
    ],
)
def test_what_the_cases_make_of_processes(
    tiny: None, monkeypatch: Patch, tmp_path: Path, name: str, expected: dict[str, float]
) -> None:
    monkeypatch.setattr(suite, "TimedProcess", Invented)
    pretend_llama_cpp(monkeypatch, is_built=True)
    record = run_case(case_of(f"exec/{name}"), tmp_path, monkeypatch)
    assert {side.name: side.passes[0][0] for side in record.sides} == pytest.approx(expected)


def test_where_llama_cpp_cannot_be_measured_it_is_said(
    tiny: None, monkeypatch: Patch, tmp_path: Path
) -> None:
    case = case_of("exec/llama-decode")
    with monkeypatch.context() as patch:
        pretend_llama_cpp(patch, is_built=False)
        with pytest.raises(NotMeasured, match=r"wants llama\.cpp: not built"):
            run_case(case, tmp_path, patch)

    def ends(words: list[str]) -> None:
        raise TimedProcessError("it ended with status 1")

    pretend_llama_cpp(monkeypatch, is_built=True)
    monkeypatch.setattr(suite, "TimedProcess", ends)
    with pytest.raises(NotMeasured, match="does not start here: it ended with status 1"):
        run_case(case, tmp_path, monkeypatch)


def test_a_process_that_ends_says_with_what() -> None:
    with pytest.raises(TimedProcessError, match="status 3"):
        TimedProcess(["sh", "-c", "exit 3"])


@pytest.mark.parametrize("name", ["start", pytest.param("small", marks=pytest.mark.slow)])
def test_programs_are_measured(name: str, monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(suite, "N_QUICK_CALLS", 1000)
    case = case_of(f"exec/{name}")
    record = run_case(case, tmp_path, monkeypatch)
    check_case(case, record)
    assert record.sides[0].passes[0][0] > 0


@pytest.mark.slow  # five processes that load llama.cpp
@pytest.mark.parametrize("case", [c for c in cases_of("exec") if "llama" in str(c.id)])
def test_llama_cpp(tiny: None, case: Case, monkeypatch: Patch, tmp_path: Path) -> None:
    llama_library()
    record = run_case(case, tmp_path, monkeypatch)
    check_case(case, record)
    assert all(side.passes[0][0] > 0 for side in record.sides)
