"""Staged models: how other processes read them, where they lie, and when they end."""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from conftest import Run
from support.files.weight_bytes import cached_bytes, drop_from_cache, locked_bytes, write_hole
from support.kernel.cgroups import SmallCgroup
from support.kernel.proc_maps import huge_page_bytes
from support.models import llama_cpp
from support.processes.forks import in_child
from support.processes.staged_models import (
    MIB,
    TINY,
    look,
    may_mount,
    read_elsewhere,
    start_reader,
    stop,
)
from unimem.errors import PlacementError
from unimem.staging import backings
from unimem.staging.backings import BACKINGS
from unimem.system import limits

PLAIN = [backing for backing in BACKINGS if backing != "hugetlb"]

pytestmark = pytest.mark.usefixtures("gives_memory_back", "leaves_nothing")


def test_processes_of_the_user_read_the_same_bytes(backing: Any, model: Path) -> None:
    model.chmod(0o644)  # which may lie in a private folder
    with um.stage(model, backing=backing) as staged:
        assert (staged.backing, staged.reason) == (backing, "it was asked for")
        assert staged.nbytes == os.path.getsize(staged.path) == model.stat().st_size
        assert read_elsewhere(staged.path) == model.read_bytes()
        assert staged.granted.resident_bytes >= staged.nbytes
        assert (staged.paths, staged.source) == ((staged.path,), str(model))
        assert os.stat(staged.path).st_mode & 0o777 == 0o400
        if backing == "shm":
            assert os.stat(os.path.dirname(staged.path)).st_mode & 0o777 == 0o700
        with um.open_weights(model) as here:
            for load in ("map", "copy"):
                with um.open_weights(staged.path, load=load) as there:
                    assert there.fingerprint == here.fingerprint
                    assert there.content_hash() == here.content_hash()
        path = staged.path
    assert not os.path.exists(path)


@pytest.mark.usefixtures("needs_mount")
def test_the_first_choice_is_a_tmpfs_of_its_own(model: Path) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    with um.stage(model) as staged:
        assert (staged.backing, staged.reason) == ("tmpfs", "the first choice")
        assert staged.path == f"/proc/{os.getpid()}/fd/{staged.fd}/model.gguf"
        assert Path("/proc/self/mountinfo").read_text() == before, "it is mounted nowhere"


@pytest.mark.usefixtures("needs_mount")
@pytest.mark.parametrize("pages", ["thp", "4k"])
def test_pages_are_huge_for_every_reader_of_a_tmpfs(model: Path, pages: Any) -> None:
    huge = huge_page_bytes()
    if not huge:
        pytest.skip("this kernel gives no transparent huge pages")
    expected = model.stat().st_size // huge * huge if pages == "thp" else 0
    with um.stage(model, backing="tmpfs", pages=pages, strict=True) as staged:
        assert (staged.granted.pages, staged.granted.huge_bytes) == (pages, expected)
        assert plain_reader(staged.path)["ShmemPmdMapped"] == expected


@pytest.mark.parametrize("backing", ["memfd", "shm"])
def test_missing_huge_pages_of_readers_are_reported(backing: Any, model: Path) -> None:
    """Without shmem_enabled, programs get them only where they align their mapping."""
    switch = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    mounts = Path("/proc/mounts").read_text().splitlines()
    if not huge_page_bytes() or "[never]" not in switch:
        pytest.skip("shared memory gets huge pages here, or none")
    if any("huge=" in mount for mount in mounts if mount.split()[1] == "/dev/shm"):
        pytest.skip("/dev/shm is mounted with huge pages")
    with um.stage(model, backing=backing) as staged:
        assert plain_reader(staged.path)["ShmemPmdMapped"] == 0
        assert staged.granted.huge_bytes == 6 * MIB
    with pytest.raises(PlacementError, match=r"gets 0 B of 6\.0 MiB in huge pages"):
        um.stage(model, backing=backing, pages="thp", strict=True)
    with pytest.warns(um.PlacementWarning, match=r"gets 0 B of 6\.0 MiB in huge pages"):
        um.stage(model, backing=backing, pages="thp").close()


