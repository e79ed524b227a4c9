"""Files that replace others: if anything fails, the old file stays, and no other file."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import resource
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.files.snapshot_files import cache, interpose, rows
from support.processes.forks import fork
from unimem._core.block import Block
from unimem.base.atomic_file import NewFile, write_text

PAGE = 4096
OLD = b"old"


@pytest.fixture
def page() -> Iterator[Any]:
    """An aligned page."""
    with Block(PAGE, pages="4k") as block:
        array = block.as_array()
        array[:] = 7
        yield array
        del array


def write(path: Path, page: Any) -> None:
    with NewFile(str(path)) as file:
        file.write(page, 0)
        file.publish()


def failing(number: int) -> Callable[..., Any]:
    """Return a system call that fails with this error."""

    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def check_save(path: Path) -> None:
    """A snapshot saved there is restored."""
    with cache(40) as kv:
        kv.save(path)
        with um.KVCache.restore(path, mode="copy") as restored:
            assert rows(restored) == rows(kv)


def takes_direct(folder: Path) -> bool:
    """Return whether the folder's file system supports O_DIRECT."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        try:
            fcntl.fcntl(file.fileno(), fcntl.F_SETFL, os.O_DIRECT)
        except OSError:
            return False
    return True


# ---- new files ----


def test_a_file_is_made_or_replaced(tmp_path: Path, page: Any) -> None:
    path = tmp_path / "file"
    for value in (7, 8):
        page[:] = value
        write(path, page)
        assert (path.read_bytes(), os.listdir(tmp_path)) == (page.tobytes(), ["file"])


def test_a_file_appears_when_it_is_published(tmp_path: Path, page: Any) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    with NewFile(str(path)) as file:
        file.write(page, 0)
        assert path.read_bytes() == OLD
        assert len(os.listdir(tmp_path)) == 2
    assert path.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_stays_a_link(tmp_path: Path, page: Any) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder/target", tmp_path / "link"
    link.symlink_to("folder/target")
    for _ in range(2):  # the first makes the target
        write(link, page)
        assert link.is_symlink()
        assert target.read_bytes() == page.tobytes()


def test_a_replaced_file_keeps_its_permissions(tmp_path: Path, page: Any) -> None:
    path = tmp_path / "file"
    mask = os.umask(0o027)
    try:
        write(path, page)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.unlink()
        write_text(path, "for others, too", 0o666)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        write(path, page)
        assert stat.S_IMODE(path.stat().st_mode) == 0o604
    finally:
        os.umask(mask)


@pytest.mark.parametrize("name", ["a" * 255, "ü" * 127, "\udcff", ".hidden", "a b"])
def test_any_file_name_is_written(
    name: str, tmp_path: Path, page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / name, Path(name)):
        write(path, page)
    assert os.listdir(tmp_path) == [name]


# ---- other writers ----


def test_the_next_writer_removes_a_stale_file(tmp_path: Path, page: Any) -> None:
    path = tmp_path / "file"
    pid = fork()
    if pid == 0:
        file = NewFile(str(path))
        file.write(page, 0)
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    (stale,) = os.listdir(tmp_path)
    assert stale.startswith(".file.")
    for name in (".file.0123.unimem-tmp", ".file2.01234567.unimem-tmp", "file.01234567.unimem-tmp"):
        (tmp_path / name).write_bytes(b"of somebody else")
    write(path, page)
    assert stale not in os.listdir(tmp_path)
    assert len(os.listdir(tmp_path)) == 4


def test_a_file_being_written_is_not_swept(tmp_path: Path, page: Any) -> None:
    path = tmp_path / "file"
    with NewFile(str(path)) as slow:
        write(path, page)
        assert path.read_bytes() == page.tobytes()
        page[:] = 9
        slow.write(page, 0)
        slow.publish()
    assert path.read_bytes() == page.tobytes()
    assert os.listdir(tmp_path) == ["file"]


