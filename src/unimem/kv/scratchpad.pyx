# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True, cdivision=True
"""Scratchpads: append-only rows of one width, in one piece or in blocks.

`_Rows` checks and counts, and touches no memory. `_HostRows` appends in main memory: `Scratchpad`
to one buffer, `PagedScratchpad` to blocks of a pool. `DeviceScratchpad` queues on a CUDA stream.
"""
import numpy as np

from unimem.errors import CacheFull, ClosedError
from unimem.base.arguments import string
from unimem.system.placement import check_placement

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, uint32_t, uintptr_t
from libc.string cimport memcpy, memmove

from unimem._core cimport native as um
from unimem._core.arrays cimport (
    array_over, dtype_among, dtype_of, index_of, nbytes_of, size_of, vector_over,
)
from unimem._core.foreign cimport array_of
from unimem.kv.inputs cimport Bytes, find_bytes, on_device
from unimem._core.region cimport Region, enter_holder
from unimem._core.status cimport full_text, raise_status
from unimem._core.tape cimport Bump, Tape

#: from unimem._core.foreign import AnyArray
#: from unimem._core.tape import DeviceTape
#: from unimem.system.placement import PlacementOptions
#: _TapeT = TypeVar("_TapeT")

cnp.import_array()

cdef enum:
    # Beside the core's types, which have no double precision.
    F64 = 64
    NO_TYPE = -1
    # Releasing the interpreter's lock costs more than copying fewer bytes.
    LARGE_BYTES = 32768

cdef dict _TYPES = {"float32": um.UM_F32, "float16": um.UM_F16, "bfloat16": um.UM_BF16,
                    "float64": F64}
# The names of the types for kernels.
cdef dict _KERNEL_TYPES = {um.UM_F32: "f32", um.UM_F16: "f16", um.UM_BF16: "bf16", F64: "f64"}
cdef object MOST_BYTES = 2**63 - 1, MOST_BLOCKS = 2**31 - 1


cdef int _type_of(int number) except -2:
    """Return the type for one of NumPy's type numbers."""
    if number == cnp.NPY_FLOAT32:
        return um.UM_F32
    if number == cnp.NPY_FLOAT16:
        return um.UM_F16
    if number == cnp.NPY_FLOAT64:
        return F64
    if number == (<cnp.dtype>dtype_of("bfloat16")).type_num:
        return um.UM_BF16
    return NO_TYPE


cdef um.um_status _copy(void *out, int out_type, const void *rows, int given, size_t n,
                        um.um_error *err) noexcept nogil:
    """Copy n values, and convert them if the types differ."""
    cdef size_t i
    if given != out_type:
        if out_type != F64:
            return um.um_convert(out, <um.um_dtype>out_type, rows, <um.um_dtype>given, n, err)
        for i in range(n):
            (<double *>out)[i] = (<const float *>rows)[i]
    else:
        # The source may be a view of rows that were cropped, and overlap the new rows.
        memmove(out, rows, n * _value_bytes(out_type))
    return um.UM_OK


cdef size_t _value_bytes(int type) noexcept nogil:
    return sizeof(double) if type == F64 else um.um_dtype_block_bytes(<um.um_dtype>type)


