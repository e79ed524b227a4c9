"""The layers of a cache take tokens in any layout, and convert them to the stored type."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the extra transformers needs torch")
pytest.importorskip("transformers.cache_utils", reason="the extra transformers")

import torch
import transformers

from support.models import tiny_transformers as tiny
from support.models.tiny_transformers import HEADS, LAYERS, both, states
from unimem.transformers import KVCache

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("gives_memory_back")]

TOKENS = {
    "one after the other": lambda k: k.contiguous(),
    "as a projection leaves them": lambda k: k.transpose(1, 2).contiguous().transpose(1, 2),
    "of one head for all": lambda k: k[:, :1].expand(-1, HEADS, -1, -1),
    "of one stream for all": lambda k: k[:1].expand(2, -1, -1, -1),
    "negated lazily": lambda k: torch.complex(k, k).conj().imag,
    "of a class of its own": lambda k: k.as_subclass(torch.nn.Buffer),
}


@pytest.mark.parametrize("given", TOKENS)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("n", [1, 2])
def test_tokens_lie_in_any_way(given: str, kind: str, n: int) -> None:
    ours, theirs = both(kind)
    with ours:
        for seed in range(30):
            k, v = states(n, seed=seed)
            for tokens in ((TOKENS[given](k), v), (v, TOKENS[given](k))):
                expected = theirs.update(*tokens, 0)
                for one, other in zip(ours.update(*tokens, 0), expected, strict=True):
                    assert torch.equal(one, other)


def test_other_types_are_converted() -> None:
    """Attention sees the model's type; memory has the stored type."""
    config = tiny.config("gemma", head_dim=32)
    theirs = transformers.DynamicCache(config=config)
    small, half = KVCache(config, dtype="q8_0"), KVCache(config, dtype="f16")
    with small, half, KVCache(config, dtype="q4_0") as least:
        for n in (30, 1, 2):
            for layer in range(LAYERS):
                k, v = torch.randn(2, 1, HEADS, n, 32).to(torch.bfloat16)
                expected = theirs.update(k, v, layer)
                for cache, atol in ((small, 0.06), (half, 0.02), (least, 0.5)):
                    for one, other in zip(cache.update(k, v, layer), expected, strict=True):
                        assert one.dtype == torch.bfloat16
                        assert torch.allclose(one.float(), other.float(), atol=atol)
        assert small.memory_usage_bytes * 64 == half.memory_usage_bytes * 34
        assert least.memory_usage_bytes * 64 == half.memory_usage_bytes * 18


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", ["f16", "q8_0"])
def test_tokens_that_are_converted_may_be_negated_lazily(
    stored: str, computed: torch.dtype, kind: str
) -> None:
    config = tiny.config(kind, head_dim=32)
    with KVCache(config, dtype=stored) as ours, KVCache(config, dtype=stored) as plain:
        for n in (30, 1):
            k, v = torch.randn(2, 1, HEADS, n, 32).to(computed)
            shown = ours.update(torch._neg_view(-k), torch._neg_view(-v), 0)
            for one, other in zip(shown, plain.update(k, v, 0), strict=True):
                assert torch.equal(one, other)
