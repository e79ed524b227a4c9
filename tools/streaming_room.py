"""Stream a model in cgroups whose limits are around what its plan says, and count what ends how.

    python tools/streaming_room.py [--runs 50] [--model MODEL.gguf] [--record RECORD.json]

As root. Each run is a process with a budget of its own, from a tenth of the experts to all. Python
and ggml are loaded first. Then the cgroup gets a limit: what it uses, 8 MiB, and 90 to 110 % of
what the plan says. The process opens the decoder, computes a prompt and tokens, and its budget is
halved and doubled meanwhile. It may be refused with CapacityError below 100 %. Otherwise its peak
is at most what the plan says and 4 MiB for Python's objects and the kernel's tables, and its tokens
are those of every other run; else this ends with status 1. With `--record`, the runs are kept
there, and docs/streaming.md shows them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import unimem as um
from recorded import put, short_commit
from unimem_bench.cgroup import entering, limited_cgroup
from unimem_bench.mixtures import write_mixture

PAGE = Path(__file__).parent.parent / "docs" / "streaming.md"
BEGIN, END = "<!-- made by tools/streaming_room.py -->\n", "<!-- end of the runs -->"
N_PROMPT, N_TOKENS, N_CTX = 64, 24, 256
UNLIMITED = 1 << 40
OWN_BYTES = 4 << 20
# The kernel's files, in the versions 2 and 1 of cgroups.
LIMITS = "memory.max", "memory.limit_in_bytes"
PEAKS = "memory.peak", "memory.max_usage_in_bytes"


def find(group: Path, names: Sequence[str]) -> Path:
    """Return the file that this version of cgroups has."""
    return next(group / name for name in names if (group / name).exists())


def options(budget: int) -> dict[str, Any]:
    """Return what the plan and the decoder are given."""
    return {"ctx": N_CTX, "threads": 1, "load": "stream", "weights_budget": budget}


def work(path: str, budget: int) -> None:
    """Be the process of a run: wait for a line when all is loaded, then open the model."""
    from unimem.engine import Decoder, embedded_model

    with Decoder(embedded_model(), ctx=64, threads=1) as small:
        small.prefill([1])
    print(um.plan(path, engine="unimem", **options(budget)).total_bytes, flush=True)
    input()
    found: dict[str, Any] = {}
    try:
        with Decoder(path, **options(budget)) as decoder:
            stream = decoder.weights.stream
            assert stream is not None
            decoder.prefill([*range(3, 3 + N_PROMPT)])
            found["tokens"] = []
            for i in range(N_TOKENS):
                if i in (N_TOKENS // 3, 2 * N_TOKENS // 3):
                    halved = max(stream.least_bytes, budget // 2)
                    stream.resize(budget if stream.budget_bytes < budget else halved)
                found["tokens"].append(decoder.generate_next_token())
    except um.CapacityError as error:
        found = {"refused": str(error)}
    print(json.dumps(found))


def run(path: Path, budget: int, percent: int) -> dict[str, Any]:
    """Do one run, and return how it ended."""
    words = [sys.executable, __file__, "--worker", str(path), str(budget)]
    with limited_cgroup(UNLIMITED) as group:
        process = subprocess.Popen(
            entering(group, words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"UNIMEM_CACHE": "off"},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        planned = int(process.stdout.readline())
        peak = find(group, PEAKS)
        if peak.name == PEAKS[1]:
            peak.write_text("0")  # from now on
        own = int(peak.read_text())
        find(group, LIMITS).write_text(str(own + 2 * OWN_BYTES + planned * percent // 100))
        answer, _ = process.communicate("\n")
        found = {"budget": budget, "percent": percent, "own_bytes": own, "planned_bytes": planned}
        found |= {"peak_bytes": int(peak.read_text()), "status": process.returncode}
        return found | (json.loads(answer) if answer else {})


def above(run: dict[str, Any]) -> int:
    """Return how far the peak of a run was above what the plan says."""
    return int(run["peak_bytes"] - run["own_bytes"] - run["planned_bytes"])


def check(runs: Sequence[dict[str, Any]]) -> None:
    """Raise AssertionError if a run has ended as it may not."""
    tokens = [each["tokens"] for each in runs if "tokens" in each]
    for each in runs:
        assert each["status"] == 0, f"killed, or failed: {each}"
        if "refused" in each:
            assert each["percent"] < 100, f"refused: {each}"
        else:
            assert each["tokens"] == tokens[0], f"other tokens: {each}"
            assert above(each) <= OWN_BYTES, f"above the plan: {each}"


def lines(record: dict[str, Any]) -> str:
    """Return the table for the page."""
    runs = record["runs"]
    ran = [each for each in runs if "tokens" in each]
    mebibytes = max(map(above, ran), default=0) / 2**20
    killed = sum(each["status"] != 0 for each in runs)
    percents = [each["percent"] for each in runs if "refused" in each]
    refused = f"{len(percents)}, up to {max(percents)} % of the plan" if percents else "0"
    rows = {
        f"runs of `tools/streaming_room.py`, {record['commit']}": len(runs),
        "computed all tokens, the same ones": len(ran),
        "refused with CapacityError": refused,
        "killed": killed,
        "peak above what the plan says, for Python and the kernel": f"at most {mebibytes:.1f} MiB",
    }
    return "".join(f"| {name} | {value} |\n" for name, value in rows.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Stream a model in limits around its plan.")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--model", type=Path, help="a GGUF file; by default a mixture of 340 MB")
    parser.add_argument("--record", type=Path)
    given = parser.parse_args(arguments)
    rng, runs = random.Random(1), []
    with tempfile.TemporaryDirectory() as folder:
        path = given.model or write_mixture(Path(folder), "uniform", quick=True).path
        with um.open_weights(path, load="stream", budget=UNLIMITED >> 2) as weights:
            assert weights.stream is not None
            least, whole = weights.stream.least_bytes, weights.stream.budget_bytes
            whole = min(whole, weights.mapped_bytes)
        for i in range(given.runs):
            budget = int(least + rng.uniform(0.1, 1) * (whole - least))
            runs.append(run(path, budget, 90 + 20 * i // max(1, given.runs - 1)))
    record = {"commit": short_commit(), "runs": runs}
    table = "| | |\n|---|--:|\n" + lines(record)
    print(table)
    check(runs)
    if given.record:
        by_run = ",\n".join(map(json.dumps, runs))
        text = f'{{"commit": {json.dumps(record["commit"])}, "runs": [\n{by_run}\n]}}\n'
        given.record.write_text(text)
        put(PAGE, BEGIN, f"{table}\n", END)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main())
