"""Processes in cgroups of version 2, a governed one among them."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path

import unimem as um
from support.kernel.cgroups import SmallCgroup, small_cgroup
from support.kernel.lowered_limit import lower, start, used_bytes

MIB = 1 << 20
TINY = Path(um.__file__).parent / "engine" / "models" / "tiny.gguf"
# Most of its memory holds unused prefixes; one sequence is in use. It decodes nothing, since ggml
# is built for the host's CPU, not for the emulated one.
CHILD = """
import json, sys
import numpy as np
import unimem as um
n, ones = 3200, np.ones((16, 8, 64), "f4")
with um.PagedKVCache(8, 8, 64, n_blocks=n // 16, dtype="f32", pages="4k") as pool:
    with um.Governor() as governor, pool.sequence([7] * 16) as live:
        for layer in range(8):
            live.append(layer, 3 * ones, 5 * ones)
        governor.add(pool)
        with pool.sequence(range(n - 16)) as sequence:
            for _ in range(0, n - 16, 16):
                for layer in range(8):
                    sequence.append(layer, ones, ones)
        print("ready", flush=True)
        sys.stdin.readline()
        governor.start()
        print("governed", flush=True)
        sys.stdin.readline()
        rows = [live.gather(layer) for layer in range(8)]
        kept = all(bool((keys == 3).all() and (values == 5).all()) for keys, values in rows)
        print(json.dumps([governor.given_back_bytes, kept, governor.watches]))
"""


# Takes memory for each line that it reads.
TAKER = """
import sys
import unimem as um
for _ in sys.stdin:
    try:
        with um.Block(256 << 20, pages="4k", warm=True) as block:
            print("granted", block.granted.resident_bytes, flush=True)
    except um.CapacityError as error:
        print("refused", error, flush=True)
"""
# Keeps a model in shared memory like `unimem stage`.
HOLDER = f"""
import sys
import unimem as um
with um.stage({str(TINY)!r}) as stage:
    print(stage.path, flush=True)
    sys.stdin.readline()
"""


def test_a_governed_process_lives_while_its_limit_is_lowered() -> None:
    with small_cgroup(1 << 30) as cgroup:
        assert (cgroup.folder / "memory.high").exists(), "not version 2"
        with start(cgroup, CHILD) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            limit = int(used_bytes(cgroup) * 1.05)
            assert lower(cgroup, limit, child, 60)
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "governed\n"
            assert lower(cgroup, limit * 7 // 10, child, 60)
            time.sleep(1)
            out, _ = child.communicate("\n")
        assert child.returncode == 0
        given_back, is_kept, watches = json.loads(out)
        assert given_back > 20 * MIB
        assert is_kept
        assert any(str(cgroup.folder) in watch or "memory.events" in watch for watch in watches)
        assert used_bytes(cgroup) < limit * 7 // 10


def ask(child: subprocess.Popen[str]) -> str:
    """Let a child go on, and return its next line."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    return child.stdout.readline()


def high_events(cgroup: SmallCgroup) -> int:
    """Count how often processes were slowed down because they were past `memory.high`."""
    events = (cgroup.folder / "memory.events").read_text()
    return int(dict(line.split() for line in events.splitlines())["high"])


def test_what_memory_high_has_no_room_for_is_refused_and_the_limit_is_read_anew() -> None:
    granted = f"granted {256 * MIB}\n"
    with small_cgroup(1 << 30) as cgroup, start(cgroup, TAKER) as child:
        assert ask(child) == granted
        before = high_events(cgroup)
        (cgroup.folder / "memory.high").write_text(str(200 * MIB))
        refused = ask(child)
        assert refused.startswith("refused")
        assert cgroup.name in refused
        told = re.search(rf"raise it with: echo (\d+) > {cgroup.folder}/memory\.high\n", refused)
        assert told is not None
        assert int(told[1]) > 256 * MIB
        # Nothing was taken, so the process was not slowed down.
        assert high_events(cgroup) == before
        (cgroup.folder / "memory.high").write_text("max")
        assert ask(child) == granted
        child.communicate()
        assert child.returncode == 0


def test_a_process_that_is_moved_has_the_limits_of_where_it_is() -> None:
    with (
        small_cgroup(1 << 30) as roomy,
        small_cgroup(200 * MIB) as tight,
        start(roomy, TAKER) as child,
    ):
        assert ask(child) == f"granted {256 * MIB}\n"
        (tight.folder / "cgroup.procs").write_text(str(child.pid))
        refused = ask(child)
        assert refused.startswith("refused")
        assert tight.name in refused
        assert roomy.name not in refused
        (roomy.folder / "cgroup.procs").write_text(str(child.pid))
        assert ask(child) == f"granted {256 * MIB}\n"
        child.communicate()
        assert child.returncode == 0


def test_what_a_frozen_process_keeps_is_there_for_others() -> None:
    with small_cgroup(1 << 30) as cgroup, start(cgroup, HOLDER) as child:
        assert child.stdout is not None
        path = child.stdout.readline().strip()
        (cgroup.folder / "cgroup.freeze").write_text("1")
        end = time.monotonic() + 60
        while "frozen 1" not in (cgroup.folder / "cgroup.events").read_text():
            assert time.monotonic() < end, "it does not freeze"
            time.sleep(0.01)
        with um.open_weights(path) as staged, um.open_weights(TINY, load="copy") as expected:
            assert staged.content_hash() == expected.content_hash()
            assert um.report(child.pid)["staging"].nbytes >= TINY.stat().st_size
            (cgroup.folder / "cgroup.freeze").write_text("0")
            child.communicate("\n")
            assert child.returncode == 0
            assert staged.content_hash() == expected.content_hash()  # mapped: it stays
