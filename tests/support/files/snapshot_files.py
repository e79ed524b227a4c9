"""Caches to save, and an os module that fails or dies on request."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import unimem as um
from unimem.base import atomic_file
from unimem.kv.snapshot import writer

#: What saving asks of the system, by the module that it asks.
CALLS = {
    os: ("open", "stat", "listdir", "fchmod", "pwrite", "fsync", "replace", "unlink", "fstat"),
    fcntl: ("flock", "fcntl"),
}


def append(kv: um.KVCache, n: int, seed: int = 0) -> None:
    """Append n tokens of random values."""
    rng = np.random.default_rng(seed)
    shape = (2, kv.batch, kv.n_kv_heads, n, kv.head_dim)
    for layer in range(kv.n_layers):
        k, v = rng.standard_normal(shape, np.float32)
        kv.append(layer, k, v)


def cache(n: int, max_seq_len: int = 64, *, seed: int = 0, **options: Any) -> um.KVCache:
    """Make a cache of 2 layers of 2 heads of 32 with n random tokens."""
    kv = um.KVCache(2, 2, 32, max_seq_len, **options)
    append(kv, n, seed)
    return kv


def rows(kv: um.KVCache) -> list[bytes]:
    """Return the bytes of every lane."""
    return [kv._body._rows(*lane).tobytes() for lane in kv._body._lanes()]


class Interposed:
    """A module some of whose functions are announced before they run."""

    def __init__(self, module: Any, names: tuple[str, ...], before: Callable[..., None]) -> None:
        self._module = module
        self._names = names
        self._before = before

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)
        if name not in self._names:
            return function

        def announced(*args: Any, **options: Any) -> Any:
            self._before(name, *args)
            return function(*args, **options)

        return announced


def interpose(patch: pytest.MonkeyPatch, before: Callable[..., None]) -> None:
    """Call ``before(name, *args)`` before each system call of `KVCache.save`."""
    for module, names in CALLS.items():
        patch.setattr(atomic_file, module.__name__, Interposed(module, names, before))


def small_chunks(patch: pytest.MonkeyPatch, nbytes: int = 4096) -> None:
    """Make small caches have several chunks a lane."""
    patch.setattr(writer, "_CHUNK_BYTES", nbytes)
