"""Limits in a real cgroup of 512 MB: what would be killed in it is refused by name, and lives."""

from __future__ import annotations

import json

import pytest

from cgroups import LIMIT_BYTES, SmallCgroup, cgroup_512mb
from unimem.errors import CapacityError
from unimem.system import limits

__all__ = ["cgroup_512mb"]

_SCRIPT = """
import json
from unimem.system import limits
from unimem.errors import CapacityError
found = [[limit.name, limit.limit_bytes, limit.used_bytes] for limit in limits.memory_limits()]
limits.require(300 << 20, "block 'kv'")
try:
    limits.require(600 << 20, "block 'kv'")
except CapacityError as error:
    refused = [str(error), error.limit, error.used, error.asked]
print(json.dumps([found, refused]))
"""


def test_what_passes_the_cgroup_is_refused_by_name(cgroup_512mb: SmallCgroup) -> None:
    found, (text, limit, used, asked) = json.loads(cgroup_512mb.run(_SCRIPT))
    by_name = {name: (limit, used) for name, limit, used in found}
    assert by_name[cgroup_512mb.name][0] == LIMIT_BYTES
    # The interpreter is counted, and is small.
    assert 0 < by_name[cgroup_512mb.name][1] < LIMIT_BYTES // 2
    assert (limit, asked) == (LIMIT_BYTES, 600 << 20)
    assert 0 < used < LIMIT_BYTES // 2
    assert text.startswith(f"block 'kv' of 600.0 MiB does not fit: {cgroup_512mb.name} has room ")
    assert "(limit 512.0 MiB, " in text
    assert str(cgroup_512mb.folder) in text


def test_a_script_that_fails_in_the_cgroup_is_seen(cgroup_512mb: SmallCgroup) -> None:
    with pytest.raises(AssertionError, match="status 3"):
        cgroup_512mb.run("raise SystemExit(3)")


def test_what_is_read_of_a_file_is_room(cgroup_512mb: SmallCgroup) -> None:
    script = """
import os, tempfile
from unimem.system import limits
with tempfile.TemporaryFile(dir="/var/tmp") as file:
    for _ in range(100):
        file.write(bytes(1 << 20))
    file.flush()
    os.fsync(file.fileno())
    limits.require(400 << 20, "block 'kv'")
"""
    cgroup_512mb.run(script)


def test_shm_that_is_too_small_is_named() -> None:
    limits.require_shm(1, "block 'kv'")
    with pytest.raises(CapacityError, match=r"block 'kv' of .*/dev/shm has room for .*remount"):
        limits.require_shm(2**60, "block 'kv'")
