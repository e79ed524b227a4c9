"""The table published by `unimem exec`: read completely, or refused with a reason."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest

from unimem._core.ledger import Entry, Part
from unimem.accounting import exec_table, published
from unimem.accounting.published import Published

MIB = 1 << 20
Record = tuple[int, int, int, int, int]
RECORDS: list[Record] = [
    (64 * MIB, 4 * MIB, 3 * MIB, 0, 2 | 7 << 12),
    (0, 0, 7, 0, 0),  # not in use
    (32 * MIB, 2 * MIB, 2 * MIB, 4, 128),
]
TEXT = b"1 pages=2m page=4096 min=65536 lock=1 strict=0 prefault=9 numa=bind:1 policy=2:2"


def table(
    records: list[Record] = RECORDS,
    *,
    n_records: int | None = None,
    nbytes: int = 32,
    n_ended: int = 1,
    n_changes: int = 4,
    text: bytes = TEXT,
) -> bytes:
    n = len(records) if n_records is None else n_records
    head = struct.pack("=8sIIQIIIIQ", b"unimem\0L", 2, 1, 2, n, nbytes, n_ended, 1, n_changes)
    head += struct.pack("=9Q", *range(1, 10))
    head += text.ljust(1024, b"\0") + b"/lib/libc.so.6".ljust(256, b"\0")
    head += struct.pack("=QQQQQII", 2, 8 * MIB, 8 * MIB, 8 * MIB, 4 * MIB, 3, 8)
    return head.ljust(8192, b"\0") + b"".join(struct.pack("=QQQII", *each) for each in records)


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("test")
    yield made
    os.close(made)


def read(fd: int, data: bytes) -> exec_table.PlacedTable | None:
    os.pwrite(fd, data, 0)
    return exec_table.read_table(fd, data[:8192])


def test_a_table_is_read(fd: int) -> None:
    found = read(fd, table())
    assert found is not None
    kept, used = found.entries
    assert (kept.name, kept.address, kept.nbytes) == ("mmap, freed and kept", 32 * MIB, 2 * MIB)
    assert kept.parts == (Part("placed", 32 * MIB, 2 * MIB, 0),)
    assert used.parts == (Part("placed", 64 * MIB, 4 * MIB, 3 * MIB),)
    assert used.requested is not None
    assert (used.requested["pages"], used.requested["numa"], used.requested["nbytes"]) == (
        "2m",
        "bind:1",
        3 * MIB,
    )
    assert used.requested["number"] == 7
    facts = found.facts
    assert (facts["lock"], facts["strict"], facts["prefault"], facts["min_bytes"]) == (
        True,
        False,
        True,
        65536,
    )
    assert (facts["allocator"], facts["n_placed"], facts["prefaulted_bytes"]) == (
        "/lib/libc.so.6",
        1,
        9,
    )
    (ended,) = facts["ended"]
    assert (ended["via"], ended["n"], ended["huge_bytes"], ended["is_locked"]) == (
        "aligned_alloc",
        2,
        4 * MIB,
        True,
    )


@pytest.mark.parametrize(
    "data",
    [
        table(nbytes=24),
        table(n_records=1 << 20),
        table(n_ended=65),
        table(n_records=9),
        table([(64 * MIB, 0, 0, 0, 0)]),
        table([(64 * MIB, 1 << 60, 0, 0, 0)]),
        table([(64 * MIB, MIB, MIB, 9, 0)]),
        table([(64 * MIB, 4 * MIB, MIB, 0, 0), (66 * MIB, 4 * MIB, MIB, 0, 0)]),
    ],
)
def test_an_invalid_table_is_refused(fd: int, data: bytes) -> None:
    with pytest.raises(ValueError, match="its "):
        read(fd, data)


def test_a_table_under_update_is_read_later(fd: int) -> None:
    assert read(fd, table(n_changes=5)) is None
    os.pwrite(fd, table(n_changes=6), 0)
    assert exec_table.read_table(fd, table(n_changes=4)[:8192]) is None


def test_foreign_options_are_harmless(fd: int) -> None:
    for least in ("many", "9" * 20, "1" * 1000, "\N{SUPERSCRIPT TWO}", "-1", ""):
        text = f"1 pmin=1 pages=\x1b[2J nonsense min={least}".encode()[:1024]
        found = read(fd, table(text=text))
        assert found is not None
        assert (found.facts["min_bytes"], found.facts["pages"]) == (None, "?[2J")


def test_tables_of_engines_and_exec_are_merged() -> None:
    def entry(address: int, name: str) -> Entry:
        return Entry("x", name, address, MIB, MIB, None, None, (Part("x", address, MIB),))

    engine = Published((entry(10 * MIB, "own"),), {"n_prompt_tokens": 1}, 0)
    of_exec = Published(
        (entry(9 * MIB, "a"), entry(10 * MIB, "b"), entry(12 * MIB, "c")), {}, 0, {}
    )
    merged = published._merge([of_exec, engine])
    assert merged is not None
    assert [each.name for each in merged.entries] == ["a", "own", "c"]
    assert (merged.counters, merged.placed) == ({"n_prompt_tokens": 1}, {})
    assert published._merge([of_exec]) is of_exec
    assert published._merge([]) is None
