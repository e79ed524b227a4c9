"""The dimensions of a transformer, from which every buffer's size follows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

from unimem.base.arguments import integer

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "qwen3moe", "gpt-oss")
"""The architectures that the engine runs."""
MIXTURES = ("qwen2moe", "qwen3moe", "gpt-oss")  # besides Mixtral, which is a llama with experts
KNOWN = tuple(dict.fromkeys(ARCHITECTURES + MIXTURES))
"""The architectures with known dimensions."""
# Types that are not quantized, by ggml's names.
PLAIN_TYPES = frozenset({"f32", "f16", "bf16", "f64", "i8", "i16", "i32", "i64"})
MAX_SPLITS = 32
"""The most parts of a context that flash decoding reads at once."""

_LIMIT = 2**31  # engines count rows and columns in 32-bit integers
_MOST_BYTES = 2**63 - 1
# The values of the largest buffers and of the KV cache: all others are smaller.
_PRODUCTS: tuple[tuple[str | int, ...], ...] = (
    ("max_batch_size", "hidden_size"),
    ("max_batch_size", "qkv_size"),
    ("max_batch_size", 2, "intermediate_size"),
    ("max_batch_size", "vocab_size"),
    ("q_size", MAX_SPLITS),
    (2, "num_layers", "max_batch_size", "max_seq_len", "kv_size"),
)
_DEQUANTIZED = ("hidden_size", 2, "intermediate_size")


class _Tensor(Protocol):
    @property
    def ne(self) -> tuple[int, ...]: ...


class ModelContents(Protocol):
    """The header of a model file: opened `Weights`, or what is known of a file without data."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The keys and values of the header."""

    @property
    def tensors(self) -> Mapping[str, _Tensor]:
        """The table of tensors, by name."""

    def by_type(self) -> Mapping[str, Any]:
        """Return the bytes of the tensors of each type."""


