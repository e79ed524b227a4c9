"""Wrong and unusual arguments, names and streams.

Each command ends with its exit code from docs/cli.md and an explanation, without a traceback.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("unimem_ggml", reason="the engine needs ggml: pip install ./ggml '.[run]'")

from support.terminal.screens import Screen, show
from unimem.engine import embedded_model

# An exception that escaped without an explanation.
BARE = re.compile(r"Traceback|\b(Attribute|Key|Index|Type|UnboundLocal)Error\b|object has no attr")
LONG = "x" * 5000
NO_PROCESS = 2**22 + 1  # beyond the most that Linux gives


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make files of every kind, which rows name by relative paths."""
    made = tmp_path_factory.mktemp("strangers")
    model = embedded_model().read_bytes()
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    files = {
        "empty.gguf": b"",
        "text.gguf": b"no model at all\n" * 99,
        "cut.gguf": model[:5000],
        "short.gguf": model[:-5000],
        "cut.safetensors": b"\x10\0\0\0\0\0\0\0{}",
        "m.safetensors": struct.pack("<Q", len(header)) + header + bytes(8),
        "foreign.session": b"UNIMEMKV" + bytes(5000),
    }
    for name, data in files.items():
        (made / name).write_bytes(data)
    for name in ("m.gguf", "a model.gguf", "日本語.gguf", "two\nlines.gguf", "-"):
        shutil.copy(embedded_model(), made / name)
    (made / "folder").mkdir()
    os.mkfifo(made / "pipe")
    return made


