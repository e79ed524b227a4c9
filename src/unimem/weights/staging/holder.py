"""A small process that keeps a staged model: it has the descriptors, and sleeps.

Run by `held.py` as ``python -I -S FILE NOTE READY LOCK FOLDER FD...``. It locks what the FDs are
of, and says on READY, a socket, that it is ready, or why not. Where it is then told to keep it, it
lives until SIGTERM. At the end it removes FOLDER, where that is a descriptor and not -1.
NOTE, the descriptor of what it keeps in words, is for those who look for it. Little is imported,
so that little memory is kept.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

__all__ = ["main"]

_PROT_READ = _MAP_SHARED = _MLOCK_ONFAULT = 1


def main(ready: int, lock: str, folder: int, fds: list[int]) -> None:
    """Keep the descriptors that this process was given, until SIGTERM."""
    # Its parent need not wait for its end, and no terminal ends it.
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    try:
        _keep(ready, lock, fds)
    finally:
        if folder >= 0:
            _remove(folder)


def _keep(ready: int, lock: str, fds: list[int]) -> None:
    try:
        for fd in fds:
            _lock(fd, lock)
            os.close(fd)
    except OSError as error:
        os.write(ready, f"{error.errno} {error.strerror}".encode())
        return
    # Its number where /proc was mounted, which may be in an outer namespace.
    os.write(ready, f"0 {os.readlink('/proc/self')}".encode())
    # The command that started it may end too early, and then no process knows of it.
    if os.read(ready, 16) == b"keep":
        os.close(ready)
        signal.sigwait({signal.SIGTERM})


def _remove(folder: int) -> None:
    """Remove a folder by its descriptor: what has its path by now may be another."""
    for name in os.listdir(folder):
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
    with suppress(OSError):
        os.rmdir(os.readlink(f"/proc/self/fd/{folder}"))


def _lock(fd: int, lock: str) -> None:
    """Map a file and keep it in RAM; the mapping stays for as long as this process does."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    nbytes = ctypes.c_size_t(os.fstat(fd).st_size)
    address = libc.mmap(None, nbytes, _PROT_READ, _MAP_SHARED, fd, ctypes.c_long(0))
    failed = address == ctypes.c_void_p(-1).value
    if not failed:
        how = _MLOCK_ONFAULT if lock == "onfault" else 0
        failed = libc.mlock2(ctypes.c_void_p(address), nbytes, how) != 0
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, f"locking in RAM: {os.strerror(code)}: 'ulimit -l' shows the limit")


if __name__ == "__main__":
    main(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), [int(fd) for fd in sys.argv[5:]])
