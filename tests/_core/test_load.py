"""Loading files into blocks: contents of memory, progress and errors, and early ends."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.kernel import proc_maps
from support.processes.at_once import at_once
from support.processes.forks import needs_fork
from unimem._core.load import load
from unimem._core.status import counters

pytestmark = pytest.mark.usefixtures("gives_memory_back", "leaves_no_thread")

PAGE = proc_maps.PAGE
MIB = 1 << 20
# Read a byte at a time this takes long enough for anything to come in between.
SLOW: dict[str, Any] = {"request_bytes": 1, "threads": 2}
SLOW_BYTES = 64 * MIB


def n_tasks() -> int:
    """Threads of this process, by the kernel."""
    return len(os.listdir("/proc/self/task"))


def all_but_gone(n_before: int) -> bool:
    """Whether there are as many threads as before; the kernel lists one on its way out that was
    joined."""
    until = time.monotonic() + 60
    while n_tasks() != n_before and time.monotonic() < until:
        time.sleep(0.001)
    return n_tasks() == n_before


@pytest.fixture
def leaves_no_thread() -> Iterator[None]:
    before = n_tasks()
    yield
    assert all_but_gone(before)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of some megabytes, and of no whole pages."""
    path = tmp_path / "model"
    np.random.default_rng(7).integers(0, 256, 9 * MIB + 1234, np.uint8).tofile(path)
    return path


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[int, um.Block, list[Any]]]:
    """A file, a block, and the parts of a load that does not end by itself."""
    path = tmp_path / "slow"
    path.touch()
    os.truncate(path, SLOW_BYTES)
    with path.open("r+b", buffering=0) as file, um.Block(SLOW_BYTES, pages="4k") as block:
        yield file.fileno(), block, [(file.fileno(), 0, block, 0, SLOW_BYTES, str(path))]


@contextmanager
def descriptor(path: Path, *, direct: bool = False) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    except OSError as error:
        pytest.skip(f"{path} cannot be opened: {error}")
    try:
        yield fd
    finally:
        os.close(fd)


class Stop(Exception):  # noqa: N818
    """What a callback raises."""


# ---- what is read ----


@pytest.mark.parametrize("pages", ["4k", "thp"])
@pytest.mark.parametrize("threads", [None, 1, 3])
@pytest.mark.parametrize("direct", [False, True])
def test_memory_holds_the_file(file: Path, direct: bool, threads: int | None, pages: Any) -> None:
    expected = np.fromfile(file, np.uint8)
    with descriptor(file, direct=direct) as fd, um.Block(12 * MIB, pages=pages) as block:
        memory = block.as_array()
        load([(fd, 0, block, 0, expected.size, str(file))], direct=direct, threads=threads)
        assert np.array_equal(memory[: expected.size], expected)
        assert not memory[expected.size :].any()
        proc_maps.assert_granted(block)
        load([(fd, PAGE, block, 10 * MIB, MIB + 5, str(file))], direct=direct, request_bytes=4096)
        assert np.array_equal(memory[10 * MIB :][: MIB + 5], expected[PAGE:][: MIB + 5])
        del memory


def test_parts_of_files(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(range(256)) * 100)
    with descriptor(file) as fd, descriptor(other) as other_fd:
        with um.Block(4 * MIB) as block, um.Block(PAGE) as small:
            load(
                [
                    (other_fd, 255, block, 1, 3, "other"),
                    (fd, 77, block, MIB + 3, MIB, "file"),
                    (fd, 0, small, 0, 0, "file"),
                    (other_fd, 256, small, PAGE - 256, 256, "other"),
                ]
            )
            assert bytes(block.as_array()[:5]) == b"\0\xff\0\1\0"
            assert bytes(block.as_array()[MIB + 3 :][:MIB]) == file.read_bytes()[77:][:MIB]
            assert bytes(small.as_array()) == bytes(PAGE - 256) + bytes(range(256))
            before = bytes(block.as_array())
            load([])
            assert bytes(block.as_array()) == before
        # Several at once.
        expected = np.fromfile(file, np.uint8)
        with um.Block(40 * MIB) as block:
            memory = block.as_array("uint8", (4, 10 * MIB))
            at_once(4, lambda i: load([(fd, 0, block, i * 10 * MIB, expected.size, "file")]))
            assert (memory[:, : expected.size] == expected).all()
            del memory