# Arguments, exit code, and words on standard error; without words, it must be empty.
# fmt: off
USAGE = [
    ([], 2, "Usage: unimem"),
    (["walk"], 2, "No such command 'walk'"),
    (["--walk"], 2, "No such option: --walk"),
    (["plan", "--walk"], 2, "No such option: --walk"),
    (["plan", "m.gguf", "m.gguf"], 2, "unexpected extra argument"),
    (["doctor", "m.gguf"], 2, "unexpected extra argument"),
    (["inspect"], 2, "Missing argument 'MODEL'"),
    (["plan", "--ctx"], 2, "--ctx"),
    (["plan", "--ctx", "0"], 2, "'--ctx': expected a whole number from 1 to 2147483647"),
    (["plan", "--ctx", "-8k"], 2, "as 512, 8192 or 8k; got '-8k'"),
    (["plan", "--ctx", "nan"], 2, "got 'nan'"),
    (["plan", "--ctx", ""], 2, "got ''"),
    (["plan", "--ctx", "9" * 5000], 2, "got '99999"),
    (["plan", "--window", "1e3"], 2, "'--window': expected a whole number"),
    (["plan", "--window", "513"], 2, "--window: expected at most the context, 512, got 513"),
    (["run", "--ctx", "8", "--window", "9"], 2, "--window: expected at most the context, 8"),
    (["plan", ""], 2, "expected the path of a model, got ''"),
    (["run", ""], 2, "expected the path of a model, got ''"),
    (["inspect", ""], 2, "expected the path of a model, got ''"),
    (["plan", "--kv-dtype", "int3"], 2, "'--kv-dtype'"),
    (["plan", "--pages", "3m"], 2, "'--pages'"),
    (["plan", "--load", "slowly"], 2, "'--load'"),
    (["plan", "--numa", "bind:"], 2, "--numa: expected 'bind:NODES'"),
    (["plan", "--numa", "bind:1024"], 2, "from 0 to 1023; got 'bind:1024'"),
    (["plan", "--threads", "1.5"], 2, "'--threads'"),
    (["plan", "--threads", "0"], 2, "'--threads'"),
    *(
        (["plan", *words.split()], 2, words.split()[0])
        for words in (
            "--batch 0", "--kv-dtype q3_K", "--kv-dtype q8_0,", "--numa nowhere", "--sessions 0",
            "--memory much", "--memory 0", "--cpus 4", "--cpus 0 --memory 1G", "--pool 2m",
            "--nodes 2", "--pool 2m=x --memory 1G", "--pool 3m=4 --memory 1G",
            "--pool 2m=513 --memory 1G", "--nodes 0 --memory 1G", "--cgroup /nowhere",
            "--cgroup / --memory 1G", "--device cuda:0 --memory 1G",
        )
    ),
    (["plan", "--sessions", "99999"], 2, "'--sessions'"),
    (["plan", "--batch", "-1"], 2, "'--batch'"),
    (["plan", "--device", "gpu"], 2, "--device: expected cuda:N, as in cuda:0, got 'gpu'"),
    (["plan", "--device", "cuda:" + "9" * 30], 2, "--device: expected cuda:N"),
    (["run", "-n", "0"], 2, "'--tokens' / '-n': expected a whole number from 1"),
    (["run", "-n", "9" * 30], 2, "got '99999"),
    (["run", "-p", "a\udcff"], 2, "--prompt: expected text in UTF-8"),
    (["run", "--temperature", "nan"], 2, "temperature"),
    (["run", "--temperature", "inf"], 2, "temperature: expected a number from 0 on"),
    (["run", "--top-p", "2"], 2, "top_p: expected a number above 0 and up to 1"),
    (["run", "--seed", "-1"], 2, "'--seed'"),
    (["run", "--top-p", "0"], 2, "top_p: expected a number above 0"),
    (["run", "m.gguf", "more.gguf"], 2, "unexpected extra argument"),
    (["run", "m.gguf", "--chat", "--json"], 2, "--chat needs a message with --json"),
    (["chat"], 2, "Missing argument 'MODEL.gguf'"),
    (["chat", ""], 2, "expected the path of a model, got ''"),
    *(
        (["run", *words.split()], 2, words.split()[0])
        for words in (
            "--ctx 0", f"--ctx {2**31}", "--kv-dtype q9", "--load mmap", "-n many",
            "--pages 3k", "--temperature -1", "--top-k -1", "--window 0", "--unknown",
            "--numa bind:1024",
        )
    ),
    (["run", "--save-session", ""], 2, "--save-session: expected the path of a file"),
    (["report", "0"], 2, "expected PID, the number of a process, got '0': 'unimem report' lists"),
    (["report", "-1"], 2, "-1"),
    (["report", "--", "-1"], 2, "got '-1'"),
    (["report", "1.5"], 2, "got '1.5'"),
    (["report", "python"], 2, "got 'python'"),
    (["report", "\uff19"], 2, "expected PID"),
    (["report", "9" * 5000], 2, "expected PID"),
    (["report", "1", "--watch", "--mappings"], 2, "--mappings is not for --watch"),
    (["report", "1", "--watch", "--interval", "nan"], 2, "'--interval'"),
    (["report", "1", "--watch", "--interval", "0"], 2, "'--interval'"),
    (["report", "1", "--watch", "--count", "0"], 2, "'--count'"),
    (["report", "--count", "1"], 2, "--count is for --watch"),
    (["report", "1", "--count", "1"], 2, "--count is for --watch"),
    (["report", "1", "--interval", "2"], 2, "--interval is for --watch"),
    (["report", "--mappings"], 2, "--mappings needs PID"),
    (["report", "--html", "a"], 2, "--html needs PID"),
    (["report", "1", "--html", ""], 2, "expected the path of a file, got ''"),
    (["report", "1", "--html", "a", "--mappings"], 2, "the page has them"),
    (["report", "1", "--html", "a", "--json"], 2, "--json is not for --html"),
    (["cache", "drop"], 2, "expected KEY, MODEL, stale or all"),
    (["cache", "list", "--dry-run"], 2, "--dry-run is for drop"),
    (["cache", "remove"], 2, "remove"),
    (["stage", ""], 2, "expected the path of a model, got ''"),
    *(
        (["stage", *words.split()], 2, "expected one of MODEL, --list, --drop, --pin and --unpin")
        for words in ("", "m.gguf --list", "--list --drop all")
    ),
    *(
        (["stage", "m.gguf", "--page-cache", *words.split()], 2, "--page-cache has pages")
        for words in ("--pages 2m", "--backing shm", "--numa bind:0")
    ),
    *(
        (["stage", *words.split()], 2, said)
        for words, said in (
            ("m.gguf --numa everywhere", "--numa"), ("m.gguf --pages 8k", "--pages"),
            ("m.gguf --backing disk", "--backing"), ("m.gguf --yes", "--yes is for --drop"),
            ("--list --dry-run", "--dry-run is for --drop"),
            ("s3://a/m.gguf --repack", "stage the URL first"),
            ("s3://a/m.gguf --page-cache", "stage the URL first"),
            ("m.gguf --no-verify", "--no-verify is for the URL"),
        )
    ),
    (["metrics", "0"], 2, "expected PID"),
    (["metrics", "--port", "65536"], 2, "--port"),
    (["metrics", "--textfile", ""], 2, "expected the path of a file, got ''"),
    (["metrics", "--textfile", "a", "--port", "1"], 2, "leave out --port and --address"),
    (["metrics", "--textfile", "a", "--address", "::1"], 2, "leave out --port and --address"),
]
# fmt: on
FILES = [
    *(
        ([*command, name], 1, words)
        for command in (["plan"], ["inspect", "--json"], ["run"], ["stage"])
        for name, words in (
            ("none.gguf", "none.gguf: No such file or directory"),
            ("folder", "folder: A directory: give a model file in it"),
            ("empty.gguf", "empty.gguf: the file ends inside its header"),
            ("/dev/null", "/dev/null: Expected a regular file"),
            ("pipe", "pipe: Expected a regular file"),
            ("text.gguf", "text.gguf: the file does not begin with GGUF (at byte 0)"),
            ("cut.gguf", "cut.gguf: an array is longer than the rest of the file"),
            ("short.gguf", "short.gguf: a tensor passes the end of the file"),
            ("cut.safetensors", "cut.safetensors: the file ends inside its header"),
            (LONG, "File name too long"),
        )
    ),
    (["run", "m.safetensors"], 1, "does not say its architecture"),
    (["run", "s3://a/m.gguf", "--load", "stream"], 1, "copy the model there first"),
    (["chat", "s3://a/m.gguf", "--weights-budget", "1G"], 1, "copy the model there first"),
    (["plan", "a model.gguf"], 0, ""),
    (["plan", "日本語.gguf"], 0, ""),
    (["inspect", "two\nlines.gguf"], 0, ""),
    (["inspect", "-"], 0, ""),  # a file of this name, as any other
    (["inspect", "m.gguf", "--metadata", "none"], 1, "its metadata has no key 'none'"),
    (["stage", "--drop", "none.gguf"], 1, "none.gguf: nothing is staged under this name"),
]
RUNS = [
    (["run", "-n", "1", "-p", ""], 0, ""),
    (["run", "-n", "1", "-p", "\x01\x1b[2J"], 0, ""),
    (["run", "-n", "1", "--top-k", "9" * 30, "--seed", "9" * 30, "--temperature", "1"], 0, ""),
    (["run", "-n", "1m"], 3, "1,048,576 more do not fit in the context of 512"),
    (["run", "--ctx", "2000000000"], 3, "a context of 512 tokens, the longest"),
    (["run", "--ctx", "3", "-p", "Once upon a time", "--json"], 3, "context of 3"),
    (["run", "--ctx", "1"], 3, "a prompt of 5 tokens and 1 more do not fit in the context of 1"),
    (["run", "--chat", "-p", "Hello"], 1, "tokenizer.chat_template"),
    (["run", "Once upon a time"], 1, "to begin a text with it: unimem run -p 'Once upon a time'"),
    (["run", "--resume", "none"], 1, "none: No such file or directory"),
    (["run", "--resume", "folder"], 1, "folder: Is a directory"),
    (["run", "--resume", "pipe"], 1, "pipe: Expected a regular file"),
    (["run", "--resume", "m.gguf"], 1, "m.gguf: this is no snapshot of unimem"),
    (["run", "--resume", "foreign.session"], 1, "foreign.session: "),
    (["report", NO_PROCESS], 1, f"There is no process {NO_PROCESS} here"),
    (["report", NO_PROCESS, "--watch"], 1, f"There is no process {NO_PROCESS} here"),
    (["report", NO_PROCESS, "--json"], 1, f"There is no process {NO_PROCESS} here"),
    (["report", 2**31], 1, f"There is no process {2**31} here"),
]


