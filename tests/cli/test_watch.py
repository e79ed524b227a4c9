"""`unimem report PID --watch` of an invented process, and of a decoder on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import struct
import termios
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

pytest.importorskip("unimem_ggml", reason="a decoder needs ggml: pip install ./ggml '.[run]'")

from rich.cells import cell_len

from support.processes.running import running
from support.project.documents import check_document
from support.terminal.screens import CONTROL, HOSTILE, MAIN, run_command, start_command
from support.terminal.watch_samples import CGROUP, DECODER, MACHINE, MIB, SIZES, report, sample
from unimem.accounting.samples import Sample
from unimem.base.text import Surface
from unimem.cli.terminal import document_head
from unimem.cli.watch import SCHEMA, document, sample_lines
from unimem.system.pressure import Pressure

# It sleeps to leave CPU time to other tests.
DECODER_CODE = """
import time
from unimem.engine import Decoder, embedded_model
with Decoder(embedded_model(), threads=1) as decoder:
    print("ready", flush=True)
    while True:
        for _ in decoder.generate("Once upon a time", 200, stop_at_eog=False):
            time.sleep(0.01)
"""
BEFORE = sample(10.0, report())
GROWN = SIZES | {
    "kv": (256 * MIB, 140 * MIB, 139 * MIB),
    "allocator": (80 * MIB, 29 * MIB, None),
    "staging": (512 * MIB, 4 * MIB, None),
}
NOW = sample(
    12.0, report(GROWN), faults=(3000, 5), read=3 * MIB, cpu=3.0,
    published=DECODER | {"n_generated_tokens": 701, "kv_tokens": 812, "kv_active_bytes": 139 * MIB}
    | {"piece_hits": 4900, "piece_misses": 200, "piece_read_bytes": 10 * MIB}
    | {"piece_waited_ns": 2_740_000_000},
    paged_in_bytes=10 * MIB,
    pressure=(Pressure("machine", 0.25, 0.0), Pressure("cgroup /a", 12.5, 3.0)),
    limits=(MACHINE, CGROUP),
)  # fmt: skip
MADE = re.compile(r"[1-9][\d.]* made, [\d.]+ read")


def lines_of(
    before: Sample | None,
    now: Sample,
    surface: Surface = Surface(),  # noqa: B008
) -> dict[str, str]:
    """Return lines by their first word."""
    lines = sample_lines(surface, BEFORE.report, before, now)
    return {line.split()[0]: line for line in reversed([*lines]) if line}


def test_a_sample_has_rates_and_growth_since_the_first() -> None:
    lines = lines_of(BEFORE, NOW)
    for name, says in (
        ("tokens/s", "100.5 made, 0.0 read"),
        ("pieces/s", "2,000 in RAM, 50.0 read; 2.5 MiB/s, 12% of the time waited"),
        ("faults/s", "1,500 minor, 2.5 major; CPU 150%, 3 threads, up 1:00:12"),
        ("page-ins", "1.5 MiB/s by the process, 5.0 MiB/s by the machine; 0 B swapped out"),
        ("pressure", "machine 0.25%, 0.00%; cgroup /a 12.50%, 3.00%"),
        ("room", "15.0 GiB of 24.0 GiB, memory of the machine; 296.0 MiB of 4.0 GiB,"),
    ):
        assert lines[name].endswith(says)
    for name, grown in (
        ("kv", "+10.0 MiB"), ("allocator", "-1012.0 KiB"), ("staging", "+4.0 MiB"),
        ("libraries", " 0"), ("total", "+13.0 MiB"),
    ):  # fmt: skip
        assert re.search(rf"{re.escape(grown)}(  [#.]+)?$", lines[name])


def test_the_first_sample_has_no_rates_and_no_growth() -> None:
    lines = lines_of(None, BEFORE)
    assert lines["tokens/s"].endswith("- made, - read")
    assert lines["pieces/s"].endswith("- in RAM, - read; -, - of the time waited")
    assert lines["faults/s"].endswith("- minor, - major; CPU -, 3 threads, up 1:00:10")
    assert lines["total"].endswith(" 0")


def test_unknown_figures_are_marked() -> None:
    bare = sample(10.0, report(source="kernel"), published={}, pressure=(), limits=(), read=None)
    lines = lines_of(None, bare)
    assert not {"tokens/s", "pieces/s"} & {*lines}
    assert lines["room"].endswith(" -")
    assert "not available" in lines["pressure"]
    assert "- by the process, - by the machine" in lines["page-ins"]


@pytest.mark.parametrize("width", [60, 80, 120, 250])
def test_lines_fit_and_are_printable_for_any_name(width: int) -> None:
    odd = replace(
        NOW,
        report=report(GROWN | {HOSTILE: (5 * MIB, 4096, 1)}, command=HOSTILE, problem=HOSTILE),
        counters=replace(NOW.counters, minor_faults=10**15, cpu_seconds=1e9, n_threads=10**6),
        limits=(MACHINE, replace(CGROUP, name=HOSTILE)),
    )
    for line in sample_lines(Surface(width), BEFORE.report, BEFORE, odd):
        assert cell_len(line) <= width
        assert not CONTROL.search(line)


def test_the_document_has_figures_in_units() -> None:
    made = json.loads(json.dumps(document(4711, BEFORE, NOW), allow_nan=False))
    check_document(document_head(SCHEMA) | made)
    assert (made["pid"], made["seconds"]) == (4711, 2.0)
    assert made["rates"] == {
        "minor_faults_per_second": 1500.0, "major_faults_per_second": 2.5,
        "read_bytes_per_second": 1.5 * MIB, "paged_in_bytes_per_second": 5.0 * MIB,
        "cpu_seconds_per_second": 1.5, "prompt_tokens_per_second": 0.0,
        "generated_tokens_per_second": 100.5,
        "piece_hits_per_second": 2000.0, "piece_misses_per_second": 50.0,
        "piece_read_bytes_per_second": 2.5 * MIB, "piece_waited_ns_per_second": 0.12e9,
    }  # fmt: skip
    assert made["decoders"]["kv_tokens"] == 812
    expected = {"source": "cgroup /a", "some_percent": 12.5, "full_percent": 3.0}
    assert made["pressure"][1] == expected
    assert made["limits"][1]["room_bytes"] == CGROUP.room_bytes
    assert made["report"]["rows"][0]["category"] == "weights:q8_0"
    first = json.loads(json.dumps(document(4711, None, BEFORE)))
    check_document(document_head(SCHEMA) | first)
    assert first["seconds"] is None
    assert set(first["rates"].values()) == {None}


# ---- a real process -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder() -> Iterator[int]:
    with running(DECODER_CODE) as pid:
        yield pid


class Watch:
    """A watch on its own 80x24 terminal."""

    def __init__(self, pid: int, *, code: str = MAIN, **environment: str) -> None:
        self.ours, theirs = os.openpty()
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        self.modes = termios.tcgetattr(self.ours)
        self.process = start_command(
            "report", pid, "--watch", "--interval", 0.2,
            code=f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {code}",
            stdin=theirs, stdout=theirs, start_new_session=True,
            env={k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
            | {"TERM": "xterm"} | environment,
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def until(self, pattern: str | re.Pattern[str]) -> None:
        while not re.search(pattern, self.seen):
            self.seen += os.read(self.ours, 4096).decode(errors="replace")

    def end(self, code: int) -> str:
        """Return the output from the last refresh on."""
        with suppress(OSError):  # EIO: the other side is closed
            while part := os.read(self.ours, 4096):
                self.seen += part.decode(errors="replace")
        _, errors = self.process.communicate()
        assert (self.process.returncode, errors) == (code, "")
        assert termios.tcgetattr(self.ours) == self.modes
        assert self.seen.rindex("\x1b[?25h") > self.seen.rfind("\x1b[?25l")
        os.close(self.ours)
        return re.sub(r"\x1b\[[\d;]*m", "", self.seen[self.seen.rindex("process") :])


@pytest.mark.parametrize("how", ["C-c", "TERM"])
def test_a_terminal_shows_one_table_and_keeps_the_last_whole(decoder: int, how: str) -> None:
    watch = Watch(decoder)
    watch.until(MADE)
    assert "\x1b[1A" in watch.seen  # refreshed in its place
    assert "\r\n...\r\ntotal" in watch.seen.replace("\x1b[1m", "")  # of 24 lines
    assert "\x1b[36m" in watch.seen  # bars have a colour
    if how == "TERM":
        watch.process.terminate()
    else:
        os.write(watch.ours, b"\x03")
    last = watch.end(143 if how == "TERM" else 130)
    for name in ("weights:", "kv", "scratch", "logits", "allocator", "libraries", "total"):
        assert re.search(rf"^{name}", last, re.M), name


def test_a_closed_terminal_ends_it(decoder: int) -> None:
    watch = Watch(decoder)
    watch.until("total")
    os.close(watch.ours)
    _, errors = watch.process.communicate()
    assert (watch.process.returncode, errors) == (128 + signal.SIGHUP, "")


def test_unwanted_colours_are_left_out(decoder: int) -> None:
    watch = Watch(decoder, NO_COLOR="1")
    watch.until("total")
    os.write(watch.ours, b"\x03")
    watch.end(130)
    assert not re.search(r"\x1b\[[\d;]+m", watch.seen)


def test_the_watch_ends_with_the_process() -> None:
    with running() as pid:
        watch = Watch(pid)
        watch.until("total")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        last = watch.end(0)
    assert "it has ended" in last
    assert "libraries" in watch.seen


def test_an_endless_read_can_be_interrupted(decoder: int) -> None:
    # A process that holds its memory lock blocks readers.
    broken = (
        "import sys, time; from unimem.accounting import samples; from unimem.cli import main; "
        "samples.report = lambda pid: (print('waiting', flush=True), time.sleep(1000)); "
        "sys.exit(main())"
    )
    watch = Watch(decoder, code=broken)
    watch.until("waiting")
    os.write(watch.ours, b"\x03")
    watch.seen += "process"
    watch.end(130)


def test_blocks_of_text_in_a_pipe(decoder: int) -> None:
    ended = run_command("report", decoder, "--watch", "--interval", 0.3, "--count", 2)
    assert (ended.code, ended.err) == (0, "")
    first, second, rest = re.split(r"(?m)^(?=total.*\n\n)", ended.out)
    assert rest.startswith("total")
    assert "- made" in first
    assert MADE.search(second)
    assert all(len(line) <= 80 for line in ended.lines)
    assert "\x1b" not in ended.out


def test_lines_of_json_until_an_interrupt(decoder: int) -> None:
    with start_command("report", decoder, "--watch", "--interval", 0.2, "--json") as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert first["schema"] == "unimem.watch/1"
        assert first["seconds"] is first["rates"]["generated_tokens_per_second"] is None
        n = 0.0
        while n == 0:  # a decoder may rest for longer than an interval
            made = json.loads(process.stdout.readline())
            assert made["seconds"] > 0
            n = made["rates"]["generated_tokens_per_second"]
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 130
    for each in (first, made):
        assert each["report"]["rows"]
        assert each["decoders"]["kv_tokens"] >= 0
