# Arrays of other libraries.
cimport numpy as cnp

# An array over the memory of `x`, to be read: of NumPy itself, or of whoever has DLPack or the
# buffer protocol. What is none, or is not in main memory, raises TypeError, which names `what`.
# It may run Python code.
cdef cnp.ndarray array_of(object x, str what)
# The same of what is none of NumPy's.
cdef cnp.ndarray foreign_array(object x, str what)
# The same of what is to be written: read-only where its owner says so.
cdef cnp.ndarray target_of(object x, str what)
