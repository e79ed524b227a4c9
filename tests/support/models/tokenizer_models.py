"""Vocabularies trained on the spot, and small GGUF models with them."""

from __future__ import annotations

import functools
import io
import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PAGE = (Path(__file__).parent / "data" / "tokenizer_page.txt").read_text(encoding="utf-8")
CONTROL = ["<|begin_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<|im_end|>|"]
USER_DEFINED = ["<tool_call>", "</tool_call>", "    "]
NORMAL, UNKNOWN, CONTROL_TYPE, USER_DEFINED_TYPE, BYTE = 1, 2, 3, 4, 6
ADDED = CONTROL + USER_DEFINED
ADDED_TYPES = [CONTROL_TYPE] * len(CONTROL) + [USER_DEFINED_TYPE] * len(USER_DEFINED)


@dataclass
class Vocab:
    """The tokenizer part of a GGUF file, with its `metadata` as read."""

    tokens: list[str]
    types: list[int]
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.metadata["tokenizer.ggml.tokens"] = self.tokens
        self.metadata["tokenizer.ggml.token_type"] = np.array(self.types, np.int32)


def corpus() -> list[str]:
    """Pieces of the page in random order: frequent enough to learn from, never the page itself."""
    rng = random.Random(0)
    pieces = re.findall(r"\s+|\w+|[^\w\s]+", PAGE)
    return ["".join(rng.choices(pieces, k=60)) for _ in range(400)]


def spm_vocab() -> Vocab:
    """A SentencePiece BPE vocabulary with byte fallback, as Llama 2 and Mistral have."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in corpus() for line in text.split("\n") if line),
        model_writer=model,
        model_type="bpe",
        vocab_size=1500,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        num_threads=1,
        minloglevel=2,
    )
    trained = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    n = len(trained)
    scores = [*map(trained.get_score, range(n)), *[0.0] * len(ADDED)]
    types = [UNKNOWN, CONTROL_TYPE, CONTROL_TYPE] + [BYTE] * 256 + [NORMAL] * (n - 259)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return Vocab([*map(trained.id_to_piece, range(n)), *ADDED], types + ADDED_TYPES, metadata)


@functools.cache
def _bpe() -> tuple[list[str], list[str]]:
    """Tokens and merges of byte-level BPE.

    It is trained without cutting words, so that merges run across them, and a word that is cut
    wrongly gives other ids.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=3000, show_progress=False, initial_alphabet=alphabet, max_token_length=12
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(merge) for merge in model["merges"]]


def bpe_vocab(pre: str) -> Vocab:
    """A byte-level BPE vocabulary whose text is cut into words in this way."""
    trained, merges = _bpe()
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": len(trained),
        "tokenizer.ggml.eos_token_id": len(trained) + 1,
    }
    return Vocab(trained + ADDED, [NORMAL] * len(trained) + ADDED_TYPES, metadata)


def write_model(path: Path, metadata: dict[str, Any]) -> Path:
    """Write a llama model of one tiny layer with this vocabulary."""
    import gguf

    width, n_vocab = 32, len(metadata["tokenizer.ggml.tokens"])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else value)
    square = np.zeros((width, width), np.float32)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", square)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", square[0])
    writer.add_tensor("token_embd.weight", np.zeros((n_vocab, width), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
