"""Process figures, checked against a second reading of smaps and the actions of children."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import Run
from support.kernel.huge_pages import PAGE_BYTES
from support.kernel.proc_maps import PAGE, hugetlb_bytes, mappings
from unimem.base import kernel_files
from unimem.system import limits, process
from unimem.system.process import Area, counters, read_process

MIB = 1 << 20
EVERYTHING = 1 << 64
HUGE = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")

Running = subprocess.Popen[str]
Child = Callable[..., Running]
Python = Callable[..., tuple[int, Any]]


@pytest.fixture
def child() -> Iterator[Child]:
    """Start a program and kill it at the end."""
    with ExitStack() as ends:

        def start(*command: str) -> Running:
            pipe = subprocess.PIPE
            one = ends.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
            ends.callback(one.kill)
            return one

        yield start


@pytest.fixture
def idle(child: Child) -> Running:
    """Start a small process that waits."""
    one = child("cat")
    assert answer(one, "ready") == "ready"
    return one


@pytest.fixture
def python(child: Child) -> Python:
    """Start a script that prints one line of JSON and waits; return its PID and the value."""

    def start(script: str, *arguments: str) -> tuple[int, Any]:
        code = f"import ctypes, json, mmap, os, sys\n{SAYING}{textwrap.dedent(script)}"
        one = child(sys.executable, "-c", f"{code}\nsys.stdin.read()", *arguments)
        assert one.stdout is not None
        return one.pid, json.loads(one.stdout.readline())

    return start


SAYING = """
def address(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))

def say(*values):
    print(json.dumps(values), flush=True)
