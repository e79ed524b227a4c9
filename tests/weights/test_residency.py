"""Residency, compared with the kernel's page tables; warm, lock and evict."""

from __future__ import annotations

import copy
import ctypes
import errno
import mmap
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import unimem as um
from conftest import Run
from support.files import gguf_files as gf
from support.files.weight_bytes import MIB, drop_from_cache, locked_bytes, write
from support.kernel.memlock import DROP_LOCK
from support.project.checkout import ROOT
from unimem.system import limits
from unimem.weights import residency
from unimem.weights.opened import Weights
from unimem.weights.residency import Residency

pytestmark = pytest.mark.usefixtures("gives_memory_back")

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
# From much less than a page to many pages, without alignment.
FIGURES = ("nbytes", "resident_bytes", "mapped_bytes", "huge_bytes")
SIZES = (4, 96, 5000, 0, 32, 40_000, 8192, 12, 1_000_000, 64, 300_000, 77_776)


def open_cold(path: Path) -> Weights:
    """Open a mapping without any page in the cache, not even those of the header."""
    weights = um.open_weights(path, load="map")
    try:
        for file in weights.files:
            drop_from_cache(Path(file))
    except BaseException:
        weights.close()
        raise
    return weights


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf", *SIZES)


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    pytest.importorskip("gguf", reason="gguf splits the model: pip install '.[test]'")
    return gf.split(write(tmp_path / "model.gguf", *SIZES, *SIZES), len(SIZES))


