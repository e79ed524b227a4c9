"""Model files to measure with: the shapes of real models, and random bits for weights.

How fast a model loads and computes does not depend on the values of its weights, so a file is made
in seconds, whereas quantizing a billion values takes minutes. Shapes, types and tokenizer are
exact. Such a model writes nonsense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unimem_bench.files import made_once
from unimem_bench.states import require_room
from unimem_bench.suite import NotMeasured

Kind = Literal["f16", "q8_0", "q4_0", "q4_k_m", "q6_k", "mxfp4"]

# The numbers of llama.cpp's llama_ftype.
KINDS: dict[Kind, int] = {
    "f16": 1, "q8_0": 7, "q4_0": 2, "q4_k_m": 15, "q6_k": 18, "mxfp4": 38
}  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a model."""

    hidden: int  # width of the residual stream
    layers: int
    heads: int
    kv_heads: int
    inner: int  # width of the feed-forward
    vocab: int
    ctx: int
    head_dim: int | None = None  # by default `hidden` / `heads`
    tied: bool = False  # whether the output is the embedding's matrix
    experts: int = 0  # networks of width `inner` a layer
    used: int = 0  # by a token

    @property
    def head(self) -> int:
        """The width of a head."""
        return self.head_dim or self.hidden // self.heads


# Rows of all shapes are multiples of 256, as Q4_K and Q6_K require.
SHAPES: dict[str, ModelShape] = {
    "15m": ModelShape(
        256, layers=6, heads=4, kv_heads=4, inner=768, vocab=32000, ctx=1024, tied=True
    ),
    "110m": ModelShape(
        768, layers=12, heads=12, kv_heads=12, inner=2048, vocab=32000, ctx=1024, tied=True
    ),
    # TinyLlama.
    "1.1b": ModelShape(2048, layers=22, heads=32, kv_heads=4, inner=5632, vocab=32000, ctx=2048),
    # A small model with the KV cache of Llama 2 7B: 512 KiB a token in f16.
    "wide": ModelShape(
        256, layers=32, heads=32, kv_heads=32, inner=256, vocab=1024, ctx=2056, head_dim=128
    ),
}


def write_model(folder: Path, shape: str, kind: Kind) -> Path:
    """Write a model, a ``llama`` in general, into a folder, unless it is there.

    `shape` is one of `SHAPES`. `kind` is the type of the matrices; ``q4_0`` and ``q4_k_m`` are the
    mixtures that llama.cpp's quantizer makes. ``mxfp4`` is a ``qwen3moe`` of 8 experts of a quarter
    of the width, of which a token uses 2, and other matrices of Q8_0. The file appears whole or not
    at all, and has the same bytes everywhere. ValueError for an unknown shape or kind; NotMeasured
    if gguf is not installed, or the disk has no room.
    """
    for what, known in ((shape, SHAPES), (kind, KINDS)):
        if what not in known:
            raise ValueError(f"no model {what!r}: expected one of {', '.join(map(repr, known))}")

    dims = SHAPES[shape]
    if kind == "mxfp4":
        dims = replace(dims, inner=dims.inner // 4, experts=8, used=2)

    def write(unfinished: Path) -> None:
        write_random(unfinished, dims, kind)

    return made_once(folder / f"random-{shape}-{kind}.gguf", write)


def write_random(
    path: Path,
    shape: ModelShape,
    kind: Kind,
    change: Callable[[TensorSpec, NDArray[Any]], None] = lambda tensor, content: None,
) -> None:
    """Write a model of a shape to `path`; a ``qwen3moe`` if it has experts.

    `change` is called with each tensor and its random bytes, or float32, which it may change.
    NotMeasured if gguf is not installed, or the disk has no room.
    """
    gguf = _gguf()
    tensors = list(_tensors(gguf, shape, kind))
    require_room(disk=sum(tensor.nbytes for tensor in tensors), folder=path.parent)
    writer = gguf.GGUFWriter(path, "qwen3moe" if shape.experts else "llama")
    add_metadata(writer, shape)
    writer.add_file_type(KINDS[kind])
    add_tokenizer(writer, shape.vocab)
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.void), tensor.nbytes, tensor.type
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    bits = np.random.PCG64(0)
    for tensor in tensors:
        content = _content(bits, tensor)
        change(tensor, content)
        writer.write_tensor_data(content)
    writer.close()


