from unimem.kv.cache.cache cimport KVCache
