"""Protocols of the caches that snapshots save and restore, in main memory or on a device."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeAlias, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from unimem.kv.layer_specs import Layer
from unimem.kv.states import LayerStates


class _Body(Protocol):
    """A cache of any layers."""

    _snapshot: Any

    @property
    def max_seq_len(self) -> int:
        """Tokens that fit."""

    @property
    def seq_len(self) -> int:
        """Tokens that all layers hold."""

    @property
    def next_position(self) -> int:
        """The position of the next token."""

    def crop(self, n: int) -> None:
        """Keep the first tokens."""

    def clear(self) -> None:
        """Drop all tokens."""

    def _finish_restore(self, next_position: int, n: int) -> None:
        """Adopt the tokens that were read."""


class Cache(_Body, Protocol):
    """A cache whose layers are alike, in main memory or on a device."""

    @property
    def _file(self) -> str | None:
        """The file that its rows are mapped from, or None."""

    @property
    def n_rows(self) -> int:
        """Rows of a lane."""

    @property
    def window(self) -> int | None:
        """Tokens of a ring, or None."""

    @property
    def order(self) -> Literal["token", "head"]:
        """Whether a row has all heads of a token, or each head has a lane."""

    def _rows(self, layer: int, part: Literal["k", "v"], stream: int) -> NDArray[np.uint8]:
        """Return the bytes of the tokens of one lane."""

    def _begin_restore(self, next_position: int, n: int) -> None:
        """Prepare for n tokens that end at a position."""

    def _first_kept(self) -> int:
        """Return the position before which tokens were trimmed."""

    def _restore_rows(
        self, layer: int, part: Literal["k", "v"], stream: int, n: int, next_position: int
    ) -> NDArray[np.uint8]:
        """Return the memory into which the tokens of one lane are read."""

    def _finish_restore(self, next_position: int, n: int, trimmed: int = 0) -> None:
        """Adopt the tokens that were read; a ring notes before which position it was trimmed."""


@runtime_checkable
class CacheOfLayers(_Body, Protocol):
    """A cache whose layers differ, made of a cache for each kind of layers."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """What each layer keeps."""

    @property
    def _parts(self) -> Sequence[Any]:
        """The caches of the kinds."""

    @property
    def _states(self) -> LayerStates | None:
        """The states of layers that keep no tokens."""


class HeldCache(Protocol):
    """The cache that users see, which holds a `Cache` or `CacheOfLayers`."""

    _body: Any


#: Any cache that a user has.
AnyCache: TypeAlias = Cache | CacheOfLayers | HeldCache


def body_of(kv: AnyCache) -> Cache | CacheOfLayers:
    """Return the cache that a user's cache holds, or itself."""
    return cast(Cache | CacheOfLayers, getattr(kv, "_body", kv))


class HostCache(Cache, Protocol):
    """A cache in main memory, which can be made from a snapshot."""

    def __init__(self, **options: Any) -> None:
        """Make an empty cache."""

    @classmethod
    def _mapped(
        cls,
        fields: dict[str, Any],
        fd: int,
        path: str,
        offsets: list[int],
        n: int,
        next_position: int,
    ) -> Self:
        """Make a cache whose rows are mapped from a file."""

    @staticmethod
    def _of_layers(
        layers: tuple[Layer, ...],
        parts: list[Any],
        max_seq_len: int,
        states: LayerStates | None = None,
    ) -> Any:
        """Make a cache whose layers differ from its parts and states."""

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Close it to new use."""
