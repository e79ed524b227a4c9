"""The suite `stream`: its figures, and that it measures processes that have too little room."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.project import tiers
from support.project.bench_cases import case_of, roles, run_case
from unimem_bench import mixtures, states, timed_side
from unimem_bench.llama_build import NoPeer
from unimem_bench.mixtures import Mixture
from unimem_bench.models import ModelShape
from unimem_bench.policies import (
    N_EXPERTS,
    N_LAYERS,
    POLICIES,
    Trace,
    miss_share,
    skewed_trace,
    uniform_trace,
)
from unimem_bench.suite import NotMeasured
from unimem_bench.suites import load_suite, stream
from unimem_bench.suites.stream import (
    COPIED,
    LAZY,
    LIMIT,
    LLAMA,
    MAPPED,
    STREAMED,
    WAYS,
    TinyPieces,
)
from unimem_bench.timed import TimedProcessError

Patch = pytest.MonkeyPatch
SMALL = ModelShape(
    hidden=256, layers=12, heads=4, kv_heads=1, inner=256, vocab=512, ctx=2048, head_dim=64,
    experts=16, used=2,
)  # fmt: skip


class InventedProcess:
    """Computes a batch in `ms`, and counts one expert for each token of a batch."""

    def __init__(self, name: str, asked: list[Any]) -> None:
        self.ms = {STREAMED: 40.0, MAPPED: 60.0, COPIED: 30.0}.get(name, 80.0)
        self.pid, self._asked = os.getpid(), asked
        self.facts = {"load": f"{name}: so", "counts": {"misses": 36, "experts": 24}}

    def batches(self, batches: list[list[int]], seconds: float) -> dict[str, Any]:
        self._asked.append(batches)
        n = sum(map(len, batches))
        counts = {"misses": n, "read_bytes": 1_000_000 * n, "experts": 12 * n}
        return {"ms": [self.ms] * len(batches), "major_faults": 0, "counts": counts}

    def __enter__(self) -> InventedProcess:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Started:
    """What `_start` was called with, and what was computed."""

    def __init__(self) -> None:
        self.options: dict[str, dict[str, Any]] = {}
        self.limits: list[int] = []
        self.batches: list[Any] = []


@pytest.fixture
def invented(tmp_path: Path, monkeypatch: Patch) -> Started:
    """Measure no processes; the file has 1000 bytes, 600 of them experts."""
    path, found = tmp_path / "model.gguf", Started()
    path.write_bytes(bytes(1000))
    tokens = np.arange(300, 900)

    def start(name: str, path: Path, options: Any, n: int, group: Any = None) -> InventedProcess:
        if name == LAZY:
            raise NoPeer("there is no llama.cpp")
        found.options[name] = dict(options)
        return InventedProcess(name, found.batches)

    @contextmanager
    def limited(nbytes: int) -> Iterator[Path]:
        found.limits.append(nbytes)
        yield tmp_path

    @contextmanager
    def set_ahead(path: Path, kib: int | None) -> Iterator[int]:
        yield kib or 8192

    class Speed:
        bytes_per_second = 1_000_000_000

    for name, value in {
        "write_mixture": lambda *_, **__: Mixture(path, tokens, 600),
        "_start": start,
        "_own_bytes": lambda *_: 5000,
        "limited_cgroup": limited,
        "read_ahead": set_ahead,
        "measure_speed": lambda path: Speed,
    }.items():
        monkeypatch.setattr(stream, name, value)
    monkeypatch.setattr(states, "drop", lambda path: None)
    return found


def test_what_a_case_measures(invented: Started, tmp_path: Path, monkeypatch: Patch) -> None:
    record = run_case(case_of("stream/decode-uniform-128k-35"), tmp_path, monkeypatch)
    assert roles(record) == {
        "unimem": [STREAMED, MAPPED],
        "peer": [LLAMA],
        "limit": [LIMIT],
    }
    figures = {side.name: side.passes[0] for side in record.sides}
    # A token read 1 MB, at 1 GB/s.
    assert figures == {STREAMED: [40.0], MAPPED: [60.0], LLAMA: [80.0], LIMIT: [31.0]}
    assert record.left_out == {LAZY: "there is no llama.cpp"}
    assert record.facts["read_ahead_kib"] == 128
    assert record.facts[STREAMED]["a_token"]["misses"] == 1
    # What stays, 35 % of the experts, and for the cgroup the process and a reserve.
    assert invented.options[STREAMED]["budget"] == 400 + 210
    assert set(invented.limits) == {610 + 5000 + stream.SPARE_BYTES}
    copies = {path.name for path in tmp_path.glob("copy-*")}
    assert {"copy-unimemstreamed-model.gguf", "copy-llamacppmapped-model.gguf"} < copies


def test_a_side_has_one_copy(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf", "b.gguf"):
        path = tmp_path / name
        path.write_bytes(name.encode())
        copy = stream._copy(path, "llama.cpp, mapped")
        assert copy.read_bytes() == name.encode()
        assert list(tmp_path.glob("copy-*")) == [copy]


def test_sides_compute_the_same_tokens_and_no_text_twice(
    invented: Started, tmp_path: Path, monkeypatch: Patch
) -> None:
    run_case(case_of("stream/decode-uniform-own-50"), tmp_path, monkeypatch)
    warm, timed = stream.N_QUICK_WARM, stream.N_QUICK_TOKENS
    tokens = list(range(300, 300 + warm + timed))
    first, second = ([[t] for t in part] for part in (tokens[:warm], tokens[warm:]))
    assert invented.batches == [first] * 3 + [second] * 3 + [first[:timed]]


def test_prefill_is_one_batch(invented: Started, tmp_path: Path, monkeypatch: Patch) -> None:
    record = run_case(case_of("stream/prefill-skewed-own-50"), tmp_path, monkeypatch)
    assert {len(batches) for batches in invented.batches} == {1}
    assert {len(batches[0]) for batches in invented.batches} == {stream.N_PREFILL}
    limit = next(side for side in record.sides if side.name == LIMIT)
    assert limit.passes == [[30.0 + stream.N_PREFILL]]


def test_what_is_compared_if_all_fits(
    invented: Started, tmp_path: Path, monkeypatch: Patch
) -> None:
    record = run_case(case_of("stream/all-fits"), tmp_path, monkeypatch)
    assert roles(record)["unimem"] == [STREAMED, COPIED]
    assert invented.options[STREAMED]["budget"] > 1000


def test_experts_are_counted_in_both_libraries(
    invented: Started, tmp_path: Path, monkeypatch: Patch
) -> None:
    record = run_case(case_of("stream/distinct-uniform"), tmp_path, monkeypatch)
    figures = {side.name: side.passes[0] for side in record.sides}
    # Those of 72 tokens and of the prompt's 3, in 12 layers.
    assert figures == {STREAMED: [(36 + 72) / 12], LLAMA: [(24 + 12 * 72) / 12]}
    assert invented.options[LLAMA]["sees_experts"] is True


def test_a_stream_that_ends_is_not_measured(
    invented: Started, tmp_path: Path, monkeypatch: Patch
) -> None:
    def end(*_: Any, **__: Any) -> Any:
        raise TimedProcessError("it ended with status -9")

    monkeypatch.setattr(stream, "_start", end)
    with pytest.raises(NotMeasured, match="streaming ends: it ended with status -9"):
        run_case(case_of("stream/decode-uniform-own-50"), tmp_path, monkeypatch)


def test_the_cases_that_the_issue_asks_for() -> None:
    cases = {case.name: case for case in load_suite("stream").cases}
    for routing in ("uniform", "skewed", "trained"):
        for ahead in ("own", "128k"):
            for room in (35, 50, 65, 80):
                decode = cases[f"decode-{routing}-{ahead}-{room}"]
                claims = {target.other: target for target in decode.targets}
                assert set(claims) == {LLAMA, LAZY, LIMIT}
                assert claims[LIMIT].limit == 1.25
            assert f"prefill-{routing}-{ahead}-50" in cases
    limits = {
        ahead: cases[f"decode-uniform-{ahead}-50"].targets[0].limit for ahead in ("own", "128k")
    }
    assert limits == {"own": 10.0, "128k": 1.6}


def test_what_a_side_counts_in_batches() -> None:
    class Side:
        load, start_s, n = "map: so", 0.5, 0

        def begin(self) -> None:
            self.n += 3

        def compute(self, tokens: list[int]) -> None:
            self.n += len(tokens)

        def counts(self) -> dict[str, int]:
            return {"tokens": self.n}

    found = timed_side.measure_batches(Side(), [[1], [2, 3], [4]], 60)
    assert len(found["ms"]) == 3
    assert found["counts"] == {"tokens": 4}
    assert len(timed_side.measure_batches(Side(), [[1], [2]], 0)["ms"]) == 1


@pytest.mark.parametrize("name", ["misses-uniform-50", "misses-skewed-35"])
def test_misses_of_the_policies(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(stream, "N_TRACE", 40)
    record = run_case(case_of(f"stream/{name}"), tmp_path, monkeypatch)
    figures = {side.name: side.passes[0][0] for side in record.sides}
    assert set(figures) == {"unimem", "LRU", "LFU", "ARC", "Belady"}
    assert figures.pop("Belady") < min(figures.values())


@pytest.mark.parametrize("room", [35, 80])
@pytest.mark.parametrize("draw", [uniform_trace, skewed_trace])
def test_what_our_policy_lacks(draw: Callable[[int], Trace], room: int, tmp_path: Path) -> None:
    """All alike: what has no room. Skewed: as the best of the others, at most."""
    trace, n = draw(250), N_LAYERS * N_EXPERTS
    n_slots = n * room // 100
    with TinyPieces(tmp_path, n, n_slots) as pieces:
        share = miss_share(pieces, trace)
    if draw is uniform_trace:
        assert share <= 1.02 * (1 - n_slots / n)
    else:
        others = [miss_share(make(n_slots, trace), trace) for make in POLICIES.values()]
        assert share < 0.9 * min(others)


def test_what_a_hit_costs(tmp_path: Path, monkeypatch: Patch) -> None:
    record = run_case(case_of("stream/hit"), tmp_path, monkeypatch)
    (side,) = record.sides
    assert 0 <= side.passes[0][0] < 10_000


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="making a cgroup needs root")
def test_processes_that_stream(tmp_path: Path, monkeypatch: Patch) -> None:
    pytest.importorskip("gguf", reason="gguf writes the model")
    monkeypatch.setattr(mixtures, "QUICK_SHAPE", SMALL)
    for name in (LLAMA, LAZY) if not tiers.everything else ():
        monkeypatch.delitem(WAYS, name)
    record = run_case(case_of("stream/decode-uniform-own-50"), tmp_path, monkeypatch)
    assert {STREAMED, MAPPED, LIMIT} <= {side.name for side in record.sides}
    assert record.facts[STREAMED]["load"].startswith("stream")
    assert record.facts[STREAMED]["a_token"]["misses"] > 0
