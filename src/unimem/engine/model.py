"""Models that the engine can run: a file is checked here before ggml sees any of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from unimem.backends import ggml
from unimem.base.arguments import flag
from unimem.base.text import format_count
from unimem.engine.rotation_op import rotation_block
from unimem.kv.types import block_values
from unimem.models.dims import ARCHITECTURES, ArchMetadata, Experts, ModelDims, read_experts
from unimem.models.families import (
    GRAPH_KINDS,
    GraphKind,
    KeptRows,
    RopeMode,
    layers_of,
    of_architecture,
)
from unimem.models.fields import MetadataFields
from unimem.planning.needs import least_window

if TYPE_CHECKING:
    from unimem.weights.tensors import Contents


class UnsupportedModel(ValueError):  # noqa: N818 - part of the public interface
    """The engine does not run this model; the message says what it supports."""


# The layers of Gemma 3 27B, by which llama.cpp knows it: its heads are scaled otherwise.
_LAYERS_OF_27B = 62
_DEFAULT_BASE = 10000.0  # of the angles of positions


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of positions: the arguments of `ggml_rope_ext`."""

    mode: RopeMode
    freq_base: float
    freq_scale: float
    ext_factor: float
    attn_factor: float
    original_ctx: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


class Sliding(NamedTuple):
    """The layers of a model whose attention slides."""

    window: int  # how many tokens a token sees there, itself included
    layers: tuple[bool, ...]  # whether each layer slides


@dataclass(frozen=True)
class Model:
    """A checked model: any graph built from it has shapes and types that ggml takes."""

    arch: str
    dims: ModelDims
    eps: float
    rope: Rope  # of layers that see all tokens
    window: int | None  # how many tokens attention of all layers sees, if the file limits them
    sliding: Sliding | None = None
    sliding_rope: Rope | None = None
    experts: Experts | None = None

    @property
    def graph_kind(self) -> GraphKind:
        """The features of its graph."""
        return GRAPH_KINDS[self.arch]

    @property
    def attention_scale(self) -> float:
        """The factor of products of queries and keys."""
        size = self.dims.head_dim
        if self.arch == "gemma3" and self.dims.num_layers == _LAYERS_OF_27B:
            size = self.dims.hidden_size // self.dims.num_attention_heads
        return float(np.float32(1) / np.sqrt(np.float32(size)))

    def rope_of(self, layer: int) -> Rope:
        """Return the rotary embedding of one layer."""
        if self.sliding is None or not self.sliding.layers[layer]:
            return self.rope
        assert self.sliding_rope is not None  # of a model whose layers slide
        return self.sliding_rope

    def windows(self, ctx: int, window: int | None) -> tuple[int | None, ...]:
        """Return how many tokens each layer keeps, or None for all.

        `window` limits how many tokens attention of all layers sees.
        """
        if self.sliding is None:
            return (window,) * self.dims.num_layers
        found = (
            least_window(window, self.sliding.window if slides else None)
            for slides in self.sliding.layers
        )
        return tuple(None if each is None or each >= ctx else each for each in found)

    @classmethod
    def from_weights(cls, weights: Contents) -> Model:
        """Check a file's metadata and tensors.

        Raises
        ------
        UnsupportedModel
            An unknown architecture, feature or tensor; a tensor of a wrong shape or type; or a
            number out of range.
        """
        arch = weights.metadata.get("general.architecture")
        if arch is None:
            raise UnsupportedModel(
                "the model does not say its architecture, as no safetensors file does; the engine "
                f"runs GGUF files of {', '.join(ARCHITECTURES)} (Mistral is a llama)"
            )
        if arch not in ARCHITECTURES:
            raise UnsupportedModel(
                f"architecture {arch!r:.60} is not supported; supported are "
                f"{', '.join(ARCHITECTURES)} (Mistral is a llama)"
            )
        try:
            return cls._checked(weights, str(arch))
        except UnsupportedModel:
            raise
        except ValueError as error:
            raise UnsupportedModel(str(error)) from None

    @classmethod
    def _checked(cls, weights: Contents, arch: str) -> Model:
        meta, family = ArchMetadata(weights.metadata, arch), GRAPH_KINDS[arch]
        if meta.get("expert_count") and not family.is_mixture:
            raise UnsupportedModel(
                f"mixtures of experts are not supported for {arch}: those of "
                f"{', '.join(name for name, one in GRAPH_KINDS.items() if one.is_mixture)} are"
            )
        dims = ModelDims.from_weights(weights)
        if meta.get("attention.causal") is False:
            raise UnsupportedModel("models without causal attention are not supported")
        for name in ("attention.value_length", "rope.dimension_count"):
            value = meta.count(name, dims.head_dim)
            if value != dims.head_dim:
                raise UnsupportedModel(
                    f"'{arch}.{name}' is {value}, but only the head's size, {dims.head_dim}, "
                    "is supported"
                )
        if meta.get("final_logit_softcapping") or meta.get("attn_logit_softcapping"):
            raise UnsupportedModel(f"{arch} with softcapping of logits is not supported")
        eps = meta.number("attention.layer_norm_rms_epsilon")
        if not 0 < eps < 1:
            raise UnsupportedModel(f"'{arch}.attention.layer_norm_rms_epsilon' is {eps}")
        experts = None
        if family.is_mixture:
            experts = read_experts(meta, dims.num_layers, has_biases=family.has_more_biases)
        _check_tensors(weights, arch, dims, experts)
        rope = _rope(meta, arch, dims)
        sliding = _sliding(meta, arch) if family.slides else None
        sliding_rope = window = None
        if sliding is not None:
            if family.has_sliding_angles:
                sliding_rope = replace(rope, freq_base=_DEFAULT_BASE, freq_scale=1.0)
            else:
                sliding_rope = rope
            base = _checked_base(meta, arch, "rope.freq_base_swa", sliding_rope.freq_base)
            sliding_rope = replace(sliding_rope, freq_base=base)
        elif meta.get("attention.sliding_window"):
            window = meta.count("attention.sliding_window")
        return cls(arch, dims, eps, rope, window, sliding, sliding_rope, experts)

    def check_types(self, k_dtype: str, v_dtype: str) -> None:
        """Raise UnsupportedModel if heads of this model do not fit into a cache of these types."""
        for dtype in (k_dtype, v_dtype):
            n = block_values(dtype)
            if self.dims.head_dim % n:
                raise UnsupportedModel(
                    f"a {dtype} cache holds blocks of {n} values, and the model's heads have "
                    f"{self.dims.head_dim}; f16, bf16 and f32 work"
                )

    def rotates(self, asked: bool | None, k_dtype: str, v_dtype: str) -> bool:
        """Return whether a cache of these types stores heads rotated.

        Without a choice (None) it does as llama.cpp's `llama_kv_cache`, which rotates quantized
        heads of a multiple of 64 values. Other heads cannot be rotated: UnsupportedModel.
        """
        fits = rotation_block(self.dims.head_dim, "k") > 0
        if asked is None:
            return fits and max(block_values(k_dtype), block_values(v_dtype)) > 1
        rotates = flag(asked, "rotate")
        if rotates and not fits:
            raise UnsupportedModel(
                "rotate: expected heads of a multiple of 64 values, and the model's have "
                f"{self.dims.head_dim}: leave it out"
            )
        return rotates

    def check_store(self, chunk_tokens: int, ctx: int, window: int | None) -> None:
        """Raise UnsupportedModel if a store's chunks are longer than a window of sliding layers.

        A ring has rows for its window and a batch. Before a batch overwrites rows, the last whole
        chunk has to be put, and fewer tokens than a chunk follow it. Its rows are still there if
        the chunk is no longer than the window.
        """
        windows = self.windows(ctx, window)
        least = least_window(*windows)
        if len(set(windows)) > 1 and least is not None and chunk_tokens > least:
            raise UnsupportedModel(
                f"store: attention of some layers of {self.arch} slides over {least} tokens, and "
                f"their rings do not keep a chunk of {chunk_tokens}: make the store with "
                f"chunk_tokens={least} or fewer"
            )

    def check_window(self, n: int) -> None:
        """Raise UnsupportedModel if attention would see more tokens than this model allows."""
        if self.window is not None and n > self.window:
            raise UnsupportedModel(
                f"the model's attention slides over {self.window} tokens; a window, or a context, "
                f"of at most {self.window} works (asked for: {n})"
            )


