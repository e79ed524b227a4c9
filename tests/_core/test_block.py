"""Blocks: what is granted is what the kernel says, and views keep the memory."""

from __future__ import annotations

import gc
import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

import unimem as um
from conftest import Run
from support.kernel import proc_maps
from support.processes.at_once import at_once
from support.processes.child_checks import CHECKS
from support.processes.forks import counts_faults, in_child
from unimem._core.status import counters, ledger

pytestmark = pytest.mark.usefixtures("gives_memory_back")

PAGE = mmap.PAGESIZE
HUGE = proc_maps.huge_page_bytes()

needs_thp = pytest.mark.skipif(HUGE == 0, reason="this kernel gives no transparent huge pages")


# ---- size, placement, ledger ----


def test_sizes_are_text_as_well(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3 * PAGE))
    with um.Block.map(tmp_path / "file", nbytes="4K") as block:
        assert block.requested["nbytes"] == 4096
    with um.Block("1M", pages="4k") as block:
        assert block.release(0, "64K") == 64 << 10
        block.commit("1M")
    with um.Tape("1M") as tape:
        assert tape.take_bytes("2K").nbytes == 2048
        with pytest.raises(ValueError, match=r"nbytes: .*'2 elephants'"):
            tape.take_bytes("2 elephants")


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 3_000_001])
def test_size_is_rounded_up_to_pages_and_the_request_is_kept(nbytes: int) -> None:
    request = {"nbytes": nbytes, "pages": "4k", "numa": None, "lock": False, "shared": False}
    with um.Block(nbytes, pages="4k", warm=nbytes == PAGE) as block:
        assert block.nbytes == -(-nbytes // PAGE) * PAGE
        assert block.requested == request | {"reserve": nbytes}
        assert block.address % PAGE == 0
        assert not block.as_array().any()
        assert nbytes != PAGE or repr(block) == "Block('block', 4.0 KiB, 4k, 4.0 KiB in RAM)"


def test_a_block_is_a_mapping_of_its_own_between_guard_pages() -> None:
    with um.Block(3 * PAGE, pages="4k") as block, um.Block(3 * PAGE, pages="4k"):
        end = block.address + block.nbytes
        (own,) = proc_maps.mappings(block.address, block.nbytes)
        assert (own.start, own.end, own.access) == (block.address, end, "rw-p")
        for guard in (block.address - 1, end):
            assert [part.access for part in proc_maps.mappings(guard)] == ["---p"]


@pytest.mark.parametrize("category", ["weights", "scratch", "history", "staging", "other"])
def test_the_ledger_is_what_smaps_says(category: str, file: Path) -> None:
    before = ledger()[category]
    blocks = [um.Block(n, pages="4k", category=category) for n in (1, PAGE, 10 * PAGE + 1)]
    blocks.append(um.Block.map(file, category=category))
    size = sum(
        part.fields["Size"] for b in blocks for part in proc_maps.mappings(b.address, b.nbytes)
    )
    row = ledger()[category]
    assert row["n_mappings"] == before["n_mappings"] + 4
    assert row["mapped_bytes"] == before["mapped_bytes"] + size <= row["high_water_bytes"]
    for block in blocks:
        block.close()
    assert ledger()[category] == before | {"high_water_bytes": row["high_water_bytes"]}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"nbytes": 2**63 - 1}, (ValueError, MemoryError)),
        ({"pages": "3k"}, ValueError),
        ({"category": "sundries"}, ValueError),
        ({"warm": -1}, ValueError),
        ({"warm": 1.5}, ValueError),
        ({"colour": "red"}, TypeError),
    ],
)
def test_a_refused_block_leaves_nothing(options: dict[str, Any], error: Any) -> None:
    before = ledger()["other"]["mapped_bytes"]
    with pytest.raises(error):
        um.Block(**({"nbytes": PAGE} | options))
    assert ledger()["other"]["mapped_bytes"] == before