def in_cache(path: Path) -> list[bool]:
    """Ask mincore for each page, through another mapping."""
    nbytes = path.stat().st_size
    n_pages = -(-nbytes // PAGE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        flags = (ctypes.c_ubyte * n_pages)()
        address = ctypes.c_void_p(view.ctypes.data)
        assert LIBC.mincore(address, ctypes.c_size_t(nbytes), flags) == 0
        del view
    return [bool(flag & 1) for flag in flags]


def in_tables(address: int, nbytes: int) -> list[bool]:
    """Return for each page whether this process maps it."""
    n_pages = -(-nbytes // PAGE)
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(address // PAGE * 8)
        entries = struct.unpack(f"<{n_pages}Q", pagemap.read(n_pages * 8))
    return [bool(entry >> 63) for entry in entries]


def covered(pages: list[bool], offset: int, nbytes: int) -> int:
    """Return the bytes of a range that lie in the chosen pages."""
    total = 0
    for i, chosen in enumerate(pages):
        low, high = max(offset, i * PAGE), min(offset + nbytes, (i + 1) * PAGE)
        total += max(0, high - low) if chosen else 0
    return total


def check_against_the_kernel(weights: Weights, look: Residency) -> None:
    """Compare with the kernel's figures for each file and tensor."""
    for path, block in zip(weights.files, weights.blocks, strict=True):
        size = Path(path).stat().st_size
        cache, tables = in_cache(Path(path)), in_tables(block.address, size)
        whole = look.by_file[path]
        assert (whole.nbytes, whole.resident_bytes) == (size, covered(cache, 0, size))
        assert whole.mapped_bytes == covered(tables, 0, size) == sum(whole.nodes.values())
        for tensor in weights.tensors.values():
            if tensor.file == path:
                part = look.tensors[tensor.name]
                assert part.nbytes == tensor.nbytes
                assert part.resident_bytes == covered(cache, tensor.offset, tensor.nbytes)
                assert part.mapped_bytes == covered(tables, tensor.offset, tensor.nbytes)
                assert sum(part.nodes.values()) == part.mapped_bytes


def warm_pages(weights: Weights, n: int, seed: int = 0) -> None:
    """Bring in some pages without their neighbours."""
    rng = np.random.default_rng(seed)
    for block in weights.blocks:
        block.advise("random")
        for page in rng.choice(-(-block.nbytes // PAGE), n, replace=False).tolist():
            block._warm_range(page * PAGE, 1)


@pytest.mark.parametrize("pages_at_once", [1, 3, 1 << 22])
def test_bytes_are_those_of_the_page_tables(
    model: Path, monkeypatch: pytest.MonkeyPatch, pages_at_once: int
) -> None:
    monkeypatch.setattr(residency, "_SLICE", pages_at_once)
    with open_cold(model) as weights:
        check_against_the_kernel(weights, weights.residency())
        warm_pages(weights, 60)
        look = weights.residency()
        check_against_the_kernel(weights, look)
        assert 0 < look.mapped_bytes < look.nbytes
        assert list(look.tensors) == list(weights.tensors)
        assert look.unknown_bytes == look.locked_bytes == 0


@pytest.mark.parametrize("passed_on", [lambda o: pickle.loads(pickle.dumps(o)), copy.deepcopy])
def test_a_model_of_several_files(split: list[Path], passed_on: Callable[[Any], Any]) -> None:
    with open_cold(split[1]) as weights:
        warm_pages(weights, 40)
        look = weights.residency()
        check_against_the_kernel(weights, look)
        assert list(look.by_file) == list(map(str, split))
        assert len(look.tensors) == 2 * len(SIZES)
        for name in FIGURES:
            assert getattr(look, name) == sum(getattr(p, name) for p in look.by_file.values())
        again = passed_on(look)
        assert again == look
        assert [again.ranges(path, 9) for path in weights.files] == [
            look.ranges(path, 9) for path in weights.files
        ]
        assert passed_on(look.tensors["t14"]) == look.tensors["t14"]


def test_ranges_are_the_file(model: Path) -> None:
    with open_cold(model) as weights:
        warm_pages(weights, 60)
        look = weights.residency()
        whole = look.by_file[str(model)]
        for n in (1, 7, 1000):
            ranges = look.ranges(str(model), n)
            sizes = [part.nbytes for part in ranges]
            assert len(ranges) == n
            assert max(sizes) - min(sizes) <= 1
            for name in FIGURES:
                assert sum(getattr(part, name) for part in ranges) == getattr(whole, name)
        with pytest.raises(ValueError, match="at least 1 range, got 0"):
            look.ranges(str(model), 0)
        with pytest.raises(TypeError):
            look.ranges(str(model), 2.5)  # type: ignore[arg-type]
        with pytest.raises(KeyError):
            look.ranges("another", 3)
    small = write(model.with_name("small.gguf"), 32)
    with um.open_weights(small, load="map") as weights:
        look = weights.residency()
        assert len(look.ranges(str(small), look.nbytes + 5)) == look.nbytes


@pytest.mark.locks
def test_a_copy_in_huge_pages(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", MIB, 100, 3 * MIB, 4)
    with um.open_weights(path, load="copy", pages="thp") as weights:
        (block,) = weights.blocks
        if block.verify().huge_bytes < block.nbytes:
            pytest.skip("this kernel gave no transparent huge pages")
        look = weights.residency()
        for name, part in look.tensors.items():
            nbytes = weights.tensors[name].nbytes
            assert part == Residency(nbytes, nbytes, nbytes, nbytes, 0, 0, {0: nbytes})
        with pytest.raises(ValueError, match=r"memory of their own.*load='map'"):
            weights.evict()
        weights.lock()
        assert weights.residency().locked_bytes == look.nbytes
        assert block.verify().locked_bytes == block.nbytes


def test_huge_pages_of_the_page_cache(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", 20 * MIB, 100, 27 * MIB)
    with open_cold(path) as weights:
        weights.warm(threads=1)  # some file systems bring in huge pages by themselves
        huge = weights.blocks[0].verify().huge_bytes
        if huge == 0:
            pytest.skip(f"the file system of {tmp_path} gives no huge pages")
        look = weights.residency()
        assert look.huge_bytes == huge
        assert sum(part.huge_bytes for part in look.tensors.values()) <= huge
        ranges = look.ranges(str(path), 11)
        assert sum(part.huge_bytes for part in ranges) == huge


@pytest.mark.usefixtures("eight_huge_pages")
def test_in_reserved_huge_pages(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with um.open_weights(model, load="copy", pages="2m", strict=True) as weights:
        for part in weights.residency().tensors.values():
            n = part.nbytes
            # They never leave RAM.
            assert part == Residency(n, n, n, n, n, 0, {0: n})
    full = limits.Limit("memory of the machine", 10 * MIB, 10 * MIB, "take less")
    with (
        um.stage(model, backing="hugetlb") as staged,
        um.open_weights(staged.path, load="map") as weights,
    ):
        look = weights.residency()
        nbytes = look.nbytes
        assert look == Residency(nbytes, 0, 0, 0, 0, nbytes, {}, look.tensors, look.by_file)
        # It lies in memory already, and needs no room.
        monkeypatch.setattr(limits, "memory_limits", lambda: (full,))
        weights.warm()
        look = weights.residency()
        assert look.mapped_bytes == look.huge_bytes == look.locked_bytes == nbytes
        assert look.unknown_bytes == 0
        weights.lock()
        weights.lock(False)
        # Its pages cannot leave memory.
        assert weights.evict() == 0
        assert weights.residency().unknown_bytes == nbytes


@pytest.mark.parametrize("backing", ["tmpfs", "shm", "memfd"])
def test_staged_models_stay_in_ram(model: Path, backing: Any) -> None:
    try:
        staged = um.stage(model, backing=backing)
    except um.PlacementError as error:
        pytest.skip(f"nothing can be staged so: {error}")
    with staged, um.open_weights(staged.path, load="map") as weights:
        look = weights.residency()
        assert (look.resident_bytes, look.mapped_bytes) == (look.nbytes, 0)
        weights.warm()
        assert weights.residency().mapped_bytes == look.nbytes
        assert weights.evict() == 0
        assert weights.residency() == look


def test_weights_on_a_tape(model: Path) -> None:
    with um.Tape(4 * MIB, warm=True) as tape, um.open_weights(model, tape=tape) as weights:
        look = weights.residency()
        assert all(part.mapped_bytes == part.nbytes for part in look.tensors.values())
        assert look.nbytes < tape.total_bytes
        with pytest.raises(ValueError, match=r"lie on a tape.*lock=True"):
            weights.lock()


@pytest.fixture
def of_root(open_folder: Path) -> Path:
    """A model that root owns and others may read."""
    if os.geteuid() != 0:
        pytest.skip("a file of another user needs root")
    path = write(open_folder / "model.gguf", *SIZES)
    path.chmod(0o644)
    drop_from_cache(path)
    return path


def test_figures_hidden_from_other_users(of_root: Path, run_python: Run) -> None:
    run = run_python(f"""
        import ctypes, os
        import unimem as um
        from unimem.weights import residency
        os.seteuid(65534)
        assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0  # PR_SET_DUMPABLE: /proc/self is ours
        with um.open_weights({str(of_root)!r}, load="map") as weights:
            look = weights.residency()
            assert (look.resident_bytes, look.unknown_bytes) == (0, look.nbytes), look
            weights.blocks[0]._warm_range(0, {2 * PAGE})
            look = weights.residency()
            assert look.resident_bytes == look.mapped_bytes >= {2 * PAGE}, look
            assert look.unknown_bytes == look.nbytes - look.mapped_bytes, look
            assert weights.evict() == 0  # it cannot be told
            weights.warm()
            assert weights.residency().mapped_bytes == look.nbytes
        """)
    assert run.returncode == 0, run.stderr


def test_a_process_that_may_not_read_its_own_page_tables(of_root: Path, run_python: Run) -> None:
    os.chown(of_root, 65534, 65534)
    run = run_python(f"""
        import os, pytest
        import unimem as um
        from unimem.weights import residency  # while it may be read
        os.setgid(65534)
        os.setuid(65534)
        with pytest.raises(PermissionError):
            open("/proc/self/pagemap", "rb")
        with um.open_weights({str(of_root)!r}, load="map") as weights:
            weights.evict()  # what reading the header has brought
            weights.warm()
            look = weights.residency()
            assert (look.resident_bytes, look.mapped_bytes) == (look.nbytes, 0), look
            assert (look.nodes, look.unknown_bytes) == ({{}}, 0)
            assert weights.evict() == look.nbytes
            assert weights.residency().resident_bytes == 0
        with um.open_weights({str(of_root)!r}, load="copy") as weights:
            weights.warm()
            look = weights.residency()
            assert look.resident_bytes == look.nbytes
        """)
    assert run.returncode == 0, run.stderr


def test_nodes_may_be_hidden(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with um.open_weights(model, load="map", warm=True) as weights:
        (part,) = weights._parts

        def pages(offset: int, nbytes: int, nodes: bool = False) -> Any:
            if nodes:
                raise um.PlacementError(errno.EPERM, "move_pages")
            return part.memory.block._pages(offset, nbytes)

        memory = part.memory._replace(block=SimpleNamespace(_pages=pages))  # type: ignore[arg-type]
        shown = str(weights.residency())
        assert shown == "1.4 MiB of 1.4 MiB in RAM, 1.4 MiB mapped, 1.4 MiB on node 0"
        monkeypatch.setattr(weights, "_parts", (part._replace(memory=memory),))
        look = weights.residency()
        assert "tensors" not in repr(look)
        assert (look.mapped_bytes, look.nodes) == (look.nbytes, {})
        assert look.tensors["t2"].nodes == {}


def test_only_resident_pages_are_mapped(model: Path) -> None:
    with open_cold(model) as weights:
        warm_pages(weights, 60)
        for block in weights.blocks:
            block.advise("dontneed")  # it stays in the page cache
        before = weights.residency()
        residency.map_resident(weights)
        after = weights.residency()
        assert before.mapped_bytes == 0 < before.resident_bytes < before.nbytes
        assert after.mapped_bytes == after.resident_bytes == before.resident_bytes
        check_against_the_kernel(weights, after)


def test_warm_reports_progress(split: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "_WARM_BYTES", 100_000)
    monkeypatch.setattr(residency, "_TICK_SECONDS", 0.0)
    calls: list[tuple[int, int]] = []
    with um.open_weights(split[0], load="map") as weights:
        weights.warm(threads=2, progress=lambda *call: calls.append(call))
        look = weights.residency()
        assert look.mapped_bytes == look.nbytes == sum(path.stat().st_size for path in split)
        assert calls == sorted(set(calls))
        assert len(calls) > 20
        assert {total for _, total in calls} == {look.nbytes}
        assert calls[-1] == (look.nbytes, look.nbytes)
        with pytest.raises(ValueError, match="threads"):
            weights.warm(threads=0)


@pytest.mark.parametrize(("load", "total"), [("map", 32), ("copy", 0)])
def test_warming_an_empty_model_reports_the_end(tmp_path: Path, load: Any, total: int) -> None:
    told = []
    with um.open_weights(write(tmp_path / "empty.gguf"), load=load) as weights:
        weights.warm(progress=lambda *figures: told.append(figures))
    assert told == [(total, total)]


def test_an_error_of_progress_ends_warming(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "_WARM_BYTES", 16 * PAGE)
    with open_cold(model) as weights:
        weights.blocks[0].advise("random")

        def stop(done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            weights.warm(progress=stop)
        assert weights.residency().mapped_bytes == 16 * PAGE


@pytest.mark.locks
def test_a_model_that_does_not_fit_is_not_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = limits.Limit("memory of the machine", 10 * MIB, 9 * MIB, "take less")
    locked = locked_bytes()
    with open_cold(model) as weights:
        before = weights.residency().resident_bytes
        with monkeypatch.context() as patch:
            patch.setattr(limits, "memory_limits", lambda: (full,))
            for call in (weights.warm, weights.lock):
                with pytest.raises(um.CapacityError, match="memory of the machine has room for"):
                    call()
            assert (weights.residency().resident_bytes, locked_bytes()) == (before, locked)
        weights.warm()
        monkeypatch.setattr(limits, "memory_limits", lambda: (full,))  # for pages not in RAM
        weights.warm()
        weights.lock()
        weights.lock(False)


@pytest.mark.locks
def test_a_truncated_file(model: Path) -> None:
    with um.open_weights(model, load="map") as weights:
        os.truncate(model, 100_000)
        assert weights.residency().mapped_bytes == 0
        for call in (weights.warm, weights.lock):
            with pytest.raises(OSError, match="shorter") as raised:
                call()
            assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(model))
        assert weights.residency().locked_bytes == 0
        with pytest.raises(OSError, match="replaced or written to") as raised:
            weights.evict()
        assert raised.value.filename == str(model)


@pytest.mark.locks
def test_lock_at_once_on_fault_and_unlock(split: list[Path]) -> None:
    before = locked_bytes()
    with open_cold(split[0]) as weights:
        whole = sum(-(-block.nbytes // PAGE) * PAGE for block in weights.blocks)
        for block in weights.blocks:
            block.advise("random")
        weights.lock("onfault")
        look = weights.residency()
        assert look.locked_bytes == look.mapped_bytes == 0
        assert locked_bytes() == before + whole
        weights.blocks[1]._warm_range(0, PAGE)
        look = weights.residency()
        assert look.locked_bytes == look.mapped_bytes == PAGE
        weights.lock()
        look = weights.residency()
        assert look.locked_bytes == look.nbytes
        assert all(part.locked_bytes == part.nbytes for part in look.tensors.values())
        with pytest.raises(ValueError, match="locked in RAM: lock\\(False\\) first"):
            weights.evict()
        assert weights.residency() == look
        weights.lock(False)
        assert locked_bytes() == before
        assert weights.residency().locked_bytes == 0
        for wrong in ("now", None, 2):
            with pytest.raises(ValueError, match="expected False, True or 'onfault'"):
                weights.lock(wrong)  # type: ignore[arg-type]


@pytest.mark.locks
def test_all_files_are_locked_or_none(split: list[Path], run_python: Run) -> None:
    run = run_python(
        f"""{DROP_LOCK}
import pytest
from support.files.weight_bytes import locked_bytes

weights = um.open_weights({str(split[0])!r}, load="map")
sizes = [-(-block.nbytes // {PAGE}) * {PAGE} for block in weights.blocks]
limit_memlock(sizes[0] + sizes[1] // 2)
resident = weights.residency().resident_bytes

def refusal(how):
    with pytest.raises(um.PlacementError) as caught:
        weights.lock(how)
    return caught.value

for how in (True, "onfault"):
    text = str(refusal(how))
    for part in ("locked memory (memlock) has room for", "ulimit -l", {str(split[1])!r}):
        assert part in text, text
    assert f"lock={{how!r}} needs" in text, text
    assert locked_bytes() == 0
    assert weights.residency().resident_bytes == resident, "what is refused is refused at once"
real, limits.memlock = limits.memlock, lambda: None
error = refusal("onfault")  # what only the kernel knows it says itself
assert "mlock2: Cannot allocate memory: 'ulimit -l'" in str(error), error
assert error.errno == 12
assert locked_bytes() == 0
limits.memlock = real
with pytest.warns(um.PlacementWarning, match="locking"):
    um.open_weights({str(split[0])!r}, load="map", lock=True).close()
weights.blocks[0]._lock("onfault")
refusal(True)
assert locked_bytes() == sizes[0], "what was locked before stays so"
weights.close()
""",
        PYTHONPATH=str(ROOT / "tests"),
    )
    assert run.returncode == 0, run.stderr


def test_evict_tells_what_left_the_page_cache(split: list[Path]) -> None:
    with open_cold(split[0]) as weights:
        view = weights.tensors["t20"].as_array()
        data = view.copy()
        warm_pages(weights, 60)
        resident = weights.residency().resident_bytes
        assert weights.evict() == resident > 0
        look = weights.residency()
        assert look.resident_bytes == look.mapped_bytes == 0
        assert not any(any(in_cache(path)) for path in split)
        assert weights.evict() == 0
        # Arrays still work: the file is read again.
        assert np.array_equal(view, data)
        assert weights.residency().resident_bytes >= view.nbytes


def test_pages_of_other_processes_stay(model: Path) -> None:
    script = f"""
import mmap, sys
with open({str(model)!r}, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
    sum(mapped[::{PAGE}])
    print("ready", flush=True)
    sys.stdin.read()
"""
    with open_cold(model) as weights:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", script], **pipes) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"
            weights.warm()
            assert weights.evict() == 0
            look = weights.residency()
            assert (look.resident_bytes, look.mapped_bytes) == (look.nbytes, 0)
            other.communicate(timeout=60)
        assert weights.evict() > 0  # all but what the kernel itself has dropped meanwhile
        assert weights.residency().resident_bytes == 0


def test_evict_writes_what_is_not_on_the_disk(model: Path) -> None:
    with um.open_weights(model, load="map") as weights:  # which has just been written
        assert weights.evict() == model.stat().st_size
        assert not any(in_cache(model))


def test_a_replaced_file_is_left_alone(split: list[Path]) -> None:
    with um.open_weights(split[0], load="map") as weights:
        weights.warm()
        split[1].rename(split[1].with_name("away"))
        shutil.copy(split[0], split[1])
        with pytest.raises(OSError, match="replaced or written to") as raised:
            weights.evict()
        assert raised.value.errno == errno.ESTALE
        # The other files stay, too.
        assert weights.residency().mapped_bytes == sum(block.nbytes for block in weights.blocks)