def full(nbytes: int, what: str) -> None:
    raise um.CapacityError(f"{what}: {nbytes} do not fit", 0, 0, nbytes)


def plain_reader(path: str) -> dict[str, int]:
    reader = start_reader(path)
    try:
        return look(reader)
    finally:
        stop(reader)


def test_two_readers_share_the_pages(backing: Any, model: Path) -> None:
    with um.stage(model, backing=backing) as staged:
        readers = [start_reader(staged.path) for _ in range(2)]
        for reader in readers:
            fields = look(reader)
            assert fields["Rss"] >= staged.nbytes
            # The process that keeps it has its share, too.
            assert fields["Pss"] == pytest.approx(fields["Rss"] / 3, abs=2 * mmap.PAGESIZE)
        for reader in readers:
            stop(reader)


@pytest.mark.usefixtures("eight_huge_pages")
def test_hugetlb_pages(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with um.stage(model, pages="2m", strict=True) as staged:
        assert (staged.backing, staged.granted.pages) == ("hugetlb", "2m")
        assert staged.granted.huge_bytes == os.path.getsize(staged.path) == 8 * MIB
        # hugetlb files cannot be read by programs whose buffer is less than a page: mapped then.
        fields = plain_reader(staged.path)
        assert fields["Shared_Hugetlb"] + fields["Private_Hugetlb"] == 8 * MIB
        with um.open_weights(staged.path) as there, um.open_weights(model) as here:
            assert there.content_hash() == here.content_hash()
        with pytest.raises(PlacementError, match="sealed"):
            um.Block.attach(staged.fd, writable=True)
    monkeypatch.setattr(limits, "require", full)
    with um.stage(model) as staged:  # a pool has room of its own
        assert staged.backing == "hugetlb"
        assert "do not fit" in staged.reason


@pytest.mark.usefixtures("no_huge_pages")
def test_an_empty_pool_is_reported(model: Path) -> None:
    options: list[Any] = [{"pages": "2m", "strict": True}, {"backing": "hugetlb"}]
    for asked in options:
        with pytest.raises(PlacementError, match="needs 4 hugetlb pages"):
            um.stage(model, **asked)
    with pytest.warns(um.PlacementWarning, match="needs 4 hugetlb pages"):
        staged = um.stage(model, pages="2m")
    with staged:
        assert staged.backing != "hugetlb"


@pytest.mark.parametrize("backing", ["tmpfs", "shm"], indirect=True)
def test_split_models_keep_their_names(split: list[Path], backing: Any) -> None:
    with um.stage(split[1], backing=backing) as staged:
        assert [os.path.basename(path) for path in staged.paths] == [p.name for p in split]
        assert len({os.path.dirname(path) for path in staged.paths}) == 1
        assert staged.path == staged.paths[0]
        with um.open_weights(staged.path) as there, um.open_weights(split[0]) as here:
            assert there.fingerprint == here.fingerprint


def test_an_index_is_staged_with_its_files(indexed: Path) -> None:
    with um.stage(indexed) as staged:
        assert (os.path.basename(staged.path), len(staged.paths)) == (indexed.name, 3)
        assert {os.stat(path).st_mode & 0o777 for path in staged.paths} == {0o400}
        with um.open_weights(staged.path) as w:
            assert (w.tensors["t1"].as_array() == np.arange(1000, dtype=np.float32) + 1).all()


def test_safetensors_opens_what_is_staged(indexed: Path) -> None:
    safetensors = pytest.importorskip("safetensors", reason="safetensors (extra test) is missing")
    file = indexed.with_name("model-00001-of-00002.safetensors")
    for backing in PLAIN if may_mount() else PLAIN[1:]:
        with (
            um.stage(file, backing=backing) as staged,
            safetensors.safe_open(staged.path, framework="np") as opened,
        ):
            assert (opened.get_tensor("t0") == np.arange(1000, dtype=np.float32)).all()
    with pytest.raises(ValueError, match="ends exactly"):
        um.stage(file, backing="hugetlb")


def test_llama_cpp_and_the_decoder_write_the_same_tokens(split: list[Path]) -> None:
    pytest.importorskip(
        "unimem.backends.ggml", reason="the engine needs ggml", exc_type=ImportError
    )
    from unimem.engine import Decoder

    prompt = [1, 5, 9]
    expected, _ = llama_cpp.greedy(TINY, prompt, 8)
    for source in (TINY, split[0]):
        with um.stage(source) as staged:
            assert llama_cpp.greedy(Path(staged.path), prompt, 8)[0] == expected
            with Decoder(staged.path, ctx=64, threads=1) as decoder:
                decoder.prefill(prompt)
                assert [decoder.generate_next_token() for _ in range(8)] == expected


def test_the_path_uses_the_mounted_proc(model: Path, process: Any) -> None:
    """In a PID namespace without a /proc of its own, others find it under the outer PID."""
    unshare = ("unshare", "--pid", "--fork")
    refused = subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode
    if os.geteuid() or refused:
        pytest.skip("a PID namespace needs root and unshare")
    script = f"""
import os, sys, unimem as um
with um.stage({str(model)!r}) as staged:
    print(os.getpid(), staged.path, flush=True)
    sys.stdin.read()
"""
    with process(script, *unshare) as line:
        pid, path = line().split()
        assert pid == "1"
        assert read_elsewhere(path) == model.read_bytes()


def test_without_a_proc_nothing_is_read(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    def refuse(path: str) -> str:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)

    monkeypatch.setattr(os, "readlink", refuse)
    with pytest.raises(PlacementError, match=r"/proc/self: No such file.*mount -t proc"):
        um.stage(model, progress=lambda *now: pytest.fail("it was read"))


@pytest.mark.usefixtures("needs_mount")
def test_another_user_stages_and_root_may_read(
    model: Path, open_folder: Path, process: Any
) -> None:
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    python = shutil.which("python3", path="/usr/bin")
    if python is None:
        pytest.skip("there is no Python that other users may run")
    # Copies in a folder that the other user may read.
    files = (backings._CHILD, um.get_library(), model)
    child, library, copied = (str(shutil.copy(file, open_folder)) for file in files)
    script = f"""
import ctypes, os, sys
import shutil, socket, subprocess  # which that user may not be allowed to read
import unimem as um
from unimem.weights import loading
from unimem.staging import backings
from unimem.system import limits
sys.executable, backings._CHILD = {python!r}, {child!r}
backings.get_library = lambda: {library!r}
os.setgroups([]), os.setresgid(65534, 65534, 65534), os.setresuid(65534, 65534, 65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: as a process that began as this user
with um.stage({copied!r}) as staged:
    print(staged.backing, staged.path, flush=True)
    try:
        os.chmod(staged.path, 0o666)
        print("it was changed", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
    sys.stdin.read()
"""
    with process(script) as line:
        backing, path = line().split()
        refused, same = line(), Path(path).read_bytes() == model.read_bytes()
    if backing != "tmpfs":
        pytest.skip("user namespaces are refused here")
    assert (same, refused) == (True, "Read-only file system")


def test_missing_room_is_reported_at_once(cgroup_512mb: SmallCgroup, tmp_path: Path) -> None:
    model = write_hole(tmp_path / "large.gguf", 600 * MIB)
    said = cgroup_512mb.run(f"""
import os, unimem as um
for backing in ("auto", "tmpfs", "memfd", "shm"):
    before = len(os.listdir("/proc/self/fd"))
    try:
        um.stage({str(model)!r}, backing=backing)
    except um.CapacityError as error:
        print(error)
    assert len(os.listdir("/proc/self/fd")) == before
""")
    assert said.count(f"{cgroup_512mb.name} has room for") == 4


@pytest.mark.usefixtures("no_huge_pages", "no_mount")
def test_without_dev_shm(
    monkeypatch: pytest.MonkeyPatch, model: Path, split: list[Path], tmp_path: Path
) -> None:
    for module in (limits, backings):
        monkeypatch.setattr(module, "SHM", str(tmp_path / "none"))
    with um.stage(model) as staged:
        assert staged.backing == "memfd"
    for nameless in ("memfd", "hugetlb"):
        with pytest.raises(ValueError, match="names side by side"):
            um.stage(split[0], backing=nameless)
    with pytest.raises(PlacementError, match=r"there is no .*none"):
        um.stage(model, backing="shm")
    with pytest.raises(PlacementError, match=r"not shm: there is no .*none"):
        um.stage(split[0])


def test_a_dev_shm_that_is_full_or_closed(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    def refuse(path: str, mode: int) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refuse)
        with pytest.raises(PlacementError, match="/dev/shm: Permission denied"):
            um.stage(model, backing="shm")
    monkeypatch.setattr(limits, "require_shm", full)
    with pytest.raises(um.CapacityError, match=f"{model.stat().st_size} do not fit"):
        um.stage(model, backing="shm")


def test_interrupts_and_changes_end_staging(backing: Any, model: Path) -> None:
    def cancel(done: int, total: int) -> None:
        assert 0 < done <= total == model.stat().st_size
        raise KeyboardInterrupt

    def write(done: int, total: int) -> None:
        with model.open("ab") as file:
            file.write(b"more")

    def fail(done: int, total: int) -> None:
        seen.append(done)
        raise OSError(errno.EINVAL, "mine")  # as if the file system had no direct reads

    seen: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        um.stage(model, backing=backing, progress=cancel)
    drop_from_cache(model)
    with pytest.raises(OSError, match="mine"):
        um.stage(model, progress=fail)
    assert len(seen) == 1
    with pytest.raises(OSError, match="written to") as caught:
        um.stage(model, backing=backing, progress=write)
    assert caught.value.errno == errno.ESTALE


def test_progress_counts_all_parts(split: list[Path]) -> None:
    seen: list[tuple[int, int]] = []
    um.stage(split[0], progress=lambda *now: seen.append(now)).close()
    total = sum(part.stat().st_size for part in split)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    assert {of for _, of in seen} == {total}


def test_bad_files_are_never_staged(tmp_path: Path, split: list[Path]) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(100))
    split[2].unlink()
    refused: list[tuple[Path, type[Exception], str]] = [
        (bad, um.GGUFError, "version"),
        (tmp_path / "none.gguf", FileNotFoundError, "none"),
        (tmp_path, IsADirectoryError, "give a model file"),
        (split[0], FileNotFoundError, "Part 3 of 3"),
    ]
    for path, error, text in refused:
        with pytest.raises(error, match=text):
            um.stage(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backing": "shm", "pages": "2m"}, "come from a pool"),
        ({"backing": "hugetlb", "pages": "4k"}, "come from no pool"),
    ],
)
def test_wrong_options(options: Any, message: str, model: Path) -> None:
    with pytest.raises(ValueError, match=message):
        um.stage(model, **options)


