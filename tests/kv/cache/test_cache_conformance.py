"""All caches in main memory pass the one contract."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.contracts import cache_kinds
from support.contracts.cache_kinds import (
    Array,
    Bridge,
    PadKind,
    all_kinds,
    each_dtype,
    own_counters,
)
from support.contracts.conformance import Kind, fill, suites, tokens_of
from support.contracts.kv_model import as_float32, memory
from support.contracts.pad_model import TAKEN
from support.contracts.states import state_suites
from support.kernel import proc_maps

pytestmark = pytest.mark.usefixtures("gives_memory_back")


def unaligned(a: Array) -> Array:
    """The same one byte further on."""
    return np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(a.dtype).reshape(a.shape)


def swapped(a: Array) -> Array:
    """The same in the other byte order."""
    return a.astype(a.dtype.newbyteorder("S"))


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "every second of a larger one": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "reversed": lambda a: a[::-1].copy()[::-1],
    "Fortran order": np.asfortranarray,
    "a column of another": lambda a: np.stack([a, -a], axis=-1)[..., 0],
    "of the other byte order": swapped,
    "of the other byte order and strided": lambda a: np.repeat(swapped(a), 2, axis=0)[::2],
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
    "not aligned": unaligned,
    "a subclass": lambda a: a.view(np.recarray),
}


class MainMemory(Bridge):
    """Where arrays are already."""

    package = um
    in_child = True
    layouts = LAYOUTS

    def up(self, a: Array) -> Array:
        return a

    def down(self, a: Array) -> Array:
        return a

    def address_of(self, a: Array) -> int:
        return proc_maps.address_of(a)

    def zero(self, a: Array) -> None:
        a[...] = 0

    def is_mapped(self, address: int) -> bool:
        return proc_maps.is_mapped(address)

    def counters(self) -> Mapping[str, int]:
        return own_counters()


HERE = MainMemory()


class PagedPadKind(PadKind):
    """PagedScratchpad, whose tokens are in blocks."""

    def __init__(self, dtype: str) -> None:
        super().__init__(HERE, dtype, cls="PagedScratchpad")

    def read(self, cache: Any, layer: int) -> Array:
        return np.asarray(cache.as_array(), np.float32)

    def view(self, cache: Any) -> Any:
        return [cache.get_token(i) for i in range(len(cache))]

    def shown(self, view: Any) -> Array:
        return np.array(view, np.float32)

    def address(self, cache: Any) -> int:
        return proc_maps.address_of(cache.get_token(0))


class KVKind(cache_kinds.KVKind):
    """KVCache in all the ways that only main memory has."""

    def __init__(self, how: str, dtype: str, batch: int) -> None:
        super().__init__(HERE, how, dtype, batch)
        self.forgets = how == "ring"
        self.in_child = how != "ring"
        self.is_fixed = how == "ring"

    def make(self, **options: Any) -> Any:
        if self.how == "mapped":
            return self.mapped()
        if self.how == "grow":
            return super().make(grow=True)
        # A ring's positions go on and on.
        return super().make(window=self.capacity, max_seq_len=10_000)

    @cached_property
    def saved(self) -> bytes:
        """A snapshot of other tokens."""
        with super().make() as kv, tempfile.TemporaryDirectory() as folder:
            fill(self, kv, tokens_of(self, self.capacity, seed=9))
            kv.save(f"{folder}/session")
            return Path(folder, "session").read_bytes()

    def mapped(self) -> um.KVCache:
        """Make an empty cache whose rows were pages of a file, which it has let go of."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "session")
            path.write_bytes(self.saved)
            kv = um.KVCache.restore(path, mode="map")
        assert memory(kv.address(0, "k"), proc_maps.PAGE).tobytes() in self.saved
        kv.clear()
        assert kv.memory_usage_bytes == kv.resident_bytes == 0
        return kv


