"""The suite `gpu`: its answers without a GPU, and over host memory whatever needs no CUDA."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import unimem as um
from support.project.bench_cases import uninstall
from support.project.tools import load_tool
from unimem.backends import cuda_driver
from unimem_bench import suites, weight_files
from unimem_bench.rounds import Side
from unimem_bench.suite import Measure
from unimem_bench.suites import gpu as suite
from unimem_bench.suites.gpu import Statement
from unimem_bench.worker import measure

Patch = pytest.MonkeyPatch
CASES = {case.name: case for case in suites.load_suite("gpu").cases}
TOKEN = np.arange(suite.N_HEADS * suite.HEAD_DIM, dtype=np.float16).reshape(suite.SHAPE)


@pytest.fixture
def no_gpu(monkeypatch: Patch) -> str:
    """Simulate a machine without a GPU; return the message of `cuda_driver.require`."""
    said = "unimem.cuda needs an NVIDIA GPU, and CUDA sees none"
    monkeypatch.setattr(cuda_driver, "require", Mock(side_effect=ImportError(said)))
    return said


def test_issues_5_and_47_ask_for_these() -> None:
    targets = [(name, target) for name, case in CASES.items() for target in case.targets]
    assert {(name, target.side, target.other): target.limit for name, target in targets} == {
        ("take", "unimem", "cupy.empty"): 3.0,
        ("append", "unimem", "CuPy slices"): 2.0,
        ("append", "unimem", "torch slices"): 2.0,
        ("append a vector", "unimem", "CuPy slices"): 2.0,
        ("append a vector", "unimem", "torch slices"): 2.0,
        ("upload", "unimem", "pinned copy"): 0.9,
        ("upload", "unimem", "torch, a mapping"): 1.0,
        ("append, torch", "unimem", "unimem, CuPy arrays"): 1.1,
        ("append, torch", "unimem", "cudaMemcpyAsync"): 1.3,
        ("step, torch", "unimem", "torch slices"): 0.6,
        ("step, torch", "unimem", "torch index_copy_"): 0.6,
        ("step, torch", "unimem", "torch cat"): 0.6,
        ("step, torch, captured", "unimem", "torch index_copy_"): 0.5,
        **{
            (f"generate, {n} tokens", "unimem", peer): 1.0
            for n in (2048, 8192)
            for peer in ("DynamicCache", "StaticCache")
        },
    }


@pytest.mark.parametrize("name", CASES)
def test_without_a_gpu_nothing_is_measured(no_gpu: str, name: str, tmp_path: Path) -> None:
    record = measure(CASES[name], quick=True, folder=tmp_path)
    assert (record.failed, record.is_error) == (no_gpu, False)
    assert (record.sides, record.facts) == ([], {})
    assert record.targets == list(CASES[name].targets)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("cuda", "gives_memory_back")
def test_arrays_of_a_tape_again_and_for_the_first_time() -> None:
    n = 5
    with ExitStack() as stack:
        sides = suite.takes(stack, n)
        assert list(sides) == ["unimem", "unimem, the first time"]
        for _ in range(2):
            assert all(side() > 0 for side in sides.values())


@pytest.mark.usefixtures("gives_memory_back")
@pytest.mark.parametrize("timed", [suite.call_time, suite.until_done])
def test_appends_begin_empty_and_wait_for_the_device(cuda: Any, host_gpu: Any, timed: Any) -> None:
    from support.gpu.host_gpu import array_of, numpy_of

    with cuda.KVCache(1, *suite.SHAPE, suite.N_TOKENS, dtype="f16") as kv:
        names = {"append": kv.append, "k": array_of(TOKEN)[None], "v": array_of(TOKEN + 1)[None]}
        side: Side = timed(Statement("append(0, k, v)", names, kv.clear))
        for _ in range(2):  # without `clear` the second would find a full cache
            host_gpu.calls.clear()
            assert side() > 0
            waits = [i for i, call in enumerate(host_gpu.calls) if call[0] == "synchronize"]
            assert waits[0] == 0, "the device has something to do when it begins"
            if timed is suite.until_done:
                assert waits[1:] == [len(host_gpu.calls) - 1]
        assert kv.seq_len == suite.N_TOKENS
        for stored, want in zip(kv.layer(0), (TOKEN, TOKEN + 1), strict=True):
            rows = numpy_of(stored)[0].swapaxes(0, 1)
            suite.check(rows, want)
            with pytest.raises(AssertionError, match="did not write"):
                suite.check(rows, want + 1)
            with pytest.raises(AssertionError, match="did not write"):
                suite.check(rows[1:], want)


def test_a_rate_is_of_all_bytes_until_the_device_has_them(host_gpu: Any) -> None:
    run, clear = (partial(host_gpu.calls.append, (name,)) for name in ("run", "clear"))
    assert suite.rate(run, 10**6, clear)() > 0
    waited = ("synchronize", 0)
    assert host_gpu.calls == [("clear",), waited, ("run",), waited]


@pytest.mark.usefixtures("gives_memory_back")
def test_uploads_have_the_sum(cuda: Any, host_gpu: Any, tmp_path: Path, monkeypatch: Patch) -> None:
    from support.gpu.host_gpu import numpy_of

    monkeypatch.setattr(weight_files, "SHAPE", (16, 64))
    monkeypatch.setattr(weight_files, "TENSOR_BYTES", 16 * 64 * 2)
    file = weight_files.weight_file(tmp_path, "gguf", 3)
    with um.open_weights(file.path) as weights, cuda.Tape(file.nbytes) as tape:
        arrays = [numpy_of(array) for array in weights.to_device(tape).values()]
        assert sum(array.nbytes for array in arrays) == 3 * 16 * 64 * 2
        file.check(suite.sum_of(arrays))
        arrays[1][0, 0] += 1
        with pytest.raises(AssertionError, match="add up to"):
            file.check(suite.sum_of(arrays))
        del arrays


@pytest.mark.parametrize("is_installed", [False, True])
def test_torch_may_be_left_out(is_installed: bool, tmp_path: Path, monkeypatch: Patch) -> None:
    reason = "torch is not installed"
    if is_installed:
        torch = pytest.importorskip("torch", reason=reason)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        reason = "torch is installed, but without CUDA, or sees no GPU"
    else:
        uninstall(monkeypatch, "torch")
    given = Measure(CASES["take"], quick=True, folder=tmp_path)
    assert suite.torch_for(given, "torch slices") is None
    assert given.record().left_out == {"torch slices": reason}


def test_the_page_shows_the_record_of_a_gpu(tmp_path: Path, monkeypatch: Patch) -> None:
    tool = load_tool("test_gpu")
    page = tmp_path / "cuda.md"
    page.write_text(f"before\n{tool.BEGIN}old\n{tool.END_MARK}\nbehind\n")
    there = tool.PAGE.read_text()
    monkeypatch.setattr(tool, "PAGE", page)
    assert tool.main(["page"]) == 0
    made = page.read_text().removeprefix("before\n").removesuffix("\nbehind\n")
    assert made in there
    assert "\n| gpu/take | unimem 399 ns (377 to 831) | " in made
