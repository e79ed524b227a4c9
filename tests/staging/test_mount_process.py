"""The child that mounts, where this process may not."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.processes.staged_models import read_elsewhere
from unimem.errors import PlacementError

pytestmark = pytest.mark.usefixtures("gives_memory_back", "leaves_nothing")


@pytest.mark.usefixtures("needs_mount")
def test_without_the_right_to_mount_a_namespace_of_its_own_serves(
    model: Path, process: Any
) -> None:
    """Root without CAP_SYS_ADMIN, which a container has."""
    if os.geteuid() or shutil.which("setpriv") is None:
        pytest.skip("taking rights away needs root and setpriv")
    script = f"""
import os, unimem as um
from unimem._core import tmpfs
try:
    tmpfs.open_mount(4096, False)
except um.PlacementError as error:
    print(error.errno)
with um.stage({str(model)!r}) as staged:
    print(staged.backing, staged.reason)
    print(open(staged.path, "rb").read() == open({str(model)!r}, "rb").read())
    try:
        os.open(staged.path, os.O_RDWR)
    except OSError as error:
        print(error.strerror, flush=True)
"""
    with process(script, "setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin") as line:
        assert int(line()) == errno.EPERM
        backing, *sealed = line(), line(), line()
    if not backing.startswith("tmpfs"):
        pytest.skip(f"user namespaces are refused here: {backing}")
    assert sealed == ["True", "Read-only file system"]


@pytest.mark.usefixtures("no_huge_pages", "no_mount")
def test_where_nothing_is_mounted_the_next_kind_is_taken(model: Path, split: list[Path]) -> None:
    with um.stage(model) as staged:
        assert staged.backing == "memfd"
        assert "not tmpfs: mounting a tmpfs in a user namespace: unshare: No space" in staged.reason
        assert "not hugetlb: pages='2m' needs 4" in staged.reason
        assert read_elsewhere(staged.path) == model.read_bytes()
    with um.stage(split[0]) as staged:
        assert staged.backing == "shm"
        assert "not memfd: several files" in staged.reason
    with pytest.raises(PlacementError, match="user namespace"):
        um.stage(model, backing="tmpfs")


def test_a_dead_child_is_an_error(
    monkeypatch: pytest.MonkeyPatch, model: Path, no_mount: Path
) -> None:
    no_mount.write_text("raise SystemExit(1)")
    with pytest.raises(PlacementError, match="child"):
        um.stage(model, backing="tmpfs")
    monkeypatch.setattr(sys, "executable", str(no_mount.with_name("no-python")))
    with pytest.raises(PlacementError, match="no-python"):
        um.stage(model, backing="tmpfs")
