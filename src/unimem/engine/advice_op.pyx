# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The nodes of a graph that have the kernel read mapped weights before they are used.

They are for models that have no room in memory. Without them, the first touch of each page waits
for the disk, and the machine's read-ahead decides how much is read that nothing needs.
"""
from unimem.backends import ggml

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uintptr_t

from unimem._core cimport native as um
from unimem._core.block cimport Block

cnp.import_array()

# Offsets in a ggml_tensor.
cdef size_t SIZES = ggml.NE_OFFSET
cdef size_t STRIDES = ggml.NB_OFFSET
cdef size_t DATA = ggml.DATA_OFFSET

cdef enum:
    MOST_RANGES = 16


cdef struct Range:
    const um.um_block *block
    size_t offset, nbytes


cdef struct Ranges:
    size_t n
    Range each[MOST_RANGES]
    int64_t n_experts


cdef void advise_layer(char *header, const void *given, int thread, int n_threads,
                       void *data) noexcept nogil:
    """Begin to read the ranges."""
    cdef Ranges *ranges = <Ranges *>data
    cdef size_t i
    if thread == 0:
        for i in range(ranges.n):
            um.um_block_will_need(ranges.each[i].block, ranges.each[i].offset,
                                  ranges.each[i].nbytes)


cdef void advise_experts(char *header, const void *given, int thread, int n_threads,
                         void *data) noexcept nogil:
    """Begin to read the ranges of chosen experts, int32 [n_tokens, n_used], or of all."""
    cdef Ranges *ranges = <Ranges *>data
    cdef int64_t *ne = <int64_t *>(header + SIZES)
    cdef char *rows = (<char **>(header + DATA))[0]
    cdef size_t stride = (<size_t *>(header + STRIDES))[1]
    cdef int64_t n = ne[0] * ne[1], i
    cdef size_t expert, nbytes, at
    cdef Range *one
    if thread != 0:
        return
    if n >= ranges.n_experts:
        advise_layer(header, given, thread, n_threads, data)
        return
    for i in range(n):
        expert = (<int32_t *>(rows + i // ne[0] * stride))[i % ne[0]]
        for at in range(ranges.n):
            one = &ranges.each[at]
            nbytes = one.nbytes // ranges.n_experts
            um.um_block_will_need(one.block, one.offset + expert * nbytes, nbytes)


# The functions for ``ggml_map_custom1``; their `userdata` is from a `FileAdvice`.
#: experts_address: int
#: layer_address: int
experts_address = <uintptr_t>&advise_experts
layer_address = <uintptr_t>&advise_layer


cdef class FileAdvice:
    """Ranges of mapped files that a node has the kernel read.

    Parameters
    ----------
    ranges : sequence of (Block, int, int)
        Mappings, offsets and sizes in bytes; the first 16 count.
    n_experts : int
        How many experts each range has, one after the other; 1 for other weights.

    Attributes
    ----------
    address : int
        The data of a node; the object has to outlive its graphs.
    """
    #: def __init__(self, ranges: Sequence[tuple[Block, int, int]], n_experts: int = 1) -> None: ...

    cdef Ranges _ranges
    cdef list _blocks

    def __cinit__(self, ranges, int64_t n_experts=1):
        cdef Block block
        self._ranges.n_experts = n_experts
        self._blocks = []
        for block, offset, nbytes in ranges[:MOST_RANGES]:
            region = block.region()
            self._blocks.append(region)
            self._ranges.each[self._ranges.n] = Range(&block.region().block, offset, nbytes)
            self._ranges.n += 1

    def ask(self) -> None:
        """Begin to read the ranges."""
        advise_layer(NULL, NULL, 0, 1, &self._ranges)

    @property
    def address(self) -> int:
        """The data of a node."""
        return <uintptr_t>&self._ranges
