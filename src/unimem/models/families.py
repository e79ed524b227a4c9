"""The table of families, and what each layer of their models keeps.

A file's own keys are read first; a row of `FAMILIES` adds what the file does not say. GGUF's keys
are read as by llama.cpp b11549 (`llama_model_base::load_hparams`, `load_arch_hparams` of each
architecture, `llama_model::create_memory`), and ``tools/llama_cpp_caches.py`` compares each with
what it prints; a ``config.json`` is read as by transformers 5.23 (the families'
``configuration_*.py``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from unimem.base.text import format_bytes, format_count
from unimem.models.fields import Fields, Kind, UnknownError

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
    every : int
        Tokens that one row stands for.
    is_divided : bool
        Whether llama.cpp keeps it for each conversation, even in a cache that they share.
    """

    block: int
    n_kv_heads: int
    k_size: int
    v_size: int
    window: int | None = None
    share_of: int | None = None
    every: int = 1
    is_divided: bool = False

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
            "every": self.every,
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


def _all(kind: Kind) -> Kinds:
    return lambda _fields, n: [kind] * n


_FULL, _NOTHING = _all("full"), _all("none")


def _last_slide(fields: Fields, n: int) -> list[Kind]:
    """Slide in all layers from `max_window_layers` on."""
    first = fields.required("max_window_layers")
    return ["full" if i < first else "sliding" for i in range(n)]


def _by_heads(fields: Fields, n: int) -> list[Kind]:
    """Return a state for layers without heads; with a window, the others slide."""
    heads = fields.per_layer("attention.head_count_kv", n)
    if heads is None or 0 not in heads:
        raise UnknownError("the file does not say which layers have keys and values")
    # Layers of a feed-forward network alone keep nothing.
    inner = fields.per_layer("feed_forward_length", n) or [0] * n
    alone = 0 in inner and any(inner)
    return [
        "none" if alone and width else "sliding" if count else "state"
        for count, width in zip(heads, inner, strict=True)
    ]


def _every(period: int, other: Kind, key: str, *, full_first: bool = False) -> Kinds:
    """Make each `period`-th layer full, or by the period that the file has under `key`."""

    def kinds(fields: Fields, n: int) -> list[Kind]:
        every = fields.number(key)
        every = period if every is None else every
        full = 0 if full_first else every - 1
        return ["full" if every and i % every == full else other for i in range(n)]

    return kinds


def _listed(otherwise: Kinds) -> Kinds:
    """Take the file's list, or else a rule."""
    return lambda fields, n: fields.kinds(n) or otherwise(fields, n)


def _alternate(period: int, *, full_first: bool = False) -> Kinds:
    key = "attention.sliding_window_pattern"
    return _listed(_every(period, "sliding", key, full_first=full_first))


def _not_listed(fields: Fields, n: int) -> list[Kind]:
    if any(map(fields.number, ("attention.sliding_window", "attention.sliding_window_pattern"))):
        raise UnknownError("the file does not list the layers whose attention slides")
    return _FULL(fields, n)


def _recurrent(period: int) -> Kinds:
    by_rule = _every(period, "state", "full_attention_interval")

    def kinds(fields: Fields, n: int) -> list[Kind]:
        listed = fields.per_layer("attention.recurrent_layers", n)
        if listed is None:
            return fields.kinds(n) or by_rule(fields, n)
        return ["state" if each else "full" for each in listed]

    return kinds


def _of_64_layers(fields: Fields, n: int) -> list[Kind]:
    return _alternate(4)(fields, n) if n == 64 else ["full"] * n


# ---- the table ----------------------------------------------------------------------------------

