"""`unimem stage`: its output, and the small processes that keep staged models."""

# ruff: noqa: F811 - fixtures that are imported, and asked for by their names

from __future__ import annotations

import errno
import fcntl
import gc
import hashlib
import importlib
import io
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import unimem as um
from support.project.tiers import slow_after

pytest.importorskip("typer", reason="the command line needs typer: pip install '.[run]'")

from support.models import llama_cpp
from support.processes.staged_models import (
    MIB,
    TINY,
    indexed,  # noqa: F401 - a fixture
    left,
    look,
    model,  # noqa: F401 - a fixture
    read_elsewhere,
    split,  # noqa: F401 - a fixture
    start_reader,
    stop,
)
from support.processes.warm_python import start
from support.project.documents import check_document
from support.terminal.screens import MAIN, Screen, run_command, show, start_command
from unimem.errors import CapacityError
from unimem.staging import keeper as stage_held
from unimem.staging import staging_folder
from unimem.staging.keeper import drop
from unimem.staging.llama_cpp import RepackedByLlamaCpp
from unimem.system import limits, policy
from unimem.system.process import read_process
from unimem.weights.staged import SCHEMA, Held, holders

cli_stage = importlib.import_module("unimem.cli.stage")
Patch = pytest.MonkeyPatch
NOBODY = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")

