# cython: language_level=3
"""The exceptions of native failures, which are made here alone; the ledger and the counters."""
import errno
import os

from unimem.errors import (
    CapacityError, FrozenError, GGUFError, PlacementError,
)
from unimem.system.limits import limit_reached

cimport cython

from libc.stdint cimport uint64_t

from unimem._core cimport native as um

#: VERSION: str
#: SOVERSION: int
#: class CallCounters(TypedDict):
#:     os_calls: int
#:     allocations: int
#:     allocated_bytes: int
#: class LedgerRow(TypedDict):
#:     n_mappings: int
#:     mapped_bytes: int
#:     high_water_bytes: int
#: class DeviceRow(TypedDict):
#:     n_allocations: int
#:     nbytes: int
#:     high_water_bytes: int


cdef str full_text(str subject, object asked, str unit, object limit, object used):
    return (f"{subject}: asked for {asked} {unit}, but {used} of {limit} are used: "
            f"{max(limit - used, 0)} left")


cdef object raise_status(um.um_status status, const um.um_error *err, str subject,
                         type full=CapacityError, str unit="bytes", type format=GGUFError):
    what = err.what.decode()
    if status == um.UM_E_INVALID:
        raise ValueError(f"{subject}: {what}")
    if status == um.UM_E_FULL:
        raise full(full_text(subject, err.asked, unit, err.limit, err.used), err.limit, err.used,
                   err.asked)
    if status == um.UM_E_NOMEM:
        limit = limit_reached(err.asked)
        raise MemoryError(f"{subject}: the system has no memory for {err.asked} bytes ({what})"
                          f"{': ' if limit else ''}{limit}")
    if status == um.UM_E_OS:
        raise PlacementError(err.os_errno, f"{subject}: {what}: {os.strerror(err.os_errno)}")
    if status == um.UM_E_FORMAT:
        raise format(what, err.offset)
    if status == um.UM_E_IO:
        raise_file_status(status, err, subject, None)
    if status == um.UM_E_STATE:
        if err.detail == um.UM_TAPE_FROZEN:
            raise FrozenError(f"{subject} is frozen: asked for {err.asked} {unit}, with {err.used} "
                              f"of {err.limit} used; thaw() allows it again")
        raise RuntimeError(f"{subject}: {what}")
    if status == um.UM_E_BUSY:
        raise BufferError(f"{subject}: {what}")
    raise SystemError(f"{subject}: unknown status {<int>status}")


cdef object raise_file_status(um.um_status status, const um.um_error *err, str subject, str path):
    if status != um.UM_E_IO:
        raise_status(status, err, subject)
    why = (os.strerror(err.os_errno) if err.os_errno else
           "the file has become shorter, or cannot be read or written")
    raise OSError(err.os_errno or errno.EIO, f"{subject}: {err.what.decode()}: {why}", path)


# Those of the library and of its binary interface.
VERSION = um.um_version().decode()
SOVERSION = um.UM_SOVERSION


def counters() -> CallCounters:
    """Return what the native library has cost this process since it was loaded."""
    cdef um.um_counters c
    um.um_counters_read(&c)
    return {"os_calls": c.n_os_calls, "allocations": c.n_allocations,
            "allocated_bytes": c.allocated_bytes}


def row_name(str category) -> str:
    """Return the name of a category of a ledger in rows of plans and reports.

    A runtime's history is its KV cache, which is what users look for.
    """
    return "kv" if category == "history" else category


def ledger() -> dict[str, LedgerRow]:
    """Return the present mappings, by category."""
    cdef um.um_ledger_row row
    cdef um.um_error err
    rows = {}
    for i in range(um.UM_CAT_COUNT):
        if um.um_ledger_read(<um.um_category>i, &row, &err) != um.UM_OK:
            raise_status(err.status, &err, "ledger")
        rows[um.um_category_name(<um.um_category>i).decode()] = {
            "n_mappings": row.n_mappings, "mapped_bytes": row.mapped_bytes,
            "high_water_bytes": row.high_water_bytes}
    return rows


@cython.no_gc
cdef class Marks:
    """The most that is mapped in each category from now on, until this object goes.

    Any thread may read it. In a forked child it counts the child's mappings. CapacityError is
    raised if there are 64 of them already.
    """

    cdef unsigned _number
    cdef bint _begun

    def __cinit__(self):
        cdef um.um_error err
        if um.um_marks_begin(&self._number, &err) != um.UM_OK:
            raise_status(err.status, &err, "Marks", CapacityError, "sets")
        self._begun = True

    def __dealloc__(self):
        if self._begun:
            um.um_marks_end(self._number)

    def read(self) -> list[int]:
        """Return the most bytes so far by category, in the order of `ledger`."""
        cdef uint64_t most[um.UM_CAT_COUNT]
        cdef int i
        um.um_marks_read(self._number, most)
        return [most[i] for i in range(um.UM_CAT_COUNT)]


cdef class _DeviceRow:
    """A category of a device's memory."""

    cdef public long long n_allocations, nbytes, high_water_bytes


# From (device, category).
cdef dict _device_rows = {}
os.register_at_fork(after_in_child=_device_rows.clear)


@cython.no_gc
cdef class DeviceEntry:
    """Memory of a device, in the ledger for as long as this object lives.

    No handler of a signal runs while it is made or goes. A forked child has no memory of a device,
    and begins with an empty ledger. `device` is such as ``"cuda:0"``; ValueError is raised for a
    category that `Block` does not have.
    """
    #: def __init__(self, device: str, category: str, nbytes: int) -> None: ...

    cdef _DeviceRow _row
    cdef long long _nbytes

    def __cinit__(self, str device not None, str category not None, long long nbytes):
        category = "history" if category == "kv" else category
        cdef _DeviceRow row = _device_rows.get((device, category))
        if row is None:
            names = [row_name(um.um_category_name(<um.um_category>i).decode())
                     for i in range(um.UM_CAT_COUNT)]
            if row_name(category) not in names:
                raise ValueError(f"category: expected one of {', '.join(names)}, got {category!r}")
            row = _device_rows.setdefault((device, category), _DeviceRow())
        self._row, self._nbytes = row, nbytes
        with cython.critical_section(row):
            row.n_allocations += 1
            row.nbytes += nbytes
            row.high_water_bytes = max(row.high_water_bytes, row.nbytes)

    def __dealloc__(self):
        if self._row is not None:
            with cython.critical_section(self._row):
                self._row.n_allocations -= 1
                self._row.nbytes -= self._nbytes


def device_bytes(str device) -> int:
    """Return the bytes that unimem has on a device in this process."""
    cdef _DeviceRow row
    nbytes = 0
    for (name, _), row in list(_device_rows.items()):
        if name == device:
            nbytes += row.nbytes
    return nbytes


def device_ledger() -> dict[tuple[str, str], DeviceRow]:
    """Return the present allocations on devices, by device and category."""
    cdef _DeviceRow row
    rows = {}
    for key, row in sorted(list(_device_rows.items())):
        rows[key] = {"n_allocations": row.n_allocations, "nbytes": row.nbytes,
                     "high_water_bytes": row.high_water_bytes}
    return rows
