"""A report as HTML: its sums equal the kernel's, and it stays small."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.models import llama_cpp
from support.processes.running import running
from support.terminal.html_pages import HtmlPage
from support.terminal.screens import CONTROL, HOSTILE
from support.terminal.watch_samples import CGROUP, GIB, KIB, MACHINE, MIB, placed, report, sample
from unimem.accounting.report import Mapping, Report
from unimem.accounting.report_page import report_page
from unimem.accounting.samples import GrowthPoint, Sampler
from unimem.engine import embedded_model
from unimem.system import process as system_process
from unimem.system.pressure import Pressure

MOST_BYTES = 300_000
# Neighbours with different access are separate mappings.
MANY = """
import ctypes, mmap, sys
n, page = int(sys.argv[1]), mmap.PAGESIZE
area = mmap.mmap(-1, n * page)
for i in range(n):
    area[i * page] = 1
start = ctypes.addressof(ctypes.c_char.from_buffer(area))
for i in range(0, n, 2):
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + i * page), page, 1) == 0
"""


def invented(**more: Any) -> HtmlPage:
    return HtmlPage(report_page(sample(0.0, replace(report(), **more))))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Record every reading of smaps.

    A second reading would differ, since any process that maps a library changes all its shares.
    """
    texts: list[bytes] = []
    plain = system_process._read_smaps

    def read(fd: int) -> bytes:
        texts.append(plain(fd))
        return texts[-1]

    monkeypatch.setattr(system_process, "_read_smaps", read)
    return texts


def check_sums(page: HtmlPage, smaps: bytes) -> None:
    """Check that the tables add up to the kernel's figures."""
    memory, held = page.table("memory", "in RAM", "high water"), page.table("memory", "Rss")
    for table, name, field in (
        (memory, "in RAM", "Pss"), (held, "Rss", "Rss"), (held, "swapped out", "Swap")
    ):  # fmt: skip
        column = table.column(name)
        total = column.pop("total")
        sizes = re.findall(rf"^{field}: +(\d+) kB$", smaps.decode(), re.MULTILINE)
        assert total == sum(map(int, sizes)) * KIB, name
        assert total == sum(each for each in column.values() if isinstance(each, int)), name


@contextmanager
def process(name: str) -> Iterator[int]:
    if name == "this":
        with um.Block(MIB, category="scratch", name="mine", warm=True):
            yield os.getpid()
    elif name == "llama.cpp":
        with llama_cpp.holding(embedded_model()) as pid:
            yield pid
    else:
        n = int(name.split(maxsplit=1)[0])
        if int(Path("/proc/sys/vm/max_map_count").read_text()) < 2 * n:
            pytest.skip("this machine lets a process have fewer mappings: vm.max_map_count")
        with running(MANY, n) as pid:
            yield pid


def test_every_figure_of_a_row_is_there() -> None:
    page = invented()
    above, _, _ = page.text.partition("memory requested size")
    assert f"{os.uname().nodename}, 2025-06-15 " in above
    memory = page.table("memory", "requested", "high water")
    assert memory.column("size")["weights:q8_0"] == 1100 * MIB
    assert memory.column("in RAM")["kv"] == 130 * MIB
    assert memory.column("active")["kv"] == 129 * MIB + 512 * KIB
    assert memory.column("size")["kv on cuda:0"] == 64 * MIB
    assert memory.foot == [
        ["total", "", report().total_bytes, report().resident_bytes, "", "", ""],
        ["total on cuda:0", "", 64 * MIB, "", "", "", ""],
    ]
    placement = page.table("memory", "pages", "Rss")
    assert placement.column("huge pages")["weights:q8_0"] == 950 * MIB
    assert placement.column("node 0")["total"] == report().resident_bytes
    assert (
        "python3 chat.py --model Llama-3-8B.gguf"
        in invented(facts=report().facts | {"pid": 7, "name": "python3"}).text
    )


def test_asked_and_granted_of_a_mapping() -> None:
    asked = {"nbytes": 5, "pages": "2m", "numa": "bind:1", "lock": True}
    granted = replace(
        placed(3 * MIB, 5 * MIB), huge_bytes=2 * MIB, locked_bytes=MIB, nodes={0: MIB, 1: 2 * MIB}
    )
    one = Mapping("kv", "history", 4096, 4 * MIB, granted, asked, parts={"kv": 4 * MIB})
    (row,) = invented(mappings=(one,)).table("address").rows
    assert row == [
        "1000", 4 * MIB, 3 * MIB, "2m, bind:1, locked",
        "4k, 67% huge, 1.0 MiB locked, 5.0 MiB swapped out, node 0,1", "kv", "history",
    ]  # fmt: skip


