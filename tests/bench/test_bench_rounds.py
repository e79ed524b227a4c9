"""How rounds are measured: sides alternate, and what others took is found and dropped."""

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


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing takes anything from a round."""
    monkeypatch.setattr(Uses, "taken_since", lambda before, after: 0.0)


def recording(calls: list[str], name: str) -> Callable[[], float]:
    def run() -> float:
        calls.append(name)
        return float(len(calls))

    return run


@pytest.mark.usefixtures("quiet")
def test_sides_alternate_and_each_begins_in_turn() -> None:
    calls: list[str] = []
    sides = {name: recording(calls, name) for name in "abc"}
    measured = alternate(sides, rounds=4, warmup=1, cpus=[0])
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert measured.figures["a"] == [4, 9, 11, 13]
    assert (measured.n_dropped, measured.n_disturbed) == (0, 0)


def test_disturbed_rounds_are_dropped_and_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([0.0, 0.5, 0.0, 0.3, 0.0])
    monkeypatch.setattr(Uses, "taken_since", lambda before, after: next(taken))
    figures = iter([1.0, 2.0, 3.0, 4.0, 5.0])
    measured = alternate({"a": lambda: next(figures)}, rounds=3, warmup=0, cpus=[0])
    assert measured.figures == {"a": [1, 3, 5]}
    assert (measured.n_dropped, measured.n_disturbed) == (2, 0)


def test_where_none_is_quiet_the_quietest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([0.5, 0.2, 0.0, 0.4, 0.1, 0.6])
    monkeypatch.setattr(Uses, "taken_since", lambda before, after: next(taken))
    figures = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    measured = alternate({"a": lambda: next(figures)}, rounds=3, warmup=0, cpus=[0])
    assert measured.figures == {"a": [2, 3, 5]}  # in the order of the rounds
    assert (measured.n_dropped, measured.n_disturbed) == (3, 2)


def test_another_process_on_our_cpu_is_found() -> None:
    """Real clocks of a real kernel: who waits for its CPU is told so."""
    cpu = sorted(os.sched_getaffinity(0))[-1]
    busy = f"import os\nos.sched_setaffinity(0, [{cpu}])\nprint(flush=True)\nwhile True: pass"

    def work() -> float:
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            pass
        return 1.0

    before = os.sched_getaffinity(0)
    try:
        pin(1)
        with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as other:
            try:
                assert other.stdout is not None
                other.stdout.readline()
                measured = alternate({"a": work}, rounds=1, warmup=0, cpus=[cpu])
                assert (measured.n_dropped, measured.n_disturbed) == (1, 1)
                # Of one that works for us, only the waiting counts.
                start = Uses.now([cpu], [other.pid])
                work()
                end = Uses.now([cpu], [other.pid])
                assert end.ours - start.ours > 0.05
                assert end.late - start.late > 0.02
            finally:
                other.kill()
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("late", "others", "taken"),
    [
        (0.0, 0.0, 0.0),
        (0.01, 0.04, 0.0),  # as always
        (0.03, 0.0, 0.03),
        (0.0, 0.08, 0.04),  # of two CPUs
        (0.1, 0.5, 0.35),
    ],
)
def test_what_was_taken(late: float, others: float, taken: float) -> None:
    before = Uses(10.0, 1.0, 100.0, 50.0, 2)
    after = Uses(11.0, 1.0 + late, 101.0 + others, 51.0, 2)
    small = others < rounds.OTHERS_SHARE * 2
    expected = late if late >= rounds.LATE_SHARE else 0.0
    assert before.taken_since(after) == pytest.approx(expected if small else taken)


def test_more_cpus_than_there_are() -> None:
    with pytest.raises(ValueError, match="100000 CPUs wanted, this process may use"):
        pin(100000)


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ("abcd", [3, 2, 1, 0]),
        ("aabb", [3, 1, 2, 0]),  # siblings have numbers that follow each other
        ("abab", [3, 2, 1, 0]),
        ("aaab", [3, 2, 1, 0]),
    ],
)
def test_a_cpu_of_each_core_comes_first(
    cores: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "core_of", lambda cpu: ("0", cores[cpu]))
    assert rounds.by_preference(range(4)) == expected


def test_without_a_number_each_core_has_one() -> None:
    before = os.sched_getaffinity(0)
    try:
        chosen = pin(None)
        assert set(chosen) == os.sched_getaffinity(0)
        assert len({limits.core_of(cpu) for cpu in chosen}) == len(chosen)
    finally:
        os.sched_setaffinity(0, before)


def test_a_stopwatch_counts_its_runs_and_prepares_outside() -> None:
    runs: list[int] = []
    before: list[int] = []
    side = stopwatch("runs.append(i)", 5, {"runs": runs}, lambda: before.append(len(runs)))
    assert side() < 1e6
    assert runs == [0, 1, 2, 3, 4]
    assert before == [0]


def test_a_warm_stopwatch_runs_twice() -> None:
    runs: list[int] = []
    warm_stopwatch("runs.append(i)", 2, {"runs": runs}, lambda: runs.append(-1))()
    assert runs == [-1, 0, 1, -1, 0, 1]


# ---- declarations ----


def case(run: Callable[[Measure], None] = lambda measure: None) -> Case:
    return Case("calls", "one", "What?", "ns", run, targets=(faster("b", 2, issue=2),))


@pytest.mark.usefixtures("quiet")
def test_measure_keeps_sides_with_their_roles(tmp_path: Path) -> None:
    given = Measure(case(), quick=False, folder=tmp_path)
    given.compare({"a": lambda: 1.0}, {"b": lambda: 2.0}, {"c": lambda: 3.0}, rounds=4)
    given.count("moved", [0])
    given.leave_out("torch", "torch is not installed")
    given.fact("nbytes", 4096)
    record = given.record()
    assert [(side.name, side.role, side.passes) for side in record.sides] == [
        ("a", "unimem", [[1.0] * 4]),
        ("b", "peer", [[2.0] * 4]),
        ("c", "limit", [[3.0] * 4]),
        ("moved", "unimem", [[0.0]]),
    ]
    assert record.left_out == {"torch": "torch is not installed"}
    assert record.facts == {"nbytes": 4096}
    assert record.targets == [faster("b", 2, issue=2)]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("rounds_", "quick_rounds", "n"), [(60, None, 20), (4, None, 3), (9, 5, 5)]
)
def test_a_quick_run_takes_fewer_rounds(
    rounds_: int, quick_rounds: int | None, n: int, tmp_path: Path
) -> None:
    given = Measure(case(), quick=True, folder=tmp_path)
    figures = given.compare({"a": lambda: 1.0}, rounds=rounds_, quick_rounds=quick_rounds)
    assert figures == {"a": [1.0] * n}


def test_more_cpus_than_there_are_are_not_measured(tmp_path: Path) -> None:
    given = Measure(case(), quick=True, folder=tmp_path)
    with pytest.raises(NotMeasured, match="100000 CPUs wanted"):
        given.pin(100000)


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
