"""Loading weights: each mode, the choice of `auto`, missing room, and loads that fail."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from conftest import Run
from support.files import gguf_files as gf
from support.files import safetensors_files as st
from support.files.weight_bytes import (
    LOADS,
    MIB,
    READS,
    cached_bytes,
    check,
    drop_from_cache,
    mapped_bytes,
    write,
    write_hole,
)
from support.kernel.cgroups import small_cgroup
from support.processes import interrupts
from unimem.system.limits import HugePool
from unimem.system.policy import check_options
from unimem.weights import loading
from unimem.weights.files import open_model
from unimem.weights.opened import open_weights

pytestmark = pytest.mark.usefixtures("gives_memory_back", "leaves_nothing")

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
Patch = pytest.MonkeyPatch


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of some MiB whose tensors are not whole pages."""
    return write(tmp_path / "model.gguf", 3 * MIB + 1, 5000, 2 * MIB)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    pytest.importorskip("gguf", reason="gguf splits the model: pip install '.[test]'")
    return gf.split(write(tmp_path / "m.gguf", 100_000, 1, 70_000, 4096, 5 * MIB), 2)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("threads", [None, 1, 5])
def test_every_mode_reads_the_file(path: Path, parts: list[Path], load: Any, threads: Any) -> None:
    for file in (path, parts[0]):
        with open_weights(file, load=load, threads=threads) as weights:
            assert (weights.load, weights.load_reason) == (load, "it was asked for")
            check(weights)


@pytest.mark.parametrize("load", READS)
def test_a_copy_is_a_block_of_its_own(path: Path, parts: list[Path], load: Any) -> None:
    for file in (path, parts[0]):
        with open_weights(file, load=load, pages="4k") as weights:
            (block,) = weights.blocks
            assert weights.mapped_bytes == block.nbytes
            # At most a page before the data of each file, and one behind it.
            assert 0 <= block.nbytes - weights.nbytes < 3 * 4096 * len(weights.files)
            assert block.verify().resident_bytes == block.nbytes
            assert block.category == "weights"
            for tensor in weights.tensors.values():
                assert tensor.address % 4096 == tensor.offset % 4096


@pytest.mark.parametrize("load", LOADS)
def test_nothing_of_an_array_can_be_written(tmp_path: Path, load: Any) -> None:
    file = tmp_path / "model.safetensors"
    # The second tensor is not aligned.
    file.write_bytes(st.write({"a": ("U8", (1,)), "b": ("F32", (2,))}))
    with open_weights(file, load=load) as weights:
        for tensor in weights.tensors.values():
            array: Any = tensor.as_array()
            while isinstance(array, np.ndarray):
                assert not array.flags.writeable
                array = array.base
        del array


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("shapes", [[], [(4, 0)]], ids=["no tensors", "an empty one"])
def test_a_model_without_data(tmp_path: Path, load: Any, shapes: list[tuple[int, ...]]) -> None:
    rows = [gf.tensor("t", ne, gf.F32, 0) for ne in shapes]
    file = tmp_path / "empty.gguf"
    file.write_bytes(gf.with_data(gf.head(len(rows), 0), *rows, nbytes=0)[0])
    told: list[tuple[int, int]] = []
    with open_weights(file, load=load, progress=lambda *n: told.append(n)) as weights:
        assert weights.nbytes == 0
        assert [t.as_array().shape for t in weights.tensors.values()] == [(0, 4)] * len(rows)
    assert all(done == total < 4096 for done, total in told)


def test_direct_leaves_the_page_cache_as_it_was(tmp_path: Path) -> None:
    file = write(tmp_path / "large.gguf", 8 * MIB)
    drop_from_cache(file)
    with open_weights(file, load="direct") as weights:
        # The header is read through it, without reading ahead.
        assert cached_bytes(file) < MIB
        check(weights)
    with open_weights(file, load="copy"):
        assert cached_bytes(file) >= file.stat().st_size


