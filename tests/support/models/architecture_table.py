"""What `KVCache` does for architectures of transformers: equal to no cache, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from support.models import architectures
from unimem.transformers import KVCache

NAMES = """
    afmoe apertus arcee bamba bart biogpt bitnet bloom codegen cohere cohere2 deepseek_v2
    deepseek_v3 deepseek_v32 deepseek_v4 diffllama dots1 ernie4_5 ernie4_5_moe exaone4 falcon
    falcon_h1 falcon_mamba flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text glm
    glm4 glm4_moe glm_moe_dsa gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granite_swa
    granitemoe granitemoe_swa granitemoehybrid helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4
    internlm3 jais2 jamba jetmoe kimi_linear kolibri1 laguna lfm2 lfm2_moe llama llama4_text
    longcat_flash mamba mamba2 mimo_v2_flash minicpm3 minimax minimax_m2 ministral ministral3
    mistral mixtral mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt
    persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe
    qwen3_next recurrent_gemma rwkv seed_oss smollm3 solar_open stablelm starcoder2 t5 vaultgemma
    xglm xlstm youtu
""".split()

ATTENTIONS = ("eager", "sdpa", "unimem")
WAYS = ("assisted", "beams", "crop")
# Errors that are a sentence for a user; others are faults.
_SENTENCES = (ValueError, NotImplementedError, TypeError)
_N, _MORE = 20, 12

Made = tuple[list[list[int]], torch.Tensor]  # tokens, and scores or logits of them


class Cell(NamedTuple):
    """What one way of one architecture with one attention gave."""

    result: str  # "equal", "refused", "wrong" or "died"
    by: str = ""  # who refused: "unimem" or "transformers"
    why: str = ""


def cells(name: str, attentions: Sequence[str] = ATTENTIONS) -> dict[str, Cell]:
    """Return the cells of an architecture, as ``{"eager assisted": ...}``."""
    found = {}
    for attention in attentions:
        model = architectures.model(name)
        try:
            model.set_attn_implementation(attention)
        except ValueError as error:
            found.update({f"{attention} {way}": _refused(error) for way in WAYS})
            continue
        for way in WAYS:
            found[f"{attention} {way}"] = _cell(model, way)
    return found


def _refused(error: Exception) -> Cell:
    text = f"{error}".strip().splitlines()[0]
    by = "unimem" if text.startswith(("KVCache", "attention 'unimem'")) else "transformers"
    result = "refused" if isinstance(error, _SENTENCES) else "died"
    return Cell(result, by, f"{type(error).__name__}: {text}")


def _cell(model: Any, way: str) -> Cell:
    run: Callable[[Any, Any], Made] = {"assisted": _assisted, "beams": _beams, "crop": _crop}[way]
    with torch.no_grad():
        try:
            with KVCache.for_model(model) as cache:
                tokens, numbers = run(model, cache)
        except Exception as error:  # the table says which
            return _refused(error)
        expected, right = run(model, None)
    if tokens == expected and torch.allclose(numbers, right, rtol=1e-3, atol=1e-3):
        return Cell("equal")
    return Cell("wrong", "unimem", f"{tokens} instead of {expected}")


def _given(model: Any, cache: Any) -> dict[str, Any]:
    return {"use_cache": False} if cache is None else {architectures.cache_name(model): cache}


def _generate(model: Any, cache: Any, batch: int, **options: Any) -> Any:
    ids = architectures.ids(batch, _N)
    given = _given(model, cache)
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=_MORE,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **given,
        **options,
    )


def _assisted(model: Any, cache: Any) -> Made:
    """Let a model that is nearly the same draft, so that some tokens are taken, and some not."""
    options = {}
    if cache is not None:
        draft = options["assistant_model"] = copy.deepcopy(model)
        for parameter in draft.parameters():
            parameter.mul_(1 + 0.2 * torch.randn(parameter.shape))
    made = _generate(model, cache, 1, **options)
    return made.sequences.tolist(), torch.stack(made.logits)[:, 0].float()


def _beams(model: Any, cache: Any) -> Made:
    made = _generate(model, cache, 2, num_beams=3)
    return made.sequences.tolist(), made.sequences_scores


def _crop(model: Any, cache: Any) -> Made:
    """Compute tokens, drop some of the last, compute them again, and two more one by one."""
    ids = architectures.ids(2, _N)
    if cache is None:
        return [], model(ids, use_cache=False).logits[:, 13:]
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()
    given = _given(model, cache)
    model(ids[:, :12], **given, use_cache=True)
    model(ids[:, 12:18], **given, use_cache=True)
    cache.crop(-5)
    parts = (ids[:, 13:18], ids[:, 18:19], ids[:, 19:])
    made = [model(part, **given, use_cache=True).logits for part in parts]
    return [], torch.cat(made, 1)
