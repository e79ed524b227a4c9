"""What the layers of a cache keep, each its own, and which of them are kept together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy.typing as npt

from unimem.kv.arrays import kv_type
from unimem.system.arguments import integer

__all__ = ["LayerKV", "LayerPlace", "RowsKind", "check_layers", "kinds_of", "places_of"]

_MOST = 2**32 - 1


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of one layer, for ``KVCache(layers=[...])``.

    Parameters
    ----------
    n_kv_heads, head_dim : int
        Of this layer.
    window : int, optional
        A sliding layer: it keeps the last so many tokens, the newest among them, in a ring. Where
        that is `max_seq_len` or more, the layer keeps all tokens.
    dtype : {"f16", "f32", "bf16", "q8_0"}, optional
        What is stored; by default that of the cache.
    share_of : int, optional
        The number of another layer, whose rows this one shows: it has none of its own, and nothing
        is appended to it. All else is as of that layer.

    Raises
    ------
    ValueError, TypeError
        A number below 1, or none; an unknown dtype.

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
    window: int | None = field(default=None, kw_only=True)
    dtype: Any = field(default=None, kw_only=True)
    share_of: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        def set_to(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        set_to("n_kv_heads", integer(self.n_kv_heads, "n_kv_heads", 1, _MOST))
        set_to("head_dim", integer(self.head_dim, "head_dim", 1, _MOST))
        if self.window is not None:
            set_to("window", integer(self.window, "window", 1))
        if self.dtype is not None:
            set_to("dtype", kv_type(self.dtype))
        if self.share_of is not None:
            set_to("share_of", integer(self.share_of, "share_of", 0))


class RowsKind(NamedTuple):
    """What layers have in common that are kept together: one cache has the rows of all of them."""

    n_kv_heads: int
    head_dim: int
    window: int | None
    dtype: str


class LayerPlace(NamedTuple):
    """Where the rows of a layer are.

    Attributes
    ----------
    kind : RowsKind
        In whose cache.
    number : int
        The number of the layer in that cache.
    is_own : bool
        Whether they are the layer's own, or another's that it shares.
    """

    kind: RowsKind
    number: int
    is_own: bool


def check_layers(
    layers: Sequence[LayerKV], max_seq_len: int, dtype: npt.DTypeLike
) -> tuple[LayerKV, ...]:
    """Return the layers as a cache has them: with a dtype, and a window where one is needed.

    Parameters
    ----------
    layers : sequence of LayerKV
        At least one.
    max_seq_len : int
        Of the cache.
    dtype : dtype-like
        Of layers that do not name one.

    Raises
    ------
    ValueError, TypeError
        No layers, or what is no LayerKV; `share_of` of a layer that is not there, has no rows of
        its own, or differs.
    """
    usual = kv_type(dtype)
    if isinstance(layers, LayerKV | str) or not isinstance(layers, Sequence):
        raise TypeError(f"layers: expected a sequence of LayerKV, got {layers!r:.60}")
    found: list[LayerKV] = []
    for i, layer in enumerate(layers):
        if not isinstance(layer, LayerKV):
            raise TypeError(f"layers[{i}]: expected a LayerKV, got {layer!r:.60}")
        window = layer.window
        if window is not None and window >= max_seq_len:
            window = None
        found.append(replace(layer, window=window, dtype=layer.dtype or usual))
    if all(layer.share_of is not None for layer in found):
        raise ValueError("layers: expected at least one that has rows of its own, got none")
    for i, (layer, given) in enumerate(zip(found, layers, strict=True)):
        if layer.share_of is not None:
            found[i] = _sharing(i, given, layer.share_of, found)
    return tuple(found)


def _sharing(i: int, given: LayerKV, source: int, layers: list[LayerKV]) -> LayerKV:
    """Return a layer that shares the rows of another, which it has to be like."""
    if source >= len(layers) or source == i or layers[source].share_of is not None:
        raise ValueError(
            f"layers[{i}].share_of: expected the number of another layer, with rows of its own, "
            f"got {source}"
        )
    shared = replace(layers[source], share_of=source)
    wanted = replace(
        shared,
        n_kv_heads=given.n_kv_heads,
        head_dim=given.head_dim,
        window=layers[i].window if given.window is not None else shared.window,
        dtype=given.dtype or shared.dtype,
    )
    if wanted != shared:
        raise ValueError(
            f"layers[{i}]: expected what layer {source} is, whose rows it shares, {shared}, got "
            f"{given}"
        )
    return shared


def kinds_of(layers: Sequence[LayerKV]) -> dict[RowsKind, int]:
    """Return how many layers of each kind have rows, those that keep all tokens first."""
    own = [_kind_of(layer) for layer in layers if layer.share_of is None]
    kinds = sorted(dict.fromkeys(own), key=lambda kind: kind.window is not None)
    return {kind: own.count(kind) for kind in kinds}


def places_of(layers: Sequence[LayerKV]) -> list[LayerPlace]:
    """Return where the rows of each layer are."""
    counts: dict[RowsKind, int] = {}
    own: dict[int, LayerPlace] = {}
    for i, layer in enumerate(layers):
        if layer.share_of is None:
            kind = _kind_of(layer)
            own[i] = LayerPlace(kind, counts.get(kind, 0), True)
            counts[kind] = own[i].number + 1
    return [
        own[i] if layer.share_of is None else own[layer.share_of]._replace(is_own=False)
        for i, layer in enumerate(layers)
    ]


def _kind_of(layer: LayerKV) -> RowsKind:
    return RowsKind(layer.n_kv_heads, layer.head_dim, layer.window, layer.dtype)