def test_a_file_system_without_direct_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = os.open

    def without(name: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument", name)
        return true(name, flags, *rest, **options)

    monkeypatch.setattr(os, "open", without)
    with pytest.warns(um.PlacementWarning, match=r"load='direct'.*O_DIRECT.*load='copy'") as caught:
        weights = open_weights(path, load="direct")
    with weights:
        assert weights.load == "copy"
        assert "O_DIRECT" in weights.load_reason
        check(weights)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(um.PlacementError, match="O_DIRECT"):
        open_weights(path, load="direct", strict=True)
    # `auto` needs no warning.
    monkeypatch.setattr(loading, "cached_bytes", lambda model: 0)
    with open_weights(path, numa="preferred:0") as weights:
        assert weights.load == "copy"
        assert "O_DIRECT" in weights.load_reason


def needs_huge_pages(pages: str | None) -> None:
    if pages == "thp" and (not THP.exists() or "[never]" in THP.read_text()):
        pytest.skip("this system gives no transparent huge pages")


@pytest.mark.parametrize(
    ("placement", "cached", "load", "reason"),
    [
        ({}, 0, "map", "a mapping shares the page cache"),
        ({"pages": "4k"}, 0, "map", "shares the page cache"),
        pytest.param(
            {"lock": "onfault", "warm": True}, 0, "map", "page cache", marks=pytest.mark.locks
        ),
        ({"pages": "thp"}, 0, "direct", "pages='thp'.*0% of the file"),
        ({"pages": "thp"}, 0.49, "direct", "49% of the file"),
        ({"pages": "thp"}, 0.51, "copy", "51% of the file are in the page cache"),
        ({"numa": "preferred:0"}, 1, "copy", "numa='preferred:0' cannot be had.*100%"),
        ({"numa": "interleave", "pages": "thp"}, 0, "direct", "pages='thp'"),
    ],
)
def test_auto(
    path: Path, monkeypatch: Patch, placement: Any, cached: float, load: str, reason: str
) -> None:
    needs_huge_pages(placement.get("pages"))
    size = path.stat().st_size
    monkeypatch.setattr(loading, "cached_bytes", lambda model: int(cached * size))
    monkeypatch.setattr(loading, "_file_system", lambda file: "ext4")
    with open_weights(path, **placement) as weights:
        assert weights.load == load
        assert re.search(reason, weights.load_reason), weights.load_reason
        check(weights)


NETWORKS = "nfs nfs4 cifs smb3 smbfs 9p ceph lustre orangefs fuse fuse.sshfs virtiofs vboxsf"
DISKS = ["fuseblk", "ext4", "xfs", "tmpfs", "overlay", ""]


@pytest.mark.parametrize("kind", [*NETWORKS.split(), *DISKS])
def test_auto_over_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = write(tmp_path / "small.gguf", 5000)
    monkeypatch.setattr(loading, "cached_bytes", lambda model: 0)
    monkeypatch.setattr(loading, "_file_system", lambda file: kind)
    with open_weights(path) as weights, open_weights(path, load="map") as mapped:
        assert (weights.load, mapped.load) == ("map" if kind in DISKS else "direct", "map")
        assert (f"a mapping on {kind} would wait" in weights.load_reason) == (kind not in DISKS)


def test_one_file_of_a_network_decides(parts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        loading, "_file_system", lambda file: "nfs4" if file.path == str(parts[-1]) else "ext4"
    )
    with open_weights(parts[0]) as weights:
        assert weights.load != "map"


def test_files_that_lie_in_memory(path: Path) -> None:
    if not os.path.ismount("/dev/shm"):
        pytest.skip("/dev/shm is no mount here")
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        open_weights(shutil.copy(path, folder)) as weights,
    ):
        assert loading._file_system(weights._parts[0].file) == "tmpfs"
        assert weights._parts[0].file.in_memory


def no_room(patch: pytest.MonkeyPatch, free: int = 0) -> None:
    """Pretend that `free` pages are in the pool, and no other memory."""
    pool = HugePool(2 * MIB, free, free, 0, 0, {0: (free, free)})
    patch.setattr("unimem.system.limits.available_bytes", lambda: MIB)
    patch.setattr("unimem.system.limits.huge_pools", lambda: {"2m": pool})


