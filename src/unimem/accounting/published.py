"""Publishing the ledger of a process, in named memory that other processes find and read.

It is a memfd of a fixed size: a header; rows of counters, one per engine, which the engine updates
as it computes; and the entries of the ledger as JSON, which are written when engines are made and
closed. No signal is sent, no file remains, and readers cost the publisher nothing.
"""

from __future__ import annotations

import atexit
import fcntl
import itertools
import json
import os
import struct
import threading
import time
import weakref
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from unimem._core import ledger
from unimem._core.block import Block
from unimem._core.ledger import Entry, Part
from unimem._core.status import counters as native_counters
from unimem.accounting import exec_table
from unimem.base.descriptors import Descriptors
from unimem.system import process
from unimem.system.memfds import find_memfds, new_memfd

__all__ = [
    "COUNTERS",
    "NAME",
    "NBYTES",
    "Published",
    "Tally",
    "failure",
    "publish",
    "published",
    "refresh",
]

NAME = "unimem-ledger"
NBYTES = 256 << 10
# The columns of a row that are summed. The last four are of streamed weights; these and the first
# two only increase.
COUNTERS = tuple(
    """
    n_prompt_tokens n_generated_tokens kv_active_bytes kv_tokens
    piece_hits piece_misses piece_read_bytes piece_waited_ns
""".split()
)

_MAGIC = b"unimem\0L"
_VERSION = 1
# Magic, version, pid, start of the process in ticks, counters in a row, rows, bytes of the text and
# its checksum, which tells a text that is being written.
_HEAD = struct.Struct("=8sIIQIIII")
_ROWS_AT = 64
_TEXT_AT = 4096
_COLUMNS = (*COUNTERS, "kv_address")
_KV_ADDRESS = len(COUNTERS)
_PIECES = slice(4, 8)
_ROW_BYTES = 8 * len(_COLUMNS)
_N_ROWS = (_TEXT_AT - _ROWS_AT) // _ROW_BYTES
_ROOM = NBYTES - _TEXT_AT
_ENVELOPE = 256  # of the text around the entries

# The kernel's number (uapi/linux/fcntl.h), which Python has only in part.
_F_SEAL_FUTURE_WRITE = 16

_MOST_FOUND = 16  # memfds of the name are read: a process has one of its own
_TRIES = 50
_PATIENCE_SECONDS = 0.001
_MOST_ADDRESS = 1 << 64
# Bounds of a ledger, so that one process costs readers little: its rows, options and texts.
_MOST_CATEGORIES = 64
_MOST_OPTIONS = 32
_MOST_LETTERS = 4096


class Published(NamedTuple):
    """The published state of another process.

    Attributes
    ----------
    entries : tuple of Entry
        Of its ledger when it last wrote them. Memory that was unmapped since has no area any more.
        The active bytes of an engine's KV cache are from its counters, now.
    counters : dict of str to int
        `COUNTERS`, summed over its engines, now.
    truncated : int
        The number of entries, the smallest, that did not fit.
    placed : dict or None
        Of a process under `unimem exec`: the request, and counts.
    """

    entries: tuple[Entry, ...]
    counters: dict[str, int]
    truncated: int = 0
    placed: dict[str, Any] | None = None


# ---- showing ------------------------------------------------------------------------------------


