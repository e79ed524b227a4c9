"""The shape of a model, which determines its memory, as far as its files describe it.

Metadata is not trusted: see `unimem.models.fields`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from unimem.base.text import format_count
from unimem.models import families
from unimem.models.dims import (
    ARCHITECTURES,
    KNOWN,
    MIXTURES,
    ArchMetadata,
    Experts,
    ModelContents,
    ModelDims,
    read_experts,
)
from unimem.models.families import KeptLayer, KeptRows
from unimem.models.fields import CONFIG, MOST, ConfigFields, MetadataFields, UnknownError

__all__ = [
    "TILED_TYPES",
    "Layers",
    "Shape",
    "from_config",
    "from_dims",
    "from_weights",
    "read_config",
]

_CONFIG_BYTES_MAX = 4 << 20  # the longest known one has 50 kB
_EXPERTS = (
    "the scratch memory of a mixture of experts: the row is that of a dense model, without the "
    "outputs of the experts and of the router"
)
# Keys of a state that a layer keeps beside keys and values, or instead. It does not grow.
_STATES = ("ssm.state_size", "ssm.conv_kernel", "wkv.head_size", "shortconv.l_cache")
# Keys of models that keep fewer rows in some layers than the conversation has tokens.
_FEWER = {
    "attention.sliding_window": "attention of some layers slides over {} tokens",
    "attention.shared_kv_layers": "{} layers share the cache of others",
    "nextn_predict_layers": "{} layers predict further tokens, and a runtime may leave them out",
}
# Model types of a config.json that the engine's formulas fit.
_DENSE_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


TILED_TYPES = frozenset(
    "q2_K q3_K q4_K q5_K q6_K iq4_xs iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq1_s iq1_m".split()
)
"""Types whose matrices ggml 0.26 unpacks tile by tile (``ggml-cpu/tiled/tiled.cpp``)."""


class Layers(NamedTuple):
    """Layers of a KV cache that are alike.

    Attributes
    ----------
    n_layers : int
        Number of layers.
    n_heads : int
        Heads of keys and values.
    k_size, v_size : int
        Values of one head's key, and of its value; 0 if the value is a part of the key.
    window : int or None
        How many of the last tokens they keep, if not all.
    """

    n_layers: int
    n_heads: int
    k_size: int
    v_size: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """The known facts of a model. Immutable.

    Attributes
    ----------
    arch : str or None
        Its architecture.
    cache : tuple of Layers, or None
        The layers of its KV cache; empty for a model without one, None if unknown.
    layers : tuple of KeptRows or KeptState
        The same one by one, with shared rows and states; empty if unknown.
    dims : ModelDims or None
        Its dimensions, if the engine's formulas fit it.
    vocab_size : int or None
        Number of tokens.
    max_ctx : int or None
        The longest context that it was made for.
    slides : int or None
        The window of attention in all layers, which the engine's context or window must not exceed.
    experts : Experts or None
        The experts of a mixture that the engine runs.
    unknown : tuple of str
        Unknown facts, each with the reason.
    is_tiled : bool
        Whether tensors have types that ggml multiplies tile by tile.
    """

    arch: str | None
    cache: tuple[Layers, ...] | None
    dims: ModelDims | None
    vocab_size: int | None
    max_ctx: int | None
    unknown: tuple[str, ...] = ()
    slides: int | None = None
    experts: Experts | None = None
    layers: tuple[KeptLayer, ...] = ()
    is_tiled: bool = False

    def longest_ctx(self, window: int | None) -> int:
        """Return the longest context allowed, with or without a window."""
        most = self.max_ctx or MOST
        return self.slides if self.slides and self.slides < (window or most) else most


def from_dims(dims: ModelDims, arch: str | None = None, unknown: tuple[str, ...] = ()) -> Shape:
    """Return the shape of a model with known dimensions."""
    n, heads, size = dims.num_layers, dims.num_kv_heads, dims.head_dim
    layers = families.equal_layers(n, heads, size)
    cache = (Layers(n, heads, size, size),)
    return Shape(arch, cache, dims, dims.vocab_size, dims.max_seq_len, unknown, layers=layers)


def from_weights(weights: ModelContents) -> Shape:
    """Return the shape of an opened GGUF file of any architecture."""
    return replace(_from_weights(weights), is_tiled=not TILED_TYPES.isdisjoint(weights.by_type()))


def _from_weights(weights: ModelContents) -> Shape:
    arch = weights.metadata.get("general.architecture")
    if not isinstance(arch, str):
        why = "the file does not say its architecture"
        return Shape(None, None, None, None, None, (f"the KV cache: {why}", f"the scratch: {why}"))
    meta = ArchMetadata(weights.metadata, arch)
    family = families.of_architecture(arch) or families.Family()
    try:
        dims = ModelDims.from_weights(weights)
        if dims.num_layers > len(weights.tensors):
            raise _too_many_layers(dims.num_layers, len(weights.tensors))
        layers = families.layers_of(family, MetadataFields(meta, arch))
    except ValueError as error:
        return _from_metadata(weights, meta, arch, error)
    experts = arch in MIXTURES or bool(meta.get("expert_count"))
    is_run = arch in ARCHITECTURES and arch in MIXTURES
    shape = replace(
        from_dims(dims, arch, (_EXPERTS,) if experts and not is_run else ()),
        cache=_grouped(layers),
        layers=layers,
    )
    if is_run:
        try:
            shape = replace(shape, experts=read_experts(meta, dims.num_layers))
        except ValueError as error:
            return _from_metadata(weights, meta, arch, error)
    slides = meta.get("attention.sliding_window")
    if (
        type(slides) is int
        and slides > 0
        and all(kind.window is None for kind in shape.cache or ())
    ):
        shape = replace(shape, slides=slides)
    return shape


def _from_metadata(weights: ModelContents, meta: ArchMetadata, arch: str, why: ValueError) -> Shape:
    unknown = []
    layers: tuple[KeptLayer, ...] | None = None
    try:
        layers, fewer = _layers(meta, arch, len(weights.tensors))
        unknown += fewer
    except ValueError as error:
        unknown.append(f"the KV cache: {error}")
    unknown.append(
        f"the scratch: {why}"
        if arch in KNOWN
        else f"the scratch: what computing {arch!r:.40} takes is the runtime's to say"
    )
    longest = vocab = None
    with suppress(ValueError):
        longest = meta.count("context_length")
    embedding = weights.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.ne) == 2 and 0 < embedding.ne[1] <= MOST:
        vocab = embedding.ne[1]
    return Shape(arch, _grouped(layers), None, vocab, longest, tuple(unknown), layers=layers or ())


def _too_many_layers(n_layers: int, n_tensors: int) -> UnknownError:
    return UnknownError(
        f"the metadata speaks of {format_count(n_layers, 'layer')}, but the file has only "
        f"{format_count(n_tensors, 'tensor')}"
    )


def _grouped(layers: Iterable[KeptLayer] | None) -> tuple[Layers, ...] | None:
    """Group the layers that have rows of their own."""
    if layers is None:
        return None
    own = (one for one in layers if isinstance(one, KeptRows) and one.share_of is None)
    found = Counter((one.n_kv_heads, one.k_size, one.v_size, one.window) for one in own)
    return tuple(Layers(n, *kind) for kind, n in found.items())


def _layers(
    meta: ArchMetadata, arch: str, n_tensors: int
) -> tuple[tuple[KeptLayer, ...], list[str]]:
    """Read the layers, and sentences on what a runtime may do differently."""
    if meta.get("attention.causal") is False:
        return (), []  # nothing is kept: such a model reads a text as a whole
    fields = MetadataFields(meta, arch)
    family = families.of_architecture(arch)
    if family is None and meta.get("attention.kv_lora_rank") is not None:
        raise UnknownError(
            f"{arch!r:.40} compresses keys and values (multi-head latent attention), and what a "
            "runtime keeps of them is its choice"
        )
    if arch.startswith("t5"):
        raise UnknownError(f"{arch!r:.40} has an encoder, whose output is kept, too")
    count = families.count_layers(fields)
    if count > n_tensors:
        raise _too_many_layers(count, n_tensors)
    if family is not None:
        layers = families.layers_of(family, fields)
        return layers, _choices(meta, layers)
    state = next((key for key in _STATES if meta.get(key) is not None), None)
    heads = meta.get("attention.head_count_kv")
    if state is not None and (heads is None or isinstance(heads, (int, float, str))):
        raise UnknownError(
            f"{arch!r:.40} keeps a state of its own ('{arch:.40}.{state}'), and the file does not "
            "say which layers have keys and values"
        )
    layers = families.layers_of(families.Family(), fields)
    fewer = _choices(meta, layers)
    if state is not None:
        fewer.append(f"the state of {arch!r:.40} ('{arch:.40}.{state}') beside its KV cache")
    return layers, fewer


def _choices(meta: ArchMetadata, layers: tuple[KeptLayer, ...]) -> list[str]:
    """Explain what a runtime may keep differently."""
    rows = [layer for layer in layers if isinstance(layer, KeptRows)]
    known = {
        "attention.sliding_window": any(layer.window for layer in rows),
        "attention.shared_kv_layers": any(layer.share_of is not None for layer in rows),
    }
    found = []
    for key, text in _FEWER.items():
        value = meta.get(key)
        if type(value) is int and value > 0 and not known.get(key) and rows:
            found.append(
                "the KV cache of a runtime that keeps less: the row is of every token in every "
                f"layer, and {text.format(value)}"
            )
    return found + _decompressed(layers)


def _decompressed(layers: tuple[KeptLayer, ...]) -> list[str]:
    if any(isinstance(layer, KeptRows) and not layer.v_size for layer in layers):
        return [
            "the KV cache of a runtime that keeps more: the row is of compressed keys, which "
            "include the values"
        ]
    return []


# ---- safetensors --------------------------------------------------------------------------------


def read_config(path: str, read: Callable[[str, int], bytes]) -> tuple[dict[str, Any] | None, str]:
    """Read the ``config.json`` beside a model's file or index.

    Return it, or None and the reason. `read` returns at most a number of bytes from the start of a
    path, as `ModelFiles.read_start` does.
    """
    where = os.path.join(os.path.dirname(path), CONFIG)
    try:
        text = read(where, _CONFIG_BYTES_MAX + 1)
    except OSError as error:
        return None, f"no file of it says its dimensions ({where}: {error.strerror})"
    try:
        if len(text) > _CONFIG_BYTES_MAX:
            raise UnknownError("it is longer than 4 MiB")
        config = json.loads(text)
        if not isinstance(config, dict):
            raise UnknownError("it is no object")
    except (ValueError, RecursionError) as error:
        return None, f"{where} cannot be used: {error!s:.100}"
    return config, ""


def from_config(config: dict[str, Any] | None, why: str) -> Shape:
    """Return the shape of a model by its ``config.json``, or without one for the reason `why`."""
    if config is None:
        return Shape(None, None, None, None, None, (f"the KV cache: {why}", f"the scratch: {why}"))
    kind = config.get("model_type")
    arch = kind if isinstance(kind, str) else None
    inner = config.get("text_config")
    is_nested = isinstance(inner, dict)
    values: Mapping[str, Any] = inner if isinstance(inner, dict) else config
    fields = _config_fields(values, nested=is_nested)
    vocab, longest = _known(fields, "vocab_size"), _known(fields, "context_length")
    unknown: list[str] = []
    dims = None
    try:
        if is_nested:
            raise UnknownError(f"what computing {arch!r:.40} takes is the runtime's to say")
        dims = _config_dims(values, fields, vocab, longest)
    except ValueError as error:
        unknown.append(f"the scratch: {error}")
    layers: tuple[KeptLayer, ...] | None = None
    try:
        layers = _config_layers(values, fields)
        unknown += _decompressed(layers)
    except ValueError as error:
        unknown.append(f"the KV cache: {error}")
        dims = None  # the work memory of attention is unknown too
    return Shape(arch, _grouped(layers), dims, vocab, longest, tuple(unknown), layers=layers or ())


def _config_fields(values: Mapping[str, Any], *, nested: bool) -> ConfigFields:
    family = families.of_model_type(values.get("model_type")) or families.Family()
    return ConfigFields(values, nested=nested, names=family.config, defaults=family.defaults)


def _known(fields: ConfigFields, name: str) -> int | None:
    try:
        return fields.number(name) or None
    except UnknownError:
        return None


def _named(kind: object) -> str:
    return f"{kind!r:.40}" if isinstance(kind, str) else f"a model without 'model_type' in {CONFIG}"


def _config_layers(values: Mapping[str, Any], fields: ConfigFields) -> tuple[KeptLayer, ...]:
    """Read the layers of a ``config.json``."""
    kind = values.get("model_type")
    family = families.of_model_type(kind)
    if values.get("is_encoder_decoder") is True:
        raise UnknownError("the model has an encoder, whose output is kept, too")
    if family is None:
        raise UnknownError(f"what {_named(kind)} keeps of a token is not known to unimem")
    if not family.compresses and fields.number("attention.kv_lora_rank"):
        raise UnknownError(
            "keys and values are compressed (multi-head latent attention), and what a runtime "
            "keeps of them is its choice"
        )
    return families.layers_of(family, fields)


def _config_dims(
    values: Mapping[str, Any], fields: ConfigFields, vocab: int | None, longest: int | None
) -> ModelDims:
    """Return the dimensions of a model that the engine's formulas fit."""
    kind = values.get("model_type")
    if kind not in _DENSE_TYPES or any(values.get(name) for name in _EXPERT_COUNTS):
        raise UnknownError(f"what computing {_named(kind)} takes is the runtime's to say")
    heads = fields.required("attention.head_count")
    return ModelDims(
        hidden_size=fields.required("embedding_length"),
        intermediate_size=fields.required("feed_forward_length"),
        num_attention_heads=heads,
        num_kv_heads=fields.number("attention.head_count_kv") or heads,
        head_dim=fields.head_size(),
        vocab_size=vocab or fields.required("vocab_size"),
        num_layers=fields.required("block_count"),
        max_seq_len=longest or fields.required("context_length"),
    )