def test_a_closed_stage(model: Path) -> None:
    staged = um.stage(model)
    assert repr(staged).startswith(f"Stage('{model}', {staged.backing}, 6.0 MiB, ")
    with pytest.raises(TypeError, match="pass its path"):
        pickle.dumps(staged)
    staged.close()
    staged.close()
    assert staged.closed
    assert repr(staged) == f"Stage('{model}', closed)"
    for name in ("path", "paths", "fd", "__enter__"):
        with pytest.raises(um.ClosedError, match="is closed"):
            getattr(staged, name)()


def test_a_forgotten_stage_warns(model: Path, run_python: Run) -> None:
    staged = um.stage(model, backing="shm")
    path = staged.path
    with pytest.warns(ResourceWarning, match="unclosed Stage"):
        del staged
    assert not os.path.exists(path)
    # And one of a process that ends.
    script = f"import unimem as um; s = um.stage({str(model)!r}, backing='shm'); print(s.path)"
    path = run_python(script).stdout.strip()
    assert path.startswith("/dev/shm/")
    assert not os.path.exists(path)


def in_shm(folder: Path) -> str:
    """The beginning of a script that stages there."""
    return f"""
import os, signal, sys, unimem as um
from unimem.system import limits
from unimem.staging import backings
limits.SHM = backings.SHM = {str(folder)!r}
"""


