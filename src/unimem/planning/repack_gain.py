"""Repacked weights in a plan, and which models gain by them."""

from __future__ import annotations

from dataclasses import replace

from unimem.base.text import format_bytes
from unimem.planning.needs import Budget, Need, Storage
from unimem.weights.repack.arrangement import Arrangement, arrange
from unimem.weights.repack.image import Image
from unimem.weights.repack.image_search import is_mapped
from unimem.weights.repack.repack import staging_bytes
from unimem.weights.tensors import Contents

NO_ROOM = "repacked weights would not fit beside the rest"
NO_ROOM_TO_COPY = "its pages may be reclaimed, but a copy would not fit beside the rest"

_PADDING = "weights:padding"
_LEAST_BYTES = 32 << 20  # a smaller model is mostly in caches, and its start counts
_LEAST_SHARE = 0.5  # of the bytes that a token reads


def find_gain(contents: Contents) -> Arrangement | None:
    """Arrange the repacked tensors of a model that gains by it; None for others.

    A model in shared memory is not repacked by default, since each process would have a copy.
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
    """Explain why a model of `nbytes` is repacked."""
    names = sorted({slot.order.buffer_type.name for slot in found.slots})
    return (
        f"{format_bytes(found.source_bytes)} of {format_bytes(nbytes)} are of types that this CPU "
        f"multiplies faster in another order ({', '.join(names)})"
    )


class RepackedPart:
    """The repacked part of a model, or an image of it. For one thread.

    Parameters
    ----------
    found : Arrangement
        The tensors to repack.
    image : Image or None
        The image to take them from, closed.
    is_read : bool
        Whether the tensors are read from files, and are not in memory already.
    """

    def __init__(self, found: Arrangement, image: Image | None, *, is_read: bool) -> None:
        self.found = found
        self._image, self._is_read = image, is_read

    def reason(self, why: str) -> str:
        """Add to the reason `why` whether a repacked image exists."""
        if self._image is None:
            return why
        where = "staged" if self._image.is_staged else "in the cache"
        return f"{why}; a repacked image of it is {where}"

    def origin(self, storage: Storage) -> str | None:
        """Name the image and its use; None without an image."""
        image = self._image
        if image is None:
            return None
        if not is_mapped(image, storage.pages, storage.numa):
            return f"{image.path}, read into memory of its own"
        if image.is_staged:
            return f"{image.path}, mapped: it is in RAM once for all processes"
        return f"{image.path}, mapped from the page cache"

    def needs(self, storage: Storage, budget: Budget, sessions: int) -> list[Need]:
        """List the needs of the image, or of the decoders' blocks and of filling one."""
        found, image = self.found, self._image
        rows = {f"weights:{kind} repacked": nbytes for kind, nbytes in found.types.items()}
        if image is not None and is_mapped(image, storage.pages, storage.numa):
            if padding := image.data_bytes - sum(rows.values()):
                rows[_PADDING] = padding
            return [_image_need(image, rows, storage, budget)]
        needs = [storage.block(found.nbytes, _PADDING, budget, rows) for _ in range(sessions)]
        if image is None and self._is_read:
            most = staging_bytes(found, budget.thread_count())
            needs.append(Need({}, ram_bytes=most))
        return needs


def _image_need(image: Image, rows: dict[str, int], storage: Storage, budget: Budget) -> Need:
    nbytes = image.data_bytes
    locks = storage.locks_file(nbytes, budget)
    need = Need(rows, lock_bytes=nbytes if storage.lock else 0)
    if image.is_staged:
        there = min(image.cached_bytes, nbytes)
        return replace(need, ram_bytes=nbytes, taken_bytes=there)
    if locks:
        return replace(need, ram_bytes=nbytes)
    return replace(need, file_bytes=nbytes, kept_bytes=nbytes)