def check(screen: Screen, code: int, words: str) -> None:
    assert screen.code == code, screen
    assert words in " ".join(screen.err.split())
    assert not BARE.search(screen.err)
    if code:
        assert screen.out == ""
    if not words:
        assert screen.err == ""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [*USAGE, *FILES, *RUNS],
    ids=lambda value: " ".join(map(str, value))[:40] if isinstance(value, list) else "",
)
def test_strangers(folder: Path, arguments: list[str], code: int, words: str) -> None:
    more = ["--threads", 1] if arguments[:1] == ["run"] else []
    with chdir(folder):
        check(show(*arguments, *more), code, words)


def test_process_1_is_read_or_refused_in_words() -> None:
    """Permission to read it depends on the user and the container."""
    screen = show("report", 1)
    assert screen.code in (0, 1)
    assert not BARE.search(screen.err)
    assert bool(screen.err) == bool(screen.code)


# ---- as a process -------------------------------------------------------------------------------

MAIN = "import sys; from unimem_command import main; sys.exit(main())"


def run(*arguments: Any, shell: str = 'exec "$@"', **options: Any) -> Screen:
    """Run the command in a process, as a shell does."""
    words = [
        sys.executable,
        "-P",  # as its script starts: what lies in the current folder is not imported
        "-c",
        MAIN,
        *(w if isinstance(w, bytes) else str(w) for w in arguments),
    ]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    words = ["sh", "-c", shell, "sh", *words]
    made: Any = subprocess.run(words, check=False, timeout=120, **options)
    return Screen(made.returncode, (made.stdout or b"").decode(), (made.stderr or b"").decode())


