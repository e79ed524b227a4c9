# cython: language_level=3
"""In-memory file systems without a mount point."""
from libc.stdint cimport uint64_t

from unimem._core cimport native as um
from unimem._core.status cimport raise_status


def open_mount(uint64_t nbytes, bint huge) -> int:
    """Make a file system for at most `nbytes`, and return the descriptor of its folder.

    It lives as long as a descriptor of the folder, and a file's memory as long as its last user.
    With `huge`, its files have huge pages whatever ``shmem_enabled`` says. Raise PlacementError if
    the kernel refuses, as without CAP_SYS_ADMIN.
    """
    cdef um.um_error err
    cdef int fd
    cdef um.um_status status
    with nogil:
        status = um.um_tmpfs_open(&fd, nbytes, huge, &err)
    if status != um.UM_OK:
        raise_status(status, &err, "mounting a tmpfs")
    return fd


def seal_mount(int fd) -> None:
    """Make it read-only in all its mounts.

    Raise PlacementError if a file in it is open for writing, or another namespace has made it.
    """
    cdef um.um_error err
    cdef um.um_status status
    with nogil:
        status = um.um_tmpfs_seal(fd, &err)
    if status != um.UM_OK:
        raise_status(status, &err, "sealing a tmpfs")


def huge_page_bytes() -> int:
    """Return the size of transparent huge pages, or 0 if the kernel has none."""
    return um.um_huge_page_bytes()
