"""The suites first-touch and load: their files are as described, and each side does its work."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import get_args
from unittest.mock import Mock

import numpy as np
import pytest

import unimem as um
from support.models.llama_cpp import llama_library
from support.project.bench_cases import (
    case_of,
    cases_of,
    check_case,
    pretend_llama_cpp,
    run_case,
    uninstall,
)
from support.project.tiers import slow_after
from unimem_bench import plain, weight_files
from unimem_bench.suite import Case, Measure, NotMeasured
from unimem_bench.suites import first_touch, load
from unimem_bench.weight_files import TENSOR_BYTES, Format, tensors_that_fit, weight_file

Patch = pytest.MonkeyPatch
MB = 1 << 20
SHAPE = 2560, 4096  # of a tensor: more than one write, and not a whole number of writes
SMALL_BYTES = SHAPE[0] * SHAPE[1] * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture
def small_files(monkeypatch: Patch) -> None:
    monkeypatch.setattr(weight_files, "SHAPE", SHAPE)
    monkeypatch.setattr(weight_files, "TENSOR_BYTES", SMALL_BYTES)


@pytest.fixture
def small(small_files: None, monkeypatch: Patch) -> None:
    monkeypatch.setattr(load, "BUFFER_BYTES", SMALL_BYTES)
    monkeypatch.setattr(first_touch, "QUICK_NBYTES", 8 * MB)
    monkeypatch.setattr(load, "QUICK_MAP_TENSORS", 1)
    for suite in (first_touch, load):  # needed for times only, and slow
        monkeypatch.setattr(suite, "ready", lambda nbytes, cpus: None)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("kind", get_args(Format))
def test_a_file_has_the_sum_that_it_says(folder: Path, kind: Format) -> None:
    file = weight_file(folder, kind, 2)
    assert file.path.stat().st_size == file.nbytes
    with um.open_weights(file.path) as weights:
        arrays = [tensor.as_array() for tensor in weights.tensors.values()]
        words = [np.asarray(array).view(np.uint64) for array in arrays]
        assert [array.shape for array in arrays] == [SHAPE] * 2
        assert [array.dtype for array in arrays] == [np.dtype("float16")] * 2
        assert [int(each.flat[0]) for each in words] == [0, 1]
        first = next(iter(weights.tensors.values())).offset
        assert first == file.data_offset
        file.check(sum(int(each.sum(dtype=np.uint64)) for each in words) % (1 << 64))
        del arrays, words
    with pytest.raises(AssertionError, match=r"words read of weights-2x64MiB.* add up to 0x0, not"):
        file.check(0)


@pytest.mark.usefixtures("small_files")
def test_libraries_of_others_open_them(folder: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="reads the file with it: pip install gguf")
    numpy = pytest.importorskip("safetensors.numpy", reason="pip install safetensors")
    theirs = numpy.load_file(weight_file(folder, "safetensors", 2).path)
    with um.open_weights(weight_file(folder, "gguf", 2).path) as weights:
        assert list(theirs) == list(weights.tensors)
        for name, tensor in weights.tensors.items():
            assert np.array_equal(theirs[name].view(np.uint16), tensor.as_array().view(np.uint16))
    found = gguf.GGUFReader(weight_file(folder, "gguf", 2).path).tensors
    assert [tensor.name for tensor in found] == list(theirs)
    assert [tensor.n_bytes for tensor in found] == [SMALL_BYTES] * 2


@pytest.mark.parametrize(
    ("fit", "tensors"), slow_after(2, [(4, 4), (1, 1), (100, 60), (60, 60), (59, 32)])
)
def test_a_file_takes_what_fits(fit: int, tensors: int, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(weight_files, "available_bytes", lambda: (3 * fit + 2) * TENSOR_BYTES)
    disk = type("Usage", (), {"free": 1 << 50})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    assert tensors_that_fit(tmp_path, 60) == tensors
    monkeypatch.setattr(disk, "free", 2 * TENSOR_BYTES)
    wants = r"wants 192\.0 MiB of memory and of disk, .* 128\.0 MiB are free"
    with pytest.raises(NotMeasured, match=wants):
        tensors_that_fit(tmp_path, 60)
    with open(tmp_path / "weights-3x64MiB.gguf", "wb") as there:
        there.truncate(TENSOR_BYTES)
    assert tensors_that_fit(tmp_path, 60) == 1


@pytest.mark.parametrize("case", slow_after(2, cases_of("load", "first-touch")))
@pytest.mark.usefixtures("small")
def test_cases(case: Case, folder: Path, monkeypatch: Patch) -> None:
    try:
        record = run_case(case, folder, monkeypatch)
    except NotMeasured as reason:
        pytest.skip(str(reason))
    check_case(case, record)
    assert all(figure > 0 for side in record.sides for figure in side.passes[0])
    assert any(side.role == "limit" for side in record.sides) == (
        case.name not in ("page-cache", "staged")
    )


@pytest.mark.usefixtures("small")
def test_pages_that_others_have_taken_are_not_measured() -> None:
    with pytest.raises(NotMeasured, match=r"wants 1099511627776 bytes on 2m pages: .*touch of"):
        first_touch.touch(1 << 40, "2m", [min(os.sched_getaffinity(0))])


@pytest.mark.usefixtures("small")
def test_without_safetensors_the_rest_is_measured(folder: Path, monkeypatch: Patch) -> None:
    uninstall(monkeypatch, "safetensors")
    case = case_of("load/safetensors-one-thread")
    record = run_case(case, folder, monkeypatch)
    check_case(case, record)
    missing = "safetensors is not installed"
    assert record.left_out == {load.SAFETENSORS: missing, load.MAPPED_BY_TORCH: missing}


@pytest.mark.slow  # imports torch
@pytest.mark.usefixtures("small")
def test_safetensors_is_compared_without_a_copy_too(folder: Path, monkeypatch: Patch) -> None:
    pytest.importorskip("torch", reason="torch (extra torch) is not installed")
    torch = pytest.importorskip("safetensors.torch", reason="pip install safetensors")
    tensors = torch.load_file(weight_file(folder, "safetensors", 2).path)
    with open("/proc/self/maps") as maps:
        held = [line.split()[0].split("-") for line in maps if ".safetensors" in line]
    for tensor in tensors.values():
        assert any(int(a, 16) <= tensor.data_ptr() < int(b, 16) for a, b in held), "it was copied"
    del tensors
    record = run_case(case_of("load/safetensors-one-thread"), folder, monkeypatch)
    assert load.MAPPED_BY_TORCH in [side.name for side in record.sides]


@pytest.mark.usefixtures("small_files")
def test_without_llama_cpp_nothing_is_staged(folder: Path, monkeypatch: Patch) -> None:
    pretend_llama_cpp(monkeypatch, is_built=False)
    with pytest.raises(NotMeasured, match=r"wants llama\.cpp: not built"):
        run_case(case_of("load/staged"), folder, monkeypatch)


def test_what_c_cannot_do_here_is_left_out(folder: Path, monkeypatch: Patch) -> None:
    refusal = OSError(38, "load of libunimem-bench: Function not implemented")
    measure = Measure(case_of("load/cold"), quick=True, folder=folder)
    measure.cpus = [min(os.sched_getaffinity(0))]
    assert load.can_load(measure, "C, read", "read")
    monkeypatch.setattr(plain, "load", Mock(side_effect=refusal))
    assert not load.can_load(measure, "C, io_uring", "io_uring", 16)
    (left_out,) = measure.record().left_out.items()
    assert left_out == ("C, io_uring", str(refusal))


def test_what_is_no_model_is_an_error_of_llama_cpp(tmp_path: Path) -> None:
    command = load.llama_command(llama_library())
    (tmp_path / "no.gguf").write_bytes(b"none")
    with pytest.raises(RuntimeError, match=r"llama\.cpp could not load .*no\.gguf"):
        load.llama_start(command, tmp_path / "no.gguf")
