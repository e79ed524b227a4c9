"""Run the fast tier in every state that a machine may be in.

The states are combined into as few runs as possible. Each run uses a fresh clone of the last
commit, with an environment of its own; it takes as long as ``make install`` and ``make test``. Its
row replaces the last one in the table of docs/testing.md.

    python tools/anywhere.py [--times N] [--at-once N] [RUN ...]

--times repeats each run; --at-once runs several clones beside each other, which keep the CPUs busy
instead of the run's own busy processes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from recorded import commit, put

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- made by tools/anywhere.py -->", "<!-- end -->"
HEAD, RULE = "| states of one run | tests | commit | |", "|---|---|---|---|"
NOBODY = 65534


@dataclass(frozen=True)
class Run:
    """States that one run combines.

    `name` is its name on the command line, and `states` the words in the table. `python` makes its
    environment. `before` and `behind` are shell code around ``make test``, and `environment` has
    variables beside the caller's. `user` runs it; 0 is the caller. `n_busy` processes keep CPUs
    busy beside it. `swap_mb` is the size of a swap file, which only root can make.
    """

    name: str
    states: tuple[str, ...]
    python: str = "python3"
    before: str = ""
    behind: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    user: int = 0
    n_busy: int = 0
    swap_mb: int = 0


RUNS = (
    Run(
        "dumb",
        ("root", "`nohup`", "in a pipe", "`TERM=dumb`", "`LANG=C`", "no swap", "Python 3.11"),
        python="python3.11",
        before="nohup",
        behind="| cat",
        environment={"TERM": "dumb", "LANG": "C", "LC_ALL": "C"},
    ),
    Run(
        "nobody",
        (
            "an unprivileged user",
            "the distribution's Python",
            "a read-only home",
            "`ulimit -n 256`",
            "64 KiB of locked memory",
        ),
        python="/usr/bin/python3",
        before="ulimit -n 256 && ulimit -l 64 &&",
        user=NOBODY,
    ),
    Run("one-cpu", ("one CPU", "Python 3.12"), python="python3.12", before="taskset -c 0"),
    Run("busy", ("both CPUs busy", "Python 3.13"), python="python3.13", n_busy=2),
    Run("swap", ("swap",), swap_mb=2048),
)


def what_is_missing(run: Run) -> str:
    """Say why this machine cannot provide a state; "" if it can."""
    try:  # with pyenv, a name may run nothing
        subprocess.run([run.python, "--version"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return f"there is no {run.python}"
    as_root = os.geteuid() == 0
    if "root" in run.states and not as_root:
        return "not root"
    if (run.user or run.swap_mb) and not as_root:
        return "only root can do this"
    has_swap = len(Path("/proc/swaps").read_text().splitlines()) > 1
    if "no swap" in run.states and has_swap:
        return "this machine has swap"
    return ""


def install(run: Run, folder: Path) -> Callable[[str], int]:
    """Clone and install; return a function that runs shell code there, as its user, into a log."""
    clone, home = folder / "unimem", folder / "home"
    folder.mkdir(mode=0o755)
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True)
    home.mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    environment |= run.environment
    user: list[str] = []
    if run.user:
        subprocess.run(["chown", "-R", str(run.user), folder], check=True)
        user = ["setpriv", f"--reuid={run.user}", f"--regid={run.user}", "--clear-groups"]
        environment |= {"HOME": str(home)}

    def shell(script: str) -> int:
        with (folder / "log").open("a") as output:
            command = [*user, "bash", "-o", "pipefail", "-c", script]
            done = subprocess.run(
                command, cwd=clone, env=environment, stdout=output, stderr=output, check=False
            )
        return done.returncode

    command = f"make install PYTHON={shlex.quote(str(shutil.which(run.python)))}"
    if status := shell(command):
        raise subprocess.CalledProcessError(status, command)
    if run.user:
        home.chmod(0o500)
    return shell


def try_run(run: Run, folder: Path, times: int, at_once: int) -> tuple[bool, str]:
    """Install and test; return whether all was green, and what pytest and the clock say.

    The folder is removed if all runs were green and said the same.
    """
    clones = [folder / str(i) for i in range(at_once)]
    try:
        shells = [install(run, clone) for clone in clones]
    except subprocess.CalledProcessError:
        return False, f"not installed: {folder}"

    def test(shell: Callable[[str], int]) -> list[tuple[int, float]]:
        return [_timed(shell, f"{run.before} make test {run.behind}") for _ in range(times)]

    with (
        busy(run.n_busy if at_once == 1 else 0),
        swap(run.swap_mb, folder),
        ThreadPoolExecutor(at_once) as threads,
    ):
        done = [each for results in threads.map(test, shells) for each in results]
    summary = r"^=*\s*(\d+ (?:failed|passed).*?) in .*$"
    said: Counter[str] = Counter()
    for clone in clones:
        said.update(re.findall(summary, (clone / "log").read_text(), re.MULTILINE))
    if times * at_once == 1:
        text = next(iter(said), "no summary")
    else:
        beside = f", {at_once} beside each other" if at_once > 1 else ""
        runs = "; ".join(f"{n} with {line}" for line, n in said.items())
        text = f"{times * at_once} runs{beside}: {runs or 'no summary'}"
    took = [round(seconds) for _, seconds in done]
    clock = " to ".join(f"{s // 60} min {s % 60} s" for s in sorted({min(took), max(took)}))
    passed = all(status == 0 for status, _ in done)
    if passed and len(said) == 1:  # otherwise the logs show the difference
        shutil.rmtree(folder)
    return passed, f"{text}, {clock}"


def _timed(shell: Callable[[str], int], script: str) -> tuple[int, float]:
    begin = time.monotonic()
    return shell(script), time.monotonic() - begin


@contextlib.contextmanager
def busy(n: int) -> Iterator[None]:
    """Keep some CPUs busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextlib.contextmanager
