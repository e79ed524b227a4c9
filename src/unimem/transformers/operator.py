"""``torch.ops.unimem.append``: an update of a layer as one operator for `torch.compile`.

A compiler sees that it writes to `place`, which numbers the layer, and to the rows of the cache,
which never move. So nothing is reordered across it, and no graph ends at it. What it does is the
layer's own `update`.

``torch.ops.unimem.append_at`` is for CUDA graphs, which replay work without asking the host: it
writes at a row that a tensor has when the work is done.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

from unimem.errors import ClosedError

# The KV type of each dtype.
NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}

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


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "unimem::append_at", mutates_args=("keys", "values"), device_types="cpu"
)
def append_at(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    row: torch.Tensor,
) -> None:
    """Write tokens to the rows of a layer, at a row that is read when it is done.

    Parameters
    ----------
    keys, values : torch.Tensor
        All rows, ``[batch, heads, rows, head_dim]``, such as a cache on a GPU shows them when it is
        full; the values of a head are contiguous. A head of V may have another size.
    key_states, value_states : torch.Tensor
        ``[batch, heads, n, head_dim]``, float32, float16 or bfloat16, which is converted.
    row : torch.Tensor
        One int32 on the device of the rows. Rows that do not exist are not written.
    """
    _check(keys, values, key_states, value_states, row)
    first, n, n_rows = int(row), key_states.shape[2], keys.shape[2]
    begin, end = max(0, -first), min(n, n_rows - first)
    for rows, states in ((keys, key_states), (values, value_states)):
        if begin < end:
            rows[:, :, first + begin : first + end] = states[:, :, begin:end]


@append_at.register_kernel("cuda")  # type: ignore[untyped-decorator]
def on_device(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    row: torch.Tensor,
) -> None:
    """Queue one kernel for K and V, on torch's current stream."""
    from unimem.backends import cuda_driver
    from unimem.cuda.kernels import row_kernels

    _check(keys, values, key_states, value_states, row)
    device = cuda_driver.driver(keys.device.index or 0)
    # A head is a stream to the kernel, and a stream a layer: [layers, streams, 1, tokens, values].
    sides = []
    for rows, states in ((keys, key_states), (values, value_states)):
        steps = [states.element_size() * step for step in states.stride()]
        to = [rows.element_size() * step for step in rows.stride()[:3]]
        places = states.data_ptr(), rows.data_ptr()
        sides.append((*places, 1, states.shape[3], (*steps[:2], 0, *steps[2:]), *to))
    row_kernels(device, NAMES[keys.dtype]).append(
        NAMES[key_states.dtype],
        sides,
        key_states.shape[:3],
        (0, keys.shape[2], row.data_ptr()),
        device.torch_stream(),
    )


@append_at.register_fake  # type: ignore[untyped-decorator]
def _(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    row: torch.Tensor,
) -> None:
    del keys, values, key_states, value_states, row


def _check(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    row: torch.Tensor,
) -> None:
    """Raise TypeError or ValueError for tensors of other types, shapes or places."""
    pairs = (keys, values), (key_states, value_states)
    if any(a.dtype not in NAMES or a.dtype != b.dtype for a, b in pairs):
        found = [str(one.dtype) for pair in pairs for one in pair]
        raise TypeError(f"append_at: expected float32, float16 or bfloat16, K as V, got {found}")
    n = key_states.shape[2]
    wanted = [(*rows.shape[:2], n, rows.shape[3]) for rows in (keys, values)]
    is_like = keys.shape[:3] == values.shape[:3] and keys.stride(3) == values.stride(3) == 1
    if not is_like or [key_states.shape, value_states.shape] != wanted:
        raise ValueError(
            f"append_at: expected tokens of shapes {wanted} for rows that lie alike, got "
            f"{tuple(key_states.shape)} and {tuple(value_states.shape)} for {tuple(keys.shape)} "
            f"and {tuple(values.shape)}"
        )
    if row.dtype != torch.int32 or row.numel() != 1 or row.device != keys.device:
        raise TypeError(
            f"row: expected one int32 on {keys.device}, got {row.dtype} of shape "
            f"{tuple(row.shape)} on {row.device}"
        )
