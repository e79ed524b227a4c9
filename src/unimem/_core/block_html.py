"""A block as HTML, for a notebook: what was asked for, beside what was granted."""

from __future__ import annotations

from typing import Any, Protocol

from unimem.base.html import Html, bar, fragment, heading, join, markup, size, stamp, table
from unimem.system.placement import Placement

_COLOR = "#3b82c4"


class _Block(Protocol):
    name: str

    @property
    def closed(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def requested(self) -> dict[str, Any]: ...
    @property
    def granted(self) -> Placement: ...


def block_html(block: _Block) -> Html:
    """Write what a block was asked to be, and how the kernel says that it is placed."""
    if block.closed:
        return fragment(markup(repr(block)))
    asked, granted = block.requested, block.granted
    lock = asked["lock"]
    locked = size(asked["nbytes"]) if lock is True else lock or "-"
    rows: list[tuple[str, str, str, str]] = [
        ("size", size(asked["nbytes"]), size(block.nbytes), ""),
        ("pages", asked["pages"], granted.pages, ""),
        ("nodes", asked["numa"] or "-", _nodes(granted), ""),
        ("locked", locked, size(granted.locked_bytes), ""),
    ]
    for name, nbytes in (
        ("in RAM", granted.resident_bytes),
        ("in huge pages", granted.huge_bytes),
        ("swapped out", granted.swapped_bytes),
    ):
        rows.append((name, "", size(nbytes), bar(nbytes / max(1, block.nbytes), _COLOR)))
    head = ("", "requested", "granted", "")
    title = heading(f"Block '{block.name}'")
    return fragment(title, stamp(), table(head, rows, align="<>><"))


def _nodes(granted: Placement) -> Html:
    """Write the bytes on each node."""
    nodes = sorted(granted.nodes.items())
    return join([join([size(nbytes), f" on node {node}"]) for node, nbytes in nodes] or ["-"], ", ")
