"""KV caches: rows of keys and values, paged blocks, scratchpads, prefixes and snapshots."""
