"""Judge a machine: what slows inference down or makes it fail, and the command that changes it.

A machine that serves well has no findings. A finding that may only gain a little is optional.
"""

from __future__ import annotations

from collections.abc import Iterator

from unimem.base.distributions import NAMESAKE, other_distributions
from unimem.base.text import format_bytes, format_count
from unimem.system.machine import Finding, MachineFacts

_THP = "/sys/kernel/mm/transparent_hugepage"
_GIB = 1 << 30
_EXAMPLE_BYTES = 16 * _GIB  # the size of an example model
_ENOUGH_MAPS = 65530  # the kernel's default
_QUIET_SWAPPINESS = 10
_LARGE_READ_AHEAD = 1 << 20  # about a matrix of an expert
_LARGE_BYTES = 64 << 30  # below, a pool of 1 GiB pages costs more room than it gains

# Linux versions and their new features; the last column says whether one needs several nodes.
_CAME = (
    ((5, 14), "MADV_POPULATE_WRITE (5.14)", "warming touches every page itself", False),
    ((6, 1), "MADV_COLLAPSE (6.1)", "existing memory cannot be made huge", False),
    ((6, 7), "PAGEMAP_SCAN (6.7)", "looking for huge pages takes longer", False),
    ((6, 9), "weighted interleave (6.9)", "nodes of unequal speed get equal shares", True),
)


def judge(machine: MachineFacts) -> tuple[Finding, ...]:
    """Judge the facts of a machine, the greatest effect first, and optional findings last."""
    found = [finding for rule in _RULES for finding in rule(machine)]
    return tuple(sorted(found, key=lambda finding: finding.is_optional))


def _names(_: MachineFacts) -> Iterator[Finding]:
    for name in other_distributions():
        yield Finding(
            f"the distribution {name} brings a package 'unimem', too",
            f"{NAMESAKE[0].upper()}{NAMESAKE[1:]}.",
            f"pip uninstall {name}",
            "'import unimem' and the command are this package's",
        )


def _cgroup_memory(machine: MachineFacts) -> Iterator[Finding]:
    memory = machine.memory
    for limit in memory.limits:
        if limit.name.startswith("cgroup") and limit.limit_bytes < memory.total_bytes:
            yield Finding(
                f"{limit.name} holds the process to {format_bytes(limit.limit_bytes)}",
                f"The machine has {format_bytes(memory.total_bytes)}. Page cache counts, so mapped "
                "weights beyond the limit are dropped and read again; beyond it with other memory, "
                "the kernel kills the process, or slows it down where the limit is memory.high.",
                limit.remedy,
                "the process may have more of the machine's memory",
            )


def _overcommit(machine: MachineFacts) -> Iterator[Finding]:
    if machine.memory.overcommit_mode == 2:
        yield Finding(
            "memory is promised strictly (vm.overcommit_memory=2)",
            "Private memory is refused at the commit limit even while RAM is free, and a fork of a "
            "large process needs its size again.",
            "sysctl vm.overcommit_memory=0",
            "memory is refused only where it is obviously too much",
        )


def _thp(machine: MachineFacts) -> Iterator[Finding]:
    thp, own = machine.thp, machine.thp.size
    base_pages = (
        "Blocks get base pages unless a hugetlb pool is reserved: first touch is several times "
        "slower, and random access misses the TLB."
    )
    if thp.enabled is None:
        yield Finding(
            "this kernel has no transparent huge pages",
            base_pages,
            "boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE=y",
            "blocks get huge pages without a pool",
        )
        return
    if thp.mode == "never":
        has_own = own is not None and own.enabled not in (None, "inherit")
        file = f"hugepages-{(thp.page_bytes or 0) >> 10}kB/enabled" if has_own else "enabled"
        yield Finding(
            "transparent huge pages are off",
            base_pages,
            f"echo madvise > {_THP}/{file}",
            "blocks get huge pages; programs that do not ask for them stay as they are",
        )
    if thp.is_disabled_for_process:
        yield Finding(
            "transparent huge pages are disabled for this process",
            "It, or its parent, called prctl(PR_SET_THP_DISABLE): blocks get base pages "
            "whatever the machine's settings are.",
            "start it without that call (a service manager or a wrapper makes it)",
            "the machine's settings hold for this process, too",
        )


