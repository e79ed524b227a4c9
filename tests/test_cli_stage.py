"""`unimem stage`: what it prints, and the small processes that keep what it has staged."""

# ruff: noqa: F811 - fixtures that are imported, and asked for by their names

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs typer: pip install '.[run]'")

from test_stage import (
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
from unimem import limits, stage_held
from unimem.cli import main
from unimem.errors import CapacityError
from unimem.stage_held import SCHEMA, Held, drop, holders

cli_stage = importlib.import_module("unimem.cli.stage")
MAIN = "import sys; from unimem.cli import main; sys.exit(main())"

pytestmark = [
    pytest.mark.usefixtures("gives_memory_back", "nothing_is_left"),
    # Of processes that have threads, which Python warns of.
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]

Stage = Callable[..., str]


def kept(folder: Path) -> list[Held]:
    """What is staged of the models in a folder: others of this user are not ours to end."""
    return [held for held in holders() if held.source.startswith(f"{folder}/")]


@pytest.fixture
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    before = left()
    yield
    for held in kept(tmp_path):
        drop(held)
    gc.collect()
    assert left() == before


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Call the command in this process: the exit code, standard output and error."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(["stage", *map(str, arguments)])
        return (code, *capfd.readouterr())

    return call


@pytest.fixture
def stage(run: Callable[..., tuple[int, str, str]]) -> Stage:
    """Stage a model, and give the path that was printed."""

    def call(*arguments: str | Path) -> str:
        code, out, err = run(*arguments)
        assert code == 0, err
        path, end = out.split("\n")
        assert end == ""
        return path

    return call


def status(pid: int, name: str) -> str:
    text = Path(f"/proc/{pid}/status").read_text()
    return text.split(f"{name}:")[1].splitlines()[0].strip()


def kib(pid: int, name: str) -> int:
    return int(status(pid, name).split()[0])


# ---- staging ---------------------------------------------------------------------------------


def test_only_the_path_goes_to_standard_output(
    run: Any,
    model: Path,
    tmp_path: Path,
) -> None:
    code, out, err = run(model)
    assert code == 0
    (held,) = kept(tmp_path)
    assert out == f"{held.path}\n"
    assert f"{model} is staged: 6.0 MiB" in err
    assert f"process {held.pid} keeps it, until: unimem stage --drop {held.path}" in err
    assert read_elsewhere(held.path) == model.read_bytes()


def test_a_name_that_is_no_text_is_passed_on_as_it_is(model: Path, tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/caf\xe9.gguf"
    os.rename(model, name)
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "stage", name], stdout=subprocess.PIPE, check=True
    )
    path = done.stdout.removesuffix(b"\n")
    assert path.endswith(b"/caf\xe9.gguf")
    assert subprocess.check_output(["cat", path]) == Path(os.fsdecode(name)).read_bytes()


def test_a_shell_passes_it_on(model: Path) -> None:
    command = f'cat "$("{sys.executable}" -c "$2" stage "$1")"'
    done = subprocess.run(
        ["sh", "-c", command, "sh", str(model), MAIN], capture_output=True, check=True
    )
    assert done.stdout == model.read_bytes()


def test_what_keeps_it_is_small_and_alone(stage: Stage, model: Path, tmp_path: Path) -> None:
    stage(model, "--backing", "memfd")
    (held,) = kept(tmp_path)
    assert held.pid == os.getsid(held.pid) == os.getpgid(held.pid), "no terminal's"
    assert int(status(held.pid, "PPid")) != os.getpid(), "nobody's zombie"
    assert os.readlink(f"/proc/{held.pid}/cwd") == "/"
    files = {os.readlink(f"/proc/{held.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{held.pid}/fd")}
    assert files == {"/dev/null", "/memfd:model.gguf (deleted)"}
    assert kib(held.pid, "VmRSS") < 20 << 10
    maps = Path(f"/proc/{held.pid}/maps").read_text()
    assert "unimem" not in maps
    assert "numpy" not in maps


def test_a_second_start_reads_nothing(stage: Stage, model: Path) -> None:
    def read_bytes() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])

    path = stage(model)
    before = read_bytes()
    assert stage(model) == path
    assert read_bytes() - before < MIB < model.stat().st_size
    assert stage(os.path.relpath(model)) == path


def test_a_changed_model_is_staged_anew(run: Any, model: Path, tmp_path: Path) -> None:
    _, old, _ = run(model)
    reader = start_reader(old.strip())
    with model.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    code, new, err = run(model)
    assert code == 0
    assert f"{model} was written to or replaced: what was staged of it is dropped" in err
    assert not os.path.exists(old.strip())
    assert read_elsewhere(new.strip()) == model.read_bytes()
    assert len(kept(tmp_path)) == 1
    look(reader)  # which asserts that it reads what it did before
    stop(reader)


