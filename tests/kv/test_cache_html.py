"""Caches as HTML: their tokens or blocks, and their bytes."""

from __future__ import annotations

import numpy as np

import unimem as um
from unimem.kv.cache_html import kv_html, paged_html


def test_a_cache_shows_its_tokens_until_it_is_closed() -> None:
    with um.KVCache(1, 2, 8, 16, pages="4k") as kv:
        kv.append(0, *np.zeros((2, 5, 2, 8), "f4"))
        shown = str(kv_html(kv))
        assert "5" in shown
        assert "tokens" in shown
        assert "in RAM" in shown
    assert "KVCache(closed)" in str(kv_html(kv))


def test_a_pool_shows_its_blocks() -> None:
    with um.PagedKVCache(1, 2, 8, n_blocks=4, pages="4k") as pg:
        assert "blocks" in str(paged_html(pg))
    assert "closed" in str(paged_html(pg))
