"""Saving the caches of a model's layers, and restoring them for the same model and tokens.

Each file is a snapshot (docs/snapshots.md). Its model is named ``NAME/STREAMS/ID``: the
model's `model_name`; a hash of the tokens of all streams but the first, whose tokens are in the
file; and the id that further files have in their names, ``PATH.ID``, beside the first.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from unimem.base.arguments import file_path
from unimem.errors import SnapshotError
from unimem.kv import snapshot
from unimem.kv.cache.cache import KVCache
from unimem.transformers.layers import Group

# Digits of a name of earlier versions.
_OLD_DIGITS = 32

Ids: TypeAlias = "torch.Tensor | npt.NDArray[Any] | Sequence[int] | None"


def _token_ids(tokens: Ids, batch: int | None = None) -> npt.NDArray[np.int64] | None:
    """Return the ids as [batch, n]."""
    if tokens is None:
        return None
    given = tokens.numpy(force=True) if isinstance(tokens, torch.Tensor) else tokens
    ids = np.atleast_2d(np.asarray(given))
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or (batch is not None and len(ids) != batch):
        streams = "batch" if batch is None else batch
        raise ValueError(
            f"tokens: expected ids of shape [{streams}, n], got {ids.dtype} of shape "
            f"{list(ids.shape)}"
        )
    return ids.astype(np.int64)


def one_stream(tokens: Ids) -> npt.NDArray[np.int64]:
    """Return the ids of one stream as [n]; raise ValueError for several streams, or None."""
    ids = _token_ids(tokens, 1)
    if ids is None:
        raise ValueError("tokens: expected the ids of one stream, got None")
    row: npt.NDArray[np.int64] = ids[0]
    return row


def _streams_name(ids: npt.NDArray[np.int64] | None, n: int) -> str:
    """Return a hash of the tokens of all streams but the first."""
    if ids is None or len(ids) == 1:
        return "-"
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(ids[1:, :n]).tobytes())


def _beside(path: str, name: str) -> str:
    return f"{path}.{name}"


def _main_first(groups: Sequence[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: group.window is not None)


def save(groups: Sequence[Group], path: str | os.PathLike[str], tokens: Ids, model: str) -> None:
    """Write the caches of all groups of a model: see `unimem.transformers.KVCache.save`."""
    file = file_path(path)
    first, *others = [group.kv for group in _main_first(groups)]
    if first is None or any(kv is None for kv in others):
        raise ValueError("KVCache.save: expected a cache with tokens, got an empty one")
    n = first.next_position
    ids = _token_ids(tokens, first.batch)
    if ids is not None and ids.shape[1] < n:
        raise ValueError(f"tokens: expected the ids of all {n} tokens, got {ids.shape[1]}")
    there = _files_beside(file)
    name = secrets.token_hex(8) if others else "-"
    named = f"{model}/{_streams_name(ids, n)}/{name}"
    row = None if ids is None else ids[0, :n]
    # The first file is replaced last, and names the others: until then the old ones are complete.
    for i, kv in enumerate(others):
        assert kv is not None
        kv.save(_beside(file, f"{name}-{i}"), tokens=row, model=named)
    first.save(file, tokens=row, model=named)
    for old in there:
        with suppress(OSError):
            os.unlink(old)


def _files_beside(path: str) -> list[str]:
    """List the further files of an older session at a path."""
    try:
        model = snapshot.describe(path).model
    except (OSError, SnapshotError):
        return []
    name = (model or "").split("/")[-1]
    folder, prefix = os.path.dirname(path) or ".", _beside(os.path.basename(path), f"{name}-")
    if len(name) != 16:
        return []
    return [os.path.join(folder, one) for one in os.listdir(folder) if one.startswith(prefix)]


def restore(
    groups: Sequence[Group],
    path: str | os.PathLike[str],
    tokens: Ids,
    model: str,
    *,
    mapped: bool,
    verify: bool | None,
) -> list[KVCache]:
    """Make the caches of all groups of a model, in their order, from files of `save`.

    The files of full attention are mapped, or read into caches as the groups make them.
    """
    file = file_path(path)
    facts = snapshot.describe(file)
    ids = _token_ids(tokens)
    there = (facts.model or "").split("/")
    if len(there) == 3 and len(there[0]) == _OLD_DIGITS:
        raise SnapshotError(
            "expected a model that is known by all of its weights, got a conversation of an "
            "earlier version, which knew it by samples: compute it again, and save it anew",
            path=file,
        )
    if len(there) != 3 or there[0] != model:
        raise SnapshotError(
            f"expected a conversation of model {model!r}, got one of {there[0] or 'no model'!r}: "
            "restore it with its own model, or save anew",
            path=file,
        )
    wanted = facts.model
    if ids is not None:
        if len(ids) != facts.batch:
            rule = f"expected {facts.batch} streams of tokens, got {len(ids)}"
            raise SnapshotError(f"{rule}: restore without tokens=, or begin anew", path=file)
        if _streams_name(ids, facts.next_position) != there[1]:
            rule = "the tokens of its second stream, or of a further one, are no prefix of those"
            raise SnapshotError(f"{rule} given: restore without tokens=, or begin anew", path=file)
    row = None if ids is None else ids[0]
    files = {
        id(group): file if i == 0 else _beside(file, f"{there[2]}-{i - 1}")
        for i, group in enumerate(_main_first(groups))
    }
    made: list[KVCache] = []
    try:
        for group in groups:
            made.append(_restored(group, files[id(group)], made, row, wanted, mapped, verify))
            _check(made[-1], group, files[id(group)])
    except BaseException:
        for kv in made:
            kv.__exit__()
        raise
    return made


def _restored(
    group: Group,
    path: str,
    before: Sequence[KVCache],
    tokens: npt.NDArray[np.int64] | None,
    model: str | None,
    mapped: bool,
    verify: bool | None,
) -> KVCache:
    """Make the cache of a group, beside those that are made already."""
    facts = snapshot.describe(path)
    if facts.window not in (None, group.window) or facts.n_layers != len(group.lengths):
        rule = f"{len(group.lengths)} layers of window {group.window}"
        got = f"{facts.n_layers} of window {facts.window}"
        raise SnapshotError(f"expected {rule}, got {got}: save anew", path=path)
    dtypes = facts.dtype, facts.v_dtype
    group.options = replace(group.options, dtype=dtypes, rotate=facts.rotate)
    # A device's cache may have room for few more tokens, and what is mapped gets no more.
    has_room = facts.grow or facts.max_seq_len >= group.options.least_seq_len
    if mapped and has_room and group.window is None and group.options.device is None:
        return KVCache.restore(path, tokens=tokens, model=model, verify=verify)
    budget = group.options.budget_bytes
    if budget is not None:
        budget -= sum(kv.capacity_bytes for kv in before)
    dims = facts.batch, facts.n_kv_heads, facts.head_dim, facts.v_head_dim
    group.expected = facts.next_position
    if group.ring is not None and facts.window is None:  # of a device, which has no rings
        with KVCache.restore(path, tokens=tokens, model=model, verify=verify is not False) as whole:
            group.kv, group.dims = whole, dims
            kv = group.select(np.arange(facts.batch), budget)
            group.kv = None
            assert kv is not None
            return kv
    kv = group.make(dims, dtypes, budget)
    try:
        snapshot.read_into(kv, path, tokens, model, last=group.ring is None)
    except BaseException:
        kv.__exit__()
        raise
    return kv


def _check(kv: KVCache, group: Group, path: str) -> None:
    """Raise SnapshotError for a cache that does not fit the group's layers."""
    expected = {"n_layers": len(group.lengths), "window": group.ring, "order": "head"}
    for name, wanted in expected.items():
        if (got := getattr(kv, name)) != wanted:
            rule = f"expected a cache with {name}={wanted!r}, got {got!r}: save anew"
            raise SnapshotError(rule, path=path)
    least = kv.next_position if group.window is None else min(group.window - 1, kv.next_position)
    if kv.seq_len < least:
        rule = f"expected the last {least} tokens, got {kv.seq_len}: save anew"
        raise SnapshotError(rule, path=path)
