#!/usr/bin/env python3
"""Stage eight models under a budget for three, from six processes that open them at random.

Commands, readers and keepers are killed at random moments. The run fails if what is staged exceeds
the budget by more than the model that arrives, if a reader cannot open a path that it was given or
reads wrong bytes, or if anything stays behind. It runs in a PID namespace of its own where it may
make one, so that it sees no other stages; else there may be none.

``tools/stage_budget.py SECONDS`` writes one JSON object, and ends with 1 if the run failed.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import unimem as um
from unimem.cli import main as command
from unimem.staging.keeper import drop
from unimem.staging.readers import find_readers
from unimem.weights.staged import holders

N_MODELS, N_PROCESSES, ROOM = 8, 6, 3
TINY = Path(um.__file__).parent / "engine" / "models" / "tiny.gguf"
LOOK_S = 0.02
REFUSED = 3
KILLS_PER_STEP = 0.15
ALONE = "UNIMEM_STAGE_BUDGET_ALONE"


def stage(model: Path, backing: str, kill_after: float | None) -> tuple[int, dict[str, Any]]:
    """Run the command in a process of its own; return its exit code and its document."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(into, 1)
        with open(1, "w", closefd=False) as sys.stdout:
            os._exit(command(["stage", str(model), "--backing", backing, "--json"]))
    os.close(into)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    with open(out) as lines:
        text = lines.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, json.loads(text) if code == 0 else {}


def read(path: str, expected: bytes, seconds: float, *, is_killed: bool) -> str:
    """Map a file in a process of its own, compare it before and after a while, and say how."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with (
            suppress(FileNotFoundError),
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        ):
            code = 2 * (mapped[:] != expected)
            if is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(seconds)
            code = code or 2 * (mapped[:] != expected)
        os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {0: "read", 1: "not there", 2: "wrong bytes", -signal.SIGKILL: "killed"}[status]


def work(models: list[Path], until: float, seed: int, kills: Path) -> None:
    """Stage and read at random until a time; print the counts."""
    chance, counts = random.Random(seed), Counter[str]()
    expected = TINY.read_bytes()
    while time.monotonic() < until:
        model = models[min(int(chance.expovariate(0.4)), len(models) - 1)]
        kill_after = chance.uniform(0, 0.2) if chance.random() < KILLS_PER_STEP else None
        code, staged = stage(model, chance.choice(("auto", "shm", "memfd")), kill_after)
        if code == -signal.SIGKILL:
            counts["commands killed"] += 1
        elif code == REFUSED:
            counts["commands refused"] += 1
            time.sleep(chance.uniform(0, 1))
        elif code != 0:
            counts[f"commands failed with {code}"] += 1
        else:
            is_killed = chance.random() < KILLS_PER_STEP
            said = read(staged["path"], expected, chance.uniform(0, 1), is_killed=is_killed)
            if said == "not there" and (kills / str(staged["pid"])).exists():
                said = "the keeper was killed before"
            counts[f"readers: {said}"] += 1
    print(json.dumps(counts), flush=True)


def watch(until: float, seed: int, kills: Path) -> dict[str, int]:
    """Look at what is staged until a time, and kill a keeper now and then; return the counts."""
    chance = random.Random(seed)
    most = looks = killed = most_models = 0
    next_kill = time.monotonic() + 5
    while time.monotonic() < until:
        found = holders()
        looks += 1
        most = max(most, sum(held.nbytes for held in found))
        most_models = max(most_models, len(found))
        if found and time.monotonic() >= next_kill:
            next_kill += 5
            held = chance.choice(found)
            (kills / str(held.pid)).touch()
            killed += 1
            with suppress(ProcessLookupError):
                os.kill(held.pid, signal.SIGKILL)
        time.sleep(LOOK_S)
    counts = {"looks": looks, "keepers_killed": killed}
    return counts | {"most_bytes": most, "most_models": most_models}


def run(seconds: float, seed: int) -> dict[str, Any]:
    """Run all of it, and return the figures."""
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="unimem-budget-") as name:
        folder, kills = Path(name), Path(name, "kills")
        kills.mkdir()
        os.environ["UNIMEM_STAGING"] = str(folder / "staging")
        models = [Path(shutil.copy(TINY, folder / f"{i}.gguf")) for i in range(N_MODELS)]
        budget = ROOM * TINY.stat().st_size
        command(["stage", "--budget", str(budget)])
        until = time.monotonic() + seconds
        workers = []
        for number in range(N_PROCESSES):
            out, into = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.dup2(into, 1)
                work(models, until, seed + number, kills)
                os._exit(0)
            os.close(into)
            workers.append((pid, out))
        figures: dict[str, Any] = watch(until, seed, kills)
        counts = Counter[str]()
        for pid, out in workers:
            with open(out) as lines:
                counts += Counter(json.loads(lines.read() or '{"workers that died": 1}'))
            os.waitpid(pid, 0)
        found = holders()
        still_read = sum(bool(readers) for readers in find_readers(found))
        for held in found:
            drop(held)
        command(["stage", "--list"])  # removes what killed keepers have left
        left = {each for each in set(os.listdir("/dev/shm")) - before if each.startswith("unimem")}
        figures |= {
            "budget_bytes": budget, "model_bytes": TINY.stat().st_size, "seconds": seconds,
            "counts": dict(sorted(counts.items())), "still_read": still_read,
            "left": sorted(left) + [held.path for held in holders()],
        }  # fmt: skip
    return figures


def problems(figures: dict[str, Any]) -> list[str]:
    """Say what a run must not show."""
    found = [f"{n} times: {what}" for what, n in figures["counts"].items()
             if what in ("readers: not there", "readers: wrong bytes") or "failed" in what
             or "died" in what]  # fmt: skip
    if figures["most_bytes"] > figures["budget_bytes"] + figures["model_bytes"]:
        found.append("the budget was exceeded by more than one model")
    if figures["left"] or figures["still_read"]:
        found.append(f"left behind: {figures['left']}, read: {figures['still_read']}")
    return found


def main() -> int:
    """Run it in a PID namespace of its own, if that can be made."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("seconds", type=float, nargs="?", default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    alone = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc"]
    alone += ["sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
    may = ALONE not in os.environ and shutil.which("unshare")
    if may and subprocess.run([*alone, "true"], check=False, capture_output=True).returncode == 0:
        os.environ[ALONE] = "1"
        return subprocess.run([*alone, sys.executable, *sys.argv], check=False).returncode
    if holders():
        parser.error("models are staged: 'unimem stage --drop all' first")
    figures = run(options.seconds, options.seed)
    figures["problems"] = problems(figures)
    print(json.dumps(figures, indent=1))
    return 1 if figures["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
