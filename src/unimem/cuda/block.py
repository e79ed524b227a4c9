"""Blocks of device memory, and of host memory that the GPU sees."""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn, Self, Unpack

from unimem._core.arrays import array_within, checked_nbytes
from unimem._core.block import Block as HostBlock
from unimem._core.status import DeviceEntry, device_bytes, row_name
from unimem.backends import cuda_driver
from unimem.base.arguments import flag, string
from unimem.base.text import format_bytes
from unimem.errors import ClosedError
from unimem.system.placement import Placement, PlacementOptions, check_placement

CAPABILITIES: dict[str, bool] = {
    "advise": False,
    "append at a row in device memory": True,
    "attach": False,
    "collapse": False,
    "commit": False,
    "enforce_memory_limit": False,
    "fewer bits": False,
    "fileno": False,
    "grow": False,
    "layers that differ": False,
    "map": False,
    "placement": False,
    "release": False,
    "repair": False,
    "restore by mapping": False,
    "ring": False,
    "rotation": False,
    "rows by head": True,
    "sealed_copy": False,
    "states": False,
}
"""The differences to the CPU side. Features that are False raise NotImplementedError, and nothing
else does. Pinned memory can be placed; a cache's `enforce_memory_limit` raises only if it would
have to give memory back."""


LEFT_OUT = (
    "is memory of a GPU, which a forked child does not have: start the child by spawn, and make "
    "it there"
)


def unsupported(capability: str, what: str, instead: str) -> NoReturn:
    """Raise NotImplementedError for a capability that a device lacks, and name an alternative."""
    assert not CAPABILITIES[capability]
    raise NotImplementedError(f"{what} is not supported on a GPU: {instead}")


def set_budget(nbytes: int | str | None, *, device: int = 0) -> None:
    """Limit the device memory that unimem takes in this process.

    Blocks, and all that is made of them, raise CapacityError instead of exceeding it; `plan` and
    `Layout.for_model` count with what is left of it. Memory that CuPy, torch and CUDA take
    themselves does not count, nor pinned memory. Threads that allocate at once may exceed it by
    one of their blocks.

    Parameters
    ----------
    nbytes : int, str or None
        The limit in bytes, or such as ``"40G"``; None: what the device has.
    device : int, default 0
        CUDA's number of the GPU.

    Raises
    ------
    TypeError, ValueError
        A wrong size or device.
    ClosedError
        The parent of this forked process used CUDA.
    """
    limit = None if nbytes is None else checked_nbytes(nbytes, "nbytes", 1)
    cuda_driver.driver(device).budget_bytes = limit


def refuse_placement(
    what: str, placed_device: int, device: int, pinned: bool, placement: Mapping[str, Any]
) -> None:
    """Raise ValueError for options of memory beside a placed block or tape (`what`)."""
    given = {"device": device not in (0, placed_device), "pinned": pinned}
    refused = [*(option for option, is_given in given.items() if is_given), *placement]
    if refused:
        raise ValueError(
            f"a {what} is placed already: {', '.join(refused)} not accepted beside {what}="
        )


class _Memory:
    """A piece of memory, given back with its last user: the block or a view."""

    def __init__(
        self,
        driver: cuda_driver.Driver,
        nbytes: int,
        name: str,
        category: str,
        pinned: bool,
        placement: PlacementOptions,
    ) -> None:
        self.host: HostBlock | None = None
        self.users: memoryview | None = None
        self.nbytes = nbytes
        self._driver = driver
        if pinned:
            self._pin(HostBlock(nbytes, name=name, category=category, **placement))
        else:
            driver.check_budget(device_bytes(driver.name), nbytes)
            self._allocation = driver.allocate(nbytes)
            self.address = int(self._allocation.ptr)
            self._entry = DeviceEntry(driver.name, category, nbytes)
        _alive.add(self)

    def _pin(self, host: HostBlock) -> None:
        for _ in range(len(_stuck)):
            with contextlib.suppress(IndexError):  # another thread tries it
                _unpin(*_stuck.pop(0))
        self.nbytes, self.address = host.nbytes, host.address
        # The view keeps the host's block from being closed while the GPU sees it.
        self.users = memoryview(host)
        try:
            _pinned[self.address] = host, self.users
            self.host = host
            self._driver.register(host.address, host.nbytes)
        except BaseException:
            self.host = None
            _unpin(self._driver, self.address)
            raise

    def __del__(self) -> None:
        if self.host is not None:
            _unpin(self._driver, self.address)


# Host memory that GPUs see, by address. These references keep it mapped until CUDA has released it,
# whatever fails or is interrupted.
_pinned: dict[int, tuple[HostBlock, memoryview]] = {}
# Memory that CUDA did not release, as during a capture. The next pinned block tries again.
_stuck: list[tuple[cuda_driver.Driver, int]] = []