@pytest.mark.parametrize("pages", ["thp", "2m"])
def test_auto_maps_what_cannot_fit(path: Path, monkeypatch: pytest.MonkeyPatch, pages: Any) -> None:
    needs_huge_pages(pages)
    no_room(monkeypatch)
    with pytest.warns(um.PlacementWarning, match=r"load='auto' maps .*does not fit") as caught:
        weights = open_weights(path, pages=pages)
    assert len(caught) == 1
    with weights:
        assert weights.load == "map"
        assert "does not fit into 1.0 MiB" in weights.load_reason
        check(weights)
    # On a file system of a network, no wish is refused: the reason is enough.
    monkeypatch.setattr(loading, "_file_system", lambda file: "nfs4")
    with open_weights(path) as weights:
        assert weights.load == "map"
        assert re.search("nfs4.*does not fit", weights.load_reason), weights.load_reason


def test_a_copy_in_a_pool_needs_no_other_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_room(monkeypatch, free=4)
    with open_model(path) as model:
        for placement in ({"pages": "2m"}, {"pages": "auto", "numa": "preferred:0"}):
            choice = loading.choose(model, "auto", None, placement)  # type: ignore[arg-type]
            assert choice.mode in READS


def test_auto_and_a_hidden_page_cache(path: Path, open_folder: Path, run_python: Run) -> None:
    if os.geteuid() != 0:
        pytest.skip("a file of another user needs root")
    copy = Path(shutil.copy(path, open_folder))
    copy.chmod(0o644)
    told = run_python(f"""
        import ctypes, os, warnings
        from unimem.weights.opened import open_weights
        warnings.simplefilter("ignore")
        open_weights({str(path)!r}, numa="preferred:0").close()  # so that all is imported
        os.seteuid(65534)
        assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0  # PR_SET_DUMPABLE: /proc/self is ours
        with open_weights({str(copy)!r}, numa="preferred:0") as weights:
            print(weights.load, weights.load_reason)
        """)
    assert told.returncode == 0, told.stderr
    assert re.search(
        r"^(direct|copy) .*; 0% .*as far as the kernel tells this user", told.stdout
    ), told.stdout


@pytest.mark.parametrize("pages", ["thp", "2m"])
def test_a_mapping_warns_of_missing_placement(path: Path, pages: Any) -> None:
    text = r"page cache's: load='copy' or 'direct'"
    with pytest.warns(um.PlacementWarning, match=text) as caught:
        open_weights(path, load="map", pages=pages).close()
    assert len(caught) == 1
    with pytest.raises(um.PlacementError, match=text):
        open_weights(path, load="map", strict=True, pages=pages)
    open_weights(path, load="map", pages="4k", strict=True).close()


@pytest.mark.locks
def test_a_mapping_is_warmed_and_locked(parts: list[Path]) -> None:
    with open_weights(parts[0], load="map", warm=2, lock="onfault") as weights:
        resident = weights.residency()
        assert resident.resident_bytes == resident.nbytes == weights.mapped_bytes
        for block in weights.blocks:
            assert block.verify().locked_bytes > 0


@pytest.mark.parametrize("advice", ["willneed", "sequential", "random"])
def test_advice_is_for_mapped_files(path: Path, advice: Any) -> None:
    for load in READS:
        with pytest.raises(ValueError, match=f"advice='{advice}' is for mapped files"):
            open_weights(path, load=load, advice=advice)
    mapped: list[Any] = ["auto", "map"]
    for load in mapped:
        with open_weights(path, load=load, advice=advice) as weights:
            check(weights)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"page": "thp"}, TypeError, "page: no such option; placement is pages, numa"),
        *(({name: 3}, TypeError, f"{name}: no such option") for name in ("fd", "name", "category")),
        ({"pages": "7m"}, ValueError, "pages: expected one of"),
        *(({name: "x"}, ValueError, f"{name}: expected") for name in ("lock", "strict", "warm")),
        ({"threads": 0}, ValueError, "threads: expected an integer from 1 on"),
        ({"advice": "soon"}, ValueError, "advice: expected one of"),
        *(
            ({"load": load}, ValueError, "load: expected one of auto, map, copy, direct")
            for load in ("mmap", None, True)
        ),
    ],
    ids=str,
)
def test_invalid_options(path: Path, options: Any, kind: Any, text: str) -> None:
    for load in ["auto", *LOADS]:
        with pytest.raises(kind, match=text):
            open_weights(path, **{"load": load} | options)
    if not options.keys() & {"threads", "advice", "progress", "load"}:
        with pytest.raises(kind, match=text):
            check_options(options)


