"""Options for placing memory, and the placement that the kernel reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from unimem.base.text import format_bytes

Pages = Literal["auto", "4k", "thp", "2m", "1g"]
Lock = bool | Literal["onfault"]


class PlacementOptions(TypedDict, total=False):
    """How memory is placed; the same in every constructor that takes memory.

    Attributes
    ----------
    pages : {"auto", "4k", "thp", "2m", "1g"}
        The page size. ``"auto"`` takes the largest available for the size (hugetlb pages if the
        pool has room, transparent huge pages from one huge page on, else base pages) and never
        warns. ``"2m"`` and ``"1g"`` are hugetlb pages.
    numa : str, optional
        The nodes: ``"bind:0"``, ``"bind:0,2-3"``, ``"preferred:1"``, ``"interleave"``,
        ``"interleave:0,1"``, ``"weighted"`` or ``"weighted:0,1"``. Without nodes, all allowed
        nodes with memory. For weights also ``"mirror"`` or ``"mirror:0,1"``: a copy on each
        node; without nodes, on all of these that have CPUs.
    lock : bool or "onfault"
        Keep the memory in RAM: all of it now, or each page from its first touch on.
    warm : bool or int
        Bring the memory into RAM at once, with one thread or this number of threads.
    strict : bool
        Raise `PlacementError` instead of a fallback with a `PlacementWarning`.
    """

    pages: Pages
    numa: str | None
    lock: Lock
    warm: bool | int
    strict: bool


def check_placement(what: str, options: Iterable[str]) -> None:
    """Raise TypeError for names that are no options of memory; `what` is made, for the message."""
    known = tuple(PlacementOptions.__annotations__)
    if unknown := [repr(option) for option in options if option not in known]:
        raise TypeError(
            f"{what}: unexpected option {', '.join(unknown)}; placement is {', '.join(known)}"
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of memory, read from ``/proc/self/smaps`` and ``numa_maps``.

    Attributes
    ----------
    pages : {"4k", "thp", "2m", "1g", "device"}
        The kind of its pages; before the first touch, the kind it will get. ``"device"`` is memory
        of a GPU.
    page_bytes : int
        The size of such a page, or 0 if unknown.
    resident_bytes, huge_bytes, locked_bytes, swapped_bytes : int
        Bytes in RAM, in RAM in huge pages of any kind, in RAM and locked there, swapped out.
    pss_bytes : int
        Bytes in RAM. A page shared by n processes counts 1/n; hugetlb pages count whole.
    nodes : dict of int to int
        Bytes in RAM on each node, if any.
    """

    pages: Literal["4k", "thp", "2m", "1g", "device"]
    page_bytes: int
    resident_bytes: int
    huge_bytes: int
    locked_bytes: int
    swapped_bytes: int
    pss_bytes: int
    nodes: dict[int, int] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        text = f"{self.pages}, {format_bytes(self.resident_bytes)} in RAM"
        if self.huge_bytes:
            text += f", {format_bytes(self.huge_bytes)} in huge pages"
        if self.locked_bytes:
            text += f", {format_bytes(self.locked_bytes)} locked"
        if self.swapped_bytes:
            text += f", {format_bytes(self.swapped_bytes)} swapped out"
        # With one node they add nothing.
        if len(self.nodes) > 1 or any(self.nodes):
            for node, nbytes in sorted(self.nodes.items()):
                text += f", {format_bytes(nbytes)} on node {node}"
        return text


def sum_placements(placements: Sequence[Placement]) -> Placement:
    """Sum up the placements of one or more blocks; the pages are the smallest of theirs.

    Examples
    --------
    >>> small = Placement("4k", 4096, 8192, 0, 0, 0, 8192, {0: 8192})
    >>> huge = Placement("thp", 2 << 20, 2 << 20, 2 << 20, 0, 0, 2 << 20, {0: 2 << 20})
    >>> print(sum_placements([small, huge]))
    4k, 2.0 MiB in RAM, 2.0 MiB in huge pages
    """
    if len(placements) == 1:
        return placements[0]
    least = min(placements, key=lambda placement: placement.page_bytes)
    nodes: dict[int, int] = {}
    for placement in placements:
        for node, nbytes in placement.nodes.items():
            nodes[node] = nodes.get(node, 0) + nbytes
    sizes = "resident_bytes huge_bytes locked_bytes swapped_bytes pss_bytes".split()
    sums = {name: sum(getattr(each, name) for each in placements) for name in sizes}
    return Placement(pages=least.pages, page_bytes=least.page_bytes, nodes=nodes, **sums)
