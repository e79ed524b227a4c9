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

_CONFIG_BYTES_MAX = 4 << 20  # the longest known one has 50 kB
_EXPERTS = (
    "the scratch memory of a mixture of experts: the row is that of a dense model, without the "
    "outputs of the experts and of the router"
)
_RUNTIMES = "what computing {!r:.40} takes is the runtime's to say"
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
    every, is_divided
        As for `KeptRows`.
    """

    n_layers: int
    n_heads: int
    k_size: int
    v_size: int
    window: int | None = None
    every: int = 1
    is_divided: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """The known facts of a model. Immutable.

    Attributes
    ----------
    arch : str or None
        Its architecture.
    cache : tuple of Layers, or None
        The layers of its KV cache; empty for a model without one, None if unknown.
    is_counted : bool
        Whether these are all, as for a known architecture.
    predictors : tuple of KeptRows or KeptState
        The layers of the cache of built-in layers that predict further tokens.
    goes_back : bool
        As for `Family`.
    is_run : bool
        Whether the engine runs it, as far as the metadata says.
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
    no_scratch : str
        Why the engine's formulas do not give its scratch memory, or not all; "" if they do.
    """

    arch: str | None
    cache: tuple[Layers, ...] | None
    dims: ModelDims | None
    vocab_size: int | None
    max_ctx: int | None
    unknown: tuple[str, ...] = ()
    no_scratch: str = ""
    slides: int | None = None
    experts: Experts | None = None
    layers: tuple[KeptLayer, ...] = ()
    is_tiled: bool = False
    is_counted: bool = True
    predictors: tuple[KeptLayer, ...] = ()
    goes_back: bool = False
    is_run: bool = False

    def longest_ctx(self, window: int | None) -> int:
        """Return the longest context allowed, with or without a window."""
        most = self.max_ctx or MOST
        return self.slides if self.slides and self.slides < (window or most) else most


def from_dims(dims: ModelDims, arch: str | None = None, unknown: tuple[str, ...] = ()) -> Shape:
    """Return the shape of a model with known dimensions."""
    n, heads, size = dims.num_layers, dims.num_kv_heads, dims.head_dim
    layers = families.equal_layers(n, heads, size)
    cache = (Layers(n, heads, size, size),)
    return Shape(
        arch, cache, dims, dims.vocab_size, dims.max_seq_len, unknown, layers=layers, is_run=True
    )


def from_weights(weights: ModelContents) -> Shape:
    """Return the shape of an opened GGUF file of any architecture."""
    return replace(_from_weights(weights), is_tiled=not TILED_TYPES.isdisjoint(weights.by_type()))


def _from_weights(weights: ModelContents) -> Shape:
    arch = weights.metadata.get("general.architecture")
    if not isinstance(arch, str):
        return _nothing_known("the file does not say its architecture")
    meta = ArchMetadata(weights.metadata, arch)
    unknown: list[str] = []
    layers: tuple[KeptLayer, ...] | None = None
    predictors: tuple[KeptLayer, ...] = ()
    fields, family = MetadataFields(meta, arch), families.of_architecture(arch)
    try:
        rule = family or families.by_keys(fields)
        found = families.layers_of(rule, fields)
        if found and families.count_layers(fields) > len(weights.tensors):
            raise _too_many_layers(families.count_layers(fields), len(weights.tensors))
        layers = found
        predictors = families.layers_of(rule, fields, predictors=True)
    except ValueError as error:
        unknown.append(f"the KV cache: {error}")
    if family is None and layers is not None:
        unknown.append(
            f"the KV cache: {arch!r:.40} is an architecture that unimem does not know; the row is "
            "what the keys of the file say, and a runtime may keep more"
        )
    shape = Shape(
        arch,
        grouped(layers),
        None,
        _vocab_size(weights),
        _context_length(meta),
        layers=layers or (),
        is_counted=family is not None and layers is not None,
        predictors=predictors,
        goes_back=family is not None and family.goes_back,
    )
    return _with_dims(shape, weights, meta, unknown)


def _with_dims(
    shape: Shape, weights: ModelContents, meta: ArchMetadata, unknown: list[str]
) -> Shape:
    """Add the dimensions of an architecture that the engine's formulas fit."""
    arch = str(shape.arch)
    experts = None
    is_mixture = arch in MIXTURES or bool(meta.get("expert_count"))
    is_run = arch in ARCHITECTURES and (arch in MIXTURES or not is_mixture)
    try:
        dims = ModelDims.from_weights(weights)
        if is_run and is_mixture:
            has_biases = families.GRAPH_KINDS[arch].has_more_biases
            experts = read_experts(meta, dims.num_layers, has_biases=has_biases)
    except ValueError as error:
        why = str(error) if arch in KNOWN else _RUNTIMES.format(arch)
        return replace(shape, unknown=tuple(unknown), no_scratch=f"the scratch: {why}")
    slides = meta.get("attention.sliding_window")
    is_short = type(slides) is int and slides > 0
    return replace(
        shape,
        dims=dims if shape.cache is not None else None,
        vocab_size=dims.vocab_size,
        max_ctx=dims.max_seq_len,
        unknown=tuple(unknown),
        no_scratch="" if is_run or not is_mixture else _EXPERTS,
        slides=slides if is_short and all(k.window is None for k in shape.cache or ()) else None,
        experts=experts,
        is_run=is_run and shape.cache is not None and meta.get("attention.causal") is not False,
    )


