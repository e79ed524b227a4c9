"""Mapped weights that have no room in memory: which node has the kernel read which of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from unimem._core.block import Block
from unimem.engine.advice_op import FileAdvice, experts_address, layer_address
from unimem.engine.graph import Bringer, Headers
from unimem.engine.model import Model
from unimem.errors import CapacityError
from unimem.weights.opened import Weights
from unimem.weights.tensors import Tensor

# Tensors that lie closer to each other are asked for at once.
_GAP_BYTES = 64 << 10

Range = tuple[Block, int, int]


def has_room(weights: Weights) -> bool:
    """Return whether all pages of mapped weights can stay in memory."""
    try:
        weights._require_room("mapped weights", 0)
    except CapacityError:
        return False
    return True


def add_advice(headers: Headers, model: Model, tensors: Mapping[str, Tensor]) -> list[FileAdvice]:
    """Have graphs made from `headers` advise the kernel of mapped weights; keep what is returned.

    Each layer begins the reading of the next one, and the choice of experts that of these experts.
    So all is asked for but rows of the embedding, and the kernel need not read around what faults:
    the rest of its read-ahead would push out what tokens need.
    """
    kept = []
    layers: list[list[Tensor]] = [[] for _ in range(model.dims.num_layers)]
    experts: list[list[Tensor]] = [[] for _ in layers]
    head: list[Tensor] = []
    for name in headers.weights:
        if name.startswith("blk."):
            place = experts if model.experts is not None and "_exps." in name else layers
            place[int(name.split(".")[1])].append(tensors[name])
        elif name != "token_embd.weight" or "output.weight" not in headers.weights:
            head.append(tensors[name])
    for block in {tensor._memory.block for tensor in tensors.values()}:
        block.advise("random")
    FileAdvice(list(_runs(layers[0]))).ask()
    for i in range(len(layers)):
        following = layers[i + 1] if i + 1 < len(layers) else [*head, *layers[0]]
        after = FileAdvice(list(_runs(following)))
        headers.layers[f"blk.{i}"] = Bringer(layer_address, after.address)
        kept.append(after)
        if model.experts is not None:
            chosen = FileAdvice([_range_of(tensor) for tensor in experts[i]], model.experts.n)
            headers.experts[f"blk.{i}"] = Bringer(experts_address, chosen.address)
            kept.append(chosen)
    return kept


def _range_of(tensor: Tensor) -> Range:
    return tensor._memory.block, tensor._block_offset, tensor.nbytes


def _runs(tensors: Iterable[Tensor]) -> Iterator[Range]:
    """Join tensors that lie next to each other."""
    last: Range | None = None
    for block, begin, nbytes in sorted(map(_range_of, tensors), key=lambda r: (id(r[0]), r[1])):
        if last is not None and last[0] is block and begin - last[1] - last[2] <= _GAP_BYTES:
            last = block, last[1], begin + nbytes - last[1]
            continue
        if last is not None:
            yield last
        last = block, begin, nbytes
    if last is not None:
        yield last