pytestmark = [
    pytest.mark.usefixtures("gives_memory_back", "nothing_is_left"),
    # Python warns about forks of processes with threads.
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


def run(*arguments: object) -> Screen:
    return show("stage", *arguments)


def stage(*arguments: object) -> str:
    code, out, err = run(*arguments)
    assert code == 0, err
    path, end = out.split("\n")
    assert end == ""
    return path


def listed() -> Any:
    code, out, err = run("--list", "--json")
    assert code == 0, err
    return json.loads(out)


def kept(folder: Path) -> list[Held]:
    """Return the stages of a folder's models, and leave the user's other stages alone."""
    return [held for held in holders() if held.source.startswith(f"{folder}/")]


def only(folder: Path) -> Held:
    (held,) = kept(folder)
    return held


@pytest.fixture(scope="module", autouse=True)
def _commands_can_be_run() -> None:
    start()


@pytest.fixture
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    before = left()
    yield
    for held in kept(tmp_path):
        drop(held)
    if left() != before:
        gc.collect()
    assert left() == before


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Check that another process reads the same before and after the block."""
    reader = start_reader(path)
    try:
        yield
        look(reader)
    finally:
        stop(reader)


def await_end(pid: int) -> None:
    with suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            assert select.select([fd], [], [], 60)[0], f"process {pid} goes on"
        finally:
            os.close(fd)


def status(pid: int, name: str) -> str:
    text = Path(f"/proc/{pid}/status").read_text()
    return text.split(f"{name}:")[1].splitlines()[0].strip()


def open_sockets(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    with suppress(FileNotFoundError):
        return [fd for fd in os.listdir(folder) if "socket" in os.readlink(f"{folder}/{fd}")]
    return ["one that was just closed"]


def kib(pid: int, name: str) -> int:
    return int(status(pid, name).split()[0])


def test_only_the_path_goes_to_standard_output(model: Path, tmp_path: Path) -> None:
    code, out, err = run(model)
    assert code == 0
    held = only(tmp_path)
    assert out == f"{held.path}\n"
    assert f"{model} is staged: 6.0 MiB" in err
    assert f"process {held.pid} keeps it, until: unimem stage --drop {held.path}" in err
    assert read_elsewhere(held.path) == model.read_bytes()


def test_a_shell_can_pass_any_path_on(model: Path, tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/caf\xe9.gguf"
    os.rename(model, name)
    script = 'path=$("$0" -c "$2" stage "$1") && echo "$path" && cat "$path"'
    words: list[str | bytes] = ["sh", "-c", script, sys.executable, name, MAIN]
    path, _, text = subprocess.check_output(words, stderr=subprocess.DEVNULL).partition(b"\n")
    assert path.endswith(b"/caf\xe9.gguf")
    assert text == Path(os.fsdecode(name)).read_bytes()


def test_the_holder_is_small_and_alone(model: Path, tmp_path: Path) -> None:
    stage(model, "--backing", "memfd")
    held = only(tmp_path)
    assert held.pid == os.getsid(held.pid) == os.getpgid(held.pid), "no terminal's"
    assert int(status(held.pid, "PPid")) != os.getpid(), "nobody's zombie"
    assert os.readlink(f"/proc/{held.pid}/cwd") == "/"
    folder = f"/proc/{held.pid}/fd"
    while open_sockets(held.pid):  # until it has read the order to keep it
        time.sleep(0.01)
    files = {os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)}
    memfds = {"/memfd:model.gguf (deleted)", "/memfd:unimem-stage (deleted)"}
    assert files == {"/dev/null", *memfds}
    assert kib(held.pid, "VmRSS") < 20 << 10
    maps = Path(f"/proc/{held.pid}/maps").read_text()
    for module in (um, np):
        assert f"{os.path.dirname(str(module.__file__))}/" not in maps
    assert um.get_library() not in maps


def test_memory_that_llama_cpp_does_not_share_is_named(
    model: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_stage, "find_repacked", lambda *_: RepackedByLlamaCpp(3 * MIB, 4 * MIB))
    for _ in range(2):  # what was staged already, too
        code, out, err = run(model)
        assert (code, out.count("\n")) == (0, 1)
        assert "a copy of its own of up to 3.0 MiB of it (75% of the tensors)" in err
        assert "--no-repack keeps all of it shared" in err
    cli_stage.stage_for(str(model))  # for `unimem exec --stage`
    assert (
        "a copy of its own of up to 3.0 MiB of it (75% of the tensors)" in capsys.readouterr().err
    )
    monkeypatch.setattr(cli_stage, "find_repacked", lambda *_: RepackedByLlamaCpp(0, 4 * MIB))
    assert "repack" not in run(model).err


def test_a_second_start_reads_nothing(model: Path) -> None:
    def read_bytes() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])

    path = stage(model)
    before = read_bytes()
    assert stage(model) == path
    assert read_bytes() - before < model.stat().st_size // 2
    assert stage(os.path.relpath(model)) == path


def test_a_changed_model_is_staged_again(model: Path, tmp_path: Path) -> None:
    old = stage(model)
    with reading(old):
        with model.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        code, new, err = run(model)
        assert code == 0
        assert f"{model} was written to or replaced: its staged copy is dropped" in err
        assert not os.path.exists(old)
        assert read_elsewhere(new.strip()) == model.read_bytes()
        assert len(kept(tmp_path)) == 1


def test_a_name_of_another_file_drops_nothing(model: Path, tmp_path: Path) -> None:
    """Both are /dev/fd/N, one after the other."""
    other = Path(shutil.copy(model, tmp_path / "other.gguf"))
    paths = []
    fd = os.open(model, os.O_RDONLY)
    try:
        for path in (model, other):
            with path.open("rb") as file:
                os.dup2(file.fileno(), fd)
            paths.append(stage(f"/dev/fd/{fd}"))
        assert [held.source for held in kept(tmp_path)] == [str(model), str(other)]
        assert [Path(path).name for path in paths] == [model.name, other.name]
        assert stage(model) == paths[0]
        (tmp_path / "link.gguf").symlink_to(other)
        assert stage(tmp_path / "link.gguf") == paths[1], "the same file by another name"
        assert run("--drop", f"/dev/fd/{fd}").code == 0
        assert only(tmp_path).source == str(model)
    finally:
        os.close(fd)


def test_other_options_are_another_stage(model: Path, tmp_path: Path) -> None:
    paths = [
        stage(model, *options)
        for options in ((), ("--pages", "4k"), ("--backing", "memfd"), ("--numa", "bind:0"))
    ]
    assert len(set(paths)) == 4
    assert sorted(held.path for held in kept(tmp_path)) == sorted(paths)
    assert stage(model, "--pages", "4k") == paths[1]


def test_two_at_once_stage_it_once(model: Path, tmp_path: Path) -> None:
    both = [start_command("stage", model) for _ in range(2)]
    paths = {process.communicate()[0] for process in both}
    assert paths == {f"{only(tmp_path).path}\n"}


def test_split_models_and_indices(split: list[Path], indexed: Path) -> None:
    assert os.path.basename(stage(split[2])) == split[0].name
    assert os.path.basename(stage(indexed)) == indexed.name
    assert [len(held.paths) for held in kept(indexed.parent)] == [3, 3]


def test_llama_cpp_starts_from_the_printed_path(tmp_path: Path) -> None:
    shutil.copy(TINY, tmp_path / "tiny.gguf")
    path = stage(tmp_path / "tiny.gguf")
    expected, _ = llama_cpp.greedy(TINY, [1, 5, 9], 8)
    assert llama_cpp.greedy(Path(path), [1, 5, 9], 8)[0] == expected


def test_json(model: Path) -> None:
    code, out, _ = run(model, "--json")
    assert code == 0
    document = json.loads(out)
    check_document(document)
    assert document["schema"] == SCHEMA
    assert document["path"] in document["paths"]
    assert (document["source"], document["nbytes"]) == (str(model), model.stat().st_size)
    assert (document["reused"], document["current"]) == (False, True)
    assert document["granted"]["resident_bytes"] >= model.stat().st_size
    again = json.loads(run(model, "--json").out)
    for name in ("staged", "used"):
        assert again.pop(name) == pytest.approx(document.pop(name), abs=60)
    assert again == document | {"reused": True}


@pytest.mark.parametrize("options", [(), ("--backing", "memfd"), ("--page-cache",)])
def test_the_lock_is_the_holder_s(options: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    if limits.memlock() is not None:
        pytest.skip("the limit on locked memory is too small")
    stage(model, "--lock", *options)
    held = only(tmp_path)
    assert kib(held.pid, "VmLck") << 10 >= model.stat().st_size
    assert held.granted.locked_bytes >= model.stat().st_size
    assert kib(os.getpid(), "VmLck") == 0


@pytest.mark.slow
@pytest.mark.usefixtures("eight_huge_pages")
def test_pool_pages_need_no_lock(model: Path, tmp_path: Path) -> None:
    """A limit on locked memory must not keep a model out of the pool."""
    stage(model, "--backing", "hugetlb")
    held = only(tmp_path)
    assert held.granted.locked_bytes >= model.stat().st_size
    assert sum(area.hugetlb_bytes for area in read_process(held.pid).areas) == 8 * MIB
    assert kib(held.pid, "VmLck") == 0


def test_the_page_cache_needs_no_holder(model: Path, tmp_path: Path) -> None:
    with model.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    document = json.loads(run(model, "--page-cache", "--json").out)
    check_document(document)
    assert document["path"] == str(model)
    assert [document[name] for name in ("staged", "used")] == pytest.approx(
        [time.time()] * 2, abs=600
    )
    assert kept(tmp_path) == []
    with cli_stage.open_weights(model, load="map") as weights:
        assert weights.residency().resident_bytes >= model.stat().st_size // 4096 * 4096


def test_the_list(model: Path, tmp_path: Path) -> None:
    path = stage(model)
    code, out, _ = run("--list")
    held = only(tmp_path)
    assert code == 0
    assert f"{path}\n    {model}: 6.0 MiB, {held.backing}, " in out
    assert f"; process {held.pid}\n" in out
    documents = listed()
    (document,) = [each for each in documents if each["pid"] == held.pid]
    assert document["current"]
    os.utime(model)
    assert f"; {model} was written to or replaced\n" in run("--list").out
    documents = listed()
    assert [each["current"] for each in documents if each["pid"] == held.pid] == [False]


def test_nothing_staged(monkeypatch: Patch) -> None:
    monkeypatch.setattr(cli_stage, "holders", list)
    assert run("--list") == (0, "", "unimem: nothing is staged\n")
    assert run("--list", "--json") == (0, "[]\n", "")
    assert run("--drop", "all") == (0, "", "")


def test_drop(model: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    paths = [stage(model), stage(model, "--pages", "4k"), stage(model, "--backing", "shm")]
    assert run("--drop", paths[1]) == (0, "", f"unimem: dropped {paths[1]}, of {model}\n")
    assert [os.path.exists(path) for path in paths] == [True, False, True]
    code, out, _ = run("--drop", model, "--json")
    assert code == 0
    assert {document["path"] for document in json.loads(out)} == {paths[0], paths[2]}
    assert not any(map(os.path.exists, paths))
    code, out, err = run("--drop", model)
    assert (code, out) == (1, "")
    assert "nothing is staged under this name: unimem stage --list" in err
    stage(model)
    monkeypatch.setattr(cli_stage, "holders", lambda: kept(tmp_path))
    assert run("--drop", "all")[0] == 0
    assert kept(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "answer", "code", "dropped"),
    slow_after(
        4,
        [
            ((), "y\n", 0, True),
            ((), "\n", 1, False),
            (("--yes",), None, 0, True),
            (("--dry-run",), None, 0, False),
            ((), "Yes\n", 0, True),
            ((), "no\n", 1, False),
            ((), "", 1, False),  # the end of the input
        ],
    ),
)
def test_drop_all_asks_on_a_terminal(
    options: tuple[str, ...],
    answer: str | None,
    code: int,
    dropped: bool,
    model: Path,
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    path = stage(model)
    monkeypatch.setattr(cli_stage, "holders", lambda: kept(tmp_path))
    monkeypatch.setattr(cli_stage, "_is_asked", lambda: True)
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer or ""))
    found, out, err = run("--drop", "all", *options)
    assert (found, out) == (code, "")
    assert ("Drop 1 model? [y/N] " in err) == (answer is not None)
    assert ("nothing was dropped" in err) == (code == 1)
    assert (f"would drop {path}, of {model}" in err) == (options == ("--dry-run",))
    assert bool(kept(tmp_path)) != dropped


def test_only_a_terminal_is_asked(monkeypatch: Patch) -> None:
    answers = {name: Mock(isatty=Mock(return_value=True)) for name in ("stdin", "stderr")}
    for name, stream in answers.items():
        monkeypatch.setattr(sys, name, stream)
    assert cli_stage._is_asked()
    for name, stream in answers.items():
        for other in (None, Mock(isatty=Mock(return_value=False))):
            monkeypatch.setattr(sys, name, other)
            assert not cli_stage._is_asked()
        monkeypatch.setattr(sys, name, stream)


def test_a_stuck_holder_is_killed(model: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(stage_held, "_PATIENCE_SECONDS", 0.1)
    path = stage(model, "--backing", "shm")
    held = only(tmp_path)
    os.kill(held.pid, signal.SIGSTOP)
    assert run("--drop", path)[0] == 0
    assert kept(tmp_path) == []
    assert not os.path.exists(path)


@pytest.mark.parametrize("backing", ["auto", "memfd", "shm"])
def test_a_killed_holder(backing: str, model: Path, tmp_path: Path) -> None:
    path = stage(model, "--backing", backing)
    pid = only(tmp_path).pid
    with reading(path):
        os.kill(pid, signal.SIGKILL)
        await_end(pid)
        assert str(model) not in run("--list").out
        assert not os.path.exists(path), "what was left in /dev/shm, --list has removed"
    again = stage(model, "--backing", backing)
    assert read_elsewhere(again) == model.read_bytes()


@pytest.mark.parametrize(("script", "said"), [
    ("raise SystemExit(1)", "its process has ended"),
    ("import os, sys; os.write(int(sys.argv[1]), b'12 no memory'); sys.exit(1)", "no memory"),
])  # fmt: skip
@pytest.mark.parametrize("backing", slow_after(1, ["auto", "shm"]))
def test_a_holder_that_fails_at_its_start(
    script: str, said: str, backing: str, model: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "stage_holder.py").write_text(script)
    monkeypatch.setattr(stage_held, "_HOLDER", str(tmp_path / "stage_holder.py"))
    code, out, err = run(model, "--backing", backing)
    assert (code, out) == (1, "")
    assert f"keeping {model}: {said}" in err
    assert kept(tmp_path) == []


def test_an_interrupt_ends_the_holder(model: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    seen = []

    def interrupted(path: str) -> None:
        held = only(tmp_path)
        assert path == held.path
        assert os.path.exists(path)
        seen.append(held.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_stage.terminal, "show_path", interrupted)
    assert run(model, "--backing", "shm")[:2] == (130, "")
    await_end(seen[0])
    assert kept(tmp_path) == []


def test_a_lock_refused_to_the_holder(tmp_path: Path) -> None:
    """A process that may lock nothing asks for the lock."""
    script = (
        "import os, resource, runpy, sys; resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0)); "
        "sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", script, stage_held._HOLDER]
    if shutil.which("setpriv") and os.geteuid() == 0:
        command = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", *command]
    ours, its = os.pipe()
    with (tmp_path / "file").open("wb+") as file, open(ours) as answer:
        file.write(bytes(MIB))
        file.flush()
        words = [*command, str(its), "-1", "True", "-1", str(file.fileno())]
        subprocess.run(words, pass_fds=[its, file.fileno()], check=True)
        os.close(its)
        said = answer.read()
    assert "locking in RAM" in said
    assert "ulimit -l" in said


@pytest.fixture
def own(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A staging folder of this test, which sees its own stages alone."""
    monkeypatch.setenv("UNIMEM_STAGING", str(tmp_path / "staging"))
    for module in (cli_stage, staging_folder):
        monkeypatch.setattr(module, "holders", lambda: kept(tmp_path))
    monkeypatch.setattr(staging_folder, "_START_NS", 0)  # all of them may go at once
    return tmp_path


def copies(folder: Path, n: int) -> list[Path]:
    return [Path(shutil.copy(TINY, folder / f"{number}.gguf")) for number in range(n)]


def test_a_budget_drops_the_least_recently_used(own: Path) -> None:
    models = copies(own, 4)
    nbytes = models[0].stat().st_size
    stage(models[0], "--budget", 3 * nbytes)
    first, second, _ = (stage(each) for each in models[:3])
    assert stage(models[0]) == first, "used again"
    with reading(second):
        last = stage(models[3])
        assert {Path(held.source).name for held in kept(own)} == {"0.gguf", "1.gguf", "3.gguf"}
        assert run("--pin", models[0])[0] == run("--pin", last)[0] == 0
        code, out, err = run(models[2])
        assert (code, out) == (3, "")
        assert "the budget of staged models is 3.1 MiB, and 3.1 MiB are in use, pinned" in err
    code, out, err = run("--list")
    assert "no reader, pinned\n" in out
    assert "3.1 MiB are staged, of a budget of 3.1 MiB\n" in err
    code, out, err = run("--budget", 2 * nbytes)
    assert (code, out) == (0, "")
    assert err.endswith("unimem: staged models take at most 2.1 MiB\n")
    assert [Path(held.source).name for held in kept(own)] == ["0.gguf", "3.gguf"]
    document = json.loads(run("--unpin", models[0], "--json").out)[0]
    check_document(document)
    assert (document["pinned"], document["readers"], document["has_hidden_readers"]) == (
        False,
        [],
        False,
    )
    assert document["staged"] <= document["used"] <= time.time()
    assert "KiB beyond it are in use" in run("--budget", nbytes // 2)[2]
    assert run("--budget", "none")[2] == "unimem: staged models have no budget\n"
    for budget in ("none", "1G"):
        code, out, err = run("--budget", budget, "--json")
        assert (code, out) == (2, "")
        assert "--json is for" in err
    assert len({stage(each) for each in models}) == 4


def test_a_share_of_what_this_cgroup_may_use(own: Path, monkeypatch: Patch) -> None:
    limit = replace(limits.memory_limits()[0], limit_bytes=10 * MIB)
    monkeypatch.setattr(limits, "memory_limits", lambda: (limit,))
    assert run("--budget", "50%")[2] == "unimem: staged models take at most 5.0 MiB\n"


def test_a_stable_path(own: Path, model: Path) -> None:
    link = str(own / "at" / "model.gguf")
    assert stage(model, "--at", own / "at") == link
    assert listed()[0]["links"] == [link]
    assert f"    {link}\n" in run("--list").out
    with reading(link):
        os.utime(model)
        assert stage(model, "--at", own / "at") == link, "staged anew"
        assert run("--drop", link)[0] == 0
    assert not os.path.lexists(link)


def test_a_link_goes_if_its_model_is_not_kept(own: Path, model: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(cli_stage.terminal, "show_path", Mock(side_effect=KeyboardInterrupt))
    assert run(model, "--at", own / "at", "--backing", "shm")[0] == 130
    assert os.listdir(own / "at") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="root may be another user")
@pytest.mark.parametrize(
    ("options", "may"), [(("--mode", "444"), True), (("--group", "root"), False)]
)
def test_readers_of_other_users(
    options: tuple[str, str], may: bool, own: Path, model: Path
) -> None:
    path = stage(model, *options)
    mode, folder_mode = (os.stat(name).st_mode & 0o777 for name in (path, os.path.dirname(path)))
    assert (mode, folder_mode) == ((0o444, 0o755) if may else (0o440, 0o750))
    read = subprocess.run([*NOBODY, "head", "-c", "4", path], capture_output=True, check=False)
    assert read.stdout == (b"GGUF" if may else b"")
    assert stage(model, *options) == path


def test_in_the_foreground_it_stays_until_sigterm(own: Path, model: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(own / "socket"))
        environment = os.environ | {"NOTIFY_SOCKET": str(own / "socket")}
        words = ("stage", model, "--foreground", "--at", own / "at")
        with start_command(*words, env=environment) as process:
            assert manager.recv(100) == b"READY=1"
            assert process.stdout is not None
            assert process.stdout.readline() == f"{own}/at/model.gguf\n"
            process.terminate()
            process.communicate()
    assert process.returncode == 0
    assert (kept(own), os.listdir(own / "at")) == ([], [])


def test_a_model_that_does_not_fit_ends_with_3(model: Path, monkeypatch: Patch) -> None:
    does_not_fit = CapacityError("it does not fit", 0, 0, 0)
    monkeypatch.setattr(limits, "require", Mock(side_effect=does_not_fit))
    code, out, err = run(model, "--backing", "memfd")
    assert (code, out) == (3, "")
    assert "does not fit" in err


def note(*, owner: int | None = None, seals: int = fcntl.F_SEAL_WRITE, **changed: Any) -> int:
    keeps: dict[str, Any] = {
        "schema": SCHEMA, "path": __file__, "paths": [__file__], "source": f"{__file__}.gguf",
        "versions": [], "asked": {}, "backing": "memfd", "nbytes": 0, "warnings": [],
        "granted": asdict(um.Placement("4k", 4096, 0, 0, 0, 0, 0)),
    }  # fmt: skip
    fd = os.memfd_create("unimem-stage", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.write(fd, json.dumps(keeps | changed).encode())
    if owner is not None:
        os.fchown(fd, owner, owner)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@contextmanager
def with_descriptor(fd: int, *command: str) -> Iterator[int]:
    """Start another process with a descriptor."""
    words, pipe = [*command, "sh", "-c", "echo ready; read line"], subprocess.PIPE
    with subprocess.Popen(words, pass_fds=[fd], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid
        process.communicate("\n")


@pytest.mark.parametrize(("options", "listed"), [
    ({}, True),                            ({"owner": 65534}, False),
    ({"seals": fcntl.F_SEAL_GROW}, False), ({"schema": "other"}, False),
    ({"granted": []}, False),              ({"more": 1}, False),
    ({"program": [1, 1]}, False),          ({"program": "me"}, False),
])  # fmt: skip
def test_only_our_sealed_note_counts(options: dict[str, Any], listed: bool) -> None:
    """A setuid program runs as root with the descriptors of whoever started it."""
    if "owner" in options and os.geteuid() != 0:
        pytest.skip("only root may give a file to another user")
    with open(note(**options), "rb") as file, with_descriptor(file.fileno()) as pid:
        assert (pid in {held.pid for held in holders()}) is listed


def test_a_reader_of_a_note_is_no_holder() -> None:
    """It has the same memory open, and `--drop` would end it."""
    with (
        open(note(), "rb") as file,
        open(f"/proc/self/fd/{file.fileno()}", "rb") as looked_at,
        with_descriptor(looked_at.fileno()) as pid,
    ):
        found = {held.pid for held in holders()}
    assert os.getpid() in found
    assert pid not in found


def test_a_setuid_program_of_another_user_is_no_holder() -> None:
    if os.geteuid() != 0 or not shutil.which("setpriv") or not shutil.which("su"):
        pytest.skip("needs root, setpriv and su")
    null = subprocess.DEVNULL
    with (
        open(note(owner=65534), "rb") as file,
        subprocess.Popen(
            [*NOBODY, "su", "-", "root"], pass_fds=[file.fileno()],
            stdin=subprocess.PIPE, stdout=null, stderr=null, cwd="/",
        ) as process,
    ):  # fmt: skip
        try:
            cmdline = Path(f"/proc/{process.pid}/cmdline")
            while not cmdline.read_bytes().startswith(b"su\0"):
                assert process.poll() is None
            assert process.pid not in {held.pid for held in holders()}
        finally:
            process.kill()


def test_stages_of_a_program_are_listed_and_stay(model: Path) -> None:
    with um.stage(model, backing="memfd") as staged:
        goes = f"{staged.path} goes with process {os.getpid()}, which has staged it"
        listed = run("--list").out
        assert f"{staged.path}\n    {model}: 6.0 MiB, memfd, " in listed
        assert f"; process {os.getpid()}, which has staged it itself\n" in listed
        path = stage(model, "--backing", "memfd")
        assert path != staged.path, "it would go with the program"
        dropped = f"dropped {path}, of {model}"
        assert run("--drop", model) == (0, "", f"unimem: {goes}\nunimem: {dropped}\n")
        for what in (staged.path, model):
            code, out, err = run("--drop", what)
            assert (code, out) == (1, "")
            assert goes in err
        assert read_elsewhere(staged.path) == model.read_bytes()


def test_what_is_left_alone_is_named(monkeypatch: Patch) -> None:
    left = [f"/dev/shm/unimem-stage-{i} (a FIFO of user 7, mode 0600)" for i in range(7)]
    monkeypatch.setattr("unimem.cli.stage.sweep", lambda: left)
    told = f"unimem: left alone: {', '.join(left[:5])} and 2 more\n"
    assert run("--list").err.startswith(told)
    assert run("--drop", "all").err.startswith(told)


def test_a_vanished_stage_is_staged_again(model: Path, tmp_path: Path) -> None:
    path = stage(model, "--backing", "shm")
    shutil.rmtree(os.path.dirname(path))
    assert f"; {path}: No such file or directory\n" in run("--list").out
    code, out, err = run(model, "--backing", "shm")
    assert code == 0
    assert f"{path}: No such file or directory: its staged copy is dropped" in err
    assert read_elsewhere(out.strip()) == model.read_bytes()
    assert len(kept(tmp_path)) == 1


def test_the_only_copy_stays_when_the_model_is_gone(model: Path) -> None:
    path = stage(model)
    expected = model.read_bytes()
    model.unlink()
    code, out, err = run(model)
    assert (code, out) == (1, "")
    assert f"{model}: No such file" in err
    model.write_bytes(b"GGUF" + bytes(100))
    assert run(model)[0] == 1
    assert read_elsewhere(path) == expected


@pytest.mark.filterwarnings("always::unimem.PlacementWarning")
def test_ungranted_requests_are_reported_each_time(model: Path, monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(policy, "pool_shortfall", lambda *_: "the pool has no room")
        first = run(model, "--pages", "2m")
    second = run(model, "--pages", "2m")
    warning = f"staging {model}: the pool has no room"
    for screen in (first, second):
        assert screen.code == 0
        assert screen.err.endswith(f"unimem: warning: {warning}\n")  # the answer comes before
    assert "was staged already" in second.err
    assert json.loads(run(model, "--pages", "2m", "--json").out)["warnings"] == [warning]


def test_an_unwritable_standard_output(model: Path, tmp_path: Path) -> None:
    done = run_command("stage", model, "--backing", "shm", stdout="/dev/full")
    assert done.code == 1
    assert "standard output" in done.err
    for held in kept(tmp_path):  # which may be about to end
        await_end(held.pid)
    assert kept(tmp_path) == []


def test_an_unwritable_standard_error(model: Path, tmp_path: Path) -> None:
    done = run_command("stage", model, stderr="/dev/full")
    assert done.code == 0
    assert done.out == f"{only(tmp_path).path}\n"


@pytest.mark.parametrize(
    "closed", ["<&- 2>&-", *(pytest.param(one, marks=pytest.mark.slow) for one in ("<&-", "2>&-"))]
)
def test_closed_standard_streams(closed: str, model: Path, tmp_path: Path) -> None:
    lock = "" if limits.memlock() is not None else "--lock"
    script = f'"$0" -c "$1" stage "$2" --backing memfd {lock} {closed}'
    path = subprocess.check_output(["sh", "-c", script, sys.executable, MAIN, model], text=True)
    assert read_elsewhere(path.strip()) == model.read_bytes()
    assert len(kept(tmp_path)) == 1


def test_a_note_may_be_long(model: Path) -> None:
    """An index with hundreds of files has a note longer than a command-line argument may be."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 3100:
        pytest.skip("a note of 3,000 files needs as many descriptors (ulimit -n)")
    with cli_stage.make_stage(model) as staged:
        versions = staged._versions * 3000
        staged._versions = versions
        staged._names *= 3000
        with stage_held.hold(staged, str(model), {"lock": False}, []) as held:
            assert len(held.to_dict()["paths"]) == 3000
            assert held in holders()
        drop(held)


def test_a_child_with_an_unreadable_pipe_is_waited_for(model: Path, monkeypatch: Patch) -> None:
    """The child already runs when its pipe cannot be read."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    fails = Mock(side_effect=OSError(errno.EIO, "no answer"))
    held = stage_held.hold(cli_stage.make_stage(model), str(model), {"lock": False}, [])
    with monkeypatch.context() as patch:
        patch.setattr(os, "read", fails)
        with pytest.raises(OSError, match="no answer"), held:
            pass
    fails.assert_called_once()
    assert children.read_text() == before


def test_a_process_with_a_reused_pid_is_left_alone(model: Path, tmp_path: Path) -> None:
    stage(model)
    with subprocess.Popen(["sleep", "60"]) as other:
        held = only(tmp_path)
        # Like an earlier holder: processes started in the same tick cannot share a PID.
        drop(replace(held, pid=other.pid, began=held.began - 1))
        assert other.poll() is None
        other.kill()
    assert len(kept(tmp_path)) == 1


@contextmanager
def descriptors_left(n: int) -> Iterator[None]:
    """Let this process open n more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(n + 1)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(opened) + 1, hard))
        with suppress(OSError):
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(n):
            os.close(opened.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in opened:
            os.close(fd)


def test_a_holder_that_cannot_be_seen_is_not_taken_for_gone(model: Path, tmp_path: Path) -> None:
    path = stage(model, "--backing", "memfd")
    held = only(tmp_path)
    for n in range(2):
        with (
            descriptors_left(n),
            pytest.raises(um.PlacementError, match=f"{held.pid} still keeps {path}.*ulimit -n"),
        ):
            drop(held)
        assert kept(tmp_path) == [held]
    for n in range(8):
        with descriptors_left(n):
            code, out, err = run("--drop", path)
        assert (code, out) in ((0, ""), (1, ""))
        assert "nothing is staged" not in err
        assert kept(tmp_path) == ([] if code == 0 else [held])
        if code == 0:
            break
    assert code == 0


def name_of(model: Path) -> str:
    key = hashlib.sha256(os.fsencode(model)).hexdigest()[:32]
    return f"\0unimem-stage-{os.geteuid()}-{key}"


def test_a_waiting_command_names_the_other_one(model: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(name_of(model))
        other.listen()
        waiting = start_command("stage", model)
        assert waiting.stderr is not None
        said = f"unimem: {model}: waiting for a process that stages it, {os.getpid()}\n"
        assert waiting.stderr.readline() == said
        assert waiting.poll() is None
    out, err = waiting.communicate()
    assert waiting.returncode == 0, err
    assert read_elsewhere(out.strip()) == model.read_bytes()


@pytest.mark.parametrize("listens", slow_after(1, [
    "pass", "s.listen()", "s.listen(0); c = socket.socket(socket.AF_UNIX); c.connect(n)",
]))  # fmt: skip
def test_another_user_cannot_make_a_command_wait(listens: str, model: Path) -> None:
    """Neither locking the model file nor taking a command's socket name has an effect."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("needs root and setpriv")
    script = (
        "import socket, sys; n = '\\0' + sys.argv[1]; s = socket.socket(socket.AF_UNIX); "
        f"s.bind(n); {listens}; print('ready', flush=True); input()"
    )
    with (
        model.open() as file,
        subprocess.Popen(
            [*NOBODY, "/usr/bin/env", "python3", "-c", script, name_of(model)[1:]],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as other,
    ):  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        fcntl.flock(file, fcntl.LOCK_EX)
        code, _, err = run(model)
        assert code == 0
        assert "waiting" not in err
        other.communicate("\n")


def test_a_holder_removes_only_its_own_folder(model: Path, tmp_path: Path) -> None:
    folder = os.path.dirname(stage(model, "--backing", "shm"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious").touch()
    os.rename(folder, f"{folder}-moved")
    os.symlink(other, folder)
    try:
        held = only(tmp_path)
        drop(held)
        assert (other / "precious").exists()
        assert not os.path.exists(f"{folder}-moved")
    finally:
        os.unlink(folder)


def test_a_proc_of_an_outer_namespace(model: Path, tmp_path: Path) -> None:
    """The printed path is in that /proc, and a drop ends the process it belongs to."""
    script = f'path=$("$0" -c "{MAIN}" stage "$1") && cat "$path" | cmp - "$1" && ' + (
        f'"$0" -c "{MAIN}" stage --drop "$1" && ! test -e "$path"'
    )
    unshare = ["unshare", "--pid", "--fork"]
    if subprocess.run([*unshare, "true"], check=False).returncode:
        pytest.skip("this process may not make a PID namespace")
    words = [*unshare, "sh", "-c", script, sys.executable, str(model)]
    done = subprocess.run(words, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    assert kept(tmp_path) == []
