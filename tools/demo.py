"""One model, two llama.cpp processes, one copy in RAM: the purpose of unimem, on this machine.

``python tools/demo.py [MODEL.gguf] [--rounds N]``. It plans a model, stages it,
starts two llama.cpp processes on the staged path, reports what the kernel says of both, and
compares how long llama.cpp takes to start on the staged model and on the file in the page cache.
``python -m unimem_bench.llama_build`` builds llama.cpp; without it these steps are left out. If no
model is named, one of 290 MB with random weights is written. Nothing is left behind, even after an
interrupt.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import unimem as um
from unimem.base.text import Surface, format_bytes, table_lines
from unimem.staging.keeper import drop, hold
from unimem.system.placement import sum_placements
from unimem.weights.staged import Held
from unimem_bench import llama_build
from unimem_bench.suites.load import llama_command, llama_start

__all__ = ["Facts", "demonstrate"]

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 5

_NO_HUGE_PAGES = "none of it in huge pages: 'unimem doctor' says what gives them to every program"
_WIDTH = 80
_BLOCK_BYTES = 512  # of st_blocks, in every file system
_INTERRUPTED = 130


@dataclass(slots=True)
class Facts:
    """The results; empty where a step was skipped."""

    plan: um.Plan | None = None
    staged: Held | None = None
    keeper: um.Report | None = None
    reports: list[um.Report] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    cached_bytes: int = 0

    @property
    def models(self) -> list[list[dict[str, Any]]]:
        """The files of the staged model in each report."""
        return [self.files(report) for report in self.reports]

    def files(self, report: um.Report) -> list[dict[str, Any]]:
        """Return the files of the staged model in one report."""
        assert self.staged is not None
        return [model for model in report.facts["models"] if model["path"] in self.staged.paths]

    @property
    def placements(self) -> list[um.Placement]:
        """Their placement, by process."""
        return [self.placement(report) for report in self.reports]

    def placement(self, report: um.Report) -> um.Placement:
        """Return their placement in the process of one report."""
        assert self.staged is not None
        paths = self.staged.paths
        return sum_placements([each.granted for each in report.mappings if each.path in paths])

    @property
    def tells_shares(self) -> bool:
        """Whether the kernel reports a process's share (Pss); not for hugetlb pages."""
        assert self.staged is not None
        return self.staged.backing != "hugetlb"

    @property
    def ram_bytes(self) -> int:
        """The RAM that the model takes in all processes."""
        assert self.staged is not None
        assert self.keeper is not None
        if self.tells_shares:
            everybody = [self.keeper, *self.reports]
            return sum(file["pss_bytes"] for report in everybody for file in self.files(report))
        return self.file_bytes

    @property
    def file_bytes(self) -> int:
        """The RAM of the files that all processes map."""
        assert self.staged is not None
        return sum(_BLOCK_BYTES * os.stat(path).st_blocks for path in self.staged.paths)


