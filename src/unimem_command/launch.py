"""Starting a program under `unimem exec`: what the loader needs, and what it cannot do.

This file imports next to nothing, so that the command costs a program no more than Python's own
start; `unimem.cli.exec` has the options, and asks the machine where one of them wants that.
"""

from __future__ import annotations

import os
import sys

__all__ = [
    "MIN_BYTES",
    "NOT_EXECUTABLE",
    "NOT_FOUND",
    "environment",
    "find_library",
    "find_program",
    "obstacle",
    "quick",
    "settings",
    "start",
]

# As those of a shell.
NOT_EXECUTABLE, NOT_FOUND = 126, 127
MIN_BYTES = 1 << 20

_THP = "/sys/kernel/mm/transparent_hugepage"
_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
_INTERPRETER, _DYNAMIC = 3, 2  # PT_INTERP and PT_DYNAMIC of elf.h
_MOST_SCRIPTS = 4  # that run each other, as the kernel counts them


def quick(words: list[str]) -> None:
    """Start the command, where no option needs a look at the machine; return where one does.

    Parameters
    ----------
    words : list of str
        What stands behind ``unimem exec``.
    """
    pages, min_bytes, i = "auto", MIN_BYTES, 0
    while i < len(words) and words[i] != "--":
        option, value = words[i], words[i + 1] if i + 1 < len(words) else ""
        if option == "--pages" and value in ("auto", "thp"):
            pages = value
        elif option == "--min-bytes" and value.isascii() and value.isdigit():
            min_bytes = int(value)
        else:
            return
        i += 2
    command = words[i + 1 :]
    if not command or not 4096 <= min_bytes < 1 << 60 or (pages == "thp" and not _thp_bytes()):
        return
    program = find_program(command[0])
    if program is None or obstacle(program) is not None or os.environ.get("LD_PRELOAD"):
        return
    library = find_library()
    if library is None or " " in library or ":" in library:
        return
    try:
        start(program, command, environment(library, settings(pages=pages, min_bytes=min_bytes)))
    except OSError:
        return  # which the command says in words


def settings(
    *,
    pages: str = "auto",
    min_bytes: int = MIN_BYTES,
    policy: str | None = None,
    numa: str | None = None,
    lock: bool = False,
    strict: bool = False,
    prefault_bytes: int = 0,
    threads: int = 1,
    report: bool = False,
) -> str:
    """Write what the library is to do, as the variable ``UNIMEM_EXEC`` has it.

    Parameters
    ----------
    pages : str
        As of a block, but ``"4k"``.
    min_bytes : int
        From which on an allocation is placed.
    policy : str, optional
        The kernel's number of a NUMA policy, and its nodes in words of 64 bits, as ``"3:a:0"``.
    numa : str, optional
        The same as the user wrote it, for those who read it.
    lock, strict, report : bool
        Whether memory is locked, must be as asked, and is looked at when it ends.
    prefault_bytes : int
        How much may be prefaulted at a time.
    threads : int
        That prefault.
    """
    page = os.sysconf("SC_PAGESIZE")
    words = {
        "pages": pages,
        "page": page,
        "thp": _thp_bytes(),
        "min": max(min_bytes, page),
        "most": page * os.sysconf("SC_PHYS_PAGES"),
        "lock": int(lock),
        "strict": int(strict),
        "report": int(report),
        "prefault": prefault_bytes,
        "threads": threads,
        "pid": os.getpid(),
    }
    if policy is not None:
        words |= {"policy": policy, "numa": numa}
    return "1 " + " ".join(f"{name}={value}" for name, value in words.items())


def _thp_bytes() -> int:
    """Bytes of a transparent huge page; 0 where there are none."""
    try:
        with open(f"{_THP}/enabled") as file:
            if "[never]" in file.read():
                return 0
        with open(f"{_THP}/hpage_pmd_size") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


def environment(library: str, text: str, more: dict[str, str] | None = None) -> dict[str, str]:
    """Return the environment of the command: what is preloaded already comes behind the library."""
    others = [
        each
        for each in os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
        if each != library
    ]
    new = {"LD_PRELOAD": ":".join([library, *others]), "UNIMEM_EXEC": text}
    return {**os.environ, **new, **(more or {})}


def find_library() -> str | None:
    """Find the library beside unimem's own, without importing unimem, which takes long."""
    from importlib.util import find_spec

    spec = find_spec("unimem")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = os.path.join(folder, "lib", "libunimem-exec.so")
        if os.path.exists(path):
            return path
    return None


def find_program(name: str) -> str | None:
    """Find a program as a shell does; None where there is none."""
    if "/" in name:
        return name if os.path.exists(name) else None
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(folder or ".", name)
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
    return None


def start(program: str, command: list[str], variables: dict[str, str]) -> None:
    """Become the program.

    Raises
    ------
    OSError
        The kernel does not run it.
    """
    import signal

    # Python ignores these, and a program would inherit it.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os.execve(program, command, variables)


def obstacle(path: str) -> str | None:
    """Say why the loader would not load the library, or the library not see allocations.

    Parameters
    ----------
    path : str
        The program; of a script, its interpreter is looked at.

    Returns
    -------
    str or None
        None where nothing is known to stand in the way.
    """
    for _ in range(_MOST_SCRIPTS):
        try:
            with open(path, "rb") as file:
                head = file.read(4096)
                if not head.startswith(b"#!"):
                    return _set_user(path) or _elf_obstacle(path, head, file)
        except OSError:
            return None  # it may run what it may not read
        words = head[2:].split(b"\n")[0].split()
        if not words:
            return None
        path = os.fsdecode(words[0])
        if os.path.basename(path) == "env" and len(words) > 1:
            path = find_program(os.fsdecode(words[1])) or path
    return None


def _set_user(path: str) -> str | None:
    mode = os.stat(path).st_mode
    try:
        has_rights = bool(os.getxattr(path, "security.capability"))
    except OSError:
        has_rights = False
    if mode & 0o6000 or has_rights:
        how = "is set-uid or set-gid" if mode & 0o6000 else "has file capabilities"
        return (
            f"{path} {how}: the loader preloads nothing into it; as the user that it would run as, "
            "start what it starts under unimem exec"
        )
    return None


def _elf_obstacle(path: str, head: bytes, file: object) -> str | None:
    import struct

    if head[:4] != b"\x7fELF":
        return None
    with open(sys.executable, "rb") as own:
        here = own.read(20)
    if head[4:6] != here[4:6] or head[18:20] != here[18:20]:
        return f"{path} is for another machine than Python: the library cannot be loaded into it"
    if head[4] != 2:
        return None  # of 32 bits, as Python is
    at, size, count = struct.unpack_from("=Q14xHH", head, 32)
    headers = [
        struct.unpack_from("=IIQQQQQQ", head, at + i * size)
        for i in range(count)
        if at + (i + 1) * size <= len(head)
    ]
    interpreter = next((each for each in headers if each[0] == _INTERPRETER), None)
    if interpreter is None:
        return (
            f"{path} is linked statically: it loads nothing, and its allocator stays its own; "
            "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 may reach one that is glibc's"
        )
    name = _read_at(file, interpreter[2], interpreter[5]).rstrip(b"\0")
    if b"musl" in name:
        return f"{path} is linked with musl: this library is for glibc and cannot be loaded"
    return None


def _read_at(file: object, offset: int, nbytes: int) -> bytes:
    return os.pread(file.fileno(), min(nbytes, 4096), offset)  # type: ignore[attr-defined]
