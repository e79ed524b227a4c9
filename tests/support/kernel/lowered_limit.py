"""A process that decodes while the limit of its cgroup is lowered by 30 %, governed or not.

``PYTHONPATH=tests python -m support.kernel.lowered_limit --runs 50`` prints how the runs ended, as
JSON; with ``--ungoverned`` nothing is given back. With ``--neighbour`` the limit stays, and another
process in the cgroup takes as much. It needs root.
"""

from __future__ import annotations

import argparse
import errno
import json
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from support.kernel.cgroups import SmallCgroup, small_cgroup
from unimem_bench.cgroup import entering

MIB = 1 << 20
SPARE_BYTES = 140 * MIB

# Fills most of the cgroup with unused prefixes, and generates one story until its input ends.
# At last it prints how many stories differ.
CHILD = """
import sys
import threading
import numpy as np
import unimem as um
from unimem.engine import Decoder, embedded_model

LAYERS, HEADS, DIM, TOKENS = 8, 8, 64, 16
SPARE = {spare_bytes}
governed = {governed}
n = SPARE // (LAYERS * 2 * HEADS * DIM * 4)
ones = np.ones((TOKENS, HEADS, DIM), "f4")
stop = []
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("500")  # the kernel kills this one first

def story(decoder):
    return "".join(decoder.generate("Once upon a time", 100))

with (
    um.PagedKVCache(LAYERS, HEADS, DIM, n_blocks=n // TOKENS, dtype="f32", pages="4k") as pool,
    um.KVCache(LAYERS, HEADS, DIM, 4096, dtype="f32", grow=True, pages="4k") as talk,
    Decoder(embedded_model(), ctx=256) as decoder,
    um.Governor() as governor,
):
    governor.add(decoder).add(talk).add(pool)
    expected = story(decoder)
    with pool.sequence(range(n)) as sequence:
        for first in range(0, n, TOKENS):
            for layer in range(LAYERS):
                sequence.append(layer, ones, ones)
    print("ready", flush=True)
    sys.stdin.readline()  # there is a limit now
    if governed:
        governor.start()
    threading.Thread(target=lambda: stop.append(sys.stdin.readline()), daemon=True).start()
    print("decodes", flush=True)
    n_stories = n_changed = 0
    while not stop:
        n_stories += 1
        n_changed += story(decoder) != expected
        for layer in range(LAYERS):  # a conversation that goes on
            talk.append(layer, ones, ones)
        if talk.seq_len > 1000:
            talk.crop(0)
    print(n_stories, n_changed, governor.given_back_bytes, flush=True)
"""

# Takes the bytes of its argument, a MiB at a time, and waits.
NEIGHBOUR = """
import sys, time
taken = []
for _ in range(int(sys.argv[1]) >> 20):
    taken.append(bytearray(b"x") * (1 << 20))
    time.sleep(0.01)
print("taken", flush=True)
sys.stdin.readline()
"""


def start(cgroup: SmallCgroup, script: str, *arguments: str) -> subprocess.Popen[str]:
    """Start Python in a cgroup."""
    return subprocess.Popen(
        entering(cgroup.folder, [sys.executable, "-c", script, *arguments]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def used_bytes(cgroup: SmallCgroup) -> int:
    """Return the bytes that a cgroup uses, without files that can be dropped."""
    stat = (cgroup.folder / "memory.stat").read_text()
    fields = dict(line.split() for line in stat.splitlines())
    return int(fields["total_rss"] if "total_rss" in fields else fields["anon"])


def lower(cgroup: SmallCgroup, nbytes: int, child: subprocess.Popen[str], seconds: float) -> bool:
    """Lower the limit as an operator does; return whether the kernel accepted it.

    Version 1 refuses a limit that it cannot reclaim, and is asked again. In version 2
    ``memory.high`` comes first, since the kernel kills processes past ``memory.max`` at once.
    """
    end = time.monotonic() + seconds
    high, most = cgroup.folder / "memory.high", cgroup.folder / "memory.max"
    if most.exists():
        high.write_text(str(nbytes))
        current = cgroup.folder / "memory.current"
        while int(current.read_text()) > nbytes and time.monotonic() < end:
            time.sleep(0.01)
        most.write_text(str(nbytes))
        return True
    while time.monotonic() < end and child.poll() is None:
        try:
            (cgroup.folder / "memory.limit_in_bytes").write_text(str(nbytes))
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            time.sleep(0.01)
        else:
            return True
    return False


def run_once(*, governed: bool, neighbour: bool = False, seconds: float = 20.0) -> dict[str, Any]:
    """Run once; return how it ended."""
    with small_cgroup(1 << 30) as cgroup:
        child = start(cgroup, CHILD.format(spare_bytes=SPARE_BYTES, governed=governed))
        other = None
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            # This leaves just enough room.
            limit = int(used_bytes(cgroup) * 1.05)
            assert lower(cgroup, limit, child, seconds)
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "decodes\n"
            begin = time.monotonic()
            if neighbour:
                other = start(cgroup, NEIGHBOUR, str(limit * 3 // 10))
                assert other.stdout is not None
                done = other.stdout.readline() == "taken\n"
            else:
                done = lower(cgroup, limit * 7 // 10, child, seconds)
            took = time.monotonic() - begin
            time.sleep(0.5)  # decode with the earlier limit
            with suppress(OSError):
                child.stdin.write("\n")
                child.stdin.flush()
            last = child.stdout.read().split()
            status = child.wait(60)
            return {
                "status": status,
                "lowered": done,
                "seconds": took,
                "stories": int(last[0]) if last else 0,
                "changed": int(last[1]) if last else 0,
                "given_back_bytes": int(last[2]) if last else 0,
            }
        finally:
            for process in filter(None, (other, child)):
                process.kill()
                process.communicate()


def main() -> None:
    """Run many times, and say how the runs ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--ungoverned", action="store_true")
    parser.add_argument("--neighbour", action="store_true")
    asked = parser.parse_args()
    runs = [
        run_once(governed=not asked.ungoverned, neighbour=asked.neighbour, seconds=5.0)
        for _ in range(asked.runs)
    ]
    seconds = sorted(run["seconds"] for run in runs)
    print(
        json.dumps(
            {
                "runs": len(runs),
                "statuses": Counter(str(run["status"]) for run in runs),
                "lowered": sum(run["lowered"] for run in runs),
                "stories": sum(run["stories"] for run in runs),
                "changed": sum(run["changed"] for run in runs),
                "median_seconds": round(seconds[len(seconds) // 2], 3),
                "worst_seconds": round(seconds[-1], 3),
                "least_given_back_bytes": min(run["given_back_bytes"] for run in runs),
            }
        )
    )


if __name__ == "__main__":
    main()