def _context_length(meta: ArchMetadata) -> int | None:
    with suppress(ValueError):
        return meta.count("context_length")
    return None


def _vocab_size(weights: ModelContents) -> int | None:
    found = weights.tensors.get("token_embd.weight")
    if found is None or len(found.ne) != 2 or not 0 < found.ne[1] <= MOST:
        return None
    return found.ne[1]


def _nothing_known(why: str) -> Shape:
    unknown = (f"the KV cache: {why}",)
    no_scratch = f"the scratch: {why}"
    return Shape(None, None, None, None, None, unknown, no_scratch, is_counted=False)


def _too_many_layers(n_layers: int, n_tensors: int) -> UnknownError:
    return UnknownError(
        f"the metadata speaks of {format_count(n_layers, 'layer')}, but the file has only "
        f"{format_count(n_tensors, 'tensor')}"
    )


def grouped(layers: Iterable[KeptLayer] | None) -> tuple[Layers, ...] | None:
    """Group the layers that have rows of their own."""
    if layers is None:
        return None
    own = (one for one in layers if isinstance(one, KeptRows) and one.share_of is None)
    found = Counter(
        (one.n_kv_heads, one.k_size, one.v_size, one.window, one.every, one.is_divided)
        for one in own
    )
    return tuple(Layers(n, *kind) for kind, n in found.items())


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
        return _nothing_known(why)
    kind = config.get("model_type")
    arch = kind if isinstance(kind, str) else None
    inner = config.get("text_config")
    is_nested = isinstance(inner, dict)
    values: Mapping[str, Any] = inner if isinstance(inner, dict) else config
    fields = _config_fields(values, nested=is_nested)
    vocab, longest = _known(fields, "vocab_size"), _known(fields, "context_length")
    unknown: list[str] = []
    dims, no_scratch = None, ""
    try:
        if is_nested:
            raise UnknownError(_RUNTIMES.format(arch))
        dims = _config_dims(values, fields, vocab, longest)
    except ValueError as error:
        no_scratch = f"the scratch: {error}"
    layers: tuple[KeptLayer, ...] | None = None
    try:
        layers = _config_layers(values, fields)
        if any(isinstance(layer, KeptRows) and not layer.v_size for layer in layers):
            unknown.append(
                "the KV cache of a runtime that keeps more: the row is of compressed keys, which "
                "include the values"
            )
    except ValueError as error:
        unknown.append(f"the KV cache: {error}")
        dims = None  # the work memory of attention is unknown too
    return Shape(
        arch,
        grouped(layers),
        dims,
        vocab,
        longest,
        tuple(unknown),
        no_scratch,
        layers=layers or (),
        is_counted=layers is not None,
    )


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
        raise UnknownError(families.COMPRESSED)
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
