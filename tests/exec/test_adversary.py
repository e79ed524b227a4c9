"""What an adversary did to programs under `unimem exec`, each as a case that failed once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest

import unimem_exec as launch
from support.project.building import run, tool

FOLDER = Path(__file__).parent
LIBRARY = launch.find_library()
pytestmark = pytest.mark.skipif(
    LIBRARY is None, reason="libunimem-exec.so is not installed: make install"
)
ABSENT = 77  # the kernel has no such advice
CHANGES = re.findall(r'^    \{"(\w+)", \w+, \w+', (FOLDER / "adversary.c").read_text(), re.M)
MAIN = "import sys; from unimem_command import main; sys.exit(main())"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the adversary alone, without PIE, and linked to each library; return the folder."""
    folder = tmp_path_factory.mktemp("programs")
    flags = (tool("gcc"), "-O1", "-fno-builtin", "-Wall", "-Werror", "-pthread")
    source = FOLDER / "adversary.c"
    run(*flags, "-o", folder / "adversary", source)
    run(*flags, "-no-pie", "-fno-pic", "-o", folder / "fixed", source)
    for name in ("handlers", "allocator"):
        library = folder / f"lib{name}.so"
        run(*flags, "-fPIC", "-shared", "-o", library, FOLDER / f"{name}.c")
        run(*flags, "-Wl,--no-as-needed", "-o", folder / name, source, library)
    return folder


def attack(
    programs: Path, case: str, *options: str, program: str = "adversary"
) -> subprocess.CompletedProcess[str]:
    """Run a case under exec."""
    words = [sys.executable, "-c", MAIN, "exec", *options, "--", str(programs / program), case]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("change", CHANGES)
def test_memory_that_is_used_again_is_as_new(programs: Path, change: str) -> None:
    done = attack(programs, change)
    if done.returncode == ABSENT:
        pytest.skip(f"this kernel, or the limit on locked memory, refuses the change: {change}")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize("program", ["adversary", "fixed"])
def test_all_functions_of_malloc_s_kind_are_placed(programs: Path, program: str) -> None:
    done = attack(programs, "family", program=program)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("program", ["adversary", "allocator"])
def test_contents_survive_between_allocators(programs: Path, program: str) -> None:
    done = attack(programs, "grow", program=program)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.count("has an allocator of its own") == (program == "allocator")


def test_an_allocator_of_a_program_is_left_alone_and_named(programs: Path) -> None:
    done = attack(programs, "allocate_in_handlers", "--report", "-", program="allocator")
    assert done.stderr.count("has an allocator of its own, which is left alone") == 1
    assert "the program has a malloc of its own: only its mmap is seen" in done.stderr
    assert "ended     mmap:" in done.stderr
    assert "malloc:" not in done.stderr


def test_no_thread_starts_under_the_lock_of_an_allocator(programs: Path) -> None:
    """With two CPUs or more, --prefault would start some, and a new thread allocates."""
    done = attack(programs, "allocate_much", "--prefault", program="allocator")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(launch._thp_bytes() == 0, reason="there are no huge pages")
def test_growth_has_huge_pages(programs: Path) -> None:
    """The buffer and the mapping of 64 MiB may lose a page at each end."""
    done = attack(programs, "grow_to_huge_pages")
    assert [int(each) >= 60 for each in done.stdout.split()] == [True, True], done.stdout


@pytest.mark.parametrize("min_bytes", ["4096", "1M"])
@pytest.mark.parametrize(
    ("case", "program"),
    [("fork_with_handlers", "handlers"), ("fork_beside_a_flush", "adversary")],
)
def test_memory_is_allocated_while_a_thread_forks(
    programs: Path, case: str, program: str, min_bytes: str
) -> None:
    done = attack(programs, case, "--min-bytes", min_bytes, program=program)
    assert done.returncode == 0, done.stderr


def test_a_handler_of_a_signal_ends_the_program_anywhere(programs: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = attack(programs, "exit_in_setenv", "--report", str(file), program="allocator")
    assert done.returncode == 0, done.stderr
    assert json.loads(file.read_text())["schema"] == "unimem.report/1"


def test_a_handler_of_a_signal_allocates_anywhere(programs: Path) -> None:
    assert attack(programs, "allocate_in_handlers").returncode == 0


# ---- the whole family, at random ----------------------------------------------------------------

# Allocators of others, where they are installed; UNIMEM_EXEC_ALLOCATORS names further files.
OTHERS = [name for name in map(find_library, ("jemalloc", "mimalloc", "tcmalloc_minimal")) if name]
OTHERS += os.environ.get("UNIMEM_EXEC_ALLOCATORS", "").split()


@pytest.mark.parametrize("beside", ["", *OTHERS])
def test_all_functions_are_called_at_random(tmp_path: Path, beside: str) -> None:
    """UNIMEM_EXEC_CALLS=100000000 makes that number of calls beside each allocator."""
    program = tmp_path / "family"
    run(tool("g++"), "-std=c++17", "-O1", "-fno-builtin", "-o", program, FOLDER / "family.cpp")
    n_calls = os.environ.get("UNIMEM_EXEC_CALLS", "20000")
    words = [
        sys.executable,
        "-c",
        MAIN,
        "exec",
        "--min-bytes",
        "65536",
        "--",
        str(program),
        n_calls,
    ]
    done = subprocess.run(
        words,
        env=os.environ | {"LD_PRELOAD": beside},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    n, n_large, n_placed = map(int, done.stdout.split())
    assert n_large > n / 2
    assert n_placed < 0.1 * n_large if beside else n_placed > 0.99 * n_large
    assert done.stderr.count("has an allocator of its own") == (beside != "")
