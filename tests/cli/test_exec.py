"""`unimem exec`: placed allocations, reports, refusals and exit codes."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs typer: pip install '.[run]'")

import unimem as um
import unimem_exec as launch
from support.files import gguf_files as gf
from support.models.llama_cpp import llama_library
from support.project.building import run, tool
from support.project.checkout import ROOT
from support.project.documents import check_document
from support.terminal.screens import run_anew, show
from unimem.staging.llama_cpp import cpu_features
from unimem.system.policy import parse_numa

cli_exec = importlib.import_module("unimem.cli.exec")
LIBRARY = launch.find_library()
pytestmark = pytest.mark.skipif(
    LIBRARY is None, reason="libunimem-exec.so is not installed: make install"
)

MIB = 1 << 20
MAIN = "import sys; from unimem_command import main; sys.exit(main())"
PYTHON = (sys.executable, "-I", "-S", "-c")
TINY = ROOT / "src/unimem/engine/models/tiny.gguf"
HAS_THP = launch._thp_bytes() != 0

# The C library's functions, called as by a program unaware of unimem.
C = """
import ctypes, mmap, os, sys
c = ctypes.CDLL(None)
for name in ("malloc", "calloc", "realloc", "aligned_alloc"):
    getattr(c, name).restype = ctypes.c_void_p
c.free.argtypes = [ctypes.c_void_p]
c.realloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
c.malloc_usable_size.argtypes = [ctypes.c_void_p]
MIB = 1 << 20
def fill(at, nbytes):
    ctypes.memset(at, 7, nbytes)
    return at