def test_other_options_are_another_stage(stage: Stage, model: Path, tmp_path: Path) -> None:
    paths = [
        stage(model, *options)
        for options in ((), ("--pages", "4k"), ("--backing", "memfd"), ("--numa", "bind:0"))
    ]
    assert len(set(paths)) == 4
    assert sorted(held.path for held in kept(tmp_path)) == sorted(paths)
    assert stage(model, "--pages", "4k") == paths[1]


def test_two_at_once_stage_it_once(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAIN, "stage", str(model)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate()[0] for process in both}
    assert paths == {f"{held.path}\n" for held in kept(tmp_path)}
    assert len(paths) == 1


def test_split_models_and_indices(stage: Stage, split: list[Path], indexed: Path) -> None:
    assert os.path.basename(stage(split[2])) == split[0].name
    assert os.path.basename(stage(indexed)) == indexed.name
    (of_split, of_index) = (len(held.paths) for held in kept(indexed.parent))
    assert (of_split, of_index) == (3, 3)


def test_llama_cpp_starts_from_the_printed_path(stage: Stage, tmp_path: Path) -> None:
    pytest.importorskip("cyllama", reason="cyllama (extra test) is the peer: pip install '.[test]'")
    import llama_cpp

    shutil.copy(TINY, tmp_path / "tiny.gguf")
    path = stage(tmp_path / "tiny.gguf")
    expected, _ = llama_cpp.greedy(TINY, [1, 5, 9], 8)
    assert llama_cpp.greedy(Path(path), [1, 5, 9], 8)[0] == expected


def test_json(run: Any, model: Path) -> None:
    code, out, _ = run(model, "--json")
    assert code == 0
    document = json.loads(out)
    assert document["schema"] == SCHEMA
    assert document["path"] in document["paths"]
    assert (document["source"], document["nbytes"]) == (str(model), model.stat().st_size)
    assert (document["reused"], document["current"]) == (False, True)
    assert document["granted"]["resident_bytes"] >= model.stat().st_size
    assert json.loads(run(model, "--json")[1]) == document | {"reused": True}


# ---- the lock --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--backing", "memfd"), ("--page-cache",)])
def test_the_lock_is_the_holders(
    options: tuple[str, ...],
    stage: Stage,
    model: Path,
    tmp_path: Path,
) -> None:
    if limits.memlock() is not None:
        pytest.skip("the limit on locked memory is too small")
    stage(model, "--lock", *options)
    (held,) = kept(tmp_path)
    assert kib(held.pid, "VmLck") << 10 >= model.stat().st_size
    assert held.granted.locked_bytes >= model.stat().st_size
    assert kib(os.getpid(), "VmLck") == 0


def test_the_page_cache_needs_no_holder(
    stage: Stage,
    model: Path,
    tmp_path: Path,
) -> None:
    with model.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert stage(model, "--page-cache") == str(model)
    assert kept(tmp_path) == []
    with cli_stage.open_weights(model, load="map") as weights:
        assert weights.residency().resident_bytes >= model.stat().st_size // 4096 * 4096


# ---- what is staged, and its end -------------------------------------------------------------


def test_the_list(run: Any, stage: Stage, model: Path, tmp_path: Path) -> None:
    path = stage(model)
    code, out, _ = run("--list")
    (held,) = kept(tmp_path)
    assert code == 0
    assert f"{path}\n    {model}: 6.0 MiB, {held.backing}, " in out
    assert f"; process {held.pid}\n" in out
    documents = json.loads(run("--list", "--json")[1])
    (document,) = [each for each in documents if each["pid"] == held.pid]
    assert document["current"]
    os.utime(model)
    assert "the model was written to or replaced since" in run("--list")[1]
    documents = json.loads(run("--list", "--json")[1])
    assert [each["current"] for each in documents if each["pid"] == held.pid] == [False]


def test_nothing_staged(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_stage, "holders", list)
    assert run("--list") == (0, "", "unimem: nothing is staged\n")
    assert run("--list", "--json") == (0, "[]\n", "")
    assert run("--drop", "all") == (0, "", "")


