"""Members of `KVCache` that are those of the cache that it holds."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any


def figure(member: Any, doc: str | None = None) -> property:
    """Return a property that reads a member of the body.

    Parameters
    ----------
    member : descriptor
        Such as ``OneKindCache.seq_len``.
    doc : str, optional
        Its document, if that of the member does not do.
    """
    return property(operator.attrgetter(f"_body.{member.__name__}"), doc=doc or member.__doc__)


def call(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls the body's, with its signature and document."""
    name = method.__name__

    @functools.wraps(method)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        return getattr(self._body, name)(*args, **options)

    forward.__qualname__ = f"KVCache.{name}"
    forward.__module__ = "unimem.kv.cache.cache"
    return forward
