"""How many threads compute a token, on invented machines with given durations."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

from support.models import decoders  # noqa: F401 - skips where something is missing
from unimem.engine.thread_count import ThreadCount

MS = 1_000_000
Cost = Callable[[int, float], float]  # ms a token, by threads and the seconds that have passed


def decode(
    count: ThreadCount, cost: Cost, seconds: float, start: float = 0.0
) -> tuple[int, list[int]]:
    """Return how many tokens are computed in this time, and the threads of each."""
    now, used = start, []
    while now < start + seconds:
        ns, limit = int(cost(count.n, now) * MS), count.limit_ns
        if limit and ns > limit:
            count.note(limit, given_up=True)
            now += limit / 1e9
            ns = int(cost(count.n, now) * MS)
        used.append(count.n)
        count.note(ns)
        now += ns / 1e9
    return len(used), used


def by_count(**ms: float) -> Cost:
    """Return a cost that depends on the threads alone: ``by_count(n2=50, n1=90)``."""
    return lambda n, _: ms[f"n{n}"]


def one_core_of_64_is_taken(n: int, _now: float) -> float:
    return 1200 / n if n < 64 else 400


def grows(n: int, now: float) -> float:
    return (50 + now) / n


def stutters(n: int, now: float) -> float:
    """Some tokens take long with any number of threads."""
    return 400 if int(now * 10) % 50 == 49 else 90 / n


def scatters(n: int, now: float) -> float:
    """Durations scatter on a quiet machine."""
    return (43 if n == 2 else 53) * random.Random(now).lognormvariate(0, 0.2)


@pytest.mark.parametrize(
    ("most", "cost", "settled", "share"),
    [
        # A model of 1.1 billion, and a small one: quiet, one core of two busy.
        (2, by_count(n2=45, n1=75), 2, 0.98),
        (2, by_count(n2=600, n1=75), 1, 0.95),
        (2, by_count(n2=0.11, n1=0.16), 2, 0.98),
        (2, by_count(n2=10, n1=0.16), 1, 0.95),
        (2, by_count(n2=0.35, n1=0.16), 1, 0.95),
        # Two threads that are slightly better or worse.
        (2, by_count(n2=70, n1=75), 2, 0.98),
        (2, by_count(n2=80, n1=75), 1, 0.98),
        # Memory is as fast with three threads as with four.
        (4, by_count(n4=20, n3=20, n2=25, n1=50), 4, 0.98),
        (64, lambda n, _: 1200 / n, 64, 0.98),
        (64, one_core_of_64_is_taken, 63, 0.95),
        (8, by_count(n8=200, n7=190, n6=170, n4=120, n2=60, n1=30), 1, 0.89),
        (2, grows, 2, 0.98),
        (2, stutters, 2, 0.90),
        (2, scatters, 2, 0.97),
        (1, by_count(n1=75), 1, 1.0),
    ],
)
def test_tokens_are_as_fast_as_with_the_best_count(
    most: int, cost: Cost, settled: int, share: float
) -> None:
    seconds = 60 if cost(1, 0) > 1 else 5
    n, used = decode(ThreadCount(most, adapts=True), cost, seconds)
    best, _ = decode(ThreadCount(settled, adapts=False), cost, seconds)
    assert n >= share * best
    late = used[len(used) // 2 :]
    assert late.count(settled) >= 0.85 * len(late)


def test_a_neighbour_comes_and_goes() -> None:
    count = ThreadCount(2, adapts=True)

    def cost(n: int, now: float) -> float:
        is_busy = 20 <= now < 40
        return 75 if n == 1 else 600 if is_busy else 45

    _, quiet = decode(count, cost, 20)
    assert set(quiet[-50:]) == {2}
    # At once: the current token is given up after twice its usual duration.
    _, busy = decode(count, cost, 20, 20)
    assert busy[0] == 1
    assert busy.count(1) > 0.95 * len(busy)
    # It goes back soon.
    _, after = decode(count, cost, 20, 40)
    assert after.index(2) * 75 < 15_000
    assert after[-50:].count(2) > 45


def test_a_token_is_given_up_where_that_may_help() -> None:
    for count in (ThreadCount(4, adapts=False), ThreadCount(1, adapts=True)):
        count.note(50 * MS)
        assert (count.n, count.limit_ns) == (count.most, 0)
    count = ThreadCount(4, adapts=True)
    assert count.limit_ns == 0  # nothing is noted yet
    count.note(50 * MS)
    assert (count.n, count.limit_ns) == (4, 101 * MS)
    count.note(101 * MS, given_up=True)
    assert count.n == 3
    for _ in range(4):
        assert count.n == 3
        count.note(60 * MS)
    assert count.n == 2  # it continues in the faster direction


@pytest.mark.parametrize(("most", "counts"), [
    (1, [1]), (2, [2, 1]), (3, [3, 2, 1]), (8, [8, 7, 6, 4, 2, 1]),
    (64, [64, 63, 62, 60, 56, 48, 32, 16, 8, 4, 2, 1]),
])  # fmt: skip
def test_neighbours_take_a_core_or_a_few(most: int, counts: list[int]) -> None:
    count = ThreadCount(most, adapts=True)
    _, used = decode(count, lambda n, _: 10 * 1.08**n, 60)  # fewer threads are faster
    assert list(dict.fromkeys(used)) == counts


def test_a_number_of_threads_is_one() -> None:
    with pytest.raises(ValueError, match="at least one thread, got 0"):
        ThreadCount(0, adapts=True)


def test_a_thread_that_openmp_binds_is_not_the_only_one() -> None:
    """OpenMP binds it when the library is loaded; the other threads have the other CPUs."""
    script = """
    from unimem.system import limits
    before = limits.thread_count()
    import unimem.engine
    print(before, limits.thread_count())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    before, after = done.stdout.split()
    assert before == after
