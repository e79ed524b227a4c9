"""The table of families, and what each layer of their models keeps.

A new family is a row of `FAMILIES`. GGUF's keys are read as by llama.cpp b9190
(`llama_model::load_hparams`, `llama_hparams::n_embd_r` and `n_embd_s`), a ``config.json`` as by
transformers 5.23 (the families' ``configuration_*.py``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from unimem.base.text import format_bytes, format_count
from unimem.models.fields import Fields, Kind, UnknownError

__all__ = [
    "FAMILIES",
    "Family",
    "GraphKind",
    "KeptLayer",
    "KeptRows",
    "KeptState",
    "RopeMode",
    "count_layers",
    "equal_layers",
    "in_words",
    "layers_of",
    "of_architecture",
    "of_model_type",
]

MOST_LAYERS = 10_000
_F32_BYTES = 4


class KeptRows(NamedTuple):
    """Keys and values that a block of a model keeps.

    Attributes
    ----------
    block : int
        The block's number in the model.
    n_kv_heads : int
        Heads of keys and values.
    k_size, v_size : int
        Values of one head's key, and of its value; 0 if the value is a part of the key.
    window : int or None
        How many of the last tokens it keeps, if not all.
    share_of : int or None
        The number of the layer, in the same list, whose rows this one shares.
    """

    block: int
    n_kv_heads: int
    k_size: int
    v_size: int
    window: int | None = None
    share_of: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, by the names of `LayerKV`."""
        return {
            "block": self.block,
            "kind": "kv",
            "n_kv_heads": self.n_kv_heads,
            "head_dim": self.k_size,
            "v_head_dim": self.v_size,
            "window": self.window,
            "share_of": self.share_of,
        }


class KeptState(NamedTuple):
    """A state of fixed size that a block of a model keeps.

    Attributes
    ----------
    block : int
        The block's number in the model.
    shape : tuple of int
        The shape of one stream's state, which is float32 as in llama.cpp.
    """

    block: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one stream."""
        return math.prod(self.shape) * _F32_BYTES

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
        return {"block": self.block, "kind": "state", "shape": list(self.shape), "dtype": "f32"}


#: A layer, in the order of the blocks; keys and values of a block precede its states.
KeptLayer: TypeAlias = KeptRows | KeptState


# ---- which layers keep what ---------------------------------------------------------------------

#: Returns the kinds of n layers.
Kinds: TypeAlias = Callable[[Fields, int], list[Kind]]


def _full(_fields: Fields, n: int) -> list[Kind]:
    return ["full"] * n


def _sliding(_fields: Fields, n: int) -> list[Kind]:
    return ["sliding"] * n


def _state(_fields: Fields, n: int) -> list[Kind]:
    return ["state"] * n


def _both(_fields: Fields, n: int) -> list[Kind]:
    return ["both"] * n


def _last_slide(fields: Fields, n: int) -> list[Kind]:
    """Slide in all layers from `max_window_layers` on."""
    first = fields.required("max_window_layers")
    return ["full" if i < first else "sliding" for i in range(n)]


def _by_heads(fields: Fields, n: int) -> list[Kind]:
    """Return a state for layers without heads."""
    heads = fields.per_layer("attention.head_count_kv", n)
    if heads is None or 0 not in heads:
        raise UnknownError("the file does not say which layers have keys and values")
    return ["full" if count else "state" for count in heads]


def _every(period: int, other: Kind, key: str) -> Kinds:
    """Make each `period`-th layer full, or by the period that the file has under `key`."""

    def kinds(fields: Fields, n: int) -> list[Kind]:
        every = fields.number(key)
        every = period if every is None else every
        return [other if not every or (i + 1) % every else "full" for i in range(n)]

    return kinds


def _listed(otherwise: Kinds) -> Kinds:
    """Take the file's list, or else a rule."""
    return lambda fields, n: fields.kinds(n) or otherwise(fields, n)


def _alternate(period: int) -> Kinds:
    return _listed(_every(period, "sliding", "attention.sliding_window_pattern"))