"""
HOLD = """
print("ready", flush=True)
sys.stdin.read()
"""


def start(script: str, *options: str, **rest: Any) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", MAIN, "exec", *options, "--", *PYTHON, C + script]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(words, text=True, **(pipes | rest))


@contextmanager
def holding(script: str, *options: str) -> Iterator[int]:
    """Start a script under exec that has run and still exists."""
    with start(script + HOLD, *options) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


def of_script(script: str, *options: str, **rest: Any) -> str:
    """Return the output of a script that succeeds."""
    with start(script, *options, **rest) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    return out


ALLOCATIONS = """
kept = [
    fill(c.malloc(33 * MIB), 33 * MIB), fill(c.calloc(5, 7 * MIB), 35 * MIB),
    fill(c.aligned_alloc(4096, 40 * MIB), 40 * MIB),
]
at = ctypes.c_void_p()
c.posix_memalign(ctypes.byref(at), 64, 50 * MIB)
fill(at, 50 * MIB)
mapped = mmap.mmap(-1, 60 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for i in range(0, 60 * MIB, 4096):
    mapped[i] = 1
"""


def test_large_memory_is_placed_and_seen() -> None:
    with holding(ALLOCATIONS) as pid:
        report = um.report(pid)
    placed = [each for each in report.mappings if each.category == "placed"]
    asked = {each.requested["nbytes"] // MIB for each in placed if each.requested}
    assert asked >= {33, 35, 40, 50, 60}
    assert {each.name for each in placed} >= {"malloc", "calloc", "aligned_alloc", "mmap"}
    row = next(row for row in report.rows if row.category == "placed")
    assert row.granted is not None
    assert row.resident_bytes is not None
    assert row.resident_bytes >= 218 * MIB
    if HAS_THP:
        assert row.granted.huge_bytes >= 0.9 * row.resident_bytes
    facts = report.facts["exec"]
    assert facts["malloc_is_placed"]
    assert facts["n_mappings"] == len(placed)
    assert "libc" in facts["allocator"]
    assert "placed" in str(report)
    assert "exec" in str(report)


def test_a_program_works_as_without_exec() -> None:
    script = textwrap.dedent("""
    at = fill(c.malloc(20 * MIB), 20 * MIB)
    at = c.realloc(at, 90 * MIB)
    grown = ctypes.string_at(at, 20 * MIB) == b"\\7" * (20 * MIB)
    child = os.fork()
    if child == 0:
        c.free(at)
        other = fill(c.malloc(30 * MIB), 30 * MIB)
        os._exit(9 if ctypes.string_at(other, 9) == b"\\7" * 9 else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    at = c.realloc(at, 100)
    print(grown, status, ctypes.string_at(at, 100) == b"\\7" * 100, c.malloc_usable_size(at) < MIB)
    c.free(at)
    """)
    assert of_script(script) == "True 9 True True\n"
    assert of_script(script, "--min-bytes", "4096") == "True 9 True True\n"


FORK_SERVER = """
import socketserver
shared = fill(c.malloc(20 * MIB), 20 * MIB)
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        number = int(self.rfile.readline())
        own = c.realloc(fill(c.malloc(3 * MIB), 3 * MIB), 9 * MIB)
        ctypes.memset(own, number, 3 * MIB)
        ctypes.memset(shared, number, MIB)
        good = ctypes.string_at(own, 3 * MIB) == bytes([number]) * (3 * MIB)
        good &= ctypes.string_at(shared + MIB, 19 * MIB) == b"\\7" * (19 * MIB)
        c.free(own)
        c.free(shared)
        self.wfile.write(b"%d %d\\n" % (number, good))
with socketserver.ForkingTCPServer(("127.0.0.1", 0), Handler) as server:
    print(server.server_address[1], flush=True)
    for _ in range(20):
        c.free(fill(c.malloc(2 * MIB), 2 * MIB))  # what a child has is not what its parent frees
        server.handle_request()
print(ctypes.string_at(shared, 20 * MIB) == b"\\7" * (20 * MIB))
"""


def test_a_fork_server_answers_from_its_children_s_memory() -> None:
    with start(FORK_SERVER, "--min-bytes", "4096") as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        links = []
        for number in range(20):
            links.append(socket.create_connection(("127.0.0.1", port)))
            links[-1].sendall(b"%d\n" % number)
        answers = [link.makefile().read() for link in links]
        for link in links:
            link.close()
        out, err = process.communicate()
    assert answers == [f"{number} 1\n" for number in range(20)]
    assert (process.returncode, out) == (0, "True\n"), err


def without_the_right_to_lock(nbytes: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user with this limit on locked memory."""
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("taking rights away from root needs setpriv")
        words = ("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", *words)
    elif hard != resource.RLIM_INFINITY and hard < nbytes:
        pytest.skip(f"this user may lock {hard >> 10} KiB of memory: ulimit -l")
    limit = f'ulimit -l {nbytes >> 10} && exec "$@"'
    return subprocess.run(
        ["sh", "-c", limit, "sh", *words], capture_output=True, text=True, check=False
    )


LOCKS = """
def locked():
    return next(int(l.split()[1]) >> 10 for l in open("/proc/self/status") if "VmLck" in l)
before = locked()  # of the interpreter
fill(c.malloc(4 * MIB), 4 * MIB)
print(locked() - before)
for _ in range(4):
    fill(c.malloc(4 * MIB), 4 * MIB)
print(locked() <= 8)
"""


def test_a_user_may_lock_up_to_the_limit() -> None:
    words = [sys.executable, "-c", MAIN, "exec", "--lock", "--", *PYTHON, C + LOCKS]
    done = without_the_right_to_lock(8 * MIB, *words)
    assert (done.returncode, done.stdout) == (0, "4\nTrue\n"), done.stderr
    assert done.stderr.count("the limit on locked memory was reached (ulimit -l)") == 1


def test_a_forbidden_lock_is_refused() -> None:
    done = without_the_right_to_lock(
        64 << 10, sys.executable, "-c", MAIN, "exec", "--lock", "--", "true"
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert "ulimit -l" in done.stderr


def test_children_are_placed_too() -> None:
    child = "print('libunimem-exec' in open('/proc/self/maps').read())"
    script = f"import subprocess; subprocess.run({[*PYTHON, child]!r})"
    assert of_script(script) == "True\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--", "sh", "-c", "exit 7"], 7, ""),
        (["sh", "-c", "exit 5"], 5, ""),
        (["--", "/etc/passwd"], 126, "Permission denied"),
    ],
)
def test_the_exit_code_is_the_program_s(words: list[str], code: int, said: str) -> None:
    screen = run_anew("exec", *words, code=MAIN)
    assert (screen.code, screen.out) == (code, "")
    assert said in screen.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--", "no-such-program"], 127, "no such program"),
        (["--numa", "bind:1000", "--", "true"], 3, "node 1000"),
        (["--numa", "nonsense", "--", "true"], 2, "expected 'bind:NODES'"),
        (["--min-bytes", "10", "--", "true"], 2, "expected a whole number from 4096"),
        (["--pages", "4k", "--", "true"], 2, "4k"),
        (["--report", "/no/file", "--", "true"], 1, "/no/file: No such file"),
        ([], 2, "COMMAND"),
    ],
)
def test_a_refused_program_never_starts(
    monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, said: str
) -> None:
    monkeypatch.setattr(cli_exec, "become", never)
    screen = show("exec", *words)
    assert (screen.code, screen.out) == (code, "")
    assert said in " ".join(screen.err.split())