@pytest.mark.parametrize("load", ["auto", *READS])
def test_weights_on_a_tape(path: Path, parts: list[Path], load: Any) -> None:
    with um.Tape(32 * MIB) as tape:
        first = tape.take_bytes(100)
        first[:] = 7
        for file in (path, parts[0]):
            used = tape.used_bytes
            with open_weights(file, load=load, tape=tape) as weights:
                assert weights.load in READS
                assert load != "auto" or "a tape was given" in weights.load_reason
                assert weights.blocks == (tape.block,)
                assert tape.used_bytes - used < weights.mapped_bytes + 4096
                assert weights.mapped_bytes < weights.nbytes + 3 * 4096 * len(weights.files)
                check(weights)
                with pytest.raises(BufferError):
                    tape.close()
        assert (first == 7).all()
        # The memory stays the tape's, and an array keeps it.
        with open_weights(path, load=load, tape=tape) as weights:
            array = weights.tensors["t2"].as_array()
            expected = array.copy()
        assert np.array_equal(array, expected)
        del first
    assert np.array_equal(array, expected)


def clear_and_take(tape: um.Tape, mark: int) -> None:
    tape.clear()
    tape.take_bytes(15 * MIB)


TAKEN_BACK: dict[str, Callable[[um.Tape, int], object]] = {
    "clear": lambda tape, mark: tape.clear(),
    "rewind": lambda tape, mark: tape.rewind(mark + 1),
    "clear, and others take it": clear_and_take,
    "exit": lambda tape, mark: tape.__exit__(),
}


@pytest.mark.parametrize("name", TAKEN_BACK)
def test_taking_the_tape_back_closes_the_weights(path: Path, name: str) -> None:
    with um.Tape(16 * MIB) as tape:
        tape.take_bytes(100)
        tape.keep()
        mark = tape.mark()
        weights = open_weights(path, tape=tape)
        tensor = weights.tensors["t0"]
        tape.rewind(tape.used_bytes)  # nothing of it
        check(weights)
        TAKEN_BACK[name](tape, mark)
        assert weights.closed
        text = "closed" if name == "exit" else "Tape 'tape', which took the memory back"
        for use in (lambda: weights.tensors, weights.residency, *uses_of(tensor)):
            with pytest.raises(um.ClosedError, match=text):
                use()
        weights.close()


def uses_of(tensor: um.Tensor) -> list[Callable[[], object]]:
    return [lambda: tensor.address, tensor.as_array, tensor.dequantize, tensor.__dlpack__]


def test_kept_weights_stay_open(path: Path) -> None:
    with um.Tape(32 * MIB) as tape, open_weights(path, tape=tape) as weights:
        tape.keep()
        with tape.frame():
            open_weights(path, tape=tape)  # collected, and not told
            other = open_weights(path, tape=tape)
        assert other.closed
        tape.clear()
        check(weights)


@pytest.mark.parametrize("on_a_tape", [False, True])
@pytest.mark.parametrize("leave", [um.Weights.close, lambda w: w.__exit__(None, None, None)])
def test_tensors_of_closed_weights(path: Path, leave: Any, on_a_tape: bool) -> None:
    with um.Tape(16 * MIB) as tape:
        weights = open_weights(path, tape=tape if on_a_tape else None)
        tensor = weights.tensors["t0"]
        assert tensor.as_array().nbytes == tensor.nbytes
        leave(weights)
        for use in uses_of(tensor):
            with pytest.raises(um.ClosedError, match="are closed"):
                use()


def test_a_tape_refuses(path: Path) -> None:
    with um.Tape(4 * MIB) as tape, um.Tape(16 * MIB) as frozen:
        tape.take_bytes(100)
        frozen.freeze()
        refusals: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"tape": tape}, um.TapeFull, "."),
            ({"tape": tape, "load": "map"}, ValueError, "load='map' maps the file"),
            ({"tape": tape, "pages": "4k", "lock": True}, ValueError, "pages, lock: .* already"),
            ({"tape": tape.block}, TypeError, r"expected a unimem\.Tape, got Block"),
            ({"tape": frozen}, um.FrozenError, "frozen"),
        ]
        for options, kind, text in refusals:
            with pytest.raises(kind, match=text) as caught:
                open_weights(path, **options)
            assert getattr(caught.value, "limit", tape.total_bytes) == tape.total_bytes
        assert (tape.used_bytes, frozen.used_bytes) == (100, 0)


