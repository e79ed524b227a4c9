"""The shape of a model, from which its memory follows, as far as its files tell it.

Metadata is not trusted: a value that is missing, of another type or out of range makes a figure
unknown, with a sentence that says why, and costs no more time than a right one.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from unimem.buffers.dims import (
    ARCHITECTURES,
    KNOWN,
    MIXTURES,
    ArchMetadata,
    Experts,
    ModelDims,
    read_experts,
    read_sliding,
)
from unimem.system.text import format_count

if TYPE_CHECKING:
    from unimem.weights.tensors import Contents

__all__ = ["Layers", "Shape", "from_config", "from_dims", "from_weights", "read_config"]

_CONFIG = "config.json"
_CONFIG_BYTES_MAX = 4 << 20  # of known models the longest has 50 kB
_MOST = 2**31 - 1  # engines count layers, heads and tokens in 32 bits
_EXPERTS = (
    "the scratch memory of a mixture of experts: the row is that of a dense model, without the "
    "outputs of the experts and of the router"
)
# A state that a layer keeps beside keys and values, or instead: it does not grow with a text.
_STATES = ("ssm.state_size", "ssm.conv_kernel", "wkv.head_size", "shortconv.l_cache")
# Keys of models some of whose layers keep fewer rows than the conversation has tokens.
_FEWER = {
    "attention.sliding_window": "attention of some layers slides over {} tokens",
    "attention.shared_kv_layers": "{} layers share the cache of others",
    "nextn_predict_layers": "{} layers predict further tokens, and a runtime may leave them out",
}
# Model types of a config.json that are computed as the engine computes them.
_DENSE_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# Model types whose layers all keep keys and values of each token, with heads and sizes as the usual
# fields say. Others have fields of their own, or keep something else.
_PLAIN_CACHES = frozenset(
    {
        *(
            "llama",
            "mistral",
            "mixtral",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "gemma",
            "gemma2",
            "gemma3_text",
            "phi",
            "phi3",
            "phimoe",
            "gpt2",
            "gpt_neox",
            "gptj",
            "gpt_oss",
            "olmo",
            "olmo2",
            "olmoe",
            "starcoder2",
            "stablelm",
            "cohere",
            "cohere2",
            "granite",
            "granitemoe",
            "glm",
            "glm4",
            "smollm3",
            "internlm2",
            "opt",
            "bloom",
        ),
    }
)
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


class Layers(NamedTuple):
    """Layers of a KV cache that are alike.

    Attributes
    ----------
    n_layers : int
        Number of layers.
    n_heads : int
        Heads of keys and values.
    k_size, v_size : int
        Values of one head's key, and of its value.
    window : int or None
        Tokens that attention slides over there, where the engine keeps no more than these.
    """

    n_layers: int
    n_heads: int
    k_size: int
    v_size: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """What is known of a model. Immutable: any number of threads may use it.

    Attributes
    ----------
    arch : str or None
        Its architecture.
    cache : tuple of Layers, or None
        The layers of its KV cache; empty for a model without one, None where it is not known.
    dims : ModelDims or None
        Its dimensions, of a model that is computed as the engine computes one.
    vocab_size : int or None
        Tokens.
    max_ctx : int or None
        The longest context that it was made for.
    slides : int or None
        Tokens that attention of all layers slides over, where it does: the engine shows attention
        all of a context, or a window, and no more than these.
    experts : Experts or None
        Those of a mixture that the engine runs.
    unknown : tuple of str
        What is not known, each with the reason.
    """

    arch: str | None
    cache: tuple[Layers, ...] | None
    dims: ModelDims | None
    vocab_size: int | None
    max_ctx: int | None
    unknown: tuple[str, ...] = ()
    slides: int | None = None
    experts: Experts | None = None

    def longest_ctx(self, window: int | None) -> int:
        """Return the longest context that may be asked for, with or without a window."""
        most = self.max_ctx or _MOST
        return self.slides if self.slides and self.slides < (window or most) else most


class _UnknownError(ValueError):
    """Says why a figure is not known."""


def from_dims(dims: ModelDims, arch: str | None = None, unknown: tuple[str, ...] = ()) -> Shape:
    """Return the shape of a model with known dimensions."""
    layers = Layers(dims.num_layers, dims.num_kv_heads, dims.head_dim, dims.head_dim)
    return Shape(arch, (layers,), dims, dims.vocab_size, dims.max_seq_len, unknown)


def from_weights(weights: Contents) -> Shape:
    """Return the shape of an opened GGUF file of any architecture.

    Parameters
    ----------
    weights : Contents
        Whose header is looked at.

    Returns
    -------
    Shape
    """
    arch = weights.metadata.get("general.architecture")
    if not isinstance(arch, str):
        why = "the file does not say its architecture"
        return Shape(None, None, None, None, None, (f"the KV cache: {why}", f"the scratch: {why}"))
    meta = ArchMetadata(weights.metadata, arch)
    try:
        dims = ModelDims.from_weights(weights)
    except ValueError as error:
        return _from_metadata(weights, meta, arch, error)
    if dims.num_layers > len(weights.tensors):
        return _from_metadata(
            weights, meta, arch, _too_many_layers(dims.num_layers, len(weights.tensors))
        )
    experts = arch in MIXTURES or bool(meta.get("expert_count"))
    is_run = arch in ARCHITECTURES and arch in MIXTURES
    shape = from_dims(dims, arch, (_EXPERTS,) if experts and not is_run else ())
    try:
        if is_run:
            shape = replace(shape, experts=read_experts(meta, dims.num_layers))
        sliding = read_sliding(meta, arch, dims.num_layers)
    except ValueError as error:
        return _from_metadata(weights, meta, arch, error)
    if sliding is not None:
        assert shape.cache is not None  # of known dimensions
        n, (layers,) = sum(sliding.layers), shape.cache
        parts = (
            layers._replace(n_layers=len(sliding.layers) - n),
            layers._replace(n_layers=n, window=sliding.window),
        )
        return replace(shape, cache=tuple(part for part in parts if part.n_layers))
    slides = meta.get("attention.sliding_window")
    if isinstance(slides, int) and not isinstance(slides, bool) and slides > 0:
        shape = replace(shape, slides=slides)
    return shape


def _from_metadata(weights: Contents, meta: ArchMetadata, arch: str, why: ValueError) -> Shape:
    unknown = []
    cache = None
    try:
        cache, fewer = _cache(meta, arch, len(weights.tensors))
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
    if embedding is not None and len(embedding.ne) == 2 and 0 < embedding.ne[1] <= _MOST:
        vocab = embedding.ne[1]
    return Shape(arch, cache, None, vocab, longest, tuple(unknown))


def _too_many_layers(n_layers: int, n_tensors: int) -> _UnknownError:
    return _UnknownError(
        f"the metadata speaks of {format_count(n_layers, 'layer')}, but the file has only "
        f"{format_count(n_tensors, 'tensor')}"
    )


def _cache(meta: ArchMetadata, arch: str, n_tensors: int) -> tuple[tuple[Layers, ...], list[str]]:
    """Read the layers of the KV cache, and sentences where they are only an upper bound."""
    if meta.get("attention.causal") is False:
        return (), []  # a text is read as a whole, and nothing is kept
    if meta.get("attention.kv_lora_rank") is not None:
        raise _UnknownError(
            f"{arch!r:.40} compresses keys and values (multi-head latent attention), and what a "
            "runtime keeps of them is its choice"
        )
    if arch.startswith("t5"):
        raise _UnknownError(f"{arch!r:.40} has an encoder, whose output is kept, too")
    count = meta.count("block_count")
    if count > n_tensors:
        raise _too_many_layers(count, n_tensors)
    state = next((key for key in _STATES if meta.get(key) is not None), None)
    heads = _per_layer(meta, "attention.head_count_kv", count)
    if state is not None and not isinstance(heads, list):
        raise _UnknownError(
            f"{arch!r:.40} keeps a state of its own ('{arch:.40}.{state}'), and the file does not "
            "say which layers have keys and values"
        )
    if heads is None:
        heads = _per_layer(meta, "attention.head_count", count)
    if heads is None:
        raise _UnknownError(f"the metadata of {arch!r:.40} has no 'attention.head_count_kv'")
    k_size = _head_size(meta, "attention.key_length")
    v_size = _head_size(meta, "attention.value_length", k_size)
    found = Counter(heads) if isinstance(heads, list) else {heads: count}
    layers = tuple(Layers(n, heads, k_size, v_size) for heads, n in found.items() if heads)
    fewer = []
    for key, text in _FEWER.items():
        value = meta.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            fewer.append(
                "the KV cache of a runtime that keeps less: the row is of every token in every "
                f"layer, and {text.format(value)}"
            )
    if state is not None:
        fewer.append(f"the state of {arch!r:.40} ('{arch:.40}.{state}') beside its KV cache")
    return layers, fewer


def _per_layer(meta: ArchMetadata, name: str, count: int) -> int | list[int] | None:
    """Read a number of heads, or one for each layer; 0 is none."""
    value = meta.get(name)
    if value is None:
        return None
    if isinstance(value, (int, float, str)):
        return meta.count(name) if value else 0
    if len(value) != count:
        raise _UnknownError(
            f"'{name}' has {format_count(len(value), 'value')} for {format_count(count, 'layer')}"
        )
    values = value if isinstance(value, list) else value.tolist()
    if not all(type(item) is int and 0 <= item <= _MOST for item in values):
        raise _UnknownError(f"'{name}' has values that are no numbers of heads")
    return values


def _head_size(meta: ArchMetadata, name: str, default: int | None = None) -> int:
    if meta.get(name) is not None or default is not None:
        return meta.count(name, default)
    hidden, heads = meta.count("embedding_length"), meta.count("attention.head_count")
    if hidden < heads:
        raise _UnknownError(
            f"the metadata has more heads, {heads}, than the {hidden} of their values"
        )
    return hidden // heads


# ---- safetensors --------------------------------------------------------------------------------


def read_config(path: str, read: Callable[[str, int], bytes]) -> tuple[dict[str, Any] | None, str]:
    """Read the ``config.json`` of Hugging Face that lies beside a model's file.

    Parameters
    ----------
    path : str
        The model's file, or its index.
    read : callable
        Reads the first bytes of a path, at most so many, as `ModelFiles.read_start` does.

    Returns
    -------
    config : dict or None
        None where there is none that can be used.
    why : str
        Why not.
    """
    where = os.path.join(os.path.dirname(path), _CONFIG)
    try:
        text = read(where, _CONFIG_BYTES_MAX + 1)
    except OSError as error:
        return None, f"no file of it says its dimensions ({where}: {error.strerror})"
    try:
        if len(text) > _CONFIG_BYTES_MAX:
            raise _UnknownError("it is longer than 4 MiB")
        config = json.loads(text)
        if not isinstance(config, dict):
            raise _UnknownError("it is no object")
    except (ValueError, RecursionError) as error:
        return None, f"{where} cannot be used: {error!s:.100}"
    return config, ""


def from_config(config: dict[str, Any] | None, why: str) -> Shape:
    """Return the shape of a model by its ``config.json``.

    Parameters
    ----------
    config : dict or None
        What is in the file.
    why : str
        Why there is none.

    Returns
    -------
    Shape
    """
    if config is None:
        return Shape(None, None, None, None, None, (f"the KV cache: {why}", f"the scratch: {why}"))
    kind = config.get("model_type")
    arch = kind if isinstance(kind, str) else None
    inner = config.get("text_config")
    values = _Config(inner, nested=True) if isinstance(inner, dict) else _Config(config)
    vocab, longest = values.number("vocab_size"), values.number(*_LONGEST)
    unknown: list[str] = []
    dims = None
    try:
        if isinstance(inner, dict):
            raise _UnknownError(f"what computing {arch!r:.40} takes is the runtime's to say")
        dims = values.dims(vocab, longest)
    except ValueError as error:
        unknown.append(f"the scratch: {error}")
    cache = None
    try:
        cache, fewer = values.cache()
        unknown += fewer
    except ValueError as error:
        unknown.append(f"the KV cache: {error}")
    if cache is None:
        dims = None  # then the work memory of attention is not known either
    slides = None if dims is None else values.window()
    return Shape(arch, cache, dims, vocab, longest, tuple(unknown), slides)


_MOST_TYPES = 100_000
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def _named(kind: object) -> str:
    return (
        f"{kind!r:.40}" if isinstance(kind, str) else f"a model without 'model_type' in {_CONFIG}"
    )


class _Config:
    """Checked access to a ``config.json``."""

    def __init__(self, values: Mapping[str, Any], *, nested: bool = False) -> None:
        self._values = values
        self._nested = nested

    def number(self, *names: str) -> int | None:
        """Return the first of these that is an integer above 0."""
        for name in names:
            value = self._values.get(name)
            if type(value) is int and 0 < value <= _MOST:
                return value
        return None

    def required(self, names: Sequence[str]) -> int:
        """Return it, or say that it is missing."""
        value = self.number(*names)
        if value is None:
            raise _UnknownError(f"{_CONFIG} has no {names[0]!r}, or none that is a number")
        return value

    def window(self) -> int | None:
        """Return how many tokens attention slides over, in any layer."""
        if self._values.get("use_sliding_window") is False:
            return None
        return self.number("sliding_window")

    def heads(self) -> tuple[int, int, int]:
        """Return the heads, those of keys and values, and the values of one."""
        heads = self.required(_HEADS)
        size = self.number("head_dim")
        # What has its default is left out of an inner config, and so may be what is not the rule.
        own_size = size is None and str(self._values.get("model_type")).startswith("gemma")
        for name, missing in (
            ("num_key_value_heads", self._nested and "num_key_value_heads" not in self._values),
            ("head_dim", own_size),
        ):
            if missing:
                raise _UnknownError(f"{_CONFIG} has no {name!r}, which need not follow from others")
        if size is None:
            size = self.required(_HIDDEN) // heads
        if size == 0:
            raise _UnknownError(f"{_CONFIG} has more heads than values for them")
        return heads, self.number("num_key_value_heads") or heads, size

    def cache(self) -> tuple[tuple[Layers, ...], list[str]]:
        """Return the layers of the KV cache, and sentences where they are only an upper bound."""
        kind = self._values.get("model_type")
        if self.number("kv_lora_rank"):
            raise _UnknownError(
                "keys and values are compressed (multi-head latent attention), and what a runtime "
                "keeps of them is its choice"
            )
        if self._values.get("is_encoder_decoder") is True:
            raise _UnknownError("the model has an encoder, whose output is kept, too")
        types = self._values.get("layer_types")
        named = set(map(str, types[:_MOST_TYPES])) if isinstance(types, list) else set()
        if self.number("state_size", "ssm_state_size", "mamba_d_state") or any(
            "attention" not in name or "linear" in name for name in named
        ):
            raise _UnknownError(f"{kind!r:.40} keeps a state of its own, in some layers or in all")
        if kind not in _PLAIN_CACHES:
            raise _UnknownError(f"what {_named(kind)} keeps of a token is not known to unimem")
        _, heads, size = self.heads()
        slides = self.window()
        fewer = []
        if slides:
            fewer.append(
                "the KV cache of a runtime that keeps less: the row is of every token in every "
                f"layer, and attention of some layers slides over {slides} tokens"
            )
        return (Layers(self.required(_LAYERS), heads, size, size),), fewer

    def dims(self, vocab: int | None, longest: int | None) -> ModelDims:
        """Return the dimensions, of a model that is computed as the engine computes one."""
        kind = self._values.get("model_type")
        if kind not in _DENSE_TYPES or self.number(*_EXPERT_COUNTS):
            raise _UnknownError(f"what computing {_named(kind)} takes is the runtime's to say")
        if vocab is None or longest is None:
            missing = "vocab_size" if vocab is None else _LONGEST[0]
            raise _UnknownError(f"{_CONFIG} has no {missing!r}, or none that is a number")
        heads, kv_heads, size = self.heads()
        return ModelDims(
            hidden_size=self.required(_HIDDEN),
            intermediate_size=self.required(("intermediate_size",)),
            num_attention_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=size,
            vocab_size=vocab,
            num_layers=self.required(_LAYERS),
            max_seq_len=longest,
        )
