"""`unimem report PID --watch` as a person has it: a decoder at work, a terminal and its keys."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.project.tiers import slow_after

pytest.importorskip("ggml", reason="a decoder needs ggml-python: pip install '.[run]'")
pytest.importorskip("typer", reason="the command line needs typer: pip install '.[run]'")

from support.terminal.screens import MAIN, run_command, show, start_command
from support.terminal.tmux import Terminal
from support.terminal.tmux import terminal as new_terminal

# It leaves time for others.
DECODER = """
import time
from unimem.engine import Decoder, embedded_model
with Decoder(embedded_model(), threads=1) as decoder:
    print("ready", flush=True)
    while True:
        for _ in decoder.generate("Once upon a time", 200, stop_at_eog=False):
            time.sleep(0.01)
"""


@contextmanager
def running(code: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as made:
        try:
            assert made.stdout is not None
            assert made.stdout.readline() == "ready\n"
            yield made
        finally:
            made.kill()


@pytest.fixture(scope="module")
def decoder() -> Iterator[int]:
    with running(DECODER) as process:
        yield process.pid


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    with new_terminal(tmp_path_factory.mktemp("terminal")) as terminal:
        yield terminal


@pytest.fixture
def shell(window: Terminal) -> Terminal:
    """A clear screen of the usual size that waits for a command."""
    if window.variable("alternate_on") == "1":  # the watch of another test
        window.press("q")
        window.until_shows("ended with")
    window.resize(80, 24)
    window.run("true")
    return window


@pytest.fixture
def watch(window: Terminal, decoder: int, request: pytest.FixtureRequest) -> Terminal:
    """A watch of the decoder, from its second sample on; that of another test goes on."""
    if window.variable("alternate_on") == "1":
        window.resize(80, 24)
        return window
    shell: Terminal = request.getfixturevalue("shell")
    shell.type(f"unimem report {decoder} --watch --interval 0.2; echo ended with $?")
    shell.until(lambda lines: any(re.search(r"made +\d", line) for line in lines))
    return shell


def column(lines: list[str], name: str) -> list[str]:
    return next(line.split() for line in lines if line.split()[:1] == [name])


def assert_sane(shell: Terminal) -> None:
    """What is typed shows, line by line, and the cursor, and the screen is the usual one."""
    lines = shell.run("stty -a | tr ' ' '\\n' | grep -xE -- '-?(echo|icanon|isig)'")
    assert {"echo", "icanon", "isig"} == set(lines)
    assert shell.variable("alternate_on") == "0"
    assert shell.variable("cursor_flag") == "1"


def test_the_picture(watch: Terminal, decoder: int) -> None:
    lines = watch.until(lambda lines: float(column(lines, "tokens/s")[2].replace(",", "")) > 0)
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith(f"{decoder} ")
    assert "from its ledger, every 0.2 s" in lines[0]
    for name in ("weights:", "kv", "scratch", "logits", "allocator", "libraries", "total"):
        assert any(line.startswith(name) for line in lines), name
    assert re.search(r"KV \d+ tokens?, ", "\n".join(lines))
    assert column(lines, "faults/s")[1::2][:2] == ["minor", "major"]
    assert column(lines, "pressure")[1::2][:2] in (["some", "full"], ["available:", "kernel"])
    assert column(lines, "page-ins")[1] == "own"
    assert column(lines, "free")[2] == "GiB"
    assert lines[23].startswith("q quit  s sort: category  m mappings  p pause")
    styled = "\n".join(watch.screen("-e"))
    assert "\x1b[36m" in styled  # bars have a colour


def test_keys(watch: Terminal) -> None:
    assert "memory ▼" in "\n".join(watch.screen())
    for key, shows in (
        ("s", "size ▼"), ("s", "in RAM ▼"), ("m", "what"), ("m", "m mappings"),
        ("+", "every 0.5 s"), ("-", "every 0.2 s"), ("h", "Keys"), ("x", "in RAM ▼"),
        ("p", "PAUSED"), ("p", "every 0.2 s"),
    ):  # fmt: skip
        watch.press(key)
        watch.until_shows(shows)
    watch.resize(80, 14)
    watch.until_shows("1-4 of ")
    watch.press("Down")
    watch.until_shows("2-5 of ")
    watch.press("Home", "s", "s")
    watch.until_shows("1-4 of ")
    watch.until_shows("sort: category")


def test_the_window_changes_its_size(watch: Terminal) -> None:
    for columns, rows, shows in (
        (120, 40, "active"),
        (60, 15, "q quit  s sort: category  m  p pause  + -  h help"),
        (40, 10, "40x10 is too small:"),
        (80, 24, "growth"),
    ):
        watch.resize(columns, rows)
        lines = watch.until_shows(shows)
        assert all(len(line) <= columns for line in lines)


def test_q_leaves_the_last_figures_and_a_terminal_as_it_was(watch: Terminal) -> None:
    watch.press("h")
    watch.until_shows("Keys")
    watch.press("q")
    lines = watch.until_shows("ended with 0")
    assert any(line.startswith("total") for line in lines)
    assert not any(line.startswith(("q quit", "Keys")) for line in lines)
    assert_sane(watch)


@pytest.mark.parametrize(("keys", "code"), slow_after(1, [("C-c", 130), ("TERM", 143)]))
def test_what_interrupts_leaves_a_terminal_as_it_was(watch: Terminal, keys: str, code: int) -> None:
    if keys == "TERM":
        os.kill(watch.child(), signal.SIGTERM)
    else:
        watch.press(keys)
    lines = watch.until_shows(f"ended with {code}")
    assert any(line.startswith("total") for line in lines)
    assert not any("Traceback" in line for line in lines)
    assert_sane(watch)


def test_it_stops_and_goes_on(watch: Terminal) -> None:
    watch.press("C-z")
    watch.until_shows("Stopped")
    assert_sane(watch)
    watch.type("fg")
    watch.until(lambda lines: lines[23].startswith("q quit"))
    watch.press("s")
    watch.until_shows("size ▼")
    watch.press("q")
    watch.until(lambda lines: not lines[23].startswith("q quit"))
    watch.run("true")


def test_a_terminal_that_is_closed_ends_it(decoder: int) -> None:
    ours, terminals = os.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    code = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {MAIN}"
    with start_command(
        "report", decoder, "--watch", code=code, stdin=terminals, stdout=terminals,
        start_new_session=True, env=os.environ | {"TERM": "xterm"},
    ) as process:  # fmt: skip
        os.close(terminals)
        seen = b""
        while b"quit" not in seen:
            seen += os.read(ours, 4096)
        os.close(ours)
        _, errors = process.communicate()
    assert (process.returncode, errors) == (128 + signal.SIGHUP, "")


def test_no_colours_where_none_are_wanted(shell: Terminal, decoder: int) -> None:
    shell.type(f"NO_COLOR=1 unimem report {decoder} --watch; echo ended with $?")
    shell.until_shows("q quit")
    shell.until_shows("total")
    assert "\x1b" not in "\n".join(shell.screen("-e"))
    shell.press("q")
    shell.until_shows("ended with 0")


def test_the_process_ends(shell: Terminal) -> None:
    with running("print('ready', flush=True); import time; time.sleep(300)") as process:
        shell.type(f"unimem report {process.pid} --watch --interval 0.2; echo ended with $?")
        shell.until_shows("from the kernel, every 0.2 s")
        process.kill()
        process.wait()
        lines = shell.until_shows("ended with 0")
    assert f"process {process.pid}: it has ended" in lines
    assert any(line.startswith("total") for line in lines)
    assert any(line.startswith("libraries") for line in lines)
    assert_sane(shell)


@pytest.mark.parametrize(("broken", "code"), slow_after(1, [
    ("watch.frame = lambda *_, **__: 1 / 0", 1),
    # A process that holds the lock of its memory lets readers wait.
    ("samples.report = lambda pid: time.sleep(1000)", 0),
]), ids=["a picture that fails", "a read that never ends"])  # fmt: skip
def test_always_sane(shell: Terminal, decoder: int, tmp_path: Path, broken: str, code: int) -> None:
    script = tmp_path / "broken.py"
    script.write_text(
        "import sys, time\nfrom unimem.accounting import samples\n"
        f"from unimem.cli import main, watch\n{broken}\nsys.exit(main())\n"
    )
    shell.type(
        f"{sys.executable} {script} report {decoder} --watch --interval 0.2; echo ended with $?"
    )
    if code == 0:
        shell.until_shows(f"Reading the memory of process {decoder} for ")
        shell.press("q")
    lines = shell.until_shows(f"ended with {code}")
    assert any("unimem: division by zero" in line for line in lines) == (code == 1)
    assert_sane(shell)


def test_blocks_of_text_in_a_pipe(decoder: int) -> None:
    ended = run_command("report", decoder, "--watch", "--interval", 0.3, "--count", 2)
    assert (ended.code, ended.err) == (0, "")
    first, second, rest = re.split(r"(?m)^(?=total.*\n\n)", ended.out)
    assert rest.startswith("total")
    assert re.search(r"made +-", first)
    assert re.search(r"made +\d", second)
    assert all(len(line) <= 80 for line in ended.lines)
    assert "\x1b" not in ended.out


def test_lines_of_json_until_an_interrupt(decoder: int) -> None:
    with start_command("report", decoder, "--watch", "--interval", 0.2, "--json") as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert first["schema"] == "unimem.watch/1"
        assert first["seconds"] is first["rates"]["generated_tokens_per_second"] is None
        n = 0.0
        while n == 0:  # where others compute, a decoder may rest for longer than an interval
            document = json.loads(process.stdout.readline())
            assert document["seconds"] > 0
            n = document["rates"]["generated_tokens_per_second"]
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 130
    for each in (first, document):
        assert each["report"]["rows"]
        assert each["decoders"]["kv_tokens"] >= 0


@pytest.mark.parametrize(("arguments", "code", "says"), [
    ((2**22 + 1,), 1, "process"),            ((1, "--count", 0), 2, "--count"),
    ((1, "--interval", 0), 2, "--interval"),
], ids=["no such process", "no count", "no interval"])  # fmt: skip
def test_what_cannot_be_watched(arguments: tuple[object, ...], code: int, says: str) -> None:
    screen = show("report", *arguments, "--watch")
    assert (screen.code, screen.out) == (code, "")
    assert says in screen.err
