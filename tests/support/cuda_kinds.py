"""The caches of the GPU twin, for the conformance suite, over whatever stands for the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance import Kind
from kv_model import as_float32, memory, stored
from pad_model import TAKEN, converted
from unimem._core.status import counters

Array = NDArray[Any]
OnDevice = Any  # a cupy.ndarray


def span(a: Array) -> tuple[Array, int]:
    """Copy the bytes that an array lies in; return them and where in them its first element is."""
    first, end = np.lib.array_utils.byte_bounds(a)
    return memory(first, max(end - first, 1)).copy(), a.ctypes.data - first


class Bridge(ABC):
    """How arrays come to the device and back, and what the library asked the device for."""

    @abstractmethod
    def up(self, a: Array) -> OnDevice:
        """Copy an array to the device, with its strides."""

    @abstractmethod
    def down(self, a: OnDevice) -> Array:
        """Wait for the device, and copy an array from there."""

    @abstractmethod
    def zero(self, a: OnDevice) -> None:
        """Overwrite an array on the device, in the order of its current stream."""

    @abstractmethod
    def is_mapped(self, address: int) -> bool:
        """Whether the library has memory there."""

    @abstractmethod
    def counters(self) -> Mapping[str, int]:
        """How often the library has allocated on the device, and waited for it."""


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "every second of a larger one": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "reversed": lambda a: a[::-1].copy()[::-1],
    "the last dimension reversed": lambda a: a[..., ::-1].copy()[..., ::-1],
    "Fortran order": np.asfortranarray,
    "a column of another": lambda a: np.stack([a, -a], axis=-1)[..., 0],
}


class CudaKind(Kind):
    """A cache in device memory."""

    in_child = False
    layouts = LAYOUTS

    def __init__(self, name: str, bridge: Bridge, on_tape: bool) -> None:
        self.name = name
        self.bridge = bridge
        self.owns_memory = not on_tape

    @contextmanager
    def made(self) -> Iterator[Any]:
        from unimem import cuda

        if self.owns_memory:
            with super().made() as cache:
                yield cache
            return
        with cuda.Tape(1 << 20) as tape:
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
        own = {name: int(n) for name, n in counters().items()}  # type: ignore[call-overload]
        return {**own, **self.bridge.counters()}


class PadKind(CudaKind):
    """cuda.Scratchpad."""

    token_shape = (8,)

    def __init__(self, bridge: Bridge, dtype: str, on_tape: bool) -> None:
        super().__init__(f"Scratchpad-{dtype}{'-tape' if on_tape else ''}", bridge, on_tape)
        self.dtype = dtype
        self.takes = TAKEN[dtype]

    def make(self, **options: Any) -> Any:
        from unimem import cuda

        return cuda.Scratchpad(self.capacity, 8, self.dtype, **options)

    def arguments(self, tokens: Array) -> tuple[OnDevice, ...]:
        return (self.bridge.up(tokens),)

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
        return int(cache.as_array().data.ptr)


class KVKind(CudaKind):
    """cuda.KVCache: K and V of two layers."""

    n_layers = 2

    def __init__(self, bridge: Bridge, dtype: str, batch: int, on_tape: bool) -> None:
        how = "tape" if on_tape else "fixed"
        super().__init__(f"KVCache-{how}-{dtype}-batch{batch}", bridge, on_tape)
        self.dtype, self.batch = dtype, batch
        self.token_shape = (2, batch, 2, 32)

    def make(self, **options: Any) -> Any:
        from unimem import cuda

        return cuda.KVCache(2, 2, 32, self.capacity, batch=self.batch, dtype=self.dtype, **options)

    def arguments(self, tokens: Array) -> tuple[OnDevice, ...]:
        if self.batch == 1:  # both orders of the tokens are to be tested
            parts = [tokens[:, part, 0] for part in range(2)]
        else:
            parts = [np.moveaxis(tokens[:, part], 0, 2) for part in range(2)]
        return tuple(self.bridge.up(np.ascontiguousarray(part)) for part in parts)

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


def all_kinds(bridge: Bridge) -> list[CudaKind]:
    """Every cache of the twin, on a tape and for itself."""
    kinds: list[CudaKind] = []
    for on_tape in (False, True):
        kinds += [PadKind(bridge, dtype, on_tape) for dtype in TAKEN]
        for dtype in ("f32", "f16", "bf16", "q8_0"):
            kinds += [KVKind(bridge, dtype, batch, on_tape) for batch in (1, 2)]
    return kinds
