# cython: language_level=3, boundscheck=False, wraparound=False
"""Tapes: bump allocators over a block."""
import os
import warnings
import weakref
from contextlib import contextmanager

import numpy as np

from unimem.system import policy
from unimem.base.arguments import string
from unimem.errors import ClosedError, TapeFull
from unimem.base.text import format_bytes

cimport cython
cimport numpy as cnp
from cpython.ref cimport PyObject
from libc.stdint cimport uintptr_t
from libc.string cimport memset

from unimem._core cimport native as um
from unimem._core.arrays cimport (
    array_over, bytes_of, dims_of, dtype_of, index_of, nbytes_of, size_of, vector_over,
)
from unimem._core.block cimport Block
from unimem._core.foreign cimport array_of
from unimem._core.lock cimport hold, let_go
from unimem._core.region cimport Region, enter_holder, n_references
from unimem._core.status cimport full_text, raise_status

#: from unimem.system.placement import PlacementOptions
#: _BlockT = TypeVar("_BlockT")

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object n, int *overflow) except? -1
    PyObject *PyDict_GetItemWithError(object mapping, object key) except? NULL

cnp.import_array()

cdef enum:
    POISON = 0xDB
    MOST_REMEMBERED = 4096

# The address of arrays without elements.
cdef double _nothing = 0


# Tapes over memory that forked children do not inherit, and the message there. They are closed in
# the child; every take checks for that anyway.
cdef object _absent_in_child = weakref.WeakKeyDictionary()


def _lose_absent():
    cdef Bump bump
    for bump, why in list(_absent_in_child.items()):
        bump._left_out = why
        bump.lose()


os.register_at_fork(after_in_child=_lose_absent)


cdef inline size_t _fast_size(object n, str what) except? 0:
    """`size_of`, where most sizes are Python's integers."""
    cdef int overflow = 0
    cdef long long size
    if type(n) is int:
        size = PyLong_AsLongLongAndOverflow(n, &overflow)
        if overflow == 0 and size >= 0:
            return <size_t>size
    return size_of(n, what)


# The alignment of nearly all takes: one object wherever Python code has this literal.
cdef object _ALIGN = 64


cdef inline size_t _align_of(object align) except? 0:
    return 64 if align is _ALIGN else _fast_size(align, "align")


# Modules and the dtypes that their `from_dlpack` takes.
cdef set _taken_by = set()


cdef object _from_dlpack_of(object like, object descr):
    """Return a module's `from_dlpack`, after trying that it takes arrays of a dtype."""
    from_dlpack = getattr(like, "from_dlpack", None)
    if not callable(from_dlpack):
        raise TypeError("like: expected a module that has from_dlpack, such as torch, got "
                        f"{like!r:.60}")
    # Tried before anything is taken, since a single take cannot be given back.
    if (from_dlpack, descr) not in _taken_by:
        try:
            from_dlpack(vector_over(&_nothing, 0, descr, None, True))
        except Exception as error:
            said = str(error).partition("\n")[0]
            raise TypeError(f"like: expected a module whose from_dlpack takes {descr}, got one "
                            f"that says: {said:.200}") from None
        _taken_by.add((from_dlpack, descr))
    return from_dlpack


cdef str _public_name(object kind):
    """Return the public name of a class, such as unimem.Tape, not that of its module."""
    package = kind.__module__.rpartition(".")[0].removesuffix("._core")
    return f"{package}.{kind.__name__}" if package else kind.__name__