def never(*_: object) -> None:
    raise AssertionError("it was started")


def test_signals_reach_the_program() -> None:
    with start(HOLD, stderr=None) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
    # Python ignores this signal; a program started from it must not.
    words = [sys.executable, "-c", MAIN, "exec", "--", "sh", "-c", "kill -PIPE $$"]
    assert subprocess.run(words, check=False).returncode == -signal.SIGPIPE


def test_an_empty_pool_is_refused(monkeypatch: pytest.MonkeyPatch, no_huge_pages: None) -> None:
    monkeypatch.setattr(cli_exec, "become", never)
    screen = show("exec", "--pages", "2m", "--", "true")
    assert screen.code == 3
    assert "nr_hugepages" in screen.err


@pytest.mark.usefixtures("eight_huge_pages")
def test_a_pool_that_is_too_small_is_named_where_it_fails(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    script = "print(c.malloc(12 * MIB) is not None, c.malloc(40 * MIB), flush=True); os.abort()"
    with start(script, "--pages", "2m", "--strict", "--report", str(file)) as process:
        out, err = process.communicate()
    assert (process.returncode, out) == (-signal.SIGABRT, "True None\n"), err
    assert "--strict: an allocation of 40 MiB has failed: 18 huge pages are missing" in err
    assert re.search(r"echo \d+ > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", err)
    assert json.loads(file.read_text())["facts"]["exec"]["n_passed_on"] == 1


TABLE = """
def rss():
    text = open("/proc/self/smaps_rollup").read()
    return int(text.split("Rss:")[1].split()[0]) << 10
before, at = rss(), ctypes.c_void_p()
table = c.malloc(320 * MIB)
touched = rss()
c.posix_memalign(ctypes.byref(at), 64, 40 * MIB)
print(touched - before, rss() - touched)
"""


def test_prefault_leaves_the_tables_of_malloc_alone() -> None:
    """A scheduler's table of ggml: a trial touches a sixteenth, where the host takes free pages."""
    table, tensors = map(int, of_script(TABLE, "--prefault").split())
    assert table <= (320 // 16 + 1) * MIB
    assert tensors >= 40 * MIB


@pytest.mark.parametrize(
    ("numa", "text"),
    [
        ("bind:0", "2:1"),
        ("preferred:3", "1:8"),
        ("preferred:0-1", "5:3"),
        ("interleave:0,64", "3:1:1"),
        ("weighted:1", "6:2"),
    ],
)
def test_policies_are_the_kernel_s_numbers(numa: str, text: str) -> None:
    policy = parse_numa(numa)
    assert policy is not None
    assert launch.policy_text(policy.mode, policy.nodes) == text


# ---- what it cannot do --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("programs")
    source = folder / "main.c"
    source.write_text("int main(void) { return 4; }\n")
    static, own = folder / "static", folder / "dynamic"
    run(tool("gcc"), "-static", "-o", static, source)
    run(tool("gcc"), "-o", own, source)
    privileged = folder / "privileged"
    shutil.copy(own, privileged)
    privileged.chmod(0o755 | stat.S_ISUID)
    script = folder / "script"
    script.write_text(f"#!{static}\n")
    script.chmod(0o755)
    foreign = folder / "foreign"
    foreign.write_bytes(own.read_bytes()[:18] + b"\x08\0" + own.read_bytes()[20:])
    foreign.chmod(0o755)
    return {path.name: path for path in (static, own, privileged, script, foreign)}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("static", "linked statically"),
        ("script", "linked statically"),
        ("privileged", "set-uid"),
        ("foreign", "another machine"),
        ("dynamic", None),
    ],
)
def test_programs_that_cannot_load_the_library_are_named(
    programs: dict[str, Path], name: str, said: str | None
) -> None:
    found = launch.obstacle(str(programs[name]))
    assert (found is None) == (said is None)
    assert said is None or said in (found or "")


