"""Notes on the files of chunks."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from support.files.prefix_stores import needs_notes
from unimem.kv.store import notes


@pytest.fixture
def file(tmp_path: Path) -> str:
    needs_notes(tmp_path)
    path = tmp_path / "chunk"
    path.touch()
    return str(path)


def test_a_note_is_read_again(file: str) -> None:
    assert notes.read_note(file) == {}
    before = int(time.time())
    with open(file) as opened:
        notes.write_note(opened.fileno(), {"model": "é"})
    found = notes.read_note(file)
    assert before <= found.pop("made") <= time.time()
    assert found == {"model": "é"}


DAMAGED = (b"", b"[1]", b"{", b"\xff", b"[" * 1100, b"-1", b"9" * 30)


@pytest.mark.parametrize("text", DAMAGED, ids=len)
def test_a_damaged_note_is_none(file: str, text: bytes) -> None:
    os.setxattr(file, "user.unimem", text)
    os.setxattr(file, "user.unimem.hits", text)
    os.setxattr(file, "user.unimem.pin", text)
    assert (notes.read_note(file), notes.hits_of(file), notes.pinned_until(file)) == ({}, 0, None)


def test_hits_are_counted(file: str) -> None:
    notes.add_hit(file)
    notes.add_hit(file)
    notes.add_hit(f"{file}-missing")
    assert notes.hits_of(file) == 2


def test_a_pin_ends_with_its_time(file: str) -> None:
    later = time.time_ns() + 10**12
    for until, found in ((later, later), (notes.FOR_EVER, notes.FOR_EVER), (1, None), (None, None)):
        notes.pin(file, until)
        assert notes.pinned_until(file) == found
    notes.pin(file, None)  # twice is no error


@pytest.mark.parametrize(
    ("number", "match"), [(errno.ENOTSUP, "expected a local disk"), (errno.EROFS, "Read-only")]
)
def test_a_pin_that_is_not_kept_is_an_error(
    file: str, monkeypatch: pytest.MonkeyPatch, number: int, match: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "setxattr", fail)
    with pytest.raises(OSError, match=match):
        notes.pin(file, 1)
    notes.add_hit(file)  # is no error
    assert notes.hits_of(file) == 0