PR_SET_THP_DISABLE = 41


@pytest.mark.usefixtures("no_huge_pages")
def test_what_cannot_be_granted_warns_or_raises(run_python: Run) -> None:
    # For one process only, huge pages are switched off by prctl: the machine's own switch
    # (/sys/kernel/mm/transparent_hugepage/enabled) belongs to everybody on it.
    done = run_python(f"""{CHECKS}
import ctypes
assert ctypes.CDLL(None).prctl({PR_SET_THP_DISABLE}, 1, 0, 0, 0) == 0
for warm in (False, True):
    def make(pages="thp", **more):
        return um.Block(2 * MIB, pages=pages, warm=warm, **more)
    error = refused(
        um.PlacementError, lambda: make(strict=True, name="strict"), "strict", "huge pages",
        "granted 4k", "transparent_hugepage/enabled", "echo madvise",
    )
    assert isinstance(error, OSError)
    with warned(make, "granted 4k") as block:
        assert block.granted.pages == "4k" and block.granted.huge_bytes == 0
        assert block.granted.resident_bytes == (block.nbytes if warm else 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with make("auto", strict=True) as block:
            assert block.granted.pages == "4k"
""")
    assert done.returncode == 0, done.stderr


# ---- warming ----


@counts_faults
@pytest.mark.parametrize("threads", [1, 2])
def test_what_was_warmed_does_not_fault(threads: int) -> None:
    def faults_of_touching(block: um.Block) -> int:
        firsts = block.as_array()[::PAGE]
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        firsts[:] = 1
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    n_pages = 2048
    with um.Block(n_pages * PAGE, pages="4k") as cold:
        assert faults_of_touching(cold) >= n_pages
    # The kernel may take a page for a moment, to move it: seldom, and not in each of three rounds.
    faults = []
    for _ in range(3):
        with um.Block(n_pages * PAGE, pages="4k") as warm:
            warm.warm(threads)
            gc.collect()
            faults.append(faults_of_touching(warm))
    assert min(faults) == 0


def test_warming_changes_neither_contents_nor_affinity() -> None:
    with um.Block(3 << 20) as block:
        block.as_array()[::7] = 3
        before, allowed = block.as_array().copy(), os.sched_getaffinity(0)
        for threads in (None, 1, 2, 100, 2**40):
            block.warm(threads)
        assert (block.as_array() == before).all()
        assert os.sched_getaffinity(0) == allowed
        for threads in (0, -1):
            with pytest.raises(ValueError, match="threads"):
                block.warm(threads)


# ---- arrays ----


@pytest.mark.parametrize(
    "dtype", ["uint8", "float16", np.float32, np.dtype("i8"), "complex128", "bfloat16", ">i4"]
)
def test_arrays_are_views(dtype: Any) -> None:
    with um.Block(PAGE) as block:
        array = block.as_array(dtype, (2, 3), offset=64)
        assert array.shape == (2, 3)
        assert array.dtype == np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        assert proc_maps.address_of(array) == block.address + 64
        assert array.flags.carray
        assert not array.flags.owndata
        array[:] = 5
        assert (block.as_array(dtype, 6, offset=64) == 5).all()
        del array


