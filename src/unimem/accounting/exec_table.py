"""The table of memory that `unimem exec` has placed in a process, published by its library.

Records have a fixed size, since the library writes them within an allocation. The first fields are
those of the ledger that engines publish; ``native/exec/exec.h`` has the rest.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from unimem._core.ledger import Entry, Part

FORMAT = 2
CATEGORY = "placed"

_HEAD_BYTES = 8192
_MOST_RECORDS = 65536
# Magic, version, pid, start, records, bytes of one, kinds that ended, whether malloc is the hook's,
# count of changes; then the counts.
_HEAD = struct.Struct("=8sIIQIIIIQ")
_COUNTS = tuple(
    """
    n_placed placed_bytes most_bytes n_fallback n_stalled n_passed_on n_unbound n_unlocked
    prefaulted_bytes
""".split()
)
_TEXT_AT = _HEAD.size + 8 * len(_COUNTS)
_TEXT_BYTES, _NEXT_BYTES = 1024, 256
_ENDED_AT = _TEXT_AT + _TEXT_BYTES + _NEXT_BYTES
_ENDED = struct.Struct("=QQQQQII")
_MOST_ENDED = 64
_RECORD = struct.Struct("=QQQII")
_VIA = ("malloc", "calloc", "realloc", "aligned_alloc", "mmap")
# Bits of a state.
_BOUND, _LOCKED, _PREFAULTED, _STALLED, _FALLBACK, _KEPT = 4, 8, 16, 32, 64, 128
_NUMBER_SHIFT = 12  # above them, the number of the allocation
_UNKNOWN = (1 << 64) - 1


class PlacedTable(NamedTuple):
    """The table of a process under `unimem exec`.

    Attributes
    ----------
    entries : tuple of Entry
        One per mapping, by address.
    facts : dict
        As in `Report.facts` under ``"exec"``.
    """

    entries: tuple[Entry, ...]
    facts: dict[str, Any]


def read_table(fd: int, head: bytes) -> PlacedTable | None:
    """Read the table, whose first 8192 bytes or more are `head`; None while it is being written.

    Raises
    ------
    ValueError
        The library does not write such a table.
    """
    *_, n_records, nbytes, n_ended, malloc_is_ours, n_changes = _HEAD.unpack_from(head)
    if nbytes != _RECORD.size or n_records > _MOST_RECORDS or n_ended > _MOST_ENDED:
        raise ValueError("its header counts more than fits")
    data = os.pread(fd, n_records * _RECORD.size, _HEAD_BYTES)
    again = os.pread(fd, _HEAD.size, 0)
    if n_changes % 2 or _HEAD.unpack_from(again)[-1] != n_changes:
        return None
    if len(data) < n_records * _RECORD.size:
        raise ValueError("it is shorter than its header says")
    options = _options(_text(head[_TEXT_AT : _TEXT_AT + _TEXT_BYTES]))
    entries = sorted(
        (_entry(fields, options) for fields in _RECORD.iter_unpack(data) if fields[0]),
        key=lambda entry: entry.address,
    )
    last = 0
    for entry in entries:
        if entry.address < last:
            raise ValueError(f"its mappings overlap at address {entry.address}")
        last = entry.address + entry.nbytes
    counts = struct.unpack_from(f"={len(_COUNTS)}Q", head, _HEAD.size)
    ended = (_ENDED.unpack_from(head, _ENDED_AT + i * _ENDED.size) for i in range(n_ended))
    facts = {
        **options,
        "allocator": _text(head[_TEXT_AT + _TEXT_BYTES : _ENDED_AT]),
        "malloc_is_placed": bool(malloc_is_ours),
        **dict(zip(_COUNTS, counts, strict=True)),
        "n_mappings": len(entries),
        "ended": [_describe_ended(*fields) for fields in ended if fields[0]],
    }
    return PlacedTable(tuple(entries), facts)


def _text(data: bytes) -> str:
    text = data.partition(b"\0")[0].decode(errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _options(text: str) -> dict[str, Any]:
    """Read the request from the words of the variable."""
    least = re.search(r"(?:^| )min=([0-9]{1,19})(?: |$)", text)
    words = dict(word.partition("=")[::2] for word in text.split(" ") if "=" in word)
    return {
        "pages": words.get("pages", "auto"),
        "numa": words.get("numa"),
        "lock": words.get("lock") == "1",
        "strict": words.get("strict") == "1",
        "prefault": words.get("prefault", "0") != "0",
        "min_bytes": None if least is None else int(least[1]),
    }


def _entry(record: tuple[int, ...], options: Mapping[str, Any]) -> Entry:
    address, nbytes, asked, via, state = record
    if not 0 < nbytes < 1 << 57 or address + nbytes > 1 << 57 or via >= len(_VIA):
        raise ValueError(f"its record of address {address} is invalid")
    asked = min(asked, nbytes)
    name = f"{_VIA[via]}, freed and kept" if state & _KEPT else _VIA[via]
    requested = {
        "nbytes": asked,
        "pages": options["pages"],
        "numa": options["numa"],
        "lock": options["lock"],
        "is_fallback": bool(state & _FALLBACK),
        "is_stalled": bool(state & _STALLED),
        "is_bound": bool(state & _BOUND),
        "is_prefaulted": bool(state & _PREFAULTED),
        "number": state >> _NUMBER_SHIFT,
    }
    part = Part(CATEGORY, address, nbytes, 0 if state & _KEPT else asked)
    return Entry(CATEGORY, name, address, nbytes, nbytes, requested, None, (part,))


def _describe_ended(
    n: int, asked: int, nbytes: int, resident: int, huge: int, via: int, state: int
) -> dict[str, Any]:
    known = resident != _UNKNOWN
    return {
        "via": _VIA[via] if via < len(_VIA) else "?",
        "n": n,
        "requested_bytes": asked,
        "nbytes": nbytes,
        "resident_bytes": resident if known else None,
        "huge_bytes": huge if known else None,
        "is_locked": bool(state & _LOCKED),
        "is_stalled": bool(state & _STALLED),
    }
