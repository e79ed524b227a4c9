"""``torch.ops.unimem.append``: an update of a layer as one operator for `torch.compile`.

A compiler sees that it writes to `place`, which numbers the layer, and to the rows of the cache,
which never move. So nothing is reordered across it, and no graph ends at it. What it does is the
layer's own `update`.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

from unimem.errors import ClosedError

__all__ = ["append", "place_of"]

_LAYERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
_NUMBERS = count()


def place_of(layer: Any) -> torch.Tensor:
    """Return a tensor with a new number, by which the operator finds a layer.

    A graph takes it as any tensor: the same graph serves all caches.
    """
    _LAYERS[number := next(_NUMBERS)] = layer
    with torch.inference_mode(False):
        return torch.tensor([number], device="cpu")


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "unimem::append", mutates_args=("place", "rows"), device_types=("cpu", "cuda")
)
def append(
    place: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    rows: list[torch.Tensor],
    n_copied: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append tokens to a layer, and return copies of what they attend to, or of nothing.

    Parameters
    ----------
    place : torch.Tensor
        Of `place_of`.
    key_states, value_states : torch.Tensor
        ``[batch, heads, n, head_dim]``.
    rows : list of torch.Tensor
        All rows of the layer, K and V, or none. A compiler may copy all bytes between the first
        and the last one, so they are never those of a growing cache, which has gaps.
    n_copied : int
        How many tokens the copies have: all, or 0.

    Returns
    -------
    keys, values : torch.Tensor
        ``[batch, heads, n_copied, head_dim]``.

    Raises
    ------
    ClosedError
        The cache is gone.
    CacheFull, CapacityError, MemoryError, PlacementError, ValueError, TypeError
        As the layer's `update`.
    """
    layer = _LAYERS.get(int(place))
    if layer is None:
        raise ClosedError("KVCache: expected a live cache, got a graph of one that is gone")
    shown = layer.update(key_states, value_states)
    # Some compilers give copies of the rows, and copy them back.
    for given, own in zip(rows, layer.rows or (), strict=False):
        if given.data_ptr() != own.data_ptr():
            given.copy_(own)
    keys, values = (part[:, :, :n_copied].clone() for part in shown)
    return keys, values


@append.register_fake  # type: ignore[untyped-decorator]
def _(
    place: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    rows: list[torch.Tensor],
    n_copied: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    del place, rows
    keys, values = (
        part.new_empty(*part.shape[:2], n_copied, part.shape[3])
        for part in (key_states, value_states)
    )
    return keys, values
