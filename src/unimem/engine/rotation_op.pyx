# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The node of a graph that rotates heads: ggml calls the core's rotation.

llama.cpp multiplies with the matrix, which costs one product per value of a block and value. This
costs their logarithm in sums, and gives the bits of `KVCache.append`.
"""
from unimem.backends import ggml

from libc.stdint cimport int64_t, uint32_t, uintptr_t

from unimem._core cimport native as um

# Offsets in a ggml_tensor.
cdef size_t SIZES = ggml.NE_OFFSET
cdef size_t DATA = ggml.DATA_OFFSET


cdef void rotate(char *header, const void *given, int thread, int n_threads,
                 void *block) noexcept nogil:
    """Rotate a thread's share of the blocks of a contiguous tensor (ggml_custom1_op_t)."""
    cdef int64_t *ne = <int64_t *>(header + SIZES)
    cdef float *values = (<float **>(header + DATA))[0]
    cdef size_t size = <size_t>block
    cdef int64_t n = ne[0] * ne[1] * ne[2] * ne[3] // <int64_t>size
    cdef int64_t first = n * thread // n_threads, end = n * (thread + 1) // n_threads
    # It cannot fail: `size` is from `rotation_block`, and a tensor has whole blocks of it.
    cdef um.um_status _ = um.um_rotate(values + first * size, (end - first) * size, size, NULL)


# The function for ``ggml_map_custom1``; its `userdata` is the size of a block.
#: node_address: int
node_address = <uintptr_t>&rotate


def rotation_block(uint32_t head_dim, part: Literal["k", "v"]) -> int:
    """Return how many values of a head are rotated at once; 0 if it cannot be rotated.

    `part` is "k" for queries and keys, and "v" for values and the output of attention.
    """
    return um.um_rotation_block(head_dim, part == "v")