def add_metadata(writer: Any, shape: ModelShape, other: Mapping[str, Any] | None = None) -> None:
    """Add the metadata of a model of this shape to a ``GGUFWriter``.

    `other` adds or replaces keys, without the prefix of the architecture.
    """
    keys: dict[str, Any] = {
        "context_length": shape.ctx,
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.inner,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": shape.head,
        "rope.freq_base": 10000.0,
        "vocab_size": shape.vocab,
    }
    if shape.head_dim:
        keys |= {"attention.key_length": shape.head, "attention.value_length": shape.head}
    if shape.experts:
        keys |= {"expert_count": shape.experts, "expert_used_count": shape.used}
        keys["expert_feed_forward_length"] = shape.inner
    add = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        bool: writer.add_bool,
    }
    for name, value in (keys | dict(other or {})).items():
        add[type(value)](f"{writer.arch}.{name}", value)


def add_tokenizer(writer: Any, vocab: int, eos: int = 2) -> None:
    """Add a SentencePiece tokenizer of `vocab` tokens: the bytes, then tokens without meaning."""
    tokens = [b"<unk>", b"<s>", b"</s>"] + [f"<0x{i:02X}>".encode() for i in range(256)]
    types = [2, 3, 3] + [6] * 256
    tokens += [f"t{i}".encode() for i in range(len(tokens), vocab)]
    types += [1] * (vocab - len(types))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(vocab)])
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    writer.add_unk_token_id(0)


class TensorSpec(NamedTuple):
    """A tensor: shape in NumPy's order, a GGML type, and the standard deviation."""

    name: str
    shape: tuple[int, ...]
    type: Any
    nbytes: int
    std: float


def _gguf() -> ModuleType:
    try:
        return import_module("gguf")
    except ImportError:
        raise NotMeasured(
            "wants the package gguf to write its model, which is not installed: pip install gguf"
        ) from None


def _tensors(gguf: ModuleType, shape: ModelShape, kind: Kind) -> Iterator[TensorSpec]:
    """Yield the tensors of a model in the order of the file."""
    types = gguf.GGMLQuantizationType
    plain = {
        "f16": types.F16, "q8_0": types.Q8_0, "q4_0": types.Q4_0, "q4_k_m": types.Q4_K,
        "q6_k": types.Q6_K, "mxfp4": types.Q8_0,
    }[kind]  # fmt: skip
    many = types.MXFP4 if kind == "mxfp4" else plain  # of the experts
    # Whether matrices of some layers, and the output, are Q6_K instead.
    some, head = kind == "q4_k_m", kind in ("q4_0", "q4_k_m")

    def tensor(name: str, dims: tuple[int, ...], number: Any, std: float) -> TensorSpec:
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[number]
        nbytes = int(np.prod(dims)) // block_values * block_bytes
        return TensorSpec(f"{name}.weight", dims, number, nbytes, std)

    def matrix(name: str, n_out: int, n_in: int, std: float, *, q6: bool = False) -> TensorSpec:
        number = types.Q6_K if q6 else plain
        return tensor(name, (n_out, n_in), number, std)

    def norm(name: str) -> TensorSpec:
        return tensor(name, (shape.hidden,), types.F32, 0.1)

    hidden, std = shape.hidden, shape.hidden**-0.5
    q, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    # An embedding that is also the output is small beside what the blocks add, so that the model
    # does not just repeat the last token.
    embedding_std = std if shape.tied else 1.0
    yield matrix("token_embd", shape.vocab, hidden, embedding_std, q6=head and shape.tied)
    for i in range(shape.layers):
        q6 = some and _has_more_bits(i, shape.layers)
        yield norm(f"blk.{i}.attn_norm")
        yield matrix(f"blk.{i}.attn_q", q, hidden, 1.5 * std)
        yield matrix(f"blk.{i}.attn_k", kv, hidden, 1.5 * std)
        yield matrix(f"blk.{i}.attn_v", kv, hidden, std, q6=q6)
        # A block adds little to the residual stream; otherwise differences in rounding between two
        # builds of ggml would grow from layer to layer.
        yield matrix(f"blk.{i}.attn_output", hidden, q, 0.3 * q**-0.5)
        yield norm(f"blk.{i}.ffn_norm")
        down = 0.3 * shape.inner**-0.5
        if shape.experts:
            yield tensor(f"blk.{i}.attn_q_norm", (shape.head,), types.F32, 0.1)
            yield tensor(f"blk.{i}.attn_k_norm", (shape.head,), types.F32, 0.1)
            yield tensor(f"blk.{i}.ffn_gate_inp", (shape.experts, hidden), types.F32, std)
            wide, narrow = (
                (shape.experts, shape.inner, hidden),
                (shape.experts, hidden, shape.inner),
            )
            yield tensor(f"blk.{i}.ffn_gate_exps", wide, many, std)
            yield tensor(f"blk.{i}.ffn_up_exps", wide, many, std)
            yield tensor(f"blk.{i}.ffn_down_exps", narrow, many, 3 * down)
            continue
        yield matrix(f"blk.{i}.ffn_gate", shape.inner, hidden, std)
        yield matrix(f"blk.{i}.ffn_up", shape.inner, hidden, std)
        yield matrix(f"blk.{i}.ffn_down", hidden, shape.inner, down, q6=q6)
    yield norm("output_norm")
    if not shape.tied:
        yield matrix("output", shape.vocab, hidden, 3 * std, q6=head)


