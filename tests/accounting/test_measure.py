"""Figures of `um.measure`, checked against the actions measured."""

from __future__ import annotations

import asyncio
import functools
import gc
import mmap
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.processes.warm_python import run_script

MIB = 1 << 20
PAGE = mmap.PAGESIZE


def take(n: int, category: str = "scratch") -> None:
    um.Block(n * MIB, pages="4k", category=category).close()


def test_peaks_belong_to_the_block_not_the_process() -> None:
    take(64)
    with um.measure() as m:
        take(3)
        take(5)
        take(4, "history")
    assert m.peaks["scratch"] < 64 * MIB
    assert m.taken == dict.fromkeys(m.peaks, 0) | {"scratch": 5 * MIB, "kv": 4 * MIB}
    assert not any(m.growth.values())


def test_earlier_memory_is_in_peaks_but_not_in_taken() -> None:
    with um.Block(2 * MIB, category="staging"), um.measure() as m:
        block = um.Block(MIB, category="staging")
    assert m.peaks["staging"] - m.taken["staging"] >= 2 * MIB
    assert (m.taken["staging"], m.growth["staging"]) == (MIB, MIB)
    block.close()


def test_growth_is_negative_after_memory_is_given_back() -> None:
    block = um.Block(3 * MIB, pages="4k", category="staging")
    with um.measure() as m:
        block.close()
    assert (m.taken["staging"], m.growth["staging"]) == (0, -3 * MIB)


def test_a_growing_cache_is_seen_step_by_step() -> None:
    row = np.ones((1, 4, 64), "float32")
    with um.KVCache(1, 4, 64, 1 << 14, grow=True) as kv, um.measure() as m:
        before = kv.capacity_bytes
        kv.append(0, row, row)
        assert m.growth["kv"] == kv.capacity_bytes - before > 0


def test_blocks_within_blocks_each_have_their_own_peaks() -> None:
    with um.measure() as outer:
        take(4)
        with um.measure() as inner:
            take(2)
            assert inner.taken["scratch"] == 2 * MIB  # so far
        take(6)
    assert (outer.taken["scratch"], inner.taken["scratch"]) == (6 * MIB, 2 * MIB)


def test_concurrent_threads_are_seen_by_all_measurements() -> None:
    """Four threads each hold a block at the same moment and measure."""
    together = threading.Barrier(4)

    def run(_: int) -> int:
        together.wait()
        with um.measure() as m, um.Block(MIB, category="diagnostics"):
            together.wait()
        together.wait()
        return m.peaks["diagnostics"]

    with um.measure() as all_of_it, ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(run, range(4)))
    assert all_of_it.taken["diagnostics"] == 4 * MIB
    assert seen == [all_of_it.peaks["diagnostics"]] * 4


def test_each_page_touched_is_a_fault() -> None:
    with um.Block(64 * PAGE, pages="4k") as block:
        array = block.as_array()
        array[:: 2 * PAGE] = 1
        with um.measure() as m:
            array[::PAGE] = 1
        # The kernel may rarely add a fault, but never counts fewer than the pages touched.
        assert 32 <= m.minor_faults < 40
        assert 32 <= (m.thread_minor_faults or 0) <= m.minor_faults
        assert m.major_faults == m.thread_major_faults == 0
        del array


def test_faults_of_another_thread_are_the_process_s() -> None:
    with um.Block(32 * PAGE, pages="4k") as block:
        array = block.as_array()
        thread = threading.Thread(target=array.__setitem__, args=(slice(None, None, PAGE), 1))
        with um.measure() as m:
            thread.start()
            thread.join()
        assert m.minor_faults - (m.thread_minor_faults or 0) >= 32
        del array, thread
    with um.measure() as m, ThreadPoolExecutor(1) as pool:  # and are not known to another
        theirs = pool.submit(lambda: (m.thread_minor_faults, m.thread_major_faults)).result()
    assert theirs == (None, None)
    assert m.thread_minor_faults is not None


def test_calls_and_allocations_of_unimem_are_counted() -> None:
    with um.measure() as m:
        take(1)
    assert m.n_os_calls >= 2  # it was mapped and unmapped
    with um.measure() as m, um.Block(MIB, reserve=4 * MIB) as block:
        block.commit(2 * MIB)
    assert (m.n_allocations > 0) == (m.allocated_bytes > 0)
    assert m.n_os_calls >= 3


def test_small_and_large_mallocs_are_counted() -> None:
    with um.measure() as m:
        kept = [bytearray(100_000), bytearray(50_000_000)]
        if m.malloc_bytes is None:
            pytest.skip("this C library has no mallinfo2: glibc has it from 2.33 on")
        assert 50_100_000 <= m.malloc_bytes < 50_200_000
        kept.clear()
        assert 0 <= m.malloc_bytes < 100_000


def test_time_runs_until_the_end() -> None:
    with um.measure() as m:
        first = m.seconds
        assert 0 < first < m.seconds
    assert m.seconds == m.seconds > first


