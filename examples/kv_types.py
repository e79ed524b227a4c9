"""Compares types of KV caches: logits of a model's text, and the time of a token.

    python examples/kv_types.py MODEL.gguf TEXT.txt|IDS.json

Decoders with different caches read the same text, token by token and in turns. Their logits are
compared with those of an f16 cache: the error as a part of the logits' standard deviation, the mean
Kullback-Leibler divergence of the probabilities, and how often the likeliest token differs. The
text may be a list of token ids in JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import unimem as um
from unimem.engine import Decoder

TYPES = ("q8_0", "q4_0")


class Caches:
    """Decoders of one model, by the names of their caches; the first is the reference."""

    def __init__(self, decoders: dict[str, Decoder]) -> None:
        self.decoders = decoders
        self.nanoseconds: dict[str, list[int]] = {name: [] for name in decoders}
        self.off: dict[str, list[tuple[float, float, bool]]] = {name: [] for name in decoders}

    def read(self, token: int) -> None:
        """Have all of them compute a token, and compare."""
        logits = {}
        for name, decoder in self.decoders.items():
            start = time.perf_counter_ns()
            decoder.prefill([token])
            self.nanoseconds[name].append(time.perf_counter_ns() - start)
            logits[name] = decoder.logits.astype("float64")
        (exact, *_) = logits.values()
        for name, found in logits.items():
            rms = np.sqrt(np.mean((found - exact) ** 2)) / exact.std()
            p, q = log_softmax(exact), log_softmax(found)
            divergence = float(np.sum(np.exp(p) * (p - q)))
            self.off[name].append((float(rms), divergence, exact.argmax() != found.argmax()))

    def rows(self) -> list[str]:
        """Return the errors of each cache, and the median time of a token."""
        rows = ["cache              off     KL divergence   other token   ms a token"]
        for name, off in self.off.items():
            rms, divergence, other = np.mean(np.array(off, "f8"), axis=0)
            took = float(np.median(self.nanoseconds[name])) / 1e6
            rows.append(f"{name:16} {rms:7.4f}  {divergence:12.6f}  {other:11.2%}  {took:9.2f}")
        return rows


def log_softmax(logits: Any) -> Any:
    """Return the logarithms of the probabilities."""
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def main() -> None:
    """Read the text, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("-n", type=int, default=1024, help="tokens to read")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with ExitStack() as stack:
        weights = stack.enter_context(um.open_weights(options.model, load="copy"))

        def open_one(**cache: Any) -> Decoder:
            made = Decoder(weights, ctx=options.n, threads=options.threads, **cache)
            return stack.enter_context(made)

        decoders = {"f16": open_one()}
        for kv_dtype in TYPES:
            decoders[kv_dtype] = open_one(kv_dtype=kv_dtype, rotate=False)
            decoders[f"{kv_dtype} rotated"] = open_one(kv_dtype=kv_dtype, rotate=True)
        caches = Caches(decoders)
        text = options.text.read_text()
        is_ids = options.text.suffix == ".json"
        tokens = json.loads(text) if is_ids else decoders["f16"].tokenize(text)
        for token in tokens[: options.n]:
            caches.read(token)
    print(f"{options.model.name}, {len(tokens[: options.n])} tokens")
    print("\n".join(caches.rows()))


if __name__ == "__main__":
    main()
