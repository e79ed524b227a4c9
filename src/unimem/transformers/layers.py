"""The layers of a model for transformers, over caches of unimem.

Layers of one kind, with full attention or one window, share a `unimem.KVCache`: a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import CacheLayerMixin

from unimem.kv.cache.cache import KVCache
from unimem.kv.types import block_values

__all__ = ["CacheOptions", "Group", "Layer"]

Tensors = tuple[torch.Tensor, torch.Tensor]

_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a tensor over an array's memory, which it keeps alive."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    given = tensor.contiguous()
    is_bf16 = tensor.dtype == torch.bfloat16
    array: npt.NDArray[Any] = (given.view(torch.uint16) if is_bf16 else given).numpy()
    return array.view(ml_dtypes.bfloat16) if is_bf16 else array


def _is_plain(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether its values are the consecutive bytes at its address."""
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and dtype in (None, tensor.dtype)
    )


@dataclass(frozen=True)
class CacheOptions:
    """How the caches of a model's layers are made."""

    max_seq_len: int
    dtype: str | None
    grow: bool
    spare_rows: int
    budget_bytes: int | None
    placement: dict[str, Any]


@dataclass(eq=False)
class Group:
    """The layers of one kind, and the cache that holds their rows."""

    window: int | None  # how many tokens a layer attends to, the newest included
    options: CacheOptions
    kv: KVCache | None = None  # made for the first token, which gives the streams and heads
    layers: list[Layer] = field(default_factory=list)  # in the order of the model
    dims: tuple[int, int, int] = (0, 0, 0)  # streams, heads and head size
    oldest: int = 0  # the first position that a ring held when it was adopted

    def require(self) -> KVCache:
        """Return the cache, which must exist."""
        assert self.kv is not None
        return self.kv

    def start(self, keys: torch.Tensor, budget_bytes: int | None) -> None:
        """Make the cache for tokens like these."""
        batch, heads, _, head_dim = keys.shape
        self.kv = self.make(batch, heads, head_dim, self.dtype_for(keys), budget_bytes)
        self.dims = batch, heads, head_dim

    def takes(self, keys: torch.Tensor) -> bool:
        """Return whether the cache is one for tokens like these."""
        batch, heads, _, head_dim = keys.shape
        return self.dims == (batch, heads, head_dim) and self.require().dtype == self.dtype_for(
            keys
        )

    def dtype_for(self, keys: torch.Tensor) -> str:
        """Return the stored type of tokens like these, given or by default."""
        if keys.device.type != "cpu":
            raise ValueError(f"KVCache.update: expected tensors on the CPU, got {keys.device}")
        if keys.dtype not in _NAMES:
            raise TypeError(
                f"KVCache.update: expected float32, float16 or bfloat16, got {keys.dtype}"
            )
        return self.options.dtype or _NAMES[keys.dtype]

    def make(
        self, batch: int, heads: int, head_dim: int, dtype: str, budget_bytes: int | None
    ) -> KVCache:
        """Make a cache for all layers of the group."""
        options = self.options
        # Huge pages would take 2 MiB of each head for the first token.
        kind: dict[str, Any] = {"pages": "4k", "grow": True} if options.grow else {}
        max_seq_len = options.max_seq_len
        if self.window is not None:
            kind = {"window": self.window, "spare_rows": options.spare_rows}
            max_seq_len = max(max_seq_len, self.window)
        return KVCache(
            len(self.layers),
            heads,
            head_dim,
            max_seq_len,
            batch=batch,
            dtype=dtype,
            order="head",
            budget_bytes=budget_bytes,
            **(kind | options.placement),
        )

    def adopt(self, kv: KVCache) -> None:
        """Use a cache that has tokens already."""
        self.kv = kv
        self.dims = kv.batch, kv.n_kv_heads, kv.head_dim
        self.oldest = kv.next_position - kv.seq_len
        for layer in self.layers:
            layer.length = kv.next_position
            layer.drop_rows()

    def check_crop(self, n: int) -> None:
        """Raise ValueError if `crop` cannot drop the last n tokens."""
        if self.kv is None or self.window is None:
            return
        # The first position of the window after the crop; the next token attends from the next one.
        shown = self.kv.next_position - n - self.window
        there = self.kv._body._oldest_position()
        lost = max(0, shown + 1) < max(self.oldest, there) or (n and max(0, shown) < there)
        if lost or n > self.kv.seq_len:
            raise ValueError(
                f"KVCache.crop: the last {n} tokens cannot be dropped, since a window of "
                f"{self.window} has not kept those before them: reset(), and compute them anew; "
                "spare_rows= keeps more"
            )

    def crop(self, n: int) -> None:
        """Drop the last n tokens, after `check_crop`."""
        if self.kv is None or not n:
            return
        self.release_rows()
        self.kv.crop(self.kv.seq_len - n)
        for layer in self.layers:
            layer.length -= n

    def rollback(self) -> None:
        """Drop tokens that not all layers hold."""
        self.release_rows()
        if self.kv is not None:
            self.kv.rollback()
            for layer in self.layers:
                layer.length = self.kv.next_position

    def clear(self) -> None:
        """Drop all tokens."""
        self.release_rows()
        if self.kv is not None:
            self.kv.clear()
        self.oldest = 0
        for layer in self.layers:
            layer.length = 0

    def release_rows(self) -> None:
        """Drop the tensors over rows if they would keep memory from being given back."""
        for layer in self.layers:
            if self.kv is None or self.kv.grow:
                layer.drop_rows()

    def reorder(self, source: npt.NDArray[np.int64]) -> None:
        """Give each stream the tokens of another, in place."""
        kv = self.kv
        moved = np.flatnonzero(source != np.arange(len(source)))
        if kv is None or not moved.size:
            return
        n = kv.next_position if self.window is None else kv.n_rows
        for layer in self.layers:
            for rows in kv._body._all_rows(layer.index):
                held = rows[:, :, :n]
                held[moved] = held[source[moved]]

    def select(self, source: npt.NDArray[np.int64], budget_bytes: int | None) -> KVCache | None:
        """Return a cache whose streams are some of this one's, in this order."""
        kv = self.kv
        if kv is None:
            return None
        made = self.make(len(source), kv.n_kv_heads, kv.head_dim, kv.dtype, budget_bytes)
        n, position = kv.seq_len, kv.next_position
        row = 0 if self.window is None else (position - n) % made.n_rows
        try:
            made._body._begin_restore(position, n)
            for layer in self.layers:
                parts = zip(made._body._all_rows(layer.index), kv.layer(layer.index), strict=True)
                for new, old in parts:
                    new[:, :, row : row + n] = old[source]
            made._body._finish_restore(position, n)
        except BaseException:
            made.__exit__()
            raise
        return made


class Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of the cache for transformers."""

    is_compileable = False
    is_croppable = True

    def __init__(self, owner: Any, group: Group, index: int) -> None:
        self._owner = owner
        self.group = group
        self.index = index  # in its group
        self.length = 0  # all tokens so far, also those that a window has dropped
        self._rows: Tensors | None = None  # of all rows, made once

    def __repr__(self) -> str:
        window = self.group.window
        kind = "full" if window is None else f"window of {window}"
        return f"Layer({kind}, {self.length} tokens)"

    @property
    def is_sliding(self) -> bool:
        """Whether it attends to a window."""
        return self.group.window is not None

    @property
    def is_initialized(self) -> bool:
        """Whether its cache is made."""
        return self.group.kv is not None

    @property
    def keys(self) -> torch.Tensor | None:
        """K that the next token may attend to, ``[batch, heads, tokens, head_dim]``, or None."""
        return self._shown(0)

    @property
    def values(self) -> torch.Tensor | None:
        """V, likewise."""
        return self._shown(1)

    def _shown(self, part: Literal[0, 1]) -> torch.Tensor | None:
        kv = self.group.kv
        if kv is None or self.length == 0:
            return None
        dtype = "float32" if block_values(kv.dtype) > 1 else None
        shown = as_tensor(kv.layer(self.index, dtype=dtype)[part])
        window = self.group.window
        return shown if window is None else shown[:, :, max(0, shown.shape[2] - window + 1) :]

    def drop_rows(self) -> None:
        """Drop the tensors over all rows; the next token makes them again."""
        self._rows = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the caches for tokens like these, ``[batch, heads, n, head_dim]``."""
        self._owner._start(self.group, key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Tensors:
        """Append tokens, and return all that they attend to.

        Parameters
        ----------
        key_states, value_states : torch.Tensor
            ``[batch, heads, n, head_dim]``, on the CPU, without gradients.

        Returns
        -------
        keys, values : torch.Tensor
            ``[batch, heads, tokens, head_dim]``, of the type given: views of the cache, unless it
            stores another type, or a prompt is longer than a window has rows.

        Raises
        ------
        ValueError, TypeError
            Other shapes than before; another device or type.
        RuntimeError
            They require gradients.
        CacheFull, CapacityError, MemoryError, PlacementError
            As `unimem.KVCache.append`. No token was appended.
        """
        group = self.group
        batch, heads, n, head_dim = key_states.shape
        if group.dims != (batch, heads, head_dim) or value_states.shape != key_states.shape:
            self.lazy_initialization(key_states, value_states)
        if key_states.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "KVCache.update: expected tokens without gradients, which a cache does not keep: "
                "call the model under torch.no_grad()"
            )
        kv, window = group.require(), group.window
        if _NAMES.get(key_states.dtype) != kv.dtype:
            return self._append_converted(kv, key_states, value_states)
        if window is not None and window - 1 + n > kv.n_rows:
            return self._append_far(kv, key_states, value_states)
        if n == 1 and _is_plain(key_states) and _is_plain(value_states, key_states.dtype):
            row = kv._body._append_token(self.index, key_states.data_ptr(), value_states.data_ptr())
            self.length += 1
            keys, values = self._rows_to(kv, row + 1)
        else:
            row = kv._body._append_begin(self.index, n)
            keys, values = self._rows_to(kv, row + n)
            keys.narrow(2, row, n).copy_(key_states)
            values.narrow(2, row, n).copy_(value_states)
            kv._body._append_end(self.index, n)
            self.length += n
        first, end = 0, row + n
        if window is not None:
            first = end - min(self.length, window - 1 + n)
            if first < 0:  # continue in the second image of the rows
                first, end = first + kv.n_rows, end + kv.n_rows
        return keys.narrow(2, first, end - first), values.narrow(2, first, end - first)

    def _rows_to(self, kv: KVCache, end: int) -> Tensors:
        """Return tensors of all usable rows, at least up to `end`."""
        rows = self._rows
        if rows is None or rows[0].shape[2] < end:
            # Inference tensors could not be written in another mode.
            with torch.inference_mode(False):
                k, v = kv._body._all_rows(self.index)
                rows = self._rows = as_tensor(k), as_tensor(v)
        return rows

    def _append_far(
        self, kv: KVCache, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> Tensors:
        """Append more tokens than the rows of a window can show together with those before them."""
        states, n = (key_states, value_states), key_states.shape[2]
        shown = states
        if self.length and self.group.window != 1:
            keys, values = self.keys, self.values
            shown = torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)
        row = kv._body._append_begin(self.index, n)
        kept = min(n, kv.n_rows)
        for rows, given in zip(kv._body._all_rows(self.index), states, strict=True):
            as_tensor(rows).narrow(2, row, kept).copy_(given[:, :, n - kept :])
        kv._body._append_end(self.index, n)
        self.length += n
        return shown

    def _append_converted(
        self, kv: KVCache, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> Tensors:
        """Append to a cache of another type, and return converted copies."""
        dtype, window = _DTYPES[key_states.dtype], self.group.window
        shown = key_states, value_states
        if self.length and window != 1:
            past = [as_tensor(part) for part in kv.layer(self.index, dtype=dtype)]
            if window is not None:
                past = [part[:, :, max(0, part.shape[2] - window + 1) :] for part in past]
            shown = torch.cat([past[0], key_states], 2), torch.cat([past[1], value_states], 2)
        kv.append(self.index, _as_array(key_states), _as_array(value_states))
        self.length += key_states.shape[2]
        return shown

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens `update` will return, and the position of the first one."""
        window = self.group.window
        past = self.length if window is None else min(self.length, window - 1)
        return past + query_length, self.length - past

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self.length

    def get_max_length(self) -> int:
        """Return the most tokens that the layer holds."""
        return self.group.window or self.group.options.max_seq_len
