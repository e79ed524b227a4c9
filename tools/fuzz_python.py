"""Fuzz targets for parsers in Python, under Atheris: `make fuzz` runs it.

    python tools/fuzz_python.py TARGET [ARGUMENT of libFuzzer]...

A target takes an input as it is, and again with checksums and sizes corrected, which few mutations
keep right. It must be read, or refused with the error of its format. What was read must keep the
promises of its reader.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import xxhash

Run = Callable[[bytes], None]

SOURCES = Path(__file__).parent.parent / "src"
PAGE = 4096
MOST_BYTES = 1 << 20  # of a file made from an input
_REPAIRS = 12
_EXPECTED = re.compile(r"(\w+): expected (\d+)(?: to \d+)?, got ")
_OTHER_SIZE = re.compile(r"cut off|longer than|too long")


# ---- files with pages of zeros ----


def unpack(raw: bytes) -> bytearray:
    """Return the file that an input stands for: pieces behind their lengths, each in whole pages.

    Most of a file is zeros up to the next page, which inputs leave out.
    """
    file = bytearray()
    at = 0
    while at + 2 <= len(raw) and len(file) < MOST_BYTES:
        n = int.from_bytes(raw[at : at + 2], "little")
        piece = raw[at + 2 : at + 2 + n]
        file += piece.ljust(-(-max(n, 1) // PAGE) * PAGE, b"\0")
        at += 2 + n
    return file


def pack(file: bytes) -> bytes:
    """Return the input that stands for a file of whole pages."""
    pages = (file[at : at + PAGE].rstrip(b"\0") for at in range(0, len(file), PAGE))
    return b"".join(len(page).to_bytes(2, "little") + page for page in pages)


def check_refusal(error: Any, nbytes: int) -> None:
    """Check that an error names a rule, and a place inside the file."""
    assert error.rule
    assert error.offset is not None
    assert 0 <= error.offset <= nbytes


# ---- snapshots ----


class _Source:
    """A file in memory, as snapshots are read from one."""

    path = "fuzzed"

    def __init__(self, file: bytes) -> None:
        self.file, self.nbytes = file, len(file)

    def read(self, out: Any, offset: int) -> None:
        """Fill memory from a byte on."""
        assert 0 <= offset <= offset + len(out) <= self.nbytes
        out.data[:] = self.file[offset : offset + len(out)]


class _Snapshots:
    """Reads the headers of snapshots of all versions."""

    def __init__(self) -> None:
        from unimem.errors import SnapshotError
        from unimem.kv.snapshot import format_layers, format_rows, format_states, reader

        self.reader, self.error = reader, SnapshotError
        numbers = ((format_rows, 1), (format_layers, 2), (format_layers, 3), (format_states, 1))
        self.forms: dict[bytes, Any] = {
            form.MAGIC + struct.pack("<I", number): form for form, number in numbers
        }

    def __call__(self, raw: bytes) -> None:
        file = unpack(raw)
        self.read(bytes(file))
        if len(file) >= PAGE:
            self.repair(file)
            self.read(bytes(file))

    def read(self, file: bytes) -> None:
        try:
            found = self.reader._read_header(_Source(file))
        except self.error as error:
            check_refusal(error, len(file))
            return
        assert str(found)
        at = 0
        for section in self.reader._sections_of(found):
            at = self.check_section(section)
        assert at == len(file)

    def check_section(self, section: Any) -> int:
        """Check that chunks cover the data, and return where it ends."""
        at, n_chunks = section.base + section.data_offset, 0
        if not len(section.checksums):  # a million lanes without tokens
            return int(at)
        for n_chunks, chunk in enumerate(section.chunks(), 1):
            assert (chunk.number, chunk.offset) == (n_chunks - 1, at)
            assert chunk.nbytes > 0
            assert chunk.padding >= 0
            at += chunk.nbytes + chunk.padding
        assert n_chunks == len(section.checksums)
        assert at == section.base + section.file_bytes
        assert section.seq_len <= section.next_position
        tokens = section.tokens
        assert tokens is None or (len(tokens) == section.next_position and (tokens >= 0).all())
        return int(at)

    def repair(self, file: bytearray) -> None:
        """Set the fields of the first header that follow from others, and all checksums."""
        for _ in range(_REPAIRS):
            self.seal_all(file)
            form = self.forms.get(bytes(file[:12]))
            if form is None:
                return
            header = form.HEADER
            try:
                form.checked_header(bytes(file[: header.nbytes]), len(file), "")
            except self.error as error:
                if set_expected(file, error.rule, header.offsets, header.codes):
                    continue
            return

    def seal_all(self, file: bytearray) -> None:
        for base in range(0, len(file), PAGE):
            form = self.forms.get(bytes(file[base : base + 12]))
            if form is not None and base + form.HEADER.nbytes <= len(file):
                offsets = form.HEADER.offsets
                at = base + offsets["data_offset"]
                begin, data = base + form.HEADER.nbytes, struct.unpack_from("<Q", file, at)[0]
                tables = xxhash.xxh3_64_intdigest(file[begin : max(begin, base + data)])
                struct.pack_into("<Q", file, base + offsets["tables_checksum"], tables)
                file[base:begin] = form.HEADER.seal(bytes(file[base:begin]))


def set_expected(
    file: bytearray, rule: str, offsets: Mapping[str, int], codes: Mapping[str, str]
) -> bool:
    """Apply what a refusal expects of a field or of the size of the file; False if nothing."""
    found = _EXPECTED.match(rule)
    if found and found[1] in codes:
        with suppress(struct.error):
            struct.pack_into(codes[found[1]], file, offsets[found[1]], int(found[2]))
            return True
    if _OTHER_SIZE.search(rule):
        nbytes = struct.unpack_from("<Q", file, offsets["file_bytes"])[0]
        if len(file) != nbytes and PAGE <= nbytes <= MOST_BYTES:
            del file[nbytes:]
            file += bytes(nbytes - len(file))
            return True
    return False


# ---- what processes show each other ----


def ledger() -> Run:
    """Read what another process shows of its memory, from an engine or under `unimem exec`."""
    from unimem.accounting import exec_table
    from unimem.accounting import published as shown

    pid, started = 7, 11
    no_wait = mock.patch.object(shown, "_PATIENCE_SECONDS", 0)

    def read(file: bytes) -> None:
        fd = os.memfd_create("fuzzed", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, shown.NBYTES)
            os.pwrite(fd, file[: shown.NBYTES], 0)
            with no_wait, suppress(shown._BrokenError):
                if found := shown._read(fd, pid, started, iter(range(1))):
                    check(found)
        finally:
            os.close(fd)

    def check(found: Any) -> None:
        for entry in found.entries:
            assert entry.address + entry.nbytes <= entry.address + entry.reserved_bytes <= 1 << 64
            assert entry.name.isprintable()
            for part in entry.parts:
                assert entry.address <= part.address
                assert part.address + part.nbytes <= entry.address + entry.reserved_bytes
        for before, entry in itertools.pairwise(found.entries):
            assert before.address + before.reserved_bytes <= entry.address
        merged = shown._merge([found, found._replace(placed={})])
        assert merged is not None
        assert all(isinstance(n, int) for n in found.counters.values())

    def run(raw: bytes) -> None:
        file = unpack(raw)
        read(bytes(file))
        if len(file) < 2 * PAGE:
            return
        text = bytes(file[PAGE : shown.NBYTES]).rstrip(b"\0")
        head = (shown._MAGIC, shown._VERSION, pid, started, len(shown._COLUMNS), file[0] % 100)
        shown._HEAD.pack_into(file, 0, *head, len(text), zlib.crc32(text))
        read(bytes(file))
        n_records = (len(file) - exec_table._HEAD_BYTES) // exec_table._RECORD.size
        head = (shown._MAGIC, exec_table.FORMAT, pid, started, n_records, exec_table._RECORD.size)
        exec_table._HEAD.pack_into(file, 0, *head, file[0] % 65, 1, 2)
        read(bytes(file))

    return run


def note() -> Run:
    """Read the note of a process that keeps a staged model."""
    import fcntl

    from unimem.weights import staged

    def run(raw: bytes) -> None:
        fd = os.memfd_create("fuzzed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(fd, raw)
        os.lseek(fd, 0, os.SEEK_SET)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        folder = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found = staged.read_note(fd, os.getpid(), folder)
        finally:
            os.close(folder)
        assert found is None or found.pid == os.getpid()

    return run


# ---- /proc ----


def process() -> Run:
    """Read smaps, numa_maps and stat: texts with a zero byte between them."""
    from unimem.base import kernel_files
    from unimem.system import process as reader

    stat = b""
    count = itertools.count()
    expected = ValueError, IndexError

    def read_bytes(path: str, folder: int | None = None) -> bytes:
        assert path == "stat"
        return stat

    def run(raw: bytes) -> None:
        nonlocal stat
        smaps, numa_maps, stat = (*raw.split(b"\0"), b"", b"")[:3]
        if next(count) % 1000 == 0:
            reader._words.cache_clear()
        with suppress(ValueError):
            areas = reader._areas(smaps, 0)
            for before, area in itertools.pairwise(areas):
                assert before.end <= area.start
            assert all(area.rss_bytes >= 0 for area in areas)
        for line in numa_maps.splitlines():
            with suppress(*expected):
                _, nodes = reader._nodes(line)
                assert all(n >= 0 for n in nodes.values())
        with mock.patch.object(kernel_files, "read_bytes", read_bytes), suppress(*expected):
            assert reader._stat(0).n_threads is not None

    return run


# ---- repacked images, and the index of split safetensors ----


def image() -> Run:
    """Read the header of a repacked image."""
    from unimem.errors import FormatError
    from unimem.weights.repack import image_format as fmt

    header = fmt.HEADER

    def put(file: bytearray, name: str, value: Any) -> None:
        struct.pack_into(header.codes[name], file, header.offsets[name], value)

    def read(file: bytes, nbytes: int) -> None:
        try:
            found = fmt.parse(file, nbytes, "fuzzed")
        except FormatError as error:
            check_refusal(error, nbytes)
            return
        assert found.data_offset + found.data_bytes <= found.file_bytes == nbytes
        end = 0
        for tensor in found.tensors:
            assert end <= tensor.offset
            end = tensor.offset + tensor.nbytes
        assert end <= found.data_bytes
        assert len({tensor.name for tensor in found.tensors}) == len(found.tensors) > 0

    def run(raw: bytes) -> None:
        read(raw, len(raw))
        if len(raw) <= header.nbytes:
            return
        file, text = bytearray(raw), raw[header.nbytes :]
        file[:8] = header.magic
        data_offset = fmt._round_up(len(raw))
        data_bytes = 1 + struct.unpack_from("<Q", raw, header.offsets["data_bytes"])[0] % (1 << 40)
        nbytes = fmt.image_bytes(data_offset, data_bytes)
        sizes: dict[str, Any] = {
            "version": header.versions[0],
            "header_bytes": header.nbytes,
            "file_bytes": nbytes,
        }
        sizes |= {"data_offset": data_offset, "data_bytes": data_bytes, "table_bytes": len(text)}
        sizes["table_checksum"] = xxhash.xxh3_64_intdigest(text)
        with suppress(ValueError, RecursionError, KeyError, TypeError):
            table = json.loads(text.decode())
            sizes["n_tensors"] = len(table["tensors"])
            sizes["key"] = bytes.fromhex(fmt.key_of(table["identity"]))
        for name, value in sizes.items():
            put(file, name, value)
        put(file, "header_checksum", xxhash.xxh3_64_intdigest(file[: header.nbytes - 8]))
        read(bytes(file), nbytes)

    return run


def index() -> Run:
    """Read the index of safetensors in several files."""
    from unimem.errors import SafetensorsError
    from unimem.weights import files

    def run(raw: bytes) -> None:
        try:
            where = files._read_index("fuzzed", raw)
        except SafetensorsError:
            return
        assert where
        for name in where.values():
            path = os.path.normpath(os.path.join("/folder", name))
            assert os.path.dirname(path) == "/folder"
            assert os.fsencode(name)

    return run


# ---- running ----


class Target(NamedTuple):
    """A target: the modules whose edges count, and a maker of its function."""

    modules: tuple[str, ...]
    make: Callable[[], Run]


TARGETS = {
    "snapshot": Target(
        tuple(
            """
            unimem.kv.snapshot.format_rows unimem.kv.snapshot.format_layers
            unimem.kv.snapshot.format_states unimem.kv.layer_specs unimem.base.binary_header
        """.split()
        ),
        _Snapshots,
    ),
    "ledger": Target(("unimem.accounting.published", "unimem.accounting.exec_table"), ledger),
    "note": Target(("unimem.weights.staged",), note),
    "process": Target(("unimem.system.process",), process),
    "image": Target(("unimem.weights.repack.image_format", "unimem.base.binary_header"), image),
    "index": Target(("unimem.weights.files",), index),
}


def replay(name: str, inputs: Iterator[bytes]) -> int:
    """Run a target on inputs without a fuzzer, and return their number."""
    run, n = TARGETS[name].make(), 0
    for raw in inputs:
        run(raw)
        n += 1
    return n


class _Sources:
    """Finds modules in src/ with Python's own loader.

    Atheris cannot put its counters into modules from the loader of an editable install.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, name: str, _path: object, _target: object = None) -> ModuleSpec | None:
        """Return where a module is, as importlib asks."""
        if name not in self.names:
            return None
        return spec_from_file_location(name, SOURCES / f"{name.replace('.', '/')}.py")


def main() -> None:
    """Run a target under Atheris."""
    name, *arguments = sys.argv[1:]
    atheris = import_module("atheris")
    target = TARGETS[name]
    sys.meta_path.insert(0, _Sources(target.modules))
    with atheris.instrument_imports(include=list(target.modules)):
        for module in target.modules:
            import_module(module)
    atheris.Setup([sys.argv[0], *arguments], target.make())
    atheris.Fuzz()


if __name__ == "__main__":
    main()
