"""Caches as HTML, for a notebook: their tokens and bytes."""

from __future__ import annotations

from typing import Any

from unimem.base.html import Html, bar, fragment, markup, size, stamp, table

_COLOR = "#e08a2e"
_Row = tuple[str, str, str, Html]


def kv_html(cache: Any) -> Html:
    """Return a KV cache as HTML.

    Parameters
    ----------
    cache : KVCache
        Open or closed, of any device.
    """
    if cache.closed:
        return fragment(markup(repr(cache)))
    return _page(cache, "tokens", cache.seq_len, cache.max_seq_len)


def paged_html(cache: Any) -> Html:
    """Return a paged KV cache as HTML.

    Parameters
    ----------
    cache : PagedKVCache
        Open or closed.
    """
    if cache.closed:
        return fragment(markup(repr(cache)))
    return _page(cache, "blocks", cache.n_blocks_in_use, cache.n_blocks)


def _page(cache: Any, unit: str, held: int, most: int) -> Html:
    whole = cache.capacity_bytes
    sizes = {"active": cache.memory_usage_bytes, "in RAM": cache.resident_bytes}
    rows: list[_Row] = [(unit, f"{held:,}", f"{most:,}", bar(held / max(1, most), _COLOR))]
    rows += [
        (name, size(nbytes), size(whole), bar(nbytes / max(1, whole), _COLOR))
        for name, nbytes in sizes.items()
    ]
    lines = table(("", "", "of", ""), rows, align="<>><")
    return fragment(markup(repr(cache)), stamp(), lines)