def _rope(meta: ArchMetadata, arch: str, dims: ModelDims) -> Rope:
    """Read the rotary embedding as llama.cpp does (`llama_context` and `load_hparams`)."""
    kind = meta.get("rope.scaling.type")
    kind = "linear" if kind is None else kind
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModel(
            f"rope scaling {kind!r:.60} is not supported; supported are none, linear and yarn"
        )
    base = _checked_base(meta, arch, "rope.freq_base", _DEFAULT_BASE)
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 0.0))
    attn_factor = meta.number("rope.scaling.attn_factor", 1.0)
    # The limits keep every power and logarithm below in the range of a float.
    for name, value, low, high in (
        ("rope.scaling.factor", factor or 1.0, 1e-6, 1e6),
        ("rope.scaling.attn_factor", attn_factor, 1e-6, 1e6),
    ):
        if not (low < value < high):
            raise UnsupportedModel(f"'{arch}.{name}' is {value}, not between {low:g} and {high:g}")
    if kind == "none" or factor == 0:
        factor = 1.0
    ext_factor = 0.0
    if kind == "yarn":
        ext_factor = 1.0
        # llama.cpp removes the magnitude correction that ggml applies itself; the rest is 1 for a
        # factor above 1.
        attn_factor *= max(1.0, 1.0 + 0.1 * math.log(factor)) / (1.0 + 0.1 * math.log(factor))
    return Rope(
        mode=GRAPH_KINDS[arch].rope,
        freq_base=base,
        freq_scale=1.0 / factor,
        ext_factor=ext_factor,
        attn_factor=attn_factor,
        original_ctx=meta.count("rope.scaling.original_context_length", dims.max_seq_len),
    )