#: class _Rows(Generic[_TapeT]):
cdef class _Rows:
    """The common part of scratchpads: tokens that are appended, and cropped at the end."""
    #: tape: _TapeT
    #: dtype: np.dtype[Any]

    cdef size_t prepare(self, object max_tokens, str what, object dim, object dtype,
                        str name) except 0:
        # A flag, set first: converting the arguments may call this again.
        if self._begun:
            raise RuntimeError(f"the {type(self).__name__} is made already")
        self._begun = True
        named = dtype_among(dtype, _TYPES, "dtype").name
        self.name = name
        self.dtype = dtype_of(named)
        self.type = _TYPES[named]
        self.capacity = size_of(max_tokens, what, 1)
        self.dim = size_of(dim, "dim", 1)
        nbytes = nbytes_of((self.capacity, self.dim), self.dtype.itemsize)
        if nbytes > MOST_BYTES:
            raise ValueError(f"{what} and dim: {max_tokens} rows of {dim} {named} are too large: "
                             f"expected below 2**63 bytes, got {nbytes}")
        self.row_bytes = self.dim * <size_t>self.dtype.itemsize
        return nbytes

    cdef object check_open(self):
        if not self._open:
            raise ClosedError(f"{type(self).__name__} '{self.name}' is closed")
        self.tape.check_open()

    cdef object check_idle(self):
        if self._appending:
            raise RuntimeError(f"{type(self).__name__} '{self.name}': another thread appends to "
                               "it: one writes at a time")

    cdef object fail(self, um.um_error *err):
        raise_status(err.status, err, f"{type(self).__name__} '{self.name}'", CacheFull, "blocks")

    cdef object check_shape(self, object shape, bint batch):
        if len(shape) == batch + 1 and shape[batch] == self.dim:
            return
        call, expected = "append: expected vec", f"({self.dim},)"
        if batch:
            call, expected = "append_batch: expected rows", f"(n, {self.dim})"
        raise ValueError(f"{type(self).__name__}.{call} of shape {expected}, got {shape}")

    cdef int check_tokens(self, int given, object rows, Py_ssize_t n) except -1:
        if given != self.type:
            self._check_type(given, rows.dtype)
        self.check_idle()
        if n > self.capacity - self.n_tokens:
            subject = f"{type(self).__name__} '{self.name}'"
            raise CacheFull(full_text(subject, n, "tokens", self.capacity, self.n_tokens),
                            self.capacity, self.n_tokens, n)
        return 0

    def _check_type(self, int given, dtype):
        accepted = (["float64", "float32"] if self.type == F64 else
                    ["float32", "float16", "bfloat16"])
        if given not in [_TYPES[name] for name in accepted]:
            raise TypeError(f"{type(self).__name__} of {self.dtype}: expected an array of "
                            f"{' or '.join(accepted)}, got {dtype}")

    cdef um.um_status give_back(self, um.um_error *err):
        return um.UM_OK

    @cython.critical_section
    def crop(self, n: int) -> None:
        """Keep the first n tokens.

        Raises
        ------
        ValueError
            There are fewer tokens.
        RuntimeError
            Another thread appends.
        ClosedError
        """
        cdef um.um_error err
        kept = index_of(n, "n")
        self.check_open()
        self.check_idle()
        if not 0 <= kept <= self.n_tokens:
            raise ValueError(f"{type(self).__name__}.crop: expected n from 0 to {self.n_tokens}, "
                             f"got {n}")
        self.most_tokens = max(self.most_tokens, self.n_tokens)
        self.n_tokens = kept
        if self.give_back(&err) != um.UM_OK:
            self.fail(&err)

    def clear(self) -> None:
        """Drop all tokens. The memory stays."""
        self.crop(0)

    @property
    def is_empty(self) -> bool:
        """Whether there is no token."""
        return len(self) == 0

    @property
    def closed(self) -> bool:
        """Whether the pad was closed."""
        return not self._open or self.tape.closed

    @cython.critical_section
    def close(self) -> None:
        """Close the pad, and give back memory of its own. Closing it twice is no error.

        Raises
        ------
        BufferError
            Views still use it, and it stays open.
        """
        if not self._open:
            return
        if self._owns_tape:
            self.tape.close()
        self._open = False

    def _freeze(self, frozen: bool) -> None:
        """Do nothing: a pad takes all memory when it is made."""

    def __enter__(self) -> Self:
        self.check_open()
        return self

    @cython.critical_section
    def __exit__(self, *exc_info: object) -> None:
        # The last live view, if there is one, keeps the memory.
        self._open = False
        if self._owns_tape:
            self.tape.__exit__()

    def __reduce__(self):
        raise TypeError(f"a {type(self).__name__} cannot be pickled: it is memory of this process. "
                        "Save as_array()")

    def __len__(self) -> int:
        self.check_open()
        return self.n_tokens

    def _figures(self):
        return f"len={self.n_tokens}, capacity={self.capacity}, dim={self.dim}"

    def __repr__(self):
        name = type(self).__name__
        return f"{name}(closed)" if self.closed else f"{name}({self._figures()})"