"""


def answer(one: Running, *lines: str) -> str:
    """Write lines to a process and return its answer."""
    assert one.stdin is not None
    assert one.stdout is not None
    one.stdin.write("".join(f"{line}\n" for line in lines))
    one.stdin.flush()
    return one.stdout.readline().rstrip("\n")


def end(one: Running, *, reaped: bool = False) -> None:
    one.kill()
    os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
    if reaped:
        one.wait()


def area_at(pid: int, address: int) -> Area:
    (found,) = [area for area in read_process(pid).areas if area.start <= address < area.end]
    return found


# ---- smaps --------------------------------------------------------------------------------------


def test_every_area_matches_smaps(idle: Running) -> None:
    # Pss of a library changes with every process that starts or ends.
    before: Any = None
    after: Any = []
    while before != after:
        before = mappings(0, EVERYTHING, idle.pid)
        found = read_process(idle.pid)
        after = mappings(0, EVERYTHING, idle.pid)
    assert len(found.areas) == len(before) > 10
    for area, entry in zip(found.areas, before, strict=True):
        figures = entry.fields
        assert (area.start, area.end, area.access) == (entry.start, entry.end, entry.access)
        assert (area.nbytes, area.rss_bytes) == (figures["Size"], figures["Rss"])
        assert (area.pss_bytes, area.hugetlb_bytes) == (figures["Pss"], hugetlb_bytes(entry))
        assert area.huge_bytes == sum(figures[name] for name in HUGE)
        assert area.swapped_bytes == figures["Swap"]
        assert (area.page_bytes, area.flags) == (figures["KernelPageSize"], entry.flags)
        assert area.locked_bytes == (figures["Rss"] if "lo" in entry.flags else 0)
        assert sum(area.nodes.values()) == area.resident_bytes
        assert area.is_accessible == (entry.access != "---p")
    rss, pss = (sum(entry.fields[name] for entry in before) for name in ("Rss", "Pss"))
    assert (found.rss_bytes, found.pss_bytes, found.swapped_bytes) == (rss, pss, 0)
    assert rss > pss


def test_the_own_process_is_the_default() -> None:
    mine = read_process()
    assert mine.pid == os.getpid()
    assert mine.command.split(" ")[0] == Path("/proc/self/cmdline").read_text().split("\0")[0]
    assert mine.name == Path("/proc/self/comm").read_text().rstrip("\n")
    assert mine.n_threads == len(os.listdir("/proc/self/task"))
    assert pickle.loads(pickle.dumps(mine)) == mine
    assert any(area.path == "[stack]" for area in mine.areas)
    for before, after in zip(mine.areas, mine.areas[1:], strict=False):
        assert before.end <= after.start


def test_areas_without_their_usage(idle: Running) -> None:
    whole, maps = read_process(idle.pid), read_process(idle.pid, usage=False)
    assert len(maps.areas) == len(whole.areas)
    for bare, area in zip(maps.areas, whole.areas, strict=True):
        assert (bare.resident_bytes, bare.pss_bytes, bare.locked_bytes, bare.nodes) == (0, 0, 0, {})
        same = ("start", "end", "access", "offset", "device", "inode", "path")
        assert [getattr(bare, name) for name in same] == [getattr(area, name) for name in same]
    assert (maps.started, maps.command) == (whole.started, whole.command)


def test_mappings_of_children_are_found(python: Python, tmp_path: Path) -> None:
    """The children map an oddly named file, a memfd and locked memory, with a gap."""
    path = tmp_path / "a model (deleted)\nof mine: 1"
    path.write_bytes(bytes(16 * PAGE))
    pid, addresses = python(
        """
        libc = ctypes.CDLL(None)
        file = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0)
        fd = os.memfd_create("of a child")
        os.ftruncate(fd, 1 << 20)
        memory = mmap.mmap(fd, 1 << 20)
        memory[:8192] = b"1" * 8192
        locked = mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        assert libc.mlock(ctypes.c_void_p(address(locked)), ctypes.c_size_t(65536)) == 0
        gap = mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        libc.mprotect(ctypes.c_void_p(address(gap)), ctypes.c_size_t(1 << 20), 0)
        say(*map(address, (file, memory, locked, gap)))
        """,
        str(path),
    )
    file, memory, locked, gap = (area_at(pid, address) for address in addresses)
    info = path.stat()
    assert (file.path, file.inode) == (str(path).replace("\n", "\\012"), info.st_ino)
    assert file.device == (os.major(info.st_dev), os.minor(info.st_dev))
    assert (file.offset, file.nbytes, file.access) == (0, 16 * PAGE, "rw-s")
    assert memory.path == "/memfd:of a child (deleted)"
    assert memory.rss_bytes == memory.pss_bytes == 8192
    assert locked.nbytes == locked.rss_bytes == locked.locked_bytes == 65536
    assert "lo" in locked.flags
    assert not gap.is_accessible
    assert gap.resident_bytes == 0


@pytest.mark.usefixtures("eight_huge_pages")
def test_hugetlb_pages_count_in_full(python: Python) -> None:
    pid, (address,) = python(
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000 | 21 << 26
        memory = mmap.mmap(-1, 4 << 21, flags)
        memory[0] = memory[3 << 21] = 1
        say(address(memory))
        """
    )
    found = area_at(pid, address)
    assert found.page_bytes == PAGE_BYTES
    assert found.hugetlb_bytes == found.resident_bytes == found.locked_bytes == 2 * PAGE_BYTES
    assert found.rss_bytes == found.pss_bytes == found.huge_bytes == 0
    whole = read_process(pid)
    assert whole.rss_bytes == sum(area.rss_bytes for area in whole.areas) + 2 * PAGE_BYTES
    assert whole.pss_bytes == sum(area.pss_bytes for area in whole.areas) + 2 * PAGE_BYTES
    assert whole.in_ram(found.start, found.end) == 2 * PAGE_BYTES
    assert whole.in_ram(found.start + 1, found.start + PAGE_BYTES + 1) == PAGE_BYTES - 1


def test_forked_children_share(python: Python) -> None:
    parent, (address, other) = python(
        """
        memory = mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory[:] = bytes(8 << 20)
        other = os.fork()
        if other:
            say(address(memory), other)
        """
    )
    for pid in (parent, other):
        found = area_at(pid, address)
        assert found.rss_bytes == 2 * found.pss_bytes == 8 * MIB


# ---- parsing ------------------------------------------------------------------------------------

TEXT = b"""\
10000-20000 r--p 00001000 fe:0a 77                         /a/b c\\012d (deleted)
Size:                 64 kB
KernelPageSize:        4 kB
Rss:                   8 kB
Pss:                   3 kB
Locked:                1 kB
SomethingNew:         99 kB
A line of a kernel to come
Shared_Hugetlb:        0 kB
ProtectionKey:         0
VmFlags: rd mr lo xx
20000-30000 rw-p 00000000 00:00 0                          [anon:of me]
Rss:                  12 kB
30000-40000 rw-s 00000000 00:01 5 //anon
Swap:                  4 kB
VmFlags:
7fff0000-7fff1000 --xp 00000000 00:00 0                    [vsyscall]
"""


