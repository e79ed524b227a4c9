# The first bytes of a model file, for the classes that parse its header.
from unimem._core cimport native as um
from unimem._core.region cimport Region

# The place of a name in a copy, in bytes.
cdef struct named:
    um.uint64_t offset, nbytes

# A tensor: dimension i in NumPy's order is dims[i * step], and its offset counts from the header.
cdef struct tensor_facts:
    const um.uint64_t *dims
    Py_ssize_t step, n_dims
    um.uint64_t offset, nbytes
    um.uint32_t type

cdef class HeaderBytes:
    # The private copy of the file's first bytes. Headers are never read from a mapping, where a
    # truncation of the file would end this process.
    cdef Region _region
    cdef const unsigned char *_bytes
    # The names once the copy was freed, behind the end of each.
    cdef bytes _kept
    # The size of the model's file, and where it begins in the file that holds it.
    cdef um.uint64_t _file_nbytes, _begin
    # Reads first_nbytes, or more if the parser needs them; raises `format` for a broken rule.
    cdef int read(self, source, str path, um.uint64_t first_nbytes, type format) except -1
    cdef int fetch(self, source, str path, um.uint64_t nbytes) except -1
    # Frees the copy behind the header.
    cdef void give_back_behind(self, size_t end) noexcept
    # The copy, which a reader must hold: a collection may close the header meanwhile.
    cdef Region opened(self)
    # The parser of the format, over the first nbytes.
    cdef um.um_status parse(self, size_t nbytes, um.um_error *err) noexcept nogil
    # The keys of the metadata, and the tensors; the name of a type of these, and ggml's number.
    cdef um.uint64_t n_keys(self)
    cdef um.uint64_t n_tensors(self)
    cdef tensor_facts facts(self, um.uint64_t i) noexcept
    cdef str type_name(self, um.uint32_t type)
    cdef object ggml_number(self, um.uint32_t type)
    # The names as they lie in the file, the keys first, and what they are in Python.
    cdef named name_place(self, um.uint64_t i) noexcept
    cdef str text(self, const unsigned char *utf8, um.uint64_t nbytes)
    cdef str name(self, um.uint64_t i)
    cdef bytes names(self)
