# For Cython: `from unimem cimport Tape`. docs/native.md has the methods that stay as they are; what
# else the classes have is unimem's own.
from unimem._core cimport native
from unimem._core.block cimport Block
from unimem._core.grid cimport Grid
from unimem._core.tape cimport Tape
from unimem.kv.cache.cache cimport KVCache
