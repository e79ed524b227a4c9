"""A small process that keeps a staged model: it has the descriptors, and sleeps.

Run by `unimem.stage_held` as ``python -I -S FILE DESCRIPTION READY LOCK FOLDER FD...``. The
description stands there for those who list command lines. It locks what the FDs are of, says on
READY, a socket, that it is ready, or why not. Where it is then told to keep it, it lives until
SIGTERM. At the end it removes the folder, if any. Little is imported, so that little memory is
kept.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["main"]

_PROT_READ = _MAP_SHARED = _MLOCK_ONFAULT = 1


def main(ready: int, lock: str, folder: str, fds: list[int]) -> None:
    """Keep the descriptors that this process was given, until SIGTERM."""
    # Who started it need not stay to see its end, and no terminal ends it.
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    try:
        for fd in fds:
            _lock(fd, lock)
            os.close(fd)
    except OSError as error:
        os.write(ready, f"{error.errno} {error.strerror}".encode())
        os._exit(1)
    os.write(ready, f"0 {os.getpid()}".encode())
    # Whoever started it may have been interrupted meanwhile.
    if os.read(ready, 16) == b"keep":
        os.close(ready)
        signal.sigwait({signal.SIGTERM})
    if folder:
        for name in os.listdir(folder):
            os.unlink(f"{folder}/{name}")
        os.rmdir(folder)


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
    main(int(sys.argv[2]), sys.argv[3], sys.argv[4], [int(fd) for fd in sys.argv[5:]])
