"""Mapped models, found by name and content; their types are checked against gguf-py."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import unimem as um
from support.files import gguf_files as g
from support.files import safetensors_files as st
from support.kernel.proc_maps import PAGE
from support.models.make import TINY, write_model
from support.processes.forks import fork
from support.processes.running import running
from support.processes.staged_models import may_mount
from unimem.accounting import mapped_models
from unimem.accounting.mapped_models import MappedModel, library_files, models
from unimem.staging import keeper as stage_held
from unimem.system.process import Area, read_process
from unimem.weights.gguf import GGUFHeader
from unimem.weights.staged import Held, holders, holders_of

Patch = pytest.MonkeyPatch
MIB = 1 << 20
Maps = Callable[..., mmap.mmap]
Mapped = Callable[[str, bytes], Path]


def may_follow_areas() -> bool:
    """Return whether this process may open mapped files without a path."""
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
    mapped_models._headers.clear()


@pytest.fixture
def maps() -> Iterator[Maps]:
    """Map a file, whole or from an offset, until the end of the test."""
    with ExitStack() as stack:

        def act(path: Path | str, nbytes: int = 0, offset: int = 0) -> mmap.mmap:
            with open(path, "rb") as file:
                memory = mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ, offset=offset)
            return stack.enter_context(memory)

        yield act


@pytest.fixture
def mapped(tmp_path: Path, maps: Maps) -> Mapped:
    def act(name: str, raw: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(raw)
        maps(path)
        return path

    return act


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf", shape=TINY)


def found(text: str, pid: int | None = None) -> list[MappedModel]:
    process = read_process(pid)
    return [each for each in models(process) if any(text in area.path for area in each.areas)]


def only(text: Path | str, pid: int | None = None) -> MappedModel:
    (one,) = found(str(text), pid)
    return one


def in_bytes(one: MappedModel, area: Area) -> list[str]:
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
    if kind == "GGUF":
        one = [g.tensor("t", (nbytes // 4,), g.F32, 0)]
        return g.with_data(g.head(1, 0), *one, nbytes=nbytes)[0]
    return st.write({"t": ("F16", (nbytes // 2,))})


def test_every_byte_of_a_model_has_gguf_py_s_type(model: Path, maps: Maps) -> None:
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
        # Beyond the end of the file is padding, too.
        assert in_bytes(one, area) == expected[area.offset : area.offset + area.nbytes]


@pytest.mark.parametrize(("name", "raw", "known"), [
    ("x.safetensors", st.everything(), ("safetensors", None, "file")),
    ("x.gguf", g.everything(), ("GGUF", "none", "file")),
], ids=["safetensors", "GGUF"])  # fmt: skip
def test_every_tensor_has_its_type_and_an_empty_one_is_no_part(
    mapped: Mapped, name: str, raw: bytes, known: tuple[str, str | None, str]
) -> None:
    path = mapped(name, raw)
    one = only(path)
    assert (one.format, one.architecture, one.state) == known
    with um.open_weights(path, load="map") as weights:
        sizes = {f"weights:{kind}": nbytes for kind, nbytes in weights.by_type().items() if nbytes}
        tensors = [tensor for tensor in weights.tensors.values() if tensor.nbytes]
    each = in_bytes(one, one.areas[0])
    assert Counter(each) == sizes | {"weights:padding": len(each) - sum(sizes.values())}
    for tensor in tensors:
        expected = {f"weights:{tensor.type}"}
        assert set(each[tensor.offset : tensor.offset + tensor.nbytes]) == expected


def test_the_name_is_the_one_in_the_file(mapped: Mapped) -> None:
    keys = [
        g.kv("general.architecture", g.UINT32, g.u32(7)),
        g.kv("general.name", g.STRING, g.string("A model of mine")),
    ]
    one = only(mapped("x.gguf", g.with_data(g.head(0, 2), *keys)[0]))
    assert (one.name, one.architecture, one.problem) == ("A model of mine", None, None)
    assert {part.category for part in one.parts(one.areas[0])} == {"weights:padding"}


def test_each_file_of_a_split_model_is_separate(model: Path, maps: Maps) -> None:
    parts = g.split(model, 9)
    assert len(parts) > 1
    model.unlink()
    parts[0].unlink()  # which the others need for nothing
    for path in parts[1:]:
        maps(path)
    known = {each.path: each.problem for each in found("model-")}
    assert known == {str(path): None for path in parts[1:]}
    with pytest.raises(FileNotFoundError):
        um.open_weights(parts[1])


def test_a_long_table_is_read_once_per_file(mapped: Mapped, monkeypatch: Patch) -> None:
    n = 20_000
    tensors = [g.tensor(f"t{i}", (32,), g.F32, 128 * i) for i in range(n)]
    path = mapped("long.gguf", g.with_data(g.head(n, 0), *tensors, nbytes=128 * n)[0])
    read = Mock(side_effect=GGUFHeader)
    monkeypatch.setattr(mapped_models, "GGUFHeader", read)
    for _ in range(3):
        one = only(path)
        first, second, *_ = one.parts(one.areas[0])
        assert (first.category, second.category) == ("weights:padding", "weights:f32")
    assert read.call_count == 1
    os.utime(path, (1, 1))
    only(path)
    assert read.call_count == 2


def test_few_files_are_remembered(tmp_path: Path, mapped: Mapped, monkeypatch: Patch) -> None:
    monkeypatch.setattr(mapped_models, "_HEADERS_MAX", 2)
    for i in range(5):
        mapped(f"{i}.gguf", g.everything())
    assert [each.format for each in found(str(tmp_path))] == ["GGUF"] * 5
    assert len(mapped_models._headers) == 2


@pytest.mark.parametrize("kind", ["GGUF", "safetensors"])
def test_blobs_are_recognized_by_their_first_bytes(mapped: Mapped, kind: str) -> None:
    path = mapped("sha256-" + "0" * 64, blob(kind))
    one = only(path)
    assert (one.format, one.path, one.state) == (kind, str(path), "file")
    assert found(str(mapped("small", blob(kind, MIB // 2)))) == []


@pytest.mark.parametrize("head", [
    b"",
    b"GGU",
    struct.pack("<Q", 100) + b"[",
    struct.pack("<Q", 3 * MIB) + b"{",
    # A table with an object in it, as many files have.
    struct.pack("<Q", 100) + b"{",
], ids=repr)  # fmt: skip
def test_other_files_are_no_models(mapped: Mapped, head: bytes) -> None:
    assert found(str(mapped("data", head + bytes(2 * MIB)))) == []


@pytest.mark.parametrize(("name", "raw", "problem"), [
    ("x.gguf", b"GGUF" + bytes(100), "version"),
    ("x.gguf", b"hello" * 100, "does not begin with GGUF"),
    ("x.safetensors", b"hello" * 100, "header"),
    ("x.safetensors", st.file('{"a": 1}', 10), ""),
    ("blob", b"GGUF" + bytes(2 * MIB), "version"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_broken_files_have_no_type(mapped: Mapped, name: str, raw: bytes, problem: str) -> None:
    one = only(mapped(name, raw))
    assert (one.format, one.architecture, one.name) == (None, None, None)
    assert one.problem is not None
    assert problem in one.problem
    (area,) = one.areas
    assert one.parts(area) == [("weights", area.start, area.nbytes, None, None)]


def test_an_unreadable_file_is_tried_again(model: Path, maps: Maps, monkeypatch: Patch) -> None:
    maps(model)
    with monkeypatch.context() as patch:
        error = OSError(5, "Input/output error")
        patch.setattr(mapped_models, "GGUFHeader", Mock(side_effect=error))
        assert only(model).problem == "[Errno 5] Input/output error"
    assert only(model).problem is None


def test_areas_can_be_left_out(model: Path, maps: Maps) -> None:
    maps(model)
    process = read_process()
    assert models(process, []) == []
    (area,) = only(model).areas
    assert models(process, [area])[0].areas == (area,)


def test_files_with_code_are_libraries_and_are_not_opened(monkeypatch: Patch) -> None:
    process = read_process()
    files = library_files(process.areas)
    program = os.stat("/proc/self/exe")
    assert ((os.major(program.st_dev), os.minor(program.st_dev)), program.st_ino) in files
    code = [area for area in process.areas if area.inode and "x" in area.access]
    assert {(area.device, area.inode) for area in code} <= files
    assert all(inode for _, inode in files)
    look = Mock(side_effect=mapped_models._find_file)
    monkeypatch.setattr(mapped_models, "_find_file", look)
    models(process)
    assert files.isdisjoint((call.args[1].device, call.args[1].inode) for call in look.mock_calls)


@pytest.mark.parametrize("name", ["a b.gguf", "a\nb.gguf", "a\\012b.gguf", "x.gguf (deleted)"])
def test_names_escaped_by_the_kernel(model: Path, maps: Maps, name: str) -> None:
    path = model.with_name(name)
    model.rename(path)
    maps(path)
    one = only(model.parent)
    assert (one.path, one.state, one.format) == (str(path), "file", "GGUF")


def test_a_deleted_model(model: Path, maps: Maps) -> None:
    maps(model)
    model.unlink()
    one = only(model)
    assert (one.path, one.state) == (str(model), "deleted")
    if may_follow_areas():
        assert (one.format, one.architecture) == ("GGUF", "llama")


def test_a_model_replaced_by_a_file_that_must_not_be_opened(model: Path, maps: Maps) -> None:
    maps(model)
    model.unlink()
    os.mkfifo(model)
    one = only(model)
    assert (one.path, one.state) == (str(model), "replaced")


def test_a_hidden_model_is_known_by_its_name(model: Path, maps: Maps, monkeypatch: Patch) -> None:
    unnamed = model.with_name("blob")
    unnamed.write_bytes(blob("GGUF"))
    for path in (model, unnamed):
        maps(path)
        path.unlink()
    plain = mapped_models._open_same

    def without_root(path: str, area: Area, **options: bool) -> int:
        return -1 if "map_files" in path else plain(path, area, **options)

    monkeypatch.setattr(mapped_models, "_open_same", without_root)
    one = only(model)
    assert (one.state, one.format) == ("deleted", None)
    assert one.problem == (
        "the file is deleted: reading its mapping takes CAP_CHECKPOINT_RESTORE, which root has"
    )
    assert found(str(unnamed)) == []


# Maps a file of 20 MiB twice, reads all of it, and writes to 3 MiB of the second, private mapping.
TWICE = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    maps = [
        mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | write)
        for flags, write in ((mmap.MAP_SHARED, 0), (mmap.MAP_PRIVATE, mmap.PROT_WRITE))
    ]
for memory in maps[: int(sys.argv[2])]:
    sum(memory[:: mmap.PAGESIZE])
maps[1][4 << 20 : 7 << 20] = bytes(3 << 20)
"""