def cached_pages(fd: int) -> int:
    """Pages of a file in the page cache: cachestat of Linux 6.5, which has no wrapper."""
    found = (ctypes.c_uint64 * 5)()
    libc = ctypes.CDLL(None, use_errno=True)
    every = (ctypes.c_uint64 * 2)()  # offset and length: the whole file
    if libc.syscall(451, fd, ctypes.byref(every), found, 0) != 0:
        pytest.skip(f"cachestat: {os.strerror(ctypes.get_errno())}")
    return found[0]


def test_direct_leaves_the_page_cache_as_it_was(file: Path) -> None:
    size = file.stat().st_size
    with descriptor(file) as plain, descriptor(file, direct=True) as fd:
        os.fsync(plain)
        os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_pages(plain) != 0:
            pytest.skip("the page cache of this file system does not forget a file")
        os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(plain, MIB, 0)
        before = cached_pages(plain)
        assert 0 < before < size // PAGE
        with um.Block(10 * MIB) as block:
            load([(fd, 0, block, 0, size, str(file))], direct=True)
            assert cached_pages(plain) == before
            assert bytes(block.as_array()[:size]) == file.read_bytes()
            load([(plain, 0, block, 0, size, str(file))])
            assert cached_pages(plain) == -(-size // PAGE)


# ---- progress and errors ----


def test_progress_ends_with_the_total(file: Path) -> None:
    size, before = file.stat().st_size, n_tasks()
    calls: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        calls.append((done, total))
        if done == total == size:
            assert all_but_gone(before)
            raise Stop

    with um.Block(10 * MIB) as block, descriptor(file) as fd:
        with pytest.raises(Stop):  # the last call may raise, too
            load([(fd, 0, block, 0, size, "")], progress=progress)
        assert calls[-1] == (size, size)
        assert bytes(block.as_array()[:size]) == file.read_bytes()
        calls.clear()
        load([(fd, 0, block, 0, size, "")], progress=lambda *call: calls.append(call))
        assert [done for done, total in calls if done == total] == [size]
        calls.clear()
        load([(fd, 0, block, 0, 0, "")], progress=progress)
        assert calls == [(0, 0)]


def test_progress_comes_from_this_thread_and_not_too_often(slow: Any) -> None:
    calls: list[tuple[int, int]] = []
    callers = set()

    def progress(done: int, total: int) -> None:
        callers.add(threading.get_ident())
        calls.append((done, total))
        if len(calls) == 4:
            raise Stop

    started = time.monotonic()
    with pytest.raises(Stop):
        load(slow[2], progress=progress, **SLOW)
    assert len(calls) <= (time.monotonic() - started) * 20
    assert callers == {threading.get_ident()}
    assert calls == sorted(calls)
    assert all(0 < done < total == SLOW_BYTES for done, total in calls)


def test_threads_are_pinned_and_get_no_signals(slow: Any) -> None:
    mine = set(os.listdir("/proc/self/task"))
    cpu = max(os.sched_getaffinity(0))
    found: list[dict[str, str]] = []
    until = time.monotonic() + 60

    def progress(done: int, total: int) -> None:
        tasks = set(os.listdir("/proc/self/task")) - mine
        texts = [Path(f"/proc/self/task/{task}/status").read_text() for task in tasks]
        found[:] = [dict(line.split(":\t", 1) for line in text.splitlines()) for text in texts]
        # On a busy machine, a thread may not have run yet.
        are_pinned = all(status["Cpus_allowed_list"] == str(cpu) for status in found)
        if are_pinned or time.monotonic() > until:
            raise Stop

    with pytest.raises(Stop):
        load(slow[2], progress=progress, request_bytes=1, threads=3, cpus=[cpu])
    assert len(found) == 3
    for status in found:
        assert status["Cpus_allowed_list"] == str(cpu)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1):
            assert int(status["SigBlk"], 16) >> (number - 1) & 1
        for number in (signal.SIGSEGV, signal.SIGBUS):
            assert not int(status["SigBlk"], 16) >> (number - 1) & 1


