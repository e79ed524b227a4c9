"""The benchmarks of several nodes put their memory where each side says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import pytest

import unimem as um
from support.project.bench_cases import cases_of, check_case, run_case
from unimem.system.placement import sum_placements
from unimem_bench import decoding
from unimem_bench.record import CaseRecord
from unimem_bench.suite import Case
from unimem_bench.suites import numa

HUGE_PAGE = 2 << 20
N_NODES = 3  # of the machine in vm.py


class NoGgml:
    """A stand-in for `DecoderProcess`; ggml, built for the host's CPU, cannot run here."""

    pid = 1

    def __init__(self, model: Path, *, ctx: int, **options: Any) -> None:
        self._layout = um.Layout.for_model(model, ctx=ctx, **options)
        assert isinstance(self._layout.weights, um.Weights)
        blocks = {
            "weights": self._layout.weights.blocks,
            "kv": [self._layout.history.block],
            "scratch": [self._layout.scratch.block],
        }
        for block in (*blocks["kv"], *blocks["scratch"]):
            block.warm()
        granted = {}
        for name, group in blocks.items():
            nodes = sum_placements([block.verify() for block in group]).nodes
            granted[name] = {"nodes": {str(node): nbytes for node, nbytes in nodes.items()}}
        self.facts = {"granted": granted}

    def prefill(self, tokens: list[int]) -> float:
        return float(len(tokens))

    def decode(self, n: int) -> float:
        return float(n)

    def require_idle(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._layout.close()


@pytest.mark.parametrize("case", cases_of("numa"))
def test_each_side_has_its_memory_where_it_says(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "QUICK_SHAPE", "15m")
    monkeypatch.setattr(numa, "DecoderProcess", NoGgml)
    record = run_case(case, tmp_path, monkeypatch)
    check_case(case, record)
    nodes = record.facts.get("nodes", {})
    assert (case.name == "asking") == (not nodes)
    assert set(nodes) == (names(record) if nodes else set())
    for name, there in nodes.items():
        if name == "interleave":
            assert len(there) == N_NODES
            # A decoder has several blocks, and each begins anywhere.
            spread = max(there.values()) - min(there.values())
            assert spread <= HUGE_PAGE * (1 if case.name != "decode" else N_NODES)
        elif name.startswith("bind:"):
            assert list(there) == [name.removeprefix("bind:")]


def test_the_cpus_of_one_node_read_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case.values[0] for case in cases_of("numa") if case.id == "numa/one-node")
    record = run_case(case, tmp_path, monkeypatch)
    home = record.facts["cpus of node"]
    assert home in {0, 1}  # the third node has no CPUs
    assert names(record) == {"bind:0", "bind:1", "bind:2", "interleave"}
    assert record.sides[0].name == f"bind:{home}"


def names(record: CaseRecord) -> set[str]:
    """Return the sides that are unimem's."""
    return {side.name for side in record.sides if side.role == "unimem"}
