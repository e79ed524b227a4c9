# cython: language_level=3, boundscheck=False, wraparound=False
"""Mapping regions: from a request to memory, its growth, warming and locks, and its placement."""
import dataclasses
import errno
import os

import numpy as np

from unimem.system import limits, policy
from unimem.errors import CapacityError, PlacementError
from unimem._core.status import row_name
from unimem.base.arguments import one_of
from unimem.system.placement import Placement

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport PyObject
from libc.stdint cimport int16_t, uint8_t, uint64_t, uintptr_t
from libc.string cimport memset

from unimem._core cimport native as um
from unimem._core.lock cimport hold, let_go
from unimem._core.region cimport Region, leave_out_of_child, n_references, set_numa
from unimem._core.status cimport raise_file_status, raise_status

cdef dict PAGES = {"auto": um.UM_PAGES_AUTO, "4k": um.UM_PAGES_4K, "thp": um.UM_PAGES_THP,
                   "2m": um.UM_PAGES_2M, "1g": um.UM_PAGES_1G}
cdef dict PAGE_NAMES = {number: name for name, number in PAGES.items()}
cdef dict ADVICES = {
    "willneed": um.UM_ADVICE_WILLNEED, "sequential": um.UM_ADVICE_SEQUENTIAL,
    "random": um.UM_ADVICE_RANDOM, "dontneed": um.UM_ADVICE_DONTNEED,
    "hugepage": um.UM_ADVICE_HUGEPAGE, "nohugepage": um.UM_ADVICE_NOHUGEPAGE}
cdef dict CATEGORIES = {row_name((<bytes>um.um_category_name(<um.um_category>i)).decode()): i
                        for i in range(um.UM_CAT_COUNT)}
cdef size_t THP_BYTES = um.um_huge_page_bytes()
# Bytes warmed between two calls of a progress callback, and per thread between checks of signals.
cdef size_t PROGRESS_BYTES = 256 << 20, WARM_PART_BYTES = 1 << 30


cdef tuple map_request(str name, object request, um.um_category category, int fd, bint strict,
                       Region source):
    cdef Region region = None
    cdef dict refused = {}
    while region is None:
        choice = policy.decide(request, limits, refused)
        if strict and choice.shortfalls:
            raise PlacementError(policy.placement_message(name, request.nbytes, choice.shortfalls,
                                                          None))
        if choice.pages not in policy.HUGETLB:
            limits.require(request.nbytes, f"block '{name}'")
        region = _try_map(name, request, choice, category, fd, source, refused)
    return region, choice


cdef Region _try_map(str name, object request, object choice, um.um_category category, int fd,
                     Region source, dict refused):
    """Map a region, or return None if the kernel refused something optional."""
    cdef um.um_error err
    cdef um.um_status status
    cdef um.um_block_options options
    cdef size_t size = request.nbytes
    cdef bytes label = os.fsencode(name)[:200].replace(b"\0", b"?")
    cdef Region region = Region.__new__(Region)
    region.name = name
    memset(&options, 0, sizeof(options))
    options.pages = <um.um_pages><int>PAGES[choice.pages]
    options.category = category
    options.reserve_nbytes = 0 if source is not None else request.reserve
    if request.mirror:
        options.mirror_nbytes, options.mirror_other_nbytes, options.mirror_run = request.mirror
    options.name = label
    options.fd = fd
    if request.shared:
        options.sharing = um.UM_SHARING_MEMFD if fd < 0 else um.UM_SHARING_FD
    set_numa(&options.numa, choice.numa)
    # Touching a bound page that its node lacks would end the process; locked memory is in RAM.
    cdef bint at_once = choice.pages in policy.HUGETLB and policy.is_prefaulted(choice)
    with nogil:
        if source is not None:
            status = um.um_block_copy_sealed(&region.block, &source.block, &options, &err)
        else:
            status = um.um_block_map(&region.block, size, &options, &err)
        if status == um.UM_OK and at_once:
            status = um.um_block_warm(&region.block, 0, region.block.nbytes, 1, NULL, &err)
    if status == um.UM_OK:
        region.writable = source is None
        if request.shared and region.writable:
            leave_out_of_child(region)
        region.enter()
        return region
    if err.detail == um.UM_BLOCK_NO_POLICY:
        if choice.numa.mode == "weighted" and err.os_errno == errno.EINVAL:
            refused["weighted"] = "this kernel interleaves without weights (Linux 6.9 has them)"
        else:
            refused["numa"] = (
                f"mbind: {os.strerror(err.os_errno)}: a container needs the capability "
                "CAP_SYS_NICE ('docker run --cap-add SYS_NICE'), and a kernel NUMA support")
    elif choice.pages in policy.HUGETLB and status == um.UM_E_NOMEM:
        refused[choice.pages] = (
            "the kernel has too few such pages for this process now: 'grep . "
            "/sys/kernel/mm/hugepages/*/*' shows the pools")
    else:
        raise_file_status(status, &err, f"Block '{name}' of {size} bytes",
                          None if source is None else source.file)
    return None


