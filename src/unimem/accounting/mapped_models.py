"""Find model files in the maps of a process, and the types of tensors in each area."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unimem._core.ledger import Part
from unimem.errors import FormatError, PlacementError
from unimem.system.limits import SHM
from unimem.system.process import Area, Process
from unimem.weights.files import Header, version_of
from unimem.weights.gguf import GGUFHeader
from unimem.weights.repack.image import read_image_header
from unimem.weights.repack.image_format import ImageHeader, is_image
from unimem.weights.safetensors import SafetensorsHeader
from unimem.weights.staged import Held, holders, holders_of

State = Literal["file", "staged", "unnamed", "replaced", "deleted"]
FileKey = tuple[tuple[int, int], int]
"""Device and inode, as smaps has them."""

_NAMES = (".gguf", ".safetensors")
_DELETED = " (deleted)"
_UNNAMED_BYTES_MIN = 1 << 20
_HEADERS_MAX = 64


@dataclass(frozen=True, slots=True)
class MappedModel:
    """A model file that a process maps: one part, if the model has several. It never changes.

    Attributes
    ----------
    path : str
        Its path, now or before, in the process's own view; the path to open of a staged model; the
        kernel's name of one without a path.
    source : str or None
        The staged file.
    state : {"file", "staged", "unnamed", "replaced", "deleted"}
        Whether `path` leads to it: to a file, or to a copy that `unimem stage` keeps. Unnamed
        memory never had a path. A replaced file has another one in its place.
    format : {"GGUF", "safetensors", "repacked"} or None
        None if the header is unknown.
    architecture, name : str or None
        From the file.
    problem : str or None
        Why the header is unknown.
    areas : tuple of Area
        Those that map it.
    is_kept : bool
        Whether another process keeps it for others, by `unimem stage` or `um.stage`. The ledger
        says what this process keeps.
    """

    path: str
    source: str | None
    state: State
    format: str | None
    architecture: str | None
    name: str | None
    problem: str | None
    areas: tuple[Area, ...]
    is_kept: bool
    _header: _ModelHeader = field(repr=False, compare=False)

    def parts(self, area: Area) -> list[Part]:
        """List the parts of one of its `areas`, by address and without gaps.

        They are ``weights:TYPE`` for each run of tensors of a type and ``weights:padding`` for the
        rest; ``weights`` if the header is unknown; ``staging`` if it is kept for others.
        """
        if self.is_kept:
            return [Part("staging", area.start, area.nbytes)]
        header, low, high = self._header, area.offset, area.offset + area.nbytes
        first = int(np.searchsorted(header.starts, low, "right")) - 1
        last = int(np.searchsorted(header.starts, high, "left"))
        begins = np.maximum(header.starts[first:last], low)
        sizes = np.diff(begins, append=high)
        addresses = begins - low + area.start
        names = map(header.categories.__getitem__, header.kinds[first:last].tolist())
        return list(map(Part, names, addresses.tolist(), sizes.tolist()))


def models(process: Process, areas: Iterable[Area] | None = None) -> list[MappedModel]:
    """Find the model files that a process maps, by address, in `areas` or all of its areas.

    These are files with the name of a model, and files of at least 1 MiB that begin as one, such as
    ollama's blobs and staged models. Only headers are read, once while the file stays the same. A
    file that cannot be opened here, such as another user's, is known by its name alone.

    Examples
    --------
    >>> import mmap
    >>> from importlib.resources import files
    >>> from unimem.system.process import read_process
    >>> path = files("unimem") / "engine" / "models" / "tiny.gguf"
    >>> with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
    ...     found = [each for each in models(read_process()) if each.path == str(path)]
    >>> sorted({part.category for part in found[0].parts(found[0].areas[0])})
    ['weights:f32', 'weights:padding', 'weights:q8_0']
    """
    groups: dict[FileKey, list[Area]] = {}
    for area in process.areas if areas is None else areas:
        if area.inode and area.path.startswith("/"):
            groups.setdefault((area.device, area.inode), []).append(area)
    libraries = library_files(process.areas)
    staged = _StagedFiles(process.pid)
    found = []
    for key, group in groups.items():
        is_named = _strip_deleted(group[0].path).endswith(_NAMES)
        nbytes = sum(area.nbytes for area in group)
        if key in libraries or not (is_named or nbytes >= _UNNAMED_BYTES_MIN):
            continue
        with _open_found(process.pid, group, staged) as file:
            header = _cached_header(file, is_named=is_named)
        if header is not None:
            found.append(
                MappedModel(
                    path=file.path,
                    source=file.source,
                    state=file.state,
                    format=header.format,
                    architecture=header.architecture,
                    name=header.name,
                    problem=header.problem,
                    areas=tuple(group),
                    is_kept=file.path in staged.kept,
                    _header=header,
                )
            )
    return found


def library_files(areas: Iterable[Area]) -> frozenset[FileKey]:
    """Return device and inode of the files with an executable area."""
    return frozenset(
        (area.device, area.inode) for area in areas if area.inode and area.access[2] == "x"
    )


# ---- the file -----------------------------------------------------------------------------------


class _File(NamedTuple):
    """A mapped file. `fd` only identifies it (O_PATH), and is -1 if no path leads to it."""

    fd: int
    path: str
    state: State
    source: str | None = None


class _StagedFiles:
    """The models that processes of this user keep, looked up on demand."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    @cached_property
    def _holders(self) -> list[Held]:
        try:
            return holders()
        except PlacementError:  # no holder can be seen here
            return []

    @cached_property
    def originals(self) -> dict[str, str]:
        """The original of each of their files, by path."""
        return {
            path: original
            for held in self._holders
            if held.backing != "page-cache"  # which keeps the file itself
            # Several repacked files have one image.
            for path, (original, _) in zip(held.paths, held.versions, strict=not held.is_repacked)
        }

    @cached_property
    def kept(self) -> frozenset[str]:
        """The paths that the process itself keeps."""
        if self._pid == os.getpid():
            return frozenset()
        return frozenset(path for held in holders_of(self._pid) for path in held.paths)