#: class _HostRows(_Rows[Tape]):
cdef class _HostRows(_Rows):
    """Rows in main memory."""

    cdef Region region(self):
        cdef Region found = (<Tape>self.tape).held()
        if found is None:
            self.tape.check_open()
        return found

    cdef uintptr_t address(self) noexcept:
        return 0

    cdef size_t nbytes(self) noexcept:
        return 0

    cdef size_t bytes_of(self, Py_ssize_t n) noexcept:
        return 0

    @cython.critical_section
    def _ledger_parts(self):
        if not self._open or not self.tape._holds(self.address(), self.nbytes()):
            return ()
        return (("kv", self.address(), self.nbytes(), self.bytes_of(self.n_tokens),
                 self.bytes_of(max(self.most_tokens, self.n_tokens))),)

    @cython.critical_section
    def append(self, vec: AnyArray) -> None:
        """Append one token.

        Parameters
        ----------
        vec : array
            ``[dim]``, in main memory, of NumPy, torch or any library with ``__dlpack__`` or a
            buffer, and of the pad's dtype. A pad of float32, float16 or bfloat16 also converts
            these to each other, rounding to nearest even, and a pad of float64 takes float32. An
            array that is not C-contiguous and native is copied first.

        Raises
        ------
        CacheFull
            There is no room.
        ValueError, TypeError
            A wrong shape or dtype.
        RuntimeError
            Another thread appends.
        ClosedError

        Notes
        -----
        When it raises, nothing was written.
        """
        vec = array_of(vec, "vec")
        if cnp.PyArray_NDIM(vec) != 1 or cnp.PyArray_DIMS(vec)[0] != self.dim:
            self.check_shape(vec.shape, False)
        self.append_rows(vec, 1)

    @cython.critical_section
    def append_batch(self, rows: AnyArray) -> None:
        """Append tokens, all of them or none.

        Parameters
        ----------
        rows : array
            ``[n, dim]``; otherwise as for `append`. n may be 0.

        Raises
        ------
        CacheFull, ValueError, TypeError, RuntimeError, ClosedError
            As `append`.
        """
        rows = array_of(rows, "rows")
        if cnp.PyArray_NDIM(rows) != 2 or cnp.PyArray_DIMS(rows)[1] != self.dim:
            self.check_shape(rows.shape, True)
        self.append_rows(rows, cnp.PyArray_DIMS(rows)[0])

    cdef object append_rows(self, cnp.ndarray rows, Py_ssize_t n):
        cdef um.um_error err
        cdef Region _held
        cdef int given = _type_of(cnp.PyArray_TYPE(rows))
        # Checks without a call come first: a call would show in the cost of an append.
        if not self._open or (<Tape>self.tape)._region is None:
            self.check_open()
        if given != self.type or self._appending or n > self.capacity - self.n_tokens:
            self.check_tokens(given, rows, n)
        if not cnp.PyArray_ISCARRAY_RO(rows):
            # Other threads run while the copy is made: all checks are repeated.
            self.append_rows(np.array(rows, rows.dtype.newbyteorder("="), order="C"), n)
            return
        # No other thread can close the pad while the lock is released.
        _held = self.region()
        if self.write(<const char *>cnp.PyArray_DATA(rows), given, n, &err) != um.UM_OK:
            self.fail(&err)
        # Readers see the tokens once they are complete.
        self.n_tokens += n

    cdef um.um_status write(self, const char *rows, int given, Py_ssize_t n, um.um_error *err):
        return um.UM_OK