#: Which blocks have an index of keys: all; those that the file lists, or all; those behind the
#: leading dense ones, whose index has values too; or those whose keys are compressed.
Indexed: TypeAlias = Literal["all", "listed or all", "behind dense", "compressed"]


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
    is_fixed : bool
        Whether it does so whatever the file says, unless that is 0.
    compresses : bool
        Whether one row of compressed keys serves all heads (multi-head latent attention).
    indexed : str or None
        Which blocks have an index of their keys, if the file speaks of one.
    own_layers : int or None
        How many layers have rows of their own; the others show those of the last ones before.
    with_predictors : bool
        Whether layers that predict further tokens have rows beside the others.
    predictors : str
        If the cache of these layers alone has more than their rows: "indexed" with their indexes,
        or "all" that the others have.
    goes_back : bool
        Whether llama.cpp keeps earlier states too, if further tokens are predicted.
    is_divided : bool
        Whether llama.cpp keeps keys, without values, for each conversation, even in one cache.
    config : mapping of str to str
        Own names in a ``config.json`` for some of GGUF's: see `ConfigFields`.
    defaults : mapping of str to int
        Defaults of transformers for a ``config.json``.
    """

    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    kinds: Kinds = _FULL
    window: int | None = None
    is_fixed: bool = False
    compresses: bool = False
    indexed: Indexed | None = None
    own_layers: int | None = None
    with_predictors: bool = False
    predictors: Literal["", "indexed", "all"] = ""
    goes_back: bool = False
    is_divided: bool = False
    config: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)


_GEMMA = {"attention.head_count": 8, "attention.head_count_kv": 4, "attention.key_length": 256}
_SLIDES_AS_LISTED = _listed(_not_listed)
FAMILIES: tuple[Family, ...] = (
    # All layers keep all tokens; llama.cpp does so even if attention slides.
    Family(("llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "phi3")),
    Family(tuple("""
        apertus arcee arctic baichuan bailingmoe bailingmoe2 bitnet bloom chameleon chatglm
        codeshell cogvlm command-r dbrx deci deepseek deepseek2-ocr dots1 eagle3 ernie4_5
        ernie4_5-moe exaone falcon gemma glm4 glm4moe gpt2 gptj gptneox granite granitemoe
        graniteswitch grok grovemoe hrm_text hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 internlm2
        jais jais2 k2-horizon
        llama-embed maincoder minicpm minicpm3 minimax-m2 mistral3 mpt nanbeige nemotron olmo olmoe
        openelm orion paddleocr pangu-embedded phi2 phimoe plamo plm pockettts qwen qwen2vl qwen3tts
        qwen3vl qwen3vlmoe refact seed_oss smollm3 stablelm starcoder starcoder2 t5 t5encoder talkie
        xverse
    """.split())),
    # A text is read as a whole, and nothing is kept; or there is no text.
    Family(tuple("""
        bert clef clip dream eurobert gemma-embedding gemma-embedding2 gemma4-assistant jina-bert-v2
        jina-bert-v3 llada llada-moe modern-bert neo-bert nomic-bert nomic-bert-moe rnd1
        wavtokenizer-dec
    """.split()), kinds=_NOTHING),
    Family((), ("llama", "gemma", "gpt2", "gpt_neox", "gptj", "phi", "olmo", "olmo2", "olmoe",
                "stablelm", "cohere", "granite", "granitemoe", "glm", "glm4", "smollm3",
                "internlm2", "opt", "bloom"), _listed(_FULL)),
    # With a window, all layers slide, or the last ones.
    Family((), ("mistral", "mixtral", "phi3", "phimoe", "starcoder2"), _listed(_all("sliding"))),
    Family((), ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _listed(_last_slide),
           defaults={"use_sliding_window": 0, "max_window_layers": 28}),
    # Sliding layers alternate with full ones.
    Family(("gemma2",), ("gemma2",), _alternate(2), window=4096, defaults=_GEMMA),
    Family(("gemma3",), ("gemma3_text",), _alternate(6),
           defaults=_GEMMA | {"attention.sliding_window": 4096}),
    Family(("gemma3n",), ("gemma3n_text",), _alternate(5), own_layers=20,
           defaults=_GEMMA | {"attention.head_count_kv": 2, "attention.sliding_window": 512,
                              "attention.shared_kv_layers": 15}),
    Family(("gpt-oss",), ("gpt_oss",), _alternate(2),
           defaults={"attention.head_count_kv": 8, "attention.key_length": 64,
                     "attention.sliding_window": 128}),
    Family(("llama4",), ("llama4_text",), _alternate(4), window=8192, is_fixed=True,
           config={"attention.sliding_window": "attention_chunk_size",
                   "attention.sliding_window_pattern": "no_rope_layer_interval"},
           defaults={"attention.head_count": 40, "attention.head_count_kv": 8,
                     "attention.key_length": 128}),
    Family(("cohere2", "afmoe", "mellum", "muse-glimmer"), ("cohere2",), _alternate(4)),
    Family(("olmo2",), ("olmo3",), _alternate(4)),
    Family(("exaone-moe",), (), _alternate(4), window=128),
    Family(("exaone4",), (), _of_64_layers, window=4096),
    Family(("cohere2moe", "laguna"), (), _alternate(4, full_first=True)),
    Family(("smallthinker",), (), _alternate(4, full_first=True), window=4096, is_fixed=True),
    Family(("plamo3",), (), _alternate(8)),
    Family(("gemma4", "mimo2", "step35", "spark2_5", "granite_swa", "maple", "dflash"), (),
           _SLIDES_AS_LISTED),
    # One compressed row for all heads, and indexes of keys.
    Family(("deepseek2", "mistral4"), ("deepseek_v2", "deepseek_v3"), compresses=True,
           config={"attention.key_length_mla": "qk_nope_head_dim+qk_rope_head_dim"}),
    Family(("deepseek32",), compresses=True, indexed="all"),
    Family(("glm-dsa",), compresses=True, indexed="listed or all"),
    Family(("hy_v4",), compresses=True, indexed="listed or all", with_predictors=True,
           predictors="all"),
    Family(("dots3note",), (), _SLIDES_AS_LISTED, compresses=True, indexed="listed or all"),
    Family(("minimax-m3",), indexed="behind dense", with_predictors=True, predictors="all"),
    Family(("deepseek4",), (), _all("sliding"), indexed="compressed", is_divided=True,
           with_predictors=True, goes_back=True),
    # States.
    Family(("mamba",), ("mamba",), _all("state"),
           config={"ssm.conv_kernel": "conv_kernel", "ssm.inner_size": "hidden_size*expand",
                   "ssm.state_size": "state_size"},
           defaults={"ssm.conv_kernel": 4}),
    Family(("mamba2",), ("mamba2",), _all("state"),
           config={"ssm.conv_kernel": "conv_kernel", "ssm.inner_size": "num_heads*head_dim",
                   "ssm.state_size": "state_size", "ssm.group_count": "n_groups",
                   "ssm.time_step_rank": "num_heads"}),
    Family(("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"), (), _all("state")),
    Family(("falcon-h1",), ("falcon_h1",), _all("both"),
           config={"ssm.conv_kernel": "mamba_d_conv", "ssm.inner_size": "mamba_d_ssm",
                   "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups",
                   "ssm.time_step_rank": "mamba_n_heads"}),
    Family(("granitehybrid",), ("granitemoehybrid",), _listed(_by_heads), with_predictors=True,
           config={"ssm.conv_kernel": "mamba_d_conv", "ssm.inner_size": "hidden_size*mamba_expand",
                   "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups",
                   "ssm.time_step_rank": "mamba_n_heads"}),
    Family(("jamba", "plamo2"), (), _by_heads, with_predictors=True),
    Family(("lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"), (), _by_heads,
           with_predictors=True, goes_back=True),
    Family(("kimi-linear",), (), _by_heads, compresses=True, with_predictors=True),
    Family(("kimi-k3", "bailingmoe3"), (), _by_heads, compresses=True, with_predictors=True,
           goes_back=True),
    Family(("glm5-next",), (), _by_heads, compresses=True, indexed="listed or all",
           predictors="indexed", goes_back=True),
    Family(("qwen35", "qwen35moe"), (), _recurrent(4), goes_back=True),
    Family(("qwen3next",), ("qwen3_next",), _recurrent(4),
           config={"ssm.conv_kernel": "linear_conv_kernel_dim",
                   "ssm.inner_size": "linear_num_value_heads*linear_value_head_dim",
                   "ssm.state_size": "linear_key_head_dim",
                   "ssm.group_count": "linear_num_key_heads",
                   "ssm.time_step_rank": "linear_num_value_heads"}),
    Family(("qwen4exp",), (), _recurrent(4), indexed="all", predictors="indexed",
           goes_back=True),
    Family(("minimax-01",), (), _recurrent(8)),
)  # fmt: skip
"""All families. A model may be in two rows, since GGUF and a config.json differ."""

# ---- what the engine runs -----------------------------------------------------------------------

#: Which values of a head are rotated together: neighbours, or those half a head apart.
RopeMode: TypeAlias = Literal["normal", "neox"]
#: What gates a feed-forward network: SiLU; GELU in its form with tanh; or SiLU of values that are
#: limited, and steeper, as in gpt-oss.
Gate: TypeAlias = Literal["silu", "gelu", "oai"]


@dataclass(frozen=True, slots=True)
class GraphKind:
    """The features of an architecture's graph. Immutable.

    The source is llama.cpp, build b9190, and b11549 for gpt-oss: ``src/models/`` has a file for
    each.

    Attributes
    ----------
    rope : RopeMode
        How positions rotate heads.
    has_biases : bool or None
        Whether queries, keys and values have biases; None if only some files have them.
    has_more_biases : bool
        Whether the output of attention, the router and the experts have biases too.
    has_sinks : bool
        Whether each head has a score, without a value, beside those of the tokens that it sees.
    has_rope_factors : bool
        Whether a file may have a factor for each angle.
    norms_heads : bool
        Whether the heads of queries and keys are normed.
    norms_outputs : bool
        Whether the outputs of attention and of the feed-forward network are normed.
    scales_embedding : bool
        Whether embeddings are multiplied by the root of their size.
    ffn_norm : str
        The name of the norm before the feed-forward network.
    gate : Gate
        What gates the feed-forward network.
    is_mixture : bool
        Whether it has experts.
    weighs_chosen : bool
        Whether the scores of the chosen experts become probabilities, instead of those of all.
    slides : bool
        Whether attention slides in some layers and not in others.
    has_sliding_angles : bool
        Whether layers that slide have angles of their own, if the file does not say it.
    """

    rope: RopeMode
    has_biases: bool | None = False
    has_more_biases: bool = False
    has_sinks: bool = False
    has_rope_factors: bool = False
    norms_heads: bool = False
    norms_outputs: bool = False
    scales_embedding: bool = False
    ffn_norm: str = "ffn_norm"
    gate: Gate = "silu"
    is_mixture: bool = False
    weighs_chosen: bool = False
    slides: bool = False
    has_sliding_angles: bool = False


GRAPH_KINDS = {
    "llama": GraphKind("normal", has_biases=None, has_rope_factors=True),
    "qwen2": GraphKind("neox", has_biases=True),
    "qwen3": GraphKind("neox", has_biases=None, norms_heads=True),
    "gemma3": GraphKind("neox", norms_heads=True, norms_outputs=True, scales_embedding=True,
                        gate="gelu", slides=True, has_sliding_angles=True),
    "qwen3moe": GraphKind("neox", norms_heads=True, is_mixture=True),
    "gpt-oss": GraphKind("neox", has_biases=True, has_more_biases=True, has_sinks=True,
                         ffn_norm="post_attention_norm", gate="oai", is_mixture=True,
                         weighs_chosen=True, slides=True),
}  # fmt: skip
"""The graphs of the architectures that the engine runs: `dims.ARCHITECTURES`."""

_BY_ARCHITECTURE = {name: one for one in FAMILIES for name in one.architectures}
_BY_MODEL_TYPE = {name: one for one in FAMILIES for name in one.model_types}
# Keys of states that a layer keeps beside keys and values, or instead.
_STATES = (
    "ssm.conv_kernel",
    "ssm.state_size",
    "wkv.head_size",
    "shortconv.l_cache",
    "kda.head_dim",
)
_RATIOS = "attention.compress_ratios"
COMPRESSED = (
    "keys and values are compressed (multi-head latent attention), and what a runtime keeps of "
    "them is its choice"
)


def of_architecture(name: str) -> Family | None:
    """Return the family of an architecture of GGUF."""
    return _BY_ARCHITECTURE.get(name)


def of_model_type(name: object) -> Family | None:
    """Return the family of the model type of a ``config.json``."""
    return _BY_MODEL_TYPE.get(name) if isinstance(name, str) else None


def by_keys(fields: Fields) -> Family:
    """Return a family for an architecture that no row has, by the keys of its file.

    It keeps no more than is certain: with a window and no list, all layers slide.
    """
    kinds = _alternate(0)
    if fields.number("full_attention_interval") or fields.listed("attention.recurrent_layers"):
        kinds = _recurrent(0)
    elif any(fields.number(key) for key in _STATES):
        kinds = _by_heads
    compresses = bool(fields.number("attention.kv_lora_rank"))
    if compresses and not fields.number("attention.key_length_mla"):
        raise UnknownError(COMPRESSED)
    return Family(kinds=kinds, compresses=compresses, indexed="listed or all")


# ---- reading ------------------------------------------------------------------------------------


def layers_of(family: Family, fields: Fields, *, predictors: bool = False) -> tuple[KeptLayer, ...]:
    """Return the layers of a model, as for ``KVCache(layers=[...])``.

    With `predictors`, return those of the cache of layers that predict further tokens.
    Raise ValueError, with the figure's name, if one is missing, no number or out of range.
    """
    if family.kinds is _NOTHING:
        return ()
    n = count_layers(fields)
    n_predict = min(n - 1, fields.number("nextn_predict_layers") or 0)
    trunk, kinds = n - n_predict, family.kinds(fields, n)
    if predictors and family.predictors != "all":
        # A period ends with the other layers.
        by_list = family.is_divided or fields.kinds(n) is not None
        ends = kinds[trunk:] if by_list else _FULL(fields, n_predict)
        family, kinds = replace(family, is_divided=False), [*_NOTHING(fields, trunk), *ends]
    elif not family.with_predictors:
        kinds = [*kinds[:trunk], *_NOTHING(fields, n_predict)]
    rows: Sequence[KeptRows] = ()
    if {"full", "sliding", "both"} & set(kinds):
        rows = _rows(family, fields, kinds)
    indexes: dict[int, list[KeptLayer]] = {}
    if not predictors or family.predictors:
        last = n if family.predictors else trunk
        indexes = _indexes(family, fields, kinds[:last], rows)
    states = _state_shapes(fields, rows) if {"state", "both"} & set(kinds) else ()
    grams = _gram_shapes(fields)
    found: list[KeptLayer] = []
    for i, kind in enumerate(kinds):
        if kind not in ("state", "none") and rows[i].n_kv_heads:
            found.append(rows[i])
        found += indexes.get(i, ())
        if kind in ("state", "both"):
            found += (KeptState(i, shape) for shape in (*states, *grams.get(i, ())))
    own = n - (fields.number("attention.shared_kv_layers") or 0)
    if family.own_layers is not None:
        own = min(own, family.own_layers)
    return _with_more(fields, rows, _sharing(found, own) if own < n else found)


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
    if window is None or (family.is_fixed and window and family.window):
        window = family.window
    is_compressed = family.compresses and bool(fields.number("attention.key_length_mla"))
    if is_compressed and not fields.number("attention.value_length_mla"):
        # The compressed key, with the part that carries the position behind it.
        size = fields.required("attention.kv_lora_rank") + fields.required("rope.dimension_count")
        return [KeptRows(i, 1, size, 0) for i in range(n)]
    heads = fields.per_layer("attention.head_count_kv", n)
    heads = heads or fields.per_layer("attention.head_count", n)
    if heads is None:
        raise UnknownError("there is no 'attention.head_count_kv'")
    k_size = fields.head_size()
    v_size = fields.number("attention.value_length") or k_size
    k_slides = fields.number("attention.key_length_swa") or k_size
    v_slides = fields.number("attention.value_length_swa") or v_size
    if is_compressed or family.is_divided:
        v_size = v_slides = 0
    return [
        KeptRows(i, heads[i], k_slides, v_slides, window, is_divided=family.is_divided)
        if kind == "sliding" and window
        else KeptRows(i, heads[i], k_size, v_size)
        for i, kind in enumerate(kinds)
    ]


def _indexes(
    family: Family, fields: Fields, kinds: Sequence[Kind], rows: Sequence[KeptRows]
) -> dict[int, list[KeptLayer]]:
    """Return what blocks keep to find keys: an index of one head, or compressed keys."""
    size = fields.number("attention.indexer.key_length")
    if family.indexed is None or not size or not fields.required("attention.indexer.top_k"):
        return {}
    if family.indexed == "compressed":
        return _compressed(fields, size, rows[: len(kinds)])
    lead = fields.number("leading_dense_block_count") or 0
    n_listed = count_layers(fields) - (fields.number("nextn_predict_layers") or 0)
    listed = fields.per_layer("attention.indexer.types", n_listed)
    if listed is None:
        # As GLM 5.2 has them.
        is_long = (fields.number("context_length") or 0) >= 1 << 20
        is_shared = family.indexed == "listed or all" and is_long
        listed = [int(not is_shared or i < 2 or i % 4 == 2) for i in range(len(kinds))]
    listed += [1] * (len(kinds) - len(listed))
    if fields.number("attention.indexer.kpool"):
        size *= 3  # a key, its gate, and the pooled key
    elif family.indexed == "all" and any(fields.listed(_RATIOS) or ()):
        size *= 2  # a key and the pooled one
    has_values = family.indexed == "behind dense"
    return {
        i: [KeptRows(i, 1, rows[i].k_size if rows[i].window else size, rows[i].v_size * has_values)]
        for i, kind in enumerate(kinds)
        if kind in ("full", "sliding") and listed[i] and (i >= lead or not has_values)
    }


def _compressed(fields: Fields, index: int, rows: Sequence[KeptRows]) -> dict[int, list[KeptLayer]]:
    """Return DeepSeek 4's rows of 4 or 128 tokens, and the states of their compressors."""
    ratios = fields.listed(_RATIOS) or []
    if len(ratios) < len(rows):
        raise UnknownError(f"'{_RATIOS}' has less than {format_count(len(rows), 'value')}")
    found: dict[int, list[KeptLayer]] = {}
    for row, ratio in zip(rows, ratios, strict=False):
        sizes = {4: (row.k_size * row.n_kv_heads, index), 128: (row.k_size * row.n_kv_heads,)}
        overlap = 2 if ratio == 4 else 1
        for size in sizes.get(ratio, ()):
            rest = found.setdefault(row.block, [])
            rest.append(KeptRows(row.block, 1, size, 0, every=ratio, is_divided=True))
        for size in sizes.get(ratio, ()):
            shape = (overlap * ratio, overlap * size)
            found[row.block] += [KeptState(row.block, shape)] * 2
    return found


