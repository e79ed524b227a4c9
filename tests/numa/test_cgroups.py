"""Cgroups of version 2, which not every machine has where tests run: a governed process in one."""

from __future__ import annotations

import json
import time

from cgroups import small_cgroup
from lowered_limit import lower, start, used_bytes

MIB = 1 << 20
# Most of it are prefixes that nobody uses; one sequence is in use. (ggml is built for the host's
# CPU, which the emulated one is not, so nothing is decoded.)
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
