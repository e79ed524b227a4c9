"""Layers with an indexer keep its keys, and do with them what they do with their tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra transformers needs torch")
pytest.importorskip("transformers.cache_utils", reason="the extra transformers")

import torch
import transformers

from support.models import architectures
from unimem.errors import CacheFull
from unimem.transformers import KVCache

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("gives_memory_back")]


def test_keys_follow_the_tokens() -> None:
    """Streams are chosen, tokens dropped, and a copy goes on by itself, as in DynamicCache."""
    config = architectures.model("deepseek_v32").config
    theirs = transformers.DynamicCache(config=config)
    ours = KVCache(config, dtype="q8_0,f16", max_seq_len=100)

    def step(n: int, batch: int, *caches: KVCache) -> None:
        k, v, keys = torch.randn(3, batch, 4, n, 32).unbind()
        for layer in range(3):
            # The last layer has no indexer of its own.
            shown = [
                cache.update_indexer(keys[:, 0, :, :8], layer)
                for cache in (*caches, theirs)
                if layer < 2
            ]
            assert all(torch.equal(one, shown[-1]) for one in shown)
            for cache in (*caches, theirs):
                cache.update(k, v, layer)

    with ours:
        step(9, 2, ours)
        assert len(ours.caches) == 3
        for cache in (ours, theirs):
            cache.reorder_cache(torch.tensor([1, 1]))
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([3, 0, 1]))
            cache.crop(-4)
        with ours.copy() as other:
            step(2, 3, ours, other)
            assert other.get_seq_length() == 7
        ours.layers[0].update_indexer(torch.ones(3, 1, 8))
        ours.rollback()
        step(1, 3, ours)
        with pytest.raises(CacheFull):
            step(100, 3, ours)
        ours.reset()
        theirs = transformers.DynamicCache(config=config)
        step(5, 1, ours)


def test_what_keys_of_indexers_cannot_do_is_refused(tmp_path: Path) -> None:
    model = architectures.model("hy_v4")
    with pytest.raises(NotImplementedError, match="budget_bytes: expected None, since hy_v4 has"):
        KVCache.for_model(model, budget_bytes=1 << 20)
    with KVCache.for_model(model) as cache:
        model.generate(architectures.ids(), max_new_tokens=2, **{architectures.CACHE: cache})
        with pytest.raises(NotImplementedError, match=r"save: .* or an indexer, which no file"):
            cache.save(tmp_path / "chat.kv")