def test_the_default_shape_is_all_that_fits() -> None:
    with um.Block(PAGE) as block:
        assert block.as_array("float32").shape == (PAGE // 4,)
        assert block.as_array("float64", offset=PAGE - 12 - 4).shape == (2,)
        assert block.as_array("uint8", offset=PAGE).shape == (0,)
        assert block.as_array("uint8", (), 3).shape == ()
        n: Any = np.int64(7)
        assert block.as_array("uint8", n).shape == (7,)
        assert block.as_array([("a", "<u4"), ("b", "u1", 3)]).shape == (PAGE // 7,)


SHAPES = [PAGE + 1, (2**40, 2**40), (0, 2**70), (np.int64(2**40),) * 2, (1,) * 65, -1, (2, -1)]
UNFIT: list[tuple[Any, ...]] = [("uint8", shape) for shape in SHAPES]
UNFIT += [("uint8", None, offset) for offset in (PAGE + 1, -1, 2**70)]
UNFIT += [("float32", 1, 2), ("float64", 1, PAGE - 4)]
UNFIT += [(dtype, 1) for dtype in ("<f16", object, "V0", [("a", object)])]


def test_arrays_that_do_not_fit() -> None:
    with um.Block(PAGE, name="small") as block:
        for arguments in UNFIT:
            match = "expected 'float16'" if arguments[0] == "<f16" else None
            with pytest.raises(ValueError, match=match):
                block.as_array(*arguments)
        for dtype, shape in (("uint8", 1.5), ("number", 1)):
            with pytest.raises(TypeError):
                block.as_array(dtype, cast(Any, shape))


def test_as_array_protocols() -> None:
    with um.Block(PAGE) as block:
        block.as_array()[:] = 9
        with memoryview(block) as view:
            assert (view.nbytes, view.format, view.readonly) == (PAGE, "B", False)
            view[0] = 1
        assert np.asarray(block)[0] == 1
        for array in (np.asarray(block), np.from_dlpack(cast(Any, block)), block.__array__()):
            assert proc_maps.address_of(array) == block.address
        assert proc_maps.address_of(np.array(block, copy=True)) != block.address
        assert block.__array__("float32").dtype == np.float32
        with pytest.raises(ValueError, match="as_array"):
            block.__array__("float32", copy=False)
        del array


# ---- lifetime ----

VIEWS: dict[str, Callable[[um.Block], Any]] = {
    "array": lambda b: b.as_array(),
    "slice of an array": lambda b: b.as_array()[10:20],
    "transposed array": lambda b: b.as_array("float32", (8, 16)).T[3:],
    "array of another dtype": lambda b: b.as_array().view("float16")[5:],
    "memoryview": memoryview,
    "slice of a memoryview": lambda b: memoryview(b)[5:].cast("B"),
    "asarray": np.asarray,
    "dlpack": np.from_dlpack,
    "frombuffer": lambda b: np.frombuffer(cast(Any, b), "float32"),
    "strided array": lambda b: np.asarray(b)[3:][::2],
}


def test_open_objects_at_exit_end_well(run_python: Run) -> None:
    script = """
        import unimem as um
        block = um.Block(1 << 16)
        tape = um.Tape(1 << 16)
        grid = um.Grid(64, 4)
        cell = grid.take()
        cache = um.KVCache(1, 1, 8, 4)
        layout = um.Layout(4096, 4096, 4096)
        views = [block.as_array(), tape.take(4), cell.as_array(), cache.layer(0), memoryview(block)]
        """
    quiet = run_python(script)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    told = run_python(script, "-W", "always::ResourceWarning")
    assert told.returncode == 0
    assert len([line for line in told.stderr.splitlines() if "Warning" in line]) >= 4
    for line in told.stderr.splitlines():
        assert "ResourceWarning: unclosed " in line, told.stderr


def test_fork_copies() -> None:
    with um.Block(1 << 16, warm=True) as block, um.Tape(4096) as tape:
        x, y = block.as_array(), tape.take(8)
        x[:] = y[:] = 1

        def changes_its_own() -> bool:
            x[:] = 2
            tape.clear()
            tape.take(8)[:] = 2
            return bool((x == 2).all() and (y == 2).all())

        assert in_child(changes_its_own)
        assert (x == 1).all()
        assert (y == 1).all()
        assert tape.used_bytes == 32


@pytest.mark.parametrize("make_view", VIEWS.values(), ids=VIEWS.keys())
def test_every_view_keeps_the_memory(make_view: Callable[[um.Block], Any]) -> None:
    with um.Block(PAGE) as block:
        block.as_array()[:] = 7
        address, view = block.address, make_view(block)
        with pytest.raises(BufferError, match="live"):
            block.close()
    # Leaving the with did not raise, and did not take the memory.
    assert block.closed
    assert proc_maps.is_mapped(address)
    assert bytes(view.tobytes())[:1] == b"\x07"
    del view
    gc.collect()
    assert not proc_maps.is_mapped(address)


def test_threads_may_use_blocks_at_the_same_time() -> None:
    def work(n: int) -> None:
        for i in range(30):
            with um.Block((1 + i % 3) * PAGE, warm=True, category="diagnostics") as block:
                block.as_array()[:] = n
                assert (block.as_array() == n).all()
                assert block.verify().resident_bytes == block.nbytes

    before = ledger()["diagnostics"]
    at_once(4, work)
    after = ledger()["diagnostics"]
    assert after | {"high_water_bytes": 0} == before | {"high_water_bytes": 0}


def test_looking_at_a_block_makes_no_system_call() -> None:
    with um.Block(PAGE) as block:
        block.verify()
        before = counters()
        for _ in range(10):
            assert block.granted
            assert block.address
            assert block.as_array("float32", (3, 4)) is not None
        assert counters() == before


# ---- files ----


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(range(256)) * 64 + b"end")
    return path


def test_a_mapped_file_is_read_only(file: Path) -> None:
    with um.Block.map(file) as block:
        assert block.nbytes == block.requested["nbytes"] == file.stat().st_size
        assert (block.as_array() == np.fromfile(file, "uint8")).all()
        assert not block.as_array().flags.writeable
        assert memoryview(block).readonly
        assert [part.access for part in proc_maps.mappings(block.address)] == ["r--s"]
        with pytest.raises(ValueError, match="read-only"):
            block.as_array()[0] = 1
        with pytest.raises(ValueError, match="read-only"):
            um.Tape(block)
        block.warm()
        proc_maps.assert_granted(block)
        assert block.granted.resident_bytes == -(-block.nbytes // PAGE) * PAGE


def test_a_part_of_a_file_and_a_private_one(file: Path) -> None:
    before = file.read_bytes()
    with um.Block.map(file, offset=PAGE, nbytes=10, name="part") as block:
        assert block.nbytes == 10
        assert bytes(memoryview(block)) == before[PAGE : PAGE + 10]
        assert "part" in repr(block)
    with um.Block.map(file, mode="c") as block:
        block.as_array()[:] = 0
        with um.Tape(block, name="over a file") as tape:
            tape.take(16)[:] = 1
    assert file.read_bytes() == before


RANGES: list[dict[str, Any]] = [{"offset": n} for n in (1, -PAGE, 2**70, 100 * PAGE)]
RANGES += [{"nbytes": n} for n in (0, -1, 64 * 256 + 4)]
RANGES += [{"mode": "w"}, {"category": "sundries"}, {"offset": PAGE, "nbytes": 2**63 - 1}]


@pytest.mark.parametrize("options", RANGES, ids=str)
def test_ranges_that_are_not_in_the_file(file: Path, options: dict[str, Any]) -> None:
    n_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match=r"expected|multiple|beyond the end"):
        um.Block.map(file, **options)
    assert len(os.listdir("/proc/self/fd")) == n_open


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        um.Block.map(tmp_path / "nowhere")
    with pytest.raises(OSError, match=str(tmp_path)):
        um.Block.map(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty"):
        um.Block.map(tmp_path / "empty")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="fifo"):  # and does not wait for somebody who writes
        um.Block.map(tmp_path / "fifo")


def test_a_mapping_needs_no_open_file(file: Path) -> None:
    n_open = len(os.listdir("/proc/self/fd"))
    with um.Block.map(os.fsencode(file)) as block:  # type: ignore[arg-type]
        assert len(os.listdir("/proc/self/fd")) == n_open
        file.unlink()
        assert block.as_array()[5] == 5