def main() -> int:
    """Show the demo; 0 if all of it was shown or skipped with a reason."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF file")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="starts of each kind")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds: expected at least 1")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    with ExitStack() as stack:
        try:
            demonstrate(arguments.model, arguments.rounds, _say, stack)
        except KeyboardInterrupt:
            return _INTERRUPTED
        except (OSError, ValueError, MemoryError, RuntimeError) as error:
            print(f"demo: {error}", file=sys.stderr)
            return 1
        finally:
            # The clean-up from here on must not be interrupted.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
    return 0


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _say(line: str) -> None:
    # A path stays in one line, so that a reader can copy it.
    for part in textwrap.wrap(line, _WIDTH, subsequent_indent="   ", break_long_words=False):
        print(part, flush=True)


def demonstrate(
    path: Path | None, rounds: int, say: Callable[[str], None], stack: ExitStack
) -> Facts:
    """Run the steps with a model, or one that is written.

    llama.cpp is started `rounds` times on the staged model and on the file. `say` is called with
    each line. Closing `stack` removes the staged model and ends the processes.
    """
    facts = Facts()
    model = _own_model(stack, say) if path is None else path.resolve()
    facts.plan = _plan(model, say)
    facts.staged = _stage(model, say, stack)
    try:
        library = llama_build.library()
    except llama_build.NoPeer as why:
        facts.skipped += ["processes", "report", "start"]
        say(f"SKIPPED, steps 3 to 5: llama.cpp: {why}")
        return facts
    pids = _start_two(facts.staged.path, say, stack)
    _report(pids, facts, say)
    _compare_starts(llama_command(library), model, rounds, facts, say)
    _sum_up(facts, say)
    return facts


def _own_model(stack: ExitStack, say: Callable[[str], None]) -> Path:
    from support.models.make import Shape, write_model

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unimem-demo-")))
    say("A model of random weights is written first...")
    shape = Shape(hidden=1024, layers=16, heads=16, kv_heads=4, inner=4608, vocab=2048, ctx=4096)
    return write_model(folder / "demo.gguf", shape=shape)


def _plan(model: Path, say: Callable[[str], None]) -> um.Plan:
    say(f"1. What will it need?  unimem plan {model.name}")
    plan = um.plan(model)
    # The verdict and the tables; the lines between describe the invented file.
    verdict, _, *tables = str(plan).split("\n\n")
    for line in [verdict, *(line for table in tables for line in table.splitlines())]:
        say(f"   {line}")
    plan.require_fits()
    return plan


def _stage(model: Path, say: Callable[[str], None], stack: ExitStack) -> Held:
    say(f"2. Once into shared memory:  unimem stage {model.name}")
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as told:
        made = um.stage(model)
    seconds = time.monotonic() - start
    with hold(made, str(model), {"lock": False}, [str(each.message) for each in told]) as held:
        stack.callback(drop, held)
    say(f"   {held.path}")
    say(f"   {held.backing}, {seconds:.2f} s: {held.granted}")
    for text in filter(None, (made.reason, *held.warnings)):
        say(f"   {text}")
    return held


def _start_two(path: str, say: Callable[[str], None], stack: ExitStack) -> list[int]:
    from support.models import llama_cpp

    say("3. Two llama.cpp processes load that path")
    pids = [stack.enter_context(llama_cpp.holding(path)) for _ in range(2)]
    say(f"   processes {pids[0]} and {pids[1]}")
    return pids


def _report(pids: list[int], facts: Facts, say: Callable[[str], None]) -> None:
    say(f"4. Where is it?  unimem report {pids[0]}; unimem report {pids[1]}")
    assert facts.staged is not None
    facts.keeper = keeper = um.report(facts.staged.pid)
    facts.reports = [um.report(pid) for pid in pids]
    lines = []
    for report in (keeper, *facts.reports):
        files, granted = facts.files(report), facts.placement(report)
        kind = f"{files[0]['format']} {files[0]['architecture'] or ''}".strip()
        if report is keeper:
            kind = "what keeps it"
        mapped, in_ram, share = (
            format_bytes(sum(file[name] for file in files))
            for name in ("nbytes", "rss_bytes", "pss_bytes")
        )
        share = share if facts.tells_shares else "not told"
        huge = format_bytes(granted.huge_bytes)
        lines.append((str(report.facts["pid"]), kind, mapped, in_ram, share, huge))
    lines.append(("all", "", "", "", format_bytes(facts.ram_bytes), ""))
    head = ("process", "model", "mapped", "in RAM", "its share", "in huge pages")
    for line in table_lines(Surface(), head, lines):
        say(f"   {line}")


def _compare_starts(
    command: list[str], model: Path, rounds: int, facts: Facts, say: Callable[[str], None]
) -> None:
    say(f"5. Starting llama.cpp on each, {rounds} times in turn, until the model is loaded")
    assert facts.staged is not None
    paths = {"file": str(model), "staged": facts.staged.path}
    facts.seconds = {name: [] for name in paths}
    with um.open_weights(model, load="map") as weights:
        weights.warm()
        for _ in range(rounds):
            for name, path in paths.items():
                facts.seconds[name].append(llama_start(command, path) / 1e3)
        hot = weights.residency()
    facts.cached_bytes = hot.resident_bytes
    lines = [
        (name, *(f"{1000 * f(times):.1f} ms" for f in (statistics.median, min, max)))
        for name, times in facts.seconds.items()
    ]
    for line in table_lines(Surface(), ("", "median", "least", "most"), lines):
        say(f"   {line}")
    cached = " of ".join(map(format_bytes, (hot.resident_bytes, hot.nbytes)))
    say(f"   of the file, {cached} were in the page cache at the end")


def _sum_up(facts: Facts, say: Callable[[str], None]) -> None:
    granted = min(facts.placements, key=lambda each: each.huge_bytes)
    n_copies = facts.ram_bytes / facts.file_bytes
    huge = " of ".join(map(format_bytes, (granted.huge_bytes, granted.resident_bytes)))
    pages = f"{huge} in pages of {format_bytes(granted.page_bytes)}, in each"
    hot, staged = (1000 * statistics.median(times) for times in facts.seconds.values())
    say("Summary, as the kernel and the clock say:")
    say(f"   two processes, {n_copies:.2f} copies of the model in RAM")
    say(f"   {pages if granted.huge_bytes else _NO_HUGE_PAGES}")
    say(f"   llama.cpp has it after {staged:.1f} ms, and from the file after {hot:.1f} ms")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    sys.exit(main())
