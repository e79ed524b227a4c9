"""The caches of both packages, for the conformance suite, over whatever their memory is."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.contracts.conformance import Kind
from support.contracts.kv_model import as_float32, memory, stored
from support.contracts.pad_model import TAKEN, converted
from unimem._core.status import counters

Array = NDArray[Any]
ROWS = ("f32", "f16", "bf16", "q8_0")
OnDevice = Any  # an array of the memory's own library


def span(a: Array) -> tuple[Array, int]:
    """Copy the bytes that an array lies in; return them and where in them its first element is."""
    first, end = np.lib.array_utils.byte_bounds(a)
    return memory(first, max(end - first, 1)).copy(), a.ctypes.data - first


def own_counters() -> dict[str, int]:
    """What the library has cost so far."""
    return {name: int(n) for name, n in counters().items()}  # type: ignore[call-overload]


class Bridge(ABC):
    """How arrays come to where the caches are and back, and what that has cost.

    Attributes
    ----------
    in_child : bool
        As of a `Kind`.
    layouts : mapping of str to callable
        As of a `Kind`.
    """

    in_child: bool
    layouts: Mapping[str, Callable[[Array], Array]]

    @property
    @abstractmethod
    def package(self) -> Any:
        """Whose classes are tested: `unimem` or `unimem.cuda`."""

    @abstractmethod
    def up(self, a: Array) -> OnDevice:
        """Bring an array there, with its strides."""

    @abstractmethod
    def down(self, a: OnDevice) -> Array:
        """Wait for what is queued, and bring an array from there."""

    @abstractmethod
    def address_of(self, a: OnDevice) -> int:
        """Where an array's first element is."""

    @abstractmethod
    def zero(self, a: OnDevice) -> None:
        """Overwrite an array there, in the order of the current stream."""

    @abstractmethod
    def is_mapped(self, address: int) -> bool:
        """Whether the library has memory there."""

    @abstractmethod
    def counters(self) -> Mapping[str, int]:
        """What the library has cost so far: allocations, and calls of the system or the driver."""


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "every second of a larger one": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "reversed": lambda a: a[::-1].copy()[::-1],
    "the last dimension reversed": lambda a: a[..., ::-1].copy()[..., ::-1],
    "Fortran order": np.asfortranarray,
    "a column of another": lambda a: np.stack([a, -a], axis=-1)[..., 0],
}


class CudaBridge(Bridge):
    """To device memory."""

    in_child = False
    layouts = LAYOUTS

    @property
    def package(self) -> Any:
        from unimem import cuda

        return cuda

    def address_of(self, a: OnDevice) -> int:
        return int(a.data.ptr)


class BridgedKind(Kind):
    """A cache behind a bridge, on a tape or with memory of its own."""

    def __init__(self, name: str, bridge: Bridge, on_tape: bool) -> None:
        self.name = name
        self.bridge = bridge
        self.owns_memory = not on_tape
        self.in_child, self.layouts = bridge.in_child, bridge.layouts

    @contextmanager
    def made(self) -> Iterator[Any]:
        if self.owns_memory:
            with super().made() as cache:
                yield cache
            return
        with self.bridge.package.Tape(1 << 20) as tape:
            yield self.make(tape=tape)

    @abstractmethod
    def make(self, **options: Any) -> Any:
        """Make an empty cache, on a tape or for itself."""

    def changed(self, argument: OnDevice, change: Callable[[Array], Any]) -> Any:
        result = change(self.bridge.down(argument))
        return self.bridge.up(result) if isinstance(result, np.ndarray) else result

    def overwrite(self, argument: OnDevice) -> None:
        self.bridge.zero(argument)

    def is_mapped(self, address: int) -> bool:
        return self.bridge.is_mapped(address)

    def counters(self) -> Mapping[str, int]:
        return self.bridge.counters()


