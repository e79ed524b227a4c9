"""The perplexity of SmolLM2 over caches of `unimem.transformers`, quantized and rotated.

    python tools/perplexity.py [--model FILE.gguf] [--text FILE] [--tokens N]

A text is computed in pieces, whose tokens attend to those before them as the cache has stored
them; `DynamicCache` stores them as they are. The model is fetched as `make models` does. It takes
two minutes, and needs the packages `transformers`, `torch` and `gguf`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers

import unimem as um
from real_models import FILES, ROOT, fetch
from unimem.engine.text.tokenizer import Tokenizer
from unimem.transformers import KVCache

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
PIECE = 16
OURS: tuple[dict[str, Any], ...] = tuple(
    {"dtype": dtype, "rotate": rotate} for dtype in ("q8_0", "q4_0") for rotate in (False, True)
)


def perplexity(model: Any, cache: Any, ids: torch.Tensor) -> float:
    """Return the perplexity of all ids but the first."""
    logits = []
    with torch.no_grad():
        for piece in ids[:, :-1].split(PIECE, 1):
            logits.append(model(piece, past_key_values=cache).logits[0])
    return float(torch.nn.functional.cross_entropy(torch.cat(logits), ids[0, 1:]).exp())


def main() -> None:
    """Print the perplexity with each cache."""
    parser = argparse.ArgumentParser(description="The perplexity over quantized caches.")
    parser.add_argument("--model", type=Path, help="by default SmolLM2")
    parser.add_argument("--text", type=Path, default=ROOT / "docs/design.md")
    parser.add_argument("--tokens", type=int, default=1024)
    asked = parser.parse_args()
    path = asked.model or fetch(MODEL, FILES[MODEL], ROOT / "build/models")
    with um.open_weights(path) as weights:
        found = Tokenizer.from_metadata(weights.metadata).encode(asked.text.read_text())
    ids = torch.tensor([found[: asked.tokens]])
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    model.set_attn_implementation("unimem")
    print(f"{path.name}, {ids.shape[1]} tokens of {asked.text.name}, by pieces of {PIECE}")
    print(f"{'DynamicCache':20} {perplexity(model, transformers.DynamicCache(), ids):8.3f}")
    for options in OURS:
        with KVCache.for_model(model, **options) as cache:
            name = options["dtype"] + (", rotated" if options["rotate"] else "")
            print(f"{name:20} {perplexity(model, cache, ids):8.3f}")


if __name__ == "__main__":
    main()
