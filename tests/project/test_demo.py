"""The demo prints what the kernel says, and leaves nothing behind."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.files import gguf_files
from support.kernel.proc_maps import huge_page_bytes
from support.models.llama_cpp import llama_library
from support.models.make import small, write_model
from support.project.bench_cases import pretend_llama_cpp
from support.project.checkout import ROOT
from unimem.weights.staged import holders

MIB = 1 << 20
DEMO = ROOT / "tools" / "demo.py"
FIELDS = ("Rss", "Pss", "Shared_Hugetlb", "Private_Hugetlb", "ShmemPmdMapped")


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the script as a module."""
    monkeypatch.syspath_prepend(DEMO.parent)
    return importlib.import_module("demo")


@pytest.fixture
def llama_cpp() -> None:
    llama_library()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a model of about 10 MB, large enough for huge pages."""
    return write_model(tmp_path / "small.gguf", shape=small(layers=10))


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    before = children()
    yield
    assert children() == before
    # Other processes may stage models meanwhile.
    folder = tmp_path.resolve()
    assert not [held for held in holders() if Path(held.source).resolve().is_relative_to(folder)]


def mapped(pid: int, inodes: set[int]) -> dict[str, int]:
    """Sum up a process's mappings of files in smaps, in bytes."""
    found = dict.fromkeys(FIELDS, 0)
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = int(line.split()[4]) in inodes
        elif inside and (name := line.partition(":")[0]) in found:
            found[name] += int(line.split()[1]) << 10
    return found


@pytest.mark.usefixtures("llama_cpp")
@pytest.mark.parametrize("kind", ["split", pytest.param("hugetlb", marks=pytest.mark.slow)])
def test_what_is_said_is_what_the_kernel_says(
    demo: Any,
    model: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: Any,
) -> None:
    files = gguf_files.split(model, 50) if kind == "split" else [model]
    if kind == "hugetlb":
        request.getfixturevalue("eight_huge_pages")
        monkeypatch.setattr(um, "stage", partial(um.stage, backing="hugetlb"))
    with ExitStack() as stack:
        facts = demo.demonstrate(files[0], 1, demo._say, stack)
        lines = capsys.readouterr().out.splitlines()
        pids = [report.facts["pid"] for report in facts.reports]
        assert len(set(pids)) == 2
        inodes = {os.stat(path).st_ino for path in facts.staged.paths}
        there = [mapped(pid, inodes) for pid in pids]
        assert facts.plan.fits
        # Small pages that the kernel is joining are in no page table for a moment.
        joined = 0 if kind == "hugetlb" else huge_page_bytes()
        for pid, parts, each, granted in zip(
            pids, facts.models, there, facts.placements, strict=True
        ):
            hugetlb = each["Shared_Hugetlb"] + each["Private_Hugetlb"]
            assert {one["staged_from"] for one in parts} == set(map(str, files))
            for one in parts:
                assert (one["format"], one["state"]) == ("GGUF", "staged")
            assert each["Rss"] + hugetlb > MIB
            for said, by_kernel in (
                (sum(one["rss_bytes"] for one in parts), each["Rss"]),
                (sum(one["pss_bytes"] for one in parts), each["Pss"]),
                (granted.huge_bytes, each["ShmemPmdMapped"]),
                (granted.resident_bytes, each["Rss"]),
            ):
                assert abs(said - (by_kernel + hugetlb)) <= joined
            # Staging in huge pages needs unfragmented memory; mappings then have them too.
            if facts.staged.backing == "tmpfs" and facts.staged.granted.huge_bytes:
                assert granted.huge_bytes > 0
                assert granted.page_bytes == huge_page_bytes()
            assert f"   {pid} " in "\n".join(lines)
        if kind == "hugetlb":
            assert there[0]["Shared_Hugetlb"] == facts.ram_bytes, "one copy"
        else:
            assert abs(there[0]["Pss"] - there[1]["Pss"]) <= joined
            whole = sum(-(-os.stat(path).st_size // PAGESIZE) for path in facts.staged.paths)
            assert 0.5 < facts.ram_bytes / (whole * PAGESIZE) < 1.01, "one copy"
        paths = facts.staged.paths
    assert not any(map(os.path.exists, paths))
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert {len(times) for times in facts.seconds.values()} == {1}
    assert facts.cached_bytes == sum(path.stat().st_size for path in files)
    assert facts.skipped == []
    assert_is_one_screen(lines, files[0])


def assert_is_one_screen(lines: list[str], model: Path) -> None:
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert lines[0] == f"1. What will it need?  unimem plan {model.name}"
    summary = lines.index("Summary, as the kernel and the clock say:")
    copies = re.fullmatch(r"   two processes, (.+) copies of the model in RAM", lines[summary + 1])
    assert copies is not None
    assert 0.5 < float(copies[1]) < 1.01


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the demo as a command."""
    command = [sys.executable, str(DEMO), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# The demo, with a small model in the place of its own.
SMALL_DEMO = f"""
import sys
sys.path[:0] = {[str(DEMO.parent), str(ROOT / "tests")]!r}
from support.models import make
write_model = make.write_model
make.write_model = lambda path, shape: write_model(path, shape=make.SMALL)
import demo
sys.exit(demo.main())
"""


@pytest.mark.usefixtures("llama_cpp")
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupt_leaves_nothing(tmp_path: Path, model: Path, number: signal.Signals) -> None:
    """The signal is sent when both processes have the model; SIGINT tries the demo's own model."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    is_own = number == signal.SIGINT
    with subprocess.Popen(
        [sys.executable, *(["-c", SMALL_DEMO] if is_own else [str(DEMO), str(model)])],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(folder)},
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            pids: list[int] = []
            paths = []
            for line in process.stdout:
                if "/proc/" in line or "/dev/shm/" in line:
                    paths.append(line.strip())
                if found := re.fullmatch(r"   processes (\d+) and (\d+)\n", line):
                    pids = [int(found[1]), int(found[2])]
                    assert bool(os.listdir(folder)) == is_own
                    # A terminal signals the whole group.
                    os.killpg(process.pid, number)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # it cleans up
    assert (process.returncode, len(pids)) == (130, 2)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert paths
    assert not any(map(os.path.exists, paths))
    assert os.listdir(folder) == []


def test_without_llama_cpp_it_is_said_what_is_left_out(
    demo: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_llama_cpp(monkeypatch, is_built=False)
    lines: list[str] = []
    with ExitStack() as stack:
        facts = demo.demonstrate(model, 1, lines.append, stack)
        assert os.path.exists(facts.staged.path)
    assert facts.skipped == ["processes", "report", "start"]
    assert lines[-1] == "SKIPPED, steps 3 to 5: llama.cpp: not built"


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"hello")
    done = run(str(path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"demo: {path}: ")
