"""Pages of blocks: what is asked for, what is granted, and what the kernel's own books say."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from conftest import Run
from support.kernel import proc_maps
from support.kernel.huge_pages import PAGE_BYTES, POOL, count, reserved
from support.processes.child_checks import CHECKS
from support.project import tiers
from support.project.tiers import slow_after

pytestmark = pytest.mark.usefixtures("gives_memory_back")

MIB = 1 << 20
HUGE = proc_maps.huge_page_bytes()

needs_thp = pytest.mark.skipif(HUGE == 0, reason="this kernel gives no transparent huge pages")


# ---- every combination, against smaps and numa_maps ----


def check_granted(options: dict[str, Any], *, has_pool: bool) -> None:
    pages, lock, shared, warm = options.values()
    with um.Block(3 * MIB, **options) as block:
        assert block.requested.items() >= {"pages": pages, "lock": lock}.items()
        granted, whole = block.granted, block.nbytes
        proc_maps.assert_granted(block)
        assert granted.resident_bytes == (whole if warm or lock is True else 0)
        if has_pool and pages in ("auto", "2m") and not isinstance(shared, str):
            assert (granted.pages, granted.page_bytes) == ("2m", PAGE_BYTES)
            assert whole == 2 * PAGE_BYTES
        elif pages == "4k":
            assert (granted.pages, whole) == ("4k", 3 * MIB)
        elif HUGE and shared is False:
            assert (block.address % HUGE, whole % HUGE) == (0, 0)
            # Before the first touch it is what will be given.
            assert granted.resident_bytes or granted.pages == "thp"
        block.as_array()[: whole // 2] = 7
        for placement in (granted, block.verify()):
            assert not lock or placement.locked_bytes == placement.resident_bytes
        proc_maps.assert_granted(block)
        assert (block.as_array()[: whole // 2] == 7).all()


@pytest.mark.parametrize("pages", slow_after(2, ["auto", "2m", "4k", "thp"]))
@pytest.mark.parametrize("pool", ["eight_huge_pages", "no_huge_pages"])
@pytest.mark.filterwarnings("ignore::unimem.PlacementWarning")
@pytest.mark.locks
def test_granted_as_the_kernel_says(request: pytest.FixtureRequest, pool: str, pages: Any) -> None:
    request.getfixturevalue(pool)
    sharings = (False, True, f"unimem-test-pages-{os.getpid()}")
    locks, warmings = (False, True, "onfault"), (False, True, 2)
    for i, j, k in itertools.product(range(3), repeat=3):
        # Every two of the three meet; the fast tier leaves out that all three do.
        if not tiers.everything and (i + j + k) % 3:
            continue
        lock, shared, warm = locks[i], sharings[j], warmings[k]
        options = {"pages": pages, "lock": lock, "shared": shared, "warm": warm}
        check_granted(options, has_pool=pool == "eight_huge_pages")


# ---- hugetlb ----


@pytest.mark.usefixtures("eight_huge_pages")
def test_auto_takes_the_pool_and_gives_it_back() -> None:
    free = count("free_hugepages")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with um.Block(5 * MIB, warm=True, strict=True) as block:
            assert block.granted.pages == "2m"
            assert block.granted.huge_bytes == block.nbytes == 6 * MIB
            assert block.requested["nbytes"] == 5 * MIB
            assert block.address % PAGE_BYTES == 0
            assert count("free_hugepages") == free - 3
        with um.Block(5 * MIB) as promised, um.Block(2 * MIB * free) as other:
            # Not touched, and yet nobody else's.
            assert promised.granted.pages == "2m"
            assert count("resv_hugepages") == 3
            assert other.granted.pages != "2m"
    assert (count("free_hugepages"), count("resv_hugepages")) == (free, 0)


@pytest.mark.usefixtures("no_huge_pages")
@pytest.mark.parametrize("warm", [False, True])
def test_without_a_pool(warm: bool) -> None:
    wanted = count("nr_hugepages") + 4
    with pytest.raises(um.PlacementError) as caught:
        um.Block(7 * MIB, pages="2m", strict=True, warm=warm, name="weights")
    for part in (
        "Block 'weights' of 7.0 MiB",
        "needs 4 hugetlb pages of 2.0 MiB",
        f"the pool has {count('nr_hugepages')} in all, 0 free",
        f"echo {wanted} > /proc/sys/vm/nr_hugepages",
    ):
        assert part in str(caught.value)
    with pytest.warns(um.PlacementWarning, match=f"echo {wanted} > /proc/") as warned:
        block = um.Block(7 * MIB, pages="2m", warm=warm)
    with block:
        assert [warning.filename for warning in warned] == [__file__]  # once
        assert f"granted {block.granted.pages}" in str(warned[0].message)
        # Before the first touch it is what will be given.
        assert warm or block.granted.pages == ("thp" if HUGE else "4k")
        assert block.requested["pages"] == "2m"
        proc_maps.assert_granted(block)
    with pytest.warns(um.PlacementWarning, match="granted 4k"):
        small = um.Block(4096, pages="2m", warm=warm)
    with small:
        assert (small.granted.pages, small.nbytes) == ("4k", 4096)


def test_a_pool_that_is_used_up() -> None:
    with reserved(2), um.Block(4 * MIB, pages="2m", strict=True) as block:
        with pytest.raises(um.PlacementError, match="2 of these promised"):
            um.Block(2 * MIB, pages="2m", strict=True)
        block.warm()
        with pytest.raises(um.PlacementError, match="0 free"):
            um.Block(2 * MIB, pages="2m", strict=True)


def test_a_pool_that_shrinks_leaves_what_was_given() -> None:
    with reserved(4), um.Block(4 * MIB, pages="2m", strict=True, warm=True) as block:
        block.as_array()[:] = 7
        some = um.Block(2 * MIB, pages="2m", strict=True)  # promised, and not touched yet
        with some:
            before = count("nr_hugepages")
            POOL.joinpath("nr_hugepages").write_text("0")
            try:
                with pytest.raises(um.PlacementError, match="nr_hugepages"):
                    um.Block(2 * MIB, pages="2m", strict=True)
                some.warm()
                assert block.verify().pages == some.verify().pages == "2m"
                assert (block.as_array() == 7).all()
                proc_maps.assert_granted(block)
            finally:
                POOL.joinpath("nr_hugepages").write_text(str(before))


MAKERS: dict[str, Callable[..., Any]] = {
    "tape": lambda **o: um.Tape(4096, pages="2m", **o),
    "grid": lambda **o: um.Grid(64, 4, pages="2m", **o),
    "cache": lambda **o: um.KVCache(1, 1, 8, 4, pages="2m", **o),
    "layout": lambda **o: um.Layout(4096, 4096, 4096, pages="2m", **o),
}


@pytest.mark.usefixtures("no_huge_pages")
@pytest.mark.parametrize("kind", MAKERS)
def test_every_class_warns_its_caller_or_is_strict(kind: str) -> None:
    make = MAKERS[kind]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make().close()
    assert [w.filename for w in caught] == [__file__] * (3 if kind == "layout" else 1)
    assert {w.lineno for w in caught} == {make.__code__.co_firstlineno}
    with pytest.raises(um.PlacementError, match="nr_hugepages"):
        make(strict=True)


# ---- where warnings point ----


def test_a_warning_that_is_an_error_leaves_nothing(run_python: Run) -> None:
    done = run_python(f"""{CHECKS}