def test_a_static_program_runs_unless_strict(programs: dict[str, Path]) -> None:
    screen = run_anew("exec", "--", programs["static"], code=MAIN)
    assert (screen.code, "linked statically" in screen.err) == (4, True)
    with open("/dev/full", "w") as full:
        assert run_anew("exec", "--", programs["static"], code=MAIN, stderr=full).code == 4
    screen = show("exec", "--strict", "--", programs["static"])
    assert (screen.code, "linked statically" in screen.err) == (3, True)


def test_another_allocator_keeps_all_allocations(tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text(
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <stddef.h>\nstatic int n;\n"
        "int other_calls(void) { return n; }\n"
        "void *malloc(size_t m) { static void *(*real)(size_t); "
        'if (!real) real = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc"); n++; return real(m); }\n'
    )
    other = tmp_path / "libother.so"
    run(tool("gcc"), "-shared", "-fPIC", "-o", other, source)
    script = C + "before = c.other_calls(); c.malloc(100); small = c.other_calls(); "
    script += "c.malloc(30 * MIB); print(small > before, c.other_calls() > small)\n"
    script += "print([p.rpartition('/')[2] for p in os.environ['LD_PRELOAD'].split(':')])"
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "exec", "--", *PYTHON, script],
        env=os.environ | {"LD_PRELOAD": str(other)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["True True", "['libunimem-exec.so', 'libother.so']"]


# ---- the report at the end ----------------------------------------------------------------------


# A library that starts before unimem's and places memory.
EARLY = """
#include <stdlib.h>
void *volatile kept;
__attribute__((constructor)) static void begin(void) { kept = malloc(20 << 20); }
"""


def test_the_report_says_what_was_placed(tmp_path: Path) -> None:
    source, early, file = tmp_path / "early.c", tmp_path / "libearly.so", tmp_path / "report.json"
    source.write_text(EARLY)
    run(tool("gcc"), "-shared", "-fPIC", "-o", early, source)
    script = "at = fill(c.malloc(40 * MIB), 40 * MIB); kept = fill(c.malloc(30 * MIB), 30 * MIB)\n"
    of_script(
        script + "c.free(at); os._exit(0)",
        "--report",
        str(file),
        env=os.environ | {"LD_PRELOAD": str(early)},
    )
    document = json.loads(file.read_text())
    check_document(document)
    facts = document["facts"]["exec"]
    (ended,) = (each for each in facts["ended"] if each["requested_bytes"] == 40 * MIB)
    assert (ended["via"], ended["n"]) == ("malloc", 1)
    assert ended["resident_bytes"] in (None, 40 * MIB)
    of_size = {(each["requested"] or {}).get("nbytes"): each for each in document["mappings"]}
    kept = of_size[30 * MIB]
    assert kept["granted"]["resident_bytes"] == 30 * MIB
    assert 20 * MIB in of_size
    assert facts["became_resident_bytes"] >= 30 * MIB
    assert facts["became_huge_bytes"] <= facts["became_resident_bytes"]
    assert facts["malloc_is_placed"]
    assert "libc" in facts["allocator"]


def test_the_page_begins_with_what_became_huge() -> None:
    with start("kept = fill(c.malloc(40 * MIB), 40 * MIB)", "--report", "-") as process:
        first = process.communicate()[1].splitlines()[0]
    assert re.fullmatch(
        r"huge pages +[\d.]+ M?i?B of [4-9]\d\.\d MiB that unimem exec placed .*", first
    )


# ---- models -------------------------------------------------------------------------------------


def test_a_model_without_suffix_is_staged_and_its_copies_named(tmp_path: Path) -> None:
    model = tmp_path / "sha256-0011"  # as ollama names it
    rows = [gf.tensor("blk.0.ffn_up.weight", (256, 32), 12, 0)]  # q4_K
    model.write_bytes(gf.with_data(gf.head(len(rows), 0), *rows, nbytes=32 * 144)[0])
    script = "import sys; print(sys.argv[1])"
    screen = run_anew("exec", "--stage", "--", *PYTHON, script, model, code=MAIN)
    try:
        assert screen.code == 0, screen.err
        assert Path(screen.out.strip()).read_bytes() == model.read_bytes()
        assert screen.out.strip() != str(model)
        copies = {"avx2", "amx_int8", "asimddp"} & cpu_features()
        assert screen.err.count("makes a copy of its own of up to 4.5 KiB of it") == bool(copies)
    finally:
        run_anew("stage", "--drop", str(model), code=MAIN)


def test_models_among_the_arguments_are_staged() -> None:
    script = "import sys; print(sys.argv[1:])"
    words = ["exec", "--stage", "--", *PYTHON, script, TINY, f"--model={TINY}", "other.gguf"]
    screen = run_anew(*words, code=MAIN)
    assert screen.code == 0, screen.err
    first, second, third = ast.literal_eval(screen.out)
    try:
        assert Path(first).read_bytes()[:4] == b"GGUF"
        assert Path(first).stat().st_size == TINY.stat().st_size
        assert (second, third) == (f"--model={first}", "other.gguf")
        assert first != str(TINY)
        assert screen.err.count("is staged as") == 2
        words[-4:] = "import os; print(os.readlink('/proc/self/fd/2'))", TINY
        with open("/dev/full", "w") as full:  # which stays the program's
            assert run_anew(*words, code=MAIN, stderr=full).out == "/dev/full\n"
    finally:
        run_anew("stage", "--drop", first, code=MAIN)


def test_a_model_of_a_type_from_later_is_planned_and_staged(tmp_path: Path) -> None:
    """What needs no types works: sizes follow from the gaps between tensors."""
    model = tmp_path / "later.gguf"
    rows = [gf.tensor("new", (8,), 156, 0), gf.tensor("known", (8,), gf.F32, 64)]
    keys = gf.kv("general.architecture", gf.STRING, gf.string("later"))
    model.write_bytes(gf.with_data(gf.head(2, 1), *keys, *rows, nbytes=96)[0])
    plan = um.plan(model, ctx=64)
    assert (plan["weights:type_156"].nbytes, plan["weights:f32"].nbytes) == (64, 32)
    assert plan.verdict == "at least"
    script = "import sys; print(sys.argv[1])"
    screen = run_anew("exec", "--stage", "--", *PYTHON, script, model, code=MAIN)
    try:
        assert screen.code == 0, screen.err
        assert "is staged as" in screen.err
        assert Path(screen.out.strip()).read_bytes() == model.read_bytes()
    finally:
        run_anew("stage", "--drop", str(model), code=MAIN)


# ---- the quick way ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "is_quick"),
    [
        (["--", "true"], True),
        (["true", "--help"], True),
        (["--min-bytes", "65536", "--", "true", "--help"], True),
        (["--min-bytes=64k", "true"], True),
        (["--pages", "auto", "--report", "-", "--", "true"], True),
        (["--pages=2m", "--pages", "auto", "true"], True),
        (["--min-bytes", "1.5M", "--", "true"], True),
        (["--min-bytes", "2MiB", "--", "true"], True),
        (["--min-bytes", "1.0001k", "--", "true"], False),
        (["--strict", "--", "true"], True),
        (["--stage", "--", "true", "other.gguf"], True),
        (["--stage", "--", "true", f"--model={TINY}"], False),
        (["--min-bytes", "1", "--", "true"], False),
        (["--pages", "4k", "--", "true"], False),
        (["--report", "/no/file", "--", "true"], False),
        (["--lock=1", "--", "true"], False),
        (["--help"], False),
        (["--min_bytes", "64k", "--", "true"], False),
        (["--"], False),
        (["--pages"], False),
        (["--", "no-such-program"], False),
    ],
)
def test_the_fast_path_serves_what_the_machine_surely_has(
    monkeypatch: pytest.MonkeyPatch, words: list[str], is_quick: bool
) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch, "start", lambda *found: started.append(found))
    launch.quick(words)
    assert bool(started) == is_quick
    if is_quick:
        program, command, variables = started[0]
        assert program.endswith("/true")
        assert command == words[words.index("true") :]
        assert variables["LD_PRELOAD"] == LIBRARY