def _state_shapes(fields: Fields, rows: Sequence[KeptRows]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a layer's states: what a convolution looks back on, and its memory."""
    if size := fields.number("wkv.head_size"):
        hidden, shift = fields.required("embedding_length"), fields.number("token_shift_count")
        return (2 if shift is None else shift, hidden), (hidden, size)
    if length := fields.number("shortconv.l_cache"):
        return ((length - 1, fields.required("embedding_length")),) if length > 1 else ()
    heads = (fields.per_layer("attention.head_count", count_layers(fields)) or [0])[0]
    if size := fields.number("kda.head_dim"):
        kernel = fields.number("ssm.conv_kernel") or 4
        return (3 * (kernel - 1), heads * size), (heads, size, size)
    if rows and not any(fields.number(key) for key in _STATES):
        return ((heads, rows[0].k_size, rows[0].k_size),)
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


def _gram_shapes(fields: Fields) -> dict[int, list[tuple[int, ...]]]:
    """Return the shapes that blocks keep of n-grams, whose convolution looks back on tokens."""
    blocks = fields.listed("ple.layers")
    if not blocks:
        return {}
    back = (fields.required("ple.conv_kernel") - 1) * fields.required("ple.ngram_size")
    width = fields.required("hyper_connection.count") * fields.required("embedding_length")
    return {block: [(back, width)] for block in blocks if back}


def _sharing(layers: Sequence[KeptLayer], first: int) -> list[KeptLayer]:
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
    return found


def _with_more(
    fields: Fields, rows: Sequence[KeptRows], layers: Iterable[KeptLayer]
) -> tuple[KeptLayer, ...]:
    """Add what passes through the blocks again keep, and the router of adapters."""
    found, loops = list(layers), fields.number("num_loops") or 1
    if loops * len(rows) > MOST_LAYERS:
        raise UnknownError(f"'num_loops' is {loops}, of {format_count(len(rows), 'layer')}")
    for i in range(1, loops if rows else 1):
        found += [one._replace(block=one.block + i * len(rows)) for one in found[: len(rows)]]
    if fields.number("adapters.count") and rows:
        found.append(rows[0]._replace(block=len(rows), n_kv_heads=1))
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
