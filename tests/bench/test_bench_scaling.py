"""The suite `scaling`: four decades of size, and sides that do the same work at each."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import unimem as um
from support.project.bench_cases import case_of, cases_of, check_case, pretend_llama_cpp, run_case
from unimem_bench import rounds, states, stats, suites
from unimem_bench.suite import Case, Measure, NotMeasured, Suite
from unimem_bench.suites import scaling

Patch = pytest.MonkeyPatch
# Full sizes would take too long in a test.
SMALL = 40


@pytest.fixture
def few_sizes(monkeypatch: Patch) -> None:
    steps = (1, 4, SMALL)
    monkeypatch.setattr(scaling, "sizes", lambda _, first, **__: [first * step for step in steps])


def test_the_most_tensors_are_no_more_than_a_file_may_have(tmp_path: Path) -> None:
    measure = Measure(suites.load_suite("scaling").cases[0], quick=False, folder=tmp_path)
    n = scaling.sizes(measure, scaling.LEAST_TENSORS)[-1]
    with um.open_weights(scaling.model_file(measure, n_tensors=n), load="map") as weights:
        assert len(weights) == n


@pytest.mark.usefixtures("few_sizes")
@pytest.mark.parametrize("case", cases_of("scaling"))
def test_a_case_measures_what_it_declares(case: Case, tmp_path: Path, monkeypatch: Patch) -> None:
    record = run_case(case, tmp_path, monkeypatch)
    check_case(case, record)
    ours = [side.at for side in record.sides if side.name == "unimem"]
    assert [at / ours[0] for at in ours if at and ours[0]] == [1, 4, SMALL]
    assert [target.kind for target in case.targets] == ["exponent"]


@pytest.mark.parametrize("quick", [True, False])
def test_sizes_span_four_decades(quick: bool, tmp_path: Path) -> None:
    measure = Measure(suites.load_suite("scaling").cases[0], quick=quick, folder=tmp_path)
    found = scaling.sizes(measure, 10)
    assert (found[0], found[-1]) == (10, 100_000)
    assert len(found) == (5 if quick else 9)
    assert found == sorted(set(found))


@pytest.mark.usefixtures("few_sizes")
def test_ggml_is_left_out_where_it_is_not_built(tmp_path: Path, monkeypatch: Patch) -> None:
    pretend_llama_cpp(monkeypatch, is_built=False)
    case = case_of("scaling/open-data")
    record = run_case(case, tmp_path, monkeypatch)
    check_case(case, record)
    assert record.left_out == {"ggml": "not built"}


def test_what_does_not_fit_or_write_is_found_out(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(states, "available_bytes", lambda: 1 << 20)
    with pytest.raises(NotMeasured, match=r"wants 125\.0 MiB of memory, there are 1\.0 MiB"):
        run_case(case_of("scaling/verify-4k"), tmp_path, monkeypatch)
    # Although NumPy writes the same to the same arrays.
    monkeypatch.setattr(scaling, "_copy", lambda table, n=1: 1.0)
    with pytest.raises(AssertionError, match="append of 10 tokens: not what was appended"):
        run_case(case_of("scaling/append"), tmp_path, monkeypatch)


def test_sizes_alternate_within_a_round(tmp_path: Path, monkeypatch: Patch) -> None:
    """A machine that slows down shows in no slope: each round has its own."""
    monkeypatch.setattr(rounds.Uses, "taken_since", lambda *_: 0.0)
    slower = iter(range(1, 10_000))
    suite = Suite("invented", "?")
    calls: list[tuple[str, int]] = []

    def side(name: str, size: int) -> rounds.Side:
        def run() -> float:
            calls.append((name, size))
            return math.sqrt(size) * (1 + next(slower) // 4)  # each round of four calls is slower

        return run

    @suite.case("roots", "?", unit="ns", x="size")
    def roots(measure: Measure) -> None:
        measure.scale(
            {"unimem": {size: side("unimem", size) for size in (10, 1000)}},
            {"peer": {1000: side("peer", 1000)}},
            {"limit": {10: side("limit", 10)}},
            rounds=9,
            warmup=0,
        )

    measure = Measure(suite.cases[0], quick=False, folder=tmp_path)
    measure.pin(1)
    roots(measure)
    record = measure.record()
    assert [(each.name, each.role, each.at, len(each.passes[0])) for each in record.sides] == [
        ("unimem", "unimem", 10, 9), ("unimem", "unimem", 1000, 9), ("peer", "peer", 1000, 9),
        ("limit", "limit", 10, 9),
    ]  # fmt: skip
    assert set(calls[:4]) == {("unimem", 10), ("unimem", 1000), ("peer", 1000), ("limit", 10)}
    assert calls[0] != calls[4], "the one that begins changes"
    assert stats.growth(record, "unimem").exponent == pytest.approx(0.5, abs=0.06)
