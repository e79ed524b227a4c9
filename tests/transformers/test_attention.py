"""Packed attention computes what torch's does, and leaves other cases to it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra transformers needs torch")
pytest.importorskip("transformers.cache_utils", reason="the extra transformers")

import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from support.models import architectures
from support.models import tiny_transformers as tiny
from support.models.architectures import CACHE
from unimem.transformers import attention
from unimem.transformers.attention import packed_attention

pytestmark = pytest.mark.slow

CASES = {
    "a token": (1, 4, None),
    "a token and a mask": (1, 4, "bool"),
    "several and a mask": (5, 4, "bool"),
    "several and numbers": (5, 4, "float"),
    "several that are causal": (5, 4, None),
    "a prompt": (40, 4, "bool"),
    "no groups": (1, 1, "bool"),
    "a mask a head": (2, 4, "heads"),
}


class Module(torch.nn.Module):  # type: ignore[misc]
    is_causal = True

    def __init__(self, group: int) -> None:
        super().__init__()
        self.num_key_value_groups = group


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_that_of_torch(case: str, dtype: Any) -> None:
    n, group, masked = CASES[case]
    torch.manual_seed(0)
    tokens = n if case == "several that are causal" else 57
    query = torch.randn(2, n, 3 * group, 16).to(dtype).transpose(1, 2)
    rows = torch.randn(2, 2, 3, 80, 16).to(dtype)  # a cache's: more rows than tokens
    key, value = rows[0][:, :, :tokens], rows[1][:, :, :tokens]
    mask = None
    if masked is not None:
        mask = torch.rand(2, 3 * group if masked == "heads" else 1, n, tokens) < 0.7
        mask[..., 0] = True
        if masked == "float":
            mask = torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)
    got, weights = packed_attention(Module(group), query, key, value, mask, scaling=0.3)
    expected, _ = sdpa_attention_forward(Module(group), query, key, value, mask, scaling=0.3)
    assert weights is None
    assert got.shape == expected.shape == (2, n, 3 * group, 16)
    assert got.is_contiguous()
    atol = 1e-5 if dtype == torch.float32 else 0.02
    assert torch.allclose(got.float(), expected.float(), atol=atol)


def test_a_bias_is_added_for_one_token_too() -> None:
    query, key = torch.ones(1, 4, 1, 16), torch.ones(1, 2, 5, 16)
    bias = torch.linspace(-3, 3, 5).reshape(1, 1, 1, 5).expand(1, 4, 1, 5)
    values = torch.arange(80.0).reshape(1, 1, 5, 16).expand(1, 2, 5, 16)
    got, _ = packed_attention(Module(2), query, key, values, None, position_bias=bias)
    expected, _ = sdpa_attention_forward(Module(2), query, key, values, None, position_bias=bias)
    assert torch.equal(got, expected)
    with pytest.raises(NotImplementedError, match="no position_bias beside"):
        packed_attention(Module(2), query, key, values, None, position_bias=bias, softcap=3.0)


SINKS = "flint gpt_oss granite_swa granitemoe_swa hy_v4 mimo_v2_flash".split()


@pytest.mark.parametrize("name", [*SINKS, "gemma2", "vaultgemma", "deepseek_v32"])
@pytest.mark.parametrize("scores", [1 << 20, 1000])
def test_sinks_and_caps_are_those_of_the_model(
    name: str, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are those of "eager": with padding, without, and after the first tokens."""
    monkeypatch.setattr(attention, "_PIECE_SCORES", scores)
    model = architectures.model(name)
    ids = architectures.ids(2)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0

    def logits(implementation: str) -> torch.Tensor:
        model.set_attn_implementation(implementation)
        first = model(ids[:, :15], use_cache=True)
        after = [
            model(part, use_cache=True, **{CACHE: first[CACHE]}).logits
            for part in (ids[:, 15:19], ids[:, 19:])
        ]
        padded = model(ids, attention_mask=mask).logits[mask.bool()]
        return torch.cat([one.flatten() for one in (first.logits, *after, padded)])

    with torch.no_grad():
        expected, got = logits("eager"), logits("unimem")
    assert expected.std() > 0.5
    assert torch.allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("given", [{}, {"softcap": 1e6}])
def test_the_last_of_many_tokens_without_a_mask_are_causal(given: dict[str, Any]) -> None:
    """Gemma 4 computes its last layers for the last tokens of a prompt only."""
    query, key, value = torch.randn(3, 1, 4, 9, 16).unbind()
    got, _ = packed_attention(Module(2), query[:, :, 6:], key[:, :2], value[:, :2], None, **given)
    expected, _ = packed_attention(Module(2), query, key[:, :2], value[:, :2], None, **given)
    assert torch.allclose(got, expected[:, 6:], atol=1e-4)


@pytest.mark.parametrize("name", ["s_aux", "softcap"])
def test_many_tokens_without_a_mask_are_causal(name: str) -> None:
    query, key, value = torch.randn(3, 1, 4, 6, 16).unbind()
    given = {"s_aux": torch.full((4,), -1e9)} if name == "s_aux" else {"softcap": 1e6}
    got, _ = packed_attention(Module(1), query, key, value, None, **given)
    expected, _ = sdpa_attention_forward(Module(1), query, key, value, None)
    assert torch.allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma", "mistral"])
def test_a_prompt_of_fixed_shapes_gives_the_same_tokens(kind: str) -> None:
    """The rows of a StaticCache are more than the tokens of a prompt."""
    model = copy.deepcopy(tiny.model(kind))
    ids, how = tiny.prompts(2, 6), {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **how)
    model.set_attn_implementation("unimem")
    cache = transformers.StaticCache(model.config, max_cache_len=20)
    assert torch.equal(model.generate(ids, **{CACHE: cache}, **how), expected)


def test_what_could_change_the_result_is_refused() -> None:
    query = torch.ones(1, 4, 1, 16)
    with pytest.raises(NotImplementedError, match=r"got block_indices, later from Module: .*eager"):
        packed_attention(
            Module(1),
            query,
            query,
            query,
            None,
            later=1,
            block_indices=query,
            never=None,
            sliding_window=3,
        )
    model = architectures.model("deepseek_v4")
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="DeepseekV4ForCausalLM, which allows no 'sdpa'"):
        model.set_attn_implementation("unimem")
    assert model.config._attn_implementation == before
