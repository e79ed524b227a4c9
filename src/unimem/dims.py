"""The dimensions of a transformer, from which every buffer's size follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unimem import Weights

__all__ = ["ModelDims"]

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_LIMIT = 2**31  # engines count rows and columns in 32-bit integers


@dataclass(frozen=True)
class ModelDims:
    """The dimensions of a decoder-only transformer.

    Immutable, so any number of threads may use one.

    Parameters
    ----------
    hidden_size : int
        Values of one token between layers.
    intermediate_size : int
        Values inside the feed-forward network.
    num_attention_heads, num_kv_heads : int
        Heads of the queries, and of keys and values. The first is a multiple of the second.
    head_dim : int
        Values of one head; even, since rotary embedding turns pairs.
    vocab_size : int
        Tokens.
    num_layers : int
        Transformer blocks.
    max_seq_len : int
        Tokens that the model was made for.
    quantized : bool, default False
        Whether the weights are quantized.
    max_batch_size : int, default 1
        Sequences that are decoded at once.

    Raises
    ------
    ValueError
        A dimension is out of range, or two do not fit each other.

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
            elif not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{field.name} must be an integer, not {value!r}")
            elif not 0 < value < _LIMIT:
                raise ValueError(f"{field.name} must be from 1 to {_LIMIT - 1}, not {value}")
        if self.num_attention_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, not {self.head_dim}")

    @property
    def q_size(self) -> int:
        """Values of one token's queries."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Values of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_weights(cls, weights: Weights) -> ModelDims:
        """Read the dimensions from a model file's metadata and tensor table.

        Parameters
        ----------
        weights : Weights
            A model of architecture llama, qwen2 or qwen3.

        Returns
        -------
        ModelDims

        Raises
        ------
        ValueError
            Another architecture, or metadata that is missing or out of range.
        """
        arch = weights.metadata.get("general.architecture")
        if arch not in ARCHITECTURES:
            raise ValueError(
                f"the dimensions of architecture {arch!r} are not known; known are "
                f"{', '.join(ARCHITECTURES)}"
            )
        meta = Metadata(weights.metadata, str(arch))
        layers = meta.count("block_count")
        heads = meta.per_layer("attention.head_count", layers)
        hidden = meta.count("embedding_length")
        embedding = weights.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.ne) < 2:
            raise ValueError("the model has no matrix 'token_embd.weight'")
        return cls(
            hidden_size=hidden,
            intermediate_size=meta.per_layer("feed_forward_length", layers),
            num_attention_heads=heads,
            num_kv_heads=meta.per_layer("attention.head_count_kv", layers, heads),
            head_dim=meta.count("attention.key_length", hidden // heads),
            vocab_size=embedding.ne[1],
            num_layers=layers,
            max_seq_len=meta.count("context_length"),
            quantized=embedding.type not in ("f32", "f16", "bf16")
            or any("q" in kind for kind in weights.by_type()),
        )


class Metadata:
    """Checked access to the metadata of one architecture."""

    def __init__(self, metadata: Mapping[str, Any], arch: str) -> None:
        self._metadata = metadata
        self._arch = arch

    def get(self, name: str) -> Any:
        """Return the value of `ARCH.name`, or None."""
        return self._metadata.get(f"{self._arch}.{name}")

    def count(self, name: str, default: int | None = None) -> int:
        """Return an integer above 0."""
        value = self.get(name)
        if value is None:
            if default is None:
                raise ValueError(f"the metadata has no '{self._arch}.{name}'")
            value = default
        return self._checked(name, value)

    def per_layer(self, name: str, layers: int, default: int | None = None) -> int:
        """Return an integer above 0 that may be written once a layer, but is the same in all."""
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

    def _checked(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _LIMIT:
            raise ValueError(f"'{self._arch}.{name}' must be an integer above 0, not {value!r:.40}")
        return value
