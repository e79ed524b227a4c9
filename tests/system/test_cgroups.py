"""Cgroups: limits in their files, and limits above a process."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from support.kernel.cgroup_tree import Write, names
from unimem.system import limits
from unimem.system.cgroups import Cgroup, cgroups_above, sees_all_above


def test_a_container_sees_part_of_the_tree(tree: Write) -> None:
    tree("proc/self/mountinfo", r"30 20 0:25 /docker/x /c\040g ro - cgroup2 cgroup2 rw")
    for folder, room in (("c g/s", 4000), ("c g", 3000)):
        tree(f"{folder}/memory.max", room)
        tree(f"{folder}/memory.current", 0)
    tree("self", "0::/docker/x/s")
    assert names() == ["cgroup /docker/x/s", "cgroup /docker/x"]
    for hidden in ("/elsewhere/y", "/../../y"):
        tree("self", f"0::{hidden}")
        assert names() == ["cgroup /"]
        assert limits.available_bytes() == 3000


@pytest.mark.parametrize(("mounts", "kind", "sees"), [
    ("30 20 0:25 / /cg rw - cgroup2 cgroup2 rw", None, True),
    ("30 20 0:25 / /cg rw - cgroup2 cgroup2 rw", "domain", False),
    ("30 20 0:25 /docker/x /cg rw - cgroup2 cgroup2 rw", None, False),
    ("30 20 0:25 /.. /cg rw - cgroup2 cgroup2 rw", None, False),
    ("33 20 0:28 / /cg rw - cgroup cgroup rw,hugetlb", "domain", True),
    ("33 20 0:28 /docker/x /cg rw - cgroup cgroup rw,hugetlb", None, False),
    ("", None, False),
])  # fmt: skip
def test_a_container_knows_that_limits_are_hidden(
    tree: Write, mounts: str, kind: str | None, sees: bool
) -> None:
    tree("proc/self/mountinfo", mounts)
    if kind is not None:
        tree("cgroup/cgroup.type", kind)
    assert sees_all_above("hugetlb") == sees


def test_the_lowest_limit_in_the_version_s_files(tmp_path: Path) -> None:
    old, new = Cgroup(str(tmp_path), "/a", 1), Cgroup(str(tmp_path), "/a", 2)
    assert new.read_limit("old", "max", "high") is None
    for name, text in (("old", "7"), ("max", "5\n"), ("high", "3\n")):
        (tmp_path / name).write_text(text)
    assert old.read_limit("old", "max", "high") == (7, f"{tmp_path}/old")
    assert new.read_limit("old", "max", "high") == (3, f"{tmp_path}/high")
    assert new.read_limit("old", "max") == (5, f"{tmp_path}/max")
    assert old.path("old", "max") == f"{tmp_path}/old"
    assert new.path("old", "max") == f"{tmp_path}/max"


@pytest.mark.parametrize("text", ["max", "-1", str(2**63 - 4096), ""])
@pytest.mark.parametrize("version", [1, 2])
def test_values_that_mean_no_limit(tmp_path: Path, text: str, version: int) -> None:
    for name in ("old", "max"):
        (tmp_path / name).write_text(text)
    cgroup = Cgroup(str(tmp_path), "/a", 1 if version == 1 else 2)
    assert cgroup.read_limit("old", "max") is None


@pytest.mark.parametrize("version", [1, 2])
def test_own_cgroups_are_listed_from_the_process_upwards(version: int) -> None:
    found = [cgroup for cgroup in cgroups_above("memory") if cgroup.version == version]
    for below, above in pairwise(found):
        assert Path(above.folder) == Path(below.folder).parent
        assert below.name.startswith(above.name)
    assert not found or Path(found[-1].folder, "cgroup.procs").exists()
