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
import textwrap
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import proc_maps
import unimem as um
from conftest import Run
from forks import in_child, refuses

pytestmark = pytest.mark.usefixtures("gives_memory_back")

MIB = 1 << 20
PAGE = proc_maps.PAGE
NAME = f"unimem-test-{os.getpid()}"


def other_process(script: str, *arguments: str, fds: tuple[int, ...] = ()) -> str:
    """Run a script in a new interpreter, and give what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        pass_fds=fds,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- by descriptor ----


@pytest.mark.parametrize("pages", ["auto", "4k"])
def test_a_descriptor_over_a_socket(pages: Any) -> None:
    with um.Block(3 * MIB, shared=True, pages=pages) as block:
        block.as_array("int64", 1000)[:] = np.arange(1000)
        ours, theirs = socket.socketpair()
        script = """
            import socket, sys
            import unimem as um
            with socket.socket(fileno=int(sys.argv[1])) as s:
                _, (fd,), _, _ = socket.recv_fds(s, 1, 1)
            import os
            with um.Block.attach(fd, writable=True, name="from outside") as block:
                os.close(fd)  # the block has its own
                a = block.as_array("int64", 1000)
                assert a.tolist() == list(range(1000))
                a *= 2
                assert block.nbytes == int(sys.argv[2])
                os.fstat(block.fileno())
                del a
        """
        with ours, theirs:
            socket.send_fds(ours, [b"x"], [block.fileno()])
            other_process(script, str(theirs.fileno()), str(block.nbytes), fds=(theirs.fileno(),))
        assert (block.as_array("int64", 1000) == 2 * np.arange(1000)).all()


def test_the_path_of_a_descriptor() -> None:
    with um.Block(PAGE, shared=True) as block:
        block.as_array()[:] = 5
        path = f"/proc/{os.getpid()}/fd/{block.fileno()}"
        script = """
            import sys
            import unimem as um
            with um.Block.attach(sys.argv[1]) as block:
                assert (block.as_array() == 5).all()
                assert not block.as_array().flags.writeable
                try:
                    um.Tape(block)
                except ValueError as error:
                    assert "writable=True" in str(error)
                else:
                    raise AssertionError("a tape over read-only memory")
            with um.Block.attach(sys.argv[1], writable=True) as block:
                block.as_array()[:] = 6
        """
        other_process(script, path)
        assert (block.as_array() == 6).all()


def test_attached_memory_outlives_its_maker() -> None:
    block = um.Block(PAGE, shared=True)
    block.as_array()[:] = 3
    with um.Block.attach(block.fileno(), category="staging") as attached:
        assert attached.category == "staging"
        assert attached.requested["shared"] is True
        assert attached.path is None
        block.close()
        assert (attached.as_array() == 3).all()
        proc_maps.assert_granted(attached, attached.verify())


def test_shared_memory_cannot_be_cut_off() -> None:
    with um.Block(4 * PAGE, shared=True) as block:
        for size in (0, PAGE, 8 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(block.fileno(), size)


def test_private_memory_has_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for block in (um.Block(PAGE), um.Block.map(tmp_path / "file")):
        with block, pytest.raises(io.UnsupportedOperation, match="shared=True"):
            block.fileno()


def test_what_cannot_be_attached(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "fifo")
    n_open = len(os.listdir("/proc/self/fd"))
    reader, writer = os.pipe()
    wrong: list[tuple[Any, type[Exception]]] = [
        (-1, OSError),
        (10**6, OSError),
        (reader, ValueError),
        (tmp_path / "nowhere", FileNotFoundError),
        (tmp_path, ValueError),
        (tmp_path / "empty", ValueError),
        (tmp_path / "fifo", ValueError),
        ("/dev/null", ValueError),
        (None, TypeError),
        (1.5, TypeError),
    ]
    for what, error in wrong:
        with pytest.raises(error):
            um.Block.attach(what)
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
    assert len(os.listdir("/proc/self/fd")) == n_open


# ---- by name ----


def test_a_name_is_there_while_the_block_is_open() -> None:
    with um.Block(2 * MIB, shared=NAME) as block:
        assert block.path == f"/dev/shm/{NAME}"
        assert block.requested["shared"] == NAME
        assert os.stat(block.path).st_mode & 0o777 == 0o600
        block.as_array()[:] = 8
        script = """
            import sys
            import unimem as um
            with um.Block.attach(sys.argv[1], writable=True) as block:
                assert block.path == sys.argv[1]
                assert (block.as_array() == 8).all()
                block.as_array()[:] = 9
        """
        other_process(script, block.path)
        assert os.path.exists(block.path)  # it is not the other's to remove
        assert (block.as_array() == 9).all()
        with pytest.raises(FileExistsError, match=NAME):
            um.Block(PAGE, shared=NAME)
        assert (block.as_array() == 9).all()
        path = block.path
    assert not os.path.exists(path)


def test_a_name_goes_with_the_block_and_memory_with_the_last_view() -> None:
    with um.Block(PAGE, shared=NAME) as block:
        view = block.as_array()
        view[:] = 4
        with pytest.raises(BufferError):
            block.close()
        assert os.path.exists(f"/dev/shm/{NAME}")
    assert not os.path.exists(f"/dev/shm/{NAME}")
    assert (view == 4).all()


def test_a_name_goes_with_a_block_that_is_dropped_or_left_open(run_python: Run) -> None:
    block = um.Block(PAGE, shared=NAME)
    with pytest.warns(ResourceWarning):
        del block
    assert not os.path.exists(f"/dev/shm/{NAME}")
    done = run_python(f"import unimem as um; block = um.Block(4096, shared='{NAME}')")
    assert done.returncode == 0, done.stderr
    assert not os.path.exists(f"/dev/shm/{NAME}")


def test_a_name_that_belongs_to_somebody_else_by_now_stays() -> None:
    path = Path(f"/dev/shm/{NAME}")
    with um.Block(PAGE, shared=NAME):
        path.unlink()
        path.write_bytes(b"another's")
    assert path.read_bytes() == b"another's"
    path.unlink()


@pytest.mark.parametrize("shared", ["", "a/b", "..", 1, None, b"x"])
def test_wrong_names(shared: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="shared"):
        um.Block(PAGE, shared=shared)


def test_refused_named_blocks_leave_no_file() -> None:
    for options in ({"numa": "bind:1023", "strict": True}, {"nbytes": 2**50}):
        with pytest.raises((um.PlacementError, MemoryError)):
            um.Block(**({"nbytes": PAGE, "shared": NAME} | options))  # type: ignore[arg-type]
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
            script = """
                import sys
                import unimem as um
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