def _cpuset(machine: MachineFacts) -> Iterator[Finding]:
    nodes = machine.numa.nodes.values()
    missing = [node for node in nodes if node.total_bytes and not node.allowed]
    if not missing:
        return
    every = ",".join(str(node.id) for node in nodes if node.total_bytes)
    room = format_bytes(sum(node.total_bytes for node in missing))
    path = machine.numa.cpuset_path
    yield Finding(
        f"the cpuset leaves out {_nodes([node.id for node in missing])}",
        f"{room} and the bandwidth of that memory cannot be used; binding a block there is "
        "refused.",
        f"echo {every} > {path}" if path else f"docker run --cpuset-mems={every} ...",
        "blocks can be placed on every node",
    )


def _mbind(machine: MachineFacts) -> Iterator[Finding]:
    may = machine.capabilities
    if len(machine.numa.nodes) > 1 and may.has_seccomp_filter and not may.has_sys_nice:
        yield Finding(
            "placing memory on nodes may be refused in this container",
            "A seccomp filter is set and CAP_SYS_NICE is missing: the usual filters then refuse "
            "mbind and set_mempolicy, and memory lands where it is first touched.",
            "docker run --cap-add SYS_NICE ...",
            "bind, interleave and repair work",
        )


def _quota(machine: MachineFacts) -> Iterator[Finding]:
    cpu = machine.cpu
    if cpu.quota and cpu.quota.cpus < cpu.allowed_cores:
        unlimited = "max" if cpu.quota.path.endswith("cpu.max") else "-1"
        yield Finding(
            f"a CPU quota leaves {cpu.quota.cpus:.3g} of {format_count(cpu.allowed_cores, 'core')}",
            "A thread that has used up its share stops until the next period, and all other "
            "threads wait for it at the end of each matrix product.",
            f"echo {unlimited} > {cpu.quota.path}",
            "all cores that the process may use compute all the time",
        )


def _memlock(machine: MachineFacts) -> Iterator[Finding]:
    limit = machine.memory.memlock
    if limit and limit.limit_bytes < machine.memory.total_bytes:
        yield Finding(
            f"only {format_bytes(limit.limit_bytes)} may be locked (memlock)",
            "lock=True is refused beyond that, and unlocked memory may be swapped out or dropped.",
            "ulimit -l unlimited",
            "blocks of any size can be locked in RAM; for a service LimitMEMLOCK=infinity does it, "
            "for a container --ulimit memlock=-1",
        )


def _hugetlb_cgroups(machine: MachineFacts) -> Iterator[Finding]:
    for name, pool in machine.pools.items():
        if not pool.total or not pool.cgroups:
            continue
        limit = min(pool.cgroups, key=lambda limit: limit.limit_bytes)
        if limit.limit_bytes < pool.total * pool.page_bytes:
            yield Finding(
                f"{limit.name} allows {format_bytes(limit.limit_bytes)} of the pool of {name} "
                "pages",
                f"The pool has {format_bytes(pool.total * pool.page_bytes)}; blocks beyond the "
                "limit get other pages, whatever is free.",
                limit.remedy,
                "blocks can have all reserved pages",
            )


def _numa(machine: MachineFacts) -> Iterator[Finding]:
    numa = machine.numa
    if len(numa.nodes) < 2:
        return
    if numa.balancing and numa.balancing & 1:
        yield Finding(
            "the kernel moves pages between nodes (kernel.numa_balancing)",
            "It unmaps memory without a policy of its own to see who uses it: tokens take page "
            "faults, and pages follow threads. Blocks that are bound or interleaved stay.",
            "sysctl kernel.numa_balancing=0",
            "pages stay where they are, and tokens take no faults for it",
        )
    if numa.zone_reclaim_mode:
        yield Finding(
            f"a full node drops its page cache first (vm.zone_reclaim_mode="
            f"{numa.zone_reclaim_mode})",
            "Mapped weights are page cache: they are dropped and read again while other nodes "
            "have free memory.",
            "sysctl vm.zone_reclaim_mode=0",
            "memory of the other nodes is used first",
        )


