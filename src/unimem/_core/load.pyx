# cython: language_level=3, boundscheck=False, wraparound=False
"""Reading ranges of files into blocks with several threads; moving mapped pages to NUMA nodes."""
import errno
import os
import time

from unimem.system import limits, policy
from unimem.errors import ClosedError

from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.stdint cimport uint64_t, uintptr_t
from posix.types cimport pid_t
from posix.unistd cimport getpid

from unimem._core cimport native as um
from unimem._core.arrays cimport size_of
from unimem._core.block cimport Block
from unimem._core.mapping cimport MOST_THREADS, explain, repair_region
from unimem._core.region cimport Region, set_numa
from unimem._core.status cimport raise_status

# Seconds between two calls of a callback.
cdef double PERIOD = 0.05

cdef enum:
    WAIT_MILLISECONDS = 50
    DIRECT_ALIGN = 4096
    # Reads past the page cache sleep, so more of them than CPUs help.
    DIRECT_THREADS = 16


cdef class _Parts:
    """The source and destination of each part; it keeps the regions mapped."""

    cdef um.um_load_part *ranges
    cdef size_t n
    cdef list blocks, regions, paths
    cdef object total

    def __cinit__(self, parts, bint direct):
        cdef list given = list(parts)
        self.blocks, self.regions, self.paths, self.total = [], [], [], 0
        self.ranges = <um.um_load_part *>PyMem_Calloc(max(len(given), 1), sizeof(um.um_load_part))
        if self.ranges == NULL:
            raise MemoryError()
        for part in given:
            self.add(&self.ranges[self.n], part, direct)
            self.n += 1

    def __dealloc__(self):
        PyMem_Free(self.ranges)

    cdef int add(self, um.um_load_part *out, object part, bint direct) except -1:
        fd, file_offset, block, block_offset, nbytes, path = part
        cdef Region region = (<Block?>block).region()
        cdef size_t at = size_of(block_offset, "block_offset"), size = size_of(nbytes, "nbytes")
        cdef size_t room = (size + DIRECT_ALIGN - 1) // DIRECT_ALIGN * DIRECT_ALIGN
        out.fd, out.offset, out.nbytes = fd, size_of(file_offset, "file_offset"), size
        out.to = <char *>region.block.base + at
        if not region.writable:
            raise ValueError(f"{path}: Block '{region.name}' is read-only: nothing can be read "
                             "into it")
        if direct and (out.offset % DIRECT_ALIGN or <uintptr_t>out.to % DIRECT_ALIGN):
            raise ValueError(
                f"{path}: a direct load is of multiples of {DIRECT_ALIGN}, got byte {out.offset} "
                f"of the file and address {<uintptr_t>out.to:#x}")
        if not um.um_block_is_committed(&region.block, at, room if direct else size):
            raise ValueError(
                f"{path}: bytes {at} to {at + (room if direct else size)} of Block "
                f"'{region.name}', which has {region.block.nbytes}, are not committed")
        self.blocks.append(block)
        self.regions.append(region)
        self.paths.append(path)
        self.total += size
        return 0


