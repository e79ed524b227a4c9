"""`generate` gives the same tokens as with transformers' own cache."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra transformers needs torch")
pytest.importorskip("transformers.cache_utils", reason="the extra transformers")

import torch
import transformers

from support.models import tiny_transformers as tiny
from support.models.architectures import CACHE
from unimem.transformers import KVCache

pytestmark = pytest.mark.slow

HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.3, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "looked up": {"do_sample": False, "prompt_lookup_num_tokens": 4},
    "assisted": {"do_sample": False},
}
KINDS = ("llama", "mistral", "qwen2", "gemma", "moe")
BATCHES = {"looked up": (1,), "assisted": (1,)}
CASES = [
    (kind, dtype, how, batch)
    for kind, dtype, how in itertools.product(KINDS, ("float32", "bfloat16"), HOW)
    for batch in BATCHES.get(how, (1, 4))
]


def generated(model: Any, cache: Any, how: str, batch: int, n: int = 24) -> Any:
    options = dict(HOW[how])
    ids = tiny.prompts(batch)
    if how == "assisted":
        options["assistant_model"] = tiny.model("llama", "float32", seed=5)
    torch.manual_seed(1)
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **{CACHE: cache},
        max_new_tokens=n,
        pad_token_id=0,
        **options,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_same_tokens_as_dynamic_cache(case: tuple[str, str, str, int]) -> None:
    kind, dtype, how, batch = case
    model = tiny.model(kind, dtype)
    expected = generated(model, transformers.DynamicCache(config=model.config), how, batch)
    with KVCache.for_model(model) as cache:
        assert generated(model, cache, how, batch).tolist() == expected.tolist()


def test_prompts_of_different_lengths_and_a_second_turn() -> None:
    """Prompts are padded on the left; the cache continues beyond the window."""
    model = tiny.model("gemma")
    ids, mask = tiny.prompts(4, 20), torch.ones(4, 20, dtype=torch.long)
    for stream in range(4):
        mask[stream, : 3 * stream] = 0
        ids[stream, : 3 * stream] = 0
    more = tiny.prompts(4, 15, seed=3)

    def talk(cache: Any) -> list[list[int]]:
        options = {CACHE: cache, "do_sample": False, "max_new_tokens": 9}
        first = model.generate(ids, attention_mask=mask, **options)
        longer = torch.cat([first, more], 1)
        both = torch.cat([mask, torch.ones(4, longer.shape[1] - 20, dtype=torch.long)], 1)
        second: list[list[int]] = model.generate(longer, attention_mask=both, **options).tolist()
        return second

    with KVCache.for_model(model) as cache:
        assert talk(cache) == talk(transformers.DynamicCache(config=model.config))
        assert cache.get_seq_length() == 20 + 9 + 15 + 8
        assert cache.layers[1].keys.shape == (4, 2, 52, 8)
        assert cache.layers[0].keys.shape == (4, 2, tiny.WINDOW - 1, 8)


@pytest.mark.parametrize("n", [1, 5])
def test_packed_attention_gives_the_same_tokens(n: int) -> None:
    """One token at a time, and several with a mask; models whose query heads share keys."""
    own = tiny.model("llama", "float32")
    expected = generated(own, None, "greedy" if n == 1 else "looked up", 1)
    torch.manual_seed(0)
    packed = transformers.LlamaForCausalLM(tiny.config("llama")).eval()
    packed.load_state_dict(own.state_dict())
    packed.set_attn_implementation("unimem")
    with KVCache.for_model(packed) as cache:
        got = generated(packed, cache, "greedy" if n == 1 else "looked up", 1)
        assert got.tolist() == expected.tolist()
