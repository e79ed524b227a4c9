# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True
"""Launches of the kernels of ``rows.cu``: tokens become rows of a device's memory, and rows arrays.

A launch is one call of the driver, whose arguments are one structure. Where the driver refuses it,
as in a thread that is new to CUDA, the kernel's own call launches it, or raises the error.
"""
import numpy as np

cimport cython
from libc.stdint cimport int64_t, uintptr_t

#: from unimem.backends.cuda_driver import Launcher

cdef enum:
    # Threads of a block: along the values of a head, and along heads and tokens. A quantizing
    # thread takes 32 values at once, others 4 values one after another.
    ALONG_HEAD = 32
    ALONG_ROWS = 4
    QUANTIZING_ALONG_HEAD = 4
    QUANTIZING_ALONG_ROWS = 32
    VALUES_ALONG_HEAD = 128
    MOST_BLOCKS = 65535  # along the second and third dimension of a grid

# The arguments of a kernel that reads, as ``rows.cu`` has them.
cdef struct Read:
    uintptr_t lanes, array
    int64_t[4] sizes
    int64_t lane_stride, row_bytes, row


cdef void _set_grid(unsigned[3] grid, int64_t n_lanes, int64_t n_rows, int64_t dim,
                    unsigned along_rows) noexcept:
    grid[0] = <unsigned>((dim + VALUES_ALONG_HEAD - 1) // VALUES_ALONG_HEAD)
    grid[1] = <unsigned>min((n_rows + along_rows - 1) // along_rows, <int64_t>MOST_BLOCKS)
    grid[2] = <unsigned>min(n_lanes, <int64_t>MOST_BLOCKS)


cdef dict _with_handles(launchers):
    return {name: (launch, getattr(launch, "handle", 0)) for name, launch in launchers.items()}


@cython.final
cdef class RowKernels:
    """The kernels for one type of rows. A call launches one and returns at once.

    Addresses, sizes and strides are not checked. Any thread may call; a forked child has no device.

    Parameters
    ----------
    append, read : mapping of str to callable
        The kernels by the type of tokens, and by the type of arrays; see `Launcher`.
    quantizes : bool
        Whether a thread writes 32 values at once.
    launch_address : int
        Where the driver's cuLaunchKernel is, or 0.
    """

    def __init__(self, append: Mapping[str, Launcher], read: Mapping[str, Launcher], *,
                 bint quantizes: bool, launch_address: int) -> None:
        self._append, self._read = _with_handles(append), _with_handles(read)
        self._block_x = QUANTIZING_ALONG_HEAD if quantizes else ALONG_HEAD
        self._block_y = QUANTIZING_ALONG_ROWS if quantizes else ALONG_ROWS
        self._launch = <Launch><uintptr_t>launch_address

    cdef int queue(self, tuple kernel, unsigned[3] grid, unsigned[2] block, void *arguments,
                   size_t nbytes, uintptr_t stream) except -1:
        cdef uintptr_t function = kernel[1]
        cdef void *where = arguments
        cdef int status = -1
        if self._launch != NULL and function != 0:
            with nogil:
                status = self._launch(function, grid[0], grid[1], grid[2], block[0], block[1], 1, 0,
                                      stream, &where, NULL)
        if status != 0:
            # One structure by value: CuPy passes an array of one element so.
            given = np.frombuffer((<char *>arguments)[:nbytes], np.dtype((np.void, nbytes)))
            kernel[0]((grid[0], grid[1], grid[2]), (block[0], block[1]), (given,), stream)
        return 0

    cdef int queue_append(self, str given, Append *a, uintptr_t stream) except -1:
        cdef unsigned[3] grid
        cdef unsigned[2] block = [self._block_x, self._block_y]
        cdef Side *k = &a.sides[0]
        cdef Side *v = &a.sides[1] if a.sides[1].given else k
        if a.n == 0:
            return 0
        _set_grid(grid, (1 if v == k else 2) * a.layers * a.streams, a.n * max(k.heads, v.heads),
                  max(k.dim, v.dim), self._block_y)
        return self.queue(self._append[given], grid, block, a, sizeof(Append), stream)

    def append(self, given: str, sides: Sequence[tuple[Any, ...]], sizes: tuple[int, int, int],
               rows: tuple[int, int, int], uintptr_t stream: int) -> None:
        """Write tokens into the rows of their lanes; K and V with one launch.

        Parameters
        ----------
        given : str
            The name of the tokens' type.
        sides : sequence of tuple
            K, and V if there is one: the addresses of the tokens and of the first lane; the numbers
            of heads, and of values of a head (for q8_0 a multiple of 32); the bytes from one layer,
            stream, head, token and value to the next; the bytes from the lane of one layer to the
            next, from that of one stream to the next, and of a row.
        sizes : tuple
            The numbers of layers, streams and tokens.
        rows : tuple
            The row of the first token; the rows of a lane, outside which nothing is written; and 0,
            or the address of an int32 that is the first row when the kernel runs.
        stream : int
            The stream.
        """
        cdef Append a
        cdef Side *side
        cdef int i, axis
        a.sides[1].given = 0
        for i in range(len(sides)):
            side = &a.sides[i]
            side.given, side.out, side.heads, side.dim, strides = sides[i][:5]
            side.layer_stride, side.lane_stride, side.row_bytes = sides[i][5:]
            for axis in range(5):
                side.strides[axis] = strides[axis]
        a.layers, a.streams, a.n = sizes
        a.row, a.n_rows, a.row_address = rows
        self.queue_append(given, &a, stream)

    def read(self, lane: int, out: int, wanted: str, sizes: tuple[int, int, int, int],
             lane_stride: int, row_bytes: int, row: int, uintptr_t stream: int) -> None:
        """Copy rows from `row` on, from the lanes at `lane`, to an array ``[*sizes]`` at `out`.

        They are converted to `wanted`, ``"f32"``, ``"f16"`` or ``"bf16"``. Sizes are streams,
        heads, tokens and values of a head.
        """
        cdef Read r
        cdef unsigned[3] grid
        cdef unsigned[2] block = [ALONG_HEAD, ALONG_ROWS]
        cdef int i
        r.lanes, r.array, r.lane_stride, r.row_bytes, r.row = lane, out, lane_stride, row_bytes, row
        for i in range(4):
            r.sizes[i] = sizes[i]
        if r.sizes[2] == 0 or r.sizes[3] == 0:
            return
        _set_grid(grid, r.sizes[0], r.sizes[2] * r.sizes[1], r.sizes[3], ALONG_ROWS)
        self.queue(self._read[wanted], grid, block, &r, sizeof(Read), stream)
