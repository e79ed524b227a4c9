"""Layers that choose the tokens they attend to by keys of an indexer (DeepSeek 3.2, HYV4, GLM)."""

from __future__ import annotations

from dataclasses import replace

import torch

from unimem.transformers.layers import Group, Layer


class IndexedLayer(Layer):
    """A layer whose indexer keeps keys as well, ``[batch, tokens, index_head_dim]``.

    They are the keys of a cache of their own, with one layer and one head, whose values are one
    number each. Some models have layers without an indexer of their own, so the cache is made for
    its first keys.
    """

    indexer: Layer | None = None  # the layer of those keys

    def index_with(self, keys: Group) -> Layer:
        """Keep the indexer's keys in this group, which has no layer yet."""
        self.indexer = Layer(self._cache(), keys, keys.add())
        return self.indexer

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append keys of the indexer, ``[batch, n, index_head_dim]``; return all of them."""
        indexer = self.indexer
        if indexer is None:
            # The indexer compares its keys as they are.
            group = Group(None, replace(self.group.options, dtype=None, rotate=False))
            indexer = self.index_with(group)
            self._cache()._groups.append(group)
        keys, _ = indexer.update(indexer_key_states[:, None], indexer_key_states[:, None, :, :1])
        return keys[:, 0]