def swap(megabytes: int, folder: Path) -> Iterator[None]:
    """Add a swap file, and remove it."""
    if not megabytes:
        yield
        return
    path = folder / "swap"
    for command in (
        ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={megabytes}", "status=none"],
        ["chmod", "600", str(path)],
        ["mkswap", "--quiet", str(path)],
        ["swapon", str(path)],
    ):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        subprocess.run(["swapoff", path], check=True)


def recorded() -> dict[str, str]:
    """Return the rows of the page by the states of their run."""
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines[1:]}


def write_page(rows: dict[str, str]) -> None:
    """Replace the rows of the same states, in the order of the runs."""
    found = recorded() | rows
    ordered = [found[states] for run in RUNS if (states := ", ".join(run.states)) in found]
    table = "\n".join([HEAD, RULE, *ordered])
    put(PAGE, BEGIN, f"\n{table}\n", END)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Run the fast tier in many states.")
    parser.add_argument("runs", nargs="*", help="by name; all if none is given")
    parser.add_argument("--times", type=int, default=1, help="each so often in a row")
    parser.add_argument("--at-once", type=int, default=1, help="how many clones run each at once")
    arguments = parser.parse_args()
    names = arguments.runs or [run.name for run in RUNS]
    if unknown := set(names) - {run.name for run in RUNS}:
        parser.error(f"no run {', '.join(unknown)}: there are {', '.join(r.name for r in RUNS)}")
    rows, green = {}, True
    for run in RUNS:
        if run.name not in names:
            continue
        states = ", ".join(run.states)
        print(f"{run.name}: {states}", flush=True)
        if missing := what_is_missing(run):
            print(f"  not run: {missing}", flush=True)
            continue
        folder = Path(tempfile.mkdtemp(prefix=f"unimem-{run.name}-", dir="/var/tmp"))
        folder.chmod(0o755)
        tested = commit()
        passed, text = try_run(run, folder, arguments.times, arguments.at_once)
        color = "green" if passed else "red"
        print(f"  {text}: {color}{f', see {folder}/*/log' if folder.exists() else ''}", flush=True)
        rows[states] = f"| {states} | {text} | {tested} | {color} |"
        green = green and passed
    write_page(rows)
    print(*rows.values(), sep="\n")
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main())
