"""KV caches of one stream or a batch: their rows, their storage and their layers."""

from unimem.kv.cache import layered as _layered  # noqa: F401 - makes KVCache(layers=...) known
