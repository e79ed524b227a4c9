"""The errors of unimem. Each carries the figures in its message, and pickles."""

from __future__ import annotations

__all__ = [
    "CacheFull",
    "CapacityError",
    "CategoryError",
    "ClosedError",
    "FormatError",
    "FrozenError",
    "GGUFError",
    "GridFull",
    "PlacementError",
    "PlacementWarning",
    "SafetensorsError",
    "SnapshotError",
    "TapeFull",
]


class CapacityError(MemoryError):
    """A fixed capacity is used up; nothing was taken.

    Attributes
    ----------
    limit, used, asked : int
        The capacity, the part in use and the request, in bytes, cells or tokens.
    """

    def __init__(self, message: str, limit: int = 0, used: int = 0, asked: int = 0) -> None:
        super().__init__(message, limit, used, asked)
        self.message = message
        self.limit = limit
        self.used = used
        self.asked = asked

    def __str__(self) -> str:
        return self.message


class TapeFull(CapacityError):  # noqa: N818 - the name is part of the public interface
    """A tape has no room for a take (bytes)."""


class GridFull(CapacityError):  # noqa: N818
    """A grid has no free cell (cells)."""


class CacheFull(CapacityError):  # noqa: N818
    """A cache has no room for the tokens (tokens)."""


class PlacementError(OSError):
    """The system does not grant the requested memory; the message says how to get it."""


class PlacementWarning(UserWarning):
    """Memory was granted, but not as requested; `granted` shows how."""


class FormatError(ValueError):
    """A file breaks a rule of its format.

    Attributes
    ----------
    rule : str
        The rule, in a few words.
    offset : int or None
        The byte of the file that breaks it, if a single one does.
    path : str or None
        The file, if known.
    """

    def __init__(self, rule: str, offset: int | None = None, path: str | None = None) -> None:
        super().__init__(rule, offset, path)
        self.rule = rule
        self.offset = offset
        self.path = path

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        at = "" if self.offset is None else f" (at byte {self.offset})"
        return f"{where}{self.rule}{at}"


class GGUFError(FormatError):
    """A file is not a GGUF file that can be used."""


class SafetensorsError(FormatError):
    """A file is not a safetensors file that can be used."""


class SnapshotError(FormatError):
    """A file is not a snapshot that can be restored here."""


class CategoryError(KeyError):
    """A plan or report has no row of a category.

    Attributes
    ----------
    category : object
        The requested category.
    categories : tuple of str
        The existing categories.
    """

    def __init__(self, category: object, categories: tuple[str, ...]) -> None:
        super().__init__(category, categories)
        self.category = category
        self.categories = categories

    def __str__(self) -> str:
        there = ", ".join(self.categories) or "none"
        return f"expected a category of its rows ({there}), got {self.category!r:.60}"


class ClosedError(RuntimeError):
    """The object was closed."""


class FrozenError(RuntimeError):
    """Memory was requested while the tape, or its layout, is frozen."""
