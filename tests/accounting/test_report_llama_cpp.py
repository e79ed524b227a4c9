"""Reports of other programs with a model in memory, checked against smaps."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")

import unimem as um
from support.files import gguf_files as gf
from support.models import llama_cpp
from support.models.make import SMALL, write_model
from support.processes.running import running
from unimem.accounting.report import Report, Row
from unimem.staging import keeper

_HEAD = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ (\S+) (\d+) *(.*)")
_FIELD = re.compile(r"^(Rss|Pss|Size|Private_Hugetlb|Shared_Hugetlb|Swap): +(\d+) kB$")
_ANONYMOUS = "00:00", 0
Sums = dict[tuple[str, int], dict[str, int]]


def file_of(path: Path) -> tuple[str, int]:
    info = path.stat()
    return f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}", info.st_ino


def smaps(pid: int, files: list[Path]) -> Sums:
    """Return the kernel's figures for each file, by device and inode, from a fresh reading.

    Libraries and kernel pages have no Pss here, since each process that starts changes it.
    """
    steady = {_ANONYMOUS, *map(file_of, files)}
    sums: Sums = defaultdict(lambda: defaultdict(int))
    key = "", 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if head := _HEAD.match(line):
            key = (head[3], 0) if head[3].startswith("[v") else (head[1], int(head[2]))
        elif (field := _FIELD.match(line)) and (field[1] != "Pss" or key in steady):
            name = "Hugetlb" if field[1].endswith("Hugetlb") else field[1]
            sums[key][name] += int(field[2]) * 1024
    return sums


def read(pid: int, *files: Path) -> tuple[Report, Sums]:
    """Report on a process and read its smaps while nothing changes."""
    for _ in range(20):
        before, report = smaps(pid, [*files]), um.report(pid)
        if smaps(pid, [*files]) == before:
            break
    return report, before


def of_files(sums: Sums, paths: list[Path]) -> Counter[str]:
    return sum((Counter(sums[file_of(path)]) for path in paths), Counter())


def rss(rows: list[Row]) -> int:
    return sum(row.granted.resident_bytes for row in rows if row.granted is not None)


def assert_is_the_kernel_s(report: Report, sums: Sums, files: list[Path]) -> None:
    """Compare the process and its rows of weights with smaps, to the byte."""
    whole = sum(map(Counter, sums.values()), Counter())
    facts = report.facts
    assert facts["rss_bytes"] == rss(list(report.rows)) == whole["Rss"] + whole["Hugetlb"]
    assert facts["pss_bytes"] == report.resident_bytes
    assert facts["swapped_bytes"] == whole["Swap"]
    weights = [row for row in report.rows if row.category.startswith("weights")]
    kernel = of_files(sums, files)
    assert kernel["Size"] > 1 << 20
    assert sum(row.nbytes for row in weights) == kernel["Size"]
    assert rss(weights) == kernel["Rss"] + kernel["Hugetlb"]
    assert sum(row.resident_bytes or 0 for row in weights) == kernel["Pss"] + kernel["Hugetlb"]
    if facts["source"] == "kernel":
        names = {"anonymous", "allocator", "stacks"}
        anonymous = [row for row in report.rows if row.category in names]
        assert rss(anonymous) == sums[_ANONYMOUS]["Rss"] + sums[_ANONYMOUS]["Hugetlb"]
        assert sum(row.resident_bytes or 0 for row in anonymous) == sums[_ANONYMOUS]["Pss"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "small.gguf")


def test_llama_cpp(model: Path) -> None:
    with llama_cpp.holding(model) as pid:
        report, sums = read(pid, model)
    assert_is_the_kernel_s(report, sums, [model])
    (known,) = report.facts["models"]
    assert (known["path"], known["format"], known["architecture"]) == (str(model), "GGUF", "llama")
    kernel = of_files(sums, [model])
    assert (known["nbytes"], known["rss_bytes"]) == (kernel["Size"], kernel["Rss"])
    assert report.facts["source"] == "kernel"
    assert f"{model.name} (" in " ".join(str(report).split())
    with um.open_weights(model, load="map") as weights:
        sizes = {f"weights:{kind}": nbytes for kind, nbytes in weights.by_type().items()}
    # The token needed all of them, so every byte is in RAM.
    rows = {row.category: row for row in report.rows}
    assert {name: rss([rows[name]]) for name in sizes} == sizes
    assert {name: rows[name].nbytes for name in sizes} == sizes
    # llama.cpp's own allocations: its KV cache and compute buffers.
    assert (rows["anonymous"].resident_bytes or 0) > 1 << 20


def test_two_llama_cpp_share_one_copy(model: Path) -> None:
    with llama_cpp.holding(model) as first, llama_cpp.holding(model) as second:
        read_first, read_second = read(first, model), read(second, model)
    for report, sums in (read_first, read_second):
        assert_is_the_kernel_s(report, sums, [model])
        (known,) = report.facts["models"]
        # A page shared by n processes counts 1/n; the kernel rounds down for each page and area.
        assert known["rss_bytes"] / 2 - 4096 <= known["pss_bytes"] <= known["rss_bytes"] / 2


def test_llama_cpp_of_split_files(model: Path) -> None:
    parts = gf.split(model, 10)
    with llama_cpp.holding(parts[0]) as pid:
        report, sums = read(pid, *parts)
    assert_is_the_kernel_s(report, sums, parts)
    assert {known["path"] for known in report.facts["models"]} == {str(part) for part in parts}


def test_llama_cpp_of_a_staged_model(model: Path) -> None:
    with keeper.hold(um.stage(model), str(model), {"lock": False}, []) as staged:
        pass
    try:
        with llama_cpp.holding(staged.path) as pid:
            report, sums = read(pid, Path(staged.path))
            assert_is_the_kernel_s(report, sums, [Path(staged.path)])
    finally:
        keeper.drop(staged)
    (known,) = report.facts["models"]
    assert (known["format"], known["architecture"]) == ("GGUF", "llama")
    assert (known["path"], known["staged_from"]) == (staged.path, str(model))
    assert 1 << 20 < known["rss_bytes"] <= known["nbytes"]


ENGINE = """
import sys
from unimem.engine import Decoder

decoder = Decoder(sys.argv[1], ctx=256, threads=1, load=sys.argv[2])
decoder.prefill([1, 2, 3])
decoder.generate_next_token()
"""


@pytest.mark.parametrize("load", ["map", "copy"])
def test_an_engine_of_unimem(model: Path, load: str) -> None:
    pytest.importorskip("unimem_ggml", reason="the engine needs ggml: pip install ./ggml '.[run]'")
    with running(ENGINE, model, load) as pid:
        report, sums = read(pid, model)
    rows = {row.category: row for row in report.rows}
    assert report.facts["source"] == "published ledger"
    assert report.facts["counters"]["n_generated_tokens"] == 1
    assert report.facts["pss_bytes"] == report.resident_bytes
    assert report.facts["rss_bytes"] == rss(list(report.rows))
    assert rows["logits"].nbytes == 4 * SMALL.vocab
    assert rows["kv"].active_bytes is not None
    assert {"scratch", "tokens", "weights:q8_0", "weights:padding"} <= set(rows)
    if load == "map":
        assert_is_the_kernel_s(report, sums, [model])
        (known,) = report.facts["models"]
        assert known["path"] == str(model)
    else:
        assert report.facts["models"] == []
