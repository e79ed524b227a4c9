"""Members of KVCache that the cache that it holds has: the same documents and signatures."""

from __future__ import annotations

import inspect

import pytest

import unimem as um
from unimem.kv.cache.one_kind import OneKindCache

CALLS = "address row_of reserve commit rollback crop trim_to clear give_back state checkpoint warm"


@pytest.mark.parametrize("name", [*CALLS.split(), "close"])
def test_a_forwarded_method_reads_like_the_bodys(name: str) -> None:
    ours, theirs = getattr(um.KVCache, name), getattr(OneKindCache, name)
    assert ours.__doc__ == theirs.__doc__
    assert ours.__qualname__ == f"KVCache.{name}"
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


def test_a_forwarded_property_reads_like_the_bodys() -> None:
    assert um.KVCache.seq_len.__doc__ == OneKindCache.seq_len.__doc__
    with um.KVCache(1, 2, 8, 16) as kv:
        kv.reserve(3)
        kv.commit(2)
        assert kv.seq_len == kv._body.seq_len == 2
        with pytest.raises(AttributeError):
            kv.seq_len = 3  # type: ignore[misc]