cdef class Scratchpad(_HostRows):
    """One append-only buffer ``[max_seq_len, dim]``, which never moves.

    In spite of its name it lives as long as a conversation. Appending copies, or converts, into the
    next row, without an allocation or a system call.

    One thread writes; other threads may read views of tokens that are present. A forked child has
    its own copy; of shared memory it has no copy, and use raises ClosedError.

    Parameters
    ----------
    max_seq_len : int
        Tokens that fit.
    dim : int
        Values of a token.
    dtype : {"float32", "float16", "bfloat16", "float64"}
        The stored type.
    tape : Tape, optional
        Where the buffer is taken, such as ``layout.history``; otherwise it has a tape of its own.
    name : str, optional
        Its name in messages.
    **placement
        See `PlacementOptions`; only without `tape`.

    Attributes
    ----------
    capacity, dim : int
        Tokens that fit, and values of a token.
    dtype : numpy.dtype
        The stored type.
    tape : Tape
        What the buffer lies on.
    name : str
        Its name in messages.

    Raises
    ------
    ValueError
        A dimension below 1, an unknown dtype, or sizes whose product is too large.
    TapeFull
        `tape` has no room.
    MemoryError, PlacementError
        As `Block`.

    Examples
    --------
    >>> import numpy as np, unimem as um
    >>> with um.Scratchpad(64, 8) as pad:
    ...     pad.append(np.ones(8, "float32"))
    ...     pad.append_batch(np.zeros((2, 8), "float32"))
    ...     pad, pad.as_array().shape
    (Scratchpad(len=3, capacity=64, dim=8), (3, 8))
    """

    def __init__(self, max_seq_len: int, dim: int, dtype: npt.DTypeLike = "float32", *,
                 tape: Tape | None = None, name: str | None = None,
                 **placement: Unpack[PlacementOptions]) -> None:
        cdef Tape place
        cdef size_t nbytes = self.prepare(max_seq_len, "max_seq_len", dim, dtype,
                                          string(name, "name", "scratchpad"))
        check_placement("Scratchpad", placement)
        if tape is None:
            place = Tape(nbytes, name=self.name, category="kv", **placement)
        else:
            if placement:
                raise ValueError("a tape is placed already: "
                                 f"{', '.join(placement)} not accepted beside tape=")
            Tape._require(tape)
            place = tape
        self.base = <char *>place.take_raw(nbytes)
        self.tape, self._owns_tape = place, tape is None
        self._open = True
        enter_holder(self)

    cdef uintptr_t address(self) noexcept:
        return <uintptr_t>self.base

    cdef size_t nbytes(self) noexcept:
        return self.bytes_of(self.capacity)

    cdef size_t bytes_of(self, Py_ssize_t n) noexcept:
        return <size_t>n * self.row_bytes

    cdef um.um_status write(self, const char *rows, int given, Py_ssize_t n, um.um_error *err):
        cdef um.um_status status
        cdef char *out = self.base + <size_t>self.n_tokens * self.row_bytes
        cdef size_t n_values = <size_t>n * <size_t>self.dim
        if <size_t>n * self.row_bytes > LARGE_BYTES:
            self._appending = True
            with nogil:
                status = _copy(out, self.type, rows, given, n_values, err)
            self._appending = False
        else:
            status = _copy(out, self.type, rows, given, n_values, err)
        return status

    @cython.critical_section
    def as_array(self) -> npt.NDArray[Any]:
        """View the tokens.

        Returns
        -------
        numpy.ndarray
            ``[len, dim]``, without a copy, and writable. It does not grow, it keeps the memory
            alive, and it stays valid until its rows are overwritten, after `crop` or `clear`.

        Raises
        ------
        ClosedError
        """
        self.check_open()
        return array_over(self.base, (self.n_tokens, self.dim), self.dtype, self.region(), True)