def test_a_writer_whose_file_is_swept_makes_another(
    tmp_path: Path, page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer removes the file between open and flock, and once still holds it."""
    true = fcntl.flock
    held: list[int] = []

    def flock(fd: int, how: int) -> None:
        (name,) = os.listdir(tmp_path)
        if len(held) < 2:
            held.append(os.open(tmp_path / name, os.O_RDONLY))
            true(held[-1], how)
            os.unlink(tmp_path / name)
            if len(held) == 2:
                true(held[-1], fcntl.LOCK_UN)
        true(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    write(tmp_path / "file", page)
    for fd in held:
        os.close(fd)
    assert len(held) == 2
    assert os.listdir(tmp_path) == ["file"]


def test_many_writers_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def many(value: int) -> None:
        with Block(PAGE, pages="4k") as block:
            array = block.as_array()
            array[:] = value
            for _ in range(20):
                write(path, array)
                whole = path.read_bytes()
                assert whole == whole[:1] * PAGE
            del array

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(many, range(6)))
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_nothing_is_swept_without_locks(
    number: int, tmp_path: Path, page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(number))
    stale = tmp_path / ".file.01234567.unimem-tmp"
    stale.write_bytes(b"perhaps of a living one")
    write(tmp_path / "file", page)
    assert sorted(os.listdir(tmp_path)) == [stale.name, "file"]


# ---- O_DIRECT ----


def flags_at_each_write(patch: pytest.MonkeyPatch) -> list[int]:
    flags: list[int] = []
    true = os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        flags.append(fcntl.fcntl(fd, fcntl.F_GETFL))
        return true(fd, data, offset)

    patch.setattr(os, "pwrite", pwrite)
    return flags


def test_writes_bypass_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not takes_direct(tmp_path):
        pytest.skip("the file system has no O_DIRECT")
    flags = flags_at_each_write(monkeypatch)
    # Lanes that neither begin at a page nor fill whole pages.
    with cache(40) as kv:
        kv.trim_to(39)
        kv.save(tmp_path / "session")
    assert len(flags) == 5  # four lanes and the header
    assert all(flag & os.O_DIRECT for flag in flags)


def test_a_file_system_without_o_direct_is_written_buffered(
    tmp_path: Path, page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> Any:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "")
        return true(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    flags = flags_at_each_write(monkeypatch)
    write(tmp_path / "file", page)
    assert [flag & os.O_DIRECT for flag in flags] == [0]
    assert (tmp_path / "file").read_bytes() == page.tobytes()


def test_a_refused_direct_write_is_repeated_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, refused = os.pwrite, []

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "")
        return true(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    check_save(tmp_path / "session")
    assert len(refused) >= takes_direct(tmp_path)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal or a quota cuts a write; O_DIRECT may refuse the rest."""
    true = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: true(fd, data[:1000], at))
    check_save(tmp_path / "session")


def test_a_write_of_zero_bytes_raises(
    tmp_path: Path, page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "file", page)
    assert os.listdir(tmp_path) == []


# ---- failures ----


