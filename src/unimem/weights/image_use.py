"""The image of a model that is staged, or kept in the cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

from unimem._core.block import Block
from unimem.errors import FormatError, PlacementError
from unimem.system import policy
from unimem.system.placement import Pages
from unimem.weights.image import IMAGE_NAME, Image, is_for
from unimem.weights.image_cache import CacheChoice, choose_cache
from unimem.weights.image_format import key_of
from unimem.weights.image_identity import files_of, identify
from unimem.weights.repacked import Arrangement
from unimem.weights.staging.held import holders
from unimem.weights.tensors import Contents

__all__ = ["Images", "is_mapped", "look"]


class Images:
    """Where the image of one model may be, and where it is kept. For one thread.

    Parameters
    ----------
    contents : Contents
        The model.
    found : Arrangement
        What of it is repacked.
    cache : bool or path-like, optional
        As for `choose_cache`; with False, what is staged is not used, either.
    create : bool
        As for `choose_cache`.
    """

    def __init__(
        self, contents: Contents, found: Arrangement, cache: CacheChoice, *, create: bool = True
    ) -> None:
        self._contents, self._found = contents, found
        self._is_off = cache is False
        self._is_asked = cache is not None
        self._cache = choose_cache(contents, cache, create=create)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What an image of this model has to be, here and now."""
        return identify(self._contents, self._found)

    def find(self) -> Image | None:
        """Open the image that is staged, or else the one of the cache; None where there is none."""
        image = None if self._is_off else self._find_staged()
        return self.find_kept() if image is None else image

    def find_kept(self) -> Image | None:
        """Open the image of the cache; None where there is none."""
        return None if self._cache is None else self._cache.find(self._found, self.identity)

    def look(self) -> Image | None:
        """Open the image that `find` would open now, and change nothing."""
        image = self._find_staged()
        if image is None and self._cache is not None:
            image = self._cache.look(self._found, self.identity)
        return image

    def _find_staged(self) -> Image | None:
        for path in self._staged_paths():
            try:
                image = Image(path)
            except (OSError, FormatError):  # there is none, or it is somebody's file
                continue
            key = image.header.key
            if (
                image.is_staged
                and key == key_of(self.identity)
                and is_for(image.header, self._found)
            ):
                return image
            image.close()
        return None

    def _staged_paths(self) -> Iterator[str]:
        """Give where it may be staged: beside a link by which the model was opened, or kept."""
        folder = os.path.dirname(self._contents._parts[0].file.absolute_path)
        yield os.path.join(folder, IMAGE_NAME)
        files = files_of(self._contents)
        try:
            found = holders()
        except PlacementError:  # no holder can be seen here
            return
        for held in found:
            if held.is_repacked and [list(version) for _, version in held.versions] == files:
                yield held.paths[0]

    def making(self) -> AbstractContextManager[None]:
        """Wait until no other process makes the image that is kept, and keep others from it."""
        return nullcontext() if self._cache is None else self._cache.making(self.identity)

    def keep(self, block: Block, base: int) -> None:
        """Keep the image; where it cannot be, a warning says so if it was asked for."""
        if self._cache is None:
            return
        model = os.path.realpath(self._contents._parts[0].file.absolute_path)
        try:
            self._cache.keep(self._found, self.identity, model, block, base)
        except (OSError, ValueError) as error:
            if self._is_asked:
                policy.warn(f"the repacked image of {model} is not kept: {error}")

    def discard(self, image: Image, error: FormatError) -> None:
        """Remove an image whose bytes are damaged; what is staged stays its keeper's."""
        if self._cache is not None and not image.is_staged:
            self._cache.discard(image.header.key, str(error))


def look(contents: Contents, found: Arrangement) -> Image | None:
    """Look which image `repack` would take of a model by default; nothing is made or removed.

    Returns
    -------
    Image or None
        Closed: it tells what it is, and how much of it was in RAM.
    """
    try:
        image = Images(contents, found, None, create=False).look()
        if image is None:
            return None
        with image:
            _ = image.cached_bytes  # which stays known
            return image
    except (OSError, FormatError):  # it has just become another one
        return None


def is_mapped(image: Image, pages: Pages, numa: object) -> bool:
    """Whether an image is mapped for memory that was asked for: of what is in RAM, if no other is.

    Otherwise it is read into memory that is placed as it was asked for.
    """
    if numa is not None:
        return False
    if image.is_staged:
        return pages in ("auto", "4k", "thp")
    return pages in ("auto", "4k") and image.is_cached()
