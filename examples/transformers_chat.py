"""A conversation that goes on after a restart, and does not compute its beginning again.

    python examples/transformers_chat.py MODEL FOLDER "Once upon a time"
    python examples/transformers_chat.py MODEL FOLDER "Then he"

MODEL is a folder or a name that transformers knows. FOLDER keeps the conversation: the ids of its
tokens, and the KV cache of these.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from unimem.errors import SnapshotError
from unimem.transformers import KVCache


def remembered(path: Path, model: Any, ids: list[int]) -> KVCache:
    """Return the cache of a conversation, or an empty one."""
    try:
        return KVCache.restore(path, model=model, tokens=ids)
    except FileNotFoundError:
        pass
    except SnapshotError as error:  # another model, or other tokens
        print(f"Computed anew: {error}")
    return KVCache.for_model(model)


def talk(model_name: str, folder: Path, text: str, n: int) -> None:
    """Tell the model a text, and print what it says."""
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    # Importing unimem.transformers has registered this attention.
    model = AutoModelForCausalLM.from_pretrained(model_name, attn_implementation="unimem").eval()
    folder.mkdir(parents=True, exist_ok=True)
    ids_path, kv_path = folder / "chat.json", folder / "chat.kv"
    ids: list[int] = json.loads(ids_path.read_text()) if ids_path.exists() else []
    ids += tokenizer(text, add_special_tokens=not ids).input_ids
    with remembered(kv_path, model, ids) as cache:
        print(f"{cache.get_seq_length()} of {len(ids)} tokens were computed before")
        given = torch.tensor([ids])
        said = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            cache=cache,
            max_new_tokens=n,
            do_sample=False,
        )
        # Save the cache first: a cache with more tokens than the ids is refused and computed anew.
        cache.save(kv_path, tokens=said)
    ids_path.write_text(json.dumps(said[0].tolist()))
    print(tokenizer.decode(said[0, len(ids) :]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("text")
    parser.add_argument("-n", type=int, default=24, help="tokens to say")
    asked = parser.parse_args()
    talk(asked.model, asked.folder, asked.text, asked.n)
