"""The figures of a model by GGUF's names, from either format.

Neither format is trusted: a value that is missing, of another type or out of range makes a figure
unknown, for a stated reason, and costs no more time than a right one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias

from unimem.base.text import format_count
from unimem.models.dims import ArchMetadata

CONFIG = "config.json"
MOST = 2**31 - 1  # engines count layers, heads and tokens in 32 bits

#: A layer keeps all tokens, a window of them, a state instead, all tokens and a state, or nothing.
Kind: TypeAlias = Literal["full", "sliding", "state", "both", "none"]

_KINDS: Mapping[str, Kind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    "linear_attention": "state",
    "mamba": "state",
    "hybrid": "both",
}
# Names in a config.json for GGUF's names; the first that exists counts.
_CONFIG_NAMES: Mapping[str, tuple[str, ...]] = {
    "block_count": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "context_length": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    "embedding_length": ("hidden_size", "n_embd", "d_model"),
    "feed_forward_length": ("intermediate_size",),
    "vocab_size": ("vocab_size",),
    "attention.head_count": ("num_attention_heads", "n_head", "n_heads"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "attention.sliding_window": ("sliding_window",),
    "attention.sliding_window_pattern": ("sliding_window_pattern",),
    "rope.dimension_count": ("qk_rope_head_dim",),
    "full_attention_interval": ("full_attention_interval",),
    "max_window_layers": ("max_window_layers",),
}
_WINDOW = "attention.sliding_window"
_MOST_LISTED = 512  # as llama.cpp has layers


class UnknownError(ValueError):
    """A figure is not known; the message says why."""


class Fields(Protocol):
    """Checked access to the figures of a model."""

    def number(self, name: str) -> int | None:
        """Return an integer, 0 if the file denies it, or None if the file is silent."""

    def required(self, name: str) -> int:
        """Return an integer above 0, or raise."""

    def per_layer(self, name: str, n: int) -> list[int] | None:
        """Return an integer of 0 or above for each of n layers, or None if the file is silent."""

    def listed(self, name: str) -> list[int] | None:
        """Return the integers of 0 or above of a list, or None if the file has no such list."""

    def kinds(self, n: int) -> list[Kind] | None:
        """Return the kinds of n layers, or None if the file does not list them."""

    def head_size(self) -> int:
        """Return the values of one head's key."""


class MetadataFields:
    """The metadata of a GGUF file of architecture `arch`; see `Fields`."""

    def __init__(self, meta: ArchMetadata, arch: str) -> None:
        self._meta, self._arch = meta, arch

    def number(self, name: str) -> int | None:
        """Return an integer, 0, or None."""
        value = self._meta.get(name)
        if value is None or (hasattr(value, "__len__") and not isinstance(value, str)):
            return None
        return self._meta.count(name) if value else 0

    def required(self, name: str) -> int:
        """Return an integer above 0, or raise."""
        return self._meta.count(name)

    def per_layer(self, name: str, n: int) -> list[int] | None:
        """Return an integer for each of n layers, or None."""
        value = self._meta.get(name)
        if value is None:
            return None
        if isinstance(value, (int, float, str)):
            return [self._meta.count(name) if value else 0] * n
        return _whole(name, self._listed(name, value, n))

    def listed(self, name: str) -> list[int] | None:
        """Return the integers of a list, or None."""
        value = self._meta.get(name)
        if value is None or isinstance(value, (int, float, str)):
            return None
        return _whole(name, self._listed(name, value, min(len(value), _MOST_LISTED)))

    def kinds(self, n: int) -> list[Kind] | None:
        """Return the kinds of n layers, or None."""
        name = "attention.sliding_window_pattern"
        value = self._meta.get(name)
        if value is None or not hasattr(value, "__len__") or isinstance(value, str):
            return None
        listed = self._listed(name, value, n)
        if not all(isinstance(item, bool | int) for item in listed):
            raise UnknownError(f"'{name}' has values that are neither true nor false")
        return ["sliding" if item else "full" for item in listed]

    def head_size(self) -> int:
        """Return the values of one head's key."""
        if self._meta.get("attention.key_length") is not None:
            return self.required("attention.key_length")
        heads = (self.listed("attention.head_count") or [0])[0]
        heads = heads or self.required("attention.head_count")
        return _even_share(self.required("embedding_length"), heads)

    def _listed(self, name: str, value: Any, n: int) -> list[Any]:
        if len(value) != n:  # checked first, so that no long list is walked
            raise UnknownError(
                f"'{name}' has {format_count(len(value), 'value')} for {format_count(n, 'layer')}"
            )
        return value if isinstance(value, list) else list(value.tolist())


