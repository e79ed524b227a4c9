"""Offloading on CPUs with vLLM's own definitions: tests/support/servers/vllm_definitions.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.project.checkout import ROOT
from support.servers.vllm_definitions import imported

pytestmark = pytest.mark.slow
BLOCKS, CHUNKS, PER_CHUNK, PAGE = 12, 5, 2, 24
# Three tensors; the first two are one group's, and the group's second layer has a padded page.
USED = (24, 20, 24)
GROUPS = ((0, 1), (2,))


@pytest.fixture(scope="module")
def vllm() -> Iterator[types.SimpleNamespace]:
    """vLLM's modules, and unimem.vllm."""
    pytest.importorskip("torch")
    with imported():
        theirs = "vllm.v1.kv_offload"
        yield types.SimpleNamespace(
            base=import_module(f"{theirs}.base"),
            config=import_module(f"{theirs}.config"),
            factory=import_module(f"{theirs}.factory"),
            region=import_module(f"{theirs}.cpu.shared_offload_region"),
            common=import_module(f"{theirs}.cpu.common"),
            ours=import_module("unimem.vllm.cpu_offloading"),
        )


def spec(vllm: types.SimpleNamespace, **changes: Any) -> Any:
    """Make the spec as vLLM does, for two groups of layers."""
    c = vllm.config
    extra = {"spec_name": "CPUOffloading", "spec_module_path": "unimem.vllm"}
    config = c.OffloadingConfig(
        groups=(c.OffloadingGroupConfig(16, ("0", "1"), 0), c.OffloadingGroupConfig(16, ("2",), 1)),
        worker_kv_bytes_per_block=3 * PAGE,
        enable_kv_cache_events=False,
        extra_config=extra | {"cpu_bytes_to_use": CHUNKS * 4096},
        engine_id=f"test-{os.getpid()}-{os.urandom(4).hex()}",
        model=c.OffloadingModelConfig("m", "float32"),
        cache=c.OffloadingCacheConfig(16, PER_CHUNK),
        parallel=c.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        **changes,
    )
    return vllm.factory.OffloadingSpecFactory.create_spec(config)


def caches(vllm: types.SimpleNamespace) -> tuple[Any, np.ndarray]:
    """Return a KV cache as vLLM describes it, and its bytes: ``[tensors, blocks, bytes]``."""
    import torch

    base = vllm.base
    data = torch.zeros((3, BLOCKS, PAGE), dtype=torch.int8)
    tensors = [base.CanonicalKVCacheTensor(tensor, PAGE) for tensor in data]
    refs = [[base.CanonicalKVCacheRef(i, USED[i]) for i in group] for group in GROUPS]
    return base.CanonicalKVCaches(tensors, refs), data.numpy()


def test_blocks_go_to_chunks_and_return_to_other_blocks(vllm: types.SimpleNamespace) -> None:
    given, data = caches(vllm)
    made = spec(vllm)
    worker = made.get_worker(given)
    assert made.get_worker(given) is worker
    data[:] = np.random.default_rng(1).integers(1, 128, data.shape, np.int8)
    before = data.copy()
    to, chunk = vllm.base.GPULoadStoreSpec, vllm.common.CPULoadStoreSpec
    # The first group begins in the middle of a chunk, the second one ends there.
    assert worker.submit_store(1, to([7, 2, 9, 4, 0, 5], [3, 3], [3, 0]), chunk([4, 1, 0, 3]))
    assert worker.submit_store(2, to([], [0, 0], [0, 0]), chunk([]))
    worker.wait({1, 2})
    first, second = worker.get_finished()
    assert (first.job_id, first.success, first.transfer_size) == (1, True, 3 * 44 + 3 * 24)
    assert (second.job_id, second.transfer_size, worker.get_finished()) == (2, 0, [])
    data[:] = 0
    assert worker.submit_load(3, chunk([4, 1, 0]), to([1, 3, 6, 8], [3, 1], [3, 0]))
    expected = np.zeros_like(data)
    for tensor, blocks, was in (
        (0, (1, 3, 6), (7, 2, 9)),
        (1, (1, 3, 6), (7, 2, 9)),
        (2, [8], [4]),
    ):
        for block, source in zip(blocks, was, strict=True):
            expected[tensor, block, : USED[tensor]] = before[tensor, source, : USED[tensor]]
    np.testing.assert_array_equal(data, expected)
    worker.shutdown()
    assert not Path(f"/dev/shm/vllm_offload_{made.config.engine_id}.mmap").exists()


def test_the_chunks_are_those_of_the_manager(vllm: types.SimpleNamespace) -> None:
    given, data = caches(vllm)
    made = spec(vllm)
    worker, manager = made.get_worker(given), made.get_manager()
    data[:] = 5
    to, chunk = vllm.base.GPULoadStoreSpec, vllm.common.CPULoadStoreSpec
    worker.submit_store(1, to([0, 1, 0, 1], [2, 2], [0, 0]), chunk([3, 2]))
    rows = np.asarray(manager.primary_tier.get_kv_memoryview())
    assert np.flatnonzero(rows.any(axis=1)).tolist() == [2, 3]
    del rows
    manager.shutdown()
    worker.shutdown()


def test_what_a_cpu_cannot_do_is_refused(vllm: types.SimpleNamespace) -> None:
    given, _ = caches(vllm)
    with pytest.raises(ValueError, match="canonical_layout: expected false on a CPU, got true"):
        spec(vllm, canonical_layout=True, kv_cache_layout="LBHNC").get_worker(given)


def test_on_a_gpu_it_is_vllms_own(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = types.SimpleNamespace(
        is_cpu=lambda: False, is_cuda_alike=lambda: True, is_xpu=lambda: False
    )
    theirs = import_module("vllm.v1.kv_offload.cpu.spec")
    for module in (vllm.ours, theirs):
        monkeypatch.setattr(module, "current_platform", gpu)
    made = spec(vllm)
    monkeypatch.setattr(type(made), "create_worker", lambda _, caches: caches)
    assert made.get_worker("caches") == "caches"


def test_the_configuration_of_the_page_names_it(vllm: types.SimpleNamespace) -> None:
    page = (ROOT / "docs/engines.md").read_text()
    text = page.split("```json\n")[1].split("```")[0]
    extra = json.loads(text)["kv_connector_extra_config"]
    assert vllm.factory.OffloadingSpecFactory.get_spec_cls(extra) is vllm.ours.CPUOffloading


def test_without_vllm_the_error_says_what_is_missing() -> None:
    code = "import sys; sys.modules['vllm'] = None; import unimem.vllm"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: unimem.vllm is loaded by vLLM, and made for version" in run.stderr
