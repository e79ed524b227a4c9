"""The cache that `generate` takes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any, Literal, Self, Unpack

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DummyLayer, get_layer_types_and_kwargs

from unimem.base.arguments import flag, integer
from unimem.kv import types
from unimem.kv.cache.cache import KVCache as CoreCache
from unimem.kv.store.store import KVStore
from unimem.system.placement import PlacementOptions
from unimem.transformers import sessions, stored_prefixes
from unimem.transformers.layers import CacheOptions, Group, Layer
from unimem.transformers.model_name import model_name

__all__ = ["KVCache"]

# Layers that attend to chunks are cached like those of a window: only the mask differs.
_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
_NONE = "dummy"  # a layer without keys of its own


def windows(config: PreTrainedConfig) -> list[int | None]:
    """Return how many tokens each layer keeps: None for all, or 0 for a layer without keys.

    Raises
    ------
    NotImplementedError
        Layers of other kinds.
    """
    kinds, options = get_layer_types_and_kwargs(config)
    if unknown := sorted(set(kinds) - {*_KINDS, _NONE}):
        raise NotImplementedError(
            f"KVCache: expected layers of {', '.join(_KINDS)}, and {config.model_type} has "
            f"{', '.join(unknown)}: use transformers' DynamicCache"
        )
    return [
        0 if kind == _NONE else given.get("sliding_window")
        for kind, given in zip(kinds, options, strict=True)
    ]


class KVCache(Cache):  # type: ignore[misc]
    """A `transformers.Cache` whose rows lie in caches of unimem, and never move.

    Give it to ``model.generate(..., past_key_values=cache)`` or to the model itself. Layers with
    full attention share a `unimem.KVCache`, and layers with a window a ring, both with
    ``order="head"``. Keys and values are views of their rows, for exactly the current tokens: a
    token costs one copy of its own rows, however long the conversation is.

    Attention of grouped queries is fastest with ``model.set_attn_implementation("unimem")``: see
    `unimem.transformers.attention`.

    One thread uses it at a time. A forked child has its own copy, except of windows. It keeps no
    gradients, and is for the CPU.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The model's configuration.
    max_seq_len : int, optional
        Tokens that fit; ``config.max_position_embeddings`` by default.
    dtype : str, optional
        The stored type, as for `unimem.KVCache`; by default the type that the model computes in.
        For another type attention gets converted copies, whose cost grows with the conversation.
    grow : bool, default True
        Whether memory of full attention is taken as tokens arrive, or at once.
    spare_rows : int, default 128
        For windows: `crop` can drop this many tokens, and updates of up to this many return views.
    budget_bytes : int, optional
        A limit of `capacity_bytes`: CacheFull is raised instead of exceeding it.
    **placement
        See `unimem.PlacementOptions`.

    Raises
    ------
    NotImplementedError
        The model has layers without full or sliding attention.
    ValueError, TypeError
        As `unimem.KVCache`, mostly at the first token, which gives the number of streams.

    Examples
    --------
    >>> import torch, transformers
    >>> from unimem.transformers import KVCache
    >>> config = transformers.LlamaConfig(
    ...     hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...     num_key_value_heads=2, vocab_size=64, max_position_embeddings=256)
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> with KVCache.for_model(model) as cache:
    ...     ids = model.generate(torch.tensor([[1, 2, 3]]), past_key_values=cache,
    ...                          max_new_tokens=5, do_sample=False, pad_token_id=0)
    ...     cache.get_seq_length()
    7
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        max_seq_len: int | None = None,
        *,
        dtype: npt.DTypeLike | None = None,
        grow: bool = True,
        spare_rows: int = 128,
        budget_bytes: int | None = None,
        **placement: Unpack[PlacementOptions],
    ) -> None:
        text = config.get_text_config(decoder=True)
        if max_seq_len is None:
            max_seq_len = text.max_position_embeddings
        options = CacheOptions(
            max_seq_len=integer(max_seq_len, "max_seq_len", 1),
            dtype=None if dtype is None else types.kv_type(dtype),
            grow=flag(grow, "grow"),
            spare_rows=integer(spare_rows, "spare_rows", 0),
            budget_bytes=budget_bytes,
            placement=dict(placement),
        )
        self._options = options
        self._model: weakref.ref[PreTrainedModel] | None = None
        groups: dict[int | None, Group] = {}
        layers: list[Layer | DummyLayer] = []
        for window in windows(text):
            if window == 0:
                layers.append(DummyLayer())
                continue
            group = groups.setdefault(window, Group(window, options))
            layer = Layer(self, group, len(group.layers))
            group.layers.append(layer)
            layers.append(layer)
        # Rings are first: they take all of their memory at once, and may refuse a crop.
        self._groups = sorted(groups.values(), key=lambda group: group.window is None)
        super().__init__(layers=layers)

    @classmethod
    def for_model(
        cls, model: PreTrainedModel, max_seq_len: int | None = None, **options: Any
    ) -> Self:
        """Make a cache for a model, which `save` then knows; options are as for the class."""
        made = cls(model.config, max_seq_len, **options)
        made._model = weakref.ref(model)
        return made

    # ---- for its layers ----

    def _start(self, group: Group, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make the cache of a group for its first tokens."""
        if keys.shape != values.shape:
            raise ValueError(
                f"KVCache.update: expected keys and values of one shape, got {tuple(keys.shape)} "
                f"and {tuple(values.shape)}"
            )
        if any(layer.length for layer in group.layers):
            batch, heads, head_dim = group.dims
            raise ValueError(
                f"KVCache.update: expected [{batch}, {heads}, n, {head_dim}] as before, got "
                f"{list(keys.shape)}: reset() first, or batch_select_indices()"
            )
        budget = self._options.budget_bytes
        starting = [group]
        if budget is not None:
            # Start all groups, so that growing ones leave the memory of windows alone.
            starting = [one for one in self._groups if one is group or one.kv is None]
        for one in starting:
            others = [other for other in self._groups if other is not one]
            kv = one.kv
            one.start(keys, None if budget is None else budget - sum(map(_taken, others)))
            for layer in one.layers:
                layer.drop_rows()
            if kv is not None:
                kv.__exit__()

    # ---- the interface of transformers ----

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens, as assisted decoding does.

        Parameters
        ----------
        tokens_to_remove : int
            Minus the number of tokens to drop, by the convention of transformers.

        Raises
        ------
        ValueError
            The number is positive, or too large, or a window has overwritten rows that it would
            have to show, which a larger `spare_rows` keeps. No token was dropped.
        RuntimeError
            Some layers lack tokens, since a forward pass was interrupted: call `rollback`.
        """
        length, n = self._length(), -tokens_to_remove
        if n < 0:
            raise ValueError(
                "KVCache.crop: expected minus the number of tokens to drop, got "
                f"{tokens_to_remove}: crop(-n) drops the last n"
            )
        if n > length:
            raise ValueError(f"KVCache.crop: expected at most {length} tokens to drop, got {n}")
        if n:
            self._check_whole("crop")
            self._crop([n] * len(self._groups))

    def _crop(self, counts: Sequence[int]) -> None:
        """Drop these numbers of tokens from the groups, or none."""
        for group, n in zip(self._groups, counts, strict=True):
            group.check_crop(n)
        for group, n in zip(self._groups, counts, strict=True):
            group.crop(n)

    def rollback(self) -> None:
        """Drop tokens that some layers lack, such as those interrupted by CacheFull.

        It raises ValueError, and leaves an empty cache, if a window has overwritten rows that it
        would have to show, which a larger `spare_rows` keeps.
        """
        length = min(layer.length for group in self._groups for layer in group.layers)
        if not length:
            self.reset()
            return
        for group in self._groups:
            group.rollback()
        try:
            self._crop([group.layers[0].length - length for group in self._groups])
        except ValueError:
            self.reset()
            raise

    def _check_whole(self, call: str) -> None:
        lengths = {layer.length for group in self._groups for layer in group.layers}
        if len(lengths) > 1:
            raise RuntimeError(
                f"KVCache.{call}: layers differ in length, from {min(lengths)} to {max(lengths)} "
                "tokens, since a forward pass was interrupted: rollback() first"
            )

    def reset(self) -> None:
        """Drop all tokens; the number of streams may change afterwards."""
        for group in self._groups:
            group.clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Give each stream i the tokens of stream ``beam_idx[i]``, in place, for beam search."""
        source = beam_idx.detach().cpu().numpy().astype(np.int64)
        batch = self._batch()
        if batch and len(source) != batch:
            raise ValueError(f"beam_idx: expected {batch} streams, got {len(source)}")
        for group in self._groups:
            group.reorder(source)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each stream: the tokens are copied into caches of more streams.

        Raises
        ------
        CacheFull, CapacityError, MemoryError, PlacementError
            There is no room. Nothing has changed.
        RuntimeError
            Some layers lack tokens.
        """
        self._select(np.repeat(np.arange(self._batch()), repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some streams, by indices or a mask: the tokens are copied into new caches.

        It raises as `batch_repeat_interleave`.
        """
        self._select(np.arange(self._batch())[indices.detach().cpu().numpy()])

    def _length(self) -> int:
        return max(layer.length for group in self._groups for layer in group.layers)

    def _batch(self) -> int:
        return max((group.dims[0] for group in self._groups), default=0)

    def _select(self, source: npt.NDArray[np.int64]) -> None:
        if not self._batch():
            return
        self._check_whole("batch_select_indices")
        budget = self._options.budget_bytes
        made: list[CoreCache | None] = []
        try:
            for group in self._groups:
                rest = budget and budget - sum(_promised(kv) for kv in made if kv is not None)
                made.append(group.select(source, rest))
        except BaseException:
            for kv in made:
                if kv is not None:
                    kv.__exit__()
            raise
        for group, kv in zip(self._groups, made, strict=True):
            if kv is not None:
                before = group.require()
                group.adopt(kv)
                before.__exit__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def copy(self) -> Self:
        """Return a cache with the same tokens, in memory of its own.

        It raises as `batch_repeat_interleave`.
        """
        self._check_whole("copy")
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        groups = {group: Group(group.window, group.options) for group in self._groups}
        other._groups = list(groups.values())
        other.layers = [DummyLayer() for _ in self.layers]
        for i, layer in enumerate(self.layers):
            if isinstance(layer, Layer):
                group = groups[layer.group]
                other.layers[i] = Layer(other, group, layer.index)
                group.layers.append(other.layers[i])
        try:
            for old, new in groups.items():
                if old.kv is not None:
                    new.adopt(old.kv.copy())
        except BaseException:
            other.__exit__()
            raise
        return other

    # ---- sessions ----

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        tokens: torch.Tensor | npt.NDArray[Any] | Sequence[int] | None = None,
        model: PreTrainedModel | None = None,
    ) -> None:
        """Write the tokens to a file, for `restore` in another process.

        An existing file is replaced atomically. If a model has windows and full attention, the
        windows are in a second file beside it.

        Parameters
        ----------
        path : path-like
            The file.
        tokens : torch.Tensor, numpy.ndarray or sequence of int, optional
            Their ids, ``[n]`` or ``[batch, n]``. Further ids are ignored, such as the last one that
            `generate` returns.
        model : transformers.PreTrainedModel, optional
            The model; that of `for_model` by default.

        Raises
        ------
        ValueError, TypeError
            No model; weights that are not in memory; no tokens, or too few ids.
        RuntimeError
            Some layers lack tokens.
        OSError
            As `unimem.KVCache.save`. The file is as it was.
        """
        known = self._known_model(model, "save")
        self._check_whole("save")
        sessions.save(self._groups, path, tokens, model_name(known))

    def _known_model(self, model: PreTrainedModel | None, call: str) -> PreTrainedModel:
        if model is None and self._model is not None:
            model = self._model()
        if model is None:
            raise ValueError(f"KVCache.{call}: expected model=, which identifies a conversation")
        return model

    @classmethod
    def restore(
        cls,
        path: str | os.PathLike[str],
        *,
        model: PreTrainedModel,
        tokens: torch.Tensor | npt.NDArray[Any] | Sequence[int] | None = None,
        mode: Literal["map", "copy"] = "map",
        verify: bool | None = None,
        **placement: Unpack[PlacementOptions],
    ) -> Self:
        """Make a cache from a file of `save`: `generate` goes on where the conversation ended.

        Parameters
        ----------
        path : path-like
            The file.
        model : transformers.PreTrainedModel
            The model that it was saved with.
        tokens : torch.Tensor, numpy.ndarray or sequence of int, optional
            The ids that the conversation begins with, ``[n]`` or ``[batch, n]``: the ids of the
            file must be the first of them.
        mode, verify, **placement
            As for `unimem.KVCache.restore`.

        Raises
        ------
        SnapshotError
            The file is no snapshot, is damaged, or is for another model or other tokens.
        ValueError, TypeError, OSError, CapacityError, MemoryError, PlacementError
            As `unimem.KVCache.restore`.
        """
        made = cls.for_model(model)
        restored = sessions.restore(
            made._groups,
            path,
            tokens,
            model_name(model),
            mode=mode,
            verify=verify,
            **placement,
        )
        for group, kv in zip(made._groups, restored, strict=True):
            group.adopt(kv)
        return made

    # ---- prefixes ----

    def put_into(
        self,
        store: KVStore,
        tokens: torch.Tensor | npt.NDArray[Any] | Sequence[int],
        *,
        model: PreTrainedModel | None = None,
    ) -> int:
        """Put the whole chunks of the tokens into a store, for `restore_from` in any process.

        Parameters
        ----------
        store : unimem.KVStore
            The store.
        tokens : torch.Tensor, numpy.ndarray or sequence of int
            The ids of all tokens, ``[n]`` or ``[1, n]``. Ids that are not in the cache yet, such as
            the last one that `generate` has chosen, do not count.
        model : transformers.PreTrainedModel, optional
            The model; that of `for_model` by default.

        Returns
        -------
        int
            How many first tokens of this conversation the store has now.

        Raises
        ------
        ValueError, TypeError
            No model, no store, no ids of one stream; a cache of several streams; or a window that
            has dropped first tokens: put them before it is full.
        RuntimeError
            Some layers lack tokens.
        OSError, ClosedError
            As `unimem.KVStore.put`.
        """
        known = self._known_model(model, "put_into")
        self._check_whole("put_into")
        ids = sessions.one_stream(tokens)
        return stored_prefixes.put(
            self._groups, stored_prefixes.check_store(store), ids, model_name(known)
        )

    def restore_from(
        self,
        store: KVStore,
        tokens: torch.Tensor | npt.NDArray[Any] | Sequence[int],
        *,
        model: PreTrainedModel | None = None,
    ) -> int:
        """Take first tokens from a store, so that the model does not compute them.

        Parameters
        ----------
        store : unimem.KVStore
            The store.
        tokens : torch.Tensor, numpy.ndarray or sequence of int
            The ids for `generate`, ``[n]`` or ``[1, n]``. The last one is always left to compute.
        model : transformers.PreTrainedModel, optional
            The model; that of `for_model` by default.

        Returns
        -------
        int
            How many tokens the cache holds now: the whole chunks that the store has and that fit.

        Raises
        ------
        ValueError, TypeError
            No model, no store, no ids of one stream; or the cache has tokens.
        OSError, CapacityError, MemoryError, PlacementError, ClosedError
            As `unimem.KVStore.restore_into`. The cache is empty.
        """
        known = self._known_model(model, "restore_from")
        ids = sessions.one_stream(tokens)[:-1]
        stored_prefixes.check_store(store)
        if length := self._length():
            raise ValueError(
                f"KVCache.restore_from: expected an empty cache, got one of {length} tokens: "
                "reset() first"
            )
        keys = stored_prefixes.first_keys(known)
        try:
            for group in self._groups:
                if group.kv is None or not group.takes(keys):
                    self._start(group, keys, keys)
            return stored_prefixes.restore(self._groups, store, ids, model_name(known))
        except BaseException:
            self.reset()
            raise

    # ---- figures and the end ----

    @property
    def caches(self) -> tuple[CoreCache, ...]:
        """The `unimem.KVCache` of each kind of layers that has tokens, windows first."""
        return tuple(group.kv for group in self._groups if group.kv is not None)

    @property
    def memory_usage_bytes(self) -> int:
        """Bytes of the tokens."""
        return sum(kv.memory_usage_bytes for kv in self.caches)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of memory for tokens."""
        return sum(kv.capacity_bytes for kv in self.caches)

    def close(self) -> None:
        """Give the memory back; live views keep theirs."""
        self.__exit__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._groups:
            kv, group.kv, group.dims, group.oldest = group.kv, None, (0, 0, 0), 0
            for layer in group.layers:
                layer.length = 0
                layer.drop_rows()
            if kv is not None:
                kv.__exit__()

    def __del__(self) -> None:
        if hasattr(self, "_groups"):
            self.__exit__()

    def __repr__(self) -> str:
        return f"KVCache({self._length()} tokens, {len(self.layers)} layers, {self.caches})"


def _promised(kv: CoreCache) -> int:
    """Return the most bytes that a cache may come to have."""
    return kv.budget_bytes if kv.grow and kv.budget_bytes is not None else kv.capacity_bytes


def _taken(group: Group) -> int:
    return 0 if group.kv is None else _promised(group.kv)
