"""Checks of a decoder before it computes: of the model, a saved session, tokens."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unimem.backends import ggml
from unimem.engine.model import Model
from unimem.errors import CacheFull, SnapshotError
from unimem.kv import snapshot
from unimem.kv.cache.cache import KVCache
from unimem.kv.cache.layered import LayeredKVCache
from unimem.kv.snapshot import Snapshot
from unimem.kv.types import kv_pair
from unimem.layout import Layout
from unimem.planning.plan import plan
from unimem.planning.result import Plan
from unimem.weights.loading import EngineLoad
from unimem.weights.opened import Weights
from unimem.weights.tensors import Contents

__all__ = ["MOST_POSITIONS", "check_model", "check_session", "check_tokens"]

MOST_POSITIONS = 2**31 - 1  # ggml counts them in 32 bits


def check_model(
    weights: Contents,
    planned: str | os.PathLike[str] | Weights,
    *,
    layout: Layout | None,
    ctx: int | None,
    kv_dtype: str,
    rotate: bool | None,
    window: int | None,
    threads: int | None,
    load: EngineLoad,
    numa: str | None,
) -> tuple[Model, Plan]:
    """Check that the engine runs a model with these options, and that its plan has room."""
    if layout is not None and not isinstance(layout, Layout):
        raise TypeError(f"layout: expected a unimem.Layout, got {layout!r:.60}")
    model = Model.from_weights(weights)
    model.check_types(*kv_pair(kv_dtype))
    model.rotates(rotate, *kv_pair(kv_dtype))  # or it is refused
    placement: dict[str, Any] = {} if numa is None else {"numa": numa}
    if layout is not None:
        if numa is not None:
            raise ValueError(f"numa={numa!r}: the layout's memory is placed already: leave out one")
        asked = layout.history.block.requested
        placement = {"pages": asked["pages"]}
        if load == "repack":  # which is placed so
            placement["numa"] = asked["numa"]
    needed = plan(
        planned,
        ctx=ctx,
        kv_dtype=kv_dtype,
        window=window,
        threads=threads,
        load=load,
        **placement,
    )
    assert needed.ctx is not None  # of a model that the engine runs
    ggml.require_threads(needed.threads)
    model.check_window(min(needed.ctx, window or needed.ctx))
    # Past the limit of a cgroup, warming would end the process instead of failing.
    tapes = () if layout is None else (layout.scratch, layout.history)
    there = sum(tape.block.verify().resident_bytes for tape in tapes)
    needed.require_fits(strict=False, taken_bytes=there)
    return model, needed


def check_session(
    saved: Snapshot | snapshot.LayersSnapshot,
    kv: KVCache,
    model: str,
    vocab_size: int,
    ctx: int,
    window: int | None,
) -> None:
    """Refuse a saved session that does not fit or belong here.

    Parameters
    ----------
    saved : Snapshot or LayersSnapshot
        What the file of a decoder says of itself.
    kv : KVCache
        Into which it would be read.
    model : str
        The fingerprint of the weights that it would be used with.
    vocab_size, ctx : int
        Tokens that the model has, and that fit in the context.
    window : int or None
        Tokens that attention of all layers sees: the context ends by positions then.
    """
    name = saved.path
    if saved.model != model:
        raise SnapshotError(
            f"expected a session of model {model!r}, got one of {saved.model!r}", path=name
        )
    keys: tuple[str, ...] = ("n_layers", "n_kv_heads", "head_dim", "batch")
    keys += ("dtype", "v_dtype", "window", "order", "rotate")
    if isinstance(saved, snapshot.LayersSnapshot) != isinstance(kv._body, LayeredKVCache):
        there, ours = "differ", "do not"
        if isinstance(kv._body, LayeredKVCache):
            there, ours = "are alike", "differ"
        raise SnapshotError(
            f"it is of a cache whose layers {there}, and this one's {ours}", path=name
        )
    if isinstance(saved, snapshot.LayersSnapshot):
        keys = ("layers", "batch", "order", "rotate")
    for key in keys:
        there, ours = getattr(saved, key), getattr(kv, key)
        if there != ours:
            raise SnapshotError(
                f"the snapshot is of a cache with {key}={there!r}, and this one has {ours!r}",
                path=name,
            )
    if saved.tokens is None or not saved.seq_len:
        raise SnapshotError("it has no tokens to go on from", path=name)
    if saved.tokens.max() >= vocab_size:
        raise SnapshotError(
            f"token {saved.tokens.max()} is not among the model's {vocab_size}", path=name
        )
    n = saved.next_position if window else saved.seq_len
    if n > ctx or saved.next_position > MOST_POSITIONS:
        raise CacheFull(
            f"{name}: a session of {n} token{'s' * (n > 1)} does not fit in the context of {ctx}: "
            "take a larger ctx",
            ctx,
            0,
            n,
        )


def check_tokens(tokens: Iterable[int], vocab_size: int) -> NDArray[Any]:
    """Return an array of token ids; none at all, or unknown ones, are refused."""
    try:
        array = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens))
    except (TypeError, ValueError):
        raise TypeError(f"tokens: expected token ids, got {tokens!r:.60}") from None
    if array.ndim != 1 or not len(array):
        raise ValueError(f"tokens: expected at least one token id, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise ValueError(f"tokens: expected integers, got {array.dtype}")
    wrong = (array < 0) | (array >= vocab_size)
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(
            f"tokens: expected ids from 0 to {vocab_size - 1}, got {array[i]} at index {i}"
        )
    return array