cdef Region map_file(int fd, uint64_t start, size_t size, um.um_access access,
                     um.um_category category, str file):
    cdef um.um_error err
    cdef um.um_status status
    cdef Region region = Region.__new__(Region)
    with nogil:
        status = um.um_block_map_file(&region.block, fd, start, size, access, category, &err)
    if status != um.UM_OK:
        raise_status(status, &err, f"mapping {file}")
    region.file = file
    return region


cdef Region lend_memory(object owner):
    """Make a region over the whole pages that a memoryview touches; it is in no list."""
    cdef Py_buffer view
    cdef Region region = Region.__new__(Region)
    cdef um.um_block *block = &region.block
    cdef size_t page = um.um_page_bytes()
    PyObject_GetBuffer(owner, &view, PyBUF_SIMPLE)
    cdef uintptr_t first = <uintptr_t>view.buf // page * page
    cdef size_t end = (<uintptr_t>view.buf + <size_t>view.len + page - 1) // page * page
    PyBuffer_Release(&view)
    region.owner = memoryview(owner)  # which keeps the memory, even if the other is released
    block.base, block.fd, block.step_nbytes = <void *>first, -1, page
    block.nbytes = block.requested_nbytes = end - first
    block.reserved_nbytes = block.committed_nbytes = block.nbytes
    block.access, block.category = um.UM_ACCESS_READ, um.UM_CAT_WEIGHTS
    return region


cdef Region attach_file(int fd, bint writable, um.um_category category, str label):
    cdef um.um_error err
    cdef um.um_access access = um.UM_ACCESS_SHARED if writable else um.UM_ACCESS_READ
    cdef um.um_status status
    cdef Region region = Region.__new__(Region)
    with nogil:
        status = um.um_block_attach(&region.block, fd, access, category, &err)
    if status == um.UM_E_OS and err.os_errno in (errno.EPERM, errno.EACCES) and writable:
        raise PlacementError(err.os_errno, f"attaching {label}: it may only be read, for it is "
                             "sealed or open for reading: attach it with writable=False")
    if status != um.UM_OK:
        raise_status(status, &err, f"attaching {label}")
    return region


cdef int collapse_region(Region region, bint raises) except -1:
    cdef um.um_error err
    cdef um.um_status status
    with nogil:
        status = um.um_block_collapse(&region.block, &err)
    if raises and status not in (um.UM_OK, um.UM_E_NOMEM):
        reason = ("pages='4k' were asked for"
                  if region.block.requested_pages == um.UM_PAGES_4K else
                  f"{err.what.decode()}: {os.strerror(err.os_errno)}: the kernel cannot put "
                  "this memory into huge pages (Linux 6.1 and its THP support can for "
                  "anonymous and shared memory)")
        raise PlacementError(err.os_errno, f"collapsing block '{region.name}': {reason}")
    return 0


cdef object repair_region(Region region, str path):
    cdef um.um_error err
    cdef um.um_status status
    cdef uint64_t left = 0
    with nogil:
        status = um.um_block_repair(&region.block, &left, &err)
    if status != um.UM_OK:
        explain(region, path, status, &err, f"repairing block '{region.name}'")
    return left


