"""In small cgroups: what would pass their limits is refused by name, and the process lives."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

import unimem as um
from support.kernel.cgroups import SmallCgroup, hugetlb_cgroup
from support.processes.child_checks import CHECKS
from support.processes.forks import SANITIZED
from support.project.tiers import slow_after

BEGIN = (
    CHECKS
    + """
def no_room(use, *parts):
    named = ("does not fit: cgroup ", "has room for", "limit 512.0 MiB")
    error = refused(um.CapacityError, use, *named, *parts)
    assert error.limit == 512 * MIB and error.used < error.limit < error.used + error.asked
    print(error)

"""
)
# What is refused, and how often.
SCRIPTS = {
    "making": """
for options in ({}, {"warm": True}, {"shared": True, "warm": True}, {"pages": "4k", "lock": True}):
    no_room(lambda: um.Block(600 * MIB, name="kv", **options), "block 'kv' of 600.0 MiB")
no_room(lambda: um.Tape(600 * MIB, name="tape"), "block 'tape'")
with um.Block(180 * MIB, pages="4k", warm=True) as block:
    assert block.granted.resident_bytes == 180 * MIB
    with um.Block(200 * MIB, warm=True):
        no_room(block.sealed_copy, "block 'sealed copy of block' of 180.0 MiB")
""",
    "warming": """
with um.Block(300 * MIB, name="a") as a, um.Block(300 * MIB, name="b") as b:
    a.warm()
    no_room(b.warm, "warming block 'b' of 300.0 MiB")
    assert b.verify().resident_bytes == 0
    a.warm()  # it is there already
    b.as_array()[: 80 * MIB] = 1  # with sanitizers the interpreter itself takes 100 and more
    no_room(b.warm, "warming block 'b' of 220.0 MiB")
""",
    "freezing": """
with um.Layout(4096, 300 * MIB, 300 * MIB) as layout:
    for tape in (layout.scratch, layout.history):
        tape.take_bytes(300 * MIB)
    no_room(layout.freeze, "Layout.freeze: warming memory of 600.0 MiB")
    assert not layout.frozen and layout.history.block.verify().resident_bytes == 0
""",
    "growing": """
with um.Block(200 * MIB, reserve=4096 * MIB, warm=True, name="kv") as block:
    address = block.address
    block.commit(300 * MIB)
    no_room(lambda: block.commit(900 * MIB), "growth of block 'kv' of 600.0 MiB")
    assert (block.nbytes, block.address) == (300 * MIB, address)
    block.warm()
    no_room(lambda: block.commit(600 * MIB), "growth of block 'kv' of 300.0 MiB")
    assert block.as_array()[:].nbytes == 300 * MIB
    assert block.release(0, 200 * MIB) == 200 * MIB
    block.commit(300 * MIB)
    block.warm()
    assert block.verify().resident_bytes == 300 * MIB
""",
}


@pytest.mark.usefixtures("no_huge_pages")  # they are not the memory cgroup's
@pytest.mark.parametrize("what", slow_after(1, SCRIPTS))
def test_what_has_no_room(what: str, cgroup_512mb: SmallCgroup) -> None:
    said = cgroup_512mb.run(BEGIN + SCRIPTS[what])
    expected = {"making": 6, "warming": 2, "freezing": 1, "growing": 2}
    assert said.count(cgroup_512mb.name) == expected[what]


# ---- hugetlb pages: two of the eight in the pool are allowed ----

FOUR_PAGES = 8 << 20


@pytest.fixture(params=["", "rsvd."], ids=["in use", "promised"])
def two_pages(request: pytest.FixtureRequest, eight_huge_pages: None) -> Iterator[SmallCgroup]:
    with hugetlb_cgroup(4 << 20, request.param) as cgroup:
        yield cgroup


HUGE = (
    CHECKS
    + """
import sys
from unimem.system import limits
NAME = next((limit.name for limit in limits.huge_pools()["2m"].cgroups), None)
def strict(n=1, **options):
    return um.Block(n * 2 * MIB, pages="2m", strict=True, **options)
def fill(*blocks):
    for block in blocks:
        block.as_array()[:] = 7
"""
)
# Blocks that nobody has touched yet count like all others.
HUGE_SCRIPTS = {
    "three blocks": """
held = [strict(shared=shared) for shared in (False, True)]
refused(um.PlacementError, strict, NAME, "has room for 0 B", "hugetlb.2MB.")
with warned(lambda: um.Block(2 * MIB, pages="2m"), NAME) as block, um.Block(2 * MIB) as auto:
    assert block.granted.pages != "2m" and auto.granted.pages != "2m"
    fill(*held, block, auto)
