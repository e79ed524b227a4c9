"""Memory for copies that attention sees until the next layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import prod

import numpy as np
import numpy.typing as npt


class Scratch:
    """Memory that is used again once no array or tensor shows it.

    Fresh memory would cost far more than what is written to it: the kernel clears each page.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[memoryview, Callable[[], object]]] = []

    def take(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Return an array of any content, which keeps its memory."""
        kind = np.dtype(dtype)
        nbytes = prod(shape) * kind.itemsize
        free = [part for part, shown in self._parts if shown() is None]
        self._parts = [(part, shown) for part, shown in self._parts if shown() is not None]
        fitting = [part for part in free if part.nbytes >= nbytes]
        # A conversation grows by a token at a time.
        part = fitting[0] if fitting else np.empty(nbytes * 5 // 4, np.uint8).data
        self._parts += [(one, lambda: None) for one in fitting[1:]]
        # All views of an array refer to it, as the first that lies over no other array.
        shown = np.frombuffer(part, np.uint8, nbytes)
        self._parts.append((part, weakref.ref(shown)))
        return shown.view(kind).reshape(shape)
