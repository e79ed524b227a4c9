"""Opened model files: metadata and tensors, without a copy."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from unimem._core.block import Block
from unimem._core.gguf import Header, tensor_type
from unimem.errors import ClosedError

if TYPE_CHECKING:
    from unimem.cuda.tape import Tape

__all__ = ["Tensor", "Value", "Weights", "open_weights"]

#: What a key of the metadata may hold.
Value: TypeAlias = Union[  # noqa: UP007 - it refers to itself, which "|" cannot before Python 3.12
    int, float, bool, str, NDArray[np.number[Any] | np.bool_], list[str], list["Value"]
]

# What ml_dtypes or NumPy can read, by ggml's name; all others are blocks of bytes.
_DTYPES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f64": "float64",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file: where it is and what it holds. Any number of threads may use it.

    Attributes
    ----------
    name : str
        As the file has it.
    shape : tuple of int
        In NumPy's order: the last dimension is contiguous.
    ne : tuple of int
        In ggml's order: the first dimension is contiguous. Empty for a scalar.
    type : str
        ggml's name, such as ``"f16"``, ``"q8_0"`` or ``"q4_K"``.
    ggml_type : int
        ggml's number of the type.
    nbytes : int
        Bytes of the data.
    offset : int
        Where the data begins in the file.
    """

    name: str
    shape: tuple[int, ...]
    ne: tuple[int, ...]
    type: str
    ggml_type: int
    nbytes: int
    offset: int
    _block: Block = field(repr=False, compare=False)

    @property
    def address(self) -> int:
        """Address of the first byte in this process; it never changes.

        Raises
        ------
        ClosedError
            The weights were closed.
        """
        return self._block.address + self.offset

    def as_array(self) -> NDArray[Any]:
        """View the data, without a copy.

        Returns
        -------
        numpy.ndarray
            Read-only, and keeping the mapping alive. Of `shape` and the type's dtype where NumPy or
            ml_dtypes has it (f32, f16, bf16, f64, i8, i16, i32, i64); else uint8, with the bytes of
            a row as the last dimension.

        Raises
        ------
        ClosedError
            The weights were closed.
        """
        dtype, shape = self._as_in_arrays()
        return self._block.as_array(dtype, shape, self.offset)

    def _as_in_arrays(self) -> tuple[str, tuple[int, ...]]:
        """Return the dtype and shape of arrays over the data."""
        dtype = _DTYPES.get(self.type)
        if dtype is not None:
            return dtype, self.shape
        _, block_values, block_bytes = tensor_type(self.ggml_type)
        return "uint8", (*self.shape[:-1], self.ne[0] // block_values * block_bytes)


def version_of(info: os.stat_result) -> tuple[int, ...]:
    """Return what stays the same as long as a file is neither replaced nor written to."""
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


class _Metadata(Mapping[str, Value]):
    def __init__(self, header: Header) -> None:
        self._header = header
        self._keys = header.keys()

    def __getitem__(self, key: str) -> Value:
        return self._header.value(self._keys[key])

    def __contains__(self, key: object) -> bool:
        return key in self._keys  # without decoding the value, as Mapping would

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<metadata: {len(self)} keys>"


class _Tensors(Mapping[str, Tensor]):
    def __init__(self, header: Header, block: Block) -> None:
        self._header = header
        self._block = block
        self._names = header.tensor_names()

    def __getitem__(self, name: str) -> Tensor:
        ne, kind, number, offset, nbytes = self._header.tensor(self._names[name])
        return Tensor(name, ne[::-1], ne, kind, number, nbytes, offset, self._block)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<tensors: {len(self)}>"


class Weights:
    """An opened model file, mapped read-only. Made by `open_weights`.

    Any number of threads may read; closing is for one. After a fork the child has the mapping too.
    Leaving a ``with`` closes it to new use, and the memory returns with the last view.
    """

    def __init__(self, header: Header, block: Block, path: str, info: os.stat_result) -> None:
        self._header: Header | None = header
        self._block = block
        self._metadata = _Metadata(header)
        self._tensors = _Tensors(header, block)
        self._path = path
        self._version = version_of(info)

    def _opened(self) -> Header:
        if self._header is None:
            raise ClosedError(f"Weights '{self._path}' are closed")
        return self._header

    @property
    def metadata(self) -> Mapping[str, Value]:
        """The file's metadata, in its order, read-only.

        A value is decoded each time it is asked for: keep what you use more than once. Arrays of
        numbers are read-only arrays, arrays of strings are lists, arrays of arrays are lists of
        these. Bytes of a string that are not UTF-8 become lone surrogates, and
        ``text.encode("utf-8", "surrogateescape")`` gives them back.
        """
        self._opened()
        return self._metadata

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The file's tensors by name, in its order, read-only."""
        self._opened()
        return self._tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.by_type().values())

    def by_type(self) -> dict[str, int]:
        """Bytes of all tensors of a type, by ggml's name of the type."""
        return self._opened().bytes_by_type()

    @property
    def files(self) -> tuple[str, ...]:
        """The paths that were opened."""
        return (self._path,)

    @property
    def block(self) -> Block:
        """The mapping of the whole file."""
        self._opened()
        return self._block

    @property
    def mapped_bytes(self) -> int:
        """Bytes that are mapped: the whole file, header and padding included."""
        return self.block.nbytes

    @property
    def fingerprint(self) -> str:
        """A hash of the header, the tensor table and the file's size; tensor data is not read."""
        return self._opened().fingerprint()

    def to_device(
        self,
        tape: Tape,
        *,
        progress: Callable[[int, int], object] | None = None,
        threads: int | None = None,
        staging_bytes: int | None = None,
        stream: Any = None,
    ) -> dict[str, Any]:
        """Bring the tensors to a GPU.

        Threads read the file into pinned memory, while what was read before is copied to the
        device. The file is opened anew, and the mapping is not touched.

        Parameters
        ----------
        tape : unimem.cuda.Tape
            What the memory is taken from: the bytes of the file from its first tensor to its last,
            at a multiple of 256 bytes.
        progress : callable, optional
            Called with the bytes that are on their way and all bytes, in this thread, at most 20
            times a second; when all are there, once with both the same.
        threads : int, optional
            That read, at most 16 of them: by default what the process may use, at most 12.
        staging_bytes : int, optional
            Pinned memory, given back at the end: 32 MiB by default. A small file takes less.
        stream : object, optional
            By default CuPy's current stream. What was queued in it before is waited for, since it
            may use the memory that is taken.

        Returns
        -------
        dict of str to cupy.ndarray
            The tensors by name, in the order of the file, of the dtypes and shapes that
            `Tensor.as_array` has. They are there when this returns: any stream may use them.

        Raises
        ------
        TapeFull
            The tape has no room; nothing was read.
        OSError
            The file cannot be read, or was replaced or written to since it was opened.
        TypeError, ValueError
            No tape of a GPU, no stream, fewer than 1 thread, too little pinned memory.
        MemoryError, PlacementError
            There is no pinned memory.
        ImportError
            CuPy or a device is missing.
        ClosedError, FrozenError
            The weights or the tape were closed, or the tape is frozen.

        Notes
        -----
        Whatever is raised, also by `progress` or by an interrupt: no thread is left, nothing is
        being copied any more, and the tape is as before, unless others took from it meanwhile.

        Examples
        --------
        Of the size of the file, a tape has room for all tensors::

            with um.open_weights("model.gguf") as w, cuda.Tape(w.mapped_bytes) as tape:
                arrays = w.to_device(tape)
        """
        from unimem.cuda import upload

        return upload.to_device(
            self,
            tape,
            progress=progress,
            threads=threads,
            staging_bytes=staging_bytes,
            stream=stream,
        )

    @property
    def closed(self) -> bool:
        """Whether the weights were closed."""
        return self._header is None

    def close(self) -> None:
        """Unmap the file. Closing twice is no error.

        Raises
        ------
        BufferError
            Arrays over tensors, or a layout, still use it; nothing is closed then.
        """
        self._block.close()
        self._header = None

    def __enter__(self) -> Self:
        self._opened()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._block.__exit__(kind, error, trace)
        self._header = None

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("Weights cannot be pickled: open the file in the other process")

    def __repr__(self) -> str:
        if self._header is None:
            return f"Weights('{self._path}', closed)"
        types = ", ".join(f"{name} {nbytes:,}" for name, nbytes in self.by_type().items())
        return f"Weights('{self._path}', {len(self._tensors)} tensors, bytes: {types or 0})"


