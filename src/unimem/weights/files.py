"""Model files: the files of a model, their headers and their versions."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from unimem.base.arguments import file_path, integer
from unimem.base.closing import Closing
from unimem.base.descriptors import Descriptors
from unimem.errors import GGUFError, SafetensorsError
from unimem.weights.gguf import GGUFHeader
from unimem.weights.safetensors import SafetensorsHeader

#: A value of the metadata.
Value: TypeAlias = Union[  # noqa: UP007 - it refers to itself, which "|" cannot before Python 3.12
    int, float, bool, str, NDArray[np.number[Any] | np.bool_], list[str], list["Value"]
]

# As llama.cpp's gguf-split names them.
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MOST_DESCRIPTORS = 2**31 - 1
_MOST_LINKS = 40  # as the kernel has it
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
_DESCRIPTORS = re.compile(r"/proc/\d+(/task/\d+)?/fd")
# The longest known have about 20 MB. Parsed JSON may take 25 times its length.
_INDEX_BYTES_MAX = 32 << 20
_MOST_SPLIT_TENSORS = 65536  # as one file may have
_PAGE = 4096  # some writers lay tensors at pages

Version = tuple[int, ...]
#: A path, a descriptor, or a buffer.
Source: TypeAlias = (
    str | os.PathLike[str] | int | bytes | bytearray | memoryview | mmap.mmap | NDArray[Any]
)
Header: TypeAlias = GGUFHeader | SafetensorsHeader


class FileRange(NamedTuple):
    """The part of a file or a buffer that is a model: by default, all from `offset` on."""

    offset: int = 0
    nbytes: int | None = None

    def check(self) -> None:
        """Raise TypeError or ValueError for a wrong argument."""
        integer(self.offset, "offset", 0)
        if self.nbytes is not None:
            integer(self.nbytes, "nbytes", 1)

    def within(self, whole: int, path: str) -> int:
        """Return the size of the part of a file or a buffer of `whole` bytes."""
        if self.offset > whole:
            raise ValueError(
                f"offset: expected at most {whole}, the size of {path}, got {self.offset}"
            )
        most = whole - self.offset
        if self.nbytes is not None and self.nbytes > most:
            raise ValueError(
                f"nbytes: expected at most {most}, the bytes of {path} from byte {self.offset} on, "
                f"got {self.nbytes}"
            )
        return most if self.nbytes is None else self.nbytes


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file of a model, as it was when it was opened."""

    path: str  # as given, or beside that file
    absolute_path: str  # see `durable_path`
    # See `version_of`. For a file on a server: 0, 0, its size, and a hash of its ETag or 0.
    version: Version
    nbytes: int
    header: Header = field(repr=False)
    in_memory: bool  # whether its pages are shared memory or hugetlb, which cannot be dropped
    changed_ns: int = 0  # time of the last change of its inode (ctime)
    begin: int = 0  # of a file inside another one, whose version and paths these are
    memory: memoryview | None = None  # the buffer that it is instead of a file

    @property
    def end(self) -> int:
        """Where it ends in the file that holds it."""
        return self.begin + self.nbytes

    @property
    def identity(self) -> Version:
        """The file's `identity_of`, and its place if that is inside another file."""
        place = (self.begin,) if self.begin else ()
        return (*self.version, self.changed_ns, *place)


class _Descriptors(Descriptors):
    """The descriptors of a model's files."""

    def open(self, path: str, flags: int = 0) -> int:
        """Open a file for reading."""
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            return self.add(os.open, path, flags)
        except OSError as error:
            if error.errno == errno.EMFILE:
                text = "Too many open files: all files of a model are open at once; 'ulimit -n'"
                raise OSError(errno.EMFILE, f"{text} raises the limit", path) from None
            raise