def load(parts: Iterable[tuple[int, int, Block, int, int, str]], *, threads: int | None = None,
         cpus: Sequence[int] | None = None, bint direct=False, request_bytes: int | None = None,
         progress: Callable[[int, int], object] | None = None) -> None:
    """Read ranges of files into memory, with several pinned threads.

    It returns or raises when all its threads have ended. Any number of loads may run at once. In
    a forked child (if `progress` forks) it raises ClosedError: the threads are not there.

    Parameters
    ----------
    parts : iterable of tuple
        ``(fd, file_offset, block, block_offset, nbytes, path)``: which bytes of an open file go
        where, and the file's name for errors. They are read in this order.
    threads : int, optional
        How many reads run at once; by default `limits.thread_count()`, or 16 for a direct load.
    cpus : sequence of int, optional
        CPUs to pin the threads to, in turn; by default those of the first block's nodes, or all
        that the process may use.
    direct : bool
        The files were opened with ``O_DIRECT``. Offsets and addresses are multiples of 4096, and
        each part has room up to the next multiple, which may be overwritten. The page cache is
        not touched.
    request_bytes : int, optional
        The size of one read, 4 MiB by default.
    progress : callable, optional
        Called in this thread as ``progress(done_bytes, total_bytes)``, at most 20 times a second,
        and once at the end. An exception that it raises ends the load, as Ctrl-C does.

    Raises
    ------
    ValueError
        A range is not committed in its block, does not suit a direct load, or is read-only.
    OSError
        A file cannot be read, or became shorter (EIO), or its file system has no such direct reads
        (EINVAL).
    MemoryError, PlacementError
        A block's pages have no memory, or a thread cannot be started.
    """
    cdef _Parts given = _Parts(parts, direct)
    cdef um.um_load_options options
    cdef int pinned[MOST_THREADS]
    cdef size_t i
    cdef Block block
    if threads is None:
        threads = DIRECT_THREADS if direct else limits.thread_count()
    options.n_threads = min(size_of(threads, "threads", 1), <size_t>MOST_THREADS)
    options.request_nbytes = (0 if request_bytes is None
                              else size_of(request_bytes, "request_bytes", 1))
    options.direct, options.cpus = direct, NULL
    if cpus is None and given.n > 0:
        block = given.blocks[0]
        if block._choice is not None:
            cpus = policy.warm_cpus(block._choice.numa, options.n_threads, limits.nodes(),
                                    limits.cpus())
    if cpus is not None:
        if not cpus:
            raise ValueError("cpus: expected at least one, got none")
        for i in range(options.n_threads):
            pinned[i] = cpus[i % len(cpus)]
        options.cpus = pinned
    try:
        _run(given, &options, progress)
    finally:
        for block in given.blocks:
            block.note_granted(None)
    if progress is not None:
        progress(given.total, given.total)


def move_pages(Block block not None, numa: str | None) -> list[str]:
    """Move pages of a file that `block` maps to NUMA nodes; `Block.repair` does so from now on.

    Pages of the page cache move if no other process has mapped them. Return a sentence for each
    shortfall. Raise OSError if the kernel refuses to move pages, as in a container.
    """
    cdef Region region = block.region()
    cdef uint64_t left
    wanted, there = policy.parse_numa(numa), block.verify().nodes
    # Only pages that move need room.
    n_there = sum([n for node, n in there.items() if node in wanted.nodes])
    request = policy.Request(max(0, region.block.nbytes - n_there), numa=wanted, of_file=True)
    choice = policy.decide(request, limits)
    problems = list(choice.shortfalls)
    if choice.numa is not None:
        block._choice = choice
        block._requested["numa"] = numa
        set_numa(&region.block.numa, choice.numa)
        left = repair_region(region, block.path)
        placement = block.verify()
        if left > 0:
            problems.append(policy.misplaced_message(block.name, choice.numa, left, placement))
    return problems


cdef int _run(_Parts given, const um.um_load_options *options, object progress) except -1:
    cdef um.um_error err
    cdef um.um_load *reading = NULL
    cdef um.um_status status
    cdef size_t part = 0
    cdef pid_t pid = getpid()
    with nogil:
        status = um.um_load_start(&reading, given.ranges, given.n, options, &err)
    if status != um.UM_OK:
        raise_status(status, &err, "loading")
    try:
        _wait(given, reading, pid, progress)
    except BaseException:
        # A forked child would wait forever for threads that it does not have.
        if getpid() == pid:
            with nogil:
                # The caller gets the exception that is already raised.
                status = um.um_load_end(reading, NULL, NULL)
        raise
    with nogil:
        status = um.um_load_end(reading, &part, &err)
    if status == um.UM_OK:
        return 0
    cdef Block block = given.blocks[part]
    if status == um.UM_E_IO:
        if err.os_errno == 0:
            raise OSError(errno.EIO, "The file has become shorter", given.paths[part])
        raise OSError(err.os_errno, os.strerror(err.os_errno), given.paths[part])
    explain(given.regions[part], block.path, status, &err, f"loading {given.paths[part]}")


cdef int _wait(_Parts given, um.um_load *reading, pid_t pid, object progress) except -1:
    cdef uint64_t done = 0
    cdef int running = 1
    told = time.monotonic()
    while running:
        with nogil:
            um.um_load_wait(reading, WAIT_MILLISECONDS, &done, &running)
        PyErr_CheckSignals()
        now = time.monotonic()
        if progress is not None and running and done < given.total and now - told >= PERIOD:
            progress(done, given.total)
            told = now
        if getpid() != pid:
            raise ClosedError("loading: a forked child has none of the threads that read: load "
                              "again there")
    return 0