@contextmanager
def _open_found(pid: int, areas: Sequence[Area], staged: _StagedFiles) -> Iterator[_File]:
    file = _find_file(pid, areas[0], staged)
    try:
        yield file
    finally:
        if file.fd >= 0:
            os.close(file.fd)


def _find_file(pid: int, area: Area, staged: _StagedFiles) -> _File:
    # In a container, the process may see other files under its paths.
    root = f"/proc/{pid}/root"
    # The kernel escapes newlines only, so a backslash may be itself.
    for name in dict.fromkeys((area.path, area.path.replace("\\012", "\n"))):
        for path in (root + name, name):
            if (fd := _open_same(path, area, is_named=True)) >= 0:
                original = staged.originals.get(name) if name.startswith(SHM) else None
                return _File(fd, name, "staged" if original else "file", original)
    for path, original in staged.originals.items():
        # Files in separate file systems may have equal inodes.
        if (fd := _open_same(path, area)) >= 0:
            return _File(fd, path, "staged", original)
    name = _strip_deleted(area.path)
    state: State = "unnamed"
    if name != area.path and not name.startswith("/memfd:"):
        state = "replaced" if os.path.lexists(root + name) else "deleted"
    # The area itself leads to a file without a path, if this process may follow it.
    return _File(
        _open_same(f"/proc/{pid}/map_files/{area.start:x}-{area.end:x}", area), name, state
    )


def _strip_deleted(path: str) -> str:
    return path.removesuffix(_DELETED)


def _open_same(path: str, area: Area, *, is_named: bool = False) -> int:
    """Open a mapped file if it is regular and the path leads to it; else return -1.

    On btrfs, stat returns the device of a subvolume, and smaps that of the whole; on overlayfs
    before Linux 6.8, smaps that of the disk below. stat's device is then made up, with the major
    number 0: a path that the kernel named (`is_named`) is accepted whatever the device.
    """
    try:
        # O_PATH does not affect a device or a FIFO.
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return -1
    info = os.fstat(fd)
    device = os.major(info.st_dev), os.minor(info.st_dev)
    is_same_device = device == area.device or (is_named and device[0] == 0)
    if stat.S_ISREG(info.st_mode) and info.st_ino == area.inode and is_same_device:
        return fd
    os.close(fd)
    return -1


