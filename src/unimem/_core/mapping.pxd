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

# A category by the name of its row, or as the ledger calls it; ValueError for none.
cdef um.um_category category_of(object category) except *
# What a block is asked to be that is made of a mapping.
cdef dict requested_of(Region region, bint shared)
# What a request was granted: (region, what `policy.decide` chose). With a source, a sealed copy.
cdef tuple map_request(str name, object request, um.um_category category, int fd, bint strict,
                       Region source)
# A mapping of a part of a file.
cdef Region map_file(int fd, uint64_t start, size_t size, um.um_access access,
                     um.um_category category, str file)
# A mapping of shared memory that another block has made; `label` stands in messages.
cdef Region attach_file(int fd, bint writable, um.um_category category, str label)
# Puts what is in RAM into huge pages; raises PlacementError where the kernel cannot, if asked to.
cdef int collapse_region(Region region, bint raises) except -1
# Moves pages to where the NUMA policy says, and returns the bytes that are left elsewhere.
cdef object repair_region(Region region, str path)
# Locks it as was chosen. Returns the choice as it turned out, and says in `problems` what failed.
cdef object lock_region(Region region, object choice, list problems)
# Locks all of it (True, "onfault") or unlocks it (False). Returns what it was.
# Messages name what was asked for.
cdef object lock_all(Region region, object how, object asked)
# What um_block_pages says: flags and, if they are asked for, nodes (else None) of base pages.
cdef tuple pages_of(Region region, size_t offset, size_t nbytes, bint with_nodes)
# Brings a part into RAM, `before` of `total` bytes being there already; with a path in /dev/shm,
# or None. With `write`, pages of a file become writable, too.
cdef int warm_region(Region region, object choice, str path, size_t offset, size_t nbytes,
                     unsigned n_threads, object progress, size_t before, size_t total,
                     bint write=*) except -1
# What the kernel says of it now, a Placement.
cdef object placement_of(Region region)
# The bytes of memory under so much of its address space.
cdef size_t memory_bytes(Region region, size_t nbytes)
# How many bytes of a part are in RAM, in whole pages.
cdef object resident_bytes(Region region, size_t offset, size_t nbytes)
# Raises CapacityError or PlacementError where what is not in RAM of parts, (offset, nbytes), has no
# room there.
cdef object require_room(Region region, str name, object choice, list runs)
# Raises what a failure means, where the status alone does not tell what to do.
cdef object explain(Region region, str path, um.um_status status, const um.um_error *err, str doing)
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