class ConfigFields:
    """A ``config.json`` of Hugging Face, or its part for text; see `Fields`.

    Parameters
    ----------
    values : mapping
        Its contents.
    nested : bool, default False
        Whether it is a part, which leaves default values out.
    names : mapping of str to str, optional
        The family's own names for some of GGUF's: one, or several joined by ``*`` and ``+``.
    defaults : mapping of str to int, optional
        Defaults of its class in transformers, by GGUF's names.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        nested: bool = False,
        names: Mapping[str, str] | None = None,
        defaults: Mapping[str, int] | None = None,
    ) -> None:
        self._values, self._nested = values, nested
        self._names, self._defaults = names or {}, defaults or {}

    def number(self, name: str) -> int | None:
        """Return an integer, 0, or None."""
        if name == _WINDOW:
            key = "use_sliding_window"
            if not self._values.get(key, self._defaults.get(key, True)):
                return 0
        own = self._names.get(name)
        if own is not None:
            found = self._computed(own)
        else:
            names = _CONFIG_NAMES.get(name, ())
            found = next((self._integer(key) for key in names if key in self._values), None)
        return self._defaults.get(name) if found is None else found

    def _integer(self, key: str) -> int:
        value = self._values[key]
        if value is None:
            return 0
        if type(value) is not int or not 0 <= value <= MOST:
            raise UnknownError(
                f"{CONFIG} has no number in {key!r} from 0 to {MOST}, but {value!r:.40}"
            )
        return value

    def _computed(self, text: str) -> int | None:
        """Return a sum of products of the file's values, or None if one is missing."""
        total = 0
        for product in text.split("+"):
            keys = product.split("*")
            if not all(key in self._values for key in keys):
                return None
            total += math.prod(map(self._integer, keys))
        return total if total <= MOST else 0

    def required(self, name: str) -> int:
        """Return an integer above 0, or raise."""
        found = self.number(name)
        if not found:
            keys = self._names.get(name) or _CONFIG_NAMES.get(name, (name,))[0]
            raise UnknownError(f"{CONFIG} has no {keys!r}, or none that is a number")
        return found

    def per_layer(self, name: str, n: int) -> list[int] | None:
        """Return an integer for each of n layers, or None."""
        found = self.number(name)
        if found is None and self._nested and name == "attention.head_count_kv":
            raise UnknownError(_left_out("num_key_value_heads"))
        return [found] * n if found else None

    def listed(self, _name: str) -> None:
        """Return None: families with such lists are not read from a ``config.json``."""

    def kinds(self, n: int) -> list[Kind] | None:
        """Return the kinds of n layers, or None."""
        types = self._values.get("layer_types", self._values.get("layers_block_type"))
        if not isinstance(types, list):
            return None
        if len(types) != n:
            raise UnknownError(
                f"'layer_types' has {format_count(len(types), 'value')} for "
                f"{format_count(n, 'layer')}"
            )
        unknown = next((each for each in types if not _is_kind(each)), None)
        if unknown is not None:
            raise UnknownError(f"what a layer of type {unknown!r:.40} keeps is not known to unimem")
        return [_KINDS[each] for each in types]

    def head_size(self) -> int:
        """Return the values of one head's key."""
        found = self.number("attention.key_length")
        if found:
            return found
        # A value that differs from the rule is left out too if it is the default.
        if re.match("gemma", str(self._values.get("model_type"))):
            raise UnknownError(_left_out("head_dim"))
        return _even_share(self.required("embedding_length"), self.required("attention.head_count"))


def _whole(name: str, values: list[Any]) -> list[int]:
    """Return the values of a list, bools as integers; raise if one is neither, or negative."""
    if not all(isinstance(item, bool | int) and 0 <= item <= MOST for item in values):
        raise UnknownError(f"'{name}' has values that are no integers from 0 to {MOST}")
    return [int(item) for item in values]


def _is_kind(name: object) -> bool:
    return isinstance(name, str) and name in _KINDS


def _left_out(key: str) -> str:
    return f"{CONFIG} has no {key!r}, which need not follow from others"


def _even_share(hidden: int, heads: int) -> int:
    if hidden < heads:
        raise UnknownError(f"there are more heads, {heads}, than the {hidden} of their values")
    return hidden // heads
