"""Locked blocks, the limit on locked memory, and what is left when the system refuses."""

from __future__ import annotations

import os
from typing import Any

import pytest

import proc_maps
import unimem as um
from conftest import Run
from memlock import DROP_LOCK

pytestmark = pytest.mark.usefixtures("gives_memory_back")

MIB = 1 << 20
PAGE = proc_maps.PAGE


@pytest.mark.parametrize("pages", ["4k", "thp"])
def test_lock_now_brings_all_of_it_in(pages: Any) -> None:
    if pages == "thp" and proc_maps.huge_page_bytes() == 0:
        pytest.skip("this kernel gives no transparent huge pages")
    with um.Block(4 * MIB, pages=pages, lock=True, strict=True) as block:
        assert block.granted.locked_bytes == block.granted.resident_bytes == block.nbytes
        proc_maps.assert_granted(block)
        assert "4.0 MiB locked" in repr(block)


def test_lock_on_fault_locks_what_is_touched() -> None:
    with um.Block(64 * PAGE, pages="4k", lock="onfault", strict=True) as block:
        assert (block.granted.locked_bytes, block.granted.resident_bytes) == (0, 0)
        block.as_array()[: 5 * PAGE] = 1
        granted = block.verify()
        assert granted.locked_bytes == granted.resident_bytes == 5 * PAGE
        (part,) = proc_maps.mappings(block.address, block.nbytes)
        assert {"lo", "lf"} & part.flags
        proc_maps.assert_granted(block)


def test_locked_blocks_grow_locked() -> None:
    with um.Block(PAGE, pages="4k", lock=True, reserve=8 * PAGE) as block:
        block.commit(5 * PAGE)
        assert block.verify().locked_bytes == 5 * PAGE
        block.release(PAGE)
        assert block.verify().locked_bytes == PAGE
        proc_maps.assert_granted(block)


@pytest.mark.parametrize("lock", [None, 2, "now", "", b"onfault"])
def test_unknown_locks(lock: Any) -> None:
    with pytest.raises(ValueError, match="expected False, True or 'onfault'"):
        um.Block(PAGE, lock=lock)


def test_the_memlock_limit_is_named_before_anything_is_taken(run_python: Run) -> None:
    done = run_python(
        DROP_LOCK
        + """
limit_memlock(64 << 10)
before = state()
for lock in (True, "onfault"):
    for options in ({}, {"shared": True}, {"warm": True}):
        try:
            um.Block(1 << 20, lock=lock, strict=True, name="kv", **options)
        except um.PlacementError as error:
            for part in ("'kv'", "memlock", "64.0 KiB", "ulimit -l"):
                assert part in str(error), error
        else:
            raise AssertionError("no PlacementError")
        assert state() == before
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            block = um.Block(1 << 20, lock=lock, **options)
        (warning,) = caught
        assert warning.category is um.PlacementWarning and "memlock" in str(warning.message)
        assert block.granted.locked_bytes == 0
        assert block.requested["lock"] == lock
        block.close()
with um.Block(4096, pages="4k", lock=True, reserve=1 << 20, strict=True) as block:
    assert block.granted.locked_bytes == 4096
    try:
        block.commit(1 << 20)
    except um.PlacementError as error:
        assert "memlock" in str(error)
    else:
        raise AssertionError("no PlacementError")
    assert block.nbytes == 4096
assert state() == before
        """
    )
    assert done.returncode == 0, done.stderr


def test_what_the_kernel_refuses_in_spite_of_the_limit(run_python: Run) -> None:
    # The limit seems to be none: the kernel's own answer decides then.
    done = run_python(
        DROP_LOCK
        + """
limit_memlock(64 << 10)
limits.memlock = lambda: None
before = state()
try:
    um.Block(1 << 20, pages="4k", lock=True, strict=True)
except um.PlacementError as error:
    assert "mlock2" in str(error) and "ulimit -l" in str(error), error
else:
    raise AssertionError("no PlacementError")
assert state() == before
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    block = um.Block(1 << 20, pages="4k", lock=True)
(warning,) = caught
assert "mlock2" in str(warning.message)
assert block.granted.locked_bytes == 0
block.close()
with um.Block(4096, pages="4k", lock=True, reserve=1 << 20) as block:
    try:
        block.commit(1 << 20)
    except (MemoryError, um.PlacementError) as error:
        assert "growth of block" in str(error)
    else:
        raise AssertionError("no error")
    assert (block.nbytes, block.committed_bytes) == (4096, 4096)
    assert block.verify().locked_bytes == 4096
assert state() == before
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer needs address space"
)
def test_a_limit_of_descriptors_gives_an_os_error(run_python: Run) -> None:
    done = run_python(
        """
        import os, resource
        import unimem as um
        from unimem._core.status import ledger

        def state():
            return len(os.listdir("/proc/self/fd")), ledger()["other"]["mapped_bytes"]

        path = "unimem-test-limits-%d" % os.getpid()
        um.Block(4096, shared=True).close()
        before = state()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        block = um.Block(4096, shared=True)
        free = os.dup(0)
        os.close(free)
        # No descriptor is free, or one, or two: whichever the call needs, one is the last.
        for n_free in range(3):
            failed = 0
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + n_free, hard))
            for use in (
                lambda: um.Block(4096, shared=True),
                lambda: um.Block(4096, shared=path),
                lambda: um.Block.attach(block.fileno()),
                lambda: um.Block.attach("/proc/self/fd/%d" % block.fileno()),
                lambda: block.sealed_copy(),
                lambda: um.Block.map("/bin/sh"),
            ):
                try:
                    use().close()
                except OSError as error:
                    assert error.errno == 24, error
                    failed += 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert n_free > 1 or failed > 0, n_free
            assert not os.path.exists("/dev/shm/" + path)
        block.close()
        assert state() == before, (state(), before)
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_limit_of_addresses_gives_a_memory_error(run_python: Run) -> None:
    done = run_python(
        """
        import os, resource
        import unimem as um
        from unimem._core.status import ledger

        def state():
            return len(os.listdir("/proc/self/fd")), ledger()["other"]["mapped_bytes"]

        path = "unimem-test-limits-%d" % os.getpid()
        um.Block(4096, shared=True).close()
        block = um.Block(4096, reserve=8 << 20)
        before = state()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        vsz = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (vsz + (8 << 20), hard))
        for use in (
            lambda: um.Block(64 << 20),
            lambda: um.Block(64 << 20, shared=True),
            lambda: um.Block(64 << 20, shared=path),
            lambda: um.Block(4096, reserve=64 << 20),
            lambda: um.Tape(64 << 20),
        ):
            try:
                use()
            except MemoryError as error:
                pass
            else:
                raise AssertionError("no MemoryError")
            assert not os.path.exists("/dev/shm/" + path)
            assert state() == before, (state(), before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        block.close()
        """
    )
    assert done.returncode == 0, done.stderr
