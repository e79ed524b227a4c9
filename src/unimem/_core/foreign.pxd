# Arrays of other libraries.
cimport numpy as cnp

from unimem._core.dlpack cimport DLTensor

# An array over the memory of `x`, to be read: of NumPy itself, or of whoever has DLPack or the
# buffer protocol. What is none, or is not in main memory, raises TypeError, which names `what`.
# It may run Python code.
cdef cnp.ndarray array_of(object x, str what)
# The same of what is none of NumPy's.
cdef cnp.ndarray foreign_array(object x, str what)
# The same of what is to be written: read-only where its owner says so.
cdef cnp.ndarray target_of(object x, str what)
# Describe an object of a library that has DLPack's C exchange API, such as torch, on any device;
# and, unless `stream` is NULL, find the library's current stream there. Returns what holds the
# memory, or None if its type has no such functions.
cdef object described(DLTensor *out, void **stream, object x, str what)
# The dtype of its elements; TypeError if NumPy and ml_dtypes have none.
cdef object dtype_of_tensor(const DLTensor *tensor, str what)
