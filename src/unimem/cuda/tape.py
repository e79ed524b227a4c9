"""Tapes of device memory."""

from __future__ import annotations

from typing import Any, Unpack

from unimem._core.arrays import checked_nbytes
from unimem._core.block import Block as HostBlock
from unimem._core.tape import DeviceTape
from unimem.base.arguments import string
from unimem.cuda import upload
from unimem.cuda.block import LEFT_OUT, Block, refuse_placement
from unimem.system.placement import PlacementOptions
from unimem.weights.tensors import Contents


class Tape(DeviceTape):
    """A bump allocator over device memory: `unimem.Tape`, with CuPy arrays.

    Taken memory is not initialised, as with ``cupy.empty``, and becomes invalid with `clear` or
    `rewind`: the next taker at the same place gets the same memory, and for the same shape and
    dtype the same array object. Queued kernels still use it: a taker on another stream must wait
    for them, as for any reused buffer. With ``UNIMEM_DEBUG=1`` in the environment, memory is
    overwritten when it becomes invalid, on CuPy's current stream.

    Any number of threads may take at the same time; one clears or rewinds. A forked child has none
    of the memory, and ClosedError says so there.

    Parameters
    ----------
    nbytes_or_block : int, str or Block
        A size in bytes or such as ``"64M"``, for a block of the tape's own, or a
        `cuda.Block` (all of it).
    name : str, optional
        For messages.
    category : str, default "scratch"
        As for `cuda.Block`; only with a size.
    device, pinned, **placement
        As for `cuda.Block`; only with a size.

    Raises
    ------
    CapacityError
        The device has no room.
    ValueError, TypeError, MemoryError, PlacementError, NotImplementedError
        As `cuda.Block`.

    Examples
    --------
    >>> from unimem import cuda
    >>> with cuda.Tape(1 << 20) as tape:
    ...     x = tape.take((2, 3), "float16")
    ...     tape.clear()
    ...     x is tape.take((2, 3), "float16")
    True
    """

    def __init__(
        self,
        nbytes_or_block: int | str | Block,
        *,
        name: str | None = None,
        category: str = "scratch",
        device: int = 0,
        pinned: bool = False,
        **placement: Unpack[PlacementOptions],
    ) -> None:
        if isinstance(nbytes_or_block, HostBlock):
            raise TypeError(
                "expected a size in bytes or a cuda.Block, got a unimem.Block, which is in main "
                "memory: cuda.Tape(nbytes, pinned=True) is there too, and the GPU sees it"
            )
        owns_block = not isinstance(nbytes_or_block, Block)
        if isinstance(nbytes_or_block, Block):
            refuse_placement("block", nbytes_or_block.device, device, pinned, placement)
            block, total = nbytes_or_block, nbytes_or_block.nbytes
        else:
            name = string(name, "name", "tape")
            # A pinned block is rounded up to pages; the tape has exactly this size.
            total = checked_nbytes(nbytes_or_block, f"nbytes_or_block of Tape '{name}'", 1)
            block = Block(
                total, device=device, pinned=pinned, name=name, category=category, **placement
            )
            block._is_part = True
        super().__init__(
            string(name, "name", block.name), block, total, LEFT_OUT, owns_block=owns_block
        )
        self._driver = block._driver

    def _new_array(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        return self._driver.array(self._memory, offset, shape, dtype)

    def _overwrite(self, address: int, nbytes: int) -> None:
        self._driver.fill(address, 0xDB, nbytes, self._driver.stream())

    def _address_of(self, thing: Any) -> Any:
        return thing.data.ptr if self._driver.is_array(thing) else thing

    def _upload(self, weights: Contents, **options: Any) -> dict[str, Any]:
        return upload.to_device(weights, self, self._driver, **options)

    def _where(self) -> str:
        return "its block closed" if self.block.closed else str(self.block.granted)

    def warm(self, threads: int | None = None) -> None:
        """Do nothing: device memory and pinned memory are always resident."""
        self.block.warm(threads)