""",
    "growth": """
with strict(reserve=16 * MIB) as block:
    block.commit(4 * MIB)
    refused(um.PlacementError, lambda: block.commit(6 * MIB), NAME)
    fill(block)
    assert block.granted.huge_bytes == block.nbytes == 4 * MIB
""",
    "copies and mirrors": """
with strict(2) as block:
    fill(block)
    with warned(lambda: block.sealed_copy(pages="2m"), NAME) as copy:
        assert copy.granted.pages != "2m" and (copy.as_array() == 7).all()
with um.Block._mirrored(4 * MIB, 2 * MIB, pages="2m", strict=True) as ring:
    fill(ring)
    refused(um.PlacementError, strict, NAME)
""",
    "a cache and a model": """
with strict():
    model = os.path.join(os.path.dirname(um.__file__), "engine", "models", "tiny.gguf")
    with warned(lambda: um.KVCache(4, 4, 64, 4096, pages="2m"), NAME) as kv:
        fill(kv.block)
    with um.open_weights(model, load="copy", pages="2m", strict=True) as weights:
        assert weights.blocks[0].granted.pages == "2m"
    with strict():
        with warned(lambda: um.open_weights(model, load="copy", pages="2m"), NAME) as weights:
            assert weights.blocks[0].granted.pages != "2m"
""",
}


@pytest.mark.parametrize("what", HUGE_SCRIPTS)
def test_hugetlb_pages_that_are_granted_are_there(what: str, two_pages: SmallCgroup) -> None:
    two_pages.run(HUGE + HUGE_SCRIPTS[what])


HOLDS = """
block = strict(2)
print("ready", flush=True)
sys.stdin.readline()
fill(block)
"""


def test_two_processes_that_fit_alone_do_not_fit_together(two_pages: SmallCgroup) -> None:
    command = two_pages.entering([sys.executable, "-c", HUGE + HOLDS])
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        two_pages.run(HUGE + 'refused(um.PlacementError, strict, NAME, "has room for 0 B")')
        holder.communicate("\n")
    assert holder.returncode == 0


HIDDEN = """
held = [strict(), strict()]
refused(um.PlacementError, strict, "hugetlb.*.max the limits of cgroups")
fill(*held)
"""


def test_limits_that_a_container_hides_are_kept(two_pages: SmallCgroup) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("no unshare on this machine, which begins a namespace of cgroups")
    command = ["unshare", "--cgroup", sys.executable, "-c", HUGE + HIDDEN]
    done = subprocess.run(two_pages.entering(command), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_memory_of_another_cgroup_is_attached_as_far_as_it_is_there(
    two_pages: SmallCgroup,
) -> None:
    """An untouched page would be this cgroup's at its first touch."""
    with um.Block(FOUR_PAGES, pages="2m", shared=True, strict=True) as block:
        path = f"/proc/{os.getpid()}/fd/{block.fileno()}"
        attach = f"lambda: um.Block.attach({path!r}, writable=True)"
        script = f"refused((um.PlacementError, MemoryError), {attach}, 'hugetlb')"
        if two_pages.kind == "":
            two_pages.run(HUGE + script)
        block.warm()
        two_pages.run(HUGE + f"with ({attach})() as block:\n    fill(block)")
        assert (block.as_array() == 7).all()


EXEC = """
import ctypes, mmap
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
pages = [c.malloc(ctypes.c_size_t(2 << 20)) for _ in range(4)]
for page in pages:
    if page:
        ctypes.memset(page, 7, 2 << 20)
assert c.madvise(ctypes.c_void_p(pages[0]), ctypes.c_size_t(2 << 20), mmap.MADV_DONTNEED) == 0
assert ctypes.string_at(pages[0], 9) + ctypes.string_at(pages[0] + (2 << 20) - 9, 9) == bytes(18)
table = open("/proc/self/smaps").read()
print([bool(page) for page in pages], table.count("KernelPageSize:     2048 kB"))
"""


@pytest.mark.skipif(SANITIZED, reason="unimem exec preloads a library of its own")
@pytest.mark.parametrize("strict", [False, True])
def test_programs_under_exec_get_pages_that_are_there(strict: bool, two_pages: SmallCgroup) -> None:
    main = "import sys; from unimem_command import main; sys.exit(main())"
    options = ["exec", "--pages", "2m", "--min-bytes", "2m", *["--strict"] * strict]
    done = subprocess.run(
        two_pages.entering(
            [sys.executable, "-c", main, *options, "--", sys.executable, "-c", EXEC]
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    taken = [True, True, not strict, not strict]
    assert done.stdout == f"{taken} 2\n"
    assert "huge pages" in done.stderr or strict
