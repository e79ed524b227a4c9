# Mapping regions: from a request to memory, its growth, warming and locks, and its placement.
from libc.stdint cimport uint64_t

from unimem._core cimport native as um
from unimem._core.region cimport Region

cdef enum:
    MOST_THREADS = 512

cdef dict ADVICES
cdef dict PAGES
cdef dict PAGE_NAMES
cdef size_t THP_BYTES

# A category by the name of its row or of the ledger; raises ValueError for another name.
cdef um.um_category category_of(object category) except *
# The request of a block over an existing mapping.
cdef dict requested_of(Region region, bint shared)
# Grants a request: (region, the choice of `policy.decide`). With a source, a sealed copy.
cdef tuple map_request(str name, object request, um.um_category category, int fd, bint strict,
                       Region source)
# Maps a part of a file.
cdef Region map_file(int fd, uint64_t start, size_t size, um.um_access access,
                     um.um_category category, str file)
# A region over the whole pages that a memoryview touches, which it keeps; it is in no list.
cdef Region lend_memory(object owner)
# Maps shared memory of another block; `label` is its name in messages.
cdef Region attach_file(int fd, bint writable, um.um_category category, str label)
# Moves memory in RAM into huge pages; with `raises`, raises PlacementError if the kernel cannot.
cdef int collapse_region(Region region, bint raises) except -1
# Moves pages to where the NUMA policy wants them; returns the bytes left elsewhere.
cdef object repair_region(Region region, str path)
# Locks as chosen. Returns the choice as it turned out, and adds failures to `problems`.
cdef object lock_region(Region region, object choice, list problems)
# Locks all (True, "onfault") or unlocks all (False). Returns the former state. Messages name what
# was asked for.
cdef object lock_all(Region region, object how, object asked)
# Flags of base pages and, with `with_nodes`, their nodes (else None), by um_block_pages.
cdef tuple pages_of(Region region, size_t offset, size_t nbytes, bint with_nodes)
# Brings a part into RAM. `path` is one in /dev/shm, or None; `progress` is None, or a callable, the
# bytes that are done already and the total. With `write`, pages of a file become writable, too.
cdef int warm_region(Region region, object choice, str path, size_t offset, size_t nbytes,
                     unsigned n_threads, tuple progress, bint write=*) except -1
# The Placement, read from the kernel now.
cdef object placement_of(Region region)
# The bytes of memory behind `nbytes` of address space.
cdef size_t memory_bytes(Region region, size_t nbytes)
# Bytes of a part in RAM, in whole pages.
cdef object resident_bytes(Region region, size_t offset, size_t nbytes)
# Raises CapacityError or PlacementError if parts (offset, nbytes) that are not in RAM do not fit.
cdef object require_room(Region region, str name, object choice, list runs)
# Raises the exception of a failed call, with advice that the status alone does not give.
cdef object explain(Region region, str path, um.um_status status, const um.um_error *err, str doing)
# Commits ranges (offset, nbytes), all or nothing; `missing` are those not committed yet.
cdef int grow(Region region, object choice, str path, list ranges, list missing) except -1
# Raises BufferError if whole steps of a range are in use.
cdef int check_unused(Region region, size_t first, size_t size) except -1
# Gives whole steps of a range back, and returns their bytes.
cdef object release_range(Region region, size_t first, size_t size)
# Drops the pages of whole steps of a range, which stay committed, and returns their bytes.
cdef object discard_range(Region region, size_t first, size_t size)
# Commits a range as a private mapping of a file.
cdef int overlay_range(Region region, size_t first, int fd, uint64_t start, size_t size) except -1
