"""Binary headers: fields at fixed places, and an error that names the rule and the byte."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
import xxhash

from unimem.base.binary_header import BinaryHeader, Tables
from unimem.errors import FormatError, SnapshotError

HEADER = BinaryHeader(
    """
    8s magic; I version header_bytes; Q file_bytes; I n_rows n_columns;
    Q tables_checksum header_checksum
    """,
    b"UNIMEMXX",
    "test file",
    versions=(2, 3),
    newest=4,
    error=SnapshotError,
    advice="copy it again",
)
VALUES = {"file_bytes": 100, "n_rows": 3, "n_columns": 4, "tables_checksum": 7}
PACKED = HEADER.pack(VALUES)


def test_fields_lie_as_struct_packs_them() -> None:
    assert HEADER.nbytes == 48
    assert HEADER.offsets["n_columns"] == 28
    assert HEADER.codes["n_columns"] == "<I"
    head = struct.pack("<8sIIQIIQ", b"UNIMEMXX", 2, 48, 100, 3, 4, 7)
    assert head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) == PACKED
    assert HEADER.read(PACKED, "path") == {
        **VALUES,
        "magic": b"UNIMEMXX",
        "version": 2,
        "header_bytes": 48,
        "header_checksum": struct.unpack("<Q", PACKED[-8:])[0],
    }


def test_a_header_without_a_checksum_is_packed() -> None:
    header = BinaryHeader("8s magic; I version; 3s name", b"UNIMEMYY", "other file")
    assert header.pack({"name": b"abc"}) == b"UNIMEMYY\1\0\0\0abc"


def test_the_version_is_known_without_the_rest() -> None:
    assert HEADER.version_of(PACKED[:12]) == 2
    assert HEADER.version_of(PACKED[:11]) is None
    assert HEADER.version_of(b"GGUF" + PACKED) is None
    assert HEADER.is_magic(PACKED)


def version(number: int) -> bytes:
    return PACKED[:8] + struct.pack("<I", number) + PACKED[12:]


@pytest.mark.parametrize(
    ("head", "rule", "offset"),
    [
        (b"", "this is no test file: it does not begin with UNIMEMXX", 0),
        (b"GGUF" + PACKED, "this is no test file: it does not begin with UNIMEMXX", 0),
        (PACKED[:5], "the file is cut off inside its header: it has 5 bytes; copy it again", 5),
        (PACKED[:47], "the file is cut off inside its header: it has 47 bytes; copy it again", 47),
        (
            version(5),
            "version 5 is newer than this unimem, which reads versions 1 to 4: update unimem-llm, "
            "or make the file anew",
            8,
        ),
        (version(1), "expected version 2 or 3, got 1; copy it again", 8),
        (version(3), "the header's checksum does not match; copy it again", 40),
        (
            PACKED[:20] + b"\1" + PACKED[21:],
            "the header's checksum does not match; copy it again",
            40,
        ),
    ],
)
def test_a_wrong_header_is_refused(head: bytes, rule: str, offset: int) -> None:
    for base in (0, 4096):
        with pytest.raises(SnapshotError) as caught:
            HEADER.read(head, "path", base)
        assert (caught.value.rule, caught.value.offset) == (rule, base + offset)
        assert caught.value.path == "path"


def test_checks_name_the_field_and_its_place() -> None:
    fields = HEADER.read(PACKED, "path", 1000)
    fields.check(True, "n_rows", "anything")
    fields.check_range("n_rows", 3, 3)
    fields.check_exact(n_rows=3, n_columns=4)
    checks: list[tuple[Callable[[], object], str, int]] = [
        (lambda: fields.check(False, "n_rows", "more"), "n_rows: expected more, got 3", 24),
        (lambda: fields.check_range("n_rows", 4, 9), "n_rows: expected 4 to 9, got 3", 24),
        (lambda: fields.check_range("n_rows", 2, 2), "n_rows: expected 2, got 3", 24),
        (lambda: fields.check_exact(n_columns=5), "n_columns: expected 5, got 4", 28),
        (lambda: fields.check_file(99), "the file is cut off: it has 99 of 100 bytes", 99),
        (
            lambda: fields.check_file(101),
            "the file is longer than it should be: 101 bytes, not 100",
            100,
        ),
        (
            lambda: fields.check_tables(b"", "tables_checksum"),
            "the checksum of the tables does not match",
            48,
        ),
    ]
    for check, rule, at in checks:
        with pytest.raises(SnapshotError) as caught:
            check()
        assert (caught.value.rule, caught.value.offset) == (f"{rule}; copy it again", 1000 + at)


def test_tables_are_written_and_taken_in_order() -> None:
    out = np.zeros(100, np.uint8)
    tables = np.array([5, 6], "<u8").tobytes() + np.array([-1], "<i4").tobytes() + b"name"
    HEADER.write(out, VALUES, tables)
    fields = HEADER.read(out.tobytes(), "path")
    taken = Tables(fields, out[HEADER.nbytes :])
    assert taken.take("<u8", 2).tolist() == [5, 6]
    assert taken.at == HEADER.nbytes + 16
    assert taken.take("<i4", 1).tolist() == [-1]
    assert taken.take(np.uint8, 4).tobytes() == b"name"
    out[-1] = 1  # also behind the last table
    with pytest.raises(FormatError, match="checksum of the tables"):
        Tables(fields, out[HEADER.nbytes :])
