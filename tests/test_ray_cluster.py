"""Two nodes of a real Ray cluster on this machine: the example, and a lost node."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from support.project.checkout import ROOT
from unimem.engine import Decoder, embedded_model

pytestmark = [
    pytest.mark.uncounted,
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),  # one cluster for all of these
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

TEXT = "Once upon a time there was a little girl named Lily. " * 11
N_TOKENS, N_LONG, BATCH = 16, 100, 128


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output of tests/support/servers/two_ray_nodes.py."""
    store = tmp_path_factory.mktemp("store")
    path = os.pathsep.join([f"{ROOT}/examples", os.environ.get("PYTHONPATH", "")])
    child = subprocess.Popen(
        [sys.executable, ROOT / "tests/support/servers/two_ray_nodes.py", store, TEXT],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
    )
    try:
        said, _ = child.communicate(timeout=400)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    assert child.returncode == 0
    # Ray writes there, too.
    answer: dict[str, Any] = json.loads(next(x for x in said.splitlines() if x[:1] == "{"))
    return answer


@pytest.fixture(scope="module")
def expected() -> tuple[str, str, str, int]:
    """Return the text of a decoder without store, copy and cluster, and its tokens."""
    with Decoder(embedded_model(), ctx=256, threads=1) as decoder:
        first = "".join(decoder.generate(TEXT, N_TOKENS))
        more, long = ("".join(decoder.generate(TEXT + first, n)) for n in (N_TOKENS, N_LONG))
        return first, more, long, len(decoder.tokenize(TEXT))


def test_engines_are_on_the_nodes_that_were_planned(found: dict[str, Any]) -> None:
    assert [(n, origin) for _, n, origin in found["nodes"]] == [(4, "store"), (4, "neighbour")]
    on = [node_id for _, node_id, _, _ in found["told"][1:]]
    assert {node_id: on.count(node_id) for node_id, _, _ in found["nodes"]} == {
        node_id: 4 for node_id, _, _ in found["nodes"]
    }


def test_a_conversation_goes_on_on_the_other_node(
    found: dict[str, Any], expected: tuple[str, str, str, int]
) -> None:
    first, *others = found["told"]
    assert (first[0], first[3]) == (expected[0], 0)
    assert {text for text, *_ in others} == {expected[1]}
    # The whole batches of the text, on both nodes.
    assert min(n for *_, n in others) >= expected[3] // BATCH * BATCH > 0
    assert any(node_id != first[1] for _, node_id, _, _ in others)


def test_each_node_has_one_copy_in_memory(found: dict[str, Any]) -> None:
    readers: dict[str, set[str]] = {node_id: set() for node_id in found["memory"]}
    for _, node_id, pid, _ in found["told"][1:]:
        readers[node_id].add(str(pid))
    for node_id, shares in found["memory"].items():
        assert len(readers[node_id]) == 4
        # The four decoders and the keeper, and no process of the other node.
        assert len(shares) == 5
        assert readers[node_id] < set(shares)
        assert found["model_bytes"] <= sum(shares.values()) + 4096 * len(shares)
        assert sum(shares.values()) <= found["model_bytes"] + 4096 * len(shares)


def test_the_work_of_a_lost_node_goes_on_elsewhere(
    found: dict[str, Any], expected: tuple[str, str, str, int]
) -> None:
    assert found["repeated"] == [expected[2]] * 8
    assert [text for text, *_ in found["again"]] == [expected[1]] * 8
    (left,) = {node_id for node_id, _, _ in found["nodes"]} - {found["lost"]}
    assert {node_id for _, node_id, _, _ in found["again"]} == {left}
    assert len({pid for _, _, pid, _ in found["again"]}) == 8
    memory = found["memory_again"]
    # Another program's file may get the numbers of a removed file.
    readers = {str(pid) for *_, pid, _ in found["told"][1:] + found["again"]}
    assert not readers & memory[found["lost"]].keys()
    assert len(memory[left]) == 9
    assert abs(sum(memory[left].values()) - found["model_bytes"]) <= 4096 * 9
