"""Two Ray nodes on this machine, eight decoders, one story; prints the events as JSON.

``python tests/support/servers/two_ray_nodes.py STORE TEXT``, with ``examples`` on PYTHONPATH: a
process of its own, since Ray leaves threads behind. Nodes of one machine share its kernel: what
tells their copies apart is that each is a file of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray_decoders import start

import unimem as um
from unimem.ray import Stager

MODEL = os.path.join(os.path.dirname(um.__file__), "engine/models/tiny.gguf")
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000, "memory": 1 << 30}
CTX, N_ENGINES, N_TOKENS, N_LONG = 256, 8, 16, 100
# A node without processes is dead after five seconds; a slow one is not.
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000}


def copy_of(path: str) -> str:
    """The device and inode of a copy, as smaps has them."""
    info = os.stat(path)
    return f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x} {info.st_ino}"


def memory_of(copy: str) -> dict[str, int]:
    """Bytes of RAM that processes have of a copy, each its share (Pss), by PID."""
    found: dict[str, int] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
        except OSError:  # it has ended, or is another user's
            continue
        inside = False
        for line in lines:
            words = line.split(maxsplit=5)
            if "-" in words[0]:
                inside = " ".join(words[3:5]) == copy
            elif inside and words[0] == "Pss:":
                found[pid] = found.get(pid, 0) + int(words[1]) * 1024
    return found


def path_there(stager: Stager) -> str:
    return stager.path


def paths(stager: Stager) -> dict[str, str]:
    task = ray.remote(path_there)
    found = {}
    for node in stager.nodes:
        there = {"ray.io/node-id": node.node_id}
        found[node.node_id] = ray.get(task.options(label_selector=there, num_cpus=0).remote(stager))
    return found


def cut_off(cluster: Cluster, node: Any, pids: Iterable[int]) -> None:
    """End all processes of a node, as a power cut does: workers outlive a raylet for a while."""
    cluster.remove_node(node, allow_graceful=False)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def tell(stager: Stager, cluster: Cluster, lost: Any, store: str, text: str) -> dict[str, Any]:
    copies = {node_id: copy_of(path) for node_id, path in paths(stager).items()}
    tellers = start(stager, store, CTX)
    first = ray.get(tellers[0].tell.remote(text, N_TOKENS))
    begun = text + first.text
    told = [first, *ray.get([teller.tell.remote(begun, N_TOKENS) for teller in tellers])]
    memory = {node_id: memory_of(copy) for node_id, copy in copies.items()}
    # Long enough that some are still generating.
    pending = [teller.tell.remote(begun, N_LONG) for teller in tellers]
    cut_off(cluster, lost, map(int, memory[lost.node_id]))
    repeated = [said.text for said in ray.get(pending, timeout=200)]
    again = ray.get([teller.tell.remote(begun, N_TOKENS) for teller in tellers], timeout=200)
    return {
        "nodes": [(node.node_id, node.n_engines, node.origin) for node in stager.nodes],
        "lost": lost.node_id,
        "told": told,
        "repeated": repeated,
        "again": again,
        "memory": memory,
        "memory_again": {node_id: memory_of(copy) for node_id, copy in copies.items()},
        "model_bytes": os.path.getsize(MODEL),
    }


def main(store: str, text: str, folder: str) -> None:
    head = {**NODE, "_system_config": HEALTH, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        lost = cluster.add_node(**NODE)
        ray.init(address=cluster.address, log_to_driver=False)
        with Stager("/nowhere/tiny.gguf", MODEL, n_engines=N_ENGINES, ctx=CTX) as stager:
            found = tell(stager, cluster, lost, store, text)
        print(json.dumps(found))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    # /tmp/ray belongs to the first user of Ray. Paths of sockets have to be short.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as made:
        os.environ["RAY_TMPDIR"] = made
        os.mkdir(f"{made}/ray")  # for the address of the cluster, which is not in `temp_dir`
        main(sys.argv[1], sys.argv[2], made)
