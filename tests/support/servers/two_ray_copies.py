"""Prints how many seconds a Ray node takes to copy a model from its neighbour, on this machine.

``python tests/support/servers/two_ray_copies.py MODEL``
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

import ray
from ray.cluster_utils import Cluster

from unimem.ray import _Copy, _Source, _stage_from


def main(model: str, folder: str) -> None:
    node = {"num_cpus": 1, "object_store_memory": 200_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "temp_dir": folder})
    try:
        other = cluster.add_node(**node).node_id
        ray.init(address=cluster.address, log_to_driver=False)
        there = {"label_selector": {"ray.io/node-id": other}, "num_cpus": 0, "max_concurrency": 8}
        copy = ray.remote(_Copy).options(**there).remote(_Source(model, None), {})
        ray.get(copy.bring_in.remote([]))
        found = []
        for _ in range(3):
            begin = time.perf_counter()
            made = _stage_from(copy, {})
            found.append(time.perf_counter() - begin)
            made.close()
        print(min(found))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as made:
        os.environ["RAY_TMPDIR"] = made
        os.mkdir(f"{made}/ray")  # for the address of the cluster, which is not in `temp_dir`
        main(sys.argv[1], made)
