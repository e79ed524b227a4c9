"""Start a program under `unimem exec`: options, environment, and what prevents loading.

A package that imports next to nothing, so that the command adds little more than Python's own start
to a program's. `unimem.cli.exec` handles the options that depend on the machine.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as `typing` has it, which takes long to import
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "MIN_BYTES",
    "NOT_EXECUTABLE",
    "NOT_FOUND",
    "OPTIONS",
    "environment",
    "find_library",
    "find_program",
    "obstacle",
    "quick",
    "reporter",
    "settings",
    "start",
]

# A shell's exit codes.
NOT_EXECUTABLE, NOT_FOUND = 126, 127
MIN_BYTES = 1 << 20

# The options, for `quick` and for typer: an option without `choices` or `metavar` is a flag.
OPTIONS: dict[str, dict[str, Any]] = {
    "pages": {
        "choices": ("auto", "thp", "2m", "1g"),
        "help": "Pages of large allocations: transparent huge pages (thp; auto takes them from "
        "2 MiB on), or those of a reserved pool.",
    },
    "numa": {
        "metavar": "MODE[:NODES]",
        "help": "NUMA nodes of the same: bind:0,2-3, preferred:1, interleave or weighted. "
        "[default: none]",
    },
    "lock": {"help": "Keep touched memory in RAM."},
    "min_bytes": {
        "metavar": "N",
        "help": "The least size that counts as large, as 64k. [default: 1M]",
    },
    "prefault": {"help": "Touch it at once, with several threads, while it fits."},
    "strict": {"help": "As asked, or not at all: nothing is downgraded."},
    "stage": {"help": "Stage model files among the arguments, and pass their paths."},
    "report": {
        "metavar": "FILE|-",
        "help": "Write a report when the program ends: JSON, or with - a page on standard error.",
    },
}

_THP = "/sys/kernel/mm/transparent_hugepage"
_INTERPRETER = 3  # PT_INTERP of elf.h
_MOST_SCRIPTS = 4  # that run each other, as the kernel counts them


def quick(words: list[str]) -> None:
    """Start the command if no option depends on the machine; return otherwise, or on an error.

    Parameters
    ----------
    words : list of str
        The words behind ``unimem exec``.
    """
    import resource

    parsed = _parse(words)
    if parsed is None:
        return
    asked, command = parsed
    pages, min_bytes = asked.get("pages", "auto"), _parse_bytes(asked.get("min_bytes", "1m"))
    unlimited = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY
    if (
        asked.keys() & {"numa", "prefault", "strict", "stage"}
        or pages in ("2m", "1g")
        or (pages == "thp" and not _thp_bytes())
        or ("lock" in asked and not unlimited)
        or min_bytes is None
        or os.environ.get("LD_PRELOAD")
    ):
        return
    program, library = find_program(command[0]), find_library()
    if program is None or library is None or " " in library or ":" in library or obstacle(program):
        return
    try:
        report = asked.get("report")
        more = {} if report is None else reporter(report)
        text = settings(
            pages=pages, min_bytes=min_bytes, lock="lock" in asked, report=report is not None
        )
        start(program, command, environment(library, text, more))
    except (OSError, RuntimeError):
        return  # the command reports it


def _parse(words: list[str]) -> tuple[dict[str, str], list[str]] | None:
    """Separate options from the command; None for wrong usage or a request for help."""
    asked: dict[str, str] = {}
    i = 0
    while i < len(words) and words[i].startswith("-") and words[i] != "--":
        option, sign, value = words[i].partition("=")
        name = option[2:].replace("-", "_")
        row = OPTIONS.get(name)
        if row is None or option != f"--{name.replace('_', '-')}":
            return None
        if "choices" in row or "metavar" in row:
            i += not sign
            value = value if sign else words[i] if i < len(words) else ""
            if not value or value not in row.get("choices", (value,)):
                return None
        elif sign:
            return None
        asked[name] = value
        i += 1
    command = words[i + (words[i : i + 1] == ["--"]) :]
    return (asked, command) if command else None


def _parse_bytes(text: str) -> int | None:
    """Read a size in its usual forms; None for others, which the command reads or refuses."""
    shift = {"k": 10, "m": 20, "g": 30}.get(text[-1].lower(), 0)
    digits = text[:-1] if shift else text
    value = int(digits) << shift if digits.isascii() and digits.isdigit() else 0
    return value if 4096 <= value <= 1 << 50 else None


def reporter(file: str) -> dict[str, str]:
    """Return the variables that make the library write a report.

    Raises
    ------
    OSError
        The file cannot be written.
    RuntimeError
        The path of Python is unknown.
    """
    if not sys.executable:
        raise RuntimeError("--report needs the path of Python, which it does not know of itself")
    path = file
    if file != "-":
        path = os.path.abspath(file)
        # An unwritable file is reported before anything runs. A new one is for its owner alone.
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
    return {"UNIMEM_EXEC_PYTHON": sys.executable, "UNIMEM_EXEC_REPORT": path}


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
    """Write the library's instructions, for the variable ``UNIMEM_EXEC``.

    Parameters
    ----------
    pages : str
        As of a block, but for ``"4k"``.
    min_bytes : int
        The least size of an allocation that is placed.
    policy : str, optional
        The kernel's number of a NUMA policy, and its nodes in words of 64 bits, as ``"3:a:0"``.
    numa : str, optional
        The same policy in the user's words, for reports.
    lock, strict, report : bool
        Whether memory is locked, whether a downgrade is a failure, whether a report is written.
    prefault_bytes : int
        The most bytes to prefault at a time.
    threads : int
        Threads that prefault.
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
    """Return the bytes of a transparent huge page; 0 if they are off."""
    try:
        with open(f"{_THP}/enabled") as file:
            if "[never]" in file.read():
                return 0
        with open(f"{_THP}/hpage_pmd_size") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


def environment(library: str, text: str, more: dict[str, str] | None = None) -> dict[str, str]:
    """Return the command's environment; the library precedes other preloaded ones."""
    others = [
        each
        for each in os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
        if each != library
    ]
    new = {"LD_PRELOAD": ":".join([library, *others]), "UNIMEM_EXEC": text}
    return {**os.environ, **new, **(more or {})}


def find_library() -> str | None:
    """Find the library beside unimem's own, without the slow import of unimem."""
    from importlib.util import find_spec

    spec = find_spec("unimem")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = os.path.join(folder, "lib", "libunimem-exec.so")
        if os.path.exists(path):
            return path
    return None


def find_program(name: str) -> str | None:
    """Find a program as a shell does; None if it does not exist."""
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

    # Python ignores these signals, and a program would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os.execve(program, command, variables)


def obstacle(path: str) -> str | None:
    """Explain why preloading would not work.

    Parameters
    ----------
    path : str
        The program; a script is followed to its interpreter.

    Returns
    -------
    str or None
        None if no obstacle is known.
    """
    for _ in range(_MOST_SCRIPTS):
        try:
            with open(path, "rb") as file:
                head = file.read(4096)
                if not head.startswith(b"#!"):
                    return _set_user(path) or _elf_obstacle(path, head, file)
        except OSError:
            return None  # an unreadable program may be executable
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
            f"{path} {how}: the loader preloads nothing into it; start the programs that it starts "
            "under unimem exec, as the user that it runs as"
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
