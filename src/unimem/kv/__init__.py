"""KV memory: the types, layers and states of caches, paged blocks, scratchpads and prefixes."""
