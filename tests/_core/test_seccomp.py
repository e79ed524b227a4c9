"""Filters of system calls, as Docker and systemd have them: all goes on, or says why."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from conftest import Run
from support.kernel.seccomp import FORBID, NO_SECCOMP
from support.processes.child_checks import CHECKS

# What Docker forbids without a capability, and `SystemCallFilter=~@resources @mount @privileged`.
FILTER = """
NUMBERS = {
    "mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239, "move_pages": 279,
    "sched_setaffinity": 203, "mount": 165, "umount2": 166, "unshare": 272, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "io_uring_setup": 425, "perf_event_open": 298, "userfaultfd": 323, "process_vm_readv": 310,
    "process_madvise": 440, "name_to_handle_at": 303,
}
forbid(ERROR, NUMBERS.values())
"""
USE = """
import numpy as np
from pathlib import Path

model = Path(um.__file__).parent / "engine" / "models" / "tiny.gguf"
rows = np.ones((32, 2, 32), np.float32)
with um.Block(MIB, pages="4k", warm=2) as block:
    assert block.verify().resident_bytes == MIB
with warned(lambda: um.Block(MIB, pages="4k", numa="bind:0", warm=True), "CAP_SYS_NICE") as block:
    assert block.granted.resident_bytes == MIB
refused(um.PlacementError, lambda: um.Block(MIB, numa="bind:0", strict=True), "CAP_SYS_NICE")
for backing in (None, "memfd", "shm"):
    with um.stage(model, pages="4k", **({"backing": backing} if backing else {})) as staged:
        assert Path(staged.path).read_bytes() == model.read_bytes()
try:
    um.stage(model, backing="tmpfs")
    raise AssertionError("it was mounted")
except um.PlacementError as error:
    assert "mounting a tmpfs" in str(error)
with um.KVCache(1, 2, 32, 64, pages="4k") as kv, um.KVCache(1, 2, 32, 64, pages="4k") as other:
    kv.append(0, rows, rows)
    kv.save("session")
    with um.KVCache.restore("session") as restored:
        assert (restored.layer(0)[0] == kv.layer(0)[0]).all()
    with um.KVStore("store", ram_bytes=MIB, disk_bytes=MIB, chunk_tokens=16) as store:
        assert store.put(kv, range(32), model="m") == 32
        assert store.restore_into(other, [*range(32), 0], model="m") == 32
assert um.plan(model, ctx=64).total_bytes > 0
assert um.report().rows
assert str(um.doctor())
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of the calls are x86-64's")
@pytest.mark.parametrize("error", ["EPERM", "ENOSYS"])
def test_what_a_container_may_not_do(error: str, run_python: Run, tmp_path: Path) -> None:
    begin = f"os.chdir({str(tmp_path)!r})\nERROR = {error!r}\n"
    done = run_python(CHECKS + FORBID + begin + FILTER + USE)
    assert done.returncode == 0, done.stderr
    if NO_SECCOMP in done.stdout:
        pytest.skip("this kernel has no seccomp filters")
