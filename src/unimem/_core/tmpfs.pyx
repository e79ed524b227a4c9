# cython: language_level=3
"""File systems in memory that are mounted nowhere."""
from libc.stdint cimport uint64_t

from unimem._core cimport native as um
from unimem._core.status cimport raise_status


def open_mount(uint64_t nbytes, bint huge) -> int:
    """Make a file system in memory, and return the descriptor of its folder.

    It goes with the last descriptor of the folder, and a file's memory with its last user.

    Parameters
    ----------
    nbytes : int
        The most that its files may take.
    huge : bool
        Whether its files have huge pages, whatever ``shmem_enabled`` says.

    Raises
    ------
    PlacementError
        The kernel refuses, as without CAP_SYS_ADMIN.
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
    """Make it read-only, in all its mounts.

    Raises
    ------
    PlacementError
        The kernel refuses: a file in it is open for writing, or another namespace has made it.
    """
    cdef um.um_error err
    cdef um.um_status status
    with nogil:
        status = um.um_tmpfs_seal(fd, &err)
    if status != um.UM_OK:
        raise_status(status, &err, "sealing a tmpfs")


def huge_page_bytes() -> int:
    """Return the size of transparent huge pages; 0 where the kernel has none."""
    return um.um_huge_page_bytes()