def _unpin(driver: cuda_driver.Driver, address: int) -> None:
    # Called by destructors, which must not raise: CUDA may end before the interpreter.
    try:
        if address not in _pinned:
            return
        host, users = _pinned[address]
        driver.unregister(address)
        del _pinned[address]
        users.release()
        host.__exit__()
    except BaseException:
        _stuck.append((driver, address))


_alive: weakref.WeakSet[_Memory] = weakref.WeakSet()
_blocks: weakref.WeakSet[Block] = weakref.WeakSet()
# In a forked child: memory that must not be freed, since there is no driver.
_left_out: list[_Memory] = []


def _leave_out_of_child() -> None:
    _left_out.extend(_alive)
    for block in list(_blocks):
        block._is_left_out = True


os.register_at_fork(after_in_child=_leave_out_of_child)


class Block:
    """One piece of device memory, or host memory that CPU and GPU both see.

    Device memory is allocated once (cudaMalloc, not from CuPy's pool). A pinned block is a
    `unimem.Block` that is registered with CUDA: both see it at one address, and copies to and from
    it run while the CPU works.

    Any number of threads may use the memory; one closes it. A forked child has none of it, and
    ClosedError says so there.

    Parameters
    ----------
    nbytes : int or str
        Size in bytes; a pinned block has whole pages.
    device : int, default 0
        CUDA's number of the GPU.
    pinned : bool, default False
        Host memory that the GPU sees.
    name : str, optional
        For messages.
    category : str, default "other"
        The row of reports: ``"weights"``, ``"scratch"``, ``"kv"`` (or ``"history"``),
        ``"staging"``, ``"diagnostics"``, ``"logits"``, ``"tokens"`` or ``"other"``.
    **placement
        See `PlacementOptions`; only for pinned blocks.

    Attributes
    ----------
    name, category, device : str, str, int
        As given; the category as reports name it.
    host : unimem.Block or None
        The block under a pinned one: ``block.host.as_array()`` is the CPU's view.

    Raises
    ------
    CapacityError
        The device has no room.
    MemoryError, PlacementError
        For pinned memory, as `unimem.Block`; or CUDA cannot pin it.
    NotImplementedError
        Placement of device memory.
    ValueError, TypeError
        A wrong size, device or option.
    ClosedError
        The parent of this forked process used CUDA.

    Examples
    --------
    >>> from unimem import cuda
    >>> with cuda.Block(1 << 20) as block:
    ...     block.as_array("float16", (512, 1024)).fill(0)
    """

    def __init__(
        self,
        nbytes: int | str,
        *,
        device: int = 0,
        pinned: bool = False,
        name: str | None = None,
        category: str = "other",
        **placement: Unpack[PlacementOptions],
    ) -> None:
        self._memory: Any = None
        self._is_left_out = False
        self._is_part = False  # of a tape, which warns for both when it is left open
        self.name = string(name, "name", "block")
        size = checked_nbytes(nbytes, "nbytes", 1)
        check_placement("Block", placement)
        pinned = flag(pinned, "pinned")
        if placement and not pinned:
            unsupported(
                "placement",
                f"Block '{self.name}': placing device memory ({', '.join(placement)})",
                "leave it out, or take host memory with pinned=True",
            )
        self._driver = cuda_driver.driver(device)
        self.device = self._driver.id
        memory = _Memory(self._driver, size, self.name, category, pinned, placement)
        self._nbytes = memory.nbytes
        self.category = row_name(category)
        self.host, self._host_users = memory.host, memory.users
        self._requested = {"nbytes": size, "device": self.device, "pinned": pinned, **placement}
        self._memory = self._driver.memory(memory.address, memory.nbytes, memory)
        self._n_own = self._n_references()
        _blocks.add(self)

    def _opened(self) -> Any:
        """Return the memory that arrays refer to."""
        if self._is_left_out:
            raise ClosedError(f"Block '{self.name}' {LEFT_OUT}")
        if self._memory is None:
            raise ClosedError(f"Block '{self.name}' is closed")
        return self._memory

    def _n_references(self) -> int:
        n = sys.getrefcount(self._memory)
        # The host's views refer to the exporter of a pinned block's memory.
        return n if self._host_users is None else n + sys.getrefcount(self._host_users.obj)

    def _n_users(self) -> int:
        """Count arrays, tapes and other references to the memory, on either side."""
        return self._n_references() - self._n_own

    @property
    def address(self) -> int:
        """Address of the first byte; a multiple of 256."""
        return int(self._opened().ptr)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        self._opened()
        return self._nbytes

    @property
    def committed_bytes(self) -> int:
        """`nbytes`: all of the memory exists."""
        return self.nbytes

    @property
    def reserved_bytes(self) -> int:
        """`nbytes`: the block does not grow."""
        return self.nbytes

    @property
    def step_bytes(self) -> int:
        """`nbytes`: no part is taken or given back alone."""
        return self.nbytes

    @property
    def path(self) -> None:
        """None: it has no file."""
        return None

    @property
    def requested(self) -> dict[str, Any]:
        """The request: a dict of `nbytes`, `device`, `pinned` and the placement."""
        self._opened()
        return dict(self._requested)

    @property
    def granted(self) -> Placement:
        """The placement of the memory: see `verify`."""
        return self.verify()

    @property
    def closed(self) -> bool:
        """Whether the block was closed, or is in a forked child."""
        return self._memory is None or self._is_left_out

    def as_array(
        self, dtype: Any = "uint8", shape: int | tuple[int, ...] | None = None, offset: int = 0
    ) -> Any:
        """View the memory as a CuPy array, without a copy: see `unimem.Block.as_array`."""
        memory = self._opened()
        dims, descr = array_within(
            f"Block '{self.name}'", self.address, self._nbytes, offset, shape, dtype
        )
        return self._driver.array(memory, operator.index(offset), dims, descr)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # No stream: a reader has nothing to wait for.
        return {
            "shape": (self._nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }

    def __dlpack__(self, **options: Any) -> Any:
        return self.as_array().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.as_array().__dlpack_device__()

    def warm(self, threads: int | None = None, progress: Any = None) -> None:
        """Do nothing: device memory and pinned memory are always resident."""
        self._opened()

    def verify(self) -> Placement:
        """Read where the memory is.

        Returns
        -------
        Placement
            For a pinned block as `unimem.Block.verify`. For device memory, `pages` is ``"device"``,
            and all of it is resident and locked.
        """
        self._opened()
        if self.host is not None:
            return self.host.verify()
        size = self._nbytes
        return Placement("device", 0, size, 0, size, 0, size)

    def repair(self) -> Placement:
        """Raise NotImplementedError: the GPU sees the pages of a pinned block."""
        unsupported("repair", "Block.repair", "place the memory when it is made")

    def collapse(self) -> Placement:
        """Raise NotImplementedError: the GPU sees the pages of a pinned block."""
        unsupported("collapse", "Block.collapse", "place the memory when it is made, with pages=")

    def sealed_copy(self, **options: Any) -> Self:
        """Raise NotImplementedError."""
        unsupported("sealed_copy", "Block.sealed_copy", "copy to the host, and seal that")

    def commit(self, nbytes: int) -> None:
        """Raise NotImplementedError."""
        unsupported("commit", "Block.commit", "take all of the memory at once")

    def release(self, offset: int = 0, nbytes: int | None = None) -> int:
        """Raise NotImplementedError."""
        unsupported("release", "Block.release", "close the block")

    def advise(self, advice: str) -> None:
        """Raise NotImplementedError."""
        unsupported("advise", "Block.advise", "leave it out")

    def fileno(self) -> int:
        """Raise NotImplementedError."""
        unsupported("fileno", "Block.fileno", "share a unimem.Block(shared=True), and copy from it")

    @classmethod
    def attach(cls, fd_or_path: int | str, *, writable: bool = False) -> Self:
        """Raise NotImplementedError."""
        unsupported("attach", "Block.attach", "attach a unimem.Block, and copy from it")

    @classmethod
    def map(cls, path: str, *, offset: int = 0, nbytes: int | None = None, mode: str = "r") -> Self:
        """Raise NotImplementedError."""
        unsupported(
            "map", "Block.map", "open_weights(path).to_device(tape) brings a model to the GPU"
        )

    def close(self) -> None:
        """Give the memory back. Closing twice is no error.

        Raises
        ------
        BufferError
            Arrays or tapes still use it; nothing is closed then.
        """
        if self._memory is None:
            return
        if not self._is_left_out and (n_users := self._n_users()) > 0:
            raise BufferError(
                f"Block '{self.name}' has {n_users} live views: drop them first, or leave a 'with'"
            )
        self._drop()

    def _drop(self) -> None:
        self._memory = self.host = self._host_users = None

    def __enter__(self) -> Self:
        self._opened()
        return self

    def __exit__(self, *_: object) -> None:
        # Live arrays keep the memory; it goes with the last of them.
        self._drop()

    def __del__(self) -> None:
        if getattr(self, "_memory", None) is None or self._is_part or self._is_left_out:
            return
        warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Block cannot be pickled: it is memory of this process. Copy it to the host and save "
            "that"
        )

    def __repr__(self) -> str:
        if self.closed:
            return f"Block('{self.name}', closed)"
        where = self._driver.name
        if self.host is not None:
            where = f"pinned for {where}, {self.host.granted}"
        return f"Block('{self.name}', {format_bytes(self._nbytes)}, {where})"