#: class Bump(Generic[_BlockT]):
cdef class Bump:
    """The arithmetic of a tape over a range of addresses, which it never touches.

    A subclass owns the memory: `_n_views` counts live views, `_address_of` returns the address of
    an array of the device (or its argument), `_overwrite(address, nbytes)` spoils memory that was
    taken back, and `_where` describes the memory for `repr`.
    """

    def __init__(self, str name, block: _BlockT, address: int, total: int, *,
                 bint owns_block) -> None:
        cdef um.um_error err
        if self.tape.base != NULL:
            raise RuntimeError("the Tape is made already")
        self.name = name
        if um.um_tape_init(&self.tape, <void *><uintptr_t>address, total, &err) != um.UM_OK:
            self.fail(&err)
        self._block = block
        self._owns_block = owns_block
        self._poison = os.environ.get("UNIMEM_DEBUG", "0") not in ("", "0")
        self._open = True

    @classmethod
    def _require(cls, tape: object) -> None:
        """Raise TypeError for anything but a tape of this kind."""
        if not isinstance(tape, cls):
            raise TypeError(f"tape: expected a {_public_name(cls)}, got "
                            f"{_public_name(type(tape))}")

    cdef object fail(self, um.um_error *err):
        raise_status(err.status, err, f"Tape '{self.name}'", TapeFull)

    cdef object check_open(self):
        if self._left_out is not None:
            raise ClosedError(f"Tape '{self.name}' {self._left_out}")
        if not self._open:
            raise ClosedError(f"Tape '{self.name}' is closed")

    cdef object lose(self):
        self.close_down()

    cdef object close_down(self):
        self._open = False

    cdef void *take_raw(self, size_t nbytes, size_t align=64) except NULL nogil:
        cdef um.um_error err
        cdef void *address
        if not self._open:
            with gil:
                self.check_open()
        if um.um_tape_take(&self.tape, nbytes, align, &address, &err) != um.UM_OK:
            with gil:
                self.fail(&err)
        return address

    cdef size_t check_fits(self, object nbytes) except? 0:
        if nbytes > self.tape.total:
            used = self.used_bytes
            raise TapeFull(full_text(f"Tape '{self.name}'", nbytes, "bytes", self.tape.total, used),
                           self.tape.total, used, nbytes)
        return nbytes

    #: def _holds(self, address: int, nbytes: int) -> bool: ...
    cpdef bint _holds(self, uintptr_t address, size_t nbytes):
        cdef uintptr_t base = <uintptr_t>self.tape.base
        return (self._open and address >= base
                and address - base + nbytes <= um.um_tape_used(&self.tape))

    def take_address(self, nbytes: int, align: int = 64) -> int:
        """Take `nbytes` bytes like `take`, and return their address."""
        return <uintptr_t>self.take_raw(_fast_size(nbytes, "nbytes"), _align_of(align))

    @cython.critical_section
    def clear(self) -> None:
        """Take everything back except kept memory, in O(1); nothing is zeroed."""
        self.check_open()
        if self._tenants is not None:
            self.give_notice(0)
        self.poison_down_to(0)
        um.um_tape_clear(&self.tape)

    @cython.critical_section
    def keep(self) -> None:
        """Keep all memory taken so far: `clear` and `rewind` stop there from now on."""
        self.check_open()
        um.um_tape_keep(&self.tape)

    def mark(self) -> int:
        """Return a mark for `rewind`: the bytes used so far."""
        self.check_open()
        return um.um_tape_mark(&self.tape)

    @cython.critical_section
    def rewind(self, mark: int) -> None:
        """Take back everything taken after `mark`, except kept memory.

        Raises
        ------
        ValueError
            The mark is above `used_bytes`: it was taken back already.
        """
        cdef um.um_error err
        self.check_open()
        cdef size_t floor = size_of(mark, "mark")
        cdef size_t used = um.um_tape_used(&self.tape)
        if floor > used:
            raise ValueError(f"Tape '{self.name}': mark: expected at most the {used} bytes that "
                             f"are used, got {floor}, which was taken back")
        if floor < used:
            if self._tenants is not None:
                self.give_notice(floor)
            self.poison_down_to(floor)
        if um.um_tape_rewind(&self.tape, floor, &err) != um.UM_OK:
            self.fail(&err)

    cdef object poison_down_to(self, size_t floor):
        cdef size_t used, kept
        if self._poison:
            used = um.um_tape_used(&self.tape)
            kept = um.um_tape_kept(&self.tape)
            floor = max(floor, kept)
            if used > floor:
                self._overwrite(<uintptr_t>self.tape.base + floor, used - floor)

    @cython.critical_section
    def _tell(self, tenant: object, end: int) -> None:
        """Call ``tenant.end(reason)`` once bytes below `end` are taken back, while it is alive."""
        if self._tenants is None:
            self._tenants = weakref.WeakKeyDictionary()
        self._tenants[tenant] = end

    cdef object give_notice(self, size_t floor):
        floor = max(floor, um.um_tape_kept(&self.tape))
        for tenant, end in list(self._tenants.items()):
            if end > floor:
                del self._tenants[tenant]
                tenant.end(f"lay on Tape '{self.name}', which took the memory back")

    @contextmanager
    def frame(self) -> Iterator[Self]:
        """Take back, at the end of the ``with``, everything taken inside."""
        mark = self.mark()
        try:
            yield self
        finally:
            # If the tape was cleared or closed inside, this was taken back already.
            if self._open:
                self.rewind(min(mark, self.used_bytes))

    def freeze(self) -> None:
        """Refuse every further take with `FrozenError`, until `thaw`."""
        self._freeze_at(0)

    def _freeze_at(self, size_t limit) -> None:
        """Refuse takes that would pass `limit` bytes."""
        cdef um.um_error err
        self.check_open()
        if um.um_tape_freeze(&self.tape, limit, &err) != um.UM_OK:
            self.fail(&err)

    def thaw(self) -> None:
        """Allow takes again."""
        self.check_open()
        um.um_tape_thaw(&self.tape)

    def owns(self, array_or_address: Any) -> bool:
        """Whether an array's first byte, or an address, lies in the tape's memory."""
        self.check_open()
        # NumPy's arrays may also lie in pinned memory of a device's tape.
        if isinstance(array_or_address, np.ndarray):
            address = array_or_address.ctypes.data
        else:
            address = index_of(self._address_of(array_or_address), "array_or_address")
        return (0 <= address <= <uintptr_t>-1
                and bool(um.um_tape_owns(&self.tape, <void *><uintptr_t>address)))

    @property
    def used_bytes(self) -> int:
        """Bytes up to the end of the last take, including padding for alignment."""
        self.check_open()
        return um.um_tape_used(&self.tape)

    @property
    def available_bytes(self) -> int:
        """Bytes left."""
        return self.tape.total - self.used_bytes

    @property
    def total_bytes(self) -> int:
        """The tape's size in bytes."""
        return self.tape.total

    @property
    def high_water_bytes(self) -> int:
        """The most that `used_bytes` has ever been."""
        self.check_open()
        return um.um_tape_high_water(&self.tape)

    @property
    def n_takes(self) -> int:
        """How often something was taken."""
        return um.um_tape_n_takes(&self.tape)

    @property
    def frozen(self) -> bool:
        """Whether takes are refused."""
        return bool(um.um_tape_frozen(&self.tape))

    @property
    @cython.critical_section
    def block(self) -> _BlockT:
        """The block under the tape."""
        self.check_open()
        return self._block

    @property
    def closed(self) -> bool:
        """Whether the tape was closed."""
        return not self._open

    @cython.critical_section
    def close(self) -> None:
        """Close the tape, and give its block back if the tape owns it.

        Raises
        ------
        BufferError
            Arrays still use the tape's own block; it stays open.
        """
        if self._open:
            self._check_unused()
            self._release()

    def _check_unused(self) -> None:
        """Raise BufferError if `close` would."""
        if self._owns_block and self._open:
            n_views = self._n_views()
            if n_views > 0:
                raise BufferError(f"Tape '{self.name}' has {n_views} live views: drop them first, "
                                  "or leave a 'with'")

    cdef object _release(self):
        self.close_down()
        if self._owns_block and self._block is not None:
            self._block.__exit__()
        self._block = None

    def __enter__(self) -> Self:
        self.check_open()
        return self

    @cython.critical_section
    def __exit__(self, *exc_info: object) -> None:
        # Live arrays keep the memory until the last of them goes.
        self._release()

    def __del__(self):
        if self._open and self._owns_block:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)

    def __reduce__(self):
        raise TypeError("a Tape cannot be pickled: it is memory of this process. "
                        "Save the arrays that are on it")

    def __repr__(self):
        if not self._open:
            return f"Tape('{self.name}', closed)"
        state = ", frozen" if self.frozen else ""
        return (f"Tape('{self.name}', {format_bytes(self.used_bytes)} of "
                f"{format_bytes(self.total_bytes)} used, {self._where()}{state})")


