"""The cache that `generate` takes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from inspect import signature
from operator import index
from typing import Any, Literal, NamedTuple, NoReturn, Self, Unpack

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from unimem._core.arrays import checked_nbytes
from unimem.base.arguments import flag, integer, one_of
from unimem.errors import ClosedError
from unimem.kv import types
from unimem.kv.cache.cache import KVCache as CoreCache
from unimem.kv.store.store import KVStore
from unimem.system.placement import PlacementOptions, check_placement
from unimem.transformers import sessions, stored_prefixes
from unimem.transformers.indexed import IndexedLayer
from unimem.transformers.layers import CacheOptions, Group, Layer, stream_numbers
from unimem.transformers.model_name import model_name
from unimem.transformers.on_device import DeviceGroup, DeviceLayer, device_of
from unimem.transformers.states import StateLayer, TokensAndStates
from unimem.transformers.static import StaticGroup, StaticLayer

# Layers that attend to chunks are cached like those of a window: only the mask differs.
_INDEXED = "indexed_attention"
_KINDS = ("full_attention", "sliding_attention", "chunked_attention", _INDEXED)
_STATES = ("conv", "linear_attention")
_BOTH = ("hybrid", "hybrid_sliding")
_NONE = "dummy"  # a layer without keys of its own
_CACHE_NAMES = {"cache", "cache_params", "past_key_values"}
# Models with caches of their own, or without any; that of Qwen 4 keeps positions beside keys.
_OTHER_MODELS = ("qwen4_exp qwen4_exp_text recurrent_gemma reformer rwkv xlm xlnet xlstm").split()


class _Kept(NamedTuple):
    """What a layer keeps: tokens, all or the last of a window, and a number of states."""

    tokens: bool
    window: int | None
    n_states: int
    indexed: bool = False


def _kept(config: PreTrainedConfig) -> list[_Kept]:
    """Return what each layer keeps.

    Raises
    ------
    NotImplementedError
        Layers of other kinds, or a model whose cache is another.
    """
    if getattr(config, "is_encoder_decoder", False) or config.model_type in _OTHER_MODELS:
        kind = "an encoder" if config.model_type not in _OTHER_MODELS else "a cache of its own"
        raise NotImplementedError(
            f"KVCache: expected a decoder with a cache of transformers, and {config.model_type} "
            f"has {kind}: call the model without this cache"
        )
    kinds, options = get_layer_types_and_kwargs(config)
    if unknown := sorted(set(kinds) - {*_KINDS, *_STATES, *_BOTH, _NONE}):
        raise NotImplementedError(
            f"KVCache: expected layers of {', '.join((*_KINDS, *_STATES, *_BOTH))}, and "
            f"{config.model_type} has {', '.join(unknown)}: use transformers' DynamicCache"
        )
    return [
        _Kept(
            kind in _KINDS + _BOTH,
            given.get("sliding_window"),
            given.get("number_of_states", 0),
            kind == _INDEXED,
        )
        for kind, given in zip(kinds, options, strict=True)
    ]


class KVCache(Cache):  # type: ignore[misc]
    """A `transformers.Cache` whose rows lie in caches of unimem, and never move.

    Give it to ``model.generate(..., cache=cache)`` or to the model itself; transformers 5.23 calls
    it ``past_key_values``. Layers with full attention share a `unimem.KVCache`, and
    layers with a window a ring, both with ``order="head"``. Keys and values are views of their
    rows, for exactly the current tokens: a token costs one copy of its own rows, however long the
    conversation is. States, such as Mamba's, lie in memory of unimem as well.

    Attention of grouped queries is fastest with ``model.set_attn_implementation("unimem")``: see
    `unimem.transformers.attention`.

    One thread uses it at a time. A forked child has its own copy, except of windows and of a GPU's
    memory. It keeps no gradients.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The model's configuration.
    max_seq_len : int, optional
        Tokens that fit. By default as many as there is room for when the first arrives; with
        ``grow=False`` ``config.max_position_embeddings``.
    dtype : str, optional
        The stored type, as for `unimem.KVCache`, or a pair such as ``"q8_0,q4_0"`` of K and V; by
        default the type that the model computes in. For another type attention gets converted
        copies, whose cost grows with the conversation.
    grow : bool, default True
        Whether memory of full attention is taken as tokens arrive, or at once.
    rotate : bool, default False
        Whether heads are stored rotated, so that outliers cost quantized types less; a head has a
        multiple of 64 values. Attention gets copies that are rotated back.
    spare_rows : int, default 128
        For windows: `crop` can drop this many tokens, and updates of up to this many return views.
    budget_bytes : int or str, optional
        A limit of `capacity_bytes`: CacheFull is raised instead of exceeding it.
    device : int, optional
        CUDA's number of the GPU for the rows, which `for_model` takes from the model; by default
        they are in main memory. There windows keep all tokens, and memory that grows is copied.
    static : bool, default False
        Whether attention gets all `max_seq_len` rows and a mask, as with transformers' StaticCache:
        `generate` then compiles the model, and CUDA graphs repeat each step. On a GPU only. Tokens
        that do not fit are not kept by compiled code; CacheFull follows at the next other call.
    **placement
        See `unimem.PlacementOptions`.

    Raises
    ------
    NotImplementedError
        The model has layers of other kinds, an encoder, or a cache of its own.
    ValueError, TypeError
        An unknown option, or one out of range. As `unimem.KVCache`, mostly at the first token,
        which gives the number of streams.

    Examples
    --------
    >>> import torch, transformers
    >>> from unimem.transformers import KVCache
    >>> config = transformers.LlamaConfig(
    ...     hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...     num_key_value_heads=2, vocab_size=64, max_position_embeddings=256)
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> with KVCache.for_model(model) as cache:
    ...     ids = model.generate(torch.tensor([[1, 2, 3]]), cache=cache,
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
        rotate: bool = False,
        spare_rows: int = 128,
        budget_bytes: int | str | None = None,
        device: int | None = None,
        static: bool = False,
        **placement: Unpack[PlacementOptions],
    ) -> None:
        text = config.get_text_config(decoder=True)
        kept = _kept(text)
        check_placement("unimem.transformers.KVCache", placement)
        budget = None if budget_bytes is None else checked_nbytes(budget_bytes, "budget_bytes")
        if budget is not None and any(one.indexed for one in kept):
            raise NotImplementedError(
                f"budget_bytes: expected None, since {text.model_type} has indexers, whose keys "
                f"grow beside the tokens, got {budget_bytes}"
            )
        least = getattr(text, "max_position_embeddings", None)
        if max_seq_len is None and not grow and least is None:
            raise ValueError(
                f"max_seq_len: expected a number with grow=False, since {text.model_type} has no "
                "max_position_embeddings, got None"
            )
        self._options = options = CacheOptions(
            max_seq_len=None if max_seq_len is None else integer(max_seq_len, "max_seq_len", 1),
            least_seq_len=least or 1,
            dtype=None if dtype is None else types.kv_pair(dtype, "dtype"),
            grow=flag(grow, "grow"),
            rotate=flag(rotate, "rotate"),
            spare_rows=integer(spare_rows, "spare_rows", 0),
            budget_bytes=budget,
            placement=dict(placement),
            config=text,
            device=None if device is None else integer(device, "device", 0),
        )
        both = any(one.tokens and (one.indexed or one.n_states) for one in kept)
        if device is not None and both:
            raise NotImplementedError(
                f"device: expected None for {text.model_type}, whose layers have an indexer, or "
                f"keys and states, got {device}: use transformers' DynamicCache"
            )
        if flag(static, "static") and (
            None in (device, max_seq_len) or dtype is not None or any(one.n_states for one in kept)
        ):
            raise ValueError(
                "static: expected False, or a model on a GPU without states, max_seq_len= and no "
                f"dtype=, got device={device}, max_seq_len={max_seq_len} and dtype={dtype!r}"
            )
        self._closed = False
        self._model: weakref.ref[PreTrainedModel] | None = None
        kind = Group if device is None else StaticGroup if static else DeviceGroup
        groups = {one.window: kind(one.window, options) for one in kept if one.tokens}
        # Rings are first: they take all of their memory at once, and may refuse a crop.
        self._groups = sorted(groups.values(), key=lambda group: group.window is None)
        super().__init__(layers=[self._layer(one, groups) for one in kept])

    def _layer(
        self, kept: _Kept, groups: Mapping[int | None, Group]
    ) -> Layer | StateLayer | DummyLayer:
        if not kept.tokens:
            return (
                StateLayer(kept.n_states, self._options.placement)
                if kept.n_states
                else DummyLayer()
            )
        group = groups[kept.window]
        number = group.add()
        if kept.n_states:
            return TokensAndStates(kept.n_states, self, group, number)
        if isinstance(group, StaticGroup):
            return StaticLayer(self, group, number)
        if isinstance(group, DeviceGroup):
            return DeviceLayer(self, group, number)
        return (IndexedLayer if kept.indexed else Layer)(self, group, number)

    @classmethod
    def for_model(
        cls, model: PreTrainedModel, max_seq_len: int | None = None, **options: Any
    ) -> Self:
        """Make a cache where a model is, which `save` then knows; options are as for the class.

        It raises NotImplementedError also for a model that takes no cache.
        """
        if isinstance(model, PreTrainedModel) and not _CACHE_NAMES & {
            *signature(model.forward).parameters
        }:
            raise NotImplementedError(
                f"KVCache: expected a model that takes a cache, and {type(model).__name__} takes "
                "none: call the model without this cache"
            )
        if isinstance(model, PreTrainedModel):
            options = {"device": device_of(model)} | options
        made = cls(model.config, max_seq_len, **options)
        made._model = weakref.ref(model)
        return made

    # ---- for its layers ----

    def _start(self, group: Group, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make the cache of a group for its first tokens."""
        self._check_open()
        if keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                "KVCache.update: expected keys and values of one shape, but for the size of a "
                f"head, got {tuple(keys.shape)} and {tuple(values.shape)}"
            )
        if any(group.lengths):
            batch, heads, head_dim, _ = group.dims
            raise ValueError(
                f"KVCache.update: expected [{batch}, {heads}, n, {head_dim}] as before, got "
                f"{list(keys.shape)}, and values {list(values.shape)}: reset() first, or "
                "batch_select_indices()"
            )
        budget = self._options.budget_bytes
        starting = [group]
        if budget is not None:
            # Start all groups, so that growing ones leave the memory of windows alone.
            starting = [one for one in self._groups if one is group or one.kv is None]
        for one in starting:
            others = [other for other in self._groups if other is not one]
            kv = one.kv
            rest = None if budget is None else budget - sum(map(_taken, others))
            one.start(keys, values, rest)
            if kv is not None:
                kv.__exit__()

    # ---- the interface of transformers ----

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the state of a convolution, or None: a pass asks once, and may write to it."""
        state, layer = super().get_conv_state(layer_idx, state_idx), self.layers[layer_idx]
        layer.note(layer.reads, ("conv", state_idx))
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a recurrent state, or None: a pass asks once, and may write to it."""
        state, layer = super().get_recurrent_state(layer_idx, state_idx), self.layers[layer_idx]
        layer.note(layer.reads, ("recurrent", state_idx))
        return state

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
        self._check_open()
        length, n = self._length(), -index(tokens_to_remove)
        if n < 0:
            raise ValueError(
                "KVCache.crop: expected minus the number of tokens to drop, got "
                f"{tokens_to_remove}: crop(-n) drops the last n"
            )
        states = [layer for layer in self._states() if layer.record_past]
        if n:
            self._check_whole("crop")
            if len(states) < len(self._states()) or not all(one.is_croppable for one in states):
                raise ValueError(
                    f"KVCache.crop: the last {n} tokens cannot be dropped, since layers have "
                    "states that do not go back: reset(), and compute them anew"
                )
            if self._groups and n > length:
                raise ValueError(f"KVCache.crop: expected at most {length} tokens to drop, got {n}")
            self._crop([n] * len(self._groups))
        for layer in states:
            if layer.is_croppable:
                LinearAttentionLayer.crop(layer, -n)

    def _crop(self, counts: Sequence[int]) -> None:
        """Drop these numbers of tokens from the groups, or none."""
        for group, n in zip(self._groups, counts, strict=True):
            group.check_crop(n)
        for group, n in zip(self._groups, counts, strict=True):
            group.crop(n)

    def rollback(self) -> None:
        """Drop tokens that some layers lack, such as those interrupted by CacheFull.

        It raises ValueError, and leaves an empty cache, if a window has overwritten rows that it
        would have to show, which a larger `spare_rows` keeps, or if some layers have states.
        """
        self._check_open()
        length = min(self._lengths(), default=0)
        if self._groups and not length:
            self.reset()
            return
        if self._states() and any(len(found) > 1 for found in (self._lengths(), *self._passes())):
            self.reset()
            raise ValueError(
                "KVCache.rollback: expected layers that go back, got states that do not: the cache "
                "is empty now, compute the tokens anew"
            )
        for group in self._groups:
            group.rollback()
        try:
            self._crop([group.lengths[0] - length for group in self._groups])
        except ValueError:
            self.reset()
            raise

    def _states(self) -> list[StateLayer]:
        return [layer for layer in self.layers if isinstance(layer, StateLayer)]

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("KVCache: expected an open cache, got a closed one: make another")
        self._sync()

    def _sync(self) -> None:
        for group in self._groups:
            group.sync()

    def _check_whole(self, call: str) -> None:
        self._check_open()
        lengths, *passes = self._lengths(), *self._passes()
        for found, kind in ((lengths, "tokens"), *((found, "passes") for found in passes)):
            if len(found) > 1:
                raise RuntimeError(
                    f"KVCache.{call}: layers differ, from {min(found)} to {max(found)} {kind}, "
                    "since a forward pass was interrupted: rollback() first"
                )

    def _lengths(self) -> set[int]:
        return {length for group in self._groups for length in group.lengths}

    def _passes(self) -> tuple[set[int], set[int]]:
        """Return how many passes the layers of a model with states saw, and wrote states anew."""
        states = [layer for layer in self._states() if layer.counts_passes]
        reads = {n for layer in states for n in layer.reads.values() or [0]}
        if any(reads):
            layers = [layer for layer in self.layers if isinstance(layer, Layer)]
            reads |= {layer.passes for layer in layers if layer.counts_passes}
        return reads, {n for layer in states for n in layer.writes.values()}

    def reset(self) -> None:
        """Drop all tokens; the number of streams may change afterwards."""
        self._check_open()
        for group in self._groups:
            group.clear()
        for layer in self.layers:
            if isinstance(layer, Layer):
                layer.passes, layer.counts_passes = 0, True
            if isinstance(layer, StateLayer):
                StateLayer.reset(layer)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Give each stream i the tokens of stream ``beam_idx[i]``, in place, for beam search."""
        self._check_open()
        source = stream_numbers(beam_idx, self._batch())
        for group in self._groups:
            group.reorder(source)
        for layer in self._states():
            StateLayer.reorder_cache(layer, beam_idx)

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
        self._select(np.arange(self._batch())[indices.numpy(force=True)])

    def _length(self) -> int:
        self._sync()
        return max((length for group in self._groups for length in group.lengths), default=0)

    def _batch(self) -> int:
        streams = [group.dims[0] for group in self._groups]
        return max([*streams, *(layer.n_streams() for layer in self._states())], default=0)

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
        for layer in self._states():
            layer.select(source)

    def __copy__(self) -> Self:
        return self.copy()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("KVCache: expected no pickle, got one: save() writes a cache to a file")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def copy(self) -> Self:
        """Return a cache with the same tokens, in memory of its own.

        It raises as `batch_repeat_interleave`.
        """
        self._check_whole("copy")
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        groups = {group: type(group)(group.window, group.options) for group in self._groups}
        other._groups = list(groups.values())
        by_window = {
            layer.group.window: groups[layer.group]
            for layer in self.layers
            if isinstance(layer, Layer)
        }
        kept = [
            _Kept(
                isinstance(layer, Layer),
                layer.group.window if isinstance(layer, Layer) else None,
                layer.number_of_states if isinstance(layer, StateLayer) else 0,
                isinstance(layer, IndexedLayer),
            )
            for layer in self.layers
        ]
        other.layers = [other._layer(one, by_window) for one in kept]
        for layer, like in zip(other.layers, self.layers, strict=True):
            if isinstance(like, Layer):
                layer.passes, layer.counts_passes = like.passes, like.counts_passes
            if isinstance(like, IndexedLayer) and like.indexer is not None:
                layer.index_with(groups[like.indexer.group])
        try:
            for old, new in groups.items():
                if old.kv is not None:
                    new.adopt(old.kv.copy())
            for of, mine in zip(self._states(), other._states(), strict=True):
                mine.take(of)
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
        self._check_stateless("save")
        sessions.save(self._groups, path, tokens, model_name(known))

    def _check_stateless(self, call: str) -> None:
        if self._states() or any(isinstance(layer, IndexedLayer) for layer in self.layers):
            raise NotImplementedError(
                f"KVCache.{call}: expected layers of keys and values only, got layers with states "
                "or an indexer, which no file keeps yet: compute the tokens anew"
            )

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
        max_seq_len: int | None = None,
        spare_rows: int = 128,
        budget_bytes: int | str | None = None,
        static: bool = False,
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
        mode, verify
            As for `unimem.KVCache.restore`. What is read is always checked, and memory for it is
            taken as tokens arrive.
        max_seq_len, spare_rows, budget_bytes, static, **placement
            As for the class. With any of them but `spare_rows` nothing is mapped: use
            ``mode="copy"``.

        Raises
        ------
        SnapshotError
            The file is no snapshot, is damaged, or is for another model or other tokens.
        ValueError, TypeError, OSError, CacheFull, CapacityError, MemoryError, PlacementError
            As `unimem.KVCache.restore`.
        """
        one_of(mode, "mode", ("map", "copy"))
        given = {"max_seq_len": max_seq_len, "budget_bytes": budget_bytes, **placement}
        if mode == "map" and (kept := [name for name in given if given[name] is not None]):
            raise ValueError(
                f"a mapped file lies in the page cache: {', '.join(kept)} not accepted with "
                "mode='map', use mode='copy'"
            )
        made = cls.for_model(
            model,
            max_seq_len,
            spare_rows=spare_rows,
            budget_bytes=budget_bytes,
            static=static,
            **placement,
        )
        made._check_stateless("restore")
        restored = sessions.restore(
            made._groups, path, tokens, model_name(model), mapped=mode == "map", verify=verify
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
            How many first tokens of this conversation the store has now. Behind a full window,
            the last chunk counts if `spare_rows` still keeps the window before its end.

        Raises
        ------
        ValueError, TypeError
            No model, no store, no ids of one stream; or a cache of several streams.
        NotImplementedError
            Layers have states or an indexer, or keys depend on the length of the text.
        RuntimeError
            Some layers lack tokens.
        OSError, ClosedError
            As `unimem.KVStore.put`.
        """
        known = self._known_model(model, "put_into")
        self._check_whole("put_into")
        self._check_stateless("put_into")
        stored_prefixes.check_positions(known, "put_into")
        ids = stored_prefixes.text_before_inputs(known, sessions.one_stream(tokens))
        return stored_prefixes.put(
            self._groups, stored_prefixes.check_store(store), ids, model_name(known)
        )

    def restore_from(
        self,
        store: KVStore,
        tokens: torch.Tensor | npt.NDArray[Any] | Sequence[int],
        *,
        model: PreTrainedModel | None = None,
        put: bool = False,
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
        put : bool, default False
            Whether windows put the ids' whole chunks into the store while these pass, since they
            keep too few rows for `put_into` afterwards. Until all ids were computed, the windows
            take memory for them. A chunk that cannot be put is a `PlacementWarning`.

        Returns
        -------
        int
            How many tokens the cache holds now: the whole chunks that the store has and that fit.

        Raises
        ------
        ValueError, TypeError
            No model, no store, no ids of one stream; or the cache has tokens.
        NotImplementedError
            As `put_into`.
        OSError, CapacityError, MemoryError, PlacementError, ClosedError
            As `unimem.KVStore.restore_into`. The cache is empty.
        """
        flag(put, "put")
        known = self._known_model(model, "restore_from")
        ids = sessions.one_stream(tokens)
        text = stored_prefixes.text_before_inputs(known, ids)
        stored_prefixes.check_store(store)
        self._check_whole("restore_from")
        self._check_stateless("restore_from")
        stored_prefixes.check_positions(known, "restore_from")
        if length := self._length():
            raise ValueError(
                f"KVCache.restore_from: expected an empty cache, got one of {length} tokens: "
                "reset() first"
            )
        groups = [getattr(layer, "group", None) for layer in self.layers]
        first = {group: groups.index(group) for group in self._groups}
        made = stored_prefixes.first_tokens(known, first.values())
        if put:
            stored_prefixes.put_while_passing(self._groups, store, text, known)
        try:
            for group, layer in first.items():
                if group.kv is None or not group.takes(*made[layer]):
                    self._start(group, *made[layer])
            return stored_prefixes.restore(
                self._groups, store, text[: len(ids) - 1], model_name(known)
            )
        except BaseException:
            self.reset()
            raise

    # ---- figures and the end ----

    @property
    def caches(self) -> tuple[CoreCache, ...]:
        """The `unimem.KVCache` of each kind of layers that has tokens, windows first."""
        self._sync()
        return tuple(group.kv for group in self._groups if group.kv is not None)

    @property
    def memory_usage_bytes(self) -> int:
        """Bytes of the tokens."""
        return sum(kv.memory_usage_bytes for kv in self.caches)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of memory for tokens."""
        states = [kv for layer in self._states() for kv in layer.caches]
        return sum(kv.capacity_bytes for kv in (*self.caches, *states))

    def close(self) -> None:
        """Give the memory back; live views keep theirs."""
        self.__exit__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for group in self._groups:
            group.end()
        for layer in self._states():
            StateLayer.reset(layer)

    def __del__(self) -> None:
        if hasattr(self, "layers"):
            self.__exit__()

    def __repr__(self) -> str:
        return f"KVCache({self._length()} tokens, {len(self.layers)} layers, {self.caches})"


def _promised(kv: CoreCache) -> int:
    """Return the most bytes that a cache may come to have."""
    return kv.budget_bytes if kv.grow and kv.budget_bytes is not None else kv.capacity_bytes


def _taken(group: Group) -> int:
    return 0 if group.kv is None else _promised(group.kv)