# ---- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Family:
    """Models with the same rules for their layers. Immutable.

    Attributes
    ----------
    architectures : tuple of str
        Their names in GGUF.
    model_types : tuple of str
        Their names in a ``config.json``.
    kinds : callable
        Returns the kinds of n layers.
    window : int or None
        How many tokens attention slides over, if the file does not say it.
    compresses : bool
        Whether one row of compressed keys serves all heads (multi-head latent attention).
    config : mapping of str to str
        Own names in a ``config.json`` for some of GGUF's: see `ConfigFields`.
    defaults : mapping of str to int
        Defaults of transformers for a ``config.json``.
    """

    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    kinds: Kinds = _full
    window: int | None = None
    compresses: bool = False
    config: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)


_GEMMA = {"attention.head_count": 8, "attention.head_count_kv": 4, "attention.key_length": 256}
FAMILIES: tuple[Family, ...] = (
    # All layers keep all tokens; llama.cpp does so even if attention slides.
    Family(("llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "phi3")),
    Family((), ("llama", "gemma", "gpt2", "gpt_neox", "gptj", "phi", "olmo", "olmo2", "olmoe",
                "stablelm", "cohere", "granite", "granitemoe", "glm", "glm4", "smollm3",
                "internlm2", "opt", "bloom"), _listed(_full)),
    # With a window, all layers slide, or the last ones.
    Family((), ("mistral", "mixtral", "phi3", "phimoe", "starcoder2"), _listed(_sliding)),
    Family((), ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _listed(_last_slide),
           defaults={"use_sliding_window": 0, "max_window_layers": 28}),
    # Sliding layers alternate with full ones.
    Family(("gemma2",), ("gemma2",), _alternate(2), window=4096, defaults=_GEMMA),
    Family(("gemma3",), ("gemma3_text",), _alternate(6),
           defaults=_GEMMA | {"attention.sliding_window": 4096}),
    Family(("gemma3n",), ("gemma3n_text",), _alternate(5),
           defaults=_GEMMA | {"attention.head_count_kv": 2, "attention.sliding_window": 512,
                              "attention.shared_kv_layers": 15}),
    Family(("gemma4",), (), _alternate(6)),
    Family(("gpt-oss",), ("gpt_oss",), _alternate(2),
           defaults={"attention.head_count_kv": 8, "attention.key_length": 64,
                     "attention.sliding_window": 128}),
    Family(("llama4",), ("llama4_text",), _alternate(4), window=8192,
           config={"attention.sliding_window": "attention_chunk_size",
                   "attention.sliding_window_pattern": "no_rope_layer_interval"},
           defaults={"attention.head_count": 40, "attention.head_count_kv": 8,
                     "attention.key_length": 128}),
    Family(("cohere2",), ("cohere2",), _alternate(4)),
    Family(("olmo2",), ("olmo3",), _alternate(4)),
    # One compressed row for all heads.
    Family(("deepseek2",), ("deepseek_v2", "deepseek_v3"), compresses=True,
           config={"attention.key_length_mla": "qk_nope_head_dim+qk_rope_head_dim"}),
    # States.
    Family(("mamba",), ("mamba",), _state,
           config={"ssm.conv_kernel": "conv_kernel", "ssm.inner_size": "hidden_size*expand",
                   "ssm.state_size": "state_size"},
           defaults={"ssm.conv_kernel": 4}),
    Family(("mamba2",), ("mamba2",), _state,
           config={"ssm.conv_kernel": "conv_kernel", "ssm.inner_size": "num_heads*head_dim",
                   "ssm.state_size": "state_size", "ssm.group_count": "n_groups",
                   "ssm.time_step_rank": "num_heads"}),
    Family(("falcon-h1",), ("falcon_h1",), _both,
           config={"ssm.conv_kernel": "mamba_d_conv", "ssm.inner_size": "mamba_d_ssm",
                   "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups",
                   "ssm.time_step_rank": "mamba_n_heads"}),
    Family(("granitehybrid",), ("granitemoehybrid",), _listed(_by_heads),
           config={"ssm.conv_kernel": "mamba_d_conv", "ssm.inner_size": "hidden_size*mamba_expand",
                   "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups",
                   "ssm.time_step_rank": "mamba_n_heads"}),
    Family(("qwen3next",), ("qwen3_next",),
           _listed(_every(4, "state", "full_attention_interval")),
           config={"ssm.conv_kernel": "linear_conv_kernel_dim",
                   "ssm.inner_size": "linear_num_value_heads*linear_value_head_dim",
                   "ssm.state_size": "linear_key_head_dim",
                   "ssm.group_count": "linear_num_key_heads",
                   "ssm.time_step_rank": "linear_num_value_heads"}),
)  # fmt: skip
"""All families. A model may be in two rows, since GGUF and a config.json differ."""

# ---- what the engine runs -----------------------------------------------------------------------

#: Which values of a head are rotated together: neighbours, or those half a head apart.
RopeMode: TypeAlias = Literal["normal", "neox"]


@dataclass(frozen=True, slots=True)
class GraphKind:
    """The features of an architecture's graph. Immutable.

    The source is llama.cpp, build b9190: ``src/models/`` has a file for each.

    Attributes
    ----------
    rope : RopeMode
        How positions rotate heads.
    has_biases : bool or None
        Whether queries, keys and values have biases; None if only some files have them.
    has_rope_factors : bool
        Whether a file may have a factor for each angle.
    norms_heads : bool
        Whether the heads of queries and keys are normed.
    norms_outputs : bool
        Whether the outputs of attention and of the feed-forward network are normed.
    scales_embedding : bool
        Whether embeddings are multiplied by the root of their size.
    is_gelu : bool
        Whether GELU, in its form with tanh, gates the feed-forward network, instead of SiLU.
    is_mixture : bool
        Whether it has experts.
    slides : bool
        Whether attention slides in some layers and not in others.
    """

    rope: RopeMode
    has_biases: bool | None = False
    has_rope_factors: bool = False
    norms_heads: bool = False
    norms_outputs: bool = False
    scales_embedding: bool = False
    is_gelu: bool = False
    is_mixture: bool = False
    slides: bool = False


GRAPH_KINDS = {
    "llama": GraphKind("normal", has_biases=None, has_rope_factors=True),
    "qwen2": GraphKind("neox", has_biases=True),
    "qwen3": GraphKind("neox", has_biases=None, norms_heads=True),
    "gemma3": GraphKind("neox", norms_heads=True, norms_outputs=True, scales_embedding=True,
                        is_gelu=True, slides=True),
    "qwen3moe": GraphKind("neox", norms_heads=True, is_mixture=True),
}  # fmt: skip
"""The graphs of the architectures that the engine runs: `dims.ARCHITECTURES`."""

_BY_ARCHITECTURE = {name: one for one in FAMILIES for name in one.architectures}
_BY_MODEL_TYPE = {name: one for one in FAMILIES for name in one.model_types}


def of_architecture(name: str) -> Family | None:
    """Return the family of an architecture of GGUF."""
    return _BY_ARCHITECTURE.get(name)


def of_model_type(name: object) -> Family | None:
    """Return the family of the model type of a ``config.json``."""
    return _BY_MODEL_TYPE.get(name) if isinstance(name, str) else None


# ---- reading ------------------------------------------------------------------------------------


def layers_of(family: Family, fields: Fields) -> tuple[KeptLayer, ...]:
    """Return the layers of a model, as for ``KVCache(layers=[...])``.

    Raise ValueError, with the figure's name, if one is missing, no number or out of range.
    """
    n = count_layers(fields)
    kinds = family.kinds(fields, n)
    states = _state_shapes(fields) if {"state", "both"} & set(kinds) else ()
    rows: Sequence[KeptRows] = ()
    if any(kind != "state" for kind in kinds):
        rows = _rows(family, fields, kinds)
    found: list[KeptLayer] = []
    for i, kind in enumerate(kinds):
        if kind != "state" and rows[i].n_kv_heads:
            found.append(rows[i])
        if kind in ("state", "both"):
            found += (KeptState(i, shape) for shape in states)
    shared = fields.number("attention.shared_kv_layers") or 0
    return _sharing(found, n - shared) if shared else tuple(found)


def count_layers(fields: Fields) -> int:
    """Return how many blocks a model has."""
    n = fields.required("block_count")
    if n > MOST_LAYERS:
        raise UnknownError(f"it speaks of {format_count(n, 'layer')}, more than {MOST_LAYERS:,}")
    return n


def equal_layers(n: int, n_kv_heads: int, head_dim: int) -> tuple[KeptLayer, ...]:
    """Return n layers that keep all tokens; none of more layers than a model may have."""
    if n > MOST_LAYERS:
        return ()
    return tuple(KeptRows(i, n_kv_heads, head_dim, head_dim) for i in range(n))


def _rows(family: Family, fields: Fields, kinds: Sequence[Kind]) -> list[KeptRows]:
    """Return the keys and values of each block, as if each had some."""
    n, window = len(kinds), fields.number("attention.sliding_window")
    window = family.window if window is None else window
    if family.compresses and fields.number("attention.key_length_mla"):
        # llama.cpp keeps the compressed key with the part that carries the position behind it.
        size = fields.required("attention.kv_lora_rank") + fields.required("rope.dimension_count")
        return [KeptRows(i, 1, size, 0) for i in range(n)]
    heads = fields.per_layer("attention.head_count_kv", n)
    heads = heads or fields.per_layer("attention.head_count", n)
    if heads is None:
        raise UnknownError("there is no 'attention.head_count_kv'")
    k_size = fields.head_size()
    v_size = fields.number("attention.value_length") or k_size
    k_slides = fields.number("attention.key_length_swa") or k_size
    v_slides = fields.number("attention.value_length_swa") or (
        k_slides if k_slides != k_size else v_size
    )
    return [
        KeptRows(i, heads[i], k_slides, v_slides, window)
        if kind == "sliding" and window
        else KeptRows(i, heads[i], k_size, v_size)
        for i, kind in enumerate(kinds)
    ]


def _state_shapes(fields: Fields) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a layer's states: what a convolution looks back on, and its memory."""
    kernel, inner = fields.required("ssm.conv_kernel"), fields.required("ssm.inner_size")
    size, groups = fields.required("ssm.state_size"), fields.number("ssm.group_count") or 0
    shapes: list[tuple[int, ...]] = []
    if kernel > 1:
        shapes.append((kernel - 1, inner + 2 * groups * size))
    if not groups:
        return (*shapes, (inner, size))
    heads = fields.required("ssm.time_step_rank")
    if inner % heads:
        raise UnknownError(f"'ssm.inner_size' is {inner}, and no multiple of {heads} heads")
    return (*shapes, (heads, inner // heads, size))


def _sharing(layers: Sequence[KeptLayer], first: int) -> tuple[KeptLayer, ...]:
    """Let blocks from `first` on show the rows of the last ones before that are like them."""
    last: dict[int | None, int] = {}
    found: list[KeptLayer] = []
    for number, layer in enumerate(layers):
        if isinstance(layer, KeptState):
            found.append(layer)
        elif layer.block < first:
            last[layer.window] = number
            found.append(layer)
        elif layer.window in last:
            found.append(layer._replace(share_of=last[layer.window]))
        else:
            raise UnknownError(f"no layer before {first} is like layer {layer.block}")
    return tuple(found)


# ---- what people read ---------------------------------------------------------------------------


def in_words(layers: Iterable[KeptLayer], *, briefly: bool = True) -> str:
    """Describe what layers keep; `briefly` says nothing if all keep all tokens."""
    given = list(layers)
    rows = [layer for layer in given if isinstance(layer, KeptRows)]
    states = [layer for layer in given if isinstance(layer, KeptState)]
    own = Counter(layer.window for layer in rows if layer.share_of is None)
    shared = sum(layer.share_of is not None for layer in rows)
    if briefly and not states and not shared and set(own) <= {None}:
        return ""
    parts = [
        f"{n} keep{'s' * (n == 1)} {'all tokens' if window is None else f'the last {window:,}'}"
        for window, n in sorted(own.items(), key=lambda item: item[0] or 0)
    ]
    parts += [f"{shared} show{'s' * (shared == 1)} those of others"] if shared else []
    if states:
        nbytes = format_bytes(sum(state.nbytes for state in states))
        parts.append(f"{format_count(len(states), 'state')} of {nbytes} in all")
    return ", ".join(parts)