def test_drop(
    run: Any,
    stage: Stage,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_a_holder_that_does_not_answer_is_killed(
    run: Any,
    stage: Stage,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage_held, "_PATIENCE_SECONDS", 0.1)
    path = stage(model, "--backing", "shm")
    (held,) = kept(tmp_path)
    os.kill(held.pid, signal.SIGSTOP)
    assert run("--drop", path)[0] == 0
    assert kept(tmp_path) == []
    assert not os.path.exists(path)


@pytest.mark.parametrize("backing", ["auto", "memfd", "shm"])
def test_a_holder_that_was_killed(
    backing: str,
    run: Any,
    stage: Stage,
    model: Path,
    tmp_path: Path,
) -> None:
    path = stage(model, "--backing", backing)
    (held,) = kept(tmp_path)
    reader = start_reader(path)
    fd = os.pidfd_open(held.pid)
    signal.pidfd_send_signal(fd, signal.SIGKILL)
    select.select([fd], [], [])
    os.close(fd)
    assert str(model) not in run("--list")[1]
    assert not os.path.exists(path), "what was left in /dev/shm, --list has removed"
    look(reader)
    stop(reader)
    again = stage(model, "--backing", backing)
    assert read_elsewhere(again) == model.read_bytes()


# ---- what goes wrong -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("raise SystemExit(1)", "its process has ended"),
        ("import os, sys; os.write(int(sys.argv[2]), b'12 no memory'); sys.exit(1)", "no memory"),
    ],
)
@pytest.mark.parametrize("backing", ["auto", "shm"])
def test_a_holder_that_fails_at_its_start(
    script: str,
    said: str,
    backing: str,
    run: Any,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "stage_holder.py").write_text(script)
    monkeypatch.setattr(stage_held, "_HOLDER", str(tmp_path / "stage_holder.py"))
    code, out, err = run(model, "--backing", backing)
    assert (code, out) == (1, "")
    assert f"keeping {model}: {said}" in err
    assert kept(tmp_path) == []


def test_a_holder_whose_command_was_interrupted_ends(
    run: Any,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def interrupted(pid: int) -> None:
        seen.append(os.pidfd_open(pid))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stage_held, "_read", interrupted)
        patch.setattr(cli_stage, "holders", list)
        code, out, _ = run(model, "--backing", "shm")
    assert (code, out) == (130, "")
    select.select(seen, [], [], 10)
    os.close(seen[0])
    assert kept(tmp_path) == []


def test_a_lock_that_the_holder_is_refused(tmp_path: Path) -> None:
    """Asked for by a process that may lock nothing."""
    holder = stage_held._HOLDER
    with (tmp_path / "file").open("wb+") as file:
        file.write(bytes(MIB))
        file.flush()
        ours, its = os.pipe()
        script = (
            "import os, resource, runpy, sys; resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0)); "
            "sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        )
        command = [
            *(sys.executable, "-c", script, holder, "{}", str(its), "True", "", str(file.fileno()))
        ]
        if shutil.which("setpriv") and os.geteuid() == 0:
            command = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", *command]
        subprocess.run(command, pass_fds=[its, file.fileno()], check=True)
        os.close(its)
        said = os.read(ours, 256).decode()
        os.close(ours)
    assert "locking in RAM" in said
    assert "ulimit -l" in said


def test_exit_codes(
    run: Any,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(100))
    assert run(bad)[:2] == (1, "")
    code, out, err = run(tmp_path / "none.gguf")
    assert (code, out) == (1, "")
    assert "none.gguf: No such file" in err

    def require(nbytes: int, what: str) -> None:
        raise CapacityError(f"{what} does not fit", 0, 0, nbytes)

    monkeypatch.setattr(limits, "require", require)
    code, out, err = run(model, "--backing", "memfd")
    assert (code, out) == (3, "")
    assert "does not fit" in err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("model.gguf", "--list"),
        ("--list", "--drop", "all"),
        ("model.gguf", "--numa", "everywhere"),
        ("model.gguf", "--pages", "8k"),
        ("model.gguf", "--backing", "disk"),
        ("model.gguf", "--page-cache", "--backing", "shm"),
        ("model.gguf", "--page-cache", "--numa", "bind:0"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], run: Any) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "Usage: unimem stage" in err


def test_command_lines_of_others_are_no_holders(tmp_path: Path) -> None:
    description: dict[str, Any] = {"schema": SCHEMA, "granted": {"nodes": {}}}
    for text in ("{", "[]", "{}", json.dumps(description), json.dumps({"schema": "other"})):
        script = tmp_path / "stage_holder.py"
        script.write_text("print('ready', flush=True); input()")
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert process.pid not in {held.pid for held in holders()}
        process.communicate("\n")
