"""Binary headers of files: packed from fields, and read with a rule and an offset in each error."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import xxhash
from numpy.typing import NDArray

from unimem.errors import FormatError

_MAGIC_BYTES = 8


class BinaryHeader:
    """The layout of a header: fields at fixed places, little-endian, without padding.

    The first fields are `magic` (8 bytes) and `version`. If the last one is `header_checksum`, it
    is the XXH3 (64 bits) of all bytes before it.

    `fields` have the code of `struct` and the names of its fields, by semicolons, as in
    ``"I version; Q nbytes"``; `offsets` and `codes` have where each begins, and its code. `what` is
    the kind of file, and `advice` what to do about a damaged one, for errors. `versions` have this
    layout, and `newest` is the newest that this library reads in any layout.
    """

    def __init__(
        self,
        fields: str,
        magic: bytes,
        what: str,
        *,
        versions: tuple[int, ...] = (1,),
        newest: int | None = None,
        error: type[FormatError] = FormatError,
        advice: str = "",
    ) -> None:
        self.magic, self.versions, self.error = magic, versions, error
        self._what, self._newest = what, newest or versions[-1]
        self._advice = advice and f"; {advice}"
        self.codes: dict[str, str] = {}
        self.offsets: dict[str, int] = {}
        at = 0
        for code, *names in map(str.split, fields.split(";")):
            for name in names:
                self.codes[name], self.offsets[name] = f"<{code}", at
                at += struct.calcsize(f"<{code}")
        self._struct = struct.Struct("<" + "".join(code[1:] for code in self.codes.values()))
        self.nbytes = self._struct.size

    def is_magic(self, head: bytes) -> bool:
        """Whether a file that begins with these bytes is meant to be of this kind."""
        return head[:_MAGIC_BYTES] == self.magic

    def version_of(self, head: bytes) -> int | None:
        """Return the version of a file of this kind; None for other files."""
        at = self.offsets["version"]
        if not self.is_magic(head) or len(head) < at + 4:
            return None
        return int.from_bytes(head[at : at + 4], "little")

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """Return a header; magic, version, size and checksum have their defaults."""
        own = {"magic": self.magic, "version": self.versions[0], "header_bytes": self.nbytes}
        values = own | {"header_checksum": 0} | dict(values)
        packed = self._struct.pack(*(values[name] for name in self.codes))
        return self.seal(packed) if "header_checksum" in self.codes else packed

    @staticmethod
    def seal(head: bytes) -> bytes:
        """Return a header with its checksum in the last 8 bytes."""
        return head[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(head[:-8]))

    def write(self, out: NDArray[np.uint8], values: Mapping[str, Any], tables: bytes) -> None:
        """Write a header and the tables behind it to memory that is all zeros.

        The field `tables_checksum` covers all bytes behind the header.
        """
        out[self.nbytes : self.nbytes + len(tables)] = np.frombuffer(tables, np.uint8)
        checksum = xxhash.xxh3_64_intdigest(out[self.nbytes :].data)
        head = self.pack({**values, "tables_checksum": checksum})
        out[: self.nbytes] = np.frombuffer(head, np.uint8)

    def read(self, head: bytes, path: str, base: int = 0) -> HeaderFields:
        """Read a header and check its magic number, version and checksum.

        `head` is the header, or all bytes of a shorter file. The header begins at byte `base`.
        """
        fields = HeaderFields(self, path, base)
        if not head or not self.magic.startswith(head[:_MAGIC_BYTES]):
            rule = f"this is no {self._what}: it does not begin with {self.magic.decode()}"
            raise self.error(rule, base, path)
        if len(head) < self.nbytes:
            rule = f"the file is cut off inside its header: it has {len(head)} bytes"
            fields.refuse_at(len(head), rule)
        head = head[: self.nbytes]
        fields.update(zip(self.codes, self._struct.unpack(head), strict=True))
        version = fields["version"]
        # First, since another version may have another layout.
        if version > self._newest:
            known = "version 1" if self._newest == 1 else f"versions 1 to {self._newest}"
            rule = f"version {version} is newer than this unimem, which reads {known}"
            at = base + self.offsets["version"]
            raise self.error(f"{rule}: update unimem-llm, or make the file anew", at, path)
        if version not in self.versions:
            expected = " or ".join(map(str, self.versions))
            fields.refuse("version", f"expected version {expected}, got {version}")
        if head != self.seal(head):
            fields.refuse("header_checksum", "the header's checksum does not match")
        return fields


class HeaderFields(dict[str, Any]):
    """The fields of a header that was read, by name, and the checks of them."""

    def __init__(self, header: BinaryHeader, path: str, base: int = 0) -> None:
        super().__init__()
        self.header, self.path, self.base = header, path, base

    def refuse_at(self, offset: int, rule: str) -> NoReturn:
        """Raise the error of a rule that is broken at a byte, counted from the header."""
        raise self.header.error(f"{rule}{self.header._advice}", self.base + offset, self.path)

    def refuse(self, name: str, rule: str) -> NoReturn:
        """Raise the error of a rule that a field breaks."""
        self.refuse_at(self.header.offsets[name], rule)

    def check(self, holds: bool, name: str, expected: object) -> None:
        """Refuse a field unless its rule holds."""
        if not holds:
            self.refuse(name, f"{name}: expected {expected}, got {self[name]}")

    def check_range(self, name: str, low: int, high: int) -> None:
        """Refuse a field below `low` or above `high`."""
        self.check(low <= self[name] <= high, name, low if low == high else f"{low} to {high}")

    def check_exact(self, **expected: int) -> None:
        """Refuse a field that has another value."""
        for name, value in expected.items():
            self.check(self[name] == value, name, value)

    def check_file(self, nbytes: int) -> None:
        """Refuse a file that has other bytes than its field `file_bytes` says."""
        whole = self["file_bytes"]
        if nbytes < whole:
            self.refuse_at(nbytes, f"the file is cut off: it has {nbytes} of {whole} bytes")
        if nbytes > whole:
            rule = f"the file is longer than it should be: {nbytes} bytes, not {whole}"
            self.refuse_at(whole, rule)

    def check_tables(self, tables: bytes | memoryview, name: str) -> None:
        """Refuse bytes behind the header whose checksum is not that of a field."""
        if xxhash.xxh3_64_intdigest(tables) != self[name]:
            self.refuse_at(self.header.nbytes, "the checksum of the tables does not match")


class Tables:
    """The tables behind a header, taken one after the other.

    `data` is ``uint8``: all bytes from the header to the data; `tables_checksum` covers them. `at`
    is the byte of the next table, counted from the header.
    """

    def __init__(self, fields: HeaderFields, data: NDArray[np.uint8]) -> None:
        fields.check_tables(data.data, "tables_checksum")
        self._data, self._begin = data, fields.header.nbytes
        self.at = self._begin

    def take(self, dtype: Any, n: int) -> NDArray[Any]:
        """View the next n items."""
        begin = self.at - self._begin
        nbytes = n * np.dtype(dtype).itemsize
        self.at += nbytes
        return self._data[begin : begin + nbytes].view(dtype)