def test_new_or_missing_lines_are_accepted() -> None:
    file, named, shared, last = process._areas(TEXT)
    assert (file.offset, file.device, file.inode) == (0x1000, (0xFE, 0x0A), 77)
    assert file.path == "/a/b c\\012d (deleted)"
    assert (file.rss_bytes, file.pss_bytes, file.locked_bytes) == (8192, 3072, 8192)
    assert file.flags == {"rd", "mr", "lo", "xx"}
    assert (named.path, named.rss_bytes, named.pss_bytes) == ("[anon:of me]", 12288, 0)
    assert (named.flags, named.page_bytes) == (frozenset(), PAGE)
    assert (shared.path, shared.swapped_bytes, shared.access) == ("//anon", 4096, "rw-s")
    assert last.path == "[vsyscall]"
    assert last.is_accessible
    assert process._areas(b"") == []


def test_an_area_merged_between_two_reads_counts_once() -> None:
    joined = TEXT + b"30000-80000000 rw-p 00000000 00:00 0 \nRss:  4 kB\n"
    found = [(area.start, area.rss_bytes) for area in process._areas(joined)]
    assert found == [(0x10000, 8192), (0x20000, 12288), (0x30000, 4096)]


def test_smaps_longer_than_the_first_buffer(idle: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_process(idle.pid)
    monkeypatch.setattr(process, "_SMAPS_BYTES", 100)
    assert [area.end for area in read_process(idle.pid).areas] == [a.end for a in whole.areas]


def test_nodes_match_numa_maps(idle: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel knows no nodes (CONFIG_NUMA)")
    (first, *_) = limits.nodes().values()
    monkeypatch.setattr(limits, "nodes", lambda: {0: first, 7: replace(first, id=7)})
    found = read_process(idle.pid)
    witness: Counter[int] = Counter()
    for line in Path(f"/proc/{idle.pid}/numa_maps").read_text().splitlines():
        for word in line.split():
            if word[0] == "N" and word[1].isdigit():
                node, n_pages = map(int, word[1:].split("="))
                witness[node] += n_pages * PAGE
    sums: Counter[int] = Counter()
    for area in found.areas:
        sums.update(area.nodes)
    assert sums == witness
    # Pages of the kernel itself have no node.
    kernels = sum(area.rss_bytes for area in found.areas if area.path == "[vdso]")
    assert sum(sums.values()) == found.rss_bytes - kernels


def test_a_line_of_numa_maps_is_counted_in_its_own_pages() -> None:
    line = b"7f00 bind:1 file=/N3=4\\040N5=6 huge anon=3 N0=1 N12=2 kernelpagesize_kB=2048\n"
    assert process._nodes(line) == (0x7F00, {0: 2 * MIB, 12: 4 * MIB})
    assert process._nodes(b"7f00 default\n") == (0x7F00, {})
    assert process._nodes(b"7f00 default N1=2") == (0x7F00, {1: 2 * PAGE})


# ---- pagemap ------------------------------------------------------------------------------------


def test_touched_pages_are_in_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_PAGEMAP_ENTRIES", 16)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, 64 * PAGE, flags) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        end = start + 64 * PAGE
        touched = {0, 1, 30, 33, 63}
        for page in touched:
            memory[page * PAGE] = 1
        mine = read_process()
        assert mine.in_ram(start, end) == len(touched) * PAGE
        assert set(mine.pages_in_ram(start, end).nonzero()[0]) == touched
        for low, high, nbytes in (
            (0, 0, 0), (5, 5, 0), (5, 9, 4), (5, PAGE + 9, PAGE + 4),
            (5, 3 * PAGE + 9, 2 * PAGE - 5), (2 * PAGE, 64 * PAGE - 1, 3 * PAGE - 1),
            (PAGE - 1, 2 * PAGE + 9, PAGE + 1),
        ):  # fmt: skip
            assert mine.in_ram(start + low, start + high) == nbytes
        # Returned memory is not counted, whatever smaps said before.
        memory.madvise(mmap.MADV_DONTNEED)
        assert mine.in_ram(start, end) == 0
    assert mine.in_ram(0, 16 * PAGE) == 0
    assert mine.in_ram((1 << 64) - 2 * PAGE, 1 << 64) == 0


def test_written_pages_of_a_private_mapping_are_copies(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8 * PAGE))
    with (tmp_path / "file").open("rb") as file:
        for flags, copied in ((mmap.MAP_PRIVATE, [2, 5]), (mmap.MAP_SHARED, [])):
            prot = mmap.PROT_READ | mmap.PROT_WRITE * bool(copied)
            with mmap.mmap(file.fileno(), 0, flags, prot) as memory:
                assert sum(memory[::PAGE]) == 0
                for page in copied:
                    memory[page * PAGE] = 1
                mine = read_process()
                (area,) = (each for each in mine.areas if each.path == file.name)
                assert area.written_bytes == area.anonymous_bytes == len(copied) * PAGE
                found = mine.pages_written(area.start, area.end)
                assert found.nonzero()[0].tolist() == copied
                assert mine.in_ram(area.start, area.end) == 8 * PAGE


@pytest.mark.parametrize(("start", "end"), [(PAGE, 0), (-PAGE, PAGE)])
def test_invalid_ranges(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="expected a range of addresses"):
        read_process().in_ram(start, end)


def test_pages_of_a_process_that_ended(idle: Running) -> None:
    found = read_process(idle.pid)
    area = found.areas[0]
    # A later process with the same PID is not asked.
    with pytest.raises(ProcessLookupError, match="has ended"):
        replace(found, started=found.started + 1).in_ram(area.start, area.end)
    end(idle)
    with pytest.raises(ProcessLookupError, match="has ended"):
        found.in_ram(area.start, area.end)
    idle.wait()
    with pytest.raises(ProcessLookupError, match="There is no process"):
        found.in_ram(area.start, area.end)


def test_a_process_that_ends_before_it_is_read(
    idle: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only root may look at a process that waits for its parent; other users are refused."""
    found = read_process(idle.pid)

    def refuse(_folder: int, name: str) -> Any:
        end(idle)
        raise PermissionError(errno.EACCES, "no", name)

    monkeypatch.setattr(process, "_file", refuse)
    with pytest.raises(ProcessLookupError, match="has ended"):
        found.in_ram(0, PAGE)


# ---- counters -----------------------------------------------------------------------------------


def test_counters_count_faults() -> None:
    before = counters()
    n_pages = 500
    with mmap.mmap(-1, n_pages * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(n_pages):
            memory[page * PAGE] = 1
        after = counters(os.getpid())
    assert after.minor_faults - before.minor_faults >= n_pages
    assert (after.pid, after.started) == (before.pid, before.started)
    assert after.cpu_seconds >= before.cpu_seconds > 0
    assert after.n_threads == len(os.listdir("/proc/self/task"))
    assert after.read_bytes is not None
    found = read_process()
    assert found.minor_faults >= after.minor_faults
    assert found.started == after.started


def test_counters_match_the_kernel_s_names(idle: Running) -> None:
    found = counters(idle.pid)
    lines = Path(f"/proc/{idle.pid}/io").read_text().splitlines()
    assert f"read_bytes: {found.read_bytes}" in lines
    stat = Path(f"/proc/{idle.pid}/stat").read_text().split()
    assert [found.minor_faults, found.major_faults] == [int(stat[9]), int(stat[11])]
    assert (found.n_threads, found.started) == (int(stat[19]), int(stat[21]))
    ticks = int(stat[13]) + int(stat[14])
    assert found.cpu_seconds == ticks / os.sysconf("SC_CLK_TCK")


def test_counters_without_permission_to_read_io(
    idle: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = kernel_files.read_bytes

    def refuse(name: str, folder: int | None = None) -> bytes:
        if name == "io":
            raise PermissionError(errno.EACCES, "no", name)
        return plain(name, folder)

    whole = counters(idle.pid)
    monkeypatch.setattr(kernel_files, "read_bytes", refuse)
    assert counters(idle.pid) == replace(whole, read_bytes=None)


def test_a_name_may_have_parentheses(child: Child, tmp_path: Path) -> None:
    name = ") S 1 (x y"
    (tmp_path / name).symlink_to(shutil.which("cat") or "/bin/cat")
    one = child(str(tmp_path / name))
    assert answer(one, "ready") == "ready"
    assert read_process(one.pid).name == name
    assert counters(one.pid).n_threads == 1


def test_processes_are_listed_by_psutil_loaded_on_first_use(run_python: Run) -> None:
    ended = run_python("""
        import os, sys
        import unimem
        from unimem.cli import processes
        from unimem.weights.staged import holders
        assert "psutil" not in sys.modules
        others = list(processes._others())
        assert "psutil" in sys.modules
        assert os.getppid() in others and os.getpid() not in others
        holders()
        """)
    assert ended.returncode == 0, ended.stderr


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [read_process, counters])
@pytest.mark.parametrize(
    ("pid", "kind", "text"),
    [
        (0, ValueError, "expected the number of a process, from 1 on, got 0"),
        (-3, ValueError, "got -3"),
        *((n, TypeError, f"pid: expected an integer, got {n!r}") for n in (True, "1", 1.0)),
        (1 << 30, ProcessLookupError, "There is no process 1073741824 here: 'ps -e' lists"),
        (1 << 90, ProcessLookupError, "There is no process"),
    ],
)
def test_pids_of_no_process(read: Any, pid: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        read(pid)


def test_a_zombie_has_no_memory(idle: Running) -> None:
    end(idle)
    with pytest.raises(ValueError, match=rf"{idle.pid} \(cat\) has ended and waits for its par"):
        read_process(idle.pid)
    with pytest.raises(ProcessLookupError, match="has ended"):
        counters(idle.pid)


def test_a_thread_of_the_kernel_has_no_memory() -> None:
    if not Path("/proc/2/comm").exists() or Path("/proc/2/cmdline").read_bytes():
        pytest.skip("no thread of the kernel is visible here")
    with pytest.raises(ValueError, match=r"2 \(kthreadd\) is a thread of the kernel"):
        read_process(2)
    assert counters(2).n_threads == 1


def test_a_process_of_another_user(run_python: Run, idle: Running) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    ended = run_python(f"""
        import os
        from unimem.system.process import counters, read_process
        os.setresuid(65534, 65534, 65534)
        whole = counters({idle.pid})
        assert whole.read_bytes is None and whole.minor_faults > 0
        for pid in ({idle.pid}, None):
            try:
                found = read_process(pid)
                print(found.in_ram(found.areas[0].start, found.areas[0].end))
            except PermissionError as error:
                print(error.strerror)
        """)
    assert ended.returncode == 0, ended.stderr
    of_root, own = ended.stdout.splitlines()
    assert of_root.startswith(f"Process {idle.pid} (cat")
    assert of_root.endswith("is of user 'root': run this as that user, or as root")
    # It may read its memory but not its page tables, which then belong to root.
    assert own.endswith("is unreadable, as after a change of users: run this as root")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (errno.EACCES, "CAP_SYS_PTRACE, which root lacks here"),
        (errno.ENOENT, r"This kernel does not tell .*: it has no smaps"),
    ],
)
def test_no_smaps(idle: Running, monkeypatch: pytest.MonkeyPatch, code: int, text: str) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(code, "no", "smaps")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(process, "_read_smaps", fail)
    with pytest.raises(type(OSError(code, "")), match=text):
        read_process(idle.pid)


def test_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    with pytest.raises(FileNotFoundError, match="/proc is not mounted here"):
        read_process(1 << 30)


# ---- meanwhile ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reaped", [False, True])
@pytest.mark.parametrize("when", ["_stat", "read_bytes", "_read_smaps", "_areas"])
@pytest.mark.parametrize("first", [False, True])
def test_a_process_that_ends_during_a_read(
    idle: Running, monkeypatch: pytest.MonkeyPatch, when: str, first: bool, reaped: bool
) -> None:
    module = kernel_files if when == "read_bytes" else process
    plain = getattr(module, when)

    def act(*arguments: Any) -> Any:
        monkeypatch.undo()
        result = None if first else plain(*arguments)
        end(idle, reaped=reaped)
        return plain(*arguments) if first else result

    n_open = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(module, when, act)
    # A process that was a zombie from the start is reported as one.
    zombie = first and not reaped and when in ("_stat", "read_bytes")
    with pytest.raises(ValueError if zombie else ProcessLookupError, match="has ended"):
        read_process(idle.pid)
    assert len(os.listdir("/proc/self/fd")) == n_open


def test_a_process_becomes_another_program(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    one = child("sh", "-c", "echo ready; read x; exec cat")
    assert answer(one) == "ready"
    plain = process._read_smaps

    def become(fd: int) -> bytes:
        smaps = plain(fd)
        assert answer(one, "become", "another") == "another"
        return smaps

    monkeypatch.setattr(process, "_read_smaps", become)
    with pytest.raises(ProcessLookupError, match="has become another program"):
        read_process(one.pid)
    monkeypatch.undo()
    assert read_process(one.pid).command == "cat"
