"""How rounds are measured: sides alternate, and disturbed rounds are dropped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from unimem.system import limits
from unimem_bench import rounds
from unimem_bench.rounds import Uses, alternate, pin, stopwatch, warm_stopwatch
from unimem_bench.suite import Case, Measure, NotMeasured, Suite, faster

Patch = pytest.MonkeyPatch


@pytest.fixture
def quiet(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Uses, "taken_since", lambda before, after: 0.0)


@pytest.mark.usefixtures("quiet")
def test_sides_alternate_and_each_begins_in_turn() -> None:
    calls: list[str] = []

    def recording(name: str) -> Callable[[], float]:
        return lambda: calls.append(name) or float(len(calls))  # type: ignore[func-returns-value]

    measured = alternate({name: recording(name) for name in "abc"}, rounds=4, warmup=1, cpus=[0])
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert measured.figures["a"] == [4, 9, 11, 13]
    assert (measured.n_dropped, measured.n_disturbed) == (0, 0)


@pytest.mark.parametrize(("taken", "kept", "dropped", "disturbed"), [
    ([0.0, 0.5, 0.0, 0.3, 0.0], [1, 3, 5], 2, 0),
    ([0.5, 0.2, 0.0, 0.4, 0.1, 0.6], [2, 3, 5], 3, 2),
], ids=["run again", "all disturbed: the quietest, in the order of the rounds"])  # fmt: skip
def test_disturbed_rounds_are_dropped(
    taken: list[float], kept: list[float], dropped: int, disturbed: int, monkeypatch: Patch
) -> None:
    of_rounds, figures = iter(taken), iter(map(float, range(1, 7)))
    monkeypatch.setattr(Uses, "taken_since", lambda before, after: next(of_rounds))
    measured = alternate({"a": lambda: next(figures)}, rounds=3, warmup=0, cpus=[0])
    assert measured == rounds.Rounds({"a": kept}, dropped, disturbed)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("rounds_", "until", "n"), [(9, -1.0, 3), (2, -1.0, 2), (9, 1e9, 9)])
def test_no_round_begins_when_time_is_up_but_for_the_fewest(
    rounds_: int, until: float, n: int
) -> None:
    measured = alternate(
        {"a": lambda: 1.0}, rounds=rounds_, warmup=0, cpus=[0], until=time.monotonic() + until
    )
    assert measured.figures == {"a": [1.0] * n}


def test_another_process_on_our_cpu_is_found() -> None:
    """With real clocks of a real kernel: a thread that waits for its CPU is noticed."""
    cpu = sorted(os.sched_getaffinity(0))[-1]
    busy = f"import os\nos.sched_setaffinity(0, [{cpu}])\nprint(flush=True)\nwhile True: pass"

    def work() -> float:
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            pass
        return 1.0

    pin(1)
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            measured = alternate({"a": work}, rounds=1, warmup=0, cpus=[cpu])
            assert (measured.n_dropped, measured.n_disturbed) == (1, 1)
            # If it works for us, only the waiting counts.
            start = Uses.now([cpu], [other.pid])
            work()
            end = Uses.now([cpu], [other.pid])
            assert end.ours > start.ours
            assert end.late > start.late
        finally:
            other.kill()


@pytest.mark.parametrize(("late", "others", "taken"), [
    (0.0, 0.0, 0.0),
    (0.01, 0.08, 0.0),  # as always
    (0.03, 0.0, 0.03),
    (0.0, 0.2, 0.1),  # of two CPUs
    (0.1, 0.5, 0.35),
])  # fmt: skip
def test_what_was_taken(late: float, others: float, taken: float) -> None:
    before = Uses(10.0, 1.0, 100.0, 50.0, 2)
    after = Uses(11.0, 1.0 + late, 101.0 + others, 51.0, 2)
    assert before.taken_since(after) == pytest.approx(taken)


@pytest.mark.parametrize(("cores", "expected"), [
    ("abcd", [3, 2, 1, 0]),
    ("aabb", [3, 1, 2, 0]),  # siblings have numbers that follow each other
    ("abab", [3, 2, 1, 0]),
    ("aaab", [3, 2, 1, 0]),
])  # fmt: skip
def test_a_cpu_of_each_core_is_first(cores: str, expected: list[int], monkeypatch: Patch) -> None:
    monkeypatch.setattr(limits, "core_of", lambda cpu: ("0", cores[cpu]))
    assert rounds.by_preference(range(4)) == expected


def test_without_a_number_each_core_has_one_cpu() -> None:
    chosen = pin(None)
    assert set(chosen) == os.sched_getaffinity(0)
    assert len({limits.core_of(cpu) for cpu in chosen}) == len(chosen)


@pytest.mark.parametrize(
    ("made", "runs"), [(stopwatch, [-1, 0, 1, 2]), (warm_stopwatch, [-1, 0, 1, 2] * 2)]
)
def test_a_stopwatch_counts_runs(made: Callable[..., Callable[[], float]], runs: list[int]) -> None:
    found: list[int] = []
    assert made("runs.append(i)", 3, {"runs": found}, lambda: found.append(-1))() < 1e6
    assert found == runs


@pytest.fixture
def measure(tmp_path: Path) -> Callable[[bool], Measure]:
    """Return a function that makes the `Measure` of a quick run or a whole one."""
    target = faster("b", 2, issue=2)
    case = Case("calls", "one", "What?", "ns", lambda _: None, targets=(target,))
    return lambda quick: Measure(case, quick=quick, folder=tmp_path)


@pytest.mark.usefixtures("quiet")
def test_measure_keeps_sides_with_their_roles(measure: Callable[[bool], Measure]) -> None:
    given = measure(False)
    given.compare({"a": lambda: 1.0}, {"b": lambda: 2.0}, {"c": lambda: 3.0}, rounds=4)
    given.count("moved", [0])
    given.leave_out("torch", "torch is not installed")
    given.fact("nbytes", 4096)
    record = given.record()
    assert [(side.name, side.role, side.passes) for side in record.sides] == [
        ("a", "unimem", [[1.0] * 4]), ("b", "peer", [[2.0] * 4]), ("c", "limit", [[3.0] * 4]),
        ("moved", "unimem", [[0.0]]),
    ]  # fmt: skip
    assert record.left_out == {"torch": "torch is not installed"}
    assert record.facts == {"nbytes": 4096}
    assert record.targets == [faster("b", 2, issue=2)]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("rounds_", "quick_rounds", "n"), [(60, None, 20), (4, None, 3), (9, 5, 5)]
)
def test_a_quick_run_takes_fewer_rounds(
    rounds_: int, quick_rounds: int | None, n: int, measure: Callable[[bool], Measure]
) -> None:
    given = measure(True)
    figures = given.compare({"a": lambda: 1.0}, rounds=rounds_, quick_rounds=quick_rounds)
    assert figures == {"a": [1.0] * n}


def test_more_cpus_than_there_are(measure: Callable[[bool], Measure]) -> None:
    with pytest.raises(ValueError, match="needs 100000 CPUs, this process may use"):
        pin(100000)
    with pytest.raises(NotMeasured, match="needs 100000 CPUs"):
        measure(True).pin(100000)


def test_a_suite_has_a_name_once_and_chooses_by_it() -> None:
    suite = Suite("calls", "What?", passes=5, quick_passes=2)
    suite.case("take", "What?", unit="ns")(lambda measure: None)
    suite.case("append", "What?", unit="ns", in_quick=False)(lambda measure: None)
    with pytest.raises(ValueError, match="'calls' has two cases 'take'"):
        suite.case("take", "What?", unit="ns")(lambda measure: None)
    assert [each.name for each in suite.chosen(quick=False)] == ["take", "append"]
    assert [each.name for each in suite.chosen(quick=True)] == ["take"]
    assert [each.name for each in suite.chosen(quick=False, case="calls/app")] == ["append"]
    assert (suite.n_passes(quick=False), suite.n_passes(quick=True)) == (5, 2)