def test_readers_go_on_when_the_holder_is_killed(
    backing: Any, model: Path, own_shm: Path, process: Any
) -> None:
    script = f"""{in_shm(own_shm)}
staged = um.stage({str(model)!r}, backing={backing!r})
print(staged.path, flush=True)
sys.stdin.read()
os.kill(os.getpid(), signal.SIGKILL)
"""
    with process(script, status=-signal.SIGKILL) as line:
        path = line()
        reader = start_reader(path)
    assert look(reader)["Rss"] >= model.stat().st_size
    stop(reader)
    assert os.path.exists(path) == (backing == "shm")
    # The next call removes what is left.
    um.stage(model).close()
    assert not os.path.exists(path)


def test_the_next_call_removes_what_was_left(model: Path, run_python: Run, own_shm: Path) -> None:
    ended = run_python(f"""{in_shm(own_shm)}
def kill(*now):
    os.kill(os.getpid(), signal.SIGTERM)

um.stage({str(model)!r}, backing="shm", progress=kill)
""")
    assert ended.returncode == -signal.SIGTERM
    assert len(list(own_shm.iterdir())) == 1
    backings.sweep()
    assert not list(own_shm.iterdir())


def test_a_forked_child_leaves_it_to_its_parent(backing: Any, model: Path) -> None:
    with um.stage(model, backing=backing) as staged:
        path = staged.path

        def reads_and_closes() -> bool:
            same = staged.path == path and Path(path).read_bytes() == model.read_bytes()
            staged.close()
            return same and staged.closed

        assert in_child(reads_and_closes)
        assert read_elsewhere(path) == model.read_bytes()