#: class Tape(Bump[Block]):
cdef class Tape(Bump):
    """A bump allocator: memory is taken in order and cleared all at once.

    Memory is uninitialised, as with ``np.empty``, and becomes invalid with `clear` or `rewind`: the
    array still exists, but the next take gets its memory. ``UNIMEM_DEBUG=1`` in the environment
    makes both overwrite such memory.

    Any number of threads may take at the same time, but only one may clear or rewind. A forked
    child has its own copy, but not of shared memory: using such a tape there raises ClosedError.

    Parameters
    ----------
    nbytes_or_block : int, str or Block
        A size in bytes or such as ``"64M"``, for a block that the tape owns,
        or a writable block (all of it).
    name : str, optional
        The name in messages.
    category : str, default "scratch"
        The row of reports, for a block that the tape owns.
    **placement
        See `PlacementOptions`; only with a size.

    Raises
    ------
    ValueError, MemoryError, PlacementError
        As `Block`.

    Examples
    --------
    >>> import unimem as um
    >>> with um.Tape(1 << 20) as tape:
    ...     x = tape.take((2, 3), "float32")
    ...     tape.used_bytes
    24
    """

    def __init__(self, nbytes_or_block: int | str | Block, *, name: str | None = None,
                 category: str = "scratch", **placement: Unpack[PlacementOptions]) -> None:
        cdef Block block
        cdef bint owns_block = not isinstance(nbytes_or_block, Block)
        if owns_block:
            name = string(name, "name", "tape")
            # Not rounded up like the block: a tape has the same size with every page size.
            total = bytes_of(nbytes_or_block, f"nbytes_or_block of Tape '{name}'", 1)
            block = Block(total, name=name, category=category, **placement)
            block._is_part = True
        else:
            if placement:
                raise ValueError("a block is placed already: "
                                 f"{', '.join(placement)} not accepted here")
            block = nbytes_or_block
            name = string(name, "name", block.name or "tape")
        cdef Region region = block.region()
        if not owns_block:
            hold(&region.lock)  # nothing of it is given back from here on
            total = region.block.nbytes
            let_go(&region.lock)
        if not region.writable:
            raise ValueError(f"Tape '{name}': block '{block.name}' is read-only, and what is "
                             "taken from a tape is written: map the file with mode='c', or attach "
                             "the memory with writable=True")
        Bump.__init__(self, name, block, block.address, total, owns_block=owns_block)
        self._region = region
        if region.block.access == um.UM_ACCESS_SHARED:
            _absent_in_child[self] = policy.LEFT_OUT
        enter_holder(self)

    @cython.critical_section
    def _ledger_parts(self):
        cdef Region region = self._region
        if region is None:
            return ()
        return ((region.row(), <uintptr_t>region.block.base, region.memory_bytes(),
                 um.um_tape_used(&self.tape), um.um_tape_high_water(&self.tape)),)

    cdef object close_down(self):
        cdef Region _last  # unmapped at the end, if it has no other user
        self._open = False
        hold(&self._guard)
        _last = self._region
        self._region = None
        let_go(&self._guard)

    @cython.final
    cdef Region held(self):
        cdef Region found
        hold(&self._guard)
        found = self._region
        let_go(&self._guard)
        return found

    cdef float[::1] take_floats(self, size_t n):
        return self.take(n, "float32")

    #: @overload
    #: def take(self, shape: int | Sequence[int], dtype: npt.DTypeLike = "float32", *,
    #:          align: int = 64) -> npt.NDArray[Any]: ...
    #: @overload
    #: def take(self, shape: int | Sequence[int], dtype: Any = "float32", *,
    #:          align: int = 64, like: ModuleType) -> Any: ...
    @cython.critical_section
    def take(self, shape, dtype="float32", *, align=64, like=None):
        """Take an array.

        Parameters
        ----------
        shape : int or tuple of int
            Its shape.
        dtype : dtype-like, default float32
            A dtype of NumPy, ml_dtypes or torch, or a name, also ``"f16"``, ``"f32"`` and
            ``"bf16"``.
        align : int, default 64
            The alignment of the first element in bytes: a power of two.
        like : module, optional
            The module whose ``from_dlpack`` makes the array: ``like=torch`` takes a tensor.

        Returns
        -------
        numpy.ndarray, or an array of `like`
            C-contiguous and uninitialised; invalid after `clear` or `rewind`.

        Raises
        ------
        TapeFull
            It does not fit; nothing was taken.
        TypeError
            `like` has no such dtype, or no ``from_dlpack``; nothing was taken.
        FrozenError, ClosedError, ValueError
        """
        cdef object descr = dtype_of(dtype)
        cdef size_t itemsize = (<cnp.dtype>descr).itemsize
        cdef cnp.npy_intp n
        cdef int overflow
        cdef void *address
        if like is not None:
            from_dlpack = _from_dlpack_of(like, descr)
            return from_dlpack(self.take(shape, descr, align=align))
        if type(shape) is int:
            # One dimension is by far the most frequent case, and needs no Python object.
            n = PyLong_AsLongLongAndOverflow(shape, &overflow)
            if overflow == 0 and n >= 0 and <size_t>n <= self.tape.total // itemsize:
                address = self.take_raw(<size_t>n * itemsize, _align_of(align))
                return vector_over(address, n, descr, self._region, True)
        dims = dims_of(shape)
        address = self.take_raw(self.check_fits(nbytes_of(dims, itemsize)),
                                _align_of(align))
        return array_over(address, dims, descr, self._region, True)

    def take_bytes(self, nbytes: int | str, *, align: int = 64) -> npt.NDArray[Any]:
        """Take `nbytes` bytes as a uint8 array; otherwise as `take`."""
        if type(nbytes) is not int or nbytes < 0:
            nbytes = bytes_of(nbytes, "nbytes")
        return self.take(nbytes, "uint8", align=align)

    @cython.critical_section
    def warm(self, threads: int | None = None) -> None:
        """Bring the tape's memory into RAM, as `Block.warm`."""
        self.check_open()
        self._block._warm_range(0, self.tape.total, threads)

    @property
    def _is_of_file(self) -> bool:
        """Whether its memory is a mapped file."""
        return bool((<Block>self._block).region().block.is_file)

    def _address_of(self, thing):
        # An integer of torch is an array too, not an address.
        if hasattr(thing, "__dlpack__"):
            return array_of(thing, "array_or_address").ctypes.data
        return thing

    def _overwrite(self, uintptr_t address, size_t nbytes):
        memset(<void *>address, POISON, nbytes)

    def _n_views(self):
        # The tape and its block reference the region; all others are views.
        return n_references(<PyObject *>self._region) - 2

    def _where(self):
        return "its block closed" if self._block.closed else self._block.granted


