"""Buffers to place: the values of the engine's own graphs, and random ones of four families.

Beside them are the two greedy planners of Pisarchyk and Lee (2020), plainly written: largest first,
and earliest first, each with the lowest and the tightest gap.
"""

from __future__ import annotations

import math
import random
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from types import MappingProxyType

import numpy as np

import unimem as um

CTX = 512  # tokens of context
BATCH = 128  # tokens of the engine's larger graph

Uses = Sequence[um.BufferUse]

# Small shapes of each architecture, those of published models, and shapes that are hard to place:
# heads as wide as the feed-forward network, or wider.
SHAPES = {
    "llama, tiny": ("llama", um.ModelDims(64, 128, 4, 2, 16, 320, 2, CTX)),
    "qwen2, small": ("qwen2", um.ModelDims(256, 768, 8, 2, 32, 1024, 4, CTX)),
    "qwen3, wide": ("qwen3", um.ModelDims(512, 512, 32, 32, 128, 1024, 8, CTX)),
    "Llama 3.2 1B": ("llama", um.ModelDims(2048, 8192, 32, 8, 64, 128256, 16, CTX)),
    "Llama 3 8B": ("llama", um.ModelDims(4096, 14336, 32, 8, 128, 128256, 32, CTX)),
    "Llama 3 70B": ("llama", um.ModelDims(8192, 28672, 64, 8, 128, 128256, 80, CTX)),
    "Qwen2.5 0.5B": ("qwen2", um.ModelDims(896, 4864, 14, 2, 64, 151936, 24, CTX)),
    "Qwen2.5 7B": ("qwen2", um.ModelDims(3584, 18944, 28, 4, 128, 152064, 28, CTX)),
    "Qwen3 0.6B": ("qwen3", um.ModelDims(1024, 3072, 16, 8, 128, 151936, 28, CTX)),
    "Qwen3 32B": ("qwen3", um.ModelDims(5120, 25600, 64, 8, 128, 151936, 64, CTX)),
    "narrow inside": ("llama", um.ModelDims(64, 32, 4, 2, 16, 320, 30, CTX)),
    "all heads of their own": ("qwen3", um.ModelDims(64, 128, 32, 32, 4, 320, 30, CTX)),
    "wide heads": ("qwen3", um.ModelDims(64, 128, 4, 2, 128, 320, 30, CTX)),
}


# ---- greedy planners ----------------------------------------------------------------------------


def greedy_by_size(uses: Sequence[um.BufferUse], align: int, tightest: bool = False) -> int:
    """Return the total of a plan that places the largest buffers first."""
    return greedy(sorted(uses, key=lambda use: -use.nbytes), align, tightest)


def greedy_by_order(uses: Sequence[um.BufferUse], align: int, tightest: bool = False) -> int:
    """Return the total of a plan that places the earliest buffers first."""
    return greedy(sorted(uses, key=lambda use: use.first), align, tightest)


