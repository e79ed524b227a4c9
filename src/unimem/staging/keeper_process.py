"""A small process that keeps a staged model: it holds the descriptors, maps the files and sleeps.

Run by `keeper.py` as ``python -I -S FILE READY NOTE LOCK FOLDER FD...``. It maps the files of the
FDs, so that the kernel counts them as this process's, and locks them unless LOCK is False. From
READY, a socket, it reads the text of its note and writes it into NOTE, a memfd: the process that
has a note is the keeper. It answers on READY that it is ready, or why not. If it reads "keep" then,
it lives until SIGTERM. At the end it removes FOLDER, if that is a descriptor and not -1. It imports
little, since it stays in memory.

Run as ``FILE wait KEEPER OURS WOKEN WAKES LINK...`` it waits in the foreground for the end of such
a process, whose descriptor is KEEPER. SIGTERM ends it, and with OURS 1 that process and the links;
a signal is a byte in the pipe of WOKEN and WAKES, which may be there already.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import signal
import sys
from contextlib import suppress

# The kernel's numbers (uapi/asm-generic/mman.h), the same on x86-64 and aarch64.
_PROT_NONE, _PROT_READ = 0, 1
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 1, 2, 0x10, 0x20
_MAP_NORESERVE, _MAP_POPULATE = 0x4000, 0x8000
_MLOCK_ONFAULT = 1
_ENDS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_PATIENCE_SECONDS = 10
_HUGE_PAGE = "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size"


def main(ready: int, note: int, lock: str, folder: int, fds: list[int]) -> None:
    """Keep the descriptors that this process was given, until SIGTERM."""
    # The parent need not wait for it, and no terminal ends it.
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
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
    # Its PID in the namespace of /proc, which may be an outer one.
    os.write(ready, f"0 {os.readlink('/proc/self')}".encode())
    # If the command ends too early, no process knows of this one: it ends, too.
    if os.read(ready, 16) == b"keep":
        os.close(ready)
        signal.sigwait({signal.SIGTERM})


def _show(ready: int, note: int) -> None:
    """Copy the note from the socket, where its length precedes it, and seal it."""
    nbytes, text = int.from_bytes(os.read(ready, 8), "little"), b""
    while len(text) < nbytes:
        piece = os.read(ready, nbytes - len(text))
        if not piece:
            raise OSError(errno.EPIPE, "the command that started it has ended")
        text += piece
    with open(note, "wb", closefd=False) as file:  # writes everything, or raises
        file.write(text)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(note, fcntl.F_ADD_SEALS, seals)


def _remove(folder: int) -> None:
    """Remove a folder by its descriptor: another folder may have its path by now."""
    # The descriptor shares its position with the process that gave it, which may list it, too.
    for name in os.listdir(f"/proc/self/fd/{folder}"):
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
    with suppress(OSError):
        os.rmdir(os.readlink(f"/proc/self/fd/{folder}"))


def _map(fd: int, lock: str) -> None:
    """Map a file for as long as this process lives, and lock it if asked."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    nbytes = os.fstat(fd).st_size

    def mmap(address: int | None, nbytes: int, access: int, flags: int, fd: int) -> int:
        start: int | None = libc.mmap(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), access, flags, fd, ctypes.c_long(0)
        )
        if start is None or start == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, f"mapping it: {os.strerror(code)}")
        return start

    # An address that is a multiple of the huge page lets the kernel use huge entries.

    page = max(_huge_page_bytes(), os.fstatvfs(fd).f_bsize)
    anywhere = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
    address = -(-mmap(None, nbytes + page, _PROT_NONE, anywhere, -1) // page) * page
    mmap(address, nbytes, _PROT_READ, _MAP_SHARED | _MAP_FIXED | _MAP_POPULATE, fd)
    how = _MLOCK_ONFAULT if lock == "onfault" else 0
    if lock != "False" and libc.mlock2(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), how):
        code = ctypes.get_errno()
        raise OSError(code, f"locking in RAM: {os.strerror(code)}: 'ulimit -l' shows the limit")


def wait(keeper: int, is_ours: bool, woken: int, wakes: int, links: list[str]) -> int:
    """Wait for a signal or the end of a keeper; return the exit code."""
    signal.set_wakeup_fd(wakes)
    for number in _ENDS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
    if keeper in select.select([keeper, woken], [], [])[0]:
        os.write(2, b"unimem: the process that kept the model has ended\n")
        return 1
    if is_ours:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(keeper, number)
            if select.select([keeper], [], [], _PATIENCE_SECONDS)[0]:
                break
        for link in links:
            if not os.path.exists(link):
                with suppress(OSError):
                    os.unlink(link)
    return 0


def _huge_page_bytes() -> int:
    try:
        with open(_HUGE_PAGE) as file:
            return int(file.read())
    except OSError:  # a kernel without them
        return 0


if __name__ == "__main__":
    if sys.argv[1] == "wait":
        keeper, ours, woken, wakes = map(int, sys.argv[2:6])
        sys.exit(wait(keeper, bool(ours), woken, wakes, sys.argv[6:]))
    ready, note, lock, *folder_and_fds = sys.argv[1:]
    folder, *fds = map(int, folder_and_fds)
    main(int(ready), int(note), lock, folder, fds)