@pytest.mark.parametrize("load", READS)
def test_progress_is_called_in_this_thread(parts: list[Path], load: Any) -> None:
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        told.append((done, total))

    with open_weights(parts[0], load=load, progress=progress) as weights:
        (total,) = {total for _, total in told}
        assert weights.nbytes <= total <= weights.mapped_bytes
    assert told == sorted(told)
    assert told.count((total, total)) == 1


def test_a_mapping_reports_progress_of_warming_only(parts: list[Path]) -> None:
    told: list[tuple[int, int]] = []
    open_weights(parts[0], load="map", progress=lambda *n: told.append(n)).close()
    assert told == []
    with open_weights(parts[0], load="map", warm=True, progress=lambda *n: told.append(n)) as w:
        assert told[-1] == (w.mapped_bytes, w.mapped_bytes)


def test_the_tape_changes_during_the_load(path: Path) -> None:
    def take(done: int, total: int) -> None:
        tape.take_bytes(1)
        raise KeyboardInterrupt

    with um.Tape(16 * MIB) as tape:
        with pytest.raises(KeyboardInterrupt):
            open_weights(path, tape=tape, progress=take)
        assert tape.used_bytes > 5 * MIB, "what was taken later stays"
        tape.clear()
        with pytest.raises(um.ClosedError, match="took the memory back"):
            open_weights(path, tape=tape, progress=lambda *n: tape.clear())
        assert tape.used_bytes == 0
        with pytest.raises(um.ClosedError):
            open_weights(path, tape=tape, progress=lambda *n: tape.__exit__())


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_of_progress_stops_the_load(path: Path, load: Any, error: Any) -> None:
    told = []

    def progress(done: int, total: int) -> None:
        told.append(done)
        raise error(errno.EINVAL, "mine")

    with pytest.raises(error, match="mine"):
        open_weights(path, load=load, warm=True, progress=progress)
    assert len(told) == 1


@pytest.mark.parametrize("load", [*LOADS, "tape"])
def test_an_interrupt_at_the_end(path: Path, monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for name in ("unimem.weights.opened.Weights.__init__", "unimem.weights.loading.Loaded"):
        with um.Tape(16 * MIB) as tape, monkeypatch.context() as patch:
            tape.take_bytes(100)
            before = mapped_bytes()
            patch.setattr(name, interrupt)
            options: Any = {"tape": tape} if load == "tape" else {"load": load}
            with pytest.raises(KeyboardInterrupt):
                open_weights(path, **options)
            assert (tape.used_bytes, mapped_bytes()) == (100, before)
            tape.close()


# A mapping for a look at the page cache may be left to the collector, which warns.
@pytest.mark.filterwarnings("ignore:unclosed Block:ResourceWarning")
def test_an_interrupt_anywhere_leaves_the_tape_as_it_was(path: Path) -> None:
    with um.Tape(16 * MIB) as tape:
        n_lines = 0
        for _ in interrupts.at_each_line(
            lambda: open_weights(path, tape=tape), "unimem/weights/loading.py"
        ):
            assert tape.used_bytes == 0
            n_lines += 1
        assert n_lines > 20
        assert tape.used_bytes > 5 * MIB


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(0, path.stat().st_mtime_ns))
    other.rename(path)


def write_a_byte(path: Path) -> None:
    before = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(path, ns=(0, before + 1))  # two writes within a tick of the kernel have the same time


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "longer": (lambda path: os.truncate(path, 90 * MIB), "replaced or written to"),
    "shorter": (lambda path: os.truncate(path, path.stat().st_size - 1), "shorter|written to"),
    "replaced": (replace, "replaced or written to"),
    "written to": (write_a_byte, "replaced or written to"),
    "removed": (Path.unlink, "No such file"),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_during_the_load_is_an_error(
    parts: list[Path], monkeypatch: pytest.MonkeyPatch, load: Any, name: str
) -> None:
    change, text = CHANGES[name]
    true = loading.choose

    def choose(*arguments: Any) -> loading.LoadChoice:
        change(parts[1])
        return true(*arguments)

    monkeypatch.setattr(loading, "choose", choose)
    with pytest.raises(OSError, match=text) as caught:
        open_weights(parts[0], load=load)
    assert caught.value.filename == str(parts[1])