@pytest.mark.parametrize("command", [
    "plan", *(pytest.param(word, marks=pytest.mark.slow) for word in ("--version", "--help"))
])  # fmt: skip
def test_a_full_disk_behind_standard_output(command: str) -> None:
    with open("/dev/full", "wb") as full:
        check(run(command, stdout=full), 1, "No space left on device")


def test_a_vanished_reader() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        check(run("plan", stdout=write), 1, "")
    finally:
        os.close(write)


@pytest.mark.parametrize(("closed", "arguments", "code", "words"), [
    ("<&-", ["run", "-n", 1, "--threads", 1], 0, ""),
    (">&-", ["plan"], 1, "standard output is closed: there is nowhere to write to"),
    ("2>&-", ["plan", "none.gguf"], 1, ""),
])  # fmt: skip
def test_a_closed_stream(closed: str, arguments: list[Any], code: int, words: str) -> None:
    check(run(*arguments, shell=f'exec "$@" {closed}'), code, words)


def test_a_name_that_is_not_text(folder: Path) -> None:
    screen = run("plan", b"none\xff\n.gguf", cwd=folder, env=os.environ | {"LC_ALL": "C"})
    check(screen, 1, "unimem: none?\\n.gguf: No such file or directory")


def test_a_missing_folder(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    screen = run("stage", "m.gguf", shell='rmdir ../gone && exec "$@"', cwd=tmp_path / "gone")
    check(screen, 1, "unimem: ")