def _sliding(meta: ArchMetadata, arch: str) -> Sliding:
    """Read which layers slide, as plans do; the file has to give the window."""
    window = meta.count("attention.sliding_window")
    meta.count("attention.sliding_window_pattern", 1)  # a period; other architectures have a list
    family = of_architecture(arch)
    assert family is not None  # there is one for each architecture of the engine
    kept = layers_of(family, MetadataFields(meta, arch))
    slides = (layer.window is not None for layer in kept if isinstance(layer, KeptRows))
    return Sliding(window, tuple(slides))


def _checked_base(meta: ArchMetadata, arch: str, name: str, default: float) -> float:
    """Read the base of the angles, and check that its powers fit in a float."""
    base = meta.number(name, default)
    if not 1.0 < base < 1e30:
        raise UnsupportedModel(f"'{arch}.{name}' is {base}, not between 1 and 1e+30")
    return base


@dataclass(frozen=True)
class _Expected:
    name: str
    ne: tuple[int, ...]
    required: bool = True


def _list_expected(arch: str, dims: ModelDims, experts: Experts | None) -> Iterator[_Expected]:
    family = GRAPH_KINDS[arch]
    hidden, inner = dims.hidden_size, dims.intermediate_size
    q, kv = dims.q_size, dims.kv_size
    yield _Expected("token_embd.weight", (hidden, dims.vocab_size))
    yield _Expected("output.weight", (hidden, dims.vocab_size), required=False)
    yield _Expected("output_norm.weight", (hidden,))
    if family.has_rope_factors:
        yield _Expected("rope_freqs.weight", (dims.head_dim // 2,), required=False)
    vectors = {"attn_norm": hidden, family.ffn_norm: hidden}
    if family.norms_heads:
        vectors |= {"attn_q_norm": dims.head_dim, "attn_k_norm": dims.head_dim}
    if family.norms_outputs:
        vectors |= {"post_attention_norm": hidden, "post_ffw_norm": hidden}
    if family.has_sinks:
        vectors["attn_sinks"] = dims.num_attention_heads
    matrices: dict[str, tuple[int, ...]] = {
        "attn_q": (hidden, q),
        "attn_k": (hidden, kv),
        "attn_v": (hidden, kv),
        "attn_output": (q, hidden),
    }
    if experts is None:
        matrices |= {
            "ffn_gate": (hidden, inner),
            "ffn_up": (hidden, inner),
            "ffn_down": (inner, hidden),
        }
    else:
        n, size = experts.n, experts.size
        matrices |= {
            "ffn_gate_inp": (hidden, n),
            "ffn_gate_exps": (hidden, size, n),
            "ffn_up_exps": (hidden, size, n),
            "ffn_down_exps": (size, hidden, n),
        }
    for layer in range(dims.num_layers):
        blk = f"blk.{layer}"
        for name, size in vectors.items():
            yield _Expected(f"{blk}.{name}.weight", (size,))
        for name, ne in matrices.items():
            yield _Expected(f"{blk}.{name}.weight", ne)
            of_heads = name in ("attn_q", "attn_k", "attn_v")
            has_bias = family.has_biases if of_heads else family.has_more_biases
            if has_bias is not False:
                yield _Expected(f"{blk}.{name}.bias", ne[1:], required=has_bias is True)


def _check_tensors(weights: Contents, arch: str, dims: ModelDims, experts: Experts | None) -> None:
    if dims.num_layers > len(weights.tensors):
        raise UnsupportedModel(
            f"the metadata speaks of {format_count(dims.num_layers, 'layer')}, but the file has "
            f"only {format_count(len(weights.tensors), 'tensor')}"
        )
    known = set()
    for expected in _list_expected(arch, dims, experts):
        known.add(expected.name)
        tensor = weights.tensors.get(expected.name)
        if tensor is None:
            if expected.required:
                raise UnsupportedModel(f"the model has no tensor '{expected.name}'")
            continue
        ne = tuple(tensor.ne)
        # Trailing dimensions of 1 do not change the memory.
        while len(ne) > len(expected.ne) and ne[-1] == 1:
            ne = ne[:-1]
        if ne != expected.ne:
            raise UnsupportedModel(
                f"tensor '{expected.name}' has shape {list(ne)}, expected {list(expected.ne)}"
            )
        is_added = len(expected.ne) == 1 or expected.name.endswith(".bias")
        allowed = {ggml.F32: "f32"} if is_added else ggml.MATMUL_TYPES
        if tensor.ggml_type not in allowed:
            raise UnsupportedModel(
                f"tensor '{expected.name}' is of type {tensor.type}; supported here: "
                f"{', '.join(sorted(allowed.values()))}"
            )
        rows = math.prod(expected.ne[1:])
        if tensor.nbytes != ggml.row_size(tensor.ggml_type, expected.ne[0]) * rows:
            raise UnsupportedModel(f"tensor '{expected.name}' has {tensor.nbytes} bytes")
    # Ignoring a tensor would change the result silently.
    unknown = sorted(set(weights.tensors) - known)
    if unknown:
        raise UnsupportedModel(
            f"the model has {len(unknown)} tensor{'s' * (len(unknown) > 1)} that the engine does "
            f"not know for {arch}, such as {unknown[0]!r:.80}"
        )
