"""The search for the image of a model: staged, or kept in the cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import cached_property
from typing import Any

from unimem._core.block import Block
from unimem.errors import FormatError, PlacementError
from unimem.remote.client import is_url
from unimem.system import policy
from unimem.system.placement import Pages
from unimem.weights.repack.arrangement import Arrangement
from unimem.weights.repack.image import IMAGE_NAME, Image, is_for, write_image
from unimem.weights.repack.image_cache import CacheChoice, choose_cache
from unimem.weights.repack.image_format import key_of
from unimem.weights.repack.image_identity import identify
from unimem.weights.repack.image_writer import Keeping
from unimem.weights.staged import holders
from unimem.weights.tensors import Contents


class Images:
    """The places where the image of one model may be, and where it is kept. For one thread.

    `cache` and `create` are as for `choose_cache`; with False, staged images are not used, either.
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
        """The identity that an image of this model has to have, here and now."""
        return identify(self._contents, self._found)

    def find(self) -> Image | None:
        """Open the staged image, or else the image of the cache; None without either."""
        image = None if self._is_off else self._find_staged()
        return self.find_kept() if image is None else image

    def find_kept(self) -> Image | None:
        """Open the image of the cache; None without one."""
        return None if self._cache is None else self._cache.find(self._found, self.identity)

    def look(self) -> Image | None:
        """Open the image that `find` would open now, without changes."""
        image = self._find_staged()
        if image is None and self._cache is not None:
            image = self._cache.look(self._found, self.identity)
        return image

    def _find_staged(self) -> Image | None:
        for path in self._staged_paths():
            try:
                image = Image(path)
            except (OSError, FormatError):  # missing, or another kind of file
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
        """Give the paths where it may be staged.

        These are beside the link by which the model was opened, and in the processes that keep
        staged models: keepers that a command has left, and processes that called `stage`.
        """
        parts = self._contents._parts
        if is_url(parts[0].file.path):
            return
        yield os.path.join(os.path.dirname(parts[0].file.absolute_path), IMAGE_NAME)
        files = [part.file.identity for part in parts]
        with suppress(PlacementError):  # this system hides them
            for held in holders():
                if held.is_repacked and [version for _, version in held.versions] == files:
                    yield held.paths[0]

    def making(self) -> AbstractContextManager[None]:
        """Hold the lock of the kept image, so that only one process makes it at a time."""
        return nullcontext() if self._cache is None else self._cache.making(self.identity)

    def keep(self, block: Block, base: int, made: ExitStack) -> Keeping | None:
        """Prepare to keep the image; if that fails and was requested, there is a warning.

        The memory with the data stays until the result is ended. `made` holds `making`, and is
        closed when the image is kept.
        """
        if self._cache is None:
            return None
        found, identity = self._found, self.identity
        path = self._contents._parts[0].file.absolute_path
        model = path if is_url(path) else os.path.realpath(path)

        def write(check: Callable[[], None]) -> None:
            write_image(new, found, identity, model, block, base, check)
            new.publish()

        def failed(error: Exception) -> None:
            if self._is_asked:
                policy.warn(f"the repacked image of {model} is not kept: {error}")

        try:
            new = made.enter_context(self._cache.new_file(found, identity, model))
            return Keeping(write, made.pop_all(), failed)
        except (OSError, ValueError) as error:
            failed(error)
            return None

    def discard(self, image: Image, error: FormatError) -> None:
        """Remove a damaged image; a staged one stays with its keeper."""
        if self._cache is not None and not image.is_staged:
            self._cache.discard(image.header.key, str(error))


def look(contents: Contents, found: Arrangement) -> Image | None:
    """Find the image that `repack` would take for a model by default, without changes.

    It is closed; its header is known, and how much of it was in RAM.
    """
    try:
        image = Images(contents, found, None, create=False).look()
        if image is None:
            return None
        with image:
            _ = image.cached_bytes  # asked while it is open
            return image
    except (OSError, FormatError):  # it was replaced meanwhile
        return None


def is_mapped(image: Image, pages: Pages, numa: object) -> bool:
    """Whether a mapping of the image satisfies the requested placement.

    Later starts share the pages of a mapping. Otherwise the image is read into placed memory.
    """
    mappable = ("auto", "4k", "thp") if image.is_staged else ("auto", "4k")
    return numa is None and pages in mappable
