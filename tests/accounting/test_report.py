"""Reports: rows add up, as a table and as JSON."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter
from typing import Any

import pytest

import unimem as um
from support.kernel.proc_maps import huge_page_bytes
from support.processes.running import running
from support.project import tiers
from support.project.documents import check_json
from unimem._core import ledger
from unimem._core.status import ledger as native_ledger
from unimem.accounting.report import Report, Row, add_use
from unimem.system.heap import malloc_bytes

NAMES = {
    **{"scratch": "scratch", "kv": "kv", "history": "kv", "staging": "staging"},
    "diagnostics": "diagnostics",
}


def mapped(category: str) -> int:
    return sum(row.nbytes for row in um.report().rows if row.category == category)


def row_of(report: Report, category: str, device: str | None = None) -> Row:
    (row,) = (row for row in report.rows if (row.category, row.device) == (category, device))
    return row


# Those that are marked are in other tests, too: in all reports of caches, of staged models, and of
# processes that show their ledger.
@pytest.mark.parametrize(("category", "name"), [
    pytest.param(*each, marks=() if each[0] in ("scratch", "history") else [pytest.mark.slow])
    for each in NAMES.items()
])  # fmt: skip
def test_a_block_is_in_the_row_of_its_category(category: str, name: str) -> None:
    before = mapped(name)
    with um.Block((1 << 20) - 5, pages="4k", category=category, name="a block") as block:
        block.as_array()[: 1 << 19] = 1
        report = um.report()
        row = row_of(report, name)
        assert block.category == name
        assert row is report[name]
        assert row.nbytes == before + (1 << 20)
        assert (row.requested_bytes or 0) <= row.nbytes - 5
        assert (row.high_water_bytes or 0) >= row.nbytes
        (mapping,) = (each for each in report.mappings if each.address == block.address)
        assert (mapping.category, mapping.name, mapping.nbytes) == (name, "a block", 1 << 20)
        assert (mapping.requested, mapping.granted) == (block.requested, block.granted)
        assert mapping.granted.resident_bytes == 1 << 19
    # What had memory keeps its mark.
    after = um.report()
    row = row_of(after, name)
    assert row.nbytes == before
    assert (row.high_water_bytes or 0) >= before + (1 << 20)
    check_json(after)


@pytest.mark.parametrize("options", [
    {"pages": "4k"},
    {"pages": "4k", "warm": True},
    {"pages": "4k", "warm": True, "shared": True},
    {"pages": "4k", "warm": True, "reserve": 8 << 20},
    pytest.param({"pages": "4k", "lock": True}, marks=pytest.mark.locks),
    {"pages": "thp"},
    {"pages": "thp", "warm": True},
    {"pages": "2m", "strict": True},
], ids=str)  # fmt: skip
def test_a_mapping_matches_its_block(
    options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    if options["pages"] == "thp" and not huge_page_bytes():
        pytest.skip("this kernel gives no transparent huge pages")
    if options["pages"] == "2m":
        request.getfixturevalue("eight_huge_pages")
    with um.Block(4 << 20, category="diagnostics", **options) as block:
        report = um.report()
        (mapping,) = (each for each in report.mappings if each.address == block.address)
        assert mapping.granted == block.verify()
        assert mapping.nbytes == mapping.parts["diagnostics"] == 4 << 20
        assert report.resident_bytes == report.facts["pss_bytes"]


def test_the_sums_are_the_kernel_s_and_the_ledger_s() -> None:
    with (
        um.Layout(1 << 20, 1 << 20, 1 << 20) as layout,
        um.KVCache(2, 2, 64, 256, window=64) as ring,
    ):
        cache = um.KVCache(2, 2, 64, 128, tape=layout.history)
        report = um.report()
        host = [row for row in report.rows if row.device is None]
        placed = [row.granted for row in host if row.granted is not None]
        assert report.resident_bytes == report.facts["pss_bytes"]
        assert sum(each.pss_bytes for each in placed) == report.facts["pss_bytes"]
        assert sum(each.resident_bytes for each in placed) == report.facts["rss_bytes"]
        assert sum(each.swapped_bytes for each in placed) == report.facts["swapped_bytes"]
        assert report.total_bytes == sum(mapping.nbytes for mapping in report.mappings)
        native = {
            NAMES.get(name, name): row["mapped_bytes"] for name, row in native_ledger().items()
        }
        ours = {entry.address for entry in ledger.entries()}
        by_region: Counter[str] = Counter()
        for mapping in report.mappings:
            if mapping.address in ours:
                by_region[mapping.category.partition(":")[0]] += mapping.nbytes
        assert by_region == {name: nbytes for name, nbytes in native.items() if nbytes}
        assert report.facts["pid"] == os.getpid()
        assert report.facts["source"] == "ledger"
        assert check_json(report)["total_bytes"] == report.total_bytes
        (mapping,) = (each for each in report.mappings if each.name == "kv")
        assert mapping.parts == {"kv": ring.capacity_bytes}
        cache.close()


def test_memory_of_malloc() -> None:
    has = um.report().facts["malloc_bytes"]
    assert has["arenas"] + has["mmapped"] == has["in_use"] + has["free"]
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    before = malloc_bytes()
    piece = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(256 << 20)))
    now = malloc_bytes()
    libc.free(piece)
    assert before is not None
    assert now is not None
    assert now.mmapped - before.mmapped >= 256 << 20
    assert now.in_use - before.in_use >= 256 << 20


def test_threads_may_map_and_unmap_during_a_report() -> None:
    ended = threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            with um.Block(1 << 20, pages="4k", category="staging", warm=True):
                pass

    thread = threading.Thread(target=come_and_go)
    with um.Block(3 << 20, pages="4k", category="scratch", name="stays") as block:
        thread.start()
        try:
            for _ in range(10 if tiers.everything else 3):
                report = um.report()
                assert report.resident_bytes == report.facts["pss_bytes"]
                assert block.address in [mapping.address for mapping in report.mappings]
        finally:
            ended.set()
            thread.join()


def test_a_forked_child_reports_on_itself() -> None:
    with um.Block(1 << 20, pages="4k", category="scratch", warm=True) as block:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                report = um.report()
                is_there = block.address in [mapping.address for mapping in report.mappings]
                is_whole = report.resident_bytes == report.facts["pss_bytes"]
                os.write(write_end, f"{report.facts['pid']} {is_there} {is_whole}".encode())
            finally:
                os._exit(0)
        os.close(write_end)
        with open(read_end) as pipe:
            assert pipe.read() == f"{pid} True True"
        os.waitpid(pid, 0)


CHILD = """
import sys
import unimem as um
from unimem.accounting import published