cdef object lock_region(Region region, object choice, list problems):
    cdef um.um_error err
    cdef um.um_status status
    cdef um.um_lock lock = um.UM_LOCK_NOW if choice.lock is True else um.UM_LOCK_ONFAULT
    with nogil:
        status = um.um_block_lock(&region.block, lock, &err)
    if status == um.UM_OK:
        return choice
    problems.append(f"lock={choice.lock!r}: {err.what.decode()}: "
                    f"{os.strerror(err.os_errno)}: 'ulimit -l' shows the limit")
    return dataclasses.replace(choice, lock=False)


cdef object lock_all(Region region, object how, object asked):
    cdef um.um_error err, lost_err
    cdef um.um_status status, lost
    cdef um.um_lock lock = um.UM_LOCK_NONE
    cdef um.um_lock before = region.block.lock
    if how:
        lock = um.UM_LOCK_NOW if how is True else um.UM_LOCK_ONFAULT
        if before == um.UM_LOCK_NONE and not region.is_hugetlb():
            refusal = policy.lock_refusal(asked, region.block.committed_nbytes, limits)
            if refusal is not None:
                raise PlacementError(errno.ENOMEM, f"locking block '{region.name}': {refusal}")
    region.check_steps()
    region.is_locking = True
    with nogil:
        status = um.um_block_lock(&region.block, lock, &err)
    region.is_locking = False
    if status != um.UM_OK and region.block.is_file:
        # mlock2 fails alike for a limit and for a lost page.
        with nogil:
            lost = um.um_block_warm(&region.block, 0, region.block.nbytes, 1, NULL, &lost_err)
        if lost == um.UM_E_IO:
            raise_file_status(lost, &lost_err, f"locking block '{region.name}'", region.file)
    if status != um.UM_OK:
        raise PlacementError(
            err.os_errno, f"locking block '{region.name}': lock={asked!r}: {err.what.decode()}: "
            f"{os.strerror(err.os_errno)}: 'ulimit -l' shows the limit")
    return {um.UM_LOCK_NONE: False, um.UM_LOCK_NOW: True}.get(before, "onfault")


cdef tuple pages_of(Region region, size_t offset, size_t nbytes, bint with_nodes):
    cdef um.um_error err
    cdef um.um_status status
    cdef size_t page = um.um_page_bytes(), n = 0
    if nbytes <= region.block.reserved_nbytes:
        n = (offset % page + nbytes + page - 1) // page if nbytes else 0
    pages = np.empty(n, np.uint8)
    nodes = np.empty(n, np.int16) if with_nodes else None
    cdef uint8_t *out_pages = <uint8_t *><uintptr_t>pages.ctypes.data
    cdef int16_t *out_nodes = <int16_t *><uintptr_t>nodes.ctypes.data if with_nodes else NULL
    with nogil:
        status = um.um_block_pages(&region.block, offset, nbytes, out_pages, out_nodes, &err)
    if status != um.UM_OK:
        raise_status(status, &err, f"looking at the pages of block '{region.name}'")
    return pages, nodes


