"""What a plan has of weights that are repacked, and which models gain by it."""

from __future__ import annotations

from dataclasses import replace

from unimem.planning.needs import Budget, Need, Storage
from unimem.system.text import format_bytes
from unimem.weights.repacked import Arrangement, arrange
from unimem.weights.tensors import Contents

__all__ = [
    "NOTHING",
    "NO_ROOM",
    "NO_ROOM_TO_COPY",
    "find_gain",
    "reason_of",
    "repacked_need",
    "without_repacked",
]

NOTHING = "no tensor has an order of its own on this CPU"
"""Why a model is not repacked that was to be."""

NO_ROOM = "repacked weights would not fit beside the rest"
NO_ROOM_TO_COPY = "pages of it could be taken away, but a copy would not fit beside the rest"

_LEAST_BYTES = 32 << 20  # of a smaller model, caches hold much, and starting counts
_LEAST_SHARE = 0.5  # of what a token reads


def find_gain(contents: Contents) -> Arrangement | None:
    """Lay out what is repacked of a model that gains by it; None of another.

    A model in shared memory is not repacked by itself, since each process would have a copy.
    """
    if contents.nbytes < _LEAST_BYTES or any(part.file.in_memory for part in contents._parts):
        return None
    try:
        found = arrange(contents)
    except ImportError:
        return None
    least = max(_LEAST_BYTES, _LEAST_SHARE * contents.nbytes)
    return found if found.source_bytes >= least else None


def reason_of(found: Arrangement, nbytes: int) -> str:
    """Say why a model of so many bytes is repacked."""
    names = sorted({slot.order.buffer_type.name for slot in found.slots})
    return (
        f"{format_bytes(found.source_bytes)} of {format_bytes(nbytes)} are of types that this CPU "
        f"multiplies faster in another order ({', '.join(names)})"
    )


def repacked_need(found: Arrangement, storage: Storage, budget: Budget) -> Need:
    """Return the block that is repacked into."""
    rows = {f"weights:{kind} repacked": nbytes for kind, nbytes in found.types.items()}
    return storage.block(found.nbytes, "weights:padding", budget, rows)


def without_repacked(need: Need, found: Arrangement) -> Need:
    """Return what a mapped file takes of which a part is repacked, and not read again."""
    return replace(need, unread_bytes=min(need.file_bytes, found.source_bytes))