#: class DeviceScratchpad(_Rows[DeviceTape]):
cdef class DeviceScratchpad(_Rows):
    """The part of `cuda.Scratchpad` that runs for each token.

    A subclass calls `_prepare`, and then the constructor with a tape for the rows, the device's
    driver, and its `RowKernels` for the dtype.
    """

    def _prepare(self, max_seq_len: int, dim: int, dtype: npt.DTypeLike,
                 name: str | None) -> tuple[int, str]:
        """Check the arguments, and return the pad's bytes and the name of its type for kernels."""
        nbytes = self.prepare(max_seq_len, "max_seq_len", dim, dtype,
                              string(name, "name", "scratchpad"))
        return nbytes, _KERNEL_TYPES[self.type]

    def __init__(self, Bump tape not None: DeviceTape, driver: Any, kernels: Any, *,
                 bint owns_tape) -> None:
        self.base = <uintptr_t>tape.take_raw(<size_t>self.capacity * self.row_bytes, 256)
        self.tape, self._owns_tape = tape, owns_tape
        self._driver = driver
        self._kernels = kernels
        self._open = True

    @cython.critical_section
    def append(self, vec: Any, *, stream: Any = None) -> None:
        """Queue a copy or a kernel that appends one token.

        Parameters
        ----------
        vec : cupy.ndarray, or an array on the device that has ``__dlpack__``
            ``[dim]``; of the pad's dtype it costs one asynchronous copy. A pad of float32, float16
            or bfloat16 also converts these to each other, rounding to nearest even, and a pad of
            float64 takes float32; these, and arrays with gaps, cost one launch of a kernel. The
            array may be changed or dropped once the stream has passed the append.
        stream : object, optional
            A CUDA stream; CuPy's current one by default.

        Raises
        ------
        CacheFull
            There is no room.
        ValueError, TypeError
            A wrong shape or dtype; ValueError also for rows of the pad that overlap the new row.
        RuntimeError
            Another thread appends.
        ClosedError

        Notes
        -----
        It neither allocates nor waits. When it raises, nothing was written. Captured in a CUDA
        graph, it writes the same row at every replay.
        """
        self.check_open()
        rows = on_device(self._driver, vec, "vec")
        self.check_shape(rows.shape, False)
        self.append_rows(rows, 1, stream)

    @cython.critical_section
    def append_batch(self, rows: Any, *, stream: Any = None) -> None:
        """Append tokens, all of them or none.

        Parameters
        ----------
        rows : cupy.ndarray, or an array on the device that has ``__dlpack__``
            ``[n, dim]``; otherwise as for `append`. n may be 0.
        stream : object, optional
            A CUDA stream; CuPy's current one by default.

        Raises
        ------
        CacheFull, ValueError, TypeError, RuntimeError, ClosedError
            As `append`.
        """
        self.check_open()
        rows = on_device(self._driver, rows, "rows")
        shape = rows.shape
        self.check_shape(shape, True)
        self.append_rows(rows, shape[0], stream)

    cdef object append_rows(self, object rows, Py_ssize_t n, object stream):
        cdef cnp.dtype dtype = rows.dtype
        cdef int given = _type_of(dtype.type_num)
        # Once more: code of the array's library ran meanwhile.
        self.check_open()
        if not cnp.PyArray_ISNBO(dtype.byteorder):
            raise TypeError(f"{type(self).__name__} '{self.name}': expected an array in this "
                            f"machine's byte order, got {dtype}")
        self.check_tokens(given, rows, n)
        stream = self._driver.stream(stream)
        if n == 0:
            return
        # No other thread can close the pad during a call of CUDA.
        _held = self.tape._memory
        self._appending = True
        try:
            self.queue(self.base + <size_t>self.n_tokens * self.row_bytes, rows, given, n, stream)
        finally:
            self._appending = False
        self.n_tokens += n

    cdef object queue(self, uintptr_t out, object rows, int given, Py_ssize_t n, object stream):
        cdef size_t nbytes = <size_t>n * self.row_bytes
        cdef tuple steps = rows.strides
        cdef cnp.npy_intp[2] sizes = [n, self.dim]
        cdef cnp.npy_intp[2] strides_of = [steps[0], steps[len(steps) - 1]]
        cdef Bytes bytes
        find_bytes(&bytes, rows.data.ptr, 2, sizes, strides_of, _value_bytes(given))
        if bytes.low < out + nbytes and out < bytes.end:
            raise ValueError(f"{type(self).__name__} '{self.name}': expected rows outside the new "
                             "rows of the pad, got rows that overlap them: append a copy")
        if given == self.type and bytes.in_order:
            self._driver.copy(out, bytes.at, nbytes, stream)
        else:
            strides = (0, 0, 0, *((0,) if len(steps) == 1 else ()), *steps)
            side = bytes.at, out, 1, self.dim, strides, 0, 0, self.row_bytes
            self._kernels.append(_KERNEL_TYPES[given], [side], (1, 1, n), (0, n, 0), stream)

    @cython.critical_section
    def as_array(self) -> Any:
        """View the tokens.

        Returns
        -------
        cupy.ndarray
            ``[len, dim]``, without a copy, and writable. It does not grow, it keeps the memory
            alive, and it stays valid until its rows are overwritten, after `crop` or `clear`. A
            stream other than that of the appends has to wait for these first.

        Raises
        ------
        ClosedError
        """
        self.check_open()
        memory = self.tape._memory
        return self._driver.array(memory, self.base - <uintptr_t>memory.ptr,
                                  (self.n_tokens, self.dim), self.dtype)


