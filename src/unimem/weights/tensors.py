"""Tensors and metadata of a model, from the headers of its files."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from operator import add
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from unimem._core.arrays import as_dtype
from unimem._core.dlpack import exported
from unimem.weights.files import ModelFile, ModelFiles, Value
from unimem.weights.gguf import tensor_type
from unimem.weights.loading import LoadMemory, unloaded_memory
from unimem.weights.names import ByName
from unimem.weights.stream.piece_table import TensorPlace
from unimem.weights.stream.stream import Stream

# The dtypes that NumPy or ml_dtypes has, by the type's name; other types are blocks of bytes.
_DTYPES = dict(
    pair.split("=")
    for pair in """
        f32=float32 f16=float16 bf16=bfloat16 f64=float64 i8=int8 i16=int16 i32=int32 i64=int64
        u8=uint8 u16=uint16 u32=uint32 u64=uint64 bool=bool c64=complex64
        f8_e4m3=float8_e4m3fn f8_e5m2=float8_e5m2 f8_e8m0=float8_e8m0fnu
        f8_e4m3fnuz=float8_e4m3fnuz f8_e5m2fnuz=float8_e5m2fnuz
    """.split()
)


class ModelPart(NamedTuple):
    """One file of a model, and the place of its data.

    For a streamed model, `kept` are the ranges of the file that stay in memory, by their offsets.
    """

    file: ModelFile
    memory: LoadMemory
    kept: tuple[LoadMemory, ...] = ()

    def memory_at(self, offset: int) -> LoadMemory:
        """Return the place of the data at an offset of the file."""
        if not self.kept:
            return self.memory
        i = bisect_right(self.kept, offset, key=lambda one: one.file_offset)
        return self.kept[max(i - 1, 0)]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a model. Any number of threads may use it.

    Attributes
    ----------
    name : str
        The name in the file.
    shape : tuple of int
        In NumPy's order: the last dimension is contiguous.
    ne : tuple of int
        In ggml's order: the first dimension is contiguous. Empty for a scalar.
    type : str
        ggml's name, such as ``"f16"``, ``"q8_0"`` or ``"q4_K"``; if ggml has no such type, the name
        of safetensors in lower case, such as ``"f8_e4m3"``, or in GGUF the number, as in
        ``"type_156"``.
    ggml_type : int or None
        The number in a GGUF file, or ggml's number of the type, if it has one.
    nbytes : int
        Bytes of the data; for an unknown type, up to the next tensor or the end of the file.
    offset : int
        Where the data begins in the file.
    file : str
        The path of the file.
    """

    name: str
    shape: tuple[int, ...]
    ne: tuple[int, ...]
    type: str
    ggml_type: int | None
    nbytes: int
    offset: int
    file: str
    _memory: LoadMemory = field(repr=False, compare=False)

    @property
    def address(self) -> int:
        """Address of the first byte in this process; it never changes.

        Raises
        ------
        ClosedError
            The weights were closed, or their tape took the memory back.
        """
        self._memory.lifetime.check()
        return self._memory.block.address + self._block_offset

    @property
    def _block_offset(self) -> int:
        return self._memory.block_offset + self.offset - self._memory.file_offset

    def as_array(self) -> NDArray[Any]:
        """View the data, without a copy.

        Returns
        -------
        numpy.ndarray
            A read-only array that keeps the memory alive, with `shape` and the type's dtype if
            NumPy or ml_dtypes has it (see docs/gguf.md and docs/safetensors.md). Otherwise uint8,
            with the bytes of a row as the last dimension, or one-dimensional if rows are not whole
            bytes. A tensor of a safetensors file may be unaligned; NumPy reads it.

        Raises
        ------
        ClosedError
            The weights were closed, or their tape took the memory back.
        """
        self._memory.lifetime.check()
        dtype, shape = self._array_layout()
        block, at = self._memory.block, self._block_offset
        if at % dtype.alignment == 0:
            array = block.as_array(dtype, shape, at)
        else:
            raw = block.as_array("uint8", (self.nbytes,), at)
            raw.flags.writeable = False
            array = exported(raw.view(dtype).reshape(shape))
        array.flags.writeable = False  # a copy in memory could be written
        return array

    def _array_layout(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return the dtype and shape of `as_array`."""
        name = _DTYPES.get(self.type)
        if name is not None:
            return as_dtype(name), self.shape
        n_rows, row_bytes = prod(self.shape[:-1]), 0
        if self.ggml_type is None:  # a packed type of safetensors
            row_bytes = 0 if n_rows == 0 else self.nbytes // n_rows
        else:
            with suppress(ValueError):  # the bytes of an unknown type may end with padding
                _, block_values, block_bytes = tensor_type(self.ggml_type)
                row_bytes = self.ne[0] // block_values * block_bytes
        if row_bytes * n_rows != self.nbytes or (n_rows == 0 and self.ggml_type is None):
            return np.dtype(np.uint8), (self.nbytes,)
        return np.dtype(np.uint8), (*self.shape[:-1], row_bytes)

    def __array__(
        self, dtype: np.dtype[Any] | None = None, copy: bool | None = None
    ) -> NDArray[Any]:
        """Return `as_array` for ``numpy.asarray``.

        Raises
        ------
        TypeError
            NumPy has no such type, so its bytes cannot be converted: `dequantize` gives float32.
        ValueError
            ``copy=False`` with another `dtype`.
        """
        array = self.as_array()
        wanted = array.dtype if dtype is None else np.dtype(dtype)
        if self.type not in _DTYPES and wanted != array.dtype:
            raise TypeError(
                f"tensor '{self.name}': NumPy has no type {self.type}, whose bytes are no numbers: "
                f"expected dtype uint8, got {wanted}: dequantize() gives float32"
            )
        if copy is False and wanted != array.dtype:
            raise ValueError(
                f"tensor '{self.name}': expected dtype {array.dtype} without a copy, got {wanted}"
            )
        return array if not copy and wanted == array.dtype else array.astype(wanted)

    def __copy__(self) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled: its data is memory of this process. Open "
            "the file in the other process"
        )

    def __dlpack__(self, **options: Any) -> Any:
        return self.as_array().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.as_array().__dlpack_device__()

    def dequantize(self, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Convert the data to float32.

        Parameters
        ----------
        out : numpy.ndarray, optional
            A contiguous float32 array of `shape` to write to, for example of a tape; by default a
            new one.

        Returns
        -------
        numpy.ndarray
            `out`, or a new float32 array of `shape`. ggml converts blocks if unimem-ggml is
            installed, else gguf-py; NumPy and ml_dtypes convert numbers.

        Raises
        ------
        OSError
            The mapped file has become shorter.
        NotImplementedError
            No installed library converts the type.
        ClosedError
            The weights were closed.
        TypeError, ValueError
            `out` is no such array.
        """
        from unimem.weights.dequantize import dequantize

        if out is None:
            out = np.empty(self.shape, np.float32)
        elif not isinstance(out, np.ndarray):
            raise TypeError(f"out: expected a NumPy array, got {type(out).__name__}")
        elif out.dtype != np.float32 or out.shape != self.shape or not out.flags.carray:
            raise ValueError(
                f"out: expected a writable, contiguous float32 array of {self.shape}, got "
                f"{out.dtype} of {out.shape}"
            )
        dequantize(self.as_array(), self.type, self.ggml_type, out, name=self.name, path=self.file)
        return out


@dataclass(frozen=True, slots=True)
class StreamedTensor(Tensor):
    """A tensor of a streamed model whose pieces are in memory only when they are asked for.

    A piece is one routed expert with all of its tensors: `ensure` of one of them brings all. In a
    model without experts, a piece is a whole block, and `n_pieces` is 1. The facts are those of the
    whole tensor in the file, which is nowhere in memory: `as_array` and `address` raise ValueError.
    Any number of threads may use it.
    """

    _stream: Stream = field(repr=False, compare=False)
    _place: TensorPlace = field(repr=False, compare=False)

    @property
    def n_pieces(self) -> int:
        """The number of pieces, such as experts of this block."""
        return self._place.n

    @property
    def piece_bytes(self) -> int:
        """Bytes of one piece: of all tensors that come with it."""
        return self._stream._table.kinds[self._place.kind].piece_bytes

    @property
    def pool(self) -> NDArray[Any]:
        """View the slots, without a copy.

        Returns
        -------
        numpy.ndarray
            Read-only, with a slot for each first index: behind it the dtype and the shape of one
            piece as in `Tensor.as_array`. What a slot holds changes with each `ensure`. It shows
            the slots of now: take it anew after `Stream.resize`, and after a prompt of a decoder
            over the same weights, which may move slots; slots that went read as zeros.

        Raises
        ------
        ClosedError
            The weights were closed.
        """
        self._memory.lifetime.check()
        dtype, shape = self._array_layout()
        return self._stream._view(self._place, dtype, shape[1:] if self._is_expert else shape)

    @property
    def _is_expert(self) -> bool:
        return self._stream._table.has_experts

    def ensure(self, ids: Any) -> NDArray[np.int32]:
        """Bring pieces into memory, and say in which slots they are.

        What is missing is read from the disk at once, past the page cache; this returns when all
        are there. They stay until the same thread's next `ensure` of any tensor of the model.

        Parameters
        ----------
        ids : array-like of int
            Numbers of pieces, of any shape; they may repeat.

        Returns
        -------
        numpy.ndarray
            int32 of the same shape: the slots in `pool`, the same for all tensors of the piece.

        Raises
        ------
        CapacityError
            More pieces at once than there are slots.
        OSError
            A file cannot be read, became shorter, or was written to.
        TypeError, ValueError
            They are not integers, or there is no such piece.
        ClosedError
            The weights were closed.
        """
        self._memory.lifetime.check()
        return self._stream._ensure(self._place, ids, self.name)

    def prefetch(self, ids: Any) -> None:
        """Begin to read pieces that will be asked for; `ensure` waits for the rest.

        Parameters
        ----------
        ids : array-like of int
            As for `ensure`. Pieces for which there is no free or old slot are left out.
        """
        self._memory.lifetime.check()
        self._stream._prefetch(self._place, ids, self.name)

    @property
    def address(self) -> int:
        """Not known: raise ValueError."""
        raise self._nowhere()

    def as_array(self) -> NDArray[Any]:
        """Raise ValueError: the tensor is not in memory as a whole."""
        raise self._nowhere()

    def _nowhere(self) -> ValueError:
        return ValueError(
            f"tensor '{self.name}' is streamed, and not in memory as a whole: `pool` has its "
            "pieces, in the slots that ensure(ids) returns"
        )


class _TensorsByName:
    """The tensors of all parts, by an index that counts through them."""

    def __init__(self, parts: tuple[ModelPart, ...], stream: Stream | None) -> None:
        self._parts, self._stream = parts, stream
        counts = (len(part.file.header.tensor_names()) for part in parts)
        *self._firsts, self._n = accumulate(counts, initial=0)

    def by_name(self) -> ByName[Tensor]:
        return ByName(self._n, self._name_at, self._tensor_at, "model's", "tensors")

    def _place(self, index: int) -> tuple[ModelPart, int]:
        i = bisect_right(self._firsts, index) - 1
        return self._parts[i], index - self._firsts[i]

    def _name_at(self, index: int) -> str:
        part, row = self._place(index)
        return part.file.header.name_at(row)

    def _tensor_at(self, index: int, name: str) -> Tensor:
        part, row = self._place(index)
        ne, kind, number, offset, nbytes = part.file.header.tensor(row)
        facts = name, ne[::-1], ne, kind, number, nbytes, offset, part.file.path
        streamed = None if self._stream is None else self._stream._table.places.get(name)
        if self._stream is None or streamed is None:
            return Tensor(*facts, part.memory_at(offset))
        return StreamedTensor(*facts, part.memory, self._stream, streamed)


class Contents(Mapping[str, Tensor]):
    """The metadata and tensors of a model, by name. Any number of threads may read it."""

    def __init__(self, parts: tuple[ModelPart, ...], stream: Stream | None = None) -> None:
        self._parts, self._stream = parts, stream
        # The first part of a split model has the metadata of all.
        header = parts[0].file.header
        self._metadata: ByName[Value] = ByName(
            len(header.keys()), header.key_at, lambda i, _: header.value(i), "metadata's", "keys"
        )
        self._tensors = _TensorsByName(parts, stream).by_name()
        self._types: dict[str, list[int]] = {}  # tensors, bytes and values
        for part in parts:
            for kind, total in part.file.header.by_type().items():
                self._types[kind] = list(map(add, self._types.get(kind, (0, 0, 0)), total))

    def _check_open(self) -> None:
        """Raise ClosedError if it was closed."""

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    # A model is equal to itself alone, and true even without tensors.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return True

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of the model's files: for a split model, of all parts."""
        return tuple(part.file.path for part in self._parts)

    @property
    def metadata(self) -> Mapping[str, Value]:
        """The file's metadata, in its order, read-only.

        Each access decodes the value: keep what you use more than once. Arrays of numbers are
        read-only arrays, arrays of strings are lists, arrays of arrays are lists of these. Bytes of
        a string that are not UTF-8 become lone surrogates, and
        ``text.encode("utf-8", "surrogateescape")`` restores them.
        """
        self._check_open()
        return self._metadata

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The model's tensors by name, in the order of its files, read-only."""
        self._check_open()
        return self._tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.by_type().values())

    @property
    def fingerprint(self) -> str:
        """A hash of the headers, the tensor tables and the files' sizes; data is not read."""
        self._check_open()
        prints = [part.file.header.fingerprint() for part in self._parts]
        if len(prints) == 1:
            return prints[0]
        return hashlib.blake2b("".join(prints).encode(), digest_size=16).hexdigest()

    def by_type(self) -> dict[str, int]:
        """Bytes of all tensors of a type, by the type's name."""
        self._check_open()
        return {kind: nbytes for kind, (_, nbytes, _) in self._types.items()}


def headers_of(model: ModelFiles) -> Contents:
    """Return the contents of opened files without their data."""
    return Contents(tuple(map(ModelPart, model.files, unloaded_memory(model))))