class ModelFiles(Closing):
    """The opened files of a model, in order. Leaving the ``with`` closes their descriptors.

    For one thread. A forked child has the descriptors, too, and closes its own. `fds` are open for
    reading; files on a server have none. `index` is the path of the safetensors index that names
    the files.
    """

    def __init__(self) -> None:
        self.files: list[ModelFile] = []
        self.fds = _Descriptors()
        self.index: str | None = None
        self.index_text = b""

    def add(self, path: str, part: FileRange | None = None, fd: int | None = None) -> ModelFile:
        """Open a file, or a copy of a descriptor, and read and check its header."""
        part = part or FileRange()
        fd, info = _open_regular(path, self.fds, fd)
        nbytes = part.within(info.st_size, path)
        # Without reading ahead: how the data will be loaded is not known yet.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        header = read_header(fd, nbytes, path, part.offset)
        check_end(header, part.offset + nbytes, path, fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)
        where = path, durable_path(path), version_of(info), nbytes
        changed = info.st_ctime_ns
        self.files.append(ModelFile(*where, header, is_in_memory(fd), changed, part.offset))
        return self.files[-1]

    def add_buffer(self, memory: memoryview, part: FileRange) -> ModelFile:
        """Check the header in a buffer."""
        path = f"<{type(memory.obj).__name__} of {memory.nbytes} bytes>"
        nbytes = part.within(memory.nbytes, path)
        header = read_header(memory, nbytes, path, part.offset)
        check_end(header, part.offset + nbytes, path)
        version = (0, 0, memory.nbytes, 0)
        self.files.append(
            ModelFile(path, "", version, nbytes, header, True, 0, part.offset, memory)
        )
        return self.files[-1]

    def absolute(self, path: str) -> str:
        """Return the path of a file for other processes."""
        return durable_path(path)

    def beside(self, path: str, name: str) -> str:
        """Return the path of a file beside another."""
        return os.path.join(os.path.dirname(path), name)

    def read_start(self, path: str, nbytes: int) -> bytes:
        """Read at most `nbytes` from the start of a file that is not a part of the model."""
        with _Descriptors() as fds:
            fd, _ = _open_regular(path, fds)
            with open(fd, "rb", closefd=False) as file:
                return file.read(nbytes)

    def name_of(self, path: str) -> str:
        """Return the name of a file, unique in the model."""
        return os.path.basename(path)

    def version_of(self, path: str) -> Version:
        """Return the present version of a file."""
        return version_of(os.stat(path))

    def versions(self) -> list[tuple[str, Version]]:
        """Return the absolute path and the version of each file, and of the index."""
        found = [(file.absolute_path, file.version) for file in self.files]
        if self.index is not None:
            found.append((self.absolute(self.index), self.version_of(self.index)))
        return found

    def check_versions(self) -> None:
        """Raise OSError (ESTALE) if a file was replaced or written to since it was opened."""
        for file, fd in zip(self.files, self.fds, strict=False):  # a buffer has no descriptor
            check_version(file, os.fstat(fd))
            check_version(file, os.stat(file.absolute_path))

    def close(self) -> None:
        """Close the descriptors."""
        self.fds.close()


def open_model(source: Source, part: FileRange | None = None) -> ModelFiles:
    """Open all files of a model, and read and check their headers.

    The source is the path of a GGUF file; of any part of a split one (``-00001-of-00003.gguf``),
    beside the other parts; of a safetensors file; or of the index of several. With a `part`, it may
    also be a descriptor or a buffer of one file. GGUFError and SafetensorsError say that a file
    breaks a rule of its format or belongs to another model, OSError that one is missing, unreadable
    or not a regular file.
    """
    model = ModelFiles()
    if part is None or (part == FileRange() and isinstance(source, (str, os.PathLike))):
        add_files(model, file_path(source))
    elif isinstance(source, int) and not isinstance(source, bool):
        fd = integer(source, "path", 0, _MOST_DESCRIPTORS)
        _add_one(model, lambda: model.add(f"/proc/self/fd/{fd}", part, fd))
    elif (memory := _memory_of(source)) is not None:
        _add_one(model, lambda: model.add_buffer(memory, part))
    else:
        name = file_path(source)
        _add_one(model, lambda: model.add(name, part))
    return model


def _memory_of(source: Any) -> memoryview | None:
    # Bytes may be a path. Headers of both formats begin with a number that has a zero byte.
    if isinstance(source, (str, os.PathLike)) or (isinstance(source, bytes) and 0 not in source):
        return None
    try:
        return memoryview(source).cast("B")
    except TypeError:
        raise TypeError(
            f"path: expected a path, a descriptor, or a buffer in one piece, got {source!r:.60}"
        ) from None


def _add_one(model: ModelFiles, add: Callable[[], ModelFile]) -> None:
    """Add the one file of a model; an error closes it."""
    try:
        file = add()
        if isinstance(file.header, GGUFHeader) and _split(file)[0] > 1:
            raise GGUFError("a part of a split model: give the path of a part", path=file.path)
    except BaseException:
        model.close()
        raise


def add_files(model: ModelFiles, path: str) -> None:
    """Open all files of a model, as `open_model` does; an error closes it."""
    try:
        if path.endswith(".index.json"):
            _add_indexed(model, path)
        else:
            first = model.add(path)
            if isinstance(first.header, GGUFHeader):
                _add_parts(model, first)
        _check_names_differ(model)
    except BaseException:
        model.close()
        raise


def durable_path(path: str) -> str:
    """Return an absolute path that leads to the same file in other processes, and later.

    A path through a descriptor, such as ``/dev/fd/3``, may lead to another file tomorrow: the
    file's own path replaces it, or if the file has no name, the path below this process's PID.
    """
    path = step = os.path.abspath(path)
    for _ in range(_MOST_LINKS):
        folder = os.path.realpath(os.path.dirname(step))
        step = os.path.join(folder, os.path.basename(step))
        if _DESCRIPTORS.fullmatch(folder):
            real = os.path.realpath(step)
            return real if _are_same(step, real) else step
        try:
            step = os.path.join(folder, os.readlink(step))
        except OSError:  # not a link
            break
    return path


