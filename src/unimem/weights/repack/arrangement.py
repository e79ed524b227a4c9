"""Which tensors of a model are repacked, and where each of them lies."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from unimem.weights.tensors import Contents, Tensor

if TYPE_CHECKING:
    from unimem.backends.ggml_orders import Buffer, Order

_ALIGN = 64  # of each tensor: it suits every type of buffer, and a line of the CPU's caches
_EXPERTS = "_exps."  # in the names of 3-d tensors whose matrices are chosen by token
EMBEDDING = "token_embd.weight"
LOOKED_UP = frozenset(
    {EMBEDDING, "per_layer_token_embd.weight", "position_embd.weight", "token_types.weight"}
)
"""Tables whose rows are looked up, and so need the order of the file."""


class Slot(NamedTuple):
    """One repacked tensor: the tensor of the file, its order, and its place in the memory."""

    tensor: Tensor
    order: Order
    at: int


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The tensors of a model that are repacked, and their places in one piece of memory.

    It depends only on the headers of the files, this build of ggml, and the CPU. `slots` have the
    order of the files. `nbytes` counts the memory with what aligns the tensors, and `source_bytes`
    the tensors in the files.
    """

    slots: tuple[Slot, ...]
    nbytes: int
    source_bytes: int

    @property
    def types(self) -> dict[str, int]:
        """Repacked bytes of each type."""
        found: dict[str, int] = {}
        for tensor, order, _ in self.slots:
            found[tensor.type] = found.get(tensor.type, 0) + order.nbytes
        return found


def arrange(contents: Contents) -> Arrangement:
    """Choose the tensors of a model to repack, and lay them out; its data is not read.

    These are the matrices, and stacks of experts' matrices, whose types have an order of their own
    on this CPU. Tables whose rows are looked up keep the order of the file, even if the model's
    head is the same table: rows cannot be read back from the other order, and a second copy would
    double the memory.

    It raises ImportError without ggml.
    """
    from unimem.backends.ggml_orders import find_order  # ggml, which few need

    slots: list[Slot] = []
    at = source_bytes = 0
    for tensor in contents.tensors.values():
        if tensor.ggml_type is None or tensor.name in LOOKED_UP:
            continue
        if len(tensor.ne) == 3 and _EXPERTS not in tensor.name:
            continue
        order = find_order(tensor.ggml_type, tensor.ne) if prod(tensor.ne) else None
        if order is not None:
            slots.append(Slot(tensor, order, at))
            at += -(-order.nbytes // _ALIGN) * _ALIGN
            source_bytes += tensor.nbytes
    return Arrangement(tuple(slots), at, source_bytes)


def new_buffers(arrangement: Arrangement, address: int) -> dict[str, Buffer]:
    """Make ggml's buffers over the memory of an arrangement, by the names of their types."""
    from unimem.backends.ggml_orders import Buffer

    types = {slot.order.buffer_type for slot in arrangement.slots}
    return {one.name: Buffer(one, address, arrangement.nbytes) for one in types}
