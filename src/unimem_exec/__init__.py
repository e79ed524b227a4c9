"""Start a program under `unimem exec`: options, environment, and what prevents loading.

A package that imports next to nothing, so that the command adds little more than Python's own start
to a program's. What it cannot settle from some small files of the kernel, `unimem.cli.exec` does.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as `typing` has it, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

__all__ = [
    "MIN_BYTES",
    "NOT_EXECUTABLE",
    "NOT_FOUND",
    "OPTIONS",
    "SPARE",
    "environment",
    "find_library",
    "find_model",
    "find_program",
    "host_takes_pages",
    "obstacle",
    "policy_text",
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
    "prefault": {
        "help": "Touch aligned allocations and mappings at once, with several threads, while they "
        "fit."
    },
    "strict": {"help": "As asked, or not at all: nothing is downgraded."},
    "stage": {"help": "Stage model files among the arguments, and pass their paths."},
    "report": {
        "metavar": "FILE|-",
        "help": "Write a report when the program ends: JSON, or with - a page on standard error.",
    },
}

SPARE = 8  # an eighth of the free memory is not prefaulted, but left to the program
_THP = "/sys/kernel/mm/transparent_hugepage"
_POOLS = {"2m": "hugepages-2048kB", "1g": "hugepages-1048576kB"}
_NODES = "/sys/devices/system/node"
_PROBE_BYTES = 2 << 20
# The kernel's numbers (uapi/linux/mempolicy.h).
_MODES = {"bind": 2, "interleave": 3, "weighted": 6}
_PREFERRED, _PREFERRED_MANY = 1, 5
_REPORTING = 5  # the bit of a balloon whose host takes free pages (uapi/linux/virtio_balloon.h)
_SUFFIXES = (".gguf", ".safetensors", ".safetensors.index.json")
_INTERPRETER = 3  # PT_INTERP of elf.h
_MOST_SCRIPTS = 4  # that run each other, as the kernel counts them


def quick(words: list[str]) -> None:
    """Start the command if the machine surely has what the options want; return otherwise.

    Parameters
    ----------
    words : list of str
        The words behind ``unimem exec``.
    """
    parsed = _parse(words)
    if parsed is None or os.environ.get("LD_PRELOAD"):
        return
    asked, command = parsed
    if "stage" in asked and any(map(find_model, command[1:])):
        return
    program, library = find_program(command[0]), find_library()
    if program is None or library is None or " " in library or ":" in library or obstacle(program):
        return
    try:
        found = _settle(asked)
        if found is None:
            return
        report = asked.get("report")
        more = {} if report is None else reporter(report)
        start(program, command, environment(library, settings(**found), more))
    except (OSError, RuntimeError, ValueError):
        return  # the command reports it


def _settle(asked: dict[str, str]) -> dict[str, Any] | None:
    """Return the settings of options; None if the machine may lack something.

    OSError or ValueError is raised for what cannot be read.
    """
    import resource

    found: dict[str, Any] = {name: name in asked for name in ("lock", "strict", "report")}
    pages = found["pages"] = asked.get("pages", "auto")
    found["min_bytes"] = _parse_bytes(asked.get("min_bytes", "1m"))
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    is_pool, numa = pages in _POOLS, asked.get("numa")
    if (
        found["min_bytes"] is None
        or (pages == "thp" and ("strict" in asked or not _thp_bytes()))
        or ("lock" in asked and limit != resource.RLIM_INFINITY and limit < _PROBE_BYTES)
        or (is_pool and (numa or not _has_pool(pages)))
    ):
        return None
    if is_pool:
        found["touch_pool"] = not _keeps_promises()
    if numa is not None:
        policy = _find_policy(numa)
        if policy is None:
            return None
        found["policy"], found["numa"] = policy
    if "prefault" in asked:
        if not _is_unlimited("memory.max", "memory.high", "cpu.max"):
            return None
        room = int(_field("/proc/meminfo", "MemAvailable").split()[0]) << 10
        found["prefault"] = room - room // SPARE, _count_cores()
    return found


def _read(path: str) -> str:
    with open(path) as file:
        return file.read().strip()


def _field(path: str, name: str) -> str:
    """Return a field of a file with lines of names and values; empty if it is absent."""
    for line in _read(path).splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.strip()
    return ""


def _is_unlimited(*names: str) -> bool:
    """Whether no cgroup above this process has any of these limits; False if that is unsure."""
    first, _, path = _read("/proc/self/cgroup").partition("::/")
    if first != "0" or "\n" in path or ".." in path:  # version 1, or hidden
        return False
    while True:
        for name in names:
            try:
                if not _read(os.path.join("/sys/fs/cgroup", path, name)).startswith("max"):
                    return False
            except FileNotFoundError:
                pass
        if not path:
            return _read("/proc/sys/vm/overcommit_memory") != "2"
        path = os.path.dirname(path)


def _has_pool(pages: str) -> bool:
    """Whether a pool of hugetlb pages has one that is neither used nor promised."""
    folder = f"/sys/kernel/mm/hugepages/{_POOLS[pages]}"
    size = {"2m": "2MB", "1g": "1GB"}[pages]
    limits = (f"hugetlb.{size}.max", f"hugetlb.{size}.rsvd.max")
    free, promised = (int(_read(f"{folder}/{name}_hugepages")) for name in ("free", "resv"))
    return free > promised and _is_unlimited(*limits)


def _keeps_promises() -> bool:
    """Whether a page that the pool has promised is there for sure, on every node."""
    allowed = _numbers(_field("/proc/self/status", "Mems_allowed_list"))
    return not os.path.exists("/sys/fs/cgroup/cgroup.type") and allowed >= _with_memory()


def _with_memory() -> set[int]:
    return _numbers(_read(f"{_NODES}/has_memory"))


def _numbers(text: str) -> set[int]:
    """Read a list as the kernel writes it, such as 0,2-3."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _find_policy(numa: str) -> tuple[str, str] | None:
    """Return a policy as the library and as a user reads it; None if it may be refused."""
    mode, colon, listed = numa.partition(":")
    usable = _with_memory() & _numbers(_field("/proc/self/status", "Mems_allowed_list"))
    if mode not in ("preferred", *_MODES) or bool(colon) != bool(listed):
        return None
    if not listed and mode in ("bind", "preferred"):
        return None
    nodes = _numbers(listed) if listed else usable
    weights = "/sys/kernel/mm/mempolicy/weighted_interleave"
    if (
        not nodes
        or not nodes <= usable
        or mode == "bind"  # its nodes may be full
        or (mode == "weighted" and not os.path.exists(weights))
        or _field("/proc/self/status", "Seccomp") != "0"
    ):
        return None
    return policy_text(mode, nodes), f"{mode}:{listed or ','.join(map(str, sorted(nodes)))}"


