"""unimem's cache for transformers beside its own: a token's update, `generate`, and resuming.

The model has random weights: 4 layers of hidden size 256, 8 heads of queries and 2 of keys.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from unimem.base.install_hint import install_hint
from unimem_bench.rounds import Side
from unimem_bench.suite import Measure, NotMeasured, Suite, faster, grows

SUITE = Suite(
    "transformers",
    "What does a KV cache cost in transformers, and what does it gain?",
    in_quick=False,
)

LAYERS, HEADS, KV_HEADS, HIDDEN, VOCAB = 4, 8, 2, 256, 1000
CONTEXTS, CONTEXTS_QUICK = (1 << 10, 1 << 13, 1 << 15), (1 << 8, 1 << 10, 1 << 12)
# Tokens in one measurement: of updates, and of `generate`.
N_UPDATES, N_TOKENS = 20, 32
DYNAMIC, STATIC = "DynamicCache", "StaticCache"
# Sides that name their attention, so that the attention and the cache are told apart.
ATTENTIONS = ("unimem", "sdpa")
QUANTIZED = ("q8_0", "q4_0")


def packages(measure: Measure) -> tuple[Any, Any]:
    """Return torch and transformers; NotMeasured if one is not installed."""
    for name in ("torch", "transformers"):
        if not measure.installed(name, DYNAMIC, STATIC):
            raise NotMeasured(f"wants {name}: {install_hint('transformers')}")
    import torch
    import transformers

    torch.set_num_threads(len(measure.cpus))
    transformers.utils.logging.set_verbosity_error()
    return torch, transformers


def given(model: Any, cache: Any) -> dict[str, Any]:
    """Return the argument that gives a model its cache; transformers 5.24 has renamed it."""
    named = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if named else "past_key_values": cache}


def attention_of(kind: str) -> str:
    """Return the attention of a side: as its name says, or ours for our cache only."""
    named = kind.partition(", ")[2]
    return named or ("sdpa" if kind in (DYNAMIC, STATIC) else "unimem")


def make_model(measure: Measure, dtype: str, kind: str, ctx: int) -> Any:
    """Return the model, with the attention of a side."""
    torch, transformers = packages(measure)
    import unimem.transformers  # registers the attention

    assert unimem.transformers
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCAB,
        max_position_embeddings=ctx,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation=attention_of(kind),
    )
    return transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


def make_cache(measure: Measure, kind: str, config: Any, ctx: int) -> Any:
    """Return an empty cache: ours, or one of theirs."""
    _, transformers = packages(measure)
    from unimem.transformers import KVCache

    if kind.startswith(DYNAMIC):
        return transformers.DynamicCache(config=config)
    if kind == STATIC:
        return transformers.StaticCache(config=config, max_cache_len=ctx)
    return KVCache(config, ctx, dtype=kind if kind in QUANTIZED else None)


def rewind(cache: Any, n: int) -> None:
    """Drop tokens until n are left."""
    for layer in cache.layers:
        if hasattr(layer, "max_cache_len"):
            layer.cumulative_length.fill_(n)
            continue
        cache.crop(n - int(cache.get_seq_length()))
        return


def timed(work: Callable[[], object], before: Callable[[], object], n: int) -> Side:
    """Return a side that measures the microseconds of one nth of some work."""

    def run() -> float:
        before()
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began) / n * 1e6

    return run


def update_side(measure: Measure, kind: str, ctx: int) -> Side:
    """Return a side that appends tokens to all layers after `ctx` tokens."""
    torch, _ = packages(measure)
    model = make_model(measure, "bfloat16", kind, ctx + 2 * N_UPDATES)
    cache = make_cache(measure, kind, model.config, ctx + 2 * N_UPDATES)
    size = (1, KV_HEADS, 1, HIDDEN // HEADS)
    filled = torch.zeros(1, KV_HEADS, ctx, size[3], dtype=torch.bfloat16)
    for layer in range(LAYERS):
        cache.update(filled, filled, layer)
    token = torch.ones(size, dtype=torch.bfloat16)

    def work() -> None:
        for _ in range(N_UPDATES):
            for layer in range(LAYERS):
                cache.update(token, token, layer)

    return timed(work, partial(rewind, cache, ctx), N_UPDATES)


def contexts(measure: Measure) -> tuple[int, ...]:
    """Return the lengths of conversations."""
    return CONTEXTS_QUICK if measure.quick else CONTEXTS


@SUITE.case(
    "update",
    "Does a token's update cost more late in a conversation?",
    unit="us",
    x="tokens",
    targets=[grows(0.1, issue=20)],
)
def update(measure: Measure) -> None:
    """Append a token of bfloat16 to 4 layers."""
    sides = {
        kind: {float(n): update_side(measure, kind, n) for n in contexts(measure)}
        for kind in ("unimem", DYNAMIC, STATIC)
    }
    measure.scale({"unimem": sides.pop("unimem")}, sides)


def update_at(measure: Measure, which: int) -> None:
    """Append a token after a long context."""
    sides = {
        kind: update_side(measure, kind, contexts(measure)[which])
        for kind in ("unimem", DYNAMIC, STATIC)
    }
    measure.compare({"unimem": sides.pop("unimem")}, sides)


for position, name, least in ((1, "8k", 5.0), (2, "32k", 20.0)):
    SUITE.case(
        f"update, {name}",
        f"What does a token's update cost after {name} tokens?",
        unit="us",
        targets=[faster(DYNAMIC, least, issue=20)],
    )(partial(update_at, which=position))


def attend_side(measure: Measure, kind: str, dtype: str, ctx: int) -> Side:
    """Return a side that appends tokens to all layers and attends, without the rest of a model."""
    torch, _ = packages(measure)
    from transformers import AttentionInterface

    model = make_model(measure, dtype, kind, ctx + 2 * N_UPDATES)
    cache = make_cache(measure, kind, model.config, ctx + 2 * N_UPDATES)
    attend = AttentionInterface()[attention_of(kind)]
    module = model.model.layers[0].self_attn
    size = HIDDEN // HEADS
    filled = torch.randn(1, KV_HEADS, ctx, size).to(model.dtype)
    for layer in range(LAYERS):
        cache.update(filled, filled, layer)
    query, token = (torch.ones(1, n, 1, size).to(model.dtype) for n in (HEADS, KV_HEADS))

    def work() -> None:
        with torch.no_grad():
            for _ in range(N_UPDATES):
                for layer in range(LAYERS):
                    k, v = cache.update(token, token, layer)
                    attend(module, query, k, v, None, scaling=size**-0.5)

    return timed(work, partial(rewind, cache, ctx), N_UPDATES)


def attend(measure: Measure, dtype: str, attention: str) -> None:
    """Append and attend with one attention, over either cache."""
    ctx = contexts(measure)[1]
    ours, theirs = (
        {kind: attend_side(measure, f"{kind}, {attention}", dtype, ctx)}
        for kind in ("unimem", DYNAMIC)
    )
    measure.compare(ours, theirs, rounds=21)


for element in ("float32", "bfloat16"):
    for kernel in ATTENTIONS:
        SUITE.case(
            f"attend, {element}, {kernel}, 8k",
            f"What does a cache cost beside the same attention, {kernel}, after 8k tokens?",
            unit="us",
            # With "unimem" both caches run one kernel, and only a copy tells them apart.
            targets=[faster(DYNAMIC, 1.3, issue=45)] * (kernel == "sdpa"),
        )(partial(attend, dtype=element, attention=kernel))


def generate_side(measure: Measure, kind: str, dtype: str, ctx: int) -> Side:
    """Return a side that generates tokens after a prompt that is in its cache."""
    torch, _ = packages(measure)
    most = ctx + N_TOKENS + 1
    model = make_model(measure, dtype, kind, most)
    cache = make_cache(measure, kind, model.config, most)
    ids = torch.randint(VOCAB, (1, ctx + 1), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        model(ids[:, :ctx], **given(model, cache), logits_to_keep=1)

    def work() -> None:
        options = {"max_new_tokens": N_TOKENS, "min_new_tokens": N_TOKENS, "do_sample": False}
        model.generate(ids, attention_mask=mask, **given(model, cache), **options)

    return timed(work, partial(rewind, cache, ctx), N_TOKENS)


def generate(measure: Measure, dtype: str, ctx: int) -> None:
    """Generate after a prompt."""
    sides = {
        kind: generate_side(measure, kind, dtype, ctx // 8 if measure.quick else ctx)
        for kind in ("unimem", DYNAMIC, STATIC)
    }
    measure.compare({"unimem": sides.pop("unimem")}, sides, rounds=21)


for element in ("float32", "bfloat16"):
    for length, name in ((2 << 10, "2k"), (8 << 10, "8k")):
        SUITE.case(
            f"generate, {element}, {name}",
            f"What does a token of {element} cost after {name} others?",
            unit="us",
            targets=[faster(STATIC, 1.0, issue=20), faster(DYNAMIC, 1.5, issue=20)],
        )(partial(generate, dtype=element, ctx=length))


def generate_quantized(measure: Measure, dtype: str) -> None:
    """Generate after 8k tokens with rows of blocks, and with rows as they are."""
    ctx = contexts(measure)[1]
    sides = {kind: generate_side(measure, kind, "float32", ctx) for kind in (dtype, "unimem")}
    measure.compare({dtype: sides.pop(dtype)}, {"f32": sides.pop("unimem")}, rounds=21)


for blocks in QUANTIZED:
    SUITE.case(
        f"generate, {blocks}, 8k",
        f"What does a token cost after 8k others in {blocks}?",
        unit="us",
        targets=[faster("f32", 1.0, side=blocks, issue=45)],
    )(partial(generate_quantized, dtype=blocks))


@SUITE.case(
    "resume",
    "How soon does a saved conversation of 8k tokens go on?",
    unit="us",
    targets=[faster("prefill", 10.0, issue=20)],
)
def resume(measure: Measure) -> None:
    """Restore and compute one token, or compute the whole prompt."""
    torch, _ = packages(measure)
    from unimem.transformers import KVCache

    ctx = contexts(measure)[1]
    model = make_model(measure, "bfloat16", "unimem", ctx + 1)
    ids = torch.randint(VOCAB, (1, ctx + 1), generator=torch.Generator().manual_seed(0))
    path = measure.folder / "transformers.kv"
    with torch.no_grad(), KVCache.for_model(model) as cache:
        model(ids[:, :ctx], **given(model, cache), logits_to_keep=1)
        cache.save(path, tokens=ids)

    def go_on() -> None:
        with torch.no_grad(), KVCache.restore(path, model=model, tokens=ids) as cache:
            model(ids[:, ctx:], **given(model, cache))

    def compute() -> None:
        with torch.no_grad(), KVCache.for_model(model) as cache:
            model(ids, **given(model, cache), logits_to_keep=1)

    def nothing() -> None:
        pass

    ours, theirs = timed(go_on, nothing, 1), timed(compute, nothing, 1)
    measure.compare({"unimem": ours}, {"prefill": theirs}, rounds=9)
    path.unlink()
