"""Deciding how a block is placed, from a request and the facts of a machine.

The functions use nothing but their arguments, so that tests can invent machines. The module
`unimem.system.limits` has the facts of this machine.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, get_args

from unimem.base.arguments import flag, integer, one_of
from unimem.base.text import format_bytes, format_count, format_ranges
from unimem.errors import PlacementError, PlacementWarning
from unimem.system.limits import SHM, HugePool, Limit, Node
from unimem.system.placement import Lock, Pages, Placement, PlacementOptions

MAX_NODES = 1024
PAGES: tuple[str, ...] = get_args(Pages)
HUGETLB = ("1g", "2m")  # the larger first, as "auto" tries them
# The message for an object over shared memory in a forked child.
LEFT_OUT = (
    "is shared memory, which is left out of a forked child: pass fileno() or the path, and use "
    "Block.attach there"
)
_GRAMMAR = (
    "expected 'bind:NODES', 'preferred:NODES', 'interleave', 'interleave:NODES', 'weighted', "
    "'weighted:NODES', or of weights 'mirror' or 'mirror:NODES', with NODES such as 0 or 0,2-3, "
    "from 0 to 1023"
)
_NUMA = re.compile(r"(bind|preferred|interleave|weighted|mirror)(?::([0-9,-]+))?")
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_BYTES = {"2m": 2 << 20, "1g": 1 << 30}

NumaMode = Literal["bind", "preferred", "interleave", "weighted", "mirror"]


class Facts(Protocol):
    """The facts of a machine and the limits of a process, as in `unimem.system.limits`."""

    def huge_pools(self) -> Mapping[str, HugePool]:
        """Return the pools of hugetlb pages, by size."""

    def nodes(self) -> Mapping[int, Node]:
        """Return the NUMA nodes."""

    def memlock(self) -> Limit | None:
        """Return the limit on locked memory."""

    def require(self, nbytes: int, what: str) -> None:
        """Raise CapacityError if this does not fit."""


@dataclass(frozen=True, slots=True)
class NumaPolicy:
    """A NUMA policy: a mode, and nodes in ascending order (empty: all usable nodes).

    Only weights have the mode "mirror": their copies are bound to one node each.
    """

    mode: NumaMode
    nodes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.mode}:{format_ranges(self.nodes)}" if self.nodes else self.mode


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request for a block.

    `reserve` is the size that the block may grow to, or `nbytes`. `mirror` is empty, or describes
    the pieces that are mapped twice: two sizes (the second is 0 if all are alike), and how many of
    one size follow each other. With `of_file`, the file system of an existing file decides on the
    pages.
    """

    nbytes: int
    pages: Pages = "auto"
    numa: NumaPolicy | None = None
    lock: Lock = False
    shared: bool | str = False
    reserve: int = 0
    mirror: tuple[int, int, int] | tuple[()] = ()
    of_file: bool = False
    page_bytes: int = 4096
    thp_bytes: int = 2 << 20


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    """The choice of what to ask the kernel for, with a sentence for each dropped part."""

    pages: Pages
    numa: NumaPolicy | None
    lock: Lock
    shortfalls: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes of a block in whole pages, and the choice of its placement."""

    nbytes: int
    choice: PlacementChoice

    @property
    def is_hugetlb(self) -> bool:
        """Whether the block lies in a reserved pool and takes no other memory."""
        return self.choice.pages in HUGETLB


def check_options(placement: Mapping[str, object]) -> None:
    """Check the ``**placement`` of a function.

    Raise TypeError or ValueError, with the option's name, for an unknown option or a wrong value.
    """
    names = PlacementOptions.__annotations__
    for name in placement:
        if name not in names:
            raise TypeError(f"{name}: no such option; placement is {', '.join(names)}")
    one_of(placement.get("pages", "auto"), "pages", PAGES)
    parse_numa(placement.get("numa"), mirror=True)
    check_lock(placement.get("lock", False), "lock")
    warm_threads(placement.get("warm", False))
    flag(placement.get("strict", False), "strict")


def warm_threads(warm: object) -> int:
    """Return how many threads `warm` asks for, or raise ValueError."""
    try:
        return int(warm) if isinstance(warm, bool) else integer(warm, "warm", 0, 2**31 - 1)
    except (TypeError, ValueError):
        raise ValueError(
            f"warm: expected False, True or a number of threads, got {warm!r:.60}"
        ) from None


def check_lock(lock: object, name: str) -> None:
    """Raise ValueError unless it is a `Lock`."""
    if not isinstance(lock, bool) and not (isinstance(lock, str) and lock == "onfault"):
        raise ValueError(f"{name}: expected False, True or 'onfault', got {lock!r:.60}")


def parse_numa(text: object, *, mirror: bool = False) -> NumaPolicy | None:
    """Parse a NUMA policy; `mirror` allows "mirror", for weights.

    Raise ValueError, with the grammar, for anything else.

    Examples
    --------
    >>> parse_numa("bind:0,2-3").nodes
    (0, 2, 3)
    """
    if text is None:
        return None
    if not isinstance(text, str):
        raise TypeError(f"numa: {_GRAMMAR}; got {type(text).__name__}")
    found = _NUMA.fullmatch(text)
    if found is None or (found[2] is None and found[1] in ("bind", "preferred")):
        raise ValueError(f"numa: {_GRAMMAR}; got {text!r}")
    nodes: set[int] = set()
    for part in found[2].split(",") if found[2] else ():
        ends = _RANGE.fullmatch(part)
        first = int(ends[1]) if ends else MAX_NODES
        last = int(ends[2] or ends[1]) if ends else MAX_NODES
        if not first <= last < MAX_NODES:
            raise ValueError(f"numa: {_GRAMMAR}; got {text!r}")
        nodes.update(range(first, last + 1))
    mode: NumaMode = found[1]  # type: ignore[assignment]
    if mode == "mirror" and not mirror:
        raise ValueError(
            f"numa: a copy on each node is for weights (open_weights, Decoder, Layout.for_model, "
            "plan), not for memory that is written: expected 'bind:NODES', 'preferred:NODES', "
            f"'interleave' or 'weighted', got {text!r}"
        )
    return NumaPolicy(mode, tuple(sorted(nodes)))


def shared_path(name: str) -> str:
    """Return the path of a shared block, or raise ValueError if no file can have this name."""
    if name in ("", ".", "..") or "/" in name or "\0" in name or len(os.fsencode(name)) > 255:
        raise ValueError(
            f"shared: expected True, False or the name of a file in {SHM} (without '/', at most "
            f"255 bytes), got {name!r}"
        )
    return f"{SHM}/{name}"


def decide(
    request: Request, facts: Facts, refused: Mapping[str, str] | None = None
) -> PlacementChoice:
    """Choose what to ask the kernel for, with a sentence for each shortfall.

    Only facts that the request needs are read. `refused` has the reasons why the kernel refused
    things that seemed available: page sizes, ``"weighted"``, or ``"numa"`` for every policy.
    """
    refused = refused or {}
    shortfalls: list[str] = []
    numa = _choose_nodes(request, facts, refused, shortfalls)
    pages = _choose_pages(request, facts, numa, refused, shortfalls)
    if numa is not None and numa.mode == "bind" and pages not in HUGETLB:
        # The kernel kills a process whose bound page has no room.
        nodes = facts.nodes()
        room = sum(nodes[node].available_bytes for node in numa.nodes)
        if room < request.nbytes:
            each = ", ".join(
                f"node {node} has {format_bytes(nodes[node].available_bytes)} of "
                f"{format_bytes(nodes[node].total_bytes)} available"
                for node in numa.nodes
            )
            shortfalls.append(
                f"numa='{request.numa}' needs {format_bytes(request.nbytes)}, and {each}: free "
                "memory there, or name more nodes ('numactl --hardware' shows them)"
            )
            numa = NumaPolicy("preferred", numa.nodes)
    lock = request.lock
    if lock and pages not in HUGETLB:  # hugetlb pages always stay in RAM
        # Memory that is mapped twice counts twice.
        refusal = lock_refusal(lock, request.nbytes * (2 if request.mirror else 1), facts)
        if refusal is not None:
            shortfalls.append(refusal)
            lock = False
    return PlacementChoice(pages, numa, lock, tuple(shortfalls))


def extent(request: Request, facts: Facts, *, strict: bool = False) -> Extent:
    """Return what a block will map; with `strict`, as if everything were granted.

    Sizes are rounded as by `um_block_map`: to hugetlb pages if chosen; to transparent huge pages if
    requested, or if an "auto" block is at least as large as one; else to base pages. Pieces that
    are mapped twice are whole pages already.
    """
    choice = decide(request, facts)
    if strict and choice.shortfalls:
        choice = PlacementChoice(request.pages, request.numa, request.lock, choice.shortfalls)
    page = request.page_bytes
    if choice.pages in HUGETLB:
        page = _BYTES[choice.pages]
    elif choice.pages == "thp" or (
        choice.pages == "auto" and max(request.nbytes, request.reserve) >= request.thp_bytes
    ):
        page = max(page, request.thp_bytes)
    nbytes = request.nbytes if request.mirror else -(-request.nbytes // page) * page
    return Extent(nbytes, choice)


def lock_refusal(lock: Lock, nbytes: int, facts: Facts) -> str | None:
    """Explain why `nbytes` cannot be locked, or return None if the limit has room for them."""
    limit = facts.memlock()
    if limit is None or limit.room_bytes >= nbytes:
        return None
    return (
        f"lock={lock!r} needs {format_bytes(nbytes)}, and {limit.name} has room "
        f"for {format_bytes(limit.room_bytes)} of {format_bytes(limit.limit_bytes)}: "
        f"{limit.remedy}"
    )


def _choose_nodes(
    request: Request, facts: Facts, refused: Mapping[str, str], shortfalls: list[str]
) -> NumaPolicy | None:
    wanted = request.numa
    if wanted is None:
        return None
    if "numa" in refused:
        shortfalls.append(f"numa='{wanted}': {refused['numa']}")
        return None
    nodes = facts.nodes()
    usable = {n for n, node in nodes.items() if node.allowed and node.total_bytes > 0}
    chosen = [n for n in (wanted.nodes or sorted(usable)) if n in usable]
    missing = [f"node {n} {_why_not(nodes.get(n))}" for n in wanted.nodes if n not in usable]
    if missing or not chosen:
        shortfalls.append(
            f"numa='{wanted}': {', '.join(missing) or 'no node can be used'}; this process can use "
            f"{format_ranges(usable) or 'none'}"
        )
    if not chosen:
        return None
    mode = wanted.mode
    if mode == "weighted" and "weighted" in refused:
        shortfalls.append(f"numa='{wanted}': {refused['weighted']}; pages are interleaved 1:1")
        mode = "interleave"
    return NumaPolicy(mode, tuple(chosen))


def _why_not(node: Node | None) -> str:
    if node is None:
        return "is offline or does not exist"
    if node.total_bytes == 0:
        return "has no memory"
    return "is not allowed to this process (cpuset: 'cat /sys/fs/cgroup/cpuset.mems.effective')"


def _choose_pages(
    request: Request,
    facts: Facts,
    numa: NumaPolicy | None,
    refused: Mapping[str, str],
    shortfalls: list[str],
) -> Pages:
    named = isinstance(request.shared, str)
    no_choice = named or request.of_file or request.mirror
    if request.pages == "auto":
        # A growing block needs room in the pool for its final size.
        most = max(request.nbytes, request.reserve)
        for size in HUGETLB:
            page = _BYTES[size]
            wasted = -request.nbytes % page
            if no_choice or request.nbytes < page or size in refused:
                continue
            if size == "1g" and wasted * 8 > request.nbytes:
                continue
            pool = facts.huge_pools().get(size)
            if pool is not None and -(-most // page) * page <= pool_room(pool, numa):
                return "1g" if size == "1g" else "2m"
        return "auto"
    if request.pages not in HUGETLB:
        return request.pages
    if named:
        reason = f"pages='{request.pages}': hugetlb pages cannot have a name in {SHM}: shared=True"
    elif request.pages in refused:
        reason = f"pages='{request.pages}': {refused[request.pages]}"
    else:
        found = pool_shortfall(request.pages, request.nbytes, facts, numa)
        if found is None:
            return request.pages
        reason = found
    shortfalls.append(reason)
    if request.nbytes < request.thp_bytes or not request.thp_bytes:
        return "4k"
    return "auto" if request.shared and not request.mirror else "thp"


def pool_room(pool: HugePool, numa: NumaPolicy | None) -> int:
    """Return the bytes that the pool has for a policy."""
    room = pool.available_bytes
    if numa is not None and numa.mode == "bind":
        on_nodes = sum(pool.nodes.get(node, (0, 0))[1] for node in numa.nodes)
        room = min(room, on_nodes * pool.page_bytes)
    return room


def pool_shortfall(
    size: str, nbytes: int, facts: Facts, numa: NumaPolicy | None = None
) -> str | None:
    """Explain why a pool of hugetlb pages cannot hold `nbytes` more, or return None if it can."""
    pools = facts.huge_pools()
    pool = pools.get(size)
    if pool is None:
        there = ", ".join(sorted(pools)) or "none"
        return (
            f"pages='{size}': this kernel has no hugetlb pages of {size} (it has {there}); some "
            f"CPUs need 'hugepagesz={size.upper()}' on the kernel's command line"
        )
    page = pool.page_bytes
    needed = -(-nbytes // page)
    room = pool_room(pool, numa) // page
    if needed <= room:
        return None
    limit = pool.limit(nbytes)
    has = f"the pool has {pool.total} in all, {pool.free} free, {pool.reserved} of these promised"
    if pool.free - pool.reserved > pool.available_bytes // page:
        has += f", and {limit.name} has room for {format_bytes(limit.room_bytes)}"
    command = limit.remedy
    if numa is not None and numa.mode == "bind":
        has += "".join(
            f", {pool.nodes.get(node, (0, 0))[1]} free on node {node}" for node in numa.nodes
        )
        more = -(-(needed - room) // len(numa.nodes))
        command = "; ".join(
            f"echo {pool.nodes.get(node, (0, 0))[0] + more} > /sys/devices/system/node/node{node}"
            f"/hugepages/hugepages-{page >> 10}kB/nr_hugepages"
            for node in numa.nodes
        )
    return (
        f"pages='{size}' needs {format_count(needed, 'hugetlb page')} of {format_bytes(page)}, and "
        f"{has}: '{command}' as root adds what is missing"
    )


def find_mismatches(
    request: Request, choice: PlacementChoice, granted: Placement, nbytes: int, *, warm: bool
) -> list[str]:
    """List the differences between a request and the placement of a block of `nbytes`.

    `nbytes` are whole pages; `warm` says that all of them were touched.
    """
    found = []
    if request.pages == choice.pages == "thp" and (
        granted.pages != "thp" or (warm and granted.huge_bytes < granted.resident_bytes)
    ):
        found.append(_why_not_thp(request, granted, warm=warm))
    elif choice.pages in HUGETLB and granted.pages != choice.pages:
        found.append(f"pages='{choice.pages}' were mapped, and the kernel says {granted.pages}")
    elif choice.pages == "4k" and granted.huge_bytes:
        found.append(f"pages='4k', and {format_bytes(granted.huge_bytes)} lie in huge pages")
    if warm and granted.resident_bytes < nbytes:
        found.append(
            f"warm: {format_bytes(granted.resident_bytes)} of {format_bytes(nbytes)} are in RAM, "
            f"and {format_bytes(granted.swapped_bytes)} swapped out: lock=True keeps them there"
        )
    if choice.numa is not None:
        text = format_misplaced(choice.numa, granted)
        if text:
            found.append(f"numa='{request.numa}': {text}: repair() moves it when there is room")
    if choice.lock:
        wanted = granted.resident_bytes if choice.lock == "onfault" else nbytes
        if granted.locked_bytes < wanted:
            found.append(
                f"lock={choice.lock!r}: {format_bytes(granted.locked_bytes)} of "
                f"{format_bytes(wanted)} are locked"
            )
    return found


def is_prefaulted(choice: PlacementChoice, facts: Facts) -> bool:
    """Whether pages are touched as soon as they are mapped.

    hugetlb pages are if a later touch could fail, which would kill the process: if the pool
    promises more than cgroups or nodes give, and if they are bound. Locked ones are in RAM at once.
    """
    if choice.pages not in HUGETLB:
        return False
    if choice.lock is True or (choice.numa is not None and choice.numa.mode == "bind"):
        return True
    pool = facts.huge_pools().get(choice.pages)
    return pool is not None and pool.may_break_promises


def require_growth(
    name: str, nbytes: int, choice: PlacementChoice | None, facts: Facts, pages: Pages
) -> None:
    """Raise PlacementError if `nbytes` more cannot be placed and locked like the rest of a block.

    Growth never takes a fallback, since the rest of the block is placed already.
    """
    numa, lock = (None, False) if choice is None else (choice.numa, choice.lock)
    found = decide(
        Request(nbytes=nbytes, pages=pages if pages in HUGETLB else "4k", numa=numa, lock=lock),
        facts,
    )
    if found.shortfalls:
        raise PlacementError(placement_message(name, nbytes, found.shortfalls, None))


def require_room(name: str, nbytes: int, choice: PlacementChoice | None, facts: Facts) -> None:
    """Raise CapacityError or PlacementError if `nbytes` that are not in RAM do not fit there."""
    facts.require(nbytes, f"warming block '{name}'")
    if choice is not None and choice.numa is not None:
        require_growth(name, nbytes, replace(choice, lock=False), facts, "4k")


def huge_page_message(name: str, granted: Placement, thp_bytes: int) -> str:
    """Report missing huge pages, or return "" if there are none missing."""
    whole = granted.resident_bytes // thp_bytes * thp_bytes if thp_bytes else 0
    if granted.huge_bytes >= whole:
        return ""
    return (
        f"Block '{name}': {format_bytes(granted.huge_bytes)} of "
        f"{format_bytes(granted.resident_bytes)} are in huge pages, and no more are free: "
        "'echo 1 > /proc/sys/vm/compact_memory' as root joins free memory"
    )


def misplaced_message(name: str, numa: NumaPolicy, left: int, granted: Placement) -> str:
    """Report the bytes that `repair` could not move."""
    where = format_misplaced(numa, granted) or ", ".join(
        f"{format_bytes(n)} on node {node}" for node, n in sorted(granted.nodes.items())
    )
    return (
        f"Block '{name}': {format_bytes(left)} could not be moved to where '{numa}' wants it "
        f"({where}): free memory on its nodes, and repair() again"
    )


def format_misplaced(numa: NumaPolicy, granted: Placement) -> str:
    """List the bytes on nodes outside a policy, or return ""."""
    wrong = {node: n for node, n in granted.nodes.items() if node not in numa.nodes and n}
    if not wrong:
        return ""
    return ", ".join(f"{format_bytes(n)} on node {node}" for node, n in sorted(wrong.items()))


def _why_not_thp(request: Request, granted: Placement, *, warm: bool) -> str:
    switch = "/sys/kernel/mm/transparent_hugepage/enabled"
    text = "pages='thp': asked for transparent huge pages"
    odd = [n for n in request.mirror[:2] if request.thp_bytes and n % request.thp_bytes]
    if odd:
        return (
            f"{text} of {format_bytes(request.thp_bytes)}, but pieces of {format_bytes(odd[0])} "
            "that are mapped twice are no multiple of these"
        )
    if request.shared:
        switch = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
        if not warm:
            return (
                f"{text}, which shared memory gets when it is warmed (warm=True, or warm() and "
                f"collapse()), or at once after 'echo advise > {switch}' as root"
            )
    if granted.pages == "thp":
        return (
            f"{text}, and {format_bytes(granted.huge_bytes)} of "
            f"{format_bytes(granted.resident_bytes)} are: free memory is in small pieces; "
            "'echo 1 > /proc/sys/vm/compact_memory' as root joins them"
        )
    value = "advise" if request.shared else "madvise"
    return f"{text}. Look at {switch}; 'echo {value} > {switch}' as root allows them"


def warm_cpus(
    numa: NumaPolicy | None, n_threads: int, nodes: Mapping[int, Node], allowed: Collection[int]
) -> list[int] | None:
    """Choose a CPU for each thread that warms, or return None if the policy does not matter.

    The threads take turns on the policy's nodes. Any allowed CPU serves a node without usable ones.
    Without a choice, the threads are pinned to the CPUs of the caller.
    """
    if numa is None or not numa.nodes or len(nodes) < 2 or not allowed:
        return None
    everywhere = sorted(allowed)
    lists = [
        [cpu for cpu in nodes[node].cpus if cpu in allowed] if node in nodes else []
        for node in numa.nodes
    ]
    chosen = []
    for i in range(n_threads):
        cpus = lists[i % len(lists)] or everywhere
        chosen.append(cpus[i // len(lists) % len(cpus)])
    return chosen


def warn(text: str) -> None:
    """Warn at the line of the caller's code that entered unimem."""
    level = 1
    frame = sys._getframe(0)
    # Only Python's functions have frames.
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
        level += 1
    warnings.warn(text, PlacementWarning, stacklevel=level)


def placement_message(
    name: str, nbytes: int, shortfalls: Iterable[str], granted: Placement | None
) -> str:
    """Write the message of a PlacementError or PlacementWarning."""
    text = f"Block '{name}' of {format_bytes(nbytes)}: {'; '.join(shortfalls)}"
    return text if granted is None else f"{text}; granted {granted}"


def remove_named(path: str, pid: int, inode: int) -> None:
    """Remove a shared block's name if this process made it and the file is still the same."""
    with suppress(FileNotFoundError):
        if os.getpid() == pid and os.stat(path).st_ino == inode:
            os.unlink(path)