@pytest.mark.parametrize(
    ("limit", "may_lock"), [(resource.RLIM_INFINITY, True), (8 * MIB, True), (64 << 10, False)]
)
def test_locks_within_the_limit_are_quick(
    monkeypatch: pytest.MonkeyPatch, limit: int, may_lock: bool
) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    started: list[str] = []
    monkeypatch.setattr(launch, "start", lambda *found: started.append(found[2]["UNIMEM_EXEC"]))
    launch.quick(["--lock", "true"])
    assert [" lock=1 " in text for text in started] == [True] * may_lock


def test_the_table_has_all_options_of_the_command() -> None:
    assert launch.OPTIONS.keys() == inspect.signature(cli_exec.exec_).parameters.keys() - {
        "command"
    }


# Files of a machine that has all of it.
POOL = "/sys/kernel/mm/hugepages/hugepages-2048kB"
FILES = {
    "/proc/self/cgroup": "0::/user.slice",
    "/proc/sys/vm/overcommit_memory": "0",
    "/sys/fs/cgroup/user.slice/memory.max": "max",
    "/sys/fs/cgroup/user.slice/cpu.max": "max 100000",
    "/proc/meminfo": "MemAvailable: 8192 kB",
    "/proc/self/status": "Seccomp:\t0\nMems_allowed_list:\t0-1",
    "/sys/devices/system/node/has_memory": "0-1",
    f"{POOL}/free_hugepages": "3",
    f"{POOL}/resv_hugepages": "2",
}
QUICK = """
import json, os, sys
import unimem_exec as launch
files = json.loads(sys.argv[1])
def read(path):
    if "/topology/" in path or "transparent_hugepage" in path:
        return "0"
    if path not in files:
        raise FileNotFoundError(path)
    return files[path]
launch._read = read
heavy = {"unimem", "numpy", "typer", "dataclasses", "re", "typing", "ctypes"} - set(sys.modules)
def report(program, command, variables):
    print(variables["UNIMEM_EXEC"], sorted(heavy & set(sys.modules)))
launch.start = report
launch.quick(sys.argv[2:])
"""


