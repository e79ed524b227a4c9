"""What the kernel says of the memory of a process: smaps, numa_maps and pagemap, of any process."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Area", "Process"]


@dataclass(frozen=True, slots=True)
class Area:
    """One entry of smaps: a range of addresses with one access and one backing.

    Attributes
    ----------
    start, end : int
        The range.
    access : str
        As in ``"rw-p"``.
    offset, device, inode, path : int, (int, int), int, str
        What is mapped, as the kernel writes it; the path is empty where there is none.
    rss_bytes, pss_bytes : int
        In RAM, and there by share. hugetlb pages are in neither.
    hugetlb_bytes : int
        In hugetlb pages.
    huge_bytes : int
        In transparent huge pages.
    locked_bytes : int
        In RAM, and locked there; hugetlb pages are.
    swapped_bytes : int
        Swapped out.
    page_bytes : int
        Size of the pages of the mapping.
    nodes : dict of int to int
        Bytes in RAM on each node that holds some.
    flags : frozenset of str
        The words of VmFlags.
    """

    start: int
    end: int
    access: str
    offset: int
    device: tuple[int, int]
    inode: int
    path: str
    rss_bytes: int
    pss_bytes: int
    hugetlb_bytes: int
    huge_bytes: int
    locked_bytes: int
    swapped_bytes: int
    page_bytes: int
    nodes: dict[int, int] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.end - self.start

    @property
    def resident_bytes(self) -> int:
        """What of it is in RAM, in pages of any kind."""
        return self.rss_bytes + self.hugetlb_bytes

    @property
    def is_accessible(self) -> bool:
        """Whether anything can be there: not in ``---p``."""
        return self.access[:3] != "---"


@dataclass(frozen=True, slots=True)
class Process:
    """A process and its areas.

    Attributes
    ----------
    pid : int
        Its number.
    name, command : str
        As in ``/proc/PID/comm`` and ``cmdline``.
    started : int
        When, in clock ticks since the machine was: a number that came again has another one.
    areas : tuple of Area
        By address.
    minor_faults, major_faults : int
        Page faults since it was started, without and with waiting for a disk.
    n_threads : int
        Its threads.
    """

    pid: int
    name: str
    command: str
    started: int
    areas: tuple[Area, ...]
    minor_faults: int
    major_faults: int
    n_threads: int
