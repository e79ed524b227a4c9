"""`unimem report PID --watch`: the report of a process, refreshed, with rates and growth."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

from rich.live import Live
from rich.text import Text

from unimem.accounting.report import Report
from unimem.accounting.report_text import memory_lines, report_facts
from unimem.accounting.samples import MemoryGrowth, Rates, Sample, Sampler, rates
from unimem.base.text import Surface, escape, fact_lines, format_bytes, format_count, shorten
from unimem.cli import terminal
from unimem.cli.html_page import page_at_end

SCHEMA = "unimem.watch/1"

_LABEL = 10  # columns of the names of facts


def watch(
    pid: int,
    interval: float = 1.0,
    count: int | None = None,
    as_json: bool = False,
    html: str | None = None,
) -> None:
    """Show the memory of a process until it ends, `count` samples are shown, or Ctrl-C.

    A terminal shows one table that is refreshed. Otherwise each sample is a block of text, or with
    `as_json` a line of JSON. The page `html` is written at the end.

    Raises
    ------
    ProcessLookupError, PermissionError
        The process does not exist, or belongs to another user.
    OSError
        The page cannot be written.
    """
    seen: list[Sample] = []  # the first one and the last two
    growth = MemoryGrowth()
    with ExitStack() as stack:
        if html is not None:
            stack.enter_context(page_at_end(html, lambda: (seen[-1] if seen else None, growth)))
        show: Callable[[str], None] = terminal.show
        if not as_json and terminal.is_terminal(sys.stdout):
            show = stack.enter_context(_refreshed())
        for n, sample in enumerate(_samples(pid, interval), 1):
            growth.take(sample)
            seen = [*seen[:1], *seen[1:][-1:], sample]
            before = seen[-2] if n > 1 else None
            if as_json:
                head = terminal.document_head(SCHEMA)
                show(json.dumps(head | document(pid, before, sample), allow_nan=False) + "\n")
            else:
                lines = sample_lines(terminal.surface(), seen[0].report, before, sample)
                show("\n".join(lines) + "\n\n")
            if n == count:
                return
    print(f"process {pid}: it has ended", file=sys.stderr if as_json else sys.stdout)


def _samples(pid: int, interval: float) -> Iterator[Sample]:
    """Read samples of a process until it ends."""
    sampler, first = Sampler(pid), None
    while True:
        asked = time.monotonic()
        answers: SimpleQueue[Sample | Exception] = SimpleQueue()
        # A read waits while the process holds the lock of its memory. Ctrl-C must work meanwhile.
        threading.Thread(target=_read, args=(sampler, answers), daemon=True).start()
        answer = answers.get()
        if isinstance(answer, Sample):
            first = first or answer
            if answer.counters.started != first.counters.started:
                return  # its number is another process's now
            yield answer
        elif isinstance(answer, ProcessLookupError) and first is not None:
            return
        else:
            raise answer
        time.sleep(max(0.0, asked + interval - time.monotonic()))


def _read(sampler: Sampler, answers: SimpleQueue[Sample | Exception]) -> None:
    try:
        answers.put(sampler.sample())
    except Exception as error:
        answers.put(error)


@contextmanager
def _refreshed() -> Iterator[Callable[[str], None]]:
    """Show each text in place of the one before, as far as it fits; the last one stays, whole."""
    live = Live(auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    shown = ""

    def show(text: str) -> None:
        nonlocal shown
        shown = text.rstrip()
        lines, height = shown.split("\n"), max(live.console.height, 4)
        if len(lines) >= height:
            lines = [*lines[: height - 3], "...", lines[-1]]
        live.update(_plain("\n".join(lines)), refresh=True)

    live.start()
    live.console.show_cursor()  # so that Ctrl-Z leaves a usable terminal
    try:
        yield show
    finally:
        with suppress(OSError):  # the terminal was closed
            live.update(_plain(shown))
            live.stop()


def _plain(text: str) -> Text:
    return Text.from_ansi(text, no_wrap=True, overflow="crop")


def sample_lines(
    surface: Surface, first: Report, before: Sample | None, now: Sample
) -> Iterator[str]:
    """Write a sample: facts, rates since the sample before, and the rows with their growth."""
    heading = next(report_facts(now.report.rows, now.report.facts))
    short = [(name, shorten(escape(text), surface.width - _LABEL)) for name, text in heading]
    yield from fact_lines(surface, [*short, *_figures(now, rates(before, now))])
    yield ""
    yield from memory_lines(surface, now.report.rows, first.rows)


def _figures(now: Sample, done: Rates) -> Iterator[tuple[str, str]]:
    if now.published:
        made, read = _number(done.generated_tokens), _number(done.prompt_tokens)
        yield "tokens/s", f"{made} made, {read} read"
    if now.published.get("piece_hits", 0) + now.published.get("piece_misses", 0):
        there, missing = _number(done.piece_hits), _number(done.piece_misses)
        waited = "-" if done.piece_waited_ns is None else f"{done.piece_waited_ns / 1e9:.0%}"
        speed = _speed(done.piece_read_bytes)
        yield "pieces/s", f"{there} in RAM, {missing} read; {speed}, {waited} of the time waited"
    cpu = "-" if done.cpu_seconds is None else f"{done.cpu_seconds:.0%}"
    threads = format_count(now.counters.n_threads, "thread")
    up = timedelta(seconds=int(now.up_seconds))
    minor, major = _number(done.minor_faults), _number(done.major_faults)
    yield "faults/s", f"{minor} minor, {major} major; CPU {cpu}, {threads}, up {up}"
    placed = [row.granted.swapped_bytes for row in now.report.rows if row.granted is not None]
    own, machine = _speed(done.read_bytes), _speed(done.paged_in_bytes)
    swapped = format_bytes(sum(placed))
    yield "page-ins", f"{own} by the process, {machine} by the machine; {swapped} swapped out"
    shares = [f"{p.source} {p.some_percent:.2f}%, {p.full_percent:.2f}%" for p in now.pressure]
    yield "pressure", "; ".join(shares) or "not available: this kernel does not count it (PSI)"
    least = sorted(now.limits, key=lambda limit: limit.room_bytes)[:1]
    room = [
        f"{format_bytes(limit.room_bytes)} of {format_bytes(limit.limit_bytes)}, {limit.name}"
        for limit in dict.fromkeys((*now.limits[:1], *least))
    ]
    yield "room", "; ".join(room) or "-"


def _number(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}" if rate >= 1000 else f"{rate:.1f}"


def _speed(rate: float | None) -> str:
    return "-" if rate is None else f"{format_bytes(rate)}/s"


def document(pid: int, before: Sample | None, now: Sample) -> dict[str, Any]:
    """Return a sample and its rates, as for JSON."""
    done = rates(before, now)
    return {
        "pid": pid,
        "time": now.clock,
        "seconds": None if before is None else now.seconds - before.seconds,
        "rates": {f"{name}_per_second": rate for name, rate in done._asdict().items()},
        "counters": asdict(now.counters) | {"paged_in_bytes": now.paged_in_bytes},
        "decoders": dict(now.published) or None,
        "pressure": [pressure._asdict() for pressure in now.pressure],
        "limits": [asdict(limit) | {"room_bytes": limit.room_bytes} for limit in now.limits],
        "report_age_seconds": now.seconds - now.report_seconds,
        "report": now.report.to_dict(),
    }
