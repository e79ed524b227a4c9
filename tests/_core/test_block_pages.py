"""Pages of blocks: what is asked for, what is granted, and what the kernel's own books say."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

import proc_maps
import unimem as um
from conftest import Run
from huge_pages import PAGE_BYTES, count, eight_huge_pages, no_huge_pages, reserved

__all__ = ["eight_huge_pages", "no_huge_pages"]

pytestmark = pytest.mark.usefixtures("gives_memory_back")

MIB = 1 << 20
HUGE = proc_maps.huge_page_bytes()

needs_thp = pytest.mark.skipif(HUGE == 0, reason="this kernel gives no transparent huge pages")


# ---- every combination, against smaps and numa_maps ----


@pytest.mark.parametrize("warm", [False, True, 2])
@pytest.mark.parametrize("shared", [False, True, "unimem-test-pages"])
@pytest.mark.parametrize("lock", [False, True, "onfault"])
@pytest.mark.parametrize("pages", ["auto", "4k", "thp", "2m"])
@pytest.mark.filterwarnings("ignore::unimem.PlacementWarning")
@pytest.mark.usefixtures("eight_huge_pages")
def test_granted_is_what_the_kernel_says(pages: Any, lock: Any, shared: Any, warm: Any) -> None:
    with um.Block(3 * MIB, pages=pages, lock=lock, shared=shared, warm=warm) as block:
        named = isinstance(shared, str)
        assert block.requested["pages"] == pages
        assert block.requested["lock"] == lock
        proc_maps.assert_granted(block)
        whole = block.nbytes
        assert block.granted.resident_bytes == (whole if warm or lock is True else 0)
        if lock:
            assert block.granted.locked_bytes == block.granted.resident_bytes
        if pages in ("auto", "2m") and not named:
            assert (block.granted.pages, block.granted.page_bytes) == ("2m", PAGE_BYTES)
            assert whole == 2 * PAGE_BYTES
        if pages == "4k":
            assert block.granted.pages == "4k"
            assert whole == 3 * MIB
        block.as_array()[: whole // 2] = 7
        proc_maps.assert_granted(block, block.verify())
        if lock:
            assert block.granted.locked_bytes == block.granted.resident_bytes
        assert (block.as_array()[: whole // 2] == 7).all()


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
def test_no_pool_strict() -> None:
    with pytest.raises(um.PlacementError) as caught:
        um.Block(7 * MIB, pages="2m", strict=True, name="weights")
    text = str(caught.value)
    for part in (
        "Block 'weights' of 7.0 MiB",
        "needs 4 hugetlb pages of 2.0 MiB",
        f"the pool has {count('nr_hugepages')} in all, 0 free",
        f"echo {count('nr_hugepages') + 4} > /proc/sys/vm/nr_hugepages",
    ):
        assert part in text, text


@needs_thp
@pytest.mark.usefixtures("no_huge_pages")
@pytest.mark.parametrize("warm", [False, True])
def test_no_pool_falls_back_and_warns_once(warm: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with um.Block(7 * MIB, pages="2m", warm=warm) as block:
            assert block.granted.pages == "thp"
            assert block.requested["pages"] == "2m"
            proc_maps.assert_granted(block)
    (warning,) = caught
    assert warning.category is um.PlacementWarning
    assert warning.filename == __file__
    assert f"echo {count('nr_hugepages') + 4} > /proc/" in str(warning.message)
    assert "granted thp" in str(warning.message)


@pytest.mark.usefixtures("no_huge_pages")
def test_below_a_huge_page_the_fallback_is_4k() -> None:
    with pytest.warns(um.PlacementWarning, match="granted 4k"):
        block = um.Block(4096, pages="2m")
    with block:
        assert block.granted.pages == "4k"
        assert block.nbytes == 4096


def test_a_pool_that_is_used_up() -> None:
    with reserved(2), um.Block(4 * MIB, pages="2m", strict=True) as block:
        with pytest.raises(um.PlacementError, match="2 of these promised"):
            um.Block(2 * MIB, pages="2m", strict=True)
        block.warm()
        with pytest.raises(um.PlacementError, match="0 free"):
            um.Block(2 * MIB, pages="2m", strict=True)


# ---- where warnings point ----


@pytest.mark.usefixtures("no_huge_pages")
@pytest.mark.parametrize(
    ("make", "n_warnings"),
    [
        (lambda: um.Tape(4096, pages="2m"), 1),
        (lambda: um.Grid(64, 4, pages="2m"), 1),
        (lambda: um.KVCache(1, 1, 8, 4, pages="2m"), 1),
        (lambda: um.Layout(4096, 4096, 4096, pages="2m"), 3),
    ],
)
def test_warnings_point_at_the_caller(make: Any, n_warnings: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make().close()
    assert [w.filename for w in caught] == [__file__] * n_warnings
    assert {w.lineno for w in caught} == {make.__code__.co_firstlineno}


@pytest.mark.usefixtures("no_huge_pages")
def test_strict_reaches_every_class_and_leaves_nothing() -> None:
    makers: tuple[Callable[..., Any], ...] = (
        um.Tape,
        lambda n, **o: um.Layout(n, n, n, **o),
        lambda n, **o: um.Grid(n, 2, **o),
    )
    for make in makers:
        with pytest.raises(um.PlacementError, match="nr_hugepages"):
            make(4096, pages="2m", strict=True)


def test_a_warning_that_is_an_error_leaves_nothing(run_python: Run) -> None:
    done = run_python(
        """
        import os, warnings
        import unimem as um
        from unimem._core.status import ledger
        before = len(os.listdir("/proc/self/fd"))
        warnings.simplefilter("error")
        for shared in (False, True, f"unimem-test-{os.getpid()}"):
            try:
                um.Block(4096, numa="bind:1023", shared=shared)
            except um.PlacementWarning as warning:
                assert "node 1023" in str(warning)
            else:
                raise AssertionError("no warning")
            assert ledger()["other"]["mapped_bytes"] == 0
            assert len(os.listdir("/proc/self/fd")) == before
            assert not os.path.exists(f"/dev/shm/{shared}")
        """
    )
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
    path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    with open(path) as file:
        if "[never]" not in file.read():
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
    with um.Block(600 * MIB, pages="thp" if HUGE else "4k") as block:
        block.warm(2, progress=lambda done, total: seen.append((done, total)))
        assert [total for _, total in seen] == [block.nbytes] * 3
        assert [done // MIB for done, _ in seen] == [256, 512, 600]
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
    import signal

    # No `OSError`, as `TimeoutError` is: code that reads what may be absent would swallow it.
    class Stopped(Exception):
        pass

    def handle(number: int, frame: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with um.Block(1200 * MIB) as block:
            with pytest.raises(Stopped):
                # It arrives while the first part is being warmed, or before.
                signal.setitimer(signal.ITIMER_REAL, 0.005)
                block.warm()
            assert block.verify().resident_bytes < block.nbytes
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_too_much_is_refused_by_name() -> None:
    with pytest.raises(um.CapacityError, match=r"block 'vast' of .* does not fit: .* has room for"):
        um.Block(2**45, name="vast")
