# The first bytes of a model file, for the classes that parse its header.
from unimem._core cimport native as um
from unimem._core.region cimport Region

# Sorts tensors, as (offset, nbytes, type), and joins those of a type that follow on each other.
cdef list join_runs(list rows)

cdef class HeaderBytes:
    # The private copy of the file's first bytes. Nothing is read from the mapping of the file, so
    # that somebody who truncates it cannot end this process.
    cdef Region _region
    cdef const unsigned char *_bytes
    cdef um.uint64_t _file_nbytes
    # Reads what the parser asks for, from first_nbytes on; raises `format` where it finds a rule
    # broken.
    cdef int read(self, int fd, str path, um.uint64_t first_nbytes, type format) except -1
    # Gives back what of the copy is behind the header.
    cdef void give_back_behind(self, size_t end) noexcept
    # The copy, for whoever reads it to hold: a collection may close the header meanwhile.
    cdef Region opened(self)
    # The parser of the format, over the first nbytes.
    cdef um.um_status parse(self, size_t nbytes, um.um_error *err) noexcept nogil
