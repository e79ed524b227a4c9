"""Models among what processes map: found by name and content, their types held against gguf-py."""

from __future__ import annotations

import importlib.util
import mmap
import os
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gguf_files as g
import safetensors_files as st
import unimem as um
from huge_pages import eight_huge_pages  # noqa: F401 - a fixture
from models.make import TINY, write_model
from proc_maps import PAGE
from staging import may_mount
from unimem._core.gguf import Header as GGUFHeader
from unimem.accounting import model_maps
from unimem.accounting.model_maps import MappedModel, library_files, models
from unimem.system.process import Area, read_process
from unimem.weights.staging import held as stage_held

MIB = 1 << 20
Maps = Callable[..., mmap.mmap]


def may_follow_areas() -> bool:
    """Whether this process may open what is mapped and has no path."""
    folder = Path("/proc/self/map_files")
    try:
        next(folder.iterdir()).stat()
    except PermissionError:
        return False
    return True


needs_areas = pytest.mark.skipif(
    not may_follow_areas(), reason="needs CAP_CHECKPOINT_RESTORE, for /proc/PID/map_files"
)


@pytest.fixture(autouse=True)
def _nothing_is_known_yet() -> None:
    model_maps._layouts.clear()


@pytest.fixture
def maps() -> Iterator[Maps]:
    """Map a file until the end of the test, all or from an offset on."""
    with ExitStack() as stack:

        def act(path: Path | str, nbytes: int = 0, offset: int = 0) -> mmap.mmap:
            with open(path, "rb") as file:
                memory = mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ, offset=offset)
            return stack.enter_context(memory)

        yield act


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf", shape=TINY)


def found(text: str, pid: int | None = None) -> list[MappedModel]:
    """The models with this in a path of theirs."""
    process = read_process(pid)
    return [each for each in models(process) if any(text in area.path for area in each.areas)]


def only(text: Path | str, pid: int | None = None) -> MappedModel:
    (one,) = found(str(text), pid)
    return one


def in_bytes(one: MappedModel, area: Area) -> list[str]:
    """The category of every byte of an area."""
    parts = one.parts(area)
    at = area.start
    for part in parts:
        assert part.address == at
        assert part.nbytes > 0
        at += part.nbytes
    assert at == area.end
    for before, after in pairwise(parts):
        assert before.category != after.category
    return [part.category for part in parts for _ in range(part.nbytes)]


