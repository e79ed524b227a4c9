"""Keys whose attention is packed: torch's result, by one computation a group of queries."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("torch", reason="the extra transformers needs torch")
pytest.importorskip("transformers.cache_utils", reason="the extra transformers")

import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention as attend

from support.models import tiny_transformers as tiny
from support.models.architectures import CACHE
from unimem.transformers import KVCache, layers, rows
from unimem.transformers.rows import Rows

pytestmark = pytest.mark.slow

TOKENS = 40
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {  # queries, heads, options
    "a token of grouped queries": (1, 6, {"enable_gqa": True}),
    "with a scale": (1, 6, {"enable_gqa": True, "scale": 0.5}),
    "several tokens": (3, 6, {"enable_gqa": True}),
    "a mask": (1, 6, {"enable_gqa": True, "attn_mask": torch.arange(TOKENS)[None] % 3 > 0}),
    "causal": (1, 6, {"enable_gqa": True, "is_causal": True}),
    "no groups": (1, 2, {}),
    "groups of four": (1, 8, {"enable_gqa": True}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_that_of_torch(case: str, dtype: torch.dtype) -> None:
    n, heads, options = CASES[case]
    torch.manual_seed(0)
    query = torch.randn(2, heads, n, 16).to(dtype)
    key, value = torch.randn(2, 2, 2, TOKENS, 16).to(dtype)
    expected = attend(query, key, value, **options)
    got = attend(query, key.as_subclass(Rows), value, **options)
    assert (type(got), got.shape) == (torch.Tensor, expected.shape)
    assert torch.allclose(got, expected, atol=1e-6 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize(
    "use",
    [
        copy.copy,
        copy.deepcopy,
        lambda t: pickle.loads(pickle.dumps(t)),
        torch.clone,
        lambda t: t + 0,
    ],
)
def test_what_is_computed_from_them_is_plain(use: Callable[[Any], Any]) -> None:
    keys = torch.randn(2, 3).as_subclass(Rows)
    assert type(use(keys)) is torch.Tensor
    assert torch.equal(use(keys), keys)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_cache_gives_them_for_a_token_under_that_attention(attention: str) -> None:
    """Until a conversation is long, packing costs more than it saves."""
    config = tiny.config("llama", num_key_value_heads=1, attn_implementation=attention)
    with KVCache(config) as cache:
        for n, is_packed in ((100, False), (1, False), (200, False), (1, True), (2, False)):
            k, v = torch.randn(2, 1, 1, n, tiny.DIM).bfloat16()
            shown, _ = cache.update(k, v, 0)
            assert (type(shown) is Rows) == (is_packed and attention == "sdpa")
            assert torch.equal(shown[:, :, -n:], k)


@pytest.mark.parametrize("kind", ["llama", "gemma", "mistral"])
def test_generate_gives_the_tokens_of_dynamic_cache(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = Mock(wraps=rows.attend_token)
    monkeypatch.setattr(rows, "attend_token", packed)
    monkeypatch.setitem(layers._FEWEST_PACKED, torch.float32, 1)
    model, options = tiny.model(kind), {"max_new_tokens": 12, "do_sample": False}
    theirs = transformers.DynamicCache(config=model.config)
    with KVCache.for_model(model) as ours:
        got, expected = (
            model.generate(tiny.prompts(2), **{CACHE: cache}, **options) for cache in (ours, theirs)
        )
    assert torch.equal(got, expected)
    # Others have windows or soft caps, for which transformers gives masks or no sdpa.
    assert packed.called == (kind == "llama")
