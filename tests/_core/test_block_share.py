"""Shared blocks between real processes: by descriptor, path and fork, sealed, and mapped files."""

from __future__ import annotations

import gc
import io
import mmap
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from conftest import Run
from support.kernel import proc_maps
from support.processes.forks import in_child, refuses

pytestmark = pytest.mark.usefixtures("gives_memory_back")

MIB = 1 << 20
PAGE = proc_maps.PAGE
NAME = f"unimem-test-{os.getpid()}"
IMPORTS = "import os, socket, sys; import unimem as um\n"


def other_process(script: str, *arguments: str, fds: tuple[int, ...] = ()) -> str:
    """Run a script in a new interpreter, and give what it prints."""
    command = [sys.executable, "-c", f"{IMPORTS}{script}", *arguments]
    pipes: Any = {"capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, pass_fds=fds, check=False, **pipes)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


# ---- by descriptor ----


def test_descriptors_over_a_socket() -> None:
    script = """
with socket.socket(fileno=int(sys.argv[1])) as s:
    _, fds, _, _ = socket.recv_fds(s, 1, 2)
for fd, nbytes in zip(fds, sys.argv[2:], strict=True):
    with um.Block.attach(fd, writable=True, name="from outside") as block:
        os.close(fd)  # the block has its own
        a = block.as_array("int64", 1000)
        assert a.tolist() == list(range(1000))
        a *= 2
        assert block.nbytes == int(nbytes)
        os.fstat(block.fileno())
        del a
"""
    ours, theirs = socket.socketpair()
    with (
        um.Block(3 * MIB, shared=True, pages="auto") as auto,
        um.Block(3 * MIB, shared=True, pages="4k") as small,
        ours,
        theirs,
    ):
        blocks = (auto, small)
        for block in blocks:
            block.as_array("int64", 1000)[:] = np.arange(1000)
        socket.send_fds(ours, [b"x"], [block.fileno() for block in blocks])
        sizes = [str(block.nbytes) for block in blocks]
        other_process(script, str(theirs.fileno()), *sizes, fds=(theirs.fileno(),))
        for block in blocks:
            assert (block.as_array("int64", 1000) == 2 * np.arange(1000)).all()


def test_the_path_of_memory() -> None:
    script = """
for path in sys.argv[1:]:
    with um.Block.attach(path) as block:
        assert block.path == (path if "shm" in path else None)
        assert (block.as_array() == 5).all()
        assert not block.as_array().flags.writeable
        try:
            um.Tape(block)
        except ValueError as error:
            assert "writable=True" in str(error)
        else:
            raise AssertionError("a tape over read-only memory")
    with um.Block.attach(path, writable=True) as block:
        block.as_array()[:] = 6
"""
    with um.Block(PAGE, shared=True) as unnamed, um.Block(PAGE, shared=NAME) as named:
        blocks = (unnamed, named)
        for block in blocks:
            block.as_array()[:] = 5
        assert unnamed.path is None
        assert named.path is not None
        other_process(script, f"/proc/{os.getpid()}/fd/{unnamed.fileno()}", named.path)
        for block in blocks:
            assert (block.as_array() == 6).all()
        assert os.path.exists(named.path)  # it is not the other's to remove


def test_attached_memory_outlives_its_maker() -> None:
    block = um.Block(4 * PAGE, shared=True)
    block.as_array()[:] = 3
    with um.Block.attach(block.fileno(), category="staging") as attached:
        assert attached.category == "staging"
        assert attached.requested["shared"] is True
        for size in (0, PAGE, 8 * PAGE):  # nobody cuts it off
            with pytest.raises(PermissionError):
                os.ftruncate(block.fileno(), size)
        block.close()
        assert (attached.as_array() == 3).all()
        proc_maps.assert_granted(attached, attached.verify())


def test_what_cannot_be_attached(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "fifo")
    n_open = len(os.listdir("/proc/self/fd"))
    reader, writer = os.pipe()
    wrong: dict[type[Exception], list[Any]] = {
        OSError: [-1, 10**6],
        FileNotFoundError: [tmp_path / "nowhere"],
        ValueError: [reader, tmp_path, tmp_path / "empty", tmp_path / "fifo", "/dev/null"],
        TypeError: [None, 1.5],
    }
    for error, things in wrong.items():
        for thing in things:
            with pytest.raises(error):
                um.Block.attach(thing)
    with pytest.raises(ValueError, match="category"):
        um.Block.attach(reader, category="sundries")
    os.close(reader)
    os.close(writer)
    with um.Block(PAGE, shared=True) as block:
        fd = os.open(f"/proc/self/fd/{block.fileno()}", os.O_RDONLY)
        with pytest.raises(um.PlacementError, match="writable=False"):
            um.Block.attach(fd, writable=True)
        um.Block.attach(fd).close()
        os.close(fd)
        with pytest.raises(TypeError, match=r"fileno\(\).*Block\.attach"):
            pickle.dumps(block)
    (tmp_path / "file").write_bytes(b"x")
    for private in (um.Block(PAGE), um.Block.map(tmp_path / "file")):
        with private, pytest.raises(io.UnsupportedOperation, match="shared=True"):
            private.fileno()
    assert len(os.listdir("/proc/self/fd")) == n_open


# ---- by name ----


def test_a_name_is_there_while_the_block_is_open() -> None:
    path = Path("/dev/shm", NAME)
    with um.Block(2 * MIB, shared=NAME) as block:
        assert (block.path, block.requested["shared"]) == (str(path), NAME)
        assert path.stat().st_mode & 0o777 == 0o600
        view = block.as_array()
        view[:] = 4
        with pytest.raises(FileExistsError, match=NAME):
            um.Block(PAGE, shared=NAME)
        with pytest.raises(BufferError):
            block.close()
        assert path.exists()
    assert not path.exists()
    assert (view == 4).all()  # the memory goes with its last view
    with um.Block(PAGE, shared=NAME):
        path.unlink()
        path.write_bytes(b"another's")
    try:
        assert path.read_bytes() == b"another's"
    finally:
        path.unlink()


def test_a_name_goes_with_a_block_that_is_dropped_or_left_open(run_python: Run) -> None:
    block = um.Block(PAGE, shared=NAME)
    with pytest.warns(ResourceWarning):
        del block
    assert not os.path.exists(f"/dev/shm/{NAME}")
    done = run_python(f"import unimem as um; block = um.Block(4096, shared='{NAME}')")
    assert done.returncode == 0, done.stderr
    assert not os.path.exists(f"/dev/shm/{NAME}")


def test_refused_names_leave_no_file() -> None:
    names: list[Any] = ["", "a/b", "..", 1, None, b"x"]
    for shared in names:
        with pytest.raises((ValueError, TypeError), match="shared"):
            um.Block(PAGE, shared=shared)
    with pytest.raises(um.PlacementError):
        um.Block(PAGE, shared=NAME, numa="bind:1023", strict=True)
    with pytest.raises(MemoryError):
        um.Block(2**50, shared=NAME)
    assert not os.path.exists(f"/dev/shm/{NAME}")


# ---- sealed copies ----


def test_nobody_writes_a_sealed_copy() -> None:
    with um.Block(4 * MIB) as block:
        block.as_array("uint32")[:] = np.arange(MIB)
        with block.sealed_copy(name="weights") as copy:
            block.as_array()[:] = 0
            assert (copy.as_array("uint32", MIB) == np.arange(MIB)).all()
            assert not copy.as_array().flags.writeable
            assert copy.name == "weights"
            proc_maps.assert_granted(copy)
            path = f"/proc/self/fd/{copy.fileno()}"
            for size in (0, PAGE, 64 * MIB):
                with pytest.raises(OSError, match=r"not permitted|Invalid"):
                    os.ftruncate(copy.fileno(), size)
            with pytest.raises(OSError, match=r"not permitted|Bad file"):
                os.write(copy.fileno(), b"x")
            with open(path, "r+b", buffering=0) as file:
                with pytest.raises(OSError, match=r"not permitted|Invalid"):
                    file.write(b"x")
                with pytest.raises(PermissionError):
                    mmap.mmap(file.fileno(), PAGE)
            with pytest.raises(um.PlacementError, match="sealed"):
                um.Block.attach(path, writable=True)
            assert in_child((copy.as_array("uint32", MIB) == np.arange(MIB)).all)
            script = """
with um.Block.attach(int(sys.argv[1])) as block:
    print(block.as_array("uint32", 1 << 20).sum())
"""
            said = other_process(script, str(copy.fileno()), fds=(copy.fileno(),))
            assert int(said) == sum(range(1 << 20))


@pytest.mark.parametrize("pages", ["auto", "4k", "thp"])
def test_pages_of_sealed_copies(pages: Any) -> None:
    with um.Block(4 * MIB, warm=True) as block:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            copy = block.sealed_copy(pages=pages)
        with copy:
            assert copy.requested["pages"] == pages
            assert copy.granted.resident_bytes == copy.nbytes
            proc_maps.assert_granted(copy)
            assert len(caught) == (pages == "thp" and copy.granted.huge_bytes < copy.nbytes)
        with pytest.raises(ValueError, match="pages"):
            block.sealed_copy(pages="3k")  # type: ignore[arg-type]


# ---- fork ----


def closes(thing: um.Block | um.Tape) -> bool:
    thing.close()
    return thing.closed


@pytest.mark.parametrize("shared", [True, NAME], ids=["unnamed", "named"])
def test_shared_memory_is_left_out_of_a_child(shared: Any) -> None:
    with um.Block(16 * PAGE, shared=shared, warm=True) as block:
        block.as_array()[:] = 1
        address = block.address
        with um.Tape(block) as tape, um.Block(PAGE) as private:
            tape.take_bytes(8)[:] = 5
            uses: list[Callable[[], Any]] = [
                lambda: block.address,
                lambda: block.nbytes,
                lambda: block.granted,
                block.as_array,
                lambda: memoryview(block),
                block.verify,
                block.warm,
                block.fileno,
                block.release,
                lambda: block.commit(PAGE),
                block.sealed_copy,
                lambda: tape.take(8),
                lambda: tape.take_address(8),
                tape.clear,
                tape.mark,
            ]
            assert in_child(lambda: [use for use in uses if not refuses(use)] == [])
            assert in_child(lambda: block.closed and "closed" in repr(block))
            assert in_child(lambda: not proc_maps.is_mapped(address))
            for thing in (tape, block):
                assert in_child(partial(closes, thing))
            assert in_child(lambda: not private.as_array().any())
            assert (tape.take_bytes(8) == 1).all()
        if isinstance(shared, str):
            assert os.path.exists(f"/dev/shm/{shared}")  # no child has removed it
        assert (block.as_array()[8:] == 1).all()


def attach_in_child(path: str) -> None:
    """Runs in the child of multiprocessing."""
    with um.Block.attach(path, writable=True) as block:
        block.as_array()[:] += 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_multiprocessing_attach(method: str) -> None:
    with um.Block(PAGE, shared=NAME) as block:
        block.as_array()[:] = 1
        context: Any = multiprocessing.get_context(method)
        child = context.Process(target=attach_in_child, args=(block.path,))
        child.start()
        child.join()
        assert child.exitcode == 0
        assert (block.as_array() == 2).all()


# ---- files that are written ----


def test_what_is_written_is_the_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * PAGE))
    with um.Block.map(path, mode="r+", offset=PAGE) as block:
        assert [part.access for part in proc_maps.mappings(block.address)] == ["rw-s"]
        block.as_array()[:] = 7
        with um.Tape(block) as tape:
            tape.take_bytes(PAGE)[:] = 6
        proc_maps.assert_granted(block, block.verify())
        assert in_child(lambda: refuses(lambda: block.address))
    assert path.read_bytes() == bytes(PAGE) + b"\6" * PAGE + b"\7" * PAGE
    gc.collect()
    path.chmod(0o400)
    if os.geteuid() != 0:
        with pytest.raises(PermissionError):
            um.Block.map(path, mode="r+")