class PadKind(BridgedKind):
    """Scratchpads: rows of one width."""

    token_shape = (8,)
    dims = (4, 8)

    def __init__(
        self, bridge: Bridge, dtype: str, on_tape: bool = False, cls: str = "Scratchpad"
    ) -> None:
        super().__init__(f"{cls}-{dtype}{'-tape' if on_tape else ''}", bridge, on_tape)
        self.cls, self.dtype = cls, dtype
        self.takes = TAKEN[dtype]
        self.is_slow = dtype not in {"float32", "bfloat16"}

    def make(self, **options: Any) -> Any:
        return getattr(self.bridge.package, self.cls)(self.capacity, 8, self.dtype, **options)

    def arguments(self, tokens: Array) -> tuple[OnDevice, ...]:
        return (self.bridge.up(tokens.copy()),)

    def append(self, cache: Any, layer: Any, *arguments: Any) -> None:
        rows = arguments[0]
        # Both ways to append are to be tested.
        if getattr(rows, "ndim", 0) == 2 and len(rows) == 1:
            cache.append(rows[0])
        else:
            cache.append_batch(rows)

    def read(self, cache: Any, layer: int) -> Array:
        return self.shown(cache.as_array())

    def stored(self, tokens: Array) -> Array:
        return converted(tokens, self.dtype).astype(np.float32)

    def view(self, cache: Any) -> Any:
        return cache.as_array()

    def shown(self, view: Any) -> Array:
        return self.bridge.down(view).astype(np.float32)

    def address(self, cache: Any) -> int:
        return self.bridge.address_of(cache.as_array())


class KVKind(BridgedKind):
    """KVCache: K and V of two layers."""

    n_layers = 2
    dims: tuple[int, ...] = (2, 2, 32, 8)
    state_layers: tuple[int, ...] | None = ()

    def __init__(self, bridge: Bridge, how: str, dtype: str, batch: int) -> None:
        super().__init__(f"KVCache-{how}-{dtype}-batch{batch}", bridge, how == "tape")
        self.how, self.dtype, self.batch = how, dtype, batch
        self.token_shape = (2, batch, 2, 32)

    def make(self, **options: Any) -> Any:
        own = {"max_seq_len": self.capacity, "batch": self.batch, "dtype": self.dtype}
        return self.bridge.package.KVCache(2, 2, 32, **own | options)

    def arguments(self, tokens: Array) -> tuple[OnDevice, ...]:
        if self.batch == 1:  # both orders of the tokens are to be tested
            parts = [tokens[:, part, 0] for part in range(2)]
        else:
            parts = [np.moveaxis(tokens[:, part], 0, 2) for part in range(2)]
        return tuple(self.bridge.up(part.copy()) for part in parts)

    def append(self, cache: Any, layer: Any, *arguments: Any) -> None:
        cache.append(layer, *arguments)

    def read(self, cache: Any, layer: int) -> Array:
        return self.shown(cache.layer(layer))

    def stored(self, tokens: Array) -> Array:
        return as_float32(stored(tokens, self.dtype))

    def view(self, cache: Any) -> Any:
        return cache.layer(0)

    def shown(self, view: Any) -> Array:
        parts = [as_float32(self.bridge.down(part)) for part in view]
        return np.stack([np.moveaxis(part, 2, 0) for part in parts], axis=1)

    def address(self, cache: Any) -> int:
        return int(cache.address(0, "k"))


def each_dtype(make: Callable[[str, int], Kind], *fast: tuple[str, int]) -> list[Kind]:
    """A kind of each dtype of rows and batch; those that are not named are for the slow tier."""
    kinds = []
    for dtype, batch in itertools.product(ROWS, (1, 2)):
        kinds.append(make(dtype, batch))
        kinds[-1].is_slow = (dtype, batch) not in fast
    return kinds


def all_kinds(bridge: Bridge) -> list[Kind]:
    """The caches that both packages have, with memory of their own and on a tape."""
    kinds: list[Kind] = [PadKind(bridge, dtype) for dtype in TAKEN]
    kinds += [PadKind(bridge, dtype, on_tape=True) for dtype in ("float32", "bfloat16")]
    kinds += each_dtype(partial(KVKind, bridge, "fixed"), ("f32", 2), ("q8_0", 1))
    return kinds + each_dtype(partial(KVKind, bridge, "tape"), ("f16", 2))
