"""The layers of a model on a GPU, over caches of `unimem.cuda`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from unimem.kv.types import kv_name
from unimem.transformers import operator
from unimem.transformers.layers import (
    DTYPES,
    Dims,
    Group,
    Layer,
    Prompt,
    Tensors,
    check_gradients,
    fits,
)
from unimem.transformers.operator import NAMES

# A cache that may be replaced by a larger one has room for half as many tokens again.
_SPARE_ROWS = 256


def device_of(place: Any) -> int | None:
    """Return CUDA's number of the device of a tensor or a model; None if it is on another kind."""
    found: int | None = place.device.index if place.device.type == "cuda" else None
    return found


class DeviceGroup(Group):
    """The layers of one kind, with their rows on a device.

    Its caches have a fixed size and are no rings. So layers with a window keep all tokens and show
    the last ones; and unless the number of tokens is given, a full cache is replaced by a larger
    one, before the first layer of a pass.
    """

    @property
    def ring(self) -> None:
        """None: a device has no rings."""
        return

    @property
    def _is_replaced(self) -> bool:
        return self.options.grow and self.options.max_seq_len is None

    def start(self, keys: torch.Tensor, values: torch.Tensor, budget_bytes: int | None) -> None:
        """Make the cache for tokens like these."""
        self.expected = keys.shape[2]
        super().start(keys, values, budget_bytes)
        self.grows = self._is_replaced

    def check_device(self, keys: torch.Tensor) -> None:
        """Raise ValueError for tokens that are not on the model's device."""
        if device_of(keys) != self.options.device:
            raise ValueError(
                f"KVCache.update: expected tensors on cuda:{self.options.device}, where the cache "
                f"is, got {keys.device}: call the cache's for_model with the model on one device"
            )

    def make(self, dims: Dims, dtypes: Sequence[str], budget_bytes: int | None) -> Any:
        """Make a cache for all layers of the group, with room for the expected tokens."""
        from unimem import cuda

        options, (batch, heads, head_dim, v_head_dim) = self.options, dims
        n, kind = options.max_seq_len or options.least_seq_len, kv_name(*dtypes)
        if self._is_replaced:
            n = self.expected + max(self.expected // 2, _SPARE_ROWS)
        kv = cuda.KVCache(
            len(self.lengths),
            heads,
            head_dim,
            n,
            batch=batch,
            dtype=kind,
            v_head_dim=v_head_dim,
            order="head",
            rotate=options.rotate,
            budget_bytes=budget_bytes,
            arrays="cupy" if kind == "q8_0" else "torch",
            device=options.device or 0,
            **options.placement,
        )
        kv.arrays = "torch"  # converted copies of q8_0 as well
        return kv

    def make_room(self, n: int) -> None:
        """Replace a cache that has room for fewer tokens, if none of its layers is ahead."""
        kv = self.require()
        if not self._is_replaced or n <= kv.n_rows or len({*self.lengths}) > 1:
            return
        self.expected = n
        made = self.select(np.arange(kv.batch), kv.budget_bytes)
        assert made is not None
        if made.n_rows > kv.n_rows:
            self.adopt(made)
            kv.__exit__()
        else:  # the budget allows no more, and appending says so
            made.__exit__()

    def adopt(self, kv: Any) -> None:
        """Use a cache that has tokens already."""
        super().adopt(kv)
        self.grows = self._is_replaced

    def overwritten(self) -> int:
        """Return 0: rows are not overwritten."""
        return 0

    def keep(self, prompt: Prompt) -> None:
        """Do nothing: all tokens stay, also those behind a window."""

    def reorder(self, source: npt.NDArray[np.int64], layers: Sequence[int] | None = None) -> None:
        """Give each stream the tokens of another, in place, in all layers or some."""
        moved = np.flatnonzero(source != np.arange(len(source)))
        if self.kv is None or not moved.size:
            return
        kv: Any = self.kv
        for layer in range(len(self.lengths)) if layers is None else layers:
            for rows in kv._tensors(layer):
                to, from_ = (torch.from_numpy(i).to(rows.device) for i in (moved, source[moved]))
                held = rows.narrow(2, 0, self.lengths[layer] - self.oldest)
                held[to] = held[from_]

    def select(self, source: npt.NDArray[np.int64], budget_bytes: int | None) -> Any:
        """Return a cache whose streams are some of this one's, in this order."""
        if self.kv is None:
            return None
        kv: Any = self.kv
        n, position = kv.seq_len, kv.next_position
        self.expected = max(self.expected, position)
        made = self.make((len(source), *self.dims[1:]), (kv.dtype, kv.v_dtype), budget_bytes)
        try:
            made._begin_restore(position, n)
            for layer in range(len(self.lengths)):
                for new, old in zip(made._tensors(layer), kv._tensors(layer), strict=True):
                    index = torch.from_numpy(source).to(old.device)
                    new.narrow(2, 0, n).copy_(old.narrow(2, 0, n).index_select(0, index))
            made._finish_restore(position, n)
        except BaseException:
            made.__exit__()
            raise
        return made


class DeviceLayer(Layer):
    """One layer of the cache for transformers, on a device."""

    def __init__(self, owner: Any, group: Group, index: int) -> None:
        super().__init__(owner, group, index)
        self.device = torch.device("cuda", group.options.device or 0)

    def _shown_of(self, kv: Any, dtype: torch.dtype | None, n: int) -> Tensors:
        """Return K and V of the last n tokens, converted if there is a type."""
        keys, values = kv.layer(self.index, None if dtype is None else DTYPES[dtype])
        first = max(0, keys.shape[2] - n)
        return keys[:, :, first:], values[:, :, first:]

    def _past(self, kv: Any, dtype: torch.dtype | None) -> Tensors:
        """Return K and V that the next token may attend to, converted if there is a type."""
        return self._shown_of(kv, dtype, Layer.get_mask_sizes(self, 0)[0])

    def _append(self, kv: Any, key_states: torch.Tensor, value_states: torch.Tensor) -> Tensors:
        """Append tokens that fit the cache, and return all that they attend to."""
        group, length, n = self.group, self.length, key_states.shape[2]
        group.make_room(length + n)
        kv, shown = group.require(), self.get_mask_sizes(n)[0]
        kv.append(self.index, key_states, value_states)
        group.lengths[self.index] += n
        if not group.grows:  # compiled code writes to all rows
            group.rows[self.index] = kv._tensors(self.index)
        if NAMES.get(key_states.dtype) == kv.dtype:
            return self._shown_of(kv, None, shown)
        if not length:
            return key_states, value_states
        keys, values = self._shown_of(kv, key_states.dtype, shown)
        keys[:, :, -n:], values[:, :, -n:] = key_states, value_states
        return keys, values

    def _append_compiled(self, key_states: torch.Tensor, value_states: torch.Tensor) -> Tensors:
        """Append tokens by the operator, without a look at the cache, for `torch.compile`."""
        check_gradients(key_states)
        group, n, length = self.group, key_states.shape[2], self.length
        rows = None if group.grows else self.rows
        shown, first = self.get_mask_sizes(n)
        group.lengths[self.index] += n
        if not length:
            operator.append(self._place, key_states, value_states, [], 0)
            return key_states, value_states
        if rows is None or not all(map(fits, (key_states, value_states), rows)):
            keys, values = operator.append(self._place, key_states, value_states, [], shown)
            return keys, values
        operator.append(self._place, key_states, value_states, [*rows], 0)
        row = first - group.oldest
        return rows[0].narrow(2, row, shown), rows[1].narrow(2, row, shown)
