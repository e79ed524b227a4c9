"""All caches in main memory pass the one contract."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import proc_maps
import unimem as um
from conformance import Kind, fill, suites, tokens_of
from kv_model import as_float32, memory, stored
from pad_model import TAKEN, converted
from unimem._core.status import counters

pytestmark = pytest.mark.usefixtures("gives_memory_back")

Array = NDArray[Any]


def unaligned(a: Array) -> Array:
    """The same one byte further on."""
    return np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(a.dtype).reshape(a.shape)


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "every second of a larger one": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "reversed": lambda a: a[::-1].copy()[::-1],
    "Fortran order": np.asfortranarray,
    "a column of another": lambda a: np.stack([a, -a], axis=-1)[..., 0],
    "of the other byte order": lambda a: a.astype(a.dtype.newbyteorder("S")),
    "of the other byte order and strided": lambda a: np.repeat(
        a.astype(a.dtype.newbyteorder("S")), 2, axis=0
    )[::2],
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
    "not aligned": unaligned,
    "a subclass": lambda a: a.view(np.recarray),
}


class HostKind(Kind):
    """A cache in main memory."""

    layouts: Mapping[str, Callable[[Array], Array]] = LAYOUTS

    def __init__(self, name: str) -> None:
        self.name = name

    def is_mapped(self, address: int) -> bool:
        return proc_maps.is_mapped(address)

    def counters(self) -> Mapping[str, int]:
        return {name: int(n) for name, n in counters().items()}  # type: ignore[call-overload]


class PadKind(HostKind):
    """Scratchpads: rows of one width."""

    token_shape = (8,)

    def __init__(self, cls: type[Any], dtype: str, on_tape: bool = False) -> None:
        super().__init__(f"{cls.__name__}-{dtype}{'-tape' if on_tape else ''}")
        self.cls, self.dtype = cls, dtype
        self.takes = TAKEN[dtype]
        self.on_tape = on_tape
        self.owns_memory = not on_tape

    def make(self, **options: Any) -> Any:
        return self.cls(self.capacity, 8, self.dtype, **options)

    @contextmanager
    def made(self) -> Iterator[Any]:
        if not self.on_tape:
            with super().made() as cache:
                yield cache
            return
        with um.Tape(1 << 16) as tape:
            yield self.make(tape=tape)

    def arguments(self, tokens: Array) -> tuple[Array, ...]:
        return (tokens.copy(),)

    def append(self, cache: Any, layer: Any, *arguments: Any) -> None:
        rows = arguments[0]
        # Both ways to append are to be tested.
        if isinstance(rows, np.ndarray) and rows.ndim == 2 and len(rows) == 1:
            cache.append(rows[0])
        else:
            cache.append_batch(rows)

    def read(self, cache: Any, layer: int) -> Array:
        return np.asarray(cache.as_array(), np.float32)

    def stored(self, tokens: Array) -> Array:
        return converted(tokens, self.dtype).astype(np.float32)

    def view(self, cache: Any) -> Any:
        if isinstance(cache, um.Scratchpad):
            return cache.as_array()
        len(cache)
        return [cache.get_token(i) for i in range(len(cache))]

    def shown(self, view: Any) -> Array:
        return np.array(view, np.float32)

    def address(self, cache: Any) -> int:
        view = cache.as_array() if isinstance(cache, um.Scratchpad) else cache.get_token(0)
        return proc_maps.address_of(view)


class KVKind(HostKind):
    """KVCache: K and V of two layers."""

    n_layers = 2

    def __init__(self, how: str, dtype: str, batch: int) -> None:
        super().__init__(f"KVCache-{how}-{dtype}-batch{batch}")
        self.how, self.dtype, self.batch = how, dtype, batch
        self.token_shape = (2, batch, 2, 32)
        self.forgets = how == "ring"
        self.in_child = how != "ring"
        self.is_fixed = how not in ("grow", "mapped")
        self.owns_memory = how != "tape"

    def make(self, **options: Any) -> um.KVCache:
        if self.how == "ring":
            options |= {"window": self.capacity}
        elif self.how == "grow":
            options |= {"grow": True}
        # A ring's positions go on and on.
        most = 10_000 if self.forgets else self.capacity
        if self.how == "mapped":
            return self.mapped()
        return um.KVCache(2, 2, 32, most, batch=self.batch, dtype=self.dtype, **options)

    @cached_property
    def saved(self) -> bytes:
        """A snapshot of other tokens."""
        with (
            um.KVCache(2, 2, 32, self.capacity, batch=self.batch, dtype=self.dtype) as kv,
            tempfile.TemporaryDirectory() as folder,
        ):
            fill(self, kv, tokens_of(self, self.capacity, seed=9))
            kv.save(f"{folder}/session")
            return Path(folder, "session").read_bytes()

    def mapped(self) -> um.KVCache:
        """Make an empty cache whose rows were pages of a file, which it has let go of."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "session")
            path.write_bytes(self.saved)
            kv = um.KVCache.restore(path, mode="map")
        page = memory(kv.address(0, "k"), proc_maps.PAGE).tobytes()
        assert page in self.saved
        kv.clear()
        assert kv.memory_usage_bytes == kv.resident_bytes == 0
        return kv

    @contextmanager
    def made(self) -> Iterator[Any]:
        if self.owns_memory:
            with super().made() as cache:
                yield cache
            return
        with um.Tape(1 << 20) as tape:
            yield self.make(tape=tape)

    def arguments(self, tokens: Array) -> tuple[Array, ...]:
        if self.batch == 1:  # both orders of the tokens are to be tested
            return tokens[:, 0, 0].copy(), tokens[:, 1, 0].copy()
        return tuple(np.ascontiguousarray(np.moveaxis(tokens[:, part], 0, 2)) for part in range(2))

    def append(self, cache: Any, layer: Any, *arguments: Any) -> None:
        cache.append(layer, *arguments)

    def read(self, cache: Any, layer: int) -> Array:
        return np.stack([np.moveaxis(a, 2, 0) for a in cache.layer(layer, "float32")], axis=1)

    def stored(self, tokens: Array) -> Array:
        return as_float32(stored(tokens, self.dtype))

    def view(self, cache: Any) -> Any:
        return cache.layer(0)

    def shown(self, view: Any) -> Array:
        return np.stack([np.moveaxis(as_float32(a), 2, 0) for a in view], axis=1)

    def address(self, cache: Any) -> int:
        return int(cache.address(0, "k"))


