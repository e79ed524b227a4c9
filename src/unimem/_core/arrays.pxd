# Arrays over memory, for Cython callers.
cimport numpy as cnp

cdef enum:
    MAX_DIMS = 32

# An integer of Python or NumPy, as an int; anything else raises a TypeError that names `what`.
cdef object index_of(object n, str what)
# A size or a count of at least `least`; anything else raises ValueError or TypeError.
cdef size_t size_of(object n, str what, object least=*) except? 0
cdef size_t bytes_of(object n, str what, object least=*) except? 0
# A shape (a number or a sequence of them) as a tuple of at most MAX_DIMS integers of 0 or above.
cdef tuple dims_of(object shape)
# The bytes of an array of these dimensions, of any size.
cdef object nbytes_of(tuple dims, object itemsize)
# The same tuple for an array of a dtype (None: as large as fits) at an offset into the `nbytes`
# bytes at `base`; raises ValueError if it does not fit.
cdef tuple shape_within(str name, size_t base, size_t nbytes, size_t offset, object shape,
                        object dtype)
# An ndarray over `address`, which keeps `owner` alive; `dims` is what dims_of gave.
cdef object array_over(void *address, tuple dims, object dtype, object owner, bint writable)
# The same with one dimension.
cdef object vector_over(void *address, cnp.npy_intp n, object dtype, object owner, bint writable)
# The same with strides in bytes; NULL: those of a C-contiguous array.
cdef object new_array(void *address, int n_dims, const cnp.npy_intp *sizes,
                      const cnp.npy_intp *strides, object dtype, object owner, bint writable)
# The same for internal use: always NumPy's class, even for types that it does not export.
cdef object plain_array(void *address, int n_dims, const cnp.npy_intp *sizes,
                        const cnp.npy_intp *strides, object dtype, object owner, bint writable)
# The NumPy dtype that a user names: see as_dtype.
cdef object dtype_of(object dtype)
# The same if it is among some names; otherwise a ValueError names `what`.
cdef object dtype_among(object dtype, object among, str what)