@pytest.mark.parametrize("n_read", [1, 2])
def test_a_file_that_is_mapped_twice_counts_once_and_written_copies_apart(
    tmp_path: Path, n_read: int
) -> None:
    path = tmp_path / "twice.gguf"
    path.write_bytes(blob("GGUF", 20 * MIB))
    nbytes = -(-path.stat().st_size // PAGE) * PAGE
    with running(TWICE, path, n_read) as pid:
        report = um.report(pid)
    (model,) = report.facts["models"]
    assert (model["nbytes"], model["rss_bytes"], model["written_bytes"]) == (
        nbytes, nbytes, 3 * MIB
    )  # fmt: skip
    page = " ".join(str(report).split())
    assert "twice.gguf (20.0 MiB, all in RAM; 3.0 MiB written, in private copies)" in page
    found = {row.category: row for row in report.rows if row.category.startswith("weights")}
    assert found["weights:written"].nbytes == found["weights:written"].resident_bytes == 3 * MIB
    assert found["weights:f32"].nbytes == 20 * MIB
    assert sum(row.nbytes for row in found.values()) == nbytes + 3 * MIB
    assert report.resident_bytes == report.facts["pss_bytes"]
    assert report.total_bytes == sum(mapping.nbytes for mapping in report.mappings)


def test_devices_are_no_models(maps: Maps) -> None:
    maps("/dev/zero", 2 * MIB)
    assert found("/dev/zero") == []


@contextmanager
def kept(path: Path, **options: Any) -> Iterator[Held]:
    """Stage a model that a separate process keeps, as the command does."""
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
        assert not one.is_kept
        keeper = um.report(held.pid)
        (staging,) = (row for row in keeper.rows if row.category == "staging")
        nbytes = os.stat(held.path).st_size
        assert staging.granted is not None
        assert staging.nbytes == -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        assert staging.granted.resident_bytes == staging.nbytes
        assert not any(row.category.startswith("weights") for row in keeper.rows)
        (fact,) = keeper.facts["models"]
        assert (fact["path"], fact["staged_from"]) == (held.path, str(large))


def test_staged_models_in_separate_file_systems(tmp_path: Path, maps: Maps) -> None:
    """Their files have equal inodes there and equal names here."""
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


def test_files_in_layers(model: Path, maps: Maps, monkeypatch: Patch) -> None:
    """smaps and stat name different devices for btrfs and overlayfs."""
    maps(model)
    (area,) = only(model).areas
    info = os.stat(model)
    path = str(model)

    def opens(stat_major: int, smaps_major: int, **options: bool) -> bool:
        device = os.makedev(stat_major, 77)
        fields = {"st_mode": info.st_mode, "st_ino": info.st_ino, "st_dev": device}
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", lambda fd: SimpleNamespace(**fields))
            fd = mapped_models._open_same(path, area._replace(device=(smaps_major, 5)), **options)
        if fd >= 0:
            os.close(fd)
        return fd >= 0

    assert opens(0, 0, is_named=True)
    assert opens(0, 8, is_named=True)
    assert not opens(0, 0)
    assert not opens(8, 0, is_named=True)
    assert not opens(8, 8, is_named=True)


@needs_areas
def test_a_model_in_memory_without_a_name(maps: Maps) -> None:
    with open(os.memfd_create("blob", os.MFD_CLOEXEC), "wb") as file:
        file.write(blob("GGUF"))
        file.flush()
        maps(f"/proc/self/fd/{file.fileno()}")
    one = only("memfd:blob")
    assert (one.state, one.source, one.format) == ("unnamed", None, "GGUF")


@contextmanager
def program(path: Path, backing: Any) -> Iterator[tuple[int, int, str]]:
    """Start a process that calls `um.stage`; return it, its forked child, and the path."""
    said, says = os.pipe()
    ends, end = os.pipe()
    child = fork()
    if child == 0:
        try:
            os.close(end)
            with um.stage(path, backing=backing, pages="4k") as staged:
                if grandchild := fork():
                    os.write(says, f"{grandchild} {staged.path}".encode())
                os.read(ends, 1)
                if grandchild:
                    os.waitpid(grandchild, 0)
        finally:
            os._exit(0)
    for fd in (says, ends):
        os.close(fd)
    with os.fdopen(said, "rb", 0) as answer:
        number, staged_path = answer.read(4096).decode().split(" ", 1)
        try:
            yield child, int(number), staged_path
        finally:
            os.close(end)
            os.waitpid(child, 0)


@pytest.mark.parametrize("backing", ["tmpfs", "memfd", "shm"])
def test_a_staging_program_is_reported_like_the_command(backing: Any, model: Path) -> None:
    if backing == "tmpfs" and not may_mount():
        pytest.skip("this process may not mount a tmpfs")
    large = write_model(model.with_name("large.gguf"))
    with program(large, backing) as (pid, its_child, path):
        (held,) = holders_of(pid)
        assert (held.path, held.source, held.kept_by) == (path, str(large), "program")
        assert held.asked == {"pages": "4k", "numa": None, "lock": False, "backing": backing}
        assert held.staleness() is None
        assert held in holders()
        assert holders_of(its_child) == []
        with pytest.raises(ValueError, match=f"goes with process {pid}"):
            stage_held.drop(held)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
            inode = os.fstat(file.fileno()).st_ino
            (one,) = (each for each in models(read_process()) if each.areas[0].inode == inode)
            assert (one.path, one.state, one.source) == (path, "staged", str(large))
        keeper = um.report(pid)
        (staging,) = (row for row in keeper.rows if row.category == "staging")
        assert staging.nbytes == -(-held.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        assert not any(row.category.startswith("weights") for row in keeper.rows)
    assert holders_of(pid) == []


def test_a_stage_of_this_process(model: Path, maps: Maps) -> None:
    """The ledger names the memory that the process keeps; other mappings of it count as reads."""
    large = write_model(model.with_name("large.gguf"))
    with um.stage(large, backing="memfd") as staged, um.stage(large, backing="shm") as other:
        paths = [held.path for held in holders_of(os.getpid())]
        assert paths == [staged.path, other.path]
        nbytes = um.report()["staging"].nbytes
        maps(staged.path)
        report = um.report()
        assert report["staging"].nbytes == nbytes
        assert any(row.category.startswith("weights:q8_0") for row in report.rows)
        assert {each.source for each in found("memfd")} == {str(large)}
        staged.close()
        (held,) = holders_of(os.getpid())
        assert held.path == other.path
    assert holders_of(os.getpid()) == []


def test_a_process_with_other_mounts(model: Path) -> None:
    """As in a container, the same path leads to a different model here."""
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
    command = 'mount --bind "$1" "$2" && exec "$3" -c "$4"'
    words = [unshare, "-m", "sh", "-c", command, "sh"]
    words += [str(model), str(seen), sys.executable, script]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe) as child:
        try:
            assert child.stdout is not None
            assert child.stderr is not None
            if child.stdout.readline() != b"mapped\n":
                pytest.skip(f"no mounts of our own here: {child.stderr.read()!r}")
            one = only(seen, child.pid)
            assert (one.path, one.architecture, one.state) == (str(seen), "llama", "file")
        finally:
            child.kill()
