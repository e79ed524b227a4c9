"""Weights in memory, in the order that ggml multiplies fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from unimem._core import ledger
from unimem._core.block import Block
from unimem._core.tape import Tape
from unimem.errors import ClosedError
from unimem.weights.loading import Lifetime
from unimem.weights.repack.arrangement import Arrangement, new_buffers
from unimem.weights.repack.image_writer import Keeping

if TYPE_CHECKING:
    from unimem.backends.ggml_orders import Buffer

_PADDING = "weights:padding"


@dataclass(frozen=True, slots=True)
class RepackedTensor:
    """One tensor in ggml's order. Any number of threads may use it.

    Attributes
    ----------
    name, type, ggml_type, ne : str, str, int, tuple of int
        As in the file: its name, type, ggml's number of the type, and shape in ggml's order.
    order : str
        The buffer type that wrote it, by ggml's name: "CPU_REPACK", "AMX".
    nbytes : int
        Bytes in this order.
    """

    name: str
    type: str
    ggml_type: int
    ne: tuple[int, ...]
    order: str
    nbytes: int
    _address: int = field(repr=False, compare=False)
    _lifetime: Lifetime = field(repr=False, compare=False)

    @property
    def address(self) -> int:
        """The constant address of the first byte in this process.

        Raises
        ------
        ClosedError
            The repacked weights were closed, or their tape took the memory back.
        """
        self._lifetime.check()
        return self._address


class Repacked:
    """Weights of a model in the order that ggml multiplies fastest. Made by `unimem.repack`.

    Any number of threads and decoders may read them; closing is for one thread. A forked child has
    them too: private memory is copied page by page as either side writes.
    Leaving a ``with`` closes them to new use, and the memory returns with the last user. If an
    image is being kept, leaving waits for it, and an exception gives it up.

    Attributes
    ----------
    tensors : mapping of str to RepackedTensor
        The tensors with another order here, by name; all others are in the file.
    nbytes : int
        Their bytes.
    types : dict of str to int
        Their bytes by type.
    image : str or None
        The repacked image that they were mapped or read from; None if they were repacked here.
    """

    def __init__(
        self,
        arrangement: Arrangement,
        block: Block | None,
        base: int,
        lifetime: Lifetime,
        tape: Tape | None,
        image: str | None = None,
        keeping: Keeping | None = None,
    ) -> None:
        self._keeping = keeping
        self._block, self._tape, self._lifetime = block, tape, lifetime
        self.image = image
        self._buffers: dict[str, Buffer] = {}
        self.types = arrangement.types
        self.nbytes = sum(self.types.values())
        self.mapped_bytes = 0
        tensors = {}
        if block is not None:
            self.mapped_bytes = block.nbytes if tape is None else arrangement.nbytes
            first = block.address + base
            self._buffers = new_buffers(arrangement, first)
            for tensor, order, at in arrangement.slots:
                assert tensor.ggml_type is not None  # or it had no order
                tensors[tensor.name] = RepackedTensor(
                    tensor.name, tensor.type, tensor.ggml_type, tensor.ne,
                    order.buffer_type.name, order.nbytes, first + at, lifetime,
                )  # fmt: skip
            parts = [ledger.Part(_PADDING, first, self.mapped_bytes)]
            parts += [
                ledger.Part(f"weights:{t.type} repacked", t.address, t.nbytes, t.nbytes, t.nbytes)
                for t in tensors.values()
            ]
            self._parts = tuple(parts)
        self.tensors: Mapping[str, RepackedTensor] = MappingProxyType(tensors)
        sizes = {f"weights:{kind} repacked": nbytes for kind, nbytes in self.types.items()}
        ledger.enter(self, sizes | {_PADDING: self.mapped_bytes - self.nbytes})

    def _ledger_is_open(self) -> bool:
        return not self.closed

    def _ledger_parts(self) -> tuple[ledger.Part, ...]:
        return () if self.closed or self._block is None else self._parts

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The memory of the tensors: one block, or none if no tensor has another order."""
        self._check_open()
        return () if self._block is None else (self._block,)

    def _adopt(self, header: int, name: str) -> None:
        """Turn a header of ggml into this tensor, so that products use the kernel of its order.

        `header` is the address of a `ggml_tensor` of the same type and shape, or else it raises
        ValueError.
        """
        self._check_open()
        tensor = self.tensors[name]
        self._buffers[tensor.order].adopt(header, tensor.address)

    def _check_open(self) -> None:
        if self.closed:
            self._lifetime.check()
            raise ClosedError(f"Repacked '{self._lifetime.name}' is closed")

    @property
    def closed(self) -> bool:
        """Whether they were closed, or a tape took the memory back."""
        return self._lifetime.ended or (self._block is not None and self._block.closed)

    def close(self) -> None:
        """Give the memory back, unless it is a tape's. Closing twice is no error.

        If an image is being kept, this waits for it. An interrupt gives the image up, and closes
        nothing.

        Raises
        ------
        BufferError
            A decoder still uses it; nothing is closed then.
        """
        if self._lifetime.ended:
            return
        if self._keeping is not None:
            self._keeping.end()
        if self._block is not None and self._tape is None:
            self._block.close()
        self._end()

    def _end(self) -> None:
        self._lifetime.end("are closed")
        for buffer in self._buffers.values():
            buffer.free()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        if self._lifetime.ended:
            return
        try:
            if self._keeping is not None:
                self._keeping.end(cancel=kind is not None)
        finally:
            if self._block is not None and self._tape is None:
                self._block.__exit__(kind, error, trace)
            self._end()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("Repacked cannot be pickled: repack the weights in the other process")

    def __repr__(self) -> str:
        name = f"Repacked('{self._lifetime.name}'"
        if self.closed:
            return f"{name}, closed)"
        types = ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in self.types.items())
        return f"{name}, {len(self.tensors)} tensors, bytes: {types or 0})"