def test_limits_and_pressure() -> None:
    one = sample(0.0, report(), limits=(MACHINE, CGROUP), pressure=(Pressure("machine", 1.5, 0.0),))
    page = HtmlPage(report_page(one))
    assert page.table("limit", "room").rows == [
        [MACHINE.name, 24 * GIB, 9 * GIB, 15 * GIB, ""],
        [CGROUP.name, 4 * GIB, 3800 * MIB, 296 * MIB, ""],
    ]
    assert "some 1.50%, full 0.00% of the last 10 s" in page.text
    assert "Limits" not in HtmlPage(report_page(replace(one, limits=()))).text


def test_growth_of_a_watch_is_drawn() -> None:
    points = [
        GrowthPoint(10.0, {"kv": MIB, "files": MIB}),
        GrowthPoint(14.0, {"kv": 3 * MIB, "files": MIB, "scratch": KIB}),
    ]
    page = HtmlPage(report_page(sample(14.0, report()), points))
    assert page.tags.count("polygon") == 3
    assert page.table("growth").rows == [
        ["kv", MIB, 3 * MIB, "+2.0 MiB"], ["scratch", 0, KIB, "+1.0 KiB"]
    ]  # fmt: skip
    assert page.table("growth").foot == [["total", 2 * MIB, 4 * MIB + KIB, "+2.0 MiB"]]
    assert "polygon" not in HtmlPage(report_page(sample(14.0, report()), points[:1])).tags
    many = [GrowthPoint(float(i), {f"c{j}": j for j in range(12)}) for i in range(2)]
    text = HtmlPage(report_page(sample(1.0, report()), many)).text
    assert "3 others" in text  # of eleven that had something


@pytest.mark.parametrize(
    "name", ["short", "&" * 4000, HOSTILE * 9], ids=["short", "long and escaped", "hostile"]
)
def test_ten_thousand_mappings_stay_small(name: str) -> None:
    many = tuple(
        Mapping("files", "", i << 20, MIB, placed(i * KIB), path=f"/{name}", parts={"files": MIB})
        for i in range(10_000)
    )
    facts = report().facts | {
        "command": name * 20,
        "models": [
            {
                "path": name * 20, "staged_from": name, "state": "file", "problem": name,
                "nbytes": 1, "rss_bytes": 1, "written_bytes": 0,
            }
        ] * 100,
    }  # fmt: skip
    text = report_page(sample(0.0, Report(report().rows, facts, many)))
    assert len(text.encode()) < MOST_BYTES
    assert not CONTROL.search(text.replace("\n", ""))
    page = HtmlPage(text)
    assert "10,000 mappings" in page.text
    shown = page.table("address").rows
    assert len(shown) > 50
    # The mappings with most in RAM are shown, and the rest are added up.
    assert shown[0][2] == 9_999 * KIB
    n, sizes = 10_000 - len(shown), sum(range(10_000 - len(shown))) * KIB
    assert f"and {n:,} more mappings" in page.text
    assert f'<data value="{sizes}"' in text


@pytest.mark.parametrize("name", [
    "this", "10 mappings", pytest.param("llama.cpp", marks=pytest.mark.slow),
    pytest.param("10000 mappings", marks=pytest.mark.slow),
])  # fmt: skip
def test_sums_are_the_kernel_s(name: str, said: list[bytes]) -> None:
    with process(name) as pid:
        read = Sampler(pid).sample()
    text = report_page(read)
    page = HtmlPage(text)
    check_sums(page, said[-1])
    assert len(text.encode()) < MOST_BYTES
    n, shown = len(read.report.mappings), len(page.table("address").rows)
    assert f"{n:,} mappings" in page.text
    assert ("more mappings" in page.text) == (shown < n)
    assert (n > 10_000) == (name == "10000 mappings")
    mine = [row for row in page.table("address").rows if row[-1] == "mine"]
    assert [(row[1], row[5]) for row in mine] == [(MIB, "scratch")] * (name == "this")