# ---- ended early ----


def test_what_a_callback_raises_ends_the_load(slow: Any) -> None:
    _, block, parts = slow
    before = n_tasks()

    def progress(done: int, total: int) -> None:
        assert n_tasks() == before + 2
        for take_away in (block.close, block.release):  # the memory stays meanwhile
            with pytest.raises(BufferError):
                take_away()
        raise Stop

    with pytest.raises(Stop):
        load(parts, progress=progress, **SLOW)
    assert all_but_gone(before)
    calls = counters()["os_calls"]
    block.as_array()[:] = 9  # nobody writes there any more
    assert counters()["os_calls"] == calls
    assert (block.as_array() == 9).all()
    assert block.release() == SLOW_BYTES


def run(script: str, path: Path, *, interrupt: bool = False) -> str:
    """Run a script in a process of its own; interrupt it when it has started threads."""
    source = f"""
        import os, sys, time, unimem as um
        from unimem._core.load import load
        from unimem._core.status import counters
        path, nbytes = sys.argv[1], {SLOW_BYTES}
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.truncate(fd, nbytes)
        block = um.Block(nbytes, pages="4k")
        parts = [(fd, 0, block, 0, nbytes, path)]
        def n_tasks():
            return len(os.listdir("/proc/self/task"))
        before = n_tasks()
        print(before, flush=True)
        def ended():
            until = time.monotonic() + 60
            while n_tasks() > before and time.monotonic() < until:
                time.sleep(0.001)
            assert n_tasks() <= before  # other libraries end theirs at a fork
            calls = counters()["os_calls"]
            block.as_array()[:] = 9
            assert (block.as_array() == 9).all() and counters()["os_calls"] == calls
            block.close()
            print("ended", flush=True)
    """
    source = textwrap.dedent(source) + textwrap.dedent(script)
    command = [sys.executable, "-W", "ignore", "-c", source, str(path)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as child:
        try:
            assert child.stdout is not None
            n_before = int(child.stdout.readline())
            while interrupt and len(os.listdir(f"/proc/{child.pid}/task")) < n_before + 2:
                time.sleep(0.001)
            if interrupt:
                child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=120)
        finally:
            child.kill()
    assert child.returncode == 0, err
    return str(out)


@pytest.mark.parametrize("progress", ["None", "lambda done, total: None"])
def test_an_interrupt_ends_the_load(tmp_path: Path, progress: str) -> None:
    script = f"""
        try:
            load(parts, request_bytes=1, threads=2, progress={progress})
        except KeyboardInterrupt:
            ended()
    """
    assert run(script, tmp_path / "slow", interrupt=True) == "ended\n"


@needs_fork
def test_a_child_that_a_callback_forks_is_told(tmp_path: Path) -> None:
    script = """
        class Stop(Exception):
            pass
        child = None
        def progress(done, total):
            global child
            if child is None:
                child = os.fork()
            if child != 0:
                os.waitpid(child, 0)
                raise Stop
        try:
            load(parts, request_bytes=1, threads=2, progress=progress)
        except um.ClosedError as error:
            assert child == 0 and "forked child" in str(error)
            print("told", flush=True)
            os._exit(0)
        except Stop:
            assert child != 0
            ended()
    """
    assert run(script, tmp_path / "slow") == "told\nended\n"


@needs_fork
def test_a_fork_meanwhile_changes_nothing(file: Path, tmp_path: Path) -> None:
    script = f"""
        import threading
        size = os.path.getsize({str(file)!r})
        file = open({str(file)!r}, "rb")
        def read():
            load([(file.fileno(), 0, block, 0, size, path)], request_bytes=4096)
        for i in range(5):
            block.as_array()[:size] = 0
            thread = threading.Thread(target=read)
            thread.start()
            child = os.fork()
            if child == 0:
                block.as_array()[:] = 1
                os._exit(0)
            thread.join()
            assert os.waitpid(child, 0)[1] == 0
            assert bytes(block.as_array()[:size]) == open({str(file)!r}, "rb").read()
        ended()
    """
    assert run(script, tmp_path / "slow") == "ended\n"


# ---- what fails ----


