"""First tokens of a conversation, put into a store of prefixes and taken from it.

Each kind of layers is stored as a separate cache, since a model's windows may hold other tokens
than its full attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from inspect import signature
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel

from unimem.errors import CapacityError, ClosedError
from unimem.kv.store.copy_rows import AsRing
from unimem.kv.store.store import KVStore
from unimem.system import policy
from unimem.transformers.layers import Group, Prompt
from unimem.transformers.model_name import model_name, turns_by_length

Ids = npt.NDArray[np.int64]

# Fields of a configuration with the ids that stand for other inputs, alike for each image.
_STAND_INS = {f"{kind}_token_id" for kind in ("image", "video", "audio")}
_STAND_INS |= {f"{kind}_token_index" for kind in ("image", "video", "audio")}


def check_store(store: Any) -> KVStore:
    """Return it, if it is a store."""
    if not isinstance(store, KVStore):
        raise TypeError(f"store: expected a unimem.KVStore, got {store!r:.60}")
    return store


def check_positions(model: PreTrainedModel, call: str) -> None:
    """Raise NotImplementedError for a model whose keys depend on the length of the whole text."""
    if any(map(turns_by_length, model.modules())):
        raise NotImplementedError(
            f"KVCache.{call}: expected keys that do not depend on the length of the text, and "
            f"those of {model.config.model_type} do, since its rope_type is dynamic or longrope: "
            "compute the tokens anew"
        )


def text_before_inputs(model: PreTrainedModel, ids: Ids) -> Ids:
    """Return the first ids, up to one that stands for an image, a video or a sound."""
    fields = [model.config.to_dict()]
    for config in fields:  # and those inside, which are added meanwhile
        fields += [field for field in config.values() if isinstance(field, dict)]
    others = [config[name] for config in fields for name in _STAND_INS & config.keys()]
    found = np.isin(ids, [one for one in others if one is not None])
    return ids[: found.argmax()] if found.any() else ids


class _EnoughError(Exception):
    """All that was to be seen of a pass was seen."""


def first_tokens(
    model: PreTrainedModel, layers: Iterable[int]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return K and V of no tokens, ``[1, heads, 0, head_dim]``, as the model gives them to layers.

    No configuration says it: some models keep latents in one version of transformers, and whole
    heads in another. So a token passes, up to the last of these layers.
    """
    wanted, given = set(layers), dict[int, tuple[torch.Tensor, torch.Tensor]]()
    noted = DynamicCache(config=model.config.get_text_config(decoder=True))
    append = noted.update

    def note(keys: torch.Tensor, values: torch.Tensor, layer: int, *more: Any, **how: Any) -> Any:
        given[layer] = keys[:, :, :0], values[:, :, :0]
        if wanted <= given.keys():
            raise _EnoughError
        return append(keys, values, layer, *more, **how)

    noted.update = note
    # Weights that Accelerate offloads are on no device; they compute on the CPU.
    token = torch.zeros(1, 1, dtype=torch.long)
    token = token.to(model.device) if model.device.type == "cuda" else token
    # The name of a cache until transformers 5.23, and since.
    is_old = "past_key_values" in signature(type(model).forward).parameters
    name = "past_key_values" if is_old else "cache"
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), suppress(_EnoughError):
        how: dict[str, Any] = {name: noted}
        model.forward(token, **how)
    if missing := wanted - given.keys():
        raise ValueError(
            f"KVCache.restore_from: expected a model of this cache's layers, got one that gives no "
            f"keys and values to layers {sorted(missing)}: make the cache by for_model(model)"
        )
    return given


def put(groups: Sequence[Group], store: KVStore, ids: Ids, model: str) -> int:
    """Put the tokens of all groups of a model; return how many the store has of every group.

    `ids` is ``[n]``, of one stream, and `model` its `model_name`.
    """
    kept = [
        0 if group.kv is None else store.put(_holder(group), ids, model=_name(model, group))
        for group in groups
    ]
    return min(kept)


def put_while_passing(
    groups: Sequence[Group], store: KVStore, ids: Ids, model: PreTrainedModel
) -> None:
    """Let windows put the whole chunks of a prompt once they have its tokens."""
    n = len(ids) // store.chunk_tokens * store.chunk_tokens
    for group in groups:
        if n and group.window is not None:

            def put_all(group: Group = group) -> None:
                try:  # the model and the number of streams may have changed since
                    put([group], store, ids[:n], model_name(model))
                except (OSError, CapacityError, ClosedError, ValueError) as error:
                    policy.warn(f"tokens were not put into {store!r}: {error}")

            group.keep(Prompt(n, put_all))


def restore(groups: Sequence[Group], store: KVStore, ids: Ids, model: str) -> int:
    """Restore first tokens into the cleared caches of all groups; return how many all have."""
    n, found = len(ids), -1
    for group in groups:
        group.make_room(n)
    while n != found:  # a window has only the rows before some ends, and a chunk may be damaged
        found = n
        caches = [(_holder(group), _name(model, group)) for group in groups]
        n = min(store.longest(ids[:n], model=name, kv=kv) for kv, name in caches)
        if n == found:
            for group in groups:
                group.require().clear()
            n = min(store.restore_into(kv, ids[:n], model=name) for kv, name in caches)
    for group in groups:
        group.adopt(group.require())
    return n


def _holder(group: Group) -> Any:
    """Return the cache as a store takes it, for the same chunks in either memory."""
    kv: Any = group.require()
    return kv if group.window is None or group.ring else AsRing(kv, group.window)


def _name(model: str, group: Group) -> str:
    kind = "full" if group.window is None else f"window={group.window}"
    return f"transformers {model} {kind}"
