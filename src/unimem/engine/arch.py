"""Models that the engine can run: a file is checked here before ggml sees any of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unimem.buffers.dims import ARCHITECTURES, ArchMetadata, ModelDims
from unimem.kv.arrays import block_values
from unimem.system import ggml
from unimem.system.text import format_count

if TYPE_CHECKING:
    from unimem.weights.tensors import Contents

__all__ = ["Model", "UnsupportedModel"]


class UnsupportedModel(ValueError):  # noqa: N818 - part of the public interface
    """The engine does not run this model; the message says what it supports."""


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of positions: the arguments of `ggml_rope_ext`."""

    mode: int
    freq_base: float
    freq_scale: float
    ext_factor: float
    attn_factor: float
    original_ctx: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class Model:
    """A checked model: any graph built from it has shapes and types that ggml takes."""

    arch: str
    dims: ModelDims
    eps: float
    rope: Rope
    window: int | None  # tokens that attention sees, where the file limits them

    @classmethod
    def from_weights(cls, weights: Contents) -> Model:
        """Check a file's metadata and tensors.

        Raises
        ------
        UnsupportedModel
            An architecture, a feature or a tensor that the engine does not know, a tensor of a
            wrong shape or type, or a number out of range.
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
        meta = ArchMetadata(weights.metadata, arch)
        if meta.get("expert_count"):
            raise UnsupportedModel("mixtures of experts are not supported")
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
        eps = meta.number("attention.layer_norm_rms_epsilon")
        if not 0 < eps < 1:
            raise UnsupportedModel(f"'{arch}.attention.layer_norm_rms_epsilon' is {eps}")
        window = meta.get("attention.sliding_window")
        _check_tensors(weights, arch, dims)
        return cls(
            arch=arch,
            dims=dims,
            eps=eps,
            rope=_rope(meta, arch, dims),
            window=meta.count("attention.sliding_window") if window else None,
        )

    def check_head(self, kv_dtype: str) -> None:
        """Refuse a type of cache that this model's heads do not fit into.

        Raises
        ------
        UnsupportedModel
        """
        n = block_values(kv_dtype)
        if self.dims.head_dim % n:
            raise UnsupportedModel(
                f"a {kv_dtype} cache holds blocks of {n} values, and the model's heads have "
                f"{self.dims.head_dim}; f16, bf16 and f32 work"
            )

    def check_window(self, n: int) -> None:
        """Refuse to show attention more tokens than this model's may see.

        Raises
        ------
        UnsupportedModel
        """
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
    base = meta.number("rope.freq_base", 10000.0)
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 0.0))
    attn_factor = meta.number("rope.scaling.attn_factor", 1.0)
    # The limits keep every power and logarithm below in the range of a float.
    for name, value, low, high in (
        ("rope.freq_base", base, 1.0, 1e30),
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
        # llama.cpp takes the magnitude correction out that ggml applies itself; what is left is
        # 1 for a factor above 1.
        attn_factor *= max(1.0, 1.0 + 0.1 * math.log(factor)) / (1.0 + 0.1 * math.log(factor))
    return Rope(
        mode=ggml.ROPE_NORMAL if arch == "llama" else ggml.ROPE_NEOX,
        freq_base=base,
        freq_scale=1.0 / factor,
        ext_factor=ext_factor,
        attn_factor=attn_factor,
        original_ctx=meta.count("rope.scaling.original_context_length", dims.max_seq_len),
    )


@dataclass(frozen=True)
class _Expected:
    name: str
    ne: tuple[int, ...]
    required: bool = True


def _list_expected(arch: str, dims: ModelDims) -> Iterator[_Expected]:
    hidden, inner = dims.hidden_size, dims.intermediate_size
    q, kv = dims.q_size, dims.kv_size
    yield _Expected("token_embd.weight", (hidden, dims.vocab_size))
    yield _Expected("output.weight", (hidden, dims.vocab_size), required=False)
    yield _Expected("output_norm.weight", (hidden,))
    if arch == "llama":
        yield _Expected("rope_freqs.weight", (dims.head_dim // 2,), required=False)
    for layer in range(dims.num_layers):
        blk = f"blk.{layer}"
        yield _Expected(f"{blk}.attn_norm.weight", (hidden,))
        yield _Expected(f"{blk}.ffn_norm.weight", (hidden,))
        for name, n_in, n_out in (
            ("attn_q", hidden, q),
            ("attn_k", hidden, kv),
            ("attn_v", hidden, kv),
            ("attn_output", q, hidden),
            ("ffn_gate", hidden, inner),
            ("ffn_up", hidden, inner),
            ("ffn_down", inner, hidden),
        ):
            yield _Expected(f"{blk}.{name}.weight", (n_in, n_out))
            if name in ("attn_q", "attn_k", "attn_v"):
                yield _Expected(f"{blk}.{name}.bias", (n_out,), required=arch == "qwen2")
        if arch == "qwen3":
            yield _Expected(f"{blk}.attn_q_norm.weight", (dims.head_dim,))
            yield _Expected(f"{blk}.attn_k_norm.weight", (dims.head_dim,))


def _check_tensors(weights: Contents, arch: str, dims: ModelDims) -> None:
    if dims.num_layers > len(weights.tensors):
        raise UnsupportedModel(
            f"the metadata speaks of {format_count(dims.num_layers, 'layer')}, but the file has "
            f"only {format_count(len(weights.tensors), 'tensor')}"
        )
    known = set()
    for expected in _list_expected(arch, dims):
        known.add(expected.name)
        tensor = weights.tensors.get(expected.name)
        if tensor is None:
            if expected.required:
                raise UnsupportedModel(f"the model has no tensor '{expected.name}'")
            continue
        ne = tuple(tensor.ne)
        # Trailing dimensions of one are the same memory.
        while len(ne) > len(expected.ne) and ne[-1] == 1:
            ne = ne[:-1]
        if ne != expected.ne:
            raise UnsupportedModel(
                f"tensor '{expected.name}' has shape {list(ne)}, expected {list(expected.ne)}"
            )
        vector = len(expected.ne) == 1
        allowed = {ggml.F32: "f32"} if vector else ggml.MATMUL_TYPES
        if tensor.ggml_type not in allowed:
            raise UnsupportedModel(
                f"tensor '{expected.name}' is of type {tensor.type}; supported here: "
                f"{', '.join(sorted(allowed.values()))}"
            )
        rows = math.prod(expected.ne[1:])
        if tensor.nbytes != ggml.row_size(tensor.ggml_type, expected.ne[0]) * rows:
            raise UnsupportedModel(f"tensor '{expected.name}' has {tensor.nbytes} bytes")
    # A tensor that is left out would change the result silently.
    unknown = sorted(set(weights.tensors) - known)
    if unknown:
        raise UnsupportedModel(
            f"the model has {len(unknown)} tensor{'s' * (len(unknown) > 1)} that the engine does "
            f"not know for {arch}, such as {unknown[0]!r:.80}"
        )