def policy_text(mode: str, nodes: Iterable[int]) -> str:
    """Write a NUMA policy for the library: the kernel's number, and nodes in words of 64 bits."""
    numbers = set(nodes)
    number = _MODES.get(mode, _PREFERRED if len(numbers) == 1 else _PREFERRED_MANY)
    bits = sum(1 << node for node in numbers)
    words = [bits >> shift & (1 << 64) - 1 for shift in range(0, max(bits.bit_length(), 1), 64)]
    return ":".join([str(number), *(f"{word:x}" for word in words)])


def _count_cores() -> int:
    """Count the physical cores that this process may use."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        folder = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        cores.add((_read(f"{folder}/physical_package_id"), _read(f"{folder}/core_id")))
    return len(cores)


def host_takes_pages() -> bool:
    """Return whether the host of this virtual machine takes free huge pages back.

    That is free page reporting of a virtio balloon. The first touch of such a page waits for the
    host: some milliseconds for 2 MiB.
    """
    folder = "/sys/bus/virtio/drivers/virtio_balloon"
    try:
        devices = [name for name in os.listdir(folder) if name.startswith("virtio")]
        return any(_read(f"{folder}/{name}/features")[_REPORTING] == "1" for name in devices)
    except (OSError, IndexError):
        return False


def find_model(word: str) -> tuple[str, str] | None:
    """Return what precedes the path of a model file in an argument, and the path; else None.

    A model is FILE or --option=FILE. Its name ends as those of models do, or its first bytes are
    those of a GGUF file.
    """
    option, sign, value = word.partition("=")
    start = option + sign if option.startswith("-") and sign else ""
    path = value if start else word
    if not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as file:
            is_model = path.endswith(_SUFFIXES) or file.read(4) == b"GGUF"
    except OSError:
        return None
    return (start, path) if is_model else None


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
    """Read a size, such as 2M, 64kib or 1.5m; None for others, which the command refuses."""
    digits = text.lower()
    unit = digits.lstrip("0123456789.")
    whole, _, part = digits.removesuffix(unit).partition(".")
    shift = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}.get(unit[:1])
    if shift is None or unit[1:] not in ("", "b", "ib") or not (whole + part).isdigit():
        return None
    value, rest = divmod(int(whole + part) << shift, 10 ** len(part))
    return value if whole and not rest and 4096 <= value <= 1 << 50 else None


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
    prefault: tuple[int, int] = (0, 1),
    touch_pool: bool = True,
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
    prefault : (int, int)
        The most bytes to prefault at a time, and the threads that do it.
    touch_pool : bool
        Whether hugetlb pages are touched at once, since the pool may break its promise.
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
        "prefault": prefault[0],
        "threads": prefault[1],
        "touch": int(touch_pool),
        "trial": int(host_takes_pages()),
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