class MixedKind(cache_kinds.KVKind):
    """A cache of two layers that differ: one of two heads, and one of a head twice as large."""

    states: tuple[um.LayerState, ...] = ()

    def __init__(self, how: str, dtype: str, batch: int) -> None:
        super().__init__(HERE, how, dtype, batch)
        self.name = f"mixed-{self.name}"
        self.forgets = how == "rings"
        self.in_child = how != "rings"
        self.is_fixed = how != "grow"

    def make(self, **options: Any) -> Any:
        window = self.capacity if self.forgets else None
        layers = [um.LayerKV(2, 32, window=window), um.LayerKV(1, 64, window=window)]
        return um.KVCache(
            layers=[*layers, *self.states],
            checkpoints=2 if self.states else 0,
            max_seq_len=10_000 if self.forgets else self.capacity,
            batch=self.batch,
            dtype=self.dtype,
            grow=self.how == "grow",
        )

    def append(self, cache: Any, layer: Any, *arguments: Any) -> None:
        if type(layer) is int and layer == 1:
            arguments = tuple(self.in_one_head(a) for a in arguments)
        super().append(cache, layer, *arguments)

    def in_one_head(self, a: Array) -> Array:
        if a.ndim == 3:
            return a.reshape(len(a), 1, 64)
        return np.concatenate([a[:, :1], a[:, 1:]], axis=-1)

    def read(self, cache: Any, layer: int) -> Array:
        found = super().read(cache, layer)
        return found.reshape(len(found), *self.token_shape)


class StatesKind(MixedKind):
    """The same with two layers that keep a state."""

    states = um.LayerState((3, 5)), um.LayerState((2, 40), "bf16")
    state_layers = (2, 3)

    def __init__(self, how: str, dtype: str, batch: int) -> None:
        super().__init__(how, dtype, batch)
        self.name = f"states-{self.name}"


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


class SequenceKind(cache_kinds.KVKind):
    """Sequences of a PagedKVCache of two layers."""

    state_layers = None
    dims = ()

    def __init__(self, dtype: str) -> None:
        super().__init__(HERE, "", dtype, 1)
        self.name = f"Sequence-{dtype}"
        self.is_slow = dtype not in {"f32", "q8_0"}

    def make(self, **options: Any) -> OneSequence:
        return OneSequence(self.dtype)

    def append(self, cache: Any, layer: Any, *arguments: Any) -> None:
        cache.sequence.append(layer, *arguments)

    def read(self, cache: Any, layer: int) -> Array:
        parts = [as_float32(part).swapaxes(0, 1) for part in cache.sequence.gather(layer)]
        return np.stack(parts, axis=1)[:, :, None]

    def view(self, cache: Any) -> Any:
        return cache.pool.layer(0), cache.sequence.block_table, len(cache)

    def shown(self, view: Any) -> Array:
        parts, table, n = view
        blocks = np.stack([as_float32(part[table]) for part in parts], axis=2)
        return blocks.reshape(-1, *self.token_shape)[:n]

    def address(self, cache: Any) -> int:
        return proc_maps.address_of(cache.pool.layer(0)[0])


def kinds() -> list[Kind]:
    found = all_kinds(HERE) + [PagedPadKind(dtype) for dtype in TAKEN]
    for how, fast in {"grow": "f32", "mapped": "q8_0", "ring": "f16"}.items():
        found += each_dtype(partial(KVKind, how), (fast, 1))
    for how, fast in {"fixed": "q8_0", "grow": "f32", "rings": "f16"}.items():
        found += each_dtype(partial(MixedKind, how), (fast, 1))
    for how, dtype, batch in (("fixed", "f16", 1), ("grow", "f32", 2), ("rings", "q8_0", 1)):
        found.append(StatesKind(how, dtype, batch))
    return found + [SequenceKind(dtype) for dtype in cache_kinds.ROWS]


KINDS = kinds()

globals().update(suites(KINDS) | state_suites(KINDS))