def test_measuring_takes_nothing() -> None:
    """A loop of measurements has no faults, calls or memory, even in its first rounds."""
    gc.collect()

    def rounds() -> um.Measured:
        with um.measure() as outer:
            for _ in range(500):
                with um.measure() as m:
                    pass
                assert m.n_os_calls == 0
        return outer

    # The kernel may move a page, which rarely adds a fault.
    tries = [rounds() for _ in range(4)]
    assert 0 in [m.thread_minor_faults for m in tries]
    for m in tries:
        assert m.n_os_calls == m.n_allocations == m.allocated_bytes == 0
        assert not any(m.growth.values())
    assert tries[-1].malloc_bytes in (0, None)


def taken(function: Any) -> int:
    measured: um.Measured = function.measured
    return measured.taken["scratch"]


def test_a_function_is_measured_call_by_call() -> None:
    @um.measure()
    def load(n: int, *, category: str) -> int:
        """Load."""
        take(n, category)
        return n

    assert load.measured is None
    assert load.__doc__ == "Load."
    assert load(2, category="staging") == 2
    first = load.measured
    assert first is not None
    assert load(3, category="staging") == 3
    assert load.measured is not None
    assert (first.taken["staging"], load.measured.taken["staging"]) == (2 * MIB, 3 * MIB)


def test_a_call_that_raises_is_measured() -> None:
    @um.measure()
    def fail() -> None:
        take(2)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert taken(fail) == 2 * MIB


def test_a_method_is_measured() -> None:
    class Engine:
        @um.measure()
        def step(self, n: int) -> int:
            take(n)
            return n

    assert Engine().step(2) == 2
    assert taken(Engine.step) == 2 * MIB


def test_a_recursive_function_reports_its_outermost_call() -> None:
    @um.measure()
    def down(n: int) -> None:
        take(n)
        if n > 1:
            down(n - 1)

    down(3)
    assert taken(down) == 3 * MIB


def test_a_coroutine_is_measured_from_its_first_step_to_its_last() -> None:
    @um.measure()
    async def fetch() -> int:
        await asyncio.sleep(0)
        return 7

    async def other() -> None:
        take(2)

    async def both() -> int:
        found, _ = await asyncio.gather(fetch(), other())
        return int(found)

    assert asyncio.run(both()) == 7
    assert taken(fetch) == 2 * MIB


def test_generators_are_refused() -> None:
    def rows() -> Iterator[int]:
        yield 1

    async def later() -> Any:
        yield 1

    for function in (rows, later, functools.partial(rows)):
        with pytest.raises(TypeError, match=r"is a generator.*Measure inside it"):
            um.measure()(function)
    with pytest.raises(TypeError, match="expected a function, got int"):
        um.measure()(3)  # type: ignore[arg-type]


def test_a_measurement_before_its_start_has_no_figures() -> None:
    m = um.measure()
    figures = ("peaks", "taken", "growth", "minor_faults", "n_os_calls", "seconds", "__str__")
    for name in (*figures, "thread_minor_faults"):
        with pytest.raises(RuntimeError, match="nothing is measured yet"):
            str(m) if name == "__str__" else getattr(m, name)
    assert repr(m) == "Measured(not begun)"


def test_it_is_entered_once() -> None:
    with um.measure() as m, pytest.raises(RuntimeError, match="use another"):
        m.__enter__()
    with pytest.raises(RuntimeError, match="use another"):
        m.__enter__()


def test_the_65th_measurement_is_refused_and_the_rest_continue() -> None:
    with um.measure() as first:
        others = []
        with pytest.raises(um.CapacityError, match="64 of 64 are used"):  # noqa: PT012
            while True:
                others.append(um.measure().__enter__())
        assert len(others) == 63
        take(2)
        del others  # dropped without an end
        with um.measure():
            pass
    assert first.taken["scratch"] == 2 * MIB


def test_a_forked_child_reads_only_ended_measurements() -> None:
    done = run_script("""
        import os, sys
        import unimem as um

        with um.measure() as before:
            um.Block(1 << 20, category="scratch").close()
        with um.measure() as m:
            pid = os.fork()
            if pid == 0:
                assert before.taken["scratch"] == 1 << 20
                for _ in range(2):
                    try:
                        m.minor_faults
                    except um.ClosedError:
                        pass
                    else:
                        os._exit(1)
                    m.__exit__()
                with um.measure() as own:
                    um.Block(1 << 21, category="scratch").close()
                os._exit(0 if own.taken["scratch"] == 1 << 21 else 2)
            assert os.waitpid(pid, 0)[1] == 0
        print(m.taken["scratch"], m.minor_faults >= 0)
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "True"]


def test_it_is_shown_as_a_table() -> None:
    with um.measure() as m:
        take(3, "history")
        block = um.Block(MIB, category="staging")
    text = str(m)
    assert "kv" in text
    assert "3.0 MiB" in text
    assert "+1.0 MiB" in text
    assert re.search(rf"^unimem's system calls +{m.n_os_calls}$", text, re.M)
    assert re.fullmatch(r"Measured\(\d+ faults, \d+ system calls, .* s\)", repr(m))
    with um.measure() as m:
        assert repr(m).startswith("Measured(going on: 0 faults")
        block.close()
    assert "-1.0 MiB" in str(m)