def _read_ahead(machine: MachineFacts) -> Iterator[Finding]:
    for disk in machine.disks:
        if (disk.read_ahead_bytes or 0) > _LARGE_READ_AHEAD:
            yield Finding(
                f"{disk.name} reads {format_bytes(disk.read_ahead_bytes or 0)} ahead",
                "Each page fault in a mapped file may bring that much. For a model larger than "
                "memory, that is many times what a token needs, and drops what the next one needs.",
                f"echo 128 > {disk.read_ahead_path}",
                "a fault brings 128 KiB, in files that are opened from then on; weights that are "
                "streamed (load='stream') do not depend on it",
            )


def _swap(machine: MachineFacts) -> Iterator[Finding]:
    memory = machine.memory
    if memory.swap_total_bytes and (memory.swappiness or 0) > _QUIET_SWAPPINESS:
        yield Finding(
            f"the kernel swaps readily (vm.swappiness={memory.swappiness})",
            "KV caches and scratch memory that rest for a while are written to "
            f"{format_bytes(memory.swap_total_bytes)} of swap, and the next token waits for them.",
            "sysctl vm.swappiness=1",
            "page cache is dropped before anonymous memory is swapped; lock=True is surer",
        )


def _defrag(machine: MachineFacts) -> Iterator[Finding]:
    thp = machine.thp
    if thp.mode not in ("always", "madvise"):
        return
    run = f"echo defer+madvise > {_THP}/defrag"
    if thp.defrag == "always" and thp.mode == "always":
        yield Finding(
            "every page fault may wait for compaction (THP defrag=always)",
            "With THP for all memory, any fault of any program stalls until memory is compacted "
            "or none can be: latency of tokens jumps when memory is fragmented.",
            run,
            "only blocks that ask for huge pages wait, once, when they are warmed",
        )
    elif thp.defrag in ("defer", "never"):
        then = "khugepaged makes them later" if thp.defrag == "defer" else "nothing makes room"
        yield Finding(
            f"no fault makes room for a huge page (THP defrag={thp.defrag})",
            f"Once memory is fragmented, blocks get base pages: {then}.",
            run,
            "blocks that ask for huge pages get them when they are warmed",
        )


def _reporting(machine: MachineFacts) -> Iterator[Finding]:
    if machine.thp.host_takes_pages:
        yield Finding(
            "the host takes free huge pages back (free page reporting of virtio-balloon)",
            "About 2 seconds after memory was freed, the first touch of a huge page waits for the "
            "host: 4 to 5 ms for 2 MiB were measured, against 0.2 ms just after it was freed, and "
            "1 ms in small pages. A start after a rest takes longer than one after another.",
            "on the host: free-page-reporting=off for the virtio-balloon device",
            "the first touch never waits for the host; the host gets less memory back",
            is_optional=True,
        )


def _shmem(machine: MachineFacts) -> Iterator[Finding]:
    thp, own = machine.thp, machine.thp.size
    if thp.shmem_mode in ("never", "deny"):
        has_own = own is not None and own.shmem_enabled not in (None, "inherit")
        is_own = has_own and thp.shmem_enabled != "deny"
        file = f"hugepages-{(thp.page_bytes or 0) >> 10}kB/" if is_own else ""
        yield Finding(
            f"shared memory gets no huge pages by itself (shmem_enabled={thp.shmem_mode})",
            "Shared blocks get base pages until collapse() gathers them, and processes that "
            "attach map them as base pages.",
            f"echo advise > {_THP}/{file}shmem_enabled",
            "shared blocks get huge pages at first touch, in every process",
        )
    if thp.shm_mount == "never" and thp.shmem_enabled != "force":
        yield Finding(
            "files in /dev/shm get no huge pages by themselves",
            "Blocks shared by name lie there: they get base pages until collapse() gathers them.",
            "mount -o remount,huge=advise /dev/shm",
            "blocks shared by name get huge pages at first touch",
        )