class Tally:
    """A row of counters of one engine, published if a row is free.

    For one thread at a time. A row that was given back continues where it ended, so that no count
    is lost. After a fork, no process sees the child's counts.

    Parameters
    ----------
    kv_address : int, optional
        The address of the KV cache, a part of its own in the ledger, whose active bytes `hold`
        sets.
    """

    __slots__ = ("__weakref__", "_cells", "_pieces_before")

    def __init__(self, kv_address: int = 0) -> None:
        self._cells = _private_cells()
        publish()
        with _lock:
            if _shared is not None and _shared.free_rows:
                self._cells = _shared.free_rows.pop()
            self._cells[_KV_ADDRESS] = kv_address
            self._pieces_before = self._cells[_PIECES].tolist()
            _tallies.add(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Tally cannot be pickled: it is a row of this process. Make another one")

    def count(self, n_prompt: int, n_generated: int) -> None:
        """Count tokens that were computed, or chosen."""
        cells = self._cells
        cells[0] += n_prompt
        cells[1] += n_generated

    def hold(self, nbytes: int, n_tokens: int) -> None:
        """Note the present use of the KV cache."""
        cells = self._cells
        cells[2] = nbytes
        cells[3] = n_tokens

    def stream(self, hits: int, misses: int, read_bytes: int, waited_ns: int) -> None:
        """Note what the stream of the engine's weights has counted since this tally began."""
        cells, before = self._cells, self._pieces_before
        cells[4] = before[0] + hits
        cells[5] = before[1] + misses
        cells[6] = before[2] + read_bytes
        cells[7] = before[3] + waited_ns

    def end(self) -> None:
        """Give the row back. Ending twice is no error; a collected tally ends by itself."""
        with _lock:
            self.hold(0, 0)
            cells, self._cells = self._cells, _private_cells()
            if _shared is not None and cells.obj is _shared.memory.obj:
                cells[_KV_ADDRESS] = 0
                _shared.free_rows.append(cells)
                _shared.write()

    def __del__(self) -> None:
        if _shared is not None and hasattr(self, "_cells"):
            self.end()


class _SharedLedger:
    """The memory that other processes read, and its free rows."""

    def __init__(self) -> None:
        self.started = process.counters().started
        with Descriptors() as fds:
            fd = fds.add(new_memfd, NAME)
            os.ftruncate(fd, NBYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.block = Block.attach(fd, writable=True, name=NAME, category="diagnostics")
            # From here on, no other process may write.
            with suppress(OSError):  # before Linux 5.1
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        self.memory = memoryview(self.block)
        self.memory[:] = bytes(NBYTES)  # touched here, so that no step of an engine faults
        ends = range(_ROWS_AT, _TEXT_AT - _ROW_BYTES + 1, _ROW_BYTES)
        self.free_rows = [self.memory[at : at + _ROW_BYTES].cast("Q") for at in reversed(ends)]
        self.n_os_calls = 0
        self._is_writing = self._is_asked = False

    def write(self) -> None:
        """Write the present entries."""
        self._is_asked = True
        if self._is_writing:
            return  # a collection has closed an engine: the entries are written once more
        self._is_writing = True
        try:
            while self._is_asked:
                self._is_asked = False
                self._write()
        finally:
            self._is_writing = False

    def _write(self) -> None:
        n_os_calls = native_counters()["os_calls"]
        text = _to_text(ledger.entries())
        self.memory[_TEXT_AT : _TEXT_AT + len(text)] = text
        head = (_MAGIC, _VERSION, os.getpid(), self.started, len(_COLUMNS), _N_ROWS)
        _HEAD.pack_into(self.memory, 0, *head, len(text), zlib.crc32(text))
        self.n_os_calls = n_os_calls  # last: interrupted, the next refresh writes


_lock = threading.RLock()  # a collection may close an engine while it is held
_shared: _SharedLedger | None = None
_failure: str | None = None
_tallies: weakref.WeakSet[Tally] = weakref.WeakSet()


def publish() -> None:
    """Publish the present ledger of this process.

    Engines of unimem call it when they are made and closed; other code calls it when its memory has
    changed, and counts with a `Tally`. If the system gives no memory, nothing is published, and
    `failure` says why. Any thread may call it; a forked child publishes nothing until it calls it.

    Examples
    --------
    >>> import os
    >>> import unimem as um
    >>> from unimem.accounting.published import publish, published
    >>> with um.Block(1 << 20, name="mine", category="scratch"):
    ...     publish()
    ...     [entry.nbytes for entry in published(os.getpid()).entries if entry.name == "mine"]
    [1048576]
    """
    global _failure, _shared  # noqa: PLW0603 -- a process shows itself once
    with _lock:
        if _shared is None:
            try:
                _shared = _SharedLedger()
            except (OSError, MemoryError) as error:
                _failure = f"this process cannot publish its ledger: {error}"
                return
            _failure = None
        _shared.write()


def refresh() -> None:
    """Publish the ledger again if unimem has made system calls since the last time."""
    shown = _shared
    if shown is not None and shown.n_os_calls != native_counters()["os_calls"]:
        publish()


def failure() -> str | None:
    """Return why publishing failed, or None."""
    return _failure


def _private_cells() -> memoryview:
    return memoryview(bytearray(_ROW_BYTES)).cast("Q")


def _to_text(entries: Sequence[Entry]) -> bytes:
    """Write the largest entries that fit."""
    texts, room = {}, _ROOM - _ENVELOPE
    for entry in sorted(entries, key=lambda entry: entry.nbytes, reverse=True):
        text = json.dumps(entry, separators=(",", ":"), default=str)
        if len(text) + 1 <= room:
            texts[entry.address] = text
            room -= len(text) + 1
    listed = ",".join(texts[address] for address in sorted(texts))
    names = json.dumps(_COLUMNS)
    n_missing = len(entries) - len(texts)
    return f'{{"counters":{names},"truncated":{n_missing},"entries":[{listed}]}}'.encode()


def _unpublish() -> None:
    """Withdraw the ledger, at the end of the process and in a forked child."""
    global _shared
    for tally in list(_tallies):
        tally._cells = _private_cells()
    shown, _shared = _shared, None
    if shown is not None:
        shown.block.__exit__()


def _begin_child() -> None:
    global _lock  # noqa: PLW0603 -- a thread that is not in the child may hold it
    _lock = threading.RLock()
    _unpublish()


os.register_at_fork(after_in_child=_begin_child)
atexit.register(_unpublish)


# ---- looking ------------------------------------------------------------------------------------


class _BrokenError(ValueError):
    """Another process publishes something that unimem does not write."""


def published(pid: int, problems: list[str] | None = None) -> Published | None:
    """Read the published ledger of a process; None if there is no readable one.

    Parameters
    ----------
    pid : int
        Its number.
    problems : list of str, optional
        Takes messages about unusable memory: any process may have memory of this name.

    Notes
    -----
    The data come from another process: at most `NBYTES` are read, only from a memfd, and each field
    is checked. No process waits for another.
    """
    try:
        folder = os.open(f"/proc/{int(pid)}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        owner = process.identity(folder)
        tries = iter(range(_TRIES))  # one budget for all memfds
        all_found: list[Published] = []
        for fd in itertools.islice(find_memfds(folder, NAME), _MOST_FOUND):
            try:
                found = _read(fd, *owner, tries)
            except _BrokenError as problem:
                if problems is not None:
                    problems.append(f"process {pid} publishes an unusable ledger: {problem}")
                found = None
            finally:
                os.close(fd)
            if found is not None:
                all_found.append(found)
        return _merge(all_found)
    except OSError:
        pass  # it has ended, or is unreadable
    finally:
        os.close(folder)
    return None


def _merge(found: Sequence[Published]) -> Published | None:
    """Merge the ledgers of engines and of `unimem exec` in one process."""
    of_engines = next((each for each in found if each.placed is None), None)
    of_exec = next((each for each in found if each.placed is not None), None)
    if of_engines is None or of_exec is None:
        return of_engines or of_exec
    # They are written at different times: an engine's entries take precedence.
    starts = [entry.address for entry in of_engines.entries]
    entries = list(of_engines.entries)
    for entry in of_exec.entries:
        i = bisect_left(starts, entry.address + entry.reserved_bytes) - 1
        before = of_engines.entries[i] if i >= 0 else None
        if before is None or before.address + before.reserved_bytes <= entry.address:
            entries.append(entry)
    entries.sort(key=lambda entry: entry.address)
    return of_engines._replace(entries=tuple(entries), placed=of_exec.placed)


def _read(fd: int, pid: int, started: int, tries: Iterator[int]) -> Published | None:
    """Read it; None if it is the parent's, or being set up."""
    for _ in itertools.chain(range(1), tries):
        data = os.pread(fd, NBYTES, 0)
        if len(data) < NBYTES:
            raise _BrokenError(f"it has {len(data)} bytes, not {NBYTES}")
        magic, version, its_pid, its_start, n_columns, n_rows, size, sum_ = _HEAD.unpack_from(data)
        is_its_own = (its_pid, its_start) == (pid, started)
        if magic == bytes(len(_MAGIC)) or (magic == _MAGIC and not is_its_own):
            return None
        if magic != _MAGIC:
            raise _BrokenError("its beginning is another")
        if version == exec_table.FORMAT:
            if (shown := _read_placed(fd, data)) is not None:
                return shown
            time.sleep(_PATIENCE_SECONDS)
            continue
        if version != _VERSION:
            raise _BrokenError(
                f"its version is {version}, and this unimem reads version {_VERSION}"
            )
        if n_columns * n_rows * 8 > _TEXT_AT - _ROWS_AT or size > _ROOM:
            raise _BrokenError("its header counts more than fits")
        text = data[_TEXT_AT : _TEXT_AT + size]
        if zlib.crc32(text) == sum_:
            values = struct.unpack_from(f"={n_columns * n_rows}Q", data, _ROWS_AT)
            return _parse(text, n_columns, values)
        time.sleep(_PATIENCE_SECONDS)  # it is being written
    raise _BrokenError("its checksum does not match")


def _read_placed(fd: int, data: bytes) -> Published | None:
    try:
        table = exec_table.read_table(fd, data)
    except ValueError as error:
        raise _BrokenError(str(error)) from None
    return None if table is None else Published(table.entries, {}, 0, table.facts)


def _parse(text: bytes, n_columns: int, values: Sequence[int]) -> Published:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _BrokenError(f"its text is not JSON ({type(error).__name__})") from None
    if not isinstance(document, dict):
        raise _BrokenError(f"expected an object, got {type(document).__name__}")
    names = [_word(name) for name in _list(document.get("counters"), n_columns)]
    columns = {name: values[i::n_columns] for i, name in enumerate(names)}
    addresses = columns.pop("kv_address", ())
    sums = {name: sum(column) for name, column in columns.items()}
    caches = dict(zip(addresses, columns.get("kv_active_bytes", ()), strict=False))
    entries = [_entry(fields, caches) for fields in _list(document.get("entries"))]
    entries.sort(key=lambda entry: entry.address)
    categories = {entry.category for entry in entries}
    categories |= {part.category for entry in entries for part in entry.parts}
    if len(categories) > _MOST_CATEGORIES:
        raise _BrokenError(f"expected at most {_MOST_CATEGORIES} categories, got {len(categories)}")
    for before, entry in itertools.pairwise(entries):
        if before.address + before.reserved_bytes > entry.address:
            raise _BrokenError(f"entries overlap at address {entry.address}")
    return Published(tuple(entries), sums, _integer(document.get("truncated"), len(text) << 32))


def _entry(fields: Any, caches: dict[int, int]) -> Entry:
    """Check an entry; counted KV caches get their active bytes from their counters."""
    category, name, address, nbytes, reserved, requested, path, parts = _list(fields, 8)
    _integer(address, _MOST_ADDRESS)
    _integer(reserved, _MOST_ADDRESS - address)
    if requested is not None:
        if not isinstance(requested, dict) or len(requested) > _MOST_OPTIONS:
            raise _BrokenError(f"expected what was requested, got {type(requested).__name__}")
        requested = {_word(key): _option(value) for key, value in requested.items()}
    return Entry(
        _word(category),
        _checked_text(name),
        address,
        _integer(nbytes, reserved),
        reserved,
        requested,
        None if path is None else _checked_text(path),
        tuple(_part(fields, address, address + reserved, caches) for fields in _list(parts)),
    )


def _part(fields: Any, start: int, end: int, caches: dict[int, int]) -> Part:
    category, address, nbytes, active, high_water = _list(fields, 5)
    if _integer(address, end) < start:
        raise _BrokenError(f"a part at address {address} lies outside of its entry")
    _integer(nbytes, end - address)
    active = None if active is None else _integer(active, nbytes)
    # A cache that gave memory back once had more.
    high_water = None if high_water is None else _integer(high_water, _MOST_ADDRESS)
    if category == "kv" and address in caches:
        active = min(caches[address], nbytes)
        high_water = max(high_water or 0, active)
    return Part(_word(category), address, nbytes, active, high_water)


def _list(value: Any, n: int | None = None) -> list[Any]:
    if not isinstance(value, list) or n not in (None, len(value)):
        raise _BrokenError(
            f"expected a list{'' if n is None else f' of {n}'}, got {_shorten(value)}"
        )
    return value


def _integer(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise _BrokenError(f"expected an integer from 0 to {most}, got {_shorten(value)}")
    return value


def _word(value: Any) -> str:
    """Check a name of unimem's: it has no control characters."""
    if not isinstance(value, str) or not 0 < len(value) <= 64 or not value.isprintable():
        raise _BrokenError(f"expected a name, got {_shorten(value)}")
    return value


def _checked_text(value: Any) -> str:
    """Replace the control characters in a user's name."""
    if not isinstance(value, str):
        raise _BrokenError(f"expected a text, got {_shorten(value)}")
    return "".join(letter if letter.isprintable() else "?" for letter in value[:_MOST_LETTERS])


def _option(value: Any) -> Any:
    if isinstance(value, str):
        return _checked_text(value)
    if value is None or type(value) is bool:
        return value
    if type(value) is int:
        return _integer(value, _MOST_ADDRESS)
    raise _BrokenError(f"expected an option, got {_shorten(value)}")


def _shorten(value: Any) -> str:
    return ascii(value)[:40] if isinstance(value, (str, int, float)) else type(value).__name__