cdef class PagedScratchpad(_HostRows):
    """Append-only rows in blocks of `block_tokens` tokens, with a block table.

    The blocks are in a pool of its own: a block is taken for the first token that needs it, and
    returned by `crop` and `clear`. A token never moves.

    One thread writes; other threads may read views of tokens that are present. A forked child has
    its own copy; of shared memory it has no copy, and use raises ClosedError.

    Parameters
    ----------
    max_tokens : int
        Tokens that fit.
    dim : int
        Values of a token.
    dtype : {"float32", "float16", "bfloat16", "float64"}
        The stored type.
    block_tokens : int, default 16
        Tokens of a block.
    name : str, optional
        Its name in messages.
    **placement
        See `PlacementOptions`.

    Attributes
    ----------
    capacity, dim, block_tokens : int
        Tokens that fit, values of a token, tokens of a block.
    dtype : numpy.dtype
        The stored type.
    tape : Tape
        What the blocks lie on.
    name : str
        Its name in messages.

    Raises
    ------
    ValueError
        A dimension below 1, an unknown dtype, or sizes whose product is too large.
    MemoryError, PlacementError
        As `Block`.

    Examples
    --------
    >>> import numpy as np, unimem as um
    >>> with um.PagedScratchpad(64, 8) as pad:
    ...     pad.append_batch(np.ones((17, 8), "float32"))
    ...     pad, pad.get_token(-1).shape
    (PagedScratchpad(len=17, capacity=64, dim=8, blocks=2/4), (8,))
    """

    def __init__(self, max_tokens: int, dim: int, dtype: npt.DTypeLike = "float32", *,
                 block_tokens: int = 16, name: str | None = None,
                 **placement: Unpack[PlacementOptions]) -> None:
        self.prepare(max_tokens, "max_tokens", dim, dtype,
                     string(name, "name", "paged scratchpad"))
        check_placement("PagedScratchpad", placement)
        cdef um.um_error err
        cdef size_t nbytes, table_bytes
        self.block_tokens = size_of(block_tokens, "block_tokens", 1)
        n_blocks = self.blocks_for(self.capacity)
        block_bytes = nbytes_of((self.block_tokens, self.dim), self.dtype.itemsize)
        if n_blocks > MOST_BLOCKS or block_bytes > MOST_BYTES // 2:
            raise ValueError(f"max_tokens and block_tokens: {n_blocks} blocks of {block_tokens} "
                             "tokens are too many or too large: expected at most "
                             f"{MOST_BLOCKS} blocks, each below 2**62 bytes")
        if um.um_grid_bytes(block_bytes, n_blocks, &nbytes, &err) != um.UM_OK:
            raise_status(err.status, &err, f"PagedScratchpad '{self.name}'")
        table_bytes = n_blocks * sizeof(int32_t)
        cdef Tape place = Tape(<object>nbytes + table_bytes, name=self.name, category="kv",
                               **placement)
        if um.um_grid_init(&self.grid, &place.tape, block_bytes, n_blocks, &err) != um.UM_OK:
            place.fail(&err)
        self.table = <int32_t *>place.take_raw(table_bytes)
        self.tape, self._owns_tape = place, True
        self._open = True
        enter_holder(self)

    cdef uintptr_t address(self) noexcept:
        return <uintptr_t>(<Tape>self.tape).tape.base

    cdef size_t nbytes(self) noexcept:
        return um.um_tape_used(&(<Tape>self.tape).tape)

    cdef size_t bytes_of(self, Py_ssize_t n) noexcept:
        return <size_t>self.blocks_for(n) * self.grid.cell_bytes

    @cython.final
    cdef Py_ssize_t blocks_for(self, Py_ssize_t n):
        return n // self.block_tokens + (n % self.block_tokens != 0)

    @cython.final
    cdef char *row(self, Py_ssize_t i) noexcept nogil:
        return (<char *>self.grid.base + <size_t>self.table[i // self.block_tokens]
                * self.grid.cell_bytes + <size_t>(i % self.block_tokens) * self.row_bytes)

    @cython.final
    cdef um.um_status take_blocks(self, Py_ssize_t n, um.um_error *err):
        """Take blocks until n are in use."""
        cdef uint32_t cell
        cdef um.um_status status
        while self.n_in_use < n:
            status = um.um_grid_take(&self.grid, &cell, err)
            if status != um.UM_OK:
                return status
            self.table[self.n_in_use] = <int32_t>cell
            self.n_in_use += 1
        return um.UM_OK

    @cython.final
    cdef um.um_status copy_in(self, const char *rows, int given, Py_ssize_t n,
                              um.um_error *err) noexcept nogil:
        cdef Py_ssize_t at = self.n_tokens, part
        cdef size_t given_bytes = <size_t>self.dim * _value_bytes(given)
        cdef um.um_status status
        while n > 0:
            part = min(n, self.block_tokens - at % self.block_tokens)
            status = _copy(self.row(at), self.type, rows, given, <size_t>(part * self.dim), err)
            if status != um.UM_OK:
                return status
            rows += <size_t>part * given_bytes
            at += part
            n -= part
        return um.UM_OK

    cdef void copy_out(self, char *out, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t at = 0, part
        while at < n:
            part = min(n - at, self.block_tokens)
            memcpy(out, self.row(at), <size_t>part * self.row_bytes)
            out += <size_t>part * self.row_bytes
            at += part

    cdef um.um_status write(self, const char *rows, int given, Py_ssize_t n, um.um_error *err):
        cdef um.um_status status = self.take_blocks(self.blocks_for(self.n_tokens + n), err)
        if status == um.UM_OK:
            if <size_t>n * self.row_bytes > LARGE_BYTES:
                self._appending = True
                with nogil:
                    status = self.copy_in(rows, given, n, err)
                self._appending = False
            else:
                status = self.copy_in(rows, given, n, err)
        if status != um.UM_OK:
            self.give_back(NULL)
        return status

    cdef um.um_status give_back(self, um.um_error *err):
        cdef Py_ssize_t needed = self.blocks_for(self.n_tokens)
        cdef um.um_status status
        cdef Region held = (<Tape>self.tape).held()
        while held is not None and self.n_in_use > needed:
            # The last block first, so that blocks are taken again in their order.
            status = um.um_grid_give(&self.grid, self.table[self.n_in_use - 1], err)
            if status != um.UM_OK:
                return status
            self.n_in_use -= 1
        return um.UM_OK

    @cython.critical_section
    def get_token(self, i: SupportsIndex) -> npt.NDArray[Any]:
        """View one token.

        Parameters
        ----------
        i : int
            Its number; negative numbers count from the end.

        Returns
        -------
        numpy.ndarray
            ``[dim]``, without a copy, and writable. It keeps the memory alive. After `crop` or
            `clear` other tokens may take the token's block: the view then shows those.

        Raises
        ------
        IndexError
            There is no such token.
        ClosedError
        """
        at = index_of(i, "i")
        self.check_open()
        if not -self.n_tokens <= at < self.n_tokens:
            raise IndexError(f"PagedScratchpad.get_token: expected i of one of {self.n_tokens} "
                             f"tokens, got {i}")
        return vector_over(self.row(at if at >= 0 else at + self.n_tokens), self.dim, self.dtype,
                           self.region(), True)

    @cython.critical_section
    def as_array(self) -> npt.NDArray[Any]:
        """Copy the tokens.

        Returns
        -------
        numpy.ndarray
            ``[len, dim]``.

        Raises
        ------
        ClosedError
        """
        self.check_open()
        # No other thread can close the pad meanwhile.
        cdef Region _held = self.region()
        # The current number: the writer may append meanwhile.
        cdef Py_ssize_t n = self.n_tokens
        cdef cnp.ndarray out = np.empty((n, self.dim), self.dtype)
        if <size_t>n * self.row_bytes > LARGE_BYTES:
            with nogil:
                self.copy_out(<char *>cnp.PyArray_DATA(out), n)
        else:
            self.copy_out(<char *>cnp.PyArray_DATA(out), n)
        return out

    @property
    @cython.critical_section
    def block_table(self) -> npt.NDArray[np.int32]:
        """A copy of the block table, int32: the number in the pool of each block in use."""
        self.check_open()
        return vector_over(self.table, self.n_in_use, dtype_of("int32"), self.region(),
                           False).copy()

    @property
    def n_blocks(self) -> int:
        """Blocks in the pool."""
        return self.grid.n_cells

    @property
    def n_blocks_in_use(self) -> int:
        """Blocks that hold tokens."""
        self.check_open()
        return self.n_in_use

    def _figures(self):
        return f"{_Rows._figures(self)}, blocks={self.n_in_use}/{self.n_blocks}"