# ---- what is in it ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ModelHeader:
    """The header of a file, or the `problem` in reading it.

    From ``starts[i]`` up to the next, bytes of the file have the category ``categories[kinds[i]]``;
    so have those behind the last start, up to the end of the last page.
    """

    format: str | None
    architecture: str | None
    name: str | None
    problem: str | None
    starts: NDArray[np.int64]
    kinds: NDArray[np.intp]
    categories: tuple[str, ...]


# By the version of the file; None: not a model.
_headers: dict[tuple[int, ...], _ModelHeader | None] = {}


def _cached_header(file: _File, *, is_named: bool) -> _ModelHeader | None:
    """Return the header of a file; None if the file is not a model."""
    if file.fd < 0:
        why = (
            f"the file is {file.state}: reading its mapping takes CAP_CHECKPOINT_RESTORE, which "
            "root has"
        )
        return _unknown_header(why) if is_named else None
    version = version_of(os.fstat(file.fd))
    key = (*version, is_named)
    if key not in _headers:
        try:
            header = _read_header(file, version[2], is_named=is_named)
        except (OSError, MemoryError) as error:
            return _unknown_header(str(error)) if is_named else None
        while len(_headers) >= _HEADERS_MAX:
            _headers.pop(next(iter(_headers)), None)
        _headers[key] = header
    return _headers[key]


def _unknown_header(problem: str) -> _ModelHeader:
    return _ModelHeader(
        format=None,
        architecture=None,
        name=None,
        problem=problem,
        starts=np.zeros(1, np.int64),
        kinds=np.zeros(1, np.intp),
        categories=("weights",),
    )


def _read_header(file: _File, nbytes: int, *, is_named: bool) -> _ModelHeader | None:
    if not is_named and nbytes < _UNNAMED_BYTES_MIN:
        return None
    fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        head = os.pread(fd, 9, 0)
        is_gguf = head[:4] == b"GGUF"
        # The length of the header, and an object.
        is_safetensors = (
            not is_gguf and head[8:] == b"{" and int.from_bytes(head[:8], "little") < nbytes
        )
        try:
            if is_safetensors or (file.path.endswith(".safetensors") and not is_gguf):
                return _parse_header("safetensors", SafetensorsHeader(fd, nbytes, file.path))
            if is_image(head):
                return _parse_image(read_image_header(fd, nbytes, file.path))
            if is_gguf or is_named:
                return _parse_header("GGUF", GGUFHeader(fd, nbytes, file.path))
        except FormatError as error:
            # Many other files begin like safetensors.
            is_ours = is_gguf or is_named or is_image(head)
            return _unknown_header(error.rule) if is_ours else None
    finally:
        os.close(fd)
    return None


def _parse_header(kind: str, header: Header) -> _ModelHeader:
    keys = header.keys()

    def text(key: str) -> str | None:
        value = header.value(keys[key]) if kind == "GGUF" and key in keys else None
        return value if isinstance(value, str) else None

    runs = header.runs()
    return _lay_out(
        kind,
        text("general.architecture"),
        text("general.name"),
        [(offset, nbytes, f"weights:{tensor_type}") for offset, nbytes, tensor_type in runs],
    )


def _parse_image(header: ImageHeader) -> _ModelHeader:
    rows = [
        (header.data_offset + one.offset, one.nbytes, f"weights:{one.type} repacked")
        for one in header.tensors
    ]
    return _lay_out("repacked", None, None, rows)


def _lay_out(
    kind: str, architecture: str | None, name: str | None, runs: Sequence[tuple[int, int, str]]
) -> _ModelHeader:
    """Lay out runs of an offset, bytes and a category."""
    categories = {"weights:padding": 0}
    for _, _, category in runs:
        categories.setdefault(category, len(categories))
    # Padding is between runs, mostly empty, and behind the last.
    starts = np.zeros(2 * len(runs) + 1, np.int64)
    starts[1::2] = [offset for offset, _, _ in runs]
    starts[2::2] = [offset + nbytes for offset, nbytes, _ in runs]
    kinds = np.zeros(len(starts), np.intp)
    kinds[1::2] = [categories[category] for _, _, category in runs]
    keep = np.diff(starts, append=starts[-1] + 1) > 0
    return _ModelHeader(
        format=kind,
        architecture=architecture,
        name=name,
        problem=None,
        starts=starts[keep],
        kinds=kinds[keep],
        categories=tuple(categories),
    )
