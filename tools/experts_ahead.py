"""Time tokens of a streamed mixture with and without reading experts ahead, in one process.

    python tools/experts_ahead.py MODEL.gguf [SHARE ...]

Each share is the room for experts, by default 0.35, 0.5 and 0.8 of them. Both sides compute the
same tokens in turn, and their logits have to be equal. The tokens are drawn, or for the mixture
that bench/unimem_bench/trained_mixture.py trains, those that it was trained on.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np

import unimem as um
from unimem.engine import Decoder
from unimem.engine.graph import _Builder

ROUNDS, WARM, TOKENS = 12, 24, 12


def make(path: Path, budget: int, ahead: bool) -> Decoder:
    """Return a decoder with `budget` bytes for weights, which reads ahead or does not."""
    if ahead:
        return Decoder(path, ctx=1024, threads=2, load="stream", weights_budget=budget)
    with patch.object(_Builder, "_begin_ahead", lambda *_: None):
        return Decoder(path, ctx=1024, threads=2, load="stream", weights_budget=budget)


def compare(path: Path, share: float) -> str:
    """Return a line with the medians of both sides in ms, and the ratio of each round."""
    with um.open_weights(path, load="map") as w:
        experts = sum(t.nbytes for name, t in w.tensors.items() if "_exps." in name)
        budget = sum(t.nbytes for t in w.tensors.values()) - int(experts * (1 - share))
    trained = path.with_name("trained-mixture.npz")
    if "trained" in path.name and trained.exists():
        tokens = np.load(trained)["tokens"]
    else:
        tokens = np.random.default_rng(4).integers(300, 1024, WARM + ROUNDS * TOKENS)
    sides = make(path, budget, False), make(path, budget, True)
    for decoder in sides:
        decoder.prefill([int(tokens[-1])])
    ms = np.zeros((2, ROUNDS, TOKENS))
    for first in range(0, WARM + ROUNDS * TOKENS, TOKENS):
        number = first // TOKENS - WARM // TOKENS
        for side in (0, 1) if number % 2 else (1, 0):
            for i, token in enumerate(tokens[first : first + TOKENS]):
                began = time.perf_counter()
                sides[side].prefill([int(token)])
                if number >= 0:
                    ms[side, number, i] = (time.perf_counter() - began) * 1e3
        if not np.array_equal(sides[0].logits, sides[1].logits):
            raise SystemExit("the logits differ")
    for decoder in sides:
        decoder.close()
    without, ahead = np.median(ms, axis=(1, 2))
    ratios = np.median(ms[0], axis=1) / np.median(ms[1], axis=1)
    return (
        f"{path.name}, room for {share:.0%}: {without:.1f} ms without, {ahead:.1f} ms ahead, "
        f"{np.median(ratios):.2f}x ({ratios.min():.2f}-{ratios.max():.2f})"
    )


if __name__ == "__main__":
    for share in [float(one) for one in sys.argv[2:]] or [0.35, 0.5, 0.8]:
        print(compare(Path(sys.argv[1]), share), flush=True)