@pytest.mark.parametrize("direct", [False, True])
def test_a_shorter_file(file: Path, direct: bool) -> None:
    size = file.stat().st_size
    with descriptor(file, direct=direct) as fd, um.Block(16 * MIB) as block:
        for nbytes, offset in ((size + 1, 0), (1, size // 4096 * 4096 + 8192), (12 * MIB, 0)):
            with pytest.raises(OSError, match="The file has become shorter") as error:
                load([(fd, offset, block, 0, nbytes, str(file))], direct=direct)
            assert (error.value.errno, error.value.filename) == (errno.EIO, str(file))
        load([(fd, 0, block, 0, size, str(file))], direct=direct)
        assert bytes(block.as_array()[:size]) == file.read_bytes()


def test_truncated_while_it_is_loaded(slow: Any, file: Path) -> None:
    fd, block, parts = slow

    def cut(done: int, total: int) -> None:
        os.truncate(fd, 0)

    with descriptor(file) as other:
        parts = [(other, 0, block, 0, 10, "whole"), *parts]
        with pytest.raises(OSError, match="The file has become shorter") as error:
            load(parts, progress=cut, **SLOW)
    assert (error.value.errno, error.value.filename) == (errno.EIO, parts[1][5])


def test_a_file_that_cannot_be_read(file: Path) -> None:
    with um.Block(PAGE) as block, descriptor(file.parent) as folder:
        for fd, number in ((folder, errno.EISDIR), (-1, errno.EBADF)):
            with pytest.raises(OSError, match=os.strerror(number)) as error:
                load([(fd, 0, block, 0, 10, "name")])
            assert (error.value.errno, error.value.filename) == (number, "name")


def test_no_memory_where_it_is_read_to(file: Path) -> None:
    shared = os.memfd_create("shared")
    os.truncate(shared, 20 * PAGE)
    with um.Block.attach(shared, writable=True) as block, descriptor(file) as fd:
        os.truncate(shared, 10 * PAGE)
        load([(fd, 0, block, 0, 10 * PAGE, "name")])
        with pytest.raises(MemoryError, match=r"loading name: .* no memory"):
            load([(fd, 0, block, 0, 20 * PAGE, "name")])
    os.close(shared)


def test_ranges_are_checked(file: Path) -> None:
    with um.Block(PAGE, shared=True) as source:
        sealed = source.sealed_copy()
    with descriptor(file) as fd, um.Block(4 * PAGE, pages="4k", reserve=20 * PAGE) as block, sealed:
        good = (fd, 0, block, 0, PAGE, "good")
        for offset, nbytes in ((0, 4 * PAGE + 1), (4 * PAGE, 1), (30 * PAGE, 0), (2**62, 2**62)):
            with pytest.raises(ValueError, match=r"name: bytes .* are not committed"):
                load([good, (fd, 0, block, offset, nbytes, "name")])
        with pytest.raises(ValueError, match=r"name: Block .* is read-only"):
            load([(fd, 0, sealed, 0, 1, "name")])
        for offset, at in ((512, 0), (0, 512)):
            with pytest.raises(ValueError, match="name: a direct load is of multiples of 4096"):
                load([(fd, offset, block, at, PAGE, "name")], direct=True)
        with pytest.raises(ValueError, match="bytes 12288 to 20480"):
            load([(fd, 0, block, 3 * PAGE, PAGE + 1, "name")], direct=True)
        for bad in ((-1, 0, 0), (0, -1, 0), (0, 0, -1), (2**63, 0, 0), (2**63 - 1, 0, PAGE)):
            with pytest.raises(ValueError, match=r"expected an integer|too large"):
                load([(fd, bad[0], block, bad[1], bad[2], "name")])
        options: dict[str, list[Any]] = {"threads": [0], "request_bytes": [0], "cpus": [[], [8192]]}
        for option, values in options.items():
            for value in values:
                with pytest.raises(ValueError, match=option):
                    load([good], **{option: value})
        for wrong in (None, file, 5):
            with pytest.raises(TypeError):
                load([(fd, 0, wrong, 0, PAGE, "name")])  # type: ignore[list-item]
        assert block.verify().resident_bytes == 0
        load([good], threads=10**6)
        block.close()
        with pytest.raises(um.ClosedError):
            load([good])
