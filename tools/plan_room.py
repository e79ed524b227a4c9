"""Run models in cgroups whose limits are around what `unimem plan` says, and count who lives.

    python tools/plan_room.py [--write] [MODEL:LOAD...]

As root. Three models (that of the package, SmolLM2 from its package, a mixture of 340 MB) are
planned with 512 tokens in three load modes each. The plan asks for what must stay in RAM, the
process included: below that, the verdict is "does not fit". `unimem run`, with a prompt that fills
the context, then runs in cgroups: with the container limit, with what the plan asks for, and with
limits below that in steps of 2 MiB, five times each, down to the first that a run does not survive.
Whoever has what the plan asks for may be neither killed nor refused, and the least limit at which
all five live is at most 5 % or 8 MiB below; else this ends with status 1. `--write` puts the table
into docs/plan.md. By default all cases are run, which takes half an hour; a mapped model that has
no room at all is read again for each batch and token, and takes longer on a slow disk.
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
from unimem.engine.text.tokenizer import Tokenizer
from unimem.weights.opened import open_weights
from unimem_bench.cgroup import entering, limited_cgroup
from unimem_bench.mixtures import write_mixture

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "plan.md"
BEGIN, END = "<!-- made by tools/plan_room.py -->\n", "<!-- end of the rooms -->"
UNIMEM = [sys.executable, "-c", "import sys; from unimem.cli import main; sys.exit(main())"]
N_CTX, N_TOKENS, N_RUNS, MIB = "512", "4", 5, 1 << 20
STEP, MOST_BELOW = 2 * MIB, 16 * MIB  # below what the plan asks for
LEAST, SHARE = 8 * MIB, 20
SENTENCE, N_PROMPT = "Once upon a time, there was a little girl. ", 480


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


def long_prompt(path: str) -> str:
    """Return a text of about N_PROMPT tokens of the model, so that all of its cache is touched."""
    with open_weights(path, load="map") as weights:
        n = len(Tokenizer.from_metadata(weights.metadata).encode(SENTENCE * 10))
    return SENTENCE * (10 * N_PROMPT // n)


def lives(case: Case, prompt: str, limit: int) -> str:
    """Run the model in a cgroup with a limit, and return how it ends."""
    words = ["run", case.path, "--ctx", N_CTX, "--load", case.load, "--tokens", N_TOKENS]
    with limited_cgroup(limit) as group:
        done = subprocess.run(
            entering(group, [*UNIMEM, *words, "--prompt", prompt]),
            capture_output=True,
            text=True,
            check=False,
        )
    return {0: "lives", 3: "refused", -9: "killed", 137: "killed"}.get(
        done.returncode, f"fails: {done.stderr.strip()[-200:]}"
    )


def measure(case: Case) -> dict[str, Any]:
    """Run one case at its limits, from the largest downwards until it dies."""
    plan, prompt = asked(case), long_prompt(case.path)
    needed = plan["checks"][0]["needed_bytes"]
    below = range(needed, needed - MOST_BELOW - 1, -STEP)
    ends: dict[int, list[str]] = {}
    for limit in sorted({plan["container_bytes"], *below}, reverse=True):
        found = ends.setdefault(limit, [])
        while len(found) < N_RUNS and set(found) <= {"lives"}:
            found.append(lives(case, prompt, limit))
        print(case.model, case.load, limit - needed, found, file=sys.stderr, flush=True)
        if found[-1] != "lives":
            break
    least = min((limit for limit, found in ends.items() if found[-1] == "lives"), default=None)
    return {"case": case, "plan": plan, "needed": needed, "ends": ends, "least": least}


def lines(found: list[dict[str, Any]]) -> str:
    """Return the table."""
    rows = [
        "| model | load | the plan asks for | 5 of 5 live from | below that | container limit |",
        "|---|---|--:|--:|---|--:|",
    ]
    for each in found:
        case, dead = each["case"], [ends[-1] for ends in each["ends"].values()]
        least = "none" if each["least"] is None else f"{each['least'] / MIB:.0f} MiB"
        rows.append(
            f"| {case.model} | `{case.load}` | {each['needed'] / MIB:.0f} MiB "
            f"| {least} | {dead[-1] if dead[-1] != 'lives' else 'not tried'} "
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
    dead = [
        each
        for each in found
        if any(
            limit >= each["needed"] and ends[-1] != "lives" for limit, ends in each["ends"].items()
        )
    ]
    loose = [
        each
        for each in found
        if each["needed"] - (each["least"] or each["needed"]) > max(LEAST, each["needed"] // SHARE)
    ]
    for each in dead:
        print("dies with what its plan asks for:", each["case"], each["ends"], file=sys.stderr)
    for each in loose:
        print("lives with far less:", each["case"], each["ends"], file=sys.stderr)
    return 1 if dead or loose else 0


if __name__ == "__main__":
    sys.exit(main())