block = um.Block(5 << 20, pages="4k", category="scratch", name="theirs", warm=True)
block.as_array()[:] = 1
history = um.Block(1 << 20, pages="4k", category="history", warm=True)
if sys.argv[1] == "shows":
    tally = published.Tally(history.address)
    tally.count(7, 3)
    published.publish()
    tally.hold(4096, 2)
"""


def test_a_process_that_publishes_its_ledger() -> None:
    with running(CHILD, "shows") as pid:
        report = um.report(pid)
    assert report.facts["pid"] == pid
    assert report.facts["source"] == "published ledger"
    assert report.facts["counters"]["n_generated_tokens"] == 3
    row, kv = row_of(report, "scratch"), row_of(report, "kv")
    assert row.nbytes == row.resident_bytes == 5 << 20
    assert (kv.nbytes, kv.active_bytes) == (1 << 20, 4096)
    (mapping,) = (each for each in report.mappings if each.name == "theirs")
    assert mapping.requested is not None
    assert mapping.requested["pages"] == "4k"
    assert report.resident_bytes == report.facts["pss_bytes"]
    assert "engine    7 tokens read, 3 made" in str(report)
    check_json(report)


def test_a_process_that_publishes_nothing() -> None:
    with running(CHILD, "hides") as pid:
        report = um.report(pid)
    assert report.facts["source"] == "kernel"
    assert "scratch" not in {row.category for row in report.rows}
    row = row_of(report, "anonymous")
    assert row.nbytes >= 5 << 20
    assert row.high_water_bytes is row.active_bytes is row.requested_bytes is None
    assert report.resident_bytes == report.facts["pss_bytes"]
    check_json(report)


def test_gpu_memory_has_its_own_rows_and_total(cuda: Any) -> None:
    before = um.report()
    with cuda.Block(3 << 20, category="history"), um.Block(1 << 20, category="history"):
        report = um.report()
        assert row_of(report, "kv", "cuda:0").nbytes == 3 << 20
        assert report.device_bytes["cuda:0"] == before.device_bytes.get("cuda:0", 0) + (3 << 20)
        host = sum(row.nbytes for row in report.rows if row.device is None)
        assert report.total_bytes == host
        lines = str(report).splitlines()
        for name in ("kv", "total"):
            assert any(line.startswith(f"{name} on cuda:0 ") for line in lines)
        assert check_json(report)["device_bytes"] == report.device_bytes
        own, used = report.device_bytes["cuda:0"], 3 << 20
        figures = {"own_bytes": own, "used_bytes": used, "total_bytes": 1 << 30}
        assert report.facts["devices"] == [{"name": "cuda:0", "budget_bytes": None} | figures]
        assert any(line.startswith("cuda:0 ") and "by all programs" in line for line in lines)
    row = row_of(um.report(), "kv", "cuda:0")
    assert row.nbytes == 0
    assert (row.high_water_bytes or 0) >= 3 << 20


def test_the_high_water_of_parts_is_that_of_their_category() -> None:
    with um.Tape(1 << 16, pages="4k") as tape:
        tape.take_bytes(5000)
        tape.clear()
        (entry,) = (each for each in ledger.entries() if each.address == tape.block.address)
        scratch, files = add_use((Row("scratch", 1 << 16), Row("files", 1)), [entry])
        assert scratch.high_water_bytes == tape.high_water_bytes >= 5000
        assert files.high_water_bytes is None


def test_a_decoder_s_report_follows_the_schema() -> None:
    engine = pytest.importorskip(
        "unimem.engine",
        reason="no ggml: pip install ./ggml '.[run]'",
        exc_type=ImportError,
    )
    with engine.Decoder(engine.embedded_model(), ctx=64, threads=1) as decoder:
        document = check_json(decoder.report())
    assert document["facts"]["ctx"] == 64
    assert document["total_bytes"] == sum(each["nbytes"] for each in document["mappings"])