@pytest.mark.parametrize("load", READS)
def test_a_change_after_the_last_read_is_an_error(path: Path, load: Any) -> None:
    def at_the_end(done: int, total: int) -> None:
        if done == total:
            write_a_byte(path)

    with um.Tape(16 * MIB) as tape:
        for where in (None, tape):
            with pytest.raises(OSError, match="replaced or written to") as caught:
                open_weights(path, load=load, progress=at_the_end, tape=where)
            assert caught.value.filename == str(path)
        assert tape.used_bytes == 0


REFUSAL = """
import resource, warnings
import pytest
import unimem as um

def refusal(call, *arguments, **options):
    with pytest.raises(um.CapacityError) as caught:
        call(*arguments, **options)
    return caught.value

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
"""
IN_512_MB = """
before = peak()
for load in ("copy", "direct"):
    for options in ({}, {"pages": "4k"}, {"progress": print}):
        error = refusal(um.open_weights, path, load=load, **options)
        assert "cgroup" in str(error), error
        assert error.asked > 600 << 20
assert "a copy of" in str(refusal(um.open_weights, path, pages="thp", strict=True))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    with um.open_weights(path, pages="thp") as weights:
        assert weights.load == "map", weights.load
        assert "does not fit" in weights.load_reason
        refusal(weights.warm)
assert len(told) == 1, told
assert peak() - before < 16 << 20, (before, peak())
"""
ON_A_TAPE = """
with um.Block(130 << 20) as cold, um.Block(140 << 20) as other, um.Tape(cold) as tape:
    tape.take_bytes(100)
    other.warm()
    assert "cgroup" in str(refusal(um.open_weights, path, tape=tape, load="direct"))
    assert tape.used_bytes == 100
    other.close()
    cold.warm()
    # Warm memory needs no room.
    with um.Block(60 << 20, warm=True), um.open_weights(path, tape=tape, load="direct") as weights:
        assert weights.load == "direct"
"""


@pytest.mark.parametrize(
    ("script", "nbytes", "limit"),
    [(IN_512_MB, 640 * MIB, 512 * MIB), (ON_A_TAPE, 120 * MIB, 256 * MIB)],
    ids=["alone", "tape"],
)
def test_in_a_cgroup(tmp_path: Path, script: str, nbytes: int, limit: int) -> None:
    file = write_hole(tmp_path / "large.gguf", nbytes)
    with small_cgroup(limit) as cgroup:
        cgroup.run(f"{REFUSAL}\npath = {str(file)!r}\n{script}")


AROUND_THE_NEED = """
import ctypes, os
import unimem as um
from unimem.weights import loading

if {user}:
    os.setgroups([]), os.setresgid({user}, {user}, {user}), os.setresuid({user}, {user}, {user})
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: as a process that began as this user
path = {path!r}
with open(path, "rb", 0) as file:
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for _ in range(3):  # what is read again is active
        file.seek(0)
        while file.read(1 << 20):
            pass
try:
    with um.open_weights(path, load="copy") as weights:
        print("ran", weights.load)
except um.CapacityError as error:
    assert "cgroup" in str(error), error
    print("refused")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("user", "step"), [(0, 2 * MIB), (65534, 8 * MIB)], ids=["root", "nobody"])
def test_limits_around_the_need_refuse_or_run(user: int, step: int, open_folder: Path) -> None:
    """No process is killed, which `run` would report. Only root makes the cgroups."""
    need = 160 * MIB
    file = write_hole(open_folder / "model.gguf", need)
    said = []
    script = AROUND_THE_NEED.format(path=str(file), user=user)
    for more in range(0, 80 * MIB, step):  # beside the model, the process takes 20 to 50 MiB
        with small_cgroup(need + more) as cgroup:
            said.append(cgroup.run(script))
    assert set(said) == {"refused\n", "ran copy\n"}
    assert (said[0], said[-1]) == ("refused\n", "ran copy\n"), said
    # Beyond the first that runs, all run: the process itself varies by less than 8 MiB.
    assert "refused\n" not in said[said.index("ran copy\n") + 8 * MIB // step :], said
