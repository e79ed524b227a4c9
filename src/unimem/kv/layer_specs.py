"""Specifications of layers: what each keeps, and which layers share a part of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy.typing as npt

from unimem.base.arguments import integer
from unimem.kv.types import block_values, kv_name, kv_pair, kv_type

_MOST = 2**32 - 1
# The most dimensions in a snapshot.
_MOST_DIMS = 8


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of one layer, for ``KVCache(layers=[...])``.

    Parameters
    ----------
    n_kv_heads, head_dim : int
        The dimensions of this layer.
    v_head_dim : int, optional
        The size of V's heads, if it differs from K's; 0: the layer has no V, as the compressed keys
        of DeepSeek-V2, whose V is the beginning of K (llama.cpp: `llama_kv_cache`, `has_v`).
    window : int, optional
        A sliding layer: a ring keeps the last `window` tokens, including the newest. With a window
        of `max_seq_len` or more, the layer keeps all tokens.
    dtype : str, optional
        The stored type, as for `KVCache`; by default that of the cache. A pair such as
        ``"q8_0,q4_0"`` names the types of K and V.
    share_of : int, optional
        The number of another layer, whose rows this one shows: it has no rows of its own, and is
        not appended to. Its other arguments are those of that layer.

    Raises
    ------
    ValueError, TypeError
        A number below 1 or not an integer, or an unknown dtype.

    Examples
    --------
    >>> import unimem as um
    >>> sliding, full = um.LayerKV(4, 256, window=1024), um.LayerKV(4, 256)
    >>> with um.KVCache(layers=[*5 * [sliding], full], max_seq_len=8192, spare_rows=64) as kv:
    ...     kv.n_layers, kv.window
    (6, (1024, 1024, 1024, 1024, 1024, None))
    """

    n_kv_heads: int
    head_dim: int
    v_head_dim: Any = None
    window: int | None = field(default=None, kw_only=True)
    dtype: Any = field(default=None, kw_only=True)
    share_of: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        def set_to(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        set_to("n_kv_heads", integer(self.n_kv_heads, "n_kv_heads", 1, _MOST))
        set_to("head_dim", integer(self.head_dim, "head_dim", 1, _MOST))
        v_head_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim
        set_to("v_head_dim", integer(v_head_dim, "v_head_dim", 0, _MOST))
        if self.window is not None:
            set_to("window", integer(self.window, "window", 1))
        if self.dtype is not None:
            set_to("dtype", kv_name(*kv_pair(self.dtype, "dtype")))
        if self.share_of is not None:
            set_to("share_of", integer(self.share_of, "share_of", 0))


@dataclass(frozen=True, slots=True)
class LayerState:
    """A state of fixed size instead of keys, for ``KVCache(layers=[...])``.

    A layer of Mamba, RWKV or a gated delta net keeps it: one array for each stream, which its
    writer changes in place (`KVCache.state`).

    Parameters
    ----------
    shape : sequence of int
        The shape for one stream, in NumPy order, with at most eight dimensions.
    dtype : {"f32", "f16", "bf16"}, default "f32"
        The stored type; NumPy's names and dtypes are accepted.

    Raises
    ------
    ValueError, TypeError
        A dimension below 1 or not an integer, or another dtype.

    Examples
    --------
    >>> import unimem as um
    >>> layers = [um.LayerState((16, 128, 128)), um.LayerKV(2, 64)]
    >>> with um.KVCache(layers=layers, max_seq_len=4096, checkpoints=4) as kv:
    ...     kv.state(0).shape, kv.state(0).dtype.name
    ((1, 16, 128, 128), 'float32')
    """

    shape: tuple[int, ...]
    dtype: Any = "f32"

    def __post_init__(self) -> None:
        try:
            given = tuple(self.shape)
        except TypeError:
            raise TypeError(
                f"shape: expected a sequence of integers, got {self.shape!r:.60}"
            ) from None
        if isinstance(self.shape, str) or not 1 <= len(given) <= _MOST_DIMS:
            rule = f"shape: expected 1 to {_MOST_DIMS} dimensions of at least 1"
            raise ValueError(f"{rule}, got {self.shape!r:.60}")
        object.__setattr__(self, "shape", tuple(integer(n, "shape", 1, _MOST) for n in given))
        dtype = kv_type(self.dtype)
        if block_values(dtype) > 1:
            raise ValueError(f"dtype: expected f32, f16 or bf16 of a state, got {self.dtype!r:.60}")
        object.__setattr__(self, "dtype", dtype)


#: What a layer keeps.
Layer: TypeAlias = LayerKV | LayerState


class RowsKind(NamedTuple):
    """The facts that layers of one part of a cache have in common."""

    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None
    dtype: str


class LayerPlace(NamedTuple):
    """The place of a layer's rows or state: its number in the part of its kind.

    `kind` is None for a state, whose number is that among the states. `is_own` tells whether the
    layer has rows of its own.
    """

    kind: RowsKind | None
    number: int
    is_own: bool


def check_layers(
    layers: Sequence[Layer], max_seq_len: int, dtype: npt.DTypeLike
) -> tuple[Layer, ...]:
    """Return the layers with their dtypes, and without windows that hold all tokens.

    `dtype` is the type of layers that do not name one. It raises ValueError or TypeError if no
    layer keeps rows of its own or a state, if there are other objects, or if `share_of` names a
    layer that does not exist, has no rows of its own, or differs.
    """
    usual = kv_name(*kv_pair(dtype, "dtype"))
    if isinstance(layers, LayerKV | LayerState | str) or not isinstance(layers, Sequence):
        raise TypeError(f"layers: expected a sequence of LayerKV or LayerState, got {layers!r:.60}")
    found: list[Layer] = []
    for i, layer in enumerate(layers):
        if isinstance(layer, LayerState):
            found.append(layer)
            continue
        if not isinstance(layer, LayerKV):
            raise TypeError(f"layers[{i}]: expected a LayerKV or LayerState, got {layer!r:.60}")
        window = layer.window
        if window is not None and window >= max_seq_len:
            window = None
        found.append(replace(layer, window=window, dtype=layer.dtype or usual))
    if all(isinstance(layer, LayerKV) and layer.share_of is not None for layer in found):
        raise ValueError(
            "layers: expected at least one that has rows of its own, or a state, got none"
        )
    for i, (layer, given) in enumerate(zip(found, layers, strict=True)):
        if isinstance(layer, LayerKV) and isinstance(given, LayerKV) and layer.share_of is not None:
            found[i] = _sharing(i, layer, given, layer.share_of, found)
    return tuple(found)


def _sharing(
    i: int, layer: LayerKV, given: LayerKV, source: int, layers: Sequence[Layer]
) -> LayerKV:
    """Return a layer that shares the rows of another; refuse one that differs from that."""
    other = layers[source] if source < len(layers) and source != i else None
    if not isinstance(other, LayerKV) or other.share_of is not None:
        raise ValueError(
            f"layers[{i}].share_of: expected the number of another layer, with rows of its own, "
            f"got {source}"
        )
    shared = replace(other, share_of=source)
    wanted = replace(
        shared,
        n_kv_heads=given.n_kv_heads,
        head_dim=given.head_dim,
        v_head_dim=given.v_head_dim,
        window=layer.window if given.window is not None else shared.window,
        dtype=given.dtype or shared.dtype,
    )
    if wanted != shared:
        raise ValueError(
            f"layers[{i}]: expected what layer {source} is, whose rows it shares, {shared}, got "
            f"{given}"
        )
    return shared


def kinds_of(layers: Sequence[Layer]) -> dict[RowsKind, int]:
    """Return the number of layers with rows of each kind, first kinds that keep all tokens."""
    own = [
        _kind_of(layer) for layer in layers if isinstance(layer, LayerKV) and layer.share_of is None
    ]
    kinds = sorted(dict.fromkeys(own), key=lambda kind: kind.window is not None)
    return {kind: own.count(kind) for kind in kinds}


def states_of(layers: Sequence[Layer]) -> tuple[LayerState, ...]:
    """Return the layers that keep a state."""
    return tuple(layer for layer in layers if isinstance(layer, LayerState))


def places_of(layers: Sequence[Layer]) -> list[LayerPlace]:
    """Return the place of each layer's rows or state."""
    counts: dict[RowsKind | None, int] = {}
    found: dict[int, LayerPlace] = {}
    for i, layer in enumerate(layers):
        if isinstance(layer, LayerState) or layer.share_of is None:
            kind = None if isinstance(layer, LayerState) else _kind_of(layer)
            found[i] = LayerPlace(kind, counts.get(kind, 0), kind is not None)
            counts[kind] = found[i].number + 1
    for i, layer in enumerate(layers):
        if isinstance(layer, LayerKV) and layer.share_of is not None:
            found[i] = found[layer.share_of]._replace(is_own=False)
    return [found[i] for i in range(len(layers))]


def _kind_of(layer: LayerKV) -> RowsKind:
    dims = layer.n_kv_heads, layer.head_dim, layer.v_head_dim
    return RowsKind(*dims, layer.window, layer.dtype)
