"""A child that mounts a tmpfs in a user namespace of its own, for a process that may not mount.

`backings.py` runs it as ``python -I -S FILE LIBRARY NBYTES HUGE SOCKET``. It mounts, and seals when
it receives a byte. Each answer is an errno of four bytes, 0 for success, and the name of the failed
call, for people. The descriptor of the mount comes with the first answer.
"""

from __future__ import annotations

import array
import ctypes
import errno
import os
import socket
import sys

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000


class _Error(ctypes.Structure):
    """`um_error` of unimem.h."""

    _fields_ = (
        ("status", ctypes.c_int),
        ("detail", ctypes.c_int),
        ("os_errno", ctypes.c_int),
        ("figures", ctypes.c_uint64 * 4),
        ("what", ctypes.c_char_p),
    )


def main(library: str, nbytes: int, huge: int, ours: socket.socket) -> None:
    """Mount, hand over, and seal when the other side says so."""
    native = ctypes.CDLL(library)
    error = _Error()
    fd = ctypes.c_int()
    try:
        _enter_namespace()
    except OSError as refused:
        call = str(refused.filename or "unshare").encode()
        ours.sendall(_answer(refused.errno or errno.EPERM, call))
        return
    if native.um_tmpfs_open(ctypes.byref(fd), ctypes.c_uint64(nbytes), huge, ctypes.byref(error)):
        ours.sendall(_answer(error.os_errno, error.what))
        return
    ours.sendmsg(
        [_answer(0)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd.value]))]
    )
    if ours.recv(1):
        failed = native.um_tmpfs_seal(fd, ctypes.byref(error))
        ours.sendall(_answer(error.os_errno, error.what) if failed else _answer(0))


def _answer(code: int, call: bytes = b"") -> bytes:
    return code.to_bytes(4, "little") + call


def _enter_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "unshare")
    # Without its own ids on the inside, nobody outside could make files in the mount.
    for path, text in (
        ("/proc/self/setgroups", "deny"),
        ("/proc/self/uid_map", f"{uid} {uid} 1"),
        ("/proc/self/gid_map", f"{gid} {gid} 1"),
    ):
        with open(path, "w") as file:
            file.write(text)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), socket.socket(fileno=int(sys.argv[4])))
