"""A small process that keeps a staged model: it has the descriptors and maps the files, and sleeps.

Run by `held.py` as ``python -I -S FILE READY NOTE LOCK FOLDER FD...``. It maps what the FDs are of,
so that the kernel counts it as this process's, and locks it unless LOCK is False. From READY, a
socket, it reads what it keeps, and writes that into NOTE, a memfd, for those who look for it: they
take the process that has a note for the keeper. It says on READY that it is ready, or why not.
Where it is then told to keep the model, it lives until SIGTERM. At the end it removes FOLDER, where
that is a descriptor and not -1. Little is imported, so that little memory is kept.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import sys
from contextlib import suppress

__all__ = ["main"]

# The kernel's numbers (uapi/asm-generic/mman.h), which x86-64 and aarch64 have in common.
_PROT_NONE, _PROT_READ = 0, 1
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 1, 2, 0x10, 0x20
_MAP_NORESERVE, _MAP_POPULATE = 0x4000, 0x8000
_MLOCK_ONFAULT = 1
_HUGE_PAGE = "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size"


def main(ready: int, note: int, lock: str, folder: int, fds: list[int]) -> None:
    """Keep the descriptors that this process was given, until SIGTERM."""
    # Its parent need not wait for its end, and no terminal ends it.
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    try:
        _keep(ready, note, lock, fds)
    finally:
        if folder >= 0:
            _remove(folder)


def _keep(ready: int, note: int, lock: str, fds: list[int]) -> None:
    try:
        for fd in fds:
            _map(fd, lock)
            os.close(fd)
        _show(ready, note)
    except OSError as error:
        os.write(ready, f"{error.errno} {error.strerror}".encode())
        return
    # Its number where /proc was mounted, which may be in an outer namespace.
    os.write(ready, f"0 {os.readlink('/proc/self')}".encode())
    # The command that started it may end too early, and then no process knows of it.
    if os.read(ready, 16) == b"keep":
        os.close(ready)
        signal.sigwait({signal.SIGTERM})


def _show(ready: int, note: int) -> None:
    """Write the note, whose length comes first, and seal it against everything."""
    nbytes, text = int.from_bytes(os.read(ready, 8), "little"), b""
    while len(text) < nbytes:
        piece = os.read(ready, nbytes - len(text))
        if not piece:
            raise OSError(errno.EPIPE, "the command that started it has ended")
        text += piece
    with open(note, "wb", closefd=False) as file:  # writes all of it, or raises
        file.write(text)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(note, fcntl.F_ADD_SEALS, seals)


def _remove(folder: int) -> None:
    """Remove a folder by its descriptor: what has its path by now may be another."""
    for name in os.listdir(folder):
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
    with suppress(OSError):
        os.rmdir(os.readlink(f"/proc/self/fd/{folder}"))


def _map(fd: int, lock: str) -> None:
    """Map a file for as long as this process lives, and keep it in RAM where that was asked for."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    nbytes = os.fstat(fd).st_size

    def mmap(address: int | None, nbytes: int, access: int, flags: int, fd: int) -> int:
        start: int | None = libc.mmap(
            ctypes.c_void_p(address),
            ctypes.c_size_t(nbytes),
            access,
            flags,
            fd,
            ctypes.c_long(0),
        )
        if start is None or start == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, f"mapping it: {os.strerror(code)}")
        return start

    # Huge pages need an address that is a multiple of theirs: then they cost one entry each.
    page = max(_huge_page_bytes(), os.fstatvfs(fd).f_bsize)
    anywhere = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
    address = -(-mmap(None, nbytes + page, _PROT_NONE, anywhere, -1) // page) * page
    mmap(address, nbytes, _PROT_READ, _MAP_SHARED | _MAP_FIXED | _MAP_POPULATE, fd)
    how = _MLOCK_ONFAULT if lock == "onfault" else 0
    if lock != "False" and libc.mlock2(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), how):
        code = ctypes.get_errno()
        raise OSError(code, f"locking in RAM: {os.strerror(code)}: 'ulimit -l' shows the limit")


def _huge_page_bytes() -> int:
    try:
        with open(_HUGE_PAGE) as file:
            return int(file.read())
    except OSError:  # a kernel without them
        return 0


if __name__ == "__main__":
    ready, note, lock, *folder_and_fds = sys.argv[1:]
    folder, *fds = map(int, folder_and_fds)
    main(int(ready), int(note), lock, folder, fds)