def _are_same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def version_of(info: os.stat_result) -> Version:
    """Return a tuple that changes when a file is replaced or written to."""
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def identity_of(info: os.stat_result) -> Version:
    """Return the version and the time of the last change of the inode.

    That time changes with every write, and with a file's name, mode or owner. Programs can set the
    time of a write back, but not this one.
    """
    return (*version_of(info), info.st_ctime_ns)


def check_version(file: ModelFile, info: os.stat_result) -> None:
    """Raise OSError (ESTALE) if a file has another version than when it was opened."""
    if version_of(info) != file.version:
        text = "The file was replaced or written to after it was opened: open it again"
        raise OSError(errno.ESTALE, text, file.path)


def is_in_memory(fd: int) -> bool:
    """Return whether a file is in shared memory or hugetlbfs: only these have seals."""
    # Devices do not identify file systems: those of btrfs and overlayfs may be mounted nowhere.
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


@contextmanager
def reopen(file: ModelFile, flags: int = 0) -> Iterator[int]:
    """Open a model's file anew for reading, if it was neither replaced nor written to."""
    if file.memory is not None:
        text = "A buffer, and no file that could be read again: load='copy' makes a copy"
        raise OSError(errno.EINVAL, text, file.path)
    with _Descriptors() as fds:
        try:
            fd = fds.open(file.absolute_path, flags)
        except OSError as error:
            error.filename = file.path
            raise
        check_version(file, os.fstat(fd))
        yield fd


def _open_regular(
    path: str, fds: _Descriptors, copied: int | None = None
) -> tuple[int, os.stat_result]:
    try:
        fd = fds.open(path) if copied is None else fds.add(_copy_descriptor, copied, path)
    except FileNotFoundError:
        if not os.path.islink(path):
            raise
        text = f"The symbolic link leads to '{os.readlink(path)}', which does not exist"
        raise FileNotFoundError(errno.ENOENT, text, path) from None
    info = os.fstat(fd)
    if stat.S_ISDIR(info.st_mode):
        text = "A directory: give a model file in it, or its index"
        raise IsADirectoryError(errno.EISDIR, text, path)
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EINVAL, "Expected a regular file", path)
    return fd, info


def _copy_descriptor(fd: int, path: str) -> int:
    try:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
            raise OSError(errno.EBADF, "The descriptor is not open for reading")
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def read_header(source: int | memoryview, nbytes: int, path: str, begin: int = 0) -> Header:
    """Read and check the header of a file of either format, which has `nbytes` in all.

    `source` is a descriptor or a buffer, in which the file begins at byte `begin`.
    """
    # The first bytes decide: a name may be that of a descriptor, as in /proc/self/fd/3.
    try:
        if isinstance(source, int):
            head = os.pread(source, 9, begin)
        else:
            head = bytes(source[begin : begin + 9])
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    is_safetensors = path.endswith(".safetensors") or head[8:9] == b"{"
    if is_safetensors and head[:4] != b"GGUF":
        return SafetensorsHeader(source, nbytes, path, begin)
    return GGUFHeader(source, nbytes, path, begin)


def check_end(header: Header, end: int, path: str, fd: int = -1) -> None:
    """Raise GGUFError if a file that ends at byte `end` has bytes that nothing describes."""
    if not isinstance(header, GGUFHeader):  # a parser of safetensors has done it
        return
    is_empty = not any(nbytes for _, nbytes, _ in header.by_type().values())
    last = max(header.table_end, header.data_end) if is_empty else header.data_offset
    for offset, nbytes, _ in header.runs():
        if offset - last >= max(header.alignment, _PAGE):
            raise GGUFError("the bytes before a tensor are no tensor's", last, path)
        last = offset + nbytes
    if end - last >= max(header.alignment, 0 if fd < 0 else _huge_page_bytes(fd)):
        raise GGUFError("the file goes on behind its tensors", last, path)


def _huge_page_bytes(fd: int) -> int:
    """Return the page size of a file of hugetlb pages, which ends with a whole one; else 0."""
    nbytes = os.fstatvfs(fd).f_bsize
    return nbytes if nbytes > mmap.PAGESIZE and is_in_memory(fd) else 0


