"""Run models in cgroups whose limits are around what `unimem plan` says, and count who lives.

    python tools/plan_room.py [--write] [MODEL:LOAD...]

As root. Three models (that of the package, SmolLM2 from its package, a mixture of 340 MB) are
planned with 512 tokens in three load modes each. The plan asks for what must stay in RAM, the
process included: below that, the verdict is "does not fit". `unimem run` then runs in cgroups with
limits from 16 MiB below it up to it: as it is asked for, five times. Whoever has what the plan asks
for may be neither killed nor refused, and the least limit at which all five live is at most 5 % or
8 MiB below; else this ends with status 1. `--write` puts the table into docs/plan.md. By default
all cases are run; a mapped model that has no room at all is read again for each token, and takes an
hour on a slow disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from real_models import FILES, fetch
from recorded import put, short_commit
from unimem.engine import embedded_model
from unimem_bench.cgroup import entering, limited_cgroup
from unimem_bench.mixtures import write_mixture

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "plan.md"
BEGIN, END = "<!-- made by tools/plan_room.py -->\n", "<!-- end of the rooms -->"
UNIMEM = [sys.executable, "-c", "import sys; from unimem.cli import main; sys.exit(main())"]
N_CTX, N_TOKENS, N_RUNS, MIB = "512", "4", 5, 1 << 20
# MiB below what the plan asks for.
BELOW = (16, 12, 8, 4, 0)
LEAST, SHARE = 8 * MIB, 20


class Case(NamedTuple):
    """A model, its file, and how it is loaded."""

    model: str
    path: str
    load: str


def asked(case: Case) -> dict[str, Any]:
    """Return the plan for a machine with room for all."""
    words = ["plan", case.path, "--ctx", N_CTX, "--load", case.load, "--memory", "64G", "--json"]
    done = subprocess.run([*UNIMEM, *words], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def lives(case: Case, limit: int) -> str:
    """Run the model in a cgroup with a limit, and return how it ends."""
    words = ["run", case.path, "--ctx", N_CTX, "--load", case.load, "--tokens", N_TOKENS]
    with limited_cgroup(limit) as group:
        done = subprocess.run(
            entering(group, [*UNIMEM, *words, "--prompt", "Once upon a time"]),
            capture_output=True,
            text=True,
            check=False,
        )
    return {0: "lives", 3: "refused", -9: "killed", 137: "killed"}.get(
        done.returncode, f"fails: {done.stderr.strip()[-200:]}"
    )


def measure(case: Case) -> dict[str, Any]:
    """Run one case at its limits, from the plan's downwards until it dies."""
    plan = asked(case)
    needed = plan["checks"][0]["needed_bytes"]
    ends: dict[int, list[str]] = {}
    for below in reversed(BELOW):
        found = ends.setdefault(below, [])
        for _ in range(N_RUNS):
            found.append(lives(case, needed - below * MIB))
            if found[-1] != "lives":
                break
        if found[-1] != "lives":
            break
    least = max(below for below, found in ends.items() if set(found) == {"lives"} or below == 0)
    print(case.model, case.load, needed, ends, file=sys.stderr, flush=True)
    return {
        "case": case,
        "plan": plan,
        "needed": needed,
        "ends": ends,
        "least": needed - least * MIB,
    }


def lines(found: list[dict[str, Any]]) -> str:
    """Return the table."""
    rows = [
        "| model | load | the plan asks for | 5 of 5 live from | below that | container limit |",
        "|---|---|--:|--:|---|--:|",
    ]
    for each in found:
        case, dead = each["case"], [ends[-1] for ends in each["ends"].values()]
        rows.append(
            f"| {case.model} | `{case.load}` | {each['needed'] / MIB:.0f} MiB "
            f"| {each['least'] / MIB:.0f} MiB | {dead[-1] if dead[-1] != 'lives' else 'not tried'} "
            f"| {each['plan']['container_bytes'] / MIB:.0f} MiB |"
        )
    n = sum(len(ends) for each in found for ends in each["ends"].values())
    limits = sum(len(each["ends"]) for each in found)
    return "\n".join(rows) + f"\n\n{n} runs at {limits} limits, {short_commit()}.\n"


def main() -> int:
    """Run the command line."""
    only = {word for word in sys.argv[1:] if ":" in word}
    os.environ.setdefault("UNIMEM_CACHE", str(ROOT / "build" / "cache"))
    with tempfile.TemporaryDirectory() as folder:
        (models := ROOT / "build" / "models").mkdir(parents=True, exist_ok=True)
        name = "SmolLM2-135M-Instruct.Q4_1.gguf"
        wants_mixture = not only or any(word.startswith("mixture:") for word in only)
        mixture = write_mixture(Path(folder), "uniform", quick=True).path if wants_mixture else ""
        files = {
            "packaged": (embedded_model(), ("map", "copy", "direct")),
            "SmolLM2": (fetch(name, FILES[name], models), ("map", "copy", "repack")),
            "mixture": (mixture, ("map", "copy", "stream")),
        }
        found = [
            measure(Case(model, str(path), load))
            for model, (path, loads) in files.items()
            for load in loads
            if not only or f"{model}:{load}" in only
        ]
    table = lines(found)
    print(table)
    if "--write" in sys.argv[1:]:
        put(PAGE, BEGIN, table, END)
    dead = [each for each in found if set(each["ends"][0]) != {"lives"}]
    loose = [
        each
        for each in found
        if each["needed"] - each["least"] > max(LEAST, each["needed"] // SHARE)
    ]
    for each in dead:
        print("dies with what its plan asks for:", each["case"], each["ends"], file=sys.stderr)
    for each in loose:
        print("lives with far less:", each["case"], each["ends"], file=sys.stderr)
    return 1 if dead or loose else 0


if __name__ == "__main__":
    sys.exit(main())