#: class DeviceTape(Bump[Any]):
cdef class DeviceTape(Bump):
    """The half of `cuda.Tape` that a decode step calls for every buffer.

    Making a CuPy array costs more than the rest of a take, so the tape remembers its arrays. A
    subclass makes them (`_new_array(offset, shape, dtype)`) and uploads the tensors of a model
    (`_upload(weights, ...)`).
    """
    #: def _upload(self, weights: Any, **options: Any) -> dict[str, Any]: ...

    def __cinit__(self, *args, **options):
        self._made = {}

    def __init__(self, str name, block: Any, total: int, str left_out, *, bint owns_block) -> None:
        memory = block._opened()
        Bump.__init__(self, name, block, block.address, total, owns_block=owns_block)
        self._memory = memory
        _absent_in_child[self] = left_out

    cdef object lose(self):
        # The arrays stay: a forked child has no CUDA to give their memory back to.
        self._open = False

    cdef object close_down(self):
        self._open = False
        self._made.clear()
        self._memory = None

    @cython.critical_section
    def take(self, shape: int | Sequence[int], dtype: npt.DTypeLike = "float32", *,
             align: int = 256) -> Any:
        """Take an array.

        After `clear` or `rewind`, the same take at the same place returns the same array object
        (unless its shape was changed), which is several times faster than ``cupy.empty``.

        Parameters
        ----------
        shape : int or tuple of int
            Its shape.
        dtype : dtype-like, default float32
            A dtype of NumPy, ml_dtypes or torch, or a name, also ``"f16"``, ``"f32"`` and
            ``"bf16"``.
        align : int, default 256
            The alignment of the first element in bytes: a power of two, at least the dtype's
            alignment. The default is that of cudaMalloc, on which vector loads and tensor maps of
            kernels rely.

        Returns
        -------
        cupy.ndarray
            C-contiguous and uninitialised; invalid after `clear` or `rewind`.

        Raises
        ------
        TapeFull
            It does not fit; nothing was taken.
        FrozenError, ClosedError, ValueError
        """
        cdef object descr = dtype_of(dtype)
        cdef size_t aligned = _align_of(align)
        if aligned < <size_t>(<cnp.dtype>descr).alignment:
            raise ValueError(f"align: expected at least {descr.alignment} for {descr}, which a GPU "
                             f"reads nowhere else, got {align}")
        cdef tuple dims = dims_of((shape,) if type(shape) is int else shape)
        cdef size_t nbytes = self.check_fits(nbytes_of(dims, descr.itemsize))
        cdef uintptr_t address = <uintptr_t>self.take_raw(nbytes, aligned)
        cdef object key = (address, dims, descr)
        cdef PyObject *found = PyDict_GetItemWithError(self._made, key)
        if found != NULL:
            array = <object>found
            if array.shape == dims:
                return array
        array = self._new_array(address - <uintptr_t>self.tape.base, dims, descr)
        # Several arrays without bytes may be in use at one place.
        if nbytes > 0:
            if len(self._made) >= MOST_REMEMBERED:
                self._made.clear()
            self._made[key] = array
        return array

    def take_bytes(self, nbytes: int | str, *, align: int = 256) -> Any:
        """Take `nbytes` bytes as a uint8 array; otherwise as `take`."""
        if type(nbytes) is not int or nbytes < 0:
            nbytes = bytes_of(nbytes, "nbytes")
        return self.take(nbytes, "uint8", align=align)

    def _n_views(self):
        # Arrays that are only remembered do not count.
        self._made.clear()
        # The tape itself uses its block's memory too.
        return self._block._n_users() - 1
