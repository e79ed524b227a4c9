# Which steps of a block's reserved addresses are usable: committing, releasing and replacing them.
from libc.stdint cimport uint64_t

from unimem._core.region cimport Region

# Commits ranges, (offset, nbytes), of which `missing` is not there yet: all of them, or nothing.
cdef int grow(Region region, object choice, str path, list ranges, list missing) except -1
# Raises BufferError where whole steps of a range are in use.
cdef int check_unused(Region region, size_t first, size_t size) except -1
# Gives whole steps of a range back, and returns their bytes.
cdef object release_range(Region region, size_t first, size_t size)
# Drops the pages of whole steps of a range, which stay committed, and returns their bytes.
cdef object discard_range(Region region, size_t first, size_t size)
# Commits a range as a private mapping of a file.
cdef int overlay_range(Region region, size_t first, int fd, uint64_t start, size_t size) except -1
