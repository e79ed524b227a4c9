"""KV caches of one stream or a batch: their rows, their storage and their layers."""