um.Block(4096, shared=True).close()  # what the first one opens stays open
warnings.simplefilter("error")
for shared in (False, True, f"unimem-test-{{os.getpid()}}"):
    make = lambda: um.Block(4096, numa="bind:1023", shared=shared)
    refused(um.PlacementWarning, make, "node 1023")
""")
    assert done.returncode == 0, done.stderr


# ---- transparent huge pages ----


@needs_thp
@pytest.mark.usefixtures("no_huge_pages")
def test_collapse_fills_huge_pages() -> None:
    with um.Block(4 * HUGE, shared=True, name="shm") as block:
        block.as_array()[::4096] = 9
        granted = block.collapse()
        if granted.huge_bytes < block.nbytes:
            pytest.skip("this machine has too few free huge pages just now")
        proc_maps.assert_granted(block)
        assert granted.pages == "thp"
        assert (block.as_array()[::4096] == 9).all()


def test_collapse_of_4k_pages_is_refused() -> None:
    with um.Block(8 * MIB, pages="4k", warm=True, name="small") as block:
        with pytest.raises(um.PlacementError, match="collapsing block 'small': pages='4k'"):
            block.collapse()
        assert block.verify().huge_bytes == 0


@needs_thp
def test_shared_thp_comes_with_warming() -> None:
    with um.Block(2 * HUGE, pages="thp", shared=True, warm=True) as block:
        if block.granted.huge_bytes < block.nbytes:
            pytest.skip("this machine has too few free huge pages just now")
        proc_maps.assert_granted(block)
    path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if "[never]" not in path.read_text():
        pytest.skip(f"{path} is not never")
    with pytest.raises(um.PlacementError, match="gets when it is warmed"):
        um.Block(2 * HUGE, pages="thp", shared=True, strict=True)


# ---- advice ----


def test_advice() -> None:
    with um.Block(4 * MIB, warm=True) as block:
        block.as_array()[:] = 5
        for advice in ("willneed", "sequential", "random", "nohugepage"):
            block.advise(advice)
        if HUGE:
            block.advise("hugepage")
        with pytest.raises(ValueError, match="lose what was written"):
            block.advise("dontneed")
        with pytest.raises(ValueError, match="expected one of willneed"):
            block.advise("later")  # type: ignore[arg-type]
        assert (block.as_array() == 5).all()


# ---- warming ----


def test_progress_goes_up_to_all_of_it() -> None:
    seen: list[tuple[int, int]] = []
    with um.Block(300 * MIB, pages="thp" if HUGE else "4k") as block:
        block.warm(2, progress=lambda done, total: seen.append((done, total)))
        assert seen == [(256 * MIB, block.nbytes), (300 * MIB, block.nbytes)]
        assert block.granted.resident_bytes == block.nbytes


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_what_progress_raises_stops_the_warming(error: type[BaseException]) -> None:
    def stop(done: int, total: int) -> None:
        raise error

    with um.Block(300 * MIB, pages="4k") as block:
        with pytest.raises(error):
            block.warm(progress=stop)
        assert block.verify().resident_bytes == 256 * MIB
        block.as_array()[-1] = 1


def test_a_signal_stops_the_warming() -> None:
    # No `OSError`, as `TimeoutError` is: code that reads what may be absent would swallow it.
    class Stopped(Exception):  # noqa: N818
        pass

    def handle(number: int, frame: object) -> None:
        raise Stopped

    # By C, so that no code of Python runs between the signal and the next part.
    kill = partial(ctypes.CDLL(None)["raise"], signal.SIGUSR1)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with um.Block(300 * MIB, pages="4k") as block:
            with pytest.raises(Stopped):
                block.warm(progress=kill)
            assert block.verify().resident_bytes == 256 * MIB
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_too_much_is_refused_by_name() -> None:
    with pytest.raises(um.CapacityError, match=r"block 'vast' of .* does not fit: .* has room for"):
        um.Block(2**45, name="vast")