def blob(kind: str, nbytes: int = MIB) -> bytes:
    """A model of at least so many bytes."""
    if kind == "GGUF":
        one = [g.tensor("t", (nbytes // 4,), g.F32, 0)]
        return g.with_data(g.head(1, 0), *one, nbytes=nbytes)[0]
    return st.write({"t": ("F16", (nbytes // 2,))})


# ---- types --------------------------------------------------------------------------------------


def test_every_byte_of_a_model_has_the_type_that_gguf_py_says(model: Path, maps: Maps) -> None:
    import gguf

    expected = ["weights:padding"] * (model.stat().st_size + PAGE)
    for tensor in gguf.GGUFReader(model).tensors:
        begin, n = int(tensor.data_offset), int(tensor.n_bytes)
        expected[begin : begin + n] = [f"weights:{tensor.tensor_type.name.lower()}"] * n
    assert len(set(expected)) == 3
    for offset, nbytes in ((0, 0), (3 * PAGE, PAGE), (2 * PAGE, 5 * PAGE)):
        maps(model, nbytes, offset)
    one = only(model)
    assert (one.format, one.architecture, one.state, one.problem) == ("GGUF", "llama", "file", None)
    assert one.path == str(model)
    assert {0, 2 * PAGE, 3 * PAGE} <= {area.offset for area in one.areas}
    for area in one.areas:
        assert in_bytes(one, area) == expected[area.offset : area.offset + area.nbytes], (
            "beyond the end of the file is padding, too"
        )


def test_every_byte_of_safetensors_has_its_type(tmp_path: Path, maps: Maps) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(st.everything())
    maps(path)
    one = only(path)
    assert (one.format, one.architecture, one.name, one.state) == (
        "safetensors",
        None,
        None,
        "file",
    )
    with um.open_weights(path, load="map") as weights:
        sizes = {f"weights:{kind}": nbytes for kind, nbytes in weights.by_type().items() if nbytes}
        starts = {tensor.offset: tensor for tensor in weights.tensors.values() if tensor.nbytes}
    counted = Counter(in_bytes(one, one.areas[0]))
    assert counted == {**sizes, "weights:padding": one.areas[0].nbytes - sum(sizes.values())}
    each = in_bytes(one, one.areas[0])
    for offset, tensor in starts.items():
        assert set(each[offset : offset + tensor.nbytes]) == {f"weights:{tensor.type}"}


def test_the_name_is_the_one_in_the_file(tmp_path: Path, maps: Maps) -> None:
    path = tmp_path / "x.gguf"
    keys = [
        g.kv("general.architecture", g.UINT32, g.u32(7)),
        g.kv("general.name", g.STRING, g.string("A model of mine")),
    ]
    path.write_bytes(g.with_data(g.head(0, 2), *keys)[0])
    maps(path)
    one = only(path)
    assert (one.name, one.architecture, one.problem) == ("A model of mine", None, None)
    assert {part.category for part in one.parts(one.areas[0])} == {"weights:padding"}


def test_each_part_of_a_split_model_is_one_of_its_own(model: Path, maps: Maps) -> None:
    parts = g.split(model, 9)
    assert len(parts) > 1
    model.unlink()
    parts[0].unlink()  # which the others need for nothing
    for path in parts[1:]:
        maps(path)
    assert {each.path: each.problem for each in found("model-")} == {
        str(p): None for p in parts[1:]
    }
    with pytest.raises(FileNotFoundError):
        um.open_weights(parts[1])


def test_tensors_without_bytes_are_no_parts(tmp_path: Path, maps: Maps) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(g.everything())
    maps(path)
    one = only(path)
    with um.open_weights(path, load="map") as weights:
        sizes = {f"weights:{kind}": nbytes for kind, nbytes in weights.by_type().items() if nbytes}
    counted = Counter(in_bytes(one, one.areas[0]))
    assert counted.pop("weights:padding") == one.areas[0].nbytes - sum(sizes.values())
    assert counted == sizes


def test_a_long_table_is_read_once_for_as_long_as_the_file_stays(
    tmp_path: Path, maps: Maps, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 20_000
    tensors = [g.tensor(f"t{i}", (32,), g.F32, 128 * i) for i in range(n)]
    path = tmp_path / "long.gguf"
    path.write_bytes(g.with_data(g.head(n, 0), *tensors, nbytes=128 * n)[0])
    maps(path)
    n_read = 0

    def count(*arguments: Any) -> Any:
        nonlocal n_read
        n_read += 1
        return GGUFHeader(*arguments)

    monkeypatch.setattr(model_maps, "GGUFHeader", count)
    for _ in range(3):
        one = only(path)
        assert [part.category for part in one.parts(one.areas[0])][:2] == [
            "weights:padding",
            "weights:f32",
        ]
    assert n_read == 1
    os.utime(path, (1, 1))
    only(path)
    assert n_read == 2


def test_not_more_files_are_remembered_than_a_process_has(
    tmp_path: Path, maps: Maps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_maps, "_LAYOUTS_MAX", 2)
    for i in range(5):
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(g.everything())
        maps(path)
    assert [each.format for each in found(str(tmp_path))] == ["GGUF"] * 5
    assert len(model_maps._layouts) == 2


# ---- which files --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["GGUF", "safetensors"])
def test_blobs_are_known_by_what_they_begin_with(tmp_path: Path, maps: Maps, kind: str) -> None:
    path = tmp_path / ("sha256-" + "0" * 64)
    path.write_bytes(blob(kind))
    maps(path)
    one = only(path)
    assert (one.format, one.path, one.state) == (kind, str(path), "file")
    small = tmp_path / "small"
    small.write_bytes(blob(kind, MIB // 2))
    maps(small)
    assert found(str(small)) == []


@pytest.mark.parametrize(
    "raw",
    [
        bytes(2 * MIB),
        b"GGU" + bytes(2 * MIB),
        struct.pack("<Q", 100) + b"[" + bytes(2 * MIB),
        struct.pack("<Q", 3 * MIB) + b"{" + bytes(2 * MIB),
        # A table with an object in it, as many files have.
        struct.pack("<Q", 100) + b"{" + bytes(2 * MIB),
    ],
)
def test_other_files_are_no_models(tmp_path: Path, maps: Maps, raw: bytes) -> None:
    path = tmp_path / "data"
    path.write_bytes(raw)
    maps(path)
    assert found(str(path)) == []


@pytest.mark.parametrize(
    ("name", "raw", "problem"),
    [
        ("x.gguf", b"GGUF" + bytes(100), "version"),
        ("x.gguf", b"hello" * 100, "does not begin with GGUF"),
        ("x.safetensors", b"hello" * 100, "header"),
        ("x.safetensors", st.file("{'a': 1}".replace("'", '"'), 10), ""),
        ("blob", b"GGUF" + bytes(2 * MIB), "version"),
    ],
)
def test_a_broken_file_is_weights_of_no_known_type(
    tmp_path: Path, maps: Maps, name: str, raw: bytes, problem: str
) -> None:
    path = tmp_path / name
    path.write_bytes(raw)
    maps(path)
    one = only(path)
    assert (one.format, one.architecture, one.name) == (None, None, None)
    assert one.problem is not None
    assert problem in one.problem
    (area,) = one.areas
    assert one.parts(area) == [("weights", area.start, area.nbytes, None, None)]


def test_a_file_that_cannot_be_read_is_tried_again(
    model: Path, maps: Maps, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps(model)
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> Any:
            raise OSError(5, "Input/output error")

        patch.setattr(model_maps, "GGUFHeader", fail)
        assert only(model).problem == "[Errno 5] Input/output error"
    assert only(model).problem is None


def test_areas_can_be_left_out(model: Path, maps: Maps) -> None:
    maps(model)
    process = read_process()
    assert models(process, []) == []
    (area,) = only(model).areas
    assert models(process, [area])[0].areas == (area,)


def test_files_with_code_are_libraries() -> None:
    process = read_process()
    files = library_files(process.areas)
    program = os.stat("/proc/self/exe")
    assert ((os.major(program.st_dev), os.minor(program.st_dev)), program.st_ino) in files
    for area in process.areas:
        if area.inode and "x" in area.access:
            assert (area.device, area.inode) in files
    assert all(inode for _, inode in files)


def test_libraries_are_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    plain = model_maps._find

    def look(pid: int, area: Area, staged: Any) -> Any:
        looked.append(area.path)
        return plain(pid, area, staged)

    monkeypatch.setattr(model_maps, "_find", look)
    process = read_process()
    models(process)
    programs = library_files(process.areas)
    assert not {
        area.path for area in process.areas if (area.device, area.inode) in programs
    }.intersection(looked)


# ---- where they are -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a b.gguf", "a\nb.gguf", "a\\012b.gguf", "x.gguf (deleted)"])
def test_names_that_the_kernel_escapes(model: Path, maps: Maps, name: str) -> None:
    path = model.with_name(name)
    model.rename(path)
    maps(path)
    one = only(model.parent)
    assert (one.path, one.state, one.format) == (str(path), "file", "GGUF")


def test_a_model_that_was_deleted(model: Path, maps: Maps) -> None:
    maps(model)
    model.unlink()
    one = only(model)
    assert (one.path, one.state) == (str(model), "deleted")
    if may_follow_areas():
        assert (one.format, one.architecture) == ("GGUF", "llama")


def test_a_model_that_was_replaced_by_what_must_not_be_opened(model: Path, maps: Maps) -> None:
    maps(model)
    model.unlink()
    os.mkfifo(model)
    one = only(model)
    assert (one.path, one.state) == (str(model), "replaced")


def test_a_model_that_nothing_leads_to_is_known_by_its_name(
    model: Path, maps: Maps, monkeypatch: pytest.MonkeyPatch
) -> None:
    unnamed = model.with_name("blob")
    unnamed.write_bytes(blob("GGUF"))
    for path in (model, unnamed):
        maps(path)
        path.unlink()
    plain = model_maps._open_same

    def without_root(path: str, area: Area, **options: bool) -> int:
        return -1 if "map_files" in path else plain(path, area, **options)

    monkeypatch.setattr(model_maps, "_open_same", without_root)
    one = only(model)
    assert (one.state, one.format) == ("deleted", None)
    assert one.problem == (
        "the file is deleted: to read what is mapped of it takes CAP_CHECKPOINT_RESTORE, which "
        "root has"
    )
    assert found(str(unnamed)) == []


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no /dev/zero")
def test_devices_are_no_models(tmp_path: Path, maps: Maps) -> None:
    maps("/dev/zero", 2 * MIB)
    assert found("/dev/zero") == []


@contextmanager
def kept(path: Path, **options: Any) -> Iterator[stage_held.Held]:
    """A staged model that a process of its own keeps, as the command has it."""
    asked = {"lock": False} | options
    with stage_held.hold(um.stage(path, **options), str(path), asked, []) as held:
        pass
    try:
        yield held
    finally:
        stage_held.drop(held)


@pytest.mark.parametrize("backing", ["tmpfs", "memfd", "shm", "hugetlb"])
def test_staged_models(backing: Any, model: Path, request: pytest.FixtureRequest) -> None:
    pages = "4k"
    if backing == "hugetlb":
        request.getfixturevalue("eight_huge_pages")
        pages = "2m"
    if backing == "tmpfs" and not may_mount():
        pytest.skip("this process may not mount a tmpfs")
    large = write_model(model.with_name("large.gguf"))
    with kept(large, backing=backing, pages=pages) as held, ExitStack() as stack:
        with open(held.path, "rb") as file:
            stack.enter_context(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
            inode = os.fstat(file.fileno()).st_ino
        (one,) = (each for each in models(read_process()) if each.areas[0].inode == inode)
        assert (one.format, one.architecture, one.problem) == ("GGUF", "llama", None)
        assert (one.path, one.state, one.source) == (held.path, "staged", str(large))


def test_staged_models_in_file_systems_of_their_own(tmp_path: Path, maps: Maps) -> None:
    """Their files have the same inodes there, and here the same names."""
    if not may_mount():
        pytest.skip("this process may not mount a tmpfs")
    with ExitStack() as stack:
        sources = {}
        for kind in ("f16", "q8_0"):
            (tmp_path / kind).mkdir()
            source = write_model(tmp_path / kind / "same.gguf", kind=kind)
            held = stack.enter_context(kept(source, backing="tmpfs", pages="4k"))
            maps(held.path)
            sources[held.path] = str(source)
        assert {each.path: each.source for each in found("/same.gguf")} == sources


def test_files_in_layers(model: Path, maps: Maps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of a btrfs, and of an overlayfs, is another one in smaps than in stat."""
    maps(model)
    (area,) = only(model).areas
    info = os.stat(model)
    path = str(model)

    def opens(stat_major: int, smaps_major: int, **options: bool) -> bool:
        device = os.makedev(stat_major, 77)
        fields = {"st_mode": info.st_mode, "st_ino": info.st_ino, "st_dev": device}
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", lambda fd: SimpleNamespace(**fields))
            fd = model_maps._open_same(path, replace(area, device=(smaps_major, 5)), **options)
        if fd >= 0:
            os.close(fd)
        return fd >= 0

    assert opens(0, 0, is_named=True)
    assert opens(0, 8, is_named=True)
    assert not opens(0, 0)
    assert not opens(8, 0, is_named=True)
    assert not opens(8, 8, is_named=True)


@needs_areas
def test_a_stage_of_a_process_of_its_own(model: Path, maps: Maps) -> None:
    large = write_model(model.with_name("large.gguf"))
    with um.stage(large, backing="memfd") as staged:
        maps(staged.path)
        one = only("memfd")
        assert (one.state, one.source, one.format) == ("unnamed", None, "GGUF")


def test_a_process_with_other_mounts(model: Path) -> None:
    """As in a container: under the same path we have another file, a model of another name."""
    unshare = shutil.which("unshare")
    if unshare is None or not Path("/proc/self/ns/mnt").exists():
        pytest.skip("needs unshare and mount namespaces")
    seen = model.with_name("seen.gguf")
    seen.write_bytes(g.everything())
    script = f"""
import mmap, sys
with open({str(seen)!r}, "rb") as file:
    memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print("mapped", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [
            *(unshare, "-m", "sh", "-c", 'mount --bind "$1" "$2" && exec "$3" -c "$4"', "sh"),
            *(str(model), str(seen), sys.executable, script),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stderr is not None
            if child.stdout.readline() != b"mapped\n":
                pytest.skip(f"no mounts of our own here: {child.stderr.read()!r}")
            one = only(seen, child.pid)
            assert (one.path, one.architecture, one.state) == (str(seen), "llama", "file")
        finally:
            child.kill()


@pytest.mark.skipif(importlib.util.find_spec("cyllama") is None, reason="cyllama is not installed")
def test_llama_cpp(model: Path) -> None:
    import llama_cpp

    with llama_cpp.holding(model) as pid:
        one = only(model, pid)
        assert (one.path, one.format, one.architecture) == (str(model), "GGUF", "llama")
        with um.open_weights(model, load="map") as weights:
            sizes = {f"weights:{kind}": nbytes for kind, nbytes in weights.by_type().items()}
        counted: Counter[str] = Counter()
        for area in one.areas:
            assert area.rss_bytes == area.nbytes
            counted.update(in_bytes(one, area))
        # It keeps no header that it has read.
        del counted["weights:padding"]
        assert counted == sizes