def test_a_lock_lasts_as_long_as_the_stage(backing: Any, model: Path) -> None:
    if limits.memlock() is not None:
        pytest.skip("the limit on locked memory is too small")
    before = locked_bytes()
    with um.stage(model, backing=backing, lock=True, strict=True) as staged:
        assert staged.granted.locked_bytes >= staged.nbytes
        assert locked_bytes() - before >= staged.nbytes
    assert locked_bytes() == before


def test_a_refused_lock(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    limit = limits.Limit("locked memory (memlock)", 4096, 0, "ulimit -l unlimited")
    monkeypatch.setattr(limits, "memlock", lambda: limit)
    with pytest.raises(PlacementError, match="ulimit -l"):
        um.stage(model, lock=True, strict=True)
    with pytest.warns(um.PlacementWarning, match="ulimit -l"):
        staged = um.stage(model, lock=True)
    with staged:
        assert staged.granted.locked_bytes == 0


def test_pages_lie_on_the_requested_node(backing: Any, model: Path) -> None:
    with um.stage(model, backing=backing, numa="bind:0", strict=True) as staged:
        assert set(staged.granted.nodes) <= {0}
    with pytest.raises(PlacementError, match="node 1000"):
        um.stage(model, backing=backing, numa="bind:1000", strict=True)


def test_staging_does_not_fill_the_page_cache(model: Path) -> None:
    drop_from_cache(model)
    with um.stage(model) as staged:
        assert cached_bytes(model) < 2 * MIB, "the header, and what was read ahead"
        assert read_elsewhere(staged.path) == model.read_bytes()
