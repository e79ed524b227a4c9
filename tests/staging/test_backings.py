"""Places: how each kind is sealed, and how stale folders go."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from conftest import Run
from support.kernel import taken_names
from support.processes.staged_models import read_elsewhere
from unimem.base.descriptors import Descriptors
from unimem.kv.store import ram_tier
from unimem.staging import backings

PREFIXES = {
    backings: backings._PREFIX,
    ram_tier: f"{ram_tier._PREFIX}{os.geteuid()}-",
}
pytestmark = pytest.mark.usefixtures("gives_memory_back", "leaves_nothing")


def test_a_memfd_is_sealed(model: Path) -> None:
    with um.stage(model, backing="memfd") as staged:
        with open(staged.path, "rb") as file:
            seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
        all_seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        assert seals & all_seals == all_seals
        with pytest.raises(PermissionError):
            os.pwrite(staged.fd, b"x", 0)


@pytest.mark.usefixtures("needs_mount")
def test_a_sealed_tmpfs_is_read_only_for_root(model: Path) -> None:
    with um.stage(model, backing="tmpfs") as staged:
        for attempt in (
            lambda: os.open(staged.path, os.O_RDWR),
            lambda: os.unlink(staged.path),
            lambda: os.truncate(staged.path, 0),
            lambda: os.chmod(staged.path, 0o666),
            lambda: os.mkdir(os.path.join(os.path.dirname(staged.path), "more")),
        ):
            with pytest.raises(OSError, match="Read-only") as caught:
                attempt()
            assert caught.value.errno == errno.EROFS


@pytest.mark.usefixtures("needs_mount")
def test_clearing_an_attribute_of_the_mount_undoes_nothing(model: Path) -> None:
    attributes = (ctypes.c_uint64 * 4)(0, 1)  # to be cleared: MOUNT_ATTR_RDONLY
    with um.stage(model, backing="tmpfs") as staged:
        libc = ctypes.CDLL(None, use_errno=True)
        at_empty_path, number = 0x1000, 442
        if libc.syscall(number, staged.fd, b"", at_empty_path, attributes, 32):
            pytest.skip(f"mount_setattr: {os.strerror(ctypes.get_errno())}")
        with pytest.raises(OSError, match="Read-only"):
            os.open(staged.path, os.O_RDWR)


def test_a_stale_folder_goes_with_its_contents(own_shm: Path) -> None:
    folder = own_shm / "unimem-stage-test"
    (folder / "a" / "deeper").mkdir(parents=True)
    (folder / "a" / "file").touch()
    (folder / "z").touch()
    (own_shm / "of somebody else").touch()
    backings.sweep()
    assert os.listdir(own_shm) == ["of somebody else"]


def test_a_kept_folder_is_not_stale(model: Path, run_python: Run) -> None:
    with um.stage(model, backing="shm") as staged:
        swept = run_python("from unimem.staging.backings import sweep; sweep()")
        assert swept.returncode == 0, swept.stderr
        backings.sweep()
        assert read_elsewhere(staged.path) == model.read_bytes()


@pytest.mark.parametrize("kind", sorted(taken_names.KINDS))
@pytest.mark.parametrize("module", [backings, ram_tier])
def test_what_others_put_under_a_name_is_left_alone(module: Any, kind: str, own_shm: Path) -> None:
    path = own_shm / f"{PREFIXES[module]}0"
    taken_names.take(path, kind)
    if module is backings:
        assert backings.sweep() == [f"{path} ({taken_names.KINDS[kind]})"]
    else:
        ram_tier.sweep(str(own_shm))
    assert os.path.lexists(path)


@pytest.mark.parametrize("module", [backings, ram_tier])
def test_a_very_deep_folder_goes_without_recursion(
    module: Any, own_shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,500 levels are more than Python's recursion, a path and the descriptors allow."""
    path = own_shm / f"{PREFIXES[module]}0"
    path.mkdir(mode=0o700)
    with Descriptors() as fds:
        fd = fds.add(os.open, path, os.O_RDONLY | os.O_DIRECTORY)
        for _ in range(1500):
            os.mkdir("d", dir_fd=fd)
            fd = fds.add(partial(os.open, dir_fd=fd), "d", os.O_RDONLY)
            os.close(fds.pop(0))
    backings.sweep() if module is backings else ram_tier.sweep(str(own_shm))
    assert list(own_shm.iterdir()) == []