def quick_settings(files: dict[str, str], *words: str) -> str:
    """Return the settings of the quick path on a machine with these files; empty without them."""
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [sys.executable, "-c", QUICK, json.dumps(files), *words, "true"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (("--pages", "2m"), "pages=2m"),
        (("--numa", "preferred:1"), "policy=1:2 numa=preferred:1"),
        (("--lock",), "lock=1"),
        (("--min-bytes", "2M"), "min=2097152"),
        (("--prefault",), "prefault=7340032 threads=1"),
        (("--strict",), "strict=1"),
        (("--stage",), "report=0"),
        (("--report", "-"), "report=1"),
    ],
)
def test_no_option_imports_anything_large(option: tuple[str, ...], text: str) -> None:
    made = quick_settings(FILES, *option)
    assert f" {text} " in made
    assert made.endswith(" []\n")


@pytest.mark.parametrize(
    ("option", "file", "text"),
    [
        (("--pages", "2m"), f"{POOL}/resv_hugepages", "3"),
        (("--pages", "2m"), "/sys/fs/cgroup/user.slice/hugetlb.2MB.max", "4194304"),
        (("--pages", "2m", "--numa", "interleave"), "/proc/self/cgroup", "0::/"),
        (("--pages", "1g"), "/proc/self/cgroup", "0::/"),
        (("--numa", "preferred:2"), "/proc/self/cgroup", "0::/"),
        (("--numa", "bind:0"), "/proc/self/cgroup", "0::/"),
        (("--numa", "interleave"), "/proc/self/status", "Seccomp:\t2\nMems_allowed_list:\t0-1"),
        (("--numa", "interleave:"), "/proc/self/cgroup", "0::/"),
        (("--prefault",), "/sys/fs/cgroup/memory.max", "4194304"),
        (("--prefault",), "/proc/self/cgroup", "1:memory:/a\n0::/a"),
        (("--prefault",), "/proc/sys/vm/overcommit_memory", "2"),
    ],
)
def test_an_unsure_machine_is_left_to_the_command(
    option: tuple[str, ...], file: str, text: str
) -> None:
    assert quick_settings(FILES | {file: text}, *option) == ""