def _add_parts(model: ModelFiles, first: ModelFile) -> None:
    """Open the parts beside a part, if the model is split."""
    count, number = _split(first)
    if count == 1:
        return
    folder, name = os.path.split(first.path)
    match = _SPLIT_NAME.fullmatch(name)
    if match is None or (int(match["no"]), int(match["count"])) != (number + 1, count):
        raise GGUFError(
            f"split.no is {number} and split.count {count}, so that its name has to end with "
            f"-{number + 1:05}-of-{count:05}.gguf",
            path=first.path,
        )
    model.fds.close()
    model.files.clear()
    for i in range(count):
        path = os.path.join(folder, f"{match['stem']}-{i + 1:05}-of-{count:05}.gguf")
        try:
            part = model.add(path)
        except FileNotFoundError:
            text = f"Part {i + 1} of {count} of the model is missing"
            raise FileNotFoundError(errno.ENOENT, text, path) from None
        _check_part(model, part, i, count)
    total = _integer(model.files[0], "split.tensors.count")
    found = sum(len(file.header.tensor_names()) for file in model.files)
    if found != total:
        _refuse_part(first, f"split.tensors.count is {total}, the parts have {found} tensors")
    if found > _MOST_SPLIT_TENSORS:
        raise GGUFError(f"more than {_MOST_SPLIT_TENSORS} tensors in all parts", path=first.path)


def _check_part(model: ModelFiles, part: ModelFile, i: int, count: int) -> None:
    if _split(part) != (count, i):
        _refuse_part(part, f"split.count and split.no are {_split(part)}, expected {(count, i)}")
    first = model.files[0].header
    keys, firsts = part.header.keys(), first.keys()
    # Each part has these keys, or only those of the split.
    for key in ("split.tensors.count", "general.architecture", "general.name"):
        if key not in keys:
            continue
        own, other = (
            part.header.value(keys[key]),
            first.value(firsts[key]) if key in firsts else None,
        )
        if type(own) is not type(other) or not np.array_equal(np.asarray(own), np.asarray(other)):
            _refuse_part(part, f"its {key} is not that of the first part")


def _split(file: ModelFile) -> tuple[int, int]:
    """Return split.count and split.no; 1 and 0 for a model in one file."""
    has_count = "split.count" in file.header.keys()  # noqa: SIM118 - not a mapping
    count = _integer(file, "split.count") if has_count else 1
    return (count, _integer(file, "split.no")) if count > 1 else (1, 0)


def _integer(file: ModelFile, key: str) -> int:
    index = file.header.keys().get(key)
    value = None if index is None else file.header.value(index)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise GGUFError(f"a part of a split model needs an integer {key}", path=file.path)
    return value


def _refuse_part(part: ModelFile, why: str) -> NoReturn:
    raise GGUFError(f"a part of another model: {why}", path=part.path)


def _add_indexed(model: ModelFiles, path: str) -> None:
    model.index = path
    model.index_text = model.read_start(path, _INDEX_BYTES_MAX + 1)
    where = _read_index(path, model.index_text)
    for name, tensors in itertools.groupby(sorted(where, key=where.__getitem__), where.__getitem__):
        beside = model.beside(path, name)
        file = None
        try:
            file = model.add(beside)
        except FileNotFoundError:
            text = f"{path} names this file, which is missing"
            raise FileNotFoundError(errno.ENOENT, text, beside) from None
        except GGUFError:
            pass
        if file is None or isinstance(file.header, GGUFHeader):
            raise SafetensorsError("a file of the index is not safetensors", path=beside)
        has = set(file.header.tensor_names())
        wanted = set(tensors)
        for tensor in sorted(wanted ^ has)[:1]:
            side = "does not have" if tensor in wanted else "is not said to have"
            raise SafetensorsError(
                f"a file of another model: by {path}, it {side} the tensor {tensor!r}",
                path=file.path,
            )


def _read_index(path: str, text: bytes) -> dict[str, str]:
    """Return the name of each tensor's file."""
    if len(text) > _INDEX_BYTES_MAX:
        raise SafetensorsError("the index is longer than 32 MiB", path=path)
    try:
        index = json.loads(text.decode(), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise SafetensorsError(f"the index is not JSON: {error}", path=path) from None
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not where:
        raise SafetensorsError("the index has no weight_map from tensors to files", path=path)
    for name in where.values():
        # A name from the internet must not lead to another folder.
        if not isinstance(name, str) or not is_name(name):
            why = f"{name!r} is not the name of a file beside the index"
            raise SafetensorsError(why, path=path)
    return where


def is_name(name: str) -> bool:
    """Whether it is the name of a file in the same folder."""
    # JSON can have lone surrogates, which no file name has.
    is_text = not any("\ud800" <= char <= "\udfff" for char in name)
    return is_text and name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in an object")
    return found


def _check_names_differ(model: ModelFiles) -> None:
    if len(model.files) == 1:
        return
    seen: dict[str, str] = {}
    for file in model.files:
        kind = GGUFError if isinstance(file.header, GGUFHeader) else SafetensorsError
        for name in file.header.tensor_names():
            if name in seen:
                raise kind(f"the tensor '{name}' is in {seen[name]} already", path=file.path)
            seen[name] = file.path
