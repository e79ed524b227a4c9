"""The suites calls, accounting, gguf, verify and buffers: their cases measure what they declare."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from unittest.mock import Mock

import gguf
import numpy as np
import pytest

import unimem as um
from support.project.bench_cases import (
    case_of,
    cases_of,
    check_case,
    pretend_llama_cpp,
    roles,
    run_case,
    uninstall,
)
from unimem._core.ledger import entries
from unimem.engine import Decoder, embedded_model
from unimem.system import limits
from unimem_bench import buffer_instances
from unimem_bench.buffer_instances import graph_uses
from unimem_bench.files import FLOAT16, TensorEntry, array, gguf_header, made_once, number, text
from unimem_bench.suite import Case, NotMeasured
from unimem_bench.suites import accounting, buffers, calls, verify
from unimem_bench.suites import gguf as gguf_suite

Patch = pytest.MonkeyPatch
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(autouse=True)
def _small(monkeypatch: Patch) -> None:
    monkeypatch.setattr(accounting, "N_OTHERS_QUICK", 20)
    monkeypatch.setattr(accounting, "N_BLOCKS", 20)
    monkeypatch.setattr(accounting, "N_SCRAPED", 1)
    monkeypatch.setattr(gguf_suite, "N_TOKENS", 3000)
    monkeypatch.setattr(gguf_suite, "N_MERGES", 5000)
    monkeypatch.setattr(verify, "QUICK_NBYTES", {"thp": 32 * MIB, "4k": 32 * MIB})
    monkeypatch.setattr(buffers, "SIZE_QUICK", (8, 50))


@pytest.mark.parametrize("case", cases_of("calls", "accounting", "gguf", "verify", "buffers"))
def test_every_case(case: Case, folder: Path, monkeypatch: Patch) -> None:
    check_case(case, run_case(case, folder, monkeypatch))


def test_peers_of_an_append(folder: Path, monkeypatch: Patch) -> None:
    uninstall(monkeypatch, "torch")
    record = run_case(case_of("calls/append"), folder, monkeypatch)
    assert roles(record) == {"unimem": ["unimem"], "peer": ["NumPy slices"], "limit": ["C memcpy"]}
    assert record.left_out == {"torch slices": "torch is not installed"}
    record = run_case(case_of("calls/take, dtype as name"), folder, monkeypatch)
    assert record.left_out == {"torch.empty": "torch is not installed"}


def test_c_copies_the_same_bytes_to_the_same_rows() -> None:
    rng = np.random.default_rng(0)
    k, v = (rng.random((8, 128)).astype(np.float16) for _ in range(2))
    with um.KVCache(1, 8, 128, 3, dtype="f16") as cache:
        for _ in range(3):
            cache.append(0, k[None], v[None])
        keys, values = (stored[0].swapaxes(0, 1) for stored in cache.layer(0))
        assert calls.copies(cache, k, v).tolist() == [
            [row.ctypes.data, token.ctypes.data, token.nbytes]
            for pair in zip(keys, values, strict=True)
            for row, token in zip(pair, (k, v), strict=True)
        ]
        with pytest.raises(AssertionError, match="did not write what it was given"):
            calls.copies(cache, v, k)
        del keys, values


def test_the_others_are_alive_while_a_call_is_measured(folder: Path, monkeypatch: Patch) -> None:
    alive = []

    def run() -> float:
        alive.append(len(entries()))
        return 1.0

    monkeypatch.setattr(accounting, "warm_stopwatch", lambda *_: run)
    before = len(entries())
    record = run_case(case_of("accounting/take"), folder, monkeypatch)
    assert alive == [before + 22] * accounting.N_REPEATED + [before + 2] * accounting.N_REPEATED
    assert record.facts["others"] == 20
    assert len(entries()) == before


def test_the_model_that_is_planned(folder: Path) -> None:
    path = made_once(folder / "model.gguf", accounting.write_model)
    reader = gguf.GGUFReader(path)
    assert len(reader.tensors) == 44 * 9 + 3
    assert um.plan(path).unknown == ()
    with um.open_weights(path) as weights:
        assert list(weights.tensors) == [tensor.name for tensor in reader.tensors]
        assert weights.nbytes == sum(int(tensor.n_bytes) for tensor in reader.tensors)


def test_a_header_is_what_gguf_py_reads(tmp_path: Path) -> None:
    tensors = [TensorEntry("a", (3, 2), FLOAT16, 12), TensorEntry("b", (5,), FLOAT16, 10)]
    numbers = array("some.numbers", 4, 3, np.array([1, 2, 3], np.uint32).tobytes())
    named = text("general.architecture", "llama"), number("llama.block_count", 7), numbers
    path = tmp_path / "header.gguf"
    path.write_bytes(gguf_header([*named], tensors) + bytes(128))
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama"
    assert fields["llama.block_count"] == 7
    assert fields["some.numbers"] == [1, 2, 3]
    found = [(tensor.name, tensor.shape.tolist(), tensor.n_bytes) for tensor in reader.tensors]
    assert found == [("a", [3, 2], 12), ("b", [5], 10)]
    assert reader.tensors[1].data_offset - reader.tensors[0].data_offset == 64


def test_a_file_is_made_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"

    def fail(unfinished: Path) -> None:
        unfinished.write_text("half")
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        made_once(path, fail)
    assert list(path.parent.iterdir()) == []
    assert made_once(path, lambda unfinished: unfinished.write_text("whole")) == path
    assert made_once(path, fail).read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


def test_a_header_opens_without_its_peers(folder: Path, monkeypatch: Patch) -> None:
    uninstall(monkeypatch, "gguf")
    pretend_llama_cpp(monkeypatch, is_built=False)
    for name, peer, reason in (
        ("gguf/open", "ggml", "not built"),
        ("gguf/open, strings decoded", "gguf-py", "gguf is not installed"),
    ):
        record = run_case(case_of(name), folder, monkeypatch)
        assert roles(record)["peer"] == []
        assert record.left_out == {peer: reason}


def test_different_strings_are_no_result(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(gguf.ReaderField, "contents", lambda _field: ["another"])
    with pytest.raises(AssertionError, match="unimem and gguf-py read different strings"):
        run_case(case_of("gguf/open, strings decoded"), folder, monkeypatch)


def test_what_the_kernel_refuses_is_left_out(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(verify, "PAGEMAP_SCAN", 0)
    monkeypatch.setattr(verify, "SYS_MOVE_PAGES", -1)
    record = run_case(case_of("verify/4k pages"), folder, monkeypatch)
    assert roles(record)["peer"] == [verify.SMAPS, "numa_maps, read whole"]
    refused = {name for name in record.left_out if name.startswith(("move_pages", "PAGEMAP_SCAN"))}
    assert len(refused) == len(record.left_out) == 4
    assert record.left_out[verify.EVERY_PAGE] == "the kernel refuses: Function not implemented"


def test_what_is_no_result(folder: Path, monkeypatch: Patch) -> None:
    with pytest.raises(AssertionError, match="3 bytes were seen, the block has 4"):
        verify.timed(lambda: lambda: 3, 4)()
    assert verify.checked(7) == 7
    ctypes.set_errno(errno.EPERM)
    with pytest.raises(PermissionError):
        verify.checked(-1)
    monkeypatch.setattr(limits, "available_bytes", lambda: verify.ROOM_BYTES + MIB)
    with pytest.raises(NotMeasured, match=r"wants .* GiB of memory, .* there are 2\.0 GiB"):
        run_case(case_of("verify/4k pages"), folder, monkeypatch)


def test_the_graphs_are_those_of_the_engine_and_of_every_architecture() -> None:
    graphs = buffer_instances.engine_graphs()
    assert len(graphs) == 28
    with Decoder(embedded_model(), ctx=buffer_instances.CTX, threads=1) as decoder:
        for graph in (decoder._decode, decoder._prefill):
            assert graphs[f"embedded, {graph.batch}"] == graph.values.uses
    dims = um.ModelDims(64, 128, 4, 2, 16, 320, 2, buffer_instances.CTX)
    found = {len(graph_uses(arch, dims, 1)) for arch in ("llama", "qwen2", "qwen3")}
    assert len(found) == 3


def test_large_instances_are_large_and_the_same() -> None:
    for family in buffer_instances.FAMILIES:
        uses = buffer_instances.large_instance(family, 60)
        assert 54 <= len(uses) <= 70
        assert uses == buffer_instances.large_instance(family, 60)


def test_without_the_engine_there_are_no_graphs(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(buffers, "engine_graphs", Mock(side_effect=ImportError("no ggml")))
    buffers.graphs_of_engine.cache_clear()
    with pytest.raises(NotMeasured, match="wants the engine"):
        run_case(case_of("buffers/graphs"), folder, monkeypatch)