def test_a_host_that_takes_pages_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    features = {"virtio0": "00000", "virtio1": "0000010"}
    monkeypatch.setattr(os, "listdir", lambda _: [*features, "bind"])
    monkeypatch.setattr(launch, "_read", lambda path: features[path.split("/")[-2]])
    assert [launch.host_takes_pages()] == [False]
    features["virtio0"] = "0110010"
    assert launch.host_takes_pages()
    assert " trial=1 " in launch.settings()
    features |= dict.fromkeys(features, "0110000")
    assert " trial=0 " in launch.settings()


@pytest.mark.parametrize("name", ["sha256-0011", "model.gguf"])
def test_a_model_is_found_by_its_name_or_its_first_bytes(tmp_path: Path, name: str) -> None:
    model, other = tmp_path / name, tmp_path / "text"
    shutil.copy(TINY, model)
    other.write_text("GGU")
    assert launch.find_model(str(model)) == ("", str(model))
    assert launch.find_model(f"--model={model}") == ("--model=", str(model))
    for word in (str(other), f"{model}.gone", str(tmp_path), "--model="):
        assert launch.find_model(word) is None


# ---- llama.cpp ----------------------------------------------------------------------------------

LLAMA = """
import json, os, sys, time
from unimem_bench.llama_cpp import Conversation, Flags, Library, PeerModel, options
given = options(Flags(repack=True, flash=True), n_ctx=4096, n_threads=2)
talk = Conversation(PeerModel(Library(sys.argv[2]), sys.argv[1], given), given)
batch, tokens = [1, 300, 301], []
for _ in range(6):
    batch = [int(talk.decode(batch).argmax())]
    tokens += batch
sums = dict.fromkeys(("Anonymous", "AnonHugePages"), 0)
for _ in range(120):  # slow huge pages are joined after the start, without haste
    for line in open("/proc/self/smaps_rollup"):
        name, _, value = line.partition(":")
        if name in sums:
            sums[name] = int(value.split()[0])
    is_placed = "LD_PRELOAD" in os.environ
    if not is_placed or sums["AnonHugePages"] >= 0.95 * sums["Anonymous"]:
        break
    time.sleep(0.5)
print("RESULT", json.dumps([tokens, sums]))
"""


@pytest.mark.slow  # servers are started, with it and without
@pytest.mark.parametrize("name", ["redis", "server"])
def test_foreign_servers_answer_the_same(name: str) -> None:
    if name == "server":
        llama_library()
    elif shutil.which("redis-benchmark") is None:
        pytest.skip("redis-benchmark is not installed")
    words = [name, "--requests", "500", "--chats", "5"]
    done = subprocess.run(
        [sys.executable, ROOT / "tools/exec_suites.py", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\| .* \| \d+ \| [1-9]\d* \| 0 \|$", done.stdout, re.M), done.stdout


@pytest.mark.uncounted
@pytest.mark.slow  # a model of 0.7 GB is written, and read twice
def test_llama_cpp_writes_the_same_text_in_huge_pages(tmp_path: Path) -> None:
    library = llama_library()
    pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
    if not HAS_THP:
        pytest.skip("this kernel has no transparent huge pages, or they are off")
    from unimem_bench.models import write_model

    model = str(write_model(tmp_path, "1.1b", "q4_k_m"))
    results = []
    for prefix in ([], [sys.executable, "-c", MAIN, "exec", "--"]):
        done = subprocess.run(
            [*prefix, sys.executable, "-c", LLAMA, model, str(library)],
            capture_output=True,
            text=True,
            check=True,
        )
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT"))
        results.append(json.loads(line.removeprefix("RESULT ")))
    (plain, _), (tokens, sums) = results
    assert tokens == plain
    assert sums["AnonHugePages"] >= 0.95 * sums["Anonymous"], sums
