"""KV caches: rows of keys and values, paged blocks, scratchpads, prefixes and snapshots."""

from unimem.kv import mixed as _mixed  # noqa: F401 - makes KVCache(layers=...) known