def open_weights(path: str | os.PathLike[str], *, load: Literal["auto", "map"] = "auto") -> Weights:
    """Open a GGUF file: read and check its header, map the rest.

    Nothing but the header is read, and that by reads, so that a file which is truncated meanwhile
    raises. Tensor data comes from the page cache when it is touched; whoever truncates the file
    then ends the process that touches it (SIGBUS).

    Parameters
    ----------
    path : path-like
        A regular file, GGUF version 2 or 3, little-endian.
    load : {"auto", "map"}
        How tensor data comes to memory: ``"map"`` maps the file; ``"auto"`` is the same so far.

    Returns
    -------
    Weights

    Raises
    ------
    GGUFError
        The file breaks a rule of the format: `rule`, `offset` and `path` say which and where.
    OSError
        The file cannot be opened, read or mapped, or is not a regular file.
    ValueError
        An unknown way to load.
    """
    if load not in ("auto", "map"):
        raise ValueError(f"load: expected 'auto' or 'map', got {load!r}")
    name = os.fspath(path)
    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        info = os.fstat(fd)
        if stat.S_ISDIR(info.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "Expected a regular file", name)
        header = Header(fd, info.st_size, name)
        try:
            block = Block._map_fd(fd, 0, info.st_size, "r", name)
        except ValueError:  # the range was inside the file when its header was read
            raise OSError(errno.EIO, "The file has become shorter", name) from None
    finally:
        os.close(fd)
    return Weights(header, block, name, info)