cdef int warm_region(Region region, object choice, str path, size_t offset, size_t nbytes,
                     unsigned n_threads, tuple progress, bint write=False) except -1:
    cdef um.um_error err
    cdef um.um_status status
    cdef int cpus[MOST_THREADS]
    cdef const int *chosen = NULL
    cdef size_t at = offset, end = offset + nbytes, size
    cdef size_t part = max(WARM_PART_BYTES * n_threads if progress is None else PROGRESS_BYTES,
                           region.block.step_nbytes)
    if choice is not None and choice.numa is not None:
        found = policy.warm_cpus(choice.numa, n_threads, limits.nodes(), limits.cpus())
        if found is not None:
            for i in range(n_threads):
                cpus[i] = found[i]
            chosen = cpus
    while at < end:
        PyErr_CheckSignals()
        # Parts end at huge pages.
        size = min((at // part + 1) * part, end) - at
        with nogil:
            if write:
                status = um.um_block_warm_to_write(&region.block, at, size, n_threads, chosen,
                                                   &err)
            else:
                status = um.um_block_warm(&region.block, at, size, n_threads, chosen, &err)
        if status != um.UM_OK:
            explain(region, path, status, &err, f"warming block '{region.name}'")
        at += size
        if progress is not None:
            tell, before, total = progress
            tell(before + at - offset, total)
    return 0


cdef object placement_of(Region region):
    cdef um.um_error err
    cdef um.um_placement p
    cdef um.um_status status
    cdef unsigned node
    with nogil:
        status = um.um_block_verify(&region.block, &p, &err)
    if status != um.UM_OK:
        raise_status(status, &err, f"verifying block '{region.name}'")
    nodes = {}
    for node in range(um.UM_MAX_NODES):
        if p.node_bytes[node] != 0:
            nodes[node] = p.node_bytes[node]
    return Placement(
        pages=PAGE_NAMES[<int>p.pages], page_bytes=p.page_bytes, resident_bytes=p.resident_bytes,
        huge_bytes=p.huge_bytes, locked_bytes=p.locked_bytes, swapped_bytes=p.swapped_bytes,
        pss_bytes=p.pss_bytes, nodes=nodes)


cdef size_t memory_bytes(Region region, size_t nbytes):
    return nbytes if region.block.mirror_nbytes == 0 else nbytes // 2


cdef object resident_bytes(Region region, size_t offset, size_t nbytes):
    cdef um.um_error err
    cdef uint64_t resident
    cdef um.um_status status
    with nogil:
        status = um.um_block_resident(&region.block, offset, nbytes, &resident, &err)
    if status != um.UM_OK:
        raise_status(status, &err, f"block '{region.name}'")
    return resident


cdef object require_room(Region region, str name, object choice, list runs):
    cdef size_t needed = memory_bytes(region, sum([nbytes for _, nbytes in runs])), resident
    if region.block.is_file or region.is_hugetlb():
        return None
    # The pages in RAM are counted only if they decide.
    try:
        policy.require_room(name, needed, choice, limits)
    except (CapacityError, PlacementError):
        resident = memory_bytes(
            region, sum([resident_bytes(region, first, nbytes) for first, nbytes in runs]))
        if resident == 0:
            raise
        policy.require_room(name, needed - min(needed, resident), choice, limits)


cdef object explain(Region region, str path, um.um_status status, const um.um_error *err,
                    str doing):
    if status == um.UM_E_NOMEM and region.is_hugetlb():
        raise PlacementError(
            err.os_errno, f"{doing}: the pool of hugetlb pages is used up: 'grep . "
            "/sys/kernel/mm/hugepages/*/*' shows it, and more in nr_hugepages makes it larger")
    if status == um.UM_E_NOMEM and path is not None:
        raise MemoryError(f"{doing}: no memory for {err.asked} bytes, or {limits.SHM} is full "
                          f"('df {limits.SHM}')")
    raise_file_status(status, err, doing, region.file)


cdef um.um_category category_of(object category) except *:
    name = row_name(category) if isinstance(category, str) else category
    return <um.um_category><int>CATEGORIES[one_of(name, "category", CATEGORIES)]


cdef dict requested_of(Region region, bint shared):
    return {"nbytes": region.block.requested_nbytes,
            "pages": PAGE_NAMES[<int>region.block.requested_pages], "numa": None, "lock": False,
            "shared": shared, "reserve": region.block.reserved_nbytes}


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
            # A thread that makes an array reads which steps are committed.
            hold(&region.lock)
            status = um.um_block_commit(&region.block, begin, size, &err)
            let_go(&region.lock)
            if status != um.UM_OK:
                explain(region, path, status, &err, what)
            n_undo += 1
        n_undo = len(missing)
        if hugetlb and policy.is_prefaulted(choice):
            for first, n in missing:
                warm_region(region, choice, path, first, n, 1, None)
    except BaseException:
        for begin, size in missing[:n_undo]:
            # Memory that the kernel does not take back stays committed, and in the ledger.
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
    # The block, its calling method and each window have one reference.
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
    # The block and its calling method have a reference each.
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
