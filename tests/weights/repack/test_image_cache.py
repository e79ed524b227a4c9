"""The cache of images: whose files it keeps, within which budget, and one writer at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.models.image_models import expected_bytes, only, repacked_bytes, uses_images, write
from support.processes.at_once import at_once
from unimem.weights.repack import repack
from unimem.weights.repack.image_cache import ImageCache

pytestmark = uses_images

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("stranger", ["file", "folder", "owner", "owner of the folder"])
def test_models_of_other_users_are_kept_only_on_request(
    stranger: str, model: Path, cache: ImageCache
) -> None:
    what = model.parent if "folder" in stranger else model
    if stranger.startswith("owner"):
        if os.geteuid():
            pytest.skip("only root can give a file away")
        os.chown(what, 65534, 65534)
    else:
        what.chmod(what.stat().st_mode | 0o002)
    repacked_bytes(model)
    assert cache.images() == []
    _, expected = repacked_bytes(model, cache=True)
    assert repacked_bytes(model, cache=True) == (str(only(cache)), expected)


def test_folders_of_other_users_are_not_used(model: Path, cache: ImageCache) -> None:
    os.chmod(cache.folder, 0o777)
    assert repacked_bytes(model)[0] is None
    assert os.listdir(cache.folder) == []
    for choice in (True, cache.folder):
        with pytest.raises(PermissionError, match="may write"):
            repacked_bytes(model, cache=choice)


def test_links_and_fifos_are_not_read_as_images(
    model: Path, cache: ImageCache, tmp_path: Path
) -> None:
    _, expected = repacked_bytes(model)
    path, elsewhere = only(cache), tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert repacked_bytes(model) == (None, expected)
    assert not path.is_symlink()
    path.unlink()
    os.mkfifo(path)
    assert repacked_bytes(model) == (None, expected)


def test_the_least_recently_used_image_is_removed_first(
    model: Path, cache: ImageCache, monkeypatch: Patch
) -> None:
    models = [write(model.with_name(f"{i}.gguf"), seed=i) for i in range(3)]
    for i, path in enumerate(models[:2]):
        repacked_bytes(path)
        os.utime(cache.images()[0].path, (i + 1, i + 1))
    first = next(image for image in cache.images() if image.model == str(models[0]))
    repacked_bytes(models[0])  # it is used again
    monkeypatch.setenv("UNIMEM_CACHE_BYTES", str(2 * first.nbytes))
    repacked_bytes(models[2])
    assert {image.model for image in cache.images()} == {str(models[0]), str(models[2])}
    monkeypatch.setenv("UNIMEM_CACHE_BYTES", str(first.nbytes - 1))
    with pytest.warns(um.PlacementWarning, match="UNIMEM_CACHE_BYTES"):
        repacked_bytes(models[1], cache=True)
    repacked_bytes(models[1])  # not requested, so no warning
    assert len(cache.images()) == 2
    monkeypatch.setenv("UNIMEM_CACHE_BYTES", "much")
    with pytest.raises(ValueError, match="expected a size as 20G, got 'much'"):
        repacked_bytes(models[1])


def test_a_full_disk_leaves_nothing(model: Path, cache: ImageCache, monkeypatch: Patch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "image")

    monkeypatch.setattr("unimem.base.atomic_file.NewFile.write", full)
    with pytest.warns(um.PlacementWarning, match="No space left"):
        assert repacked_bytes(model, cache=True)[0] is None
    assert os.listdir(cache.folder) == []


def test_a_forked_child_holds_no_lock(cache: ImageCache) -> None:
    with cache.making({"of": "it"}):
        (name,) = os.listdir(cache.folder)
        path = os.path.join(cache.folder, name)
        fds = [int(fd) for fd in os.listdir("/proc/self/fd")]
        (fd,) = [fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")
                 and os.path.samefile(f"/proc/self/fd/{fd}", path)]  # fmt: skip
        of_child, waiting = os.dup(fd), os.open(path, os.O_RDWR)
    try:
        fcntl.flock(waiting, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(of_child)
        os.close(waiting)


def test_a_failed_unlock_still_closes_the_descriptor(cache: ImageCache, monkeypatch: Patch) -> None:
    def fails(fd: int, kind: int) -> None:
        if kind == fcntl.LOCK_UN:
            raise OSError(errno.ENOLCK, "No locks available")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(fcntl, "flock", fails)
    with cache.making({"of": "it"}):
        pass
    assert os.listdir("/proc/self/fd") == before
    assert os.listdir(cache.folder) == []


def test_two_processes_make_one_image(
    model: Path, cache: ImageCache, repacks: list[str], monkeypatch: Patch
) -> None:
    expected = expected_bytes(model)
    repacks.clear()
    asked = 0
    second_waits = threading.Event()
    counted, flock = repack.repack_into, fcntl.flock

    def ask(fd: int, how: int) -> None:
        nonlocal asked
        asked += how == fcntl.LOCK_EX
        if asked == 2:
            second_waits.set()
        flock(fd, how)

    def repack_slowly(*arguments: Any) -> None:
        assert second_waits.wait(60)
        counted(*arguments)

    monkeypatch.setattr("unimem.weights.repack.image_cache.fcntl.flock", ask)
    monkeypatch.setattr(repack, "repack_into", repack_slowly)
    found: list[Any] = [None, None]

    def start(number: int) -> None:
        found[number] = repacked_bytes(model)

    at_once(2, start)
    assert len(repacks) == 1
    assert sorted(image is None for image, _ in found) == [False, True]
    assert [data for _, data in found] == [expected, expected]
    assert os.listdir(cache.folder) == [only(cache).name]