@pytest.mark.parametrize("there", [False, True], ids=["a new file", "over an old one"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINVAL])
def test_each_failing_call_leaves_the_old_file_or_the_new_one(
    number: int, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "session"
    with cache(30) as first, cache(40) as second:
        second.save(path)
        new = path.read_bytes()
        first.save(path)
        old = path.read_bytes()
        path.chmod(0o600)
        if not there:
            path.unlink()
        calls: list[str] = []
        with monkeypatch.context() as patch:
            interpose(patch, lambda name, *_: calls.append(name))
            second.save(path)
        assert {"open", "pwrite", "fsync", "replace", "flock"} <= set(calls)
        n_raised, n_open = 0, len(os.listdir("/proc/self/fd"))
        for which in range(len(calls)):
            path.write_bytes(old)
            if not there:
                path.unlink()
            places = itertools.count()

            def fail(name: str, *_: Any, at: int = which, places: Any = places) -> None:
                if next(places) == at:
                    raise OSError(number, os.strerror(number))

            raised = None
            with monkeypatch.context() as patch:
                interpose(patch, fail)
                try:
                    second.save(path)
                except OSError as error:
                    raised = error
            left = path.read_bytes() if path.exists() else None
            if raised is None:
                assert left == new, calls[which]
            else:
                n_raised += 1
                assert (raised.errno, raised.filename) == (number, str(path))
                in_place = which > calls.index("replace")
                assert left == (new if in_place else old if there else None), calls[which]
            assert os.listdir(tmp_path) == ([] if left is None else ["session"])
            assert len(os.listdir("/proc/self/fd")) == n_open
        assert n_raised >= (5 if number == errno.EINVAL else 8)


def test_no_write_begins_after_one_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a write has failed, no other begins."""
    writes: list[None] = []

    def fail(name: str, *_: Any) -> None:
        if name == "pwrite":
            writes.append(None)
            raise OSError(errno.ENOSPC, "")

    interpose(monkeypatch, fail)
    with um.KVCache(200, 1, 32, 8) as kv:
        for layer in range(200):
            kv.append(layer, *np.zeros((2, 8, 1, 32), np.float32))
        with pytest.raises(OSError, match="No space left on device"):
            kv.save(tmp_path / "session")
    assert len(writes) <= 4, "each of the four threads begins one at most"
    assert os.listdir(tmp_path) == []


def check_too_large(path: Path, number: int, limit: Callable[[int], Any]) -> None:
    """A snapshot that is too large for a limit raises, and leaves the old one."""
    with cache(40) as small, cache(2000, 2000) as large:
        small.save(path, model="old")
        before = path.read_bytes()
        with pytest.raises(OSError, match=os.strerror(number)) as caught, limit(len(before)):
            large.save(path, model="new")
        assert (caught.value.errno, caught.value.filename) == (number, str(path))
        assert path.read_bytes() == before
        assert os.listdir(path.parent) == ["session"]
        small.save(path, model="again")


def test_a_full_file_system_keeps_the_old_file(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        check_too_large(tmp_path / "session", errno.ENOSPC, nullcontext)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_limit_of_file_sizes_keeps_the_old_file(tmp_path: Path) -> None:
    @contextmanager
    def limited(nbytes: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes + 4096, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    check_too_large(tmp_path / "session", errno.EFBIG, limited)


def test_an_unwritable_folder_keeps_the_old_file(page: Any) -> None:
    with tempfile.TemporaryDirectory() as name:  # the folder of the test is closed to other users
        folder = Path(name)
        (folder / "file").write_bytes(OLD)
        folder.chmod(0o555)
        user = os.geteuid()
        os.seteuid(user or 65534)  # root may write everywhere
        try:
            with pytest.raises(PermissionError) as caught:
                write(folder / "file", page)
        finally:
            os.seteuid(user)
        assert caught.value.filename == str(folder / "file")
        assert (folder / "file").read_bytes() == OLD
        assert os.listdir(folder) == ["file"]
        folder.chmod(0o755)


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with cache(3) as kv:
        for path in (tmp_path / "fifo", "/dev/null"):
            with pytest.raises(FileExistsError, match=f"Is not a regular file: '{path}'"):
                kv.save(path)
        for name in ("", "/newdir/", "/newdir/.", "/newdir/sub/.."):
            with pytest.raises(IsADirectoryError) as caught:
                kv.save(f"{tmp_path}{name}")
            assert caught.value.filename == f"{tmp_path}{name}"
        with pytest.raises(FileNotFoundError):
            kv.save(tmp_path / "none" / "file")
    assert os.listdir(tmp_path) == ["fifo"]
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_room_is_allocated_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with NewFile(str(tmp_path / "there")) as file:
        file.allocate(3 * 4096)
        if file._direct:
            assert os.fstat(file._fd).st_size == 3 * 4096
    monkeypatch.setattr(os, "posix_fallocate", failing(code))
    with NewFile(str(tmp_path / "there")) as file:
        file.allocate(3 * 4096)
        assert os.fstat(file._fd).st_size == 0
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_raises_before_the_first_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    path = tmp_path / "old"
    path.write_bytes(OLD)
    with NewFile(str(path)) as file:
        if not file._direct:
            pytest.skip("this file system is not written past the page cache")
        with pytest.raises(OSError, match="No space") as caught:
            file.allocate(4096)
        assert caught.value.filename == str(path)
    assert path.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["old"]