def test_a_sealed_copy_is_in_a_forked_child() -> None:
    with um.Block(PAGE) as block:
        block.as_array()[:] = 2
        with block.sealed_copy() as copy:
            assert in_child((copy.as_array() == 2).all)


# ---- fork ----


def closes(thing: um.Block | um.Tape) -> bool:
    thing.close()
    return thing.closed


@pytest.mark.parametrize("shared", [True, NAME], ids=["unnamed", "named"])
def test_shared_memory_is_left_out_of_a_child(shared: Any) -> None:
    with um.Block(16 * PAGE, shared=shared, warm=True) as block:
        block.as_array()[:] = 1
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
        ]
        for use in uses:
            assert in_child(partial(refuses, use))
        assert in_child(lambda: block.closed and "closed" in repr(block))
        address = block.address
        assert in_child(lambda: not proc_maps.is_mapped(address))
        assert in_child(partial(closes, block))
        with um.Tape(block) as tape, um.Block(PAGE) as private:
            tape.take_bytes(8)[:] = 5
            for use in (lambda: tape.take(8), lambda: tape.take_address(8), tape.clear, tape.mark):
                assert in_child(partial(refuses, use))
            assert in_child(partial(closes, tape))
            assert in_child(lambda: not private.as_array().any())
            assert (tape.take_bytes(8) == 1).all()
        if isinstance(shared, str):
            assert os.path.exists(f"/dev/shm/{shared}")  # no child has removed it
        assert (block.as_array()[8:] == 1).all()


def attach_in_child(path: str, pipe: Any) -> None:
    """Runs in the child of multiprocessing."""
    with um.Block.attach(path, writable=True) as block:
        block.as_array()[:] += 1
    pipe.send("done")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_multiprocessing_attach(method: str) -> None:
    context = multiprocessing.get_context(method)
    with um.Block(PAGE, shared=NAME) as block:
        block.as_array()[:] = 1
        ours, theirs = context.Pipe()
        process: Any = context.Process  # type: ignore[attr-defined]
        child = process(target=attach_in_child, args=(block.path, theirs))
        child.start()
        assert ours.recv() == "done"
        child.join()
        assert child.exitcode == 0
        assert (block.as_array() == 2).all()


def test_pickling_names_the_other_way() -> None:
    wanted = pytest.raises(TypeError, match=r"fileno\(\).*Block\.attach")
    with um.Block(PAGE, shared=True) as block, wanted:
        pickle.dumps(block)


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