def greedy(uses: Sequence[um.BufferUse], align: int, tightest: bool) -> int:
    """Place each in the lowest gap, or the tightest, between those that live with it."""
    placed: list[tuple[int, int, um.BufferUse]] = []  # begin and end, by the begin
    for use in uses:
        nbytes = -(-use.nbytes // align) * align
        lowest, gaps = 0, []
        for begin, end, other in placed:
            if other.first <= use.last and use.first <= other.last:
                if begin - lowest >= nbytes:
                    gaps.append((begin - lowest, lowest))
                lowest = max(lowest, end)
        if gaps:
            lowest = min(gaps)[1] if tightest else gaps[0][1]
        if nbytes:
            insort(placed, (lowest, lowest + nbytes, use), key=itemgetter(0))
    return max((end for _, end, _ in placed), default=0)


GREEDY: Mapping[str, Callable[[Uses], int]] = MappingProxyType(
    {
        "greedy by size": lambda uses: greedy_by_size(uses, 64),
        "greedy by size, tightest gap": lambda uses: greedy_by_size(uses, 64, True),
        "greedy by order": lambda uses: greedy_by_order(uses, 64),
        "greedy by order, tightest gap": lambda uses: greedy_by_order(uses, 64, True),
    }
)


# ---- random instances ---------------------------------------------------------------------------

Lives = list[tuple[int, int, int]]  # nbytes, first, last


def _named(lives: Lives) -> list[um.BufferUse]:
    return [um.BufferUse(str(i), *life) for i, life in enumerate(lives)]


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def log_uniform_sizes(rng: random.Random, most: int) -> list[um.BufferUse]:
    """Draw sizes from 64 bytes to 1 MiB, with lives of any length."""
    n = round(_log_uniform(rng, 4, most))
    steps = max(2, round(n * rng.uniform(0.3, 2)))
    life = _log_uniform(rng, 1, max(2, steps / 4))
    lives = []
    for _ in range(n):
        first = rng.randrange(steps)
        last = first + int(rng.expovariate(1 / life))
        lives.append((round(_log_uniform(rng, 64, 1 << 20)), first, last))
    return _named(lives)


def transformer(rng: random.Random, most: int) -> list[um.BufferUse]:
    """Draw layers of attention and feed-forward of random widths, and values that skip layers."""
    wide = 32 * rng.randrange(1, 129) * 4 * rng.choice([1, 7, 32, 128])
    q, inner = round(wide * rng.choice([0.5, 1, 1, 2])), round(wide * rng.uniform(0.25, 5))
    kv = q // rng.choice([1, 2, 4, 8])
    # Sizes, and the number of steps until each is read for the last time.
    attention = [(wide, 11), (wide, 4), (q, 5), (q, 4), (kv, 2), (kv, 3), (kv, 1), (q, 2)]
    feed_forward = [(wide, 1), (wide, 8), (wide, 3), (inner, 3), (inner, 2), (inner, 1), (wide, 1)]
    layer = attention + feed_forward
    n_layers = max(1, round(_log_uniform(rng, 1, max(2, most / len(layer)))))
    lives = [(nbytes, t, t + life) for t, (nbytes, life) in enumerate(layer * n_layers)]
    for _ in range(rng.randrange(4)):
        first = rng.randrange(len(lives))
        lives.append((rng.randint(1, wide), first, rng.randint(first, len(lives))))
    return _named(lives)


def long_and_short(rng: random.Random, most: int) -> list[um.BufferUse]:
    """Draw three sizes that do not divide each other; a quarter lives long, most 1 to 3 steps."""
    n = round(_log_uniform(rng, 8, most))
    steps = max(4, n // 2)
    unit = 64 * rng.randrange(1, 100)
    sizes = [unit * factor for factor in rng.sample([2, 3, 5, 7, 11, 13], 3)]
    lives = []
    for _ in range(n):
        is_long = rng.random() < 0.25
        first = rng.randrange(steps // 2 if is_long else steps)
        life = rng.randint(steps // 3, steps) if is_long else rng.randrange(3)
        lives.append((rng.choice(sizes), first, min(first + life, steps)))
    return _named(lives)


def cut(rng: random.Random, most: int) -> list[um.BufferUse]:
    """Cut a rectangle of time and memory into pieces, so that a plan without gaps exists."""
    n = round(_log_uniform(rng, 4, most))
    pieces = [(0, rng.randrange(4, 4 * n + 5), 0, rng.randrange(16 * n, 1 << 16))]
    while len(pieces) < n:
        areas = [(t1 - t0) * (b1 - b0) for t0, t1, b0, b1 in pieces]
        i = rng.choices(range(len(pieces)), areas)[0]
        t0, t1, b0, b1 = pieces[i]
        if rng.random() < 0.5 and t1 - t0 > 1:
            t = rng.randrange(t0 + 1, t1)
            pieces[i : i + 1] = [(t0, t, b0, b1), (t, t1, b0, b1)]
        elif b1 - b0 > 1:
            b = rng.randrange(b0 + 1, b1)
            pieces[i : i + 1] = [(t0, t1, b0, b), (t0, t1, b, b1)]
    rng.shuffle(pieces)
    return _named([(64 * (b1 - b0), t0, t1 - 1) for t0, t1, b0, b1 in pieces])


FAMILIES = {
    "log-uniform": log_uniform_sizes,
    "transformer": transformer,
    "long and short": long_and_short,
    "cut": cut,
}


def instances(n: int, most: int = 1000) -> Iterator[tuple[str, list[um.BufferUse]]]:
    """Yield random instances of up to `most` buffers; their numbers are the seeds."""
    families = list(FAMILIES)
    for seed in range(n):
        family = families[seed % len(families)]
        yield family, FAMILIES[family](random.Random(seed), most)


def large_instance(family: str, n: int) -> list[um.BufferUse]:
    """Draw an instance of nearly `n` buffers, the same each time."""
    rng = random.Random(1000 + list(FAMILIES).index(family))
    while len(uses := FAMILIES[family](rng, n)) < 0.9 * n:
        pass
    return uses


# ---- the engine's graphs ------------------------------------------------------------------------


def engine_graphs() -> dict[str, tuple[um.BufferUse, ...]]:
    """Collect the values of the engine's graphs for one token and for 128, by shape and tokens."""
    from unimem.engine import embedded_model

    with um.open_weights(embedded_model()) as weights:
        embedded = "llama", replace(um.ModelDims.from_weights(weights), max_seq_len=CTX)
    shapes = {"embedded": embedded, **SHAPES}
    return {
        f"{name}, {n_tokens}": graph_uses(arch, dims, n_tokens)
        for name, (arch, dims) in shapes.items()
        for n_tokens in (1, BATCH)
    }


def graph_uses(arch: str, dims: um.ModelDims, n_tokens: int) -> tuple[um.BufferUse, ...]:
    """Return the values of the engine's graph for a model of these dimensions."""
    from unimem.backends import ggml
    from unimem.engine.graph import Arrays, Graph, Headers, KVLane
    from unimem.engine.model import Model, Rope

    model = Model(arch, dims, 1e-5, Rope("normal", 10000.0, 1.0, 0.0, 1.0, CTX), None)
    hidden, inner, q, kv = dims.hidden_size, dims.intermediate_size, dims.q_size, dims.kv_size
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (hidden, dims.vocab_size),
        "output_norm.weight": (hidden,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (hidden, q),
        "attn_k": (hidden, kv),
        "attn_v": (hidden, kv),
        "attn_output": (q, hidden),
        "ffn_norm": (hidden,),
        "ffn_gate": (hidden, inner),
        "ffn_up": (hidden, inner),
        "ffn_down": (inner, hidden),
    }
    if arch == "qwen3":
        layer |= {"attn_q_norm": (dims.head_dim,), "attn_k_norm": (dims.head_dim,)}
    for number in range(dims.num_layers):
        shapes |= {f"blk.{number}.{part}.weight": shape for part, shape in layer.items()}
        if arch == "qwen2":
            shapes |= {
                f"blk.{number}.attn_{part}.bias": (width,)
                for part, width in (("q", q), ("k", kv), ("v", kv))
            }
    # Nothing is computed, so all addresses are those of one array.
    array = np.zeros((n_tokens, CTX), np.float16)
    at = array.ctypes.data
    tensors = {name: (ggml.F32, shape, at) for name, shape in shapes.items()}
    head_bytes = Headers.bytes_needed(len(tensors), dims.num_layers)
    node_bytes = Graph.bytes_needed(model)
    memory = np.zeros(head_bytes + node_bytes, np.uint8)
    address = memory.ctypes.data
    lane = KVLane(at, 2 * dims.kv_size, 2 * dims.head_dim)
    lanes = [(0, lane, lane)] * dims.num_layers
    kinds = ggml.F16, ggml.F16
    headers = Headers(model, tensors, lanes, (CTX,), kinds, False, address, head_bytes)
    arrays = Arrays(at, at, (at,), at, at)
    graph = Graph(model, headers, arrays, n_tokens, [at], address + head_bytes, node_bytes)
    uses = graph.values.uses
    graph.free()
    headers.free()
    return uses