def _has_more_bits(layer: int, n_layers: int) -> bool:
    """Say whether Q4_K_M uses Q6_K for attn_v and ffn_down of a layer, about every other one.

    As `use_more_bits` in llama.cpp's ``src/llama-quant.cpp``, which also uses Q6_K for the output,
    or for the embedding if that is the output, and Q4_K for all other matrices. With Q4_0, only the
    output is Q6_K.
    """
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


# A block's bytes, and the offset of each of its float16, with its value as a multiple of the wanted
# deviation. All other bits are random. With x for a quant and s for a scale of some bits, values
# are: Q8_0 d * x; Q4_0 d * (x - 8), where d has any sign, so that the mean is 0;
# Q4_K d * s * x - dmin * s, where dmin makes the mean 0; Q6_K d * s * (x - 32).
_BLOCKS = {
    "Q8_0": (34, {0: 1 / 73.9}),
    "Q4_0": (18, {0: 1 / 4.64}),
    "Q4_K": (144, {0: 1 / 258, 2: 7.5 / 258}),
    "Q6_K": (210, {208: 1 / 1368}),
}


def _content(bits: np.random.PCG64, tensor: TensorSpec) -> NDArray[Any]:
    """Return the bytes of a tensor."""
    if tensor.type.name == "F32":
        generator = np.random.Generator(bits)
        mean = 1 if len(tensor.shape) == 1 else 0  # of norms
        values = mean + tensor.std * generator.standard_normal(tensor.shape, dtype=np.float32)
        return values.astype(np.float32)
    raw = bits.random_raw(-(-tensor.nbytes // 8)).view(np.uint8)[: tensor.nbytes]
    if tensor.type.name == "F16":
        # Any sign and mantissa under one exponent: values of deviation 1.53 times its power.
        exponent = round(np.log2(tensor.std / 1.53)) + 15
        words = raw.view(np.uint16)
        words &= 0x83FF
        words |= np.uint16(exponent << 10)
        return raw
    if tensor.type.name == "MXFP4":
        # A block is a power of two, whose byte is 128 for 1, and 32 values of deviation 5.85.
        raw.reshape(-1, 17)[:, 0] = round(np.log2(tensor.std / 5.85)) + 128
        return raw
    block_bytes, scales = _BLOCKS[tensor.type.name]
    blocks = raw.reshape(-1, block_bytes)
    signs = blocks[:, 1] & 0x80
    for offset, scale in scales.items():
        value = np.float16(scale * tensor.std)
        blocks[:, offset : offset + 2] = np.frombuffer(value.tobytes(), np.uint8)
    if tensor.type.name == "Q4_0":
        blocks[:, 1] |= signs
    return raw
