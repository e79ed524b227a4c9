"""Counters, ledger and version of the C library."""

from __future__ import annotations

import unimem as um
from unimem._core.status import (
    SOVERSION,
    VERSION,
    DeviceEntry,
    counters,
    device_ledger,
    ledger,
    row_name,
)


def test_the_library_says_its_version() -> None:
    assert um.__version__ == VERSION
    assert um.get_library().endswith(f".so.{SOVERSION}")


def test_a_block_counts_in_the_ledger_and_in_the_counters() -> None:
    before = counters()
    with um.Block(1 << 20, category="staging"):
        assert ledger()["staging"]["mapped_bytes"] >= 1 << 20
        assert counters()["os_calls"] > before["os_calls"]
    assert ledger()["staging"]["high_water_bytes"] >= 1 << 20


def test_history_is_the_row_kv_of_reports() -> None:
    assert row_name("history") == row_name("kv") == "kv"
    assert row_name("weights") == "weights"


def test_memory_of_a_device_counts_as_long_as_its_entry_lives() -> None:
    entry = DeviceEntry("cuda:7", "scratch", 4096)
    (row,) = (row for (device, _), row in device_ledger().items() if device == "cuda:7")
    assert (row["n_allocations"], row["nbytes"]) == (1, 4096)
    del entry
    found = [row for (device, _), row in device_ledger().items() if device == "cuda:7"]
    assert [(row["n_allocations"], row["nbytes"]) for row in found] in ([], [(0, 0)])