def _kernel(machine: MachineFacts) -> Iterator[Finding]:
    missing = [
        (version, name, effect)
        for version, name, effect, needs_nodes in _CAME
        if machine.kernel.version < version
        and not (needs_nodes and (len(machine.numa.nodes) < 2 or machine.numa.weights))
    ]
    if not missing:
        return
    major, minor = max(version for version, _, _ in missing)
    lacks = "; ".join(f"{name}: {effect}" for _, name, effect in missing)
    yield Finding(
        f"Linux {'.'.join(map(str, machine.kernel.version))} is older than {major}.{minor}",
        f"By its version it lacks {lacks}. Distributions may have added some of these.",
        f"boot Linux {major}.{minor} or newer",
        "the missing features are used automatically",
        # From 6.1 on, only speed of looking and shares of nodes are missing.
        is_optional=machine.kernel.version >= (6, 1),
    )


def _maps(machine: MachineFacts) -> Iterator[Finding]:
    count = machine.memory.max_map_count
    if count is not None and count < _ENOUGH_MAPS:
        yield Finding(
            f"a process may have only {count} mappings (vm.max_map_count)",
            "Blocks, guard pages and parts with their own policy are mappings: mmap fails with "
            "ENOMEM while memory is free.",
            "sysctl vm.max_map_count=262144",
            "many blocks, each in parts, can be mapped",
        )


def _governor(machine: MachineFacts) -> Iterator[Finding]:
    others = [name for name in machine.cpu.governors if name != "performance"]
    if others:
        yield Finding(
            f"CPUs are clocked by {' and '.join(others)}, not performance",
            "After a pause, the clock climbs while the first tokens are computed.",
            "echo performance | tee /sys/devices/system/cpu/cpufreq/policy*/scaling_governor",
            "CPUs keep their highest clock, at the cost of power",
        )


def _pools(machine: MachineFacts) -> Iterator[Finding]:
    pools = machine.pools
    if any(pool.total or pool.surplus_most for pool in pools.values()):
        return
    # An example that leaves a small machine enough memory.
    fourth = machine.memory.total_bytes // 4 // _GIB * _GIB
    nbytes = min(_EXAMPLE_BYTES, max(_GIB, fourth))
    small = pools.get("2m")
    if small is not None:
        pages = nbytes // small.page_bytes
        yield Finding(
            "no hugetlb pages of 2m are reserved",
            "With THP blocks get huge pages when memory is not fragmented; reserved ones are sure, "
            f"cannot be swapped, and are unmapped at once. A model of {format_bytes(nbytes)} needs "
            f"{pages} pages.",
            # vm.nr_hugepages has the default size, which the kernel's command line may change.
            f"echo {pages} > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
            f"{format_bytes(nbytes)} are set aside: nothing else can use them",
            is_optional=True,
        )
    large = pools.get("1g")
    if large is not None and machine.memory.total_bytes >= _LARGE_BYTES:
        pages = nbytes // large.page_bytes
        yield Finding(
            "no hugetlb pages of 1g are reserved",
            "They need the fewest TLB entries. Only at boot is there surely memory in pieces of "
            "1 GiB.",
            f"add to the kernel's command line: hugepagesz=1G hugepages={pages}",
            f"{format_bytes(nbytes)} are set aside from boot on, spread over the nodes",
            is_optional=True,
        )


# First what makes a process fail, then what slows every token, then what slows some.
_RULES = (
    _names,
    _cgroup_memory,
    _overcommit,
    _thp,
    _quota,
    _cpuset,
    _mbind,
    _numa,
    _read_ahead,
    _swap,
    _hugetlb_cgroups,
    _memlock,
    _defrag,
    _reporting,
    _shmem,
    _kernel,
    _maps,
    _governor,
    _pools,
)


def _nodes(ids: list[int]) -> str:
    return f"node{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"
