"""Named arrays over one range of a tape: the common part of all sets of buffers, on any device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from unimem._core import ledger
from unimem._core.dlpack import exported
from unimem.base.text import format_bytes
from unimem.errors import ClosedError
from unimem.models.dims import ModelDims

ALIGN = 256
"""The alignment of a set of buffers, and the largest alignment of one buffer, in bytes."""

_MOST_BYTES = 2**63 - 1
# All other buffers are scratch.
_CATEGORIES = {"logits": "logits"} | dict.fromkeys(
    ("batched_k_ptrs", "batched_v_ptrs", "batched_kv_lens", "batched_positions"), "tokens"
)
# The places of names after an odd number of swaps.
_SWAPPED = {"residual": "post_norm_residual", "post_norm_residual": "residual"}


@dataclass(frozen=True, slots=True)
class Spec:
    """The contents of one buffer: `rows` arrays of a shape, or a single one if `rows` is None."""

    rows: int | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def row_values(self) -> int:
        """Values of a row."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return (1 if self.rows is None else self.rows) * self.row_values * self.dtype.itemsize


def pack(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return offsets of buffers one behind the other, without padding, in the order of `sizes`.

    Each begins at a multiple of the largest power of two, up to `ALIGN`, that divides its size.
    They lie in descending order of that power, so all buffers before one have sizes that are
    multiples of its power, and no padding is needed.
    """
    offsets = dict.fromkeys(sizes, 0)
    end = 0
    for name in sorted(sizes, key=lambda name: -min(sizes[name] & -sizes[name], ALIGN)):
        offsets[name] = end
        end += sizes[name]
    return offsets


def total_bytes(what: str, sizes: Mapping[str, int]) -> int:
    """Add up sizes, or raise ValueError, with the largest, if addresses do not suffice."""
    total = sum(sizes.values())
    if total > _MOST_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        parts = ", ".join(f"{name} {sizes[name]}" for name in largest)
        raise ValueError(
            f"{what} for these dimensions are {total} bytes ({parts}, ...), but a size must be "
            "below 2**63"
        )
    return total


class BufferRange:
    """A range of a tape and the place of each buffer in it: the whole state of a set.

    Arrays and all else follow from it, and can be dropped and made again at any time. So an
    interrupt leaves no inconsistent state.
    """

    def __init__(
        self, specs: dict[str, Spec], offsets: dict[str, int], tape: Any, taken: Any, address: int
    ) -> None:
        self.specs = specs
        self.offsets = offsets
        self.tape = tape
        self.taken: Any = taken
        self.address = address
        self.nbytes = int(taken.nbytes)
        self.is_swapped = False
        self.is_closed = False

    def place(self, name: str) -> str:
        """Return the original name of the place that a name has now."""
        return _SWAPPED.get(name, name) if self.is_swapped else name

    def array(self, place: str) -> Any:
        """Make the flat array of a place."""
        self.tape.mark()  # raises if the tape is gone, as in a forked child
        if self.taken is None:  # closing was refused
            block = self.tape.block
            self.taken = block.as_array("uint8", self.nbytes, self.address - block.address)
        spec, offset = self.specs[place], self.offsets[place]
        return exported(self.taken[offset : offset + spec.nbytes].view(spec.dtype))


def refuse_pickling(thing: object) -> NoReturn:
    """Raise TypeError for buffers that are to be pickled."""
    raise TypeError(
        f"a {type(thing).__name__} cannot be pickled: it is memory of this process. Pickle its "
        "dims, and make it anew"
    )


class BufferSet:
    """Named arrays over one range of a tape, which are its attributes until it is closed."""

    name: str = ""
    dims: ModelDims
    tape: Any
    _range: BufferRange | None = None
    _owns_tape = False
    _is_begun = False

    def _begin(self, dims: ModelDims, name: str) -> None:
        # A flag that is set first: an argument's own code may call the constructor again.
        if self._is_begun:
            raise RuntimeError(f"the {type(self).__name__} is made already")
        self._is_begun = True
        self.name = name
        self.dims = check_dims(dims)

    def _take(
        self, tape: Any, specs: dict[str, Spec], offsets: dict[str, int], nbytes: int
    ) -> None:
        """Take the range, and make the arrays over it."""
        taken = tape.take_bytes(nbytes, align=ALIGN)
        self.tape = tape
        self._range = BufferRange(specs, offsets, tape, taken, self._address_of(taken))
        for place in specs:
            self._array(place)

    def _array(self, place: str) -> Any:
        """Return the array of a place, which is made once."""
        found = self.__dict__.get(place)
        if found is None:
            found = self.__dict__[place] = self._opened().array(place)
        return found

    def _opened(self) -> BufferRange:
        if self._range is None or self._range.is_closed:
            raise ClosedError(f"{type(self).__name__} '{self.name}' is closed")
        return self._range

    if not TYPE_CHECKING:  # a type checker would take it for every name

        def __getattr__(self, name):
            # Python calls this for missing attributes only.
            if self._range is not None and name in self._range.specs:
                return self._array(name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @staticmethod
    def _address_of(array: Any) -> int:
        return int(array.ctypes.data)

    def _enter(self) -> None:
        """Enter buffers of main memory in the ledger."""
        ledger.enter(self, ledger.sizes_of(self._ledger_parts()[1:]))

    def _ledger_is_open(self) -> bool:
        buffers = self._range
        if buffers is None or buffers.is_closed:
            return False
        return bool(self.tape._holds(buffers.address, buffers.nbytes))

    def _ledger_parts(self) -> list[ledger.Part]:
        buffers = self._range
        if buffers is None or not self._ledger_is_open():
            return []
        first, nbytes = buffers.address, buffers.nbytes
        parts = [ledger.Part("scratch", first, nbytes, nbytes, nbytes)]
        for name in _CATEGORIES.keys() & buffers.specs.keys():
            at, size = first + buffers.offsets[name], buffers.specs[name].nbytes
            parts.append(ledger.Part(_CATEGORIES[name], at, size, size, size))
        return parts

    def _check_open(self) -> BufferRange:
        opened = self._opened()
        self.tape.mark()  # raises if the tape is gone, as in a forked child
        return opened

    def addresses(self) -> dict[str, int]:
        """Return the address of each buffer's first byte, by name."""
        opened = self._check_open()
        return {name: opened.address + opened.offsets[opened.place(name)] for name in opened.specs}

    @property
    def closed(self) -> bool:
        """Whether the buffers, or the tape under them, were closed."""
        return self._range is None or self._range.is_closed or bool(self.tape.closed)

    def close(self) -> None:
        """Close the buffers; memory of their own is given back. Closing twice is no error.

        Raises
        ------
        BufferError
            Views still use memory of their own; they stay open.
        """
        if self._range is not None and not self._range.is_closed:
            self._drop()  # else they would count as views
            if self._owns_tape:
                self.tape.close()
            self._range.is_closed = True

    def _drop(self) -> None:
        """Drop the arrays, which are made again on demand."""
        if self._range is not None:
            for place in self._range.specs:
                self.__dict__.pop(place, None)
            self._range.taken = None

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        # Live views keep the memory until the last of them goes.
        if self._range is not None:
            self._drop()
            if self._owns_tape:
                self.tape.__exit__()
            self._range.is_closed = True

    def __reduce__(self) -> NoReturn:
        refuse_pickling(self)

    def _figures(self) -> str:
        return format_bytes(self._opened().nbytes)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._figures()}, {self.tape!r}"
        return f"{type(self).__name__}('{self.name}', {state})"


def check_dims(dims: ModelDims) -> ModelDims:
    """Return dimensions, and refuse any other type."""
    if not isinstance(dims, ModelDims):
        raise TypeError(f"dims: expected ModelDims, got {type(dims).__name__}")
    return dims