class OneSequence:
    """A pool of blocks with one sequence in it: together they do what a cache does."""

    def __init__(self, dtype: str) -> None:
        # 24 tokens in all.
        self.pool = um.PagedKVCache(2, 2, 32, n_blocks=6, block_tokens=4, dtype=dtype)
        self.sequence = self.pool.sequence()
        self.crop = self.sequence.crop

    def clear(self) -> None:
        self.sequence.crop(0)

    @property
    def closed(self) -> bool:
        return self.sequence.closed

    def close(self) -> None:
        self.pool.close()
        self.sequence.close()

    def __len__(self) -> int:
        return len(self.sequence)

    def __enter__(self) -> OneSequence:
        self.sequence.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.sequence.__exit__(*exc_info)
        self.pool.__exit__(*exc_info)

    def __reduce__(self) -> Any:
        return self.sequence.__reduce__()

    def __repr__(self) -> str:
        return repr(self.sequence)


class SequenceKind(HostKind):
    """Sequences of a PagedKVCache of two layers."""

    n_layers = 2
    token_shape = (2, 2, 32)

    def __init__(self, dtype: str) -> None:
        super().__init__(f"Sequence-{dtype}")
        self.dtype = dtype

    def make(self) -> OneSequence:
        return OneSequence(self.dtype)

    def arguments(self, tokens: Array) -> tuple[Array, ...]:
        return tokens[:, 0].copy(), tokens[:, 1].copy()

    def append(self, cache: Any, layer: Any, *arguments: Any) -> None:
        cache.sequence.append(layer, *arguments)

    def read(self, cache: Any, layer: int) -> Array:
        return np.stack([as_float32(a).swapaxes(0, 1) for a in cache.sequence.gather(layer)], 1)

    def stored(self, tokens: Array) -> Array:
        return as_float32(stored(tokens, self.dtype))

    def view(self, cache: Any) -> Any:
        return cache.pool.layer(0), cache.sequence.block_table, len(cache)

    def shown(self, view: Any) -> Array:
        parts, table, n = view
        blocks = np.stack([as_float32(part[table]) for part in parts], axis=2)
        return blocks.reshape(-1, *self.token_shape)[:n]

    def address(self, cache: Any) -> int:
        return proc_maps.address_of(cache.pool.layer(0)[0])


def all_kinds() -> list[HostKind]:
    kinds: list[HostKind] = []
    for dtype in TAKEN:
        kinds += [PadKind(um.Scratchpad, dtype), PadKind(um.Scratchpad, dtype, on_tape=True)]
        kinds += [PadKind(um.PagedScratchpad, dtype)]
    for how in ("fixed", "tape", "grow", "mapped", "ring"):
        for dtype in ("f32", "f16", "bf16", "q8_0"):
            kinds += [KVKind(how, dtype, batch) for batch in (1, 2)]
    kinds += [SequenceKind(dtype) for dtype in ("f32", "f16", "bf16", "q8_0")]
    return kinds


KINDS = all_kinds()

globals().update(suites(KINDS))
