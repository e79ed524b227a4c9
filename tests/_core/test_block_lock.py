"""Locked blocks, the limit on locked memory, and what is left when the system refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import unimem as um
from conftest import Run
from support.kernel import proc_maps
from support.kernel.memlock import DROP_LOCK
from support.processes.child_checks import CHECKS
from support.processes.forks import SANITIZED

pytestmark = pytest.mark.usefixtures("gives_memory_back")

MIB = 1 << 20
PAGE = proc_maps.PAGE
LIMITED = DROP_LOCK + CHECKS + "limit_memlock(64 << 10)\n"


@pytest.mark.parametrize("pages", ["4k", "thp"])
@pytest.mark.locks
def test_lock_now_brings_all_of_it_in(pages: Any) -> None:
    if pages == "thp" and proc_maps.huge_page_bytes() == 0:
        pytest.skip("this kernel gives no transparent huge pages")
    with um.Block(4 * MIB, pages=pages, lock=True, strict=True) as block:
        assert block.granted.locked_bytes == block.granted.resident_bytes == block.nbytes
        proc_maps.assert_granted(block)
        assert "4.0 MiB locked" in repr(block)


@pytest.mark.locks
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
        LIMITED
        + """
before = state()
named = ("memlock", "64.0 KiB", "ulimit -l")
for lock in (True, "onfault"):
    for options in ({}, {"shared": True}, {"warm": True}):
        def make(**more):
            return um.Block(MIB, lock=lock, name="kv", **options, **more)
        refused(um.PlacementError, lambda: make(strict=True), "'kv'", *named)
        with warned(make, "memlock") as block:
            assert (block.granted.locked_bytes, block.requested["lock"]) == (0, lock)
with um.Block(4096, pages="4k", lock=True, reserve=MIB, strict=True) as block:
    assert block.granted.locked_bytes == 4096
    refused(um.PlacementError, lambda: block.commit(MIB), "memlock")
    assert block.nbytes == 4096
assert state() == before

# The limit seems to be none: the kernel's own answer decides then.
limits.memlock = lambda: None
def make(**more):
    return um.Block(MIB, pages="4k", lock=True, **more)
refused(um.PlacementError, lambda: make(strict=True), "mlock2", "ulimit -l")
with warned(make, "mlock2") as block:
    assert block.granted.locked_bytes == 0
with um.Block(4096, pages="4k", lock=True, reserve=MIB) as block:
    refused((MemoryError, um.PlacementError), lambda: block.commit(MIB), "growth of block")
    assert (block.nbytes, block.committed_bytes) == (4096, 4096)
    assert block.verify().locked_bytes == 4096
assert state() == before
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(SANITIZED, reason="AddressSanitizer needs address space")
def test_limits_of_descriptors_and_of_addresses(run_python: Run) -> None:
    done = run_python(
        CHECKS
        + """
import resource

path = f"unimem-test-limits-{os.getpid()}"
um.Block(4096, shared=True).close()  # what the first one opens stays open
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

block = um.Block(4096, reserve=8 * MIB)
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
vsz = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (vsz + 8 * MIB, hard))
refused(MemoryError, lambda: um.Block(64 * MIB))
refused(MemoryError, lambda: um.Block(64 * MIB, shared=True))
refused(MemoryError, lambda: um.Block(64 * MIB, shared=path))
refused(MemoryError, lambda: um.Block(4096, reserve=64 * MIB))
refused(MemoryError, lambda: um.Tape(64 * MIB), "RLIMIT_AS", "ulimit -v unlimited")
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
block.close()
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(SANITIZED, reason="AddressSanitizer needs mappings")
def test_a_process_that_has_all_mappings_it_may_have(run_python: Run, tmp_path: Path) -> None:
    most = int(Path("/proc/sys/vm/max_map_count").read_text())
    if most > 1 << 20:
        pytest.skip(f"using up {most} mappings takes too long: vm.max_map_count")
    done = run_python(
        CHECKS
        + f"""
import mmap
import numpy as np

path, rows = {str(tmp_path / "session")!r}, np.ones((300, 2, 32), np.float32)
# A fork copies every other page only, so that each is a mapping of its own.
PAGE, N = 4096, {most} + 2
with (
    um.KVCache(1, 2, 32, 4096, pages="4k", grow=True) as kv,
    um.Block(PAGE, pages="4k", reserve=MIB) as block,
):
    kv.append(0, rows[:8], rows[:8])
    kv.save(path)
    with open(path, "rb") as file:
        saved = file.read()
    with mmap.mmap(-1, N * PAGE) as filler:
        left = 0
        while left < N:
            try:
                filler.madvise(mmap.MADV_DONTFORK, left * PAGE, PAGE)
            except OSError as error:
                assert error.errno in (11, 12), error
                break
            left += 2
        assert left < N
        limit = f"may have {{N - 2}} (vm.max_map_count): sysctl vm.max_map_count="
        refused(MemoryError, lambda: um.Block(MIB), limit)
        refused(MemoryError, lambda: um.Block(MIB, shared=True), limit)
        refused(MemoryError, lambda: um.Tape(MIB), limit)
        refused(MemoryError, lambda: kv.save(path))
        with open(path, "rb") as file:
            assert file.read() == saved
        assert kv.seq_len == 8
    kv.append(0, rows, rows)
    assert kv.seq_len == 308
    um.Block(MIB).close()
    block.commit(MIB)
"""
    )
    assert done.returncode == 0, done.stderr