@dataclass(frozen=True)
class ModelDims:
    """The dimensions of a decoder-only transformer. Immutable.

    Parameters
    ----------
    hidden_size : int
        Values of one token between layers.
    intermediate_size : int
        Values inside the feed-forward network; for a mixture of experts, the most that one token
        needs at once (see `from_weights`).
    num_attention_heads, num_kv_heads : int
        Heads of the queries, and of keys and values. The first is a multiple of the second.
    head_dim : int
        Values of one head; even, since rotary embedding rotates pairs.
    vocab_size : int
        Number of tokens.
    num_layers : int
        Number of transformer blocks.
    max_seq_len : int
        Longest context that the model was made for.
    quantized : bool, default False
        Whether the weights are quantized.
    max_batch_size : int, default 1
        Number of sequences decoded at once.

    Raises
    ------
    ValueError
        A dimension is out of range, two do not fit each other, or a buffer would be too large for
        64 bits; the message names it.

    Examples
    --------
    >>> import unimem as um
    >>> dims = um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512)
    >>> dims.q_size, dims.kv_size
    (64, 32)
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_layers: int
    max_seq_len: int
    quantized: bool = False
    max_batch_size: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "quantized":
                if not isinstance(value, bool):
                    raise ValueError(f"quantized must be True or False, not {value!r}")
                continue
            try:
                exact = integer(value)
            except TypeError:
                raise ValueError(
                    f"{field.name} must be an integer from 1 to {_LIMIT - 1}, not {value!r}"
                ) from None
            if not 0 < exact < _LIMIT:
                raise ValueError(f"{field.name} must be from 1 to {_LIMIT - 1}, not {exact}")
            object.__setattr__(self, field.name, exact)
        if self.num_attention_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, not {self.head_dim}")
        for product in (*_PRODUCTS, *((_DEQUANTIZED,) if self.quantized else ())):
            # The widest type of a buffer, and of a cache, has 4 bytes.
            nbytes = 4 * math.prod(
                getattr(self, factor) if isinstance(factor, str) else factor for factor in product
            )
            if nbytes > _MOST_BYTES:
                raise ValueError(
                    f"{' * '.join(map(str, product))} values of 4 bytes are {nbytes} bytes, but a "
                    "size must be below 2**63"
                )

    @property
    def q_size(self) -> int:
        """Values of one token's queries."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Values of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Values of one token's queries, keys and values together."""
        return self.q_size + 2 * self.kv_size

    @classmethod
    def from_weights(cls, weights: ModelContents) -> ModelDims:
        """Read the dimensions from a model file's metadata and tensor table.

        Parameters
        ----------
        weights : Weights
            A model of architecture llama (as are Mixtral and Mistral), qwen2, qwen3, gemma3,
            qwen2moe, qwen3moe or gpt-oss.

        Returns
        -------
        ModelDims

        Raises
        ------
        ValueError
            Another architecture, or metadata that is missing, out of range, or differs between
            layers.

        Notes
        -----
        The `intermediate_size` of a mixture of experts is the largest of

        - the number of used experts times the width of one, since one batched operation computes
          all of them;
        - the width of the shared expert, which runs before or after them in the same memory;
        - the width of a dense feed-forward network, if the file has such a layer.

        If the file does not give the width of an expert, it follows from ``feed_forward_length`` as
        in llama.cpp: it is that for llama, and that divided by the used experts for the others.
        """
        if not hasattr(weights, "metadata"):
            raise TypeError(f"weights: expected opened Weights, got {weights!r:.60}")
        arch = weights.metadata.get("general.architecture")
        if arch is None:
            raise ValueError(
                "the model does not say its architecture, as no safetensors file does: its "
                "dimensions are not known, and ModelDims(...) takes them"
            )
        if not isinstance(arch, str) or arch not in KNOWN:
            raise ValueError(
                f"the dimensions of architecture {arch!r} are not known; known are "
                f"{', '.join(KNOWN)}"
            )
        meta = ArchMetadata(weights.metadata, arch)
        layers = meta.count("block_count")
        heads = meta.per_layer("attention.head_count", layers)
        hidden = meta.count("embedding_length")
        if meta.get("attention.key_length") is None and hidden < heads:
            raise ValueError(
                f"'{arch}.attention.head_count' is {heads}, more than the {hidden} of "
                f"'{arch}.embedding_length', and there is no '{arch}.attention.key_length'"
            )
        embedding = weights.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.ne) < 2:
            raise ValueError("the model has no matrix 'token_embd.weight'")
        return cls(
            hidden_size=hidden,
            intermediate_size=_intermediate_size(weights, meta, arch, layers),
            num_attention_heads=heads,
            num_kv_heads=meta.per_layer("attention.head_count_kv", layers, heads),
            head_dim=meta.count("attention.key_length", hidden // heads),
            vocab_size=embedding.ne[1],
            num_layers=layers,
            max_seq_len=meta.count("context_length"),
            quantized=not PLAIN_TYPES.issuperset(weights.by_type()),
        )


def _intermediate_size(weights: ModelContents, meta: ArchMetadata, arch: str, layers: int) -> int:
    # MIXTURES must have experts.
    if arch not in MIXTURES and not meta.is_written("expert_count"):
        return meta.per_layer("feed_forward_length", layers)
    n_experts, n_used = meta.count("expert_count"), meta.count("expert_used_count")
    if n_used > n_experts:
        raise ValueError(
            f"'{arch}.expert_used_count' is {n_used}, more than '{arch}.expert_count', {n_experts}"
        )
    if arch in MIXTURES and meta.is_written("expert_feed_forward_length"):
        widths = [n_used * meta.count("expert_feed_forward_length")]
    else:
        width = meta.per_layer("feed_forward_length", layers)
        widths = [n_used * (width // n_used if arch in MIXTURES else width)]
    if meta.is_written("expert_shared_feed_forward_length"):
        widths.append(meta.count("expert_shared_feed_forward_length"))
    elif arch == "qwen2moe":
        widths.append(meta.per_layer("feed_forward_length", layers))
    if any(name.endswith(".ffn_up.weight") for name in weights.tensors):
        widths.append(meta.per_layer("feed_forward_length", layers))
    return max(widths)


class Experts(NamedTuple):
    """The experts of every layer of a mixture.

    Attributes
    ----------
    n, n_used : int
        The number of experts, and how many a token uses.
    size : int
        Values inside one.
    has_biases : bool
        Whether their products have biases.
    """

    n: int
    n_used: int
    size: int
    has_biases: bool = False


def read_experts(meta: ArchMetadata, n_layers: int, *, has_biases: bool) -> Experts:
    """Read the experts of a mixture, which `ModelDims.from_weights` has checked."""
    n_used = meta.count("expert_used_count")
    if meta.is_written("expert_feed_forward_length"):
        size = meta.count("expert_feed_forward_length")
    else:
        size = meta.per_layer("feed_forward_length", n_layers) // n_used
    return Experts(meta.count("expert_count"), n_used, size, has_biases)


class ArchMetadata:
    """Checked access to the metadata of one architecture."""

    def __init__(self, metadata: Mapping[str, Any], arch: str) -> None:
        self._metadata = metadata
        self._arch = arch

    def get(self, name: str) -> Any:
        """Return the value of `ARCH.name`, or None."""
        return self._metadata.get(f"{self._arch}.{name}")

    def is_written(self, name: str) -> bool:
        """Whether there is a number above 0: as in llama.cpp, 0 means no value."""
        value = self.get(name)
        return value is not None and self._checked(name, value, least=0) > 0

    def count(self, name: str, default: int | None = None) -> int:
        """Return an integer above 0."""
        value = self.get(name)
        if value is None:
            if default is None:
                raise ValueError(f"the metadata has no '{self._arch}.{name}'")
            value = default
        return self._checked(name, value)

    def per_layer(self, name: str, layers: int, default: int | None = None) -> int:
        """Return an integer above 0, written once, or equal for each layer."""
        value = self.get(name)
        if value is None or isinstance(value, (int, float, str)):
            return self.count(name, default)
        values = value if isinstance(value, list) else value.tolist()
        if len(values) != layers or any(item != values[0] for item in values):
            raise ValueError(
                f"'{self._arch}.{name}' differs between layers, which is not supported"
            )
        return self._checked(name, values[0])

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self.get(name)
        if value is None:
            if default is None:
                raise ValueError(f"the metadata has no '{self._arch}.{name}'")
            value = default
        if isinstance(value, (str, bool)) or not isinstance(value, (int, float)):
            raise ValueError(f"'{self._arch}.{name}' must be a number, not {value!r}")
        if not abs(value) < float("inf"):
            raise ValueError(f"'{self._arch}.{name}' must be finite, not {value!r}")
        return float(value)

    def _checked(self, name: str, value: Any, least: int = 1) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _LIMIT:
            bound = "0 or above" if least == 0 else "above 0"
            raise ValueError(
                f"'{self._arch}.{name}' must be an integer {bound} and below 2**31, as engines "
                f"count in 32 bits, not {value!r:.40}: convert the model again"
            )
        return value
