"""The layers of a model for transformers, over caches of unimem.

Layers of one kind, with full attention or one window, share a `unimem.KVCache`: a group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from unimem.errors import CacheFull, ClosedError
from unimem.kv.cache.cache import KVCache
from unimem.kv.rotate_heads import rotate_heads
from unimem.kv.types import block_values, kv_name
from unimem.system import limits
from unimem.transformers import operator
from unimem.transformers.operator import NAMES
from unimem.transformers.rows import Rows
from unimem.transformers.scratch import Scratch

Tensors = tuple[torch.Tensor, torch.Tensor]
Dims = tuple[int, int, int, int]

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
# With fewer tokens, a call of Python costs more than it saves.
_FEWEST_PACKED = {torch.float32: 1024, torch.float16: 256, torch.bfloat16: 256}


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a tensor over an array's memory, which it keeps alive."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    given = tensor.contiguous().resolve_neg()
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

    max_seq_len: int | None  # None: as many tokens as there is room for
    least_seq_len: int  # what the model was made for
    dtype: tuple[str, str] | None
    grow: bool
    rotate: bool
    spare_rows: int
    budget_bytes: int | None
    placement: dict[str, Any]
    config: PreTrainedConfig
    device: int | None = None  # None: main memory


def dims_of(keys: torch.Tensor, values: torch.Tensor) -> Dims:
    """Return the streams, the heads, and the sizes of a head of K and V."""
    batch, heads, _, head_dim = keys.shape
    return batch, heads, head_dim, values.shape[-1]


class Prompt(NamedTuple):
    """Tokens that a ring keeps until all layers have them, and what is done with them then."""

    n: int
    put: Callable[[], object]


@dataclass(eq=False)
class Group:
    """The layers of one kind, and the cache that holds their rows."""

    window: int | None  # how many tokens a layer attends to, the newest included
    options: CacheOptions
    kv: KVCache | None = None  # made for the first token, which gives the streams and heads
    lengths: list[int] = field(default_factory=list)  # tokens of each layer, also dropped ones
    rows: list[Tensors | None] = field(default_factory=list)  # all rows of each layer, made once
    dims: Dims = (0, 0, 0, 0)
    oldest: int = 0  # the first position that a ring held when it was adopted
    grows: bool = True
    scratch: Scratch = field(default_factory=Scratch)  # for converted copies
    token: Any = None  # the shapes and dtype of a token that is stored as it is
    prompt: Prompt | None = None  # whose rows a ring keeps until they are put into a store
    expected: int = 0  # tokens that are about to come, for which a device makes room

    @property
    def ring(self) -> int | None:
        """The window of the cache, if it is a ring."""
        return self.window

    def add(self) -> int:
        """Add a layer, in the order of the model; return its number."""
        self.lengths.append(0)
        self.rows.append(None)
        return len(self.lengths) - 1

    def require(self) -> KVCache:
        """Return the cache, which must exist."""
        assert self.kv is not None
        return self.kv

    def start(self, keys: torch.Tensor, values: torch.Tensor, budget_bytes: int | None) -> None:
        """Make the cache for tokens like these."""
        dims = dims_of(keys, values)
        self.kv = self.make(dims, self.dtype_for(keys), budget_bytes)
        # Compiled code gets copies of what a prompt's ring holds, since another will follow.
        self.dims, self.grows = dims, self.kv.grow or self.prompt is not None
        self.drop_rows()

    def packs(self, keys: torch.Tensor) -> bool:
        """Return whether torch's attention of a token gains by the class of its keys, `Rows`."""
        config, heads = self.options.config, keys.shape[1]
        if keys.shape[2] < _FEWEST_PACKED[keys.dtype] or config._attn_implementation != "sdpa":
            return False
        n_queries: int = getattr(config, "num_attention_heads", heads)
        return bool(n_queries > heads or keys.dtype == torch.bfloat16)

    def takes(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Return whether the cache is one for tokens like these."""
        kv = self.require()
        return self.dims == dims_of(keys, values) and self.dtype_for(keys) == (kv.dtype, kv.v_dtype)

    def dtype_for(self, keys: torch.Tensor) -> tuple[str, str]:
        """Return the stored types of tokens like these, given or by default."""
        self.check_device(keys)
        if keys.dtype not in NAMES:
            raise TypeError(
                f"KVCache.update: expected float32, float16 or bfloat16, got {keys.dtype}"
            )
        return self.options.dtype or (NAMES[keys.dtype],) * 2

    def check_device(self, keys: torch.Tensor) -> None:
        """Raise ValueError for tokens that are not in main memory."""
        if keys.device.type != "cpu":
            raise ValueError(
                f"KVCache.update: expected tensors on the CPU, got {keys.device}: for_model makes "
                "a cache where the model is"
            )

    def make_room(self, n: int) -> None:
        """Do nothing: memory is taken as tokens arrive."""

    def make(self, dims: Dims, dtypes: Sequence[str], budget_bytes: int | None) -> KVCache:
        """Make a cache for all layers of the group."""
        options, (batch, heads, head_dim, v_head_dim) = self.options, dims
        shape = len(self.lengths), heads, head_dim
        kind: dict[str, Any] = {"batch": batch, "dtype": kv_name(*dtypes), "order": "head"}
        if v_head_dim != head_dim:
            kind["v_head_dim"] = v_head_dim
        max_seq_len = options.max_seq_len or options.least_seq_len
        if self.window is not None:
            max_seq_len = max(max_seq_len, self.window)
            spare_rows = max(options.spare_rows, self.prompt.n if self.prompt else 0)
            more: dict[str, Any] = {"window": self.window, "spare_rows": spare_rows}
        else:
            # Huge pages would take 2 MiB of each head for the first token.
            more = {"pages": "4k", "grow": True} if options.grow else {}
            if options.max_seq_len is None and options.grow:
                token_bytes = KVCache.storage_bytes(*shape, 1, **kind)
                max_seq_len = max(max_seq_len, limits.available_bytes() // token_bytes)
        return KVCache(
            *shape,
            max_seq_len,
            rotate=options.rotate,
            budget_bytes=budget_bytes,
            **(kind | more | options.placement),
        )

    def adopt(self, kv: KVCache) -> None:
        """Use a cache that has tokens already."""
        self.kv = kv
        self.dims, self.grows = (kv.batch, kv.n_kv_heads, kv.head_dim, kv.v_head_dim), kv.grow
        self.oldest = kv.next_position - kv.seq_len
        self.count(kv.next_position)
        self.drop_rows()

    def count(self, n: int) -> None:
        """Note that each layer has n tokens."""
        self.lengths[:] = [n] * len(self.lengths)

    def sync(self) -> None:
        """Do nothing: the host counts the tokens."""

    def check_crop(self, n: int) -> None:
        """Raise ValueError if `crop` cannot drop the last n tokens."""
        if self.kv is None or self.window is None or n == self.kv.next_position:
            return
        # The first position of the window after the crop; the next token attends from the next one.
        shown = self.kv.next_position - n - self.window
        there = self.overwritten()
        if max(0, shown + 1) < max(self.oldest, there) or (n and max(0, shown) < there):
            raise ValueError(
                f"KVCache.crop: the last {n} tokens cannot be dropped, since a window of "
                f"{self.window} has not kept those before them: reset(), and compute them anew; "
                f"spare_rows= keeps more (it is {self.options.spare_rows})"
            )

    def overwritten(self) -> int:
        """Return the first position whose row the cache still has."""
        first: int = self.require()._body._oldest_position()
        return first

    def crop(self, n: int) -> None:
        """Drop the last n tokens, after `check_crop`."""
        kv = self.kv
        if kv is None or not n:
            return
        if n == kv.next_position:
            self.clear()  # a ring that was copied or restored lacks tokens, and goes back to none
            return
        self.release_rows()
        left = kv.next_position - n
        while kv.next_position > left:  # a ring shows earlier tokens again, a window at a time
            kv.crop(max(0, kv.seq_len - (kv.next_position - left)))
        self.count(left)

    def rollback(self) -> None:
        """Drop tokens that not all layers hold."""
        self.release_rows()
        if self.kv is not None:
            self.kv.rollback()
            self.count(self.kv.next_position)

    def keep(self, prompt: Prompt) -> None:
        """Make the ring that comes next large enough for a prompt."""
        self.end()
        self.prompt = prompt

    def finish_prompt(self) -> None:
        """Put the rows of a prompt that all layers have, and keep no more than usual."""
        prompt = self.prompt
        if prompt is None or min(self.lengths) < prompt.n or len({*self.lengths}) > 1:
            return
        self.prompt = None
        prompt.put()
        before = self.require()
        kv = self.select(np.arange(before.batch), before.budget_bytes)
        if kv is not None:
            self.adopt(kv)
            before.__exit__()

    def clear(self) -> None:
        """Drop all tokens."""
        if self.prompt is not None:
            self.end()
        self.release_rows()
        if self.kv is not None:
            self.kv.clear()
        self.oldest = 0
        self.count(0)

    def end(self) -> None:
        """Give the memory back, except under views."""
        kv, self.kv, self.dims, self.oldest = self.kv, None, (0, 0, 0, 0), 0
        self.prompt, self.scratch = None, Scratch()
        self.count(0)
        self.drop_rows()
        if kv is not None:
            kv.__exit__()

    def drop_rows(self) -> None:
        """Drop the tensors over all rows; the next token makes them again."""
        self.rows[:] = [None] * len(self.rows)
        self.token = None

    def release_rows(self) -> None:
        """Drop the tensors over rows if they would keep memory from being given back."""
        if self.kv is None or self.kv.grow:
            self.drop_rows()

    def reorder(self, source: npt.NDArray[np.int64], layers: Sequence[int] | None = None) -> None:
        """Give each stream the tokens of another, in place, in all layers or some."""
        kv = self.kv
        moved = np.flatnonzero(source != np.arange(len(source)))
        if kv is None or not moved.size:
            return
        n = kv.next_position if self.window is None else kv.n_rows
        for layer in range(len(self.lengths)) if layers is None else layers:
            for rows in kv._body._all_rows(layer):
                held = rows[:, :, :n]
                held[moved] = held[source[moved]]

    def select(self, source: npt.NDArray[np.int64], budget_bytes: int | None) -> KVCache | None:
        """Return a cache whose streams are some of this one's, in this order."""
        kv = self.kv
        if kv is None:
            return None
        made = self.make((len(source), *self.dims[1:]), (kv.dtype, kv.v_dtype), budget_bytes)
        n, position = min(kv.seq_len, self.window or kv.seq_len), kv.next_position
        row = 0 if self.window is None else (position - n) % made.n_rows
        try:
            made._body._begin_restore(position, n)
            for layer in range(len(self.lengths)):
                parts = zip(made._body._all_rows(layer), kv.layer(layer), strict=True)
                for new, old in parts:
                    new[:, :, row : row + n] = old[source, :, old.shape[2] - n :]
            made._body._finish_restore(position, n, kv._body._first_kept())
        except BaseException:
            made.__exit__()
            raise
        return made


class Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of the cache for transformers."""

    is_compileable = False
    is_croppable = True

    def __init__(self, owner: Any, group: Group, index: int) -> None:
        self._owner = weakref.ref(owner)  # no cycle, so that a dropped cache is freed at once
        self.group = group
        self.index = index  # in its group
        self._place = operator.place_of(self)
        self.passes = 0  # that brought tokens
        self.counts_passes = True  # until compiled code runs, which does not count

    def __repr__(self) -> str:
        window = self.group.window
        kind = "full" if window is None else f"window of {window}"
        return f"Layer({kind}, {self.length} tokens)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise no_copy(self)

    @property
    def length(self) -> int:
        """All tokens so far, also those that a window has dropped."""
        return self.group.lengths[self.index]

    @property
    def rows(self) -> Tensors | None:
        """All usable rows of K and V, of a ring in both images, or None before they were used."""
        return self.group.rows[self.index]

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
        blocks = max(map(block_values, (kv.dtype, kv.v_dtype))) > 1
        return self._past(kv, torch.float32 if blocks else None)[part]

    def _past(self, kv: KVCache, dtype: torch.dtype | None) -> Tensors:
        """Return K and V that the next token may attend to, converted if there is a type."""
        wanted = None if dtype is None else DTYPES[dtype]
        parts = kv.layer(self.index, dtype="float32" if kv.rotate else wanted)
        if kv.rotate:  # queries are not rotated
            parts = rotate_heads(parts[0], "k"), rotate_heads(parts[1], "v")
        window = self.group.window
        k, v = (
            shown if window is None else shown[:, :, max(0, shown.shape[2] - window + 1) :]
            for shown in map(as_tensor, parts)
        )
        return (k, v) if dtype is None else (k.to(dtype), v.to(dtype))

    def _cache(self) -> Any:
        """Return the cache that the layer is one of."""
        owner = self._owner()
        if owner is None:
            raise ClosedError("KVCache: expected a live cache, got a layer of one that is gone")
        return owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the caches for tokens like these, ``[batch, heads, n, head_dim]``."""
        self._cache()._start(self.group, key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Tensors:
        """Append tokens, and return all that they attend to.

        Parameters
        ----------
        key_states, value_states : torch.Tensor
            ``[batch, heads, n, head_dim]``, on the CPU, without gradients. Heads of K and V may
            differ in size.

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
        if torch.compiler.is_compiling():
            self.counts_passes = False
            return self._append_compiled(key_states, value_states)
        group, n = self.group, key_states.shape[2]
        is_known = group.token == (key_states.shape, value_states.shape, key_states.dtype)
        if not is_known and (
            group.dims != dims_of(key_states, value_states)
            or value_states.shape[:3] != key_states.shape[:3]
        ):
            self.lazy_initialization(key_states, value_states)
        check_gradients(key_states)
        try:
            append = self._append_token if is_known else self._append
            shown = append(group.require(), key_states, value_states)
        except CacheFull as error:
            if self.length + n > group.require().max_seq_len:
                error.message += "; max_seq_len= makes room for more"
            raise
        self.passes += 1
        if group.prompt is not None:
            group.finish_prompt()
        if n == 1 and group.packs(shown[0]):
            return shown[0].as_subclass(Rows), shown[1]
        return shown

    def _append(self, kv: KVCache, key_states: torch.Tensor, value_states: torch.Tensor) -> Tensors:
        """Append tokens that fit the cache, and return all that they attend to."""
        group, window, n = self.group, self.group.window, key_states.shape[2]
        if kv.rotate or not (NAMES.get(key_states.dtype) == kv.dtype == kv.v_dtype):
            return self._append_converted(kv, key_states, value_states)
        if window is not None and window - 1 + n > kv.n_rows:
            return self._append_far(kv, key_states, value_states)
        if n == 1:
            group.token = (key_states.shape, value_states.shape, key_states.dtype)
            return self._append_token(kv, key_states, value_states)
        return self._append_rows(kv, key_states, value_states)

    def _append_token(
        self, kv: KVCache, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> Tensors:
        """Append a token in the cache's type."""
        if not (_is_plain(key_states) and _is_plain(value_states, key_states.dtype)):
            return self._append_rows(kv, key_states, value_states)
        row = kv._body._append_token(self.index, key_states.data_ptr(), value_states.data_ptr())
        self.group.lengths[self.index] += 1
        return self._attended(kv, self._rows_to(kv, row + 1), row, 1)

    def _append_rows(
        self, kv: KVCache, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> Tensors:
        """Append tokens that lie in any way."""
        n = key_states.shape[2]
        row = kv._body._append_begin(self.index, n)
        keys, values = self._rows_to(kv, row + n)
        keys.narrow(2, row, n).copy_(key_states)
        values.narrow(2, row, n).copy_(value_states)
        kv._body._append_end(self.index, n)
        self.group.lengths[self.index] += n
        return self._attended(kv, (keys, values), row, n)

    def _attended(self, kv: KVCache, rows: Tensors, row: int, n: int) -> Tensors:
        """Return what n tokens from a row on attend to."""
        window, (keys, values) = self.group.window, rows
        first, end = 0, row + n
        if window is not None:
            first = end - min(self.length, window - 1 + n)
            if first < 0:  # continue in the second image of the rows
                first, end = first + kv.n_rows, end + kv.n_rows
        return keys.narrow(2, first, end - first), values.narrow(2, first, end - first)

    def _append_compiled(self, key_states: torch.Tensor, value_states: torch.Tensor) -> Tensors:
        """Append tokens by the operator, without a look at the cache, for `torch.compile`."""
        check_gradients(key_states)
        group, n, length = self.group, key_states.shape[2], self.length
        rows, window = None if group.grows else self.rows, group.window
        shown, first = self.get_mask_sizes(n)
        group.lengths[self.index] += n
        if not length or window == 1:
            operator.append(self._place, key_states, value_states, [], 0)
            return key_states, value_states
        n_rows = 0
        if rows is not None and all(map(fits, (key_states, value_states), rows)):
            n_rows = rows[0].shape[2] if window is None else rows[0].shape[2] // 2
        if rows is None or shown > n_rows:
            keys, values = operator.append(self._place, key_states, value_states, [], shown)
            return keys, values
        operator.append(self._place, key_states, value_states, [*rows], 0)
        first = first % n_rows if window is not None else 0
        return rows[0].narrow(2, first, shown), rows[1].narrow(2, first, shown)

    def _rows_to(self, kv: KVCache, end: int) -> Tensors:
        """Return tensors of all usable rows, at least up to `end`."""
        rows = self.group.rows[self.index]
        if rows is None or rows[0].shape[2] < end:
            # Inference tensors could not be written in another mode.
            with torch.inference_mode(False):
                k, v = kv._body._all_rows(self.index)
                rows = self.group.rows[self.index] = as_tensor(k), as_tensor(v)
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
        self.group.lengths[self.index] += n
        return shown

    def _append_converted(
        self, kv: KVCache, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> Tensors:
        """Append to a cache of another type, and return converted copies."""
        shown, states = (key_states, value_states), (key_states, value_states)
        length, window = self.length, self.group.window
        if length and window not in (None, 1):
            past = self._past(kv, key_states.dtype)
            shown = torch.cat([past[0], key_states], 2), torch.cat([past[1], value_states], 2)
        kv.append(self.index, _as_array(key_states), _as_array(value_states))
        self.group.lengths[self.index] += key_states.shape[2]
        if length and window is None:
            shown = self._converted(kv, key_states.dtype)
            for part, given in zip(shown, states, strict=True):
                part[:, :, length:] = given
        return shown

    def _converted(self, kv: KVCache, dtype: torch.dtype) -> Tensors:
        """Return copies of all tokens, in memory that was used for copies before."""
        scratch, wanted = self.group.scratch, torch.float32 if kv.rotate else dtype
        shapes = [(*self.group.dims[:2], self.length, size) for size in self.group.dims[2:]]
        k, v = [scratch.take(shape, DTYPES[wanted]) for shape in shapes]
        kv.layer(self.index, dtype=DTYPES[wanted], out=(k, v))
        if kv.rotate:  # queries are not rotated
            rotate_heads(k, "k", out=k)
            rotate_heads(v, "v", out=v)
        if wanted != dtype:
            made = [scratch.take(shape, DTYPES[dtype]) for shape in shapes]
            for part, exact in zip(made, (k, v), strict=True):
                as_tensor(part).copy_(as_tensor(exact))
            k, v = made
        return as_tensor(k), as_tensor(v)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens `update` will return, and the position of the first one."""
        window = self.group.window
        past = self.length if window is None else min(self.length, window - 1)
        return past + query_length, self.length - past

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self.length

    def get_max_length(self) -> int:
        """Return the most tokens that the layer holds, or -1 if there is no limit."""
        return self.group.window or self.group.options.max_seq_len or -1

    # ---- what transformers asks of its own layers ----

    device = torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of the keys, or None."""
        keys = self.keys
        return None if keys is None else keys.dtype

    def offload(self) -> None:
        """Do nothing: the rows are in main memory."""

    def prefetch(self) -> None:
        """Do nothing: the rows are in main memory."""

    def reset(self) -> None:
        """Drop all tokens of the cache, since layers of one kind go together."""
        self._cache().reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Give each stream i of this layer the tokens of stream ``beam_idx[i]``, in place."""
        self.group.reorder(stream_numbers(beam_idx, self.group.dims[0]), [self.index])

    def crop(self, tokens_to_remove: int) -> None:
        """Raise NotImplementedError, since layers of one kind go together."""
        raise _together("crop")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Raise NotImplementedError, since layers of one kind go together."""
        raise _together("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Raise NotImplementedError, since layers of one kind go together."""
        raise _together("batch_select_indices")


def check_gradients(key_states: torch.Tensor) -> None:
    """Raise RuntimeError for tokens that require gradients."""
    if key_states.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "KVCache.update: expected tokens without gradients, which a cache does not keep: "
            "call the model under torch.no_grad()"
        )


def fits(states: torch.Tensor, rows: torch.Tensor) -> bool:
    """Return whether tokens have the type and sizes of rows."""
    sizes: bool = states.shape[:2] == rows.shape[:2] and states.shape[3] == rows.shape[3]
    return sizes and bool(states.dtype == rows.dtype)


def stream_numbers(beam_idx: torch.Tensor, batch: int) -> npt.NDArray[np.int64]:
    """Return the number of another stream for each one, or raise ValueError."""
    source: npt.NDArray[Any] = beam_idx.numpy(force=True)
    if batch and len(source) != batch:
        raise ValueError(f"beam_idx: expected {batch} streams, got {len(source)}")
    if batch and (source.dtype.kind not in "iu" or source.min() < 0 or source.max() >= batch):
        raise ValueError(f"beam_idx: expected integers from 0 to {batch - 1}, got {source}")
    return source.astype(np.int64)


def no_copy(layer: object) -> TypeError:
    """Return the error for a copy or a pickle of a layer, which would write to the same memory."""
    return TypeError(
        f"{type(layer).__name__}: expected a copy of the cache, whose layers share memory, got one "
        "of a layer: copy.copy(cache), or its save()"
    )


def _together(call: str) -> NotImplementedError:
    return NotImplementedError(
        f"Layer.{call}: expected a call for all layers, which share memory, got one for a layer: "
        f"use the cache's {call}"
    )
