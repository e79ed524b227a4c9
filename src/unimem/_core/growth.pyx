# cython: language_level=3, boundscheck=False, wraparound=False
"""Which steps of a block's reserved addresses are usable: committing, releasing and replacing."""
from unimem.system import limits, policy

from cpython.ref cimport PyObject
from libc.stdint cimport uint64_t

from unimem._core cimport native as um
from unimem._core.lock cimport hold, let_go
from unimem._core.mapping cimport PAGE_NAMES, explain, warm_region
from unimem._core.region cimport Region, n_references
from unimem._core.status cimport raise_status


cdef int grow(Region region, object choice, str path, list ranges, list missing) except -1:
    cdef um.um_error err
    cdef um.um_status status
    cdef Py_ssize_t n_undo = 0
    cdef size_t more = sum([n for _, n in missing]), begin, size
    what = f"growth of block '{region.name}'"
    region.check_steps()
    cdef bint hugetlb = region.is_hugetlb()
    policy.require_growth(region.name, more, choice, limits,
                          PAGE_NAMES[<int>region.block.requested_pages])
    if not hugetlb:
        limits.require(more, what)
    if path is not None:
        limits.require_shm(more, what)
    try:
        for begin, size in ranges:
            # A thread that makes an array looks at what is committed.
            hold(&region.lock)
            status = um.um_block_commit(&region.block, begin, size, &err)
            let_go(&region.lock)
            if status != um.UM_OK:
                explain(region, path, status, &err, what)
            n_undo += 1
        n_undo = len(missing)
        if hugetlb and policy.is_prefaulted(choice):
            for first, n in missing:
                warm_region(region, choice, path, first, n, 1, None, 0, n)
    except BaseException:
        for begin, size in missing[:n_undo]:
            # What the kernel does not take back stays committed, and in the ledger.
            region.release_unused(begin, size, 0, NULL, NULL)
        raise
    return 0


cdef int check_unused(Region region, size_t first, size_t size) except -1:
    cdef size_t step = region.block.step_nbytes, reserved = region.block.reserved_nbytes
    cdef size_t begin, end, piece = 2 * region.block.mirror_nbytes
    if region.block.mirror_other_nbytes != region.block.mirror_nbytes:
        piece = (piece + 2 * region.block.mirror_other_nbytes) * region.block.mirror_run
    cdef Py_ssize_t n_whole, n_parts
    if first > reserved or size > reserved - first:
        return 0
    begin, end = (first + step - 1) // step * step, (first + size) // step * step
    # The block and its calling method hold the region, and each window once.
    n_whole = n_references(<PyObject *>region) - 2 - region.n_windows
    if piece and begin < end:
        begin, end = begin // piece * piece, (end + piece - 1) // piece * piece
    n_parts = region.n_windows_in(begin, end)
    if begin < end and n_whole + n_parts > 0:
        raise BufferError(
            f"Block '{region.name}': live arrays over bytes {begin} to {end}: {n_parts}, "
            f"users of all of it (buffers, tapes): {n_whole}; drop them first")
    return 0


cdef object release_range(Region region, size_t first, size_t size):
    cdef um.um_error err
    cdef size_t released = 0
    cdef um.um_status status
    region.check_steps()
    # Its block and the method that calls this hold it.
    status = region.release_unused(first, size, 2, &released, &err)
    if status == um.UM_E_BUSY:
        raise BufferError(f"Block '{region.name}': another thread has begun to use bytes {first} "
                          f"to {first + size}")
    if status != um.UM_OK:
        raise_status(status, &err, f"releasing memory of block '{region.name}'")
    return released


cdef object discard_range(Region region, size_t first, size_t size):
    cdef um.um_error err
    cdef size_t covered = 0
    cdef um.um_status status
    region.check_steps()
    hold(&region.lock)
    status = um.um_block_discard(&region.block, first, size, &covered, &err)
    let_go(&region.lock)
    if status != um.UM_OK:
        raise_status(status, &err, f"discarding memory of block '{region.name}'")
    return covered


cdef int overlay_range(Region region, size_t first, int fd, uint64_t start, size_t size) except -1:
    cdef um.um_error err
    cdef um.um_status status
    region.check_steps()
    hold(&region.lock)
    status = um.um_block_overlay(&region.block, first, fd, start, size, &err)
    let_go(&region.lock)
    if status != um.UM_OK:
        raise_status(status, &err, f"mapping a file into block '{region.name}'")
    return 0
