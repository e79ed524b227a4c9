"""Failing system calls of libunimem in this process.

The functions that take memory are replaced in the table by which the library finds them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SHT_RELA = 4
_RELA_BYTES = _SYMBOL_BYTES = 24
_FAILED = 2**64 - 1  # -1, and MAP_FAILED
# The number of each function's arguments, and its result on failure.
_FUNCTIONS = {
    "mmap": (6, _FAILED),
    "munmap": (2, _FAILED),
    "madvise": (3, _FAILED),
    "fallocate": (4, _FAILED),
    "ftruncate": (2, _FAILED),
    "memfd_create": (2, _FAILED),
    "calloc": (2, 0),
}


def _slots(path: Path) -> dict[str, int]:
    """Return the places of the functions' addresses, in bytes from the library's base."""
    elf = path.read_bytes()
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_bytes, n_entries = struct.unpack_from("<HH", elf, 58)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", elf, table + i * entry_bytes) for i in range(n_entries)
    ]
    found = {}
    for _, kind, _, _, offset, nbytes, link, *_ in sections:
        if kind != _SHT_RELA:
            continue
        symbols = sections[link]
        names = sections[symbols[6]][4]
        for record in range(offset, offset + nbytes, _RELA_BYTES):
            slot, info = struct.unpack_from("<QQ", elf, record)
            (name,) = struct.unpack_from("<I", elf, symbols[4] + (info >> 32) * _SYMBOL_BYTES)
            text = elf[names + name : elf.index(b"\0", names + name)].decode()
            if text in _FUNCTIONS:
                found[text] = slot
    return found


def _library() -> tuple[Path, int]:
    """Return the libunimem of this process, and its address; `make mutants` loads another one."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, _, offset, *_ = line.split()
        if re.search(r"/libunimem\.so[.\d]*$", line) and int(offset, 16) == 0:
            return Path(line[line.index("/") :]), int(place.split("-")[0], 16)
    raise AssertionError("libunimem is not mapped")


class OsFaults:
    """Lets the nth call fail.

    `n_calls` counts the calls since `arm`, and `failed` names the function that failed.
    """

    def __init__(self) -> None:
        self.n_calls = 0
        self.failed: str | None = None
        self._nth = 0
        self._errno = 0

    def arm(self, nth: int, error: int = errno.ENOMEM) -> None:
        """Let the nth call from now on (1 is the next) fail with this errno."""
        self.n_calls, self.failed, self._nth, self._errno = 0, None, nth, error

    def disarm(self) -> None:
        """Let every call pass."""
        self._nth = 0

    def fails(self, name: str) -> bool:
        """Count a call; return whether it fails."""
        self.n_calls += 1
        if self.n_calls != self._nth:
            return False
        self.failed = name
        ctypes.set_errno(self._errno)
        return True


def _replacement(faults: OsFaults, name: str, libc: ctypes.CDLL) -> Any:
    n_words, failure = _FUNCTIONS[name]
    kind = ctypes.CFUNCTYPE(ctypes.c_size_t, *[ctypes.c_size_t] * n_words, use_errno=True)
    real = kind((name, libc))
    return kind(lambda *words: failure if faults.fails(name) else real(*words))


# The second of two threads would restore pointers that the first has freed.
_replacing = threading.Lock()


@contextmanager
def os_faults() -> Iterator[OsFaults]:
    """Replace the functions of the whole process until the end, in one thread at a time."""
    assert _replacing.acquire(blocking=False), "the functions are replaced already"
    try:
        with _replaced() as faults:
            yield faults
    finally:
        _replacing.release()


@contextmanager
def _replaced() -> Iterator[OsFaults]:
    (path, base), libc, faults = _library(), ctypes.CDLL(None), OsFaults()
    before: list[tuple[ctypes.c_void_p, int | None]] = []
    replacements = []
    for name, offset in _slots(path).items():
        place = base + offset
        # The linker may have made the table read-only.
        page = ctypes.c_void_p(place & -mmap.PAGESIZE)
        assert libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        slot = ctypes.c_void_p.from_address(place)
        replacements.append(_replacement(faults, name, libc))
        before.append((slot, slot.value))
        slot.value = ctypes.cast(replacements[-1], ctypes.c_void_p).value
    assert before, "the library calls none of the functions by name"
    try:
        yield faults
    finally:
        for slot, value in before:
            slot.value = value
