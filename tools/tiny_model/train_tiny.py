"""Train the embedded model: a very small llama that writes children's stories in plain English.

One command makes the file, from nothing but the grammar in `tiny_grammar.py`::

    pip install torch==2.13.0 numpy==2.4.6 gguf==0.19.0 sentencepiece==0.2.3
    python tools/tiny_model/train_tiny.py --out src/unimem/engine/models/tiny.gguf

It takes about half an hour of one CPU core. Seeds and the number of threads are fixed, so that the
same versions give the same file on the same kind of processor. What the run was and gave (settings,
losses, versions, digest of the file, a sample) is written to `tools/tiny_model/train_tiny.json`.
"""

import argparse
import hashlib
import io
import itertools
import json
import math
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
import sentencepiece
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every reader of torch code knows

from tiny_grammar import stories

RECORD: Final = Path(__file__).with_suffix(".json")
TRAIN_SEED: Final = 1
LONG_SEED: Final = 2
HELD_OUT_SEED: Final = 3
UNK, BOS, EOS = 0, 1, 2


@dataclass(frozen=True)
class Shape:
    """The dimensions of the model. Rows are multiples of 32, the block of Q8_0."""

    context: int = 512
    vocabulary: int = 1024
    width: int = 128
    blocks: int = 4
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 352
    epsilon: float = 1e-5
    rope_base: float = 10000.0

    @property
    def head_width(self) -> int:
        """Values in one head."""
        return self.width // self.heads


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train.

    Most steps see windows of `window` tokens, which is longer than a story; one in `long_every`
    sees the whole context, so that positions far from the start are trained as well. Steps are
    small and many, which learns more from the same text than few large ones.
    """

    steps: int = 10000
    long_every: int = 8
    warmup: int = 50
    tokens_per_step: int = 1024
    window: int = 256
    rate: float = 4e-3
    decay: float = 0.1
    clip: float = 1.0


Weights = dict[str, torch.Tensor]


def train_tokenizer(shape: Shape, n_stories: int = 20_000) -> sentencepiece.SentencePieceProcessor:
    """Train a SentencePiece BPE vocabulary on stories.

    Bytes are the fallback, so that every text has tokens. Text is taken as it is (no Unicode
    normalization, no spaces removed), which is what llama.cpp does with `tokenizer.ggml.model =
    llama`.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=itertools.islice(stories(TRAIN_SEED), n_stories),
        model_writer=model,
        model_type="bpe",
        vocab_size=shape.vocabulary,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=1.0,
        split_digits=True,
        unk_id=UNK,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=-1,
        num_threads=1,
        minloglevel=1,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def windows(
    tokenizer: sentencepiece.SentencePieceProcessor, seed: int, length: int, rows: int
) -> Iterator[torch.Tensor]:
    """Yield batches of whole windows, int64 `[rows, length + 1]`.

    Every window begins with the start of a story, as a prompt does, and is filled with the stories
    that follow. What is cut off at its end is not used again.
    """
    source = stories(seed)
    while True:
        batch = np.empty((rows, length + 1), np.int64)
        for row in batch:
            tokens: list[int] = []
            while len(tokens) <= length:
                tokens += [BOS, *tokenizer.encode(next(source)), EOS]
            row[:] = tokens[: length + 1]
        yield torch.from_numpy(batch)


def new_weights(shape: Shape) -> Weights:
    """Draw the weights at the start, float32, by their names in the GGUF file."""
    random = torch.Generator().manual_seed(TRAIN_SEED)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * (0.02 * scale)

    kv_width = shape.kv_heads * shape.head_width
    # What is added to the residual stream starts smaller, so that its variance does not grow with
    # the number of blocks (as in GPT-2).
    residual = 1 / math.sqrt(2 * shape.blocks)
    weights = {"token_embd.weight": matrix(shape.vocabulary, shape.width)}
    for block in range(shape.blocks):
        weights |= {
            f"blk.{block}.attn_norm.weight": torch.ones(shape.width),
            f"blk.{block}.attn_q.weight": matrix(shape.width, shape.width),
            f"blk.{block}.attn_k.weight": matrix(kv_width, shape.width),
            f"blk.{block}.attn_v.weight": matrix(kv_width, shape.width),
            f"blk.{block}.attn_output.weight": matrix(shape.width, shape.width, residual),
            f"blk.{block}.ffn_norm.weight": torch.ones(shape.width),
            f"blk.{block}.ffn_gate.weight": matrix(shape.feed_forward, shape.width),
            f"blk.{block}.ffn_up.weight": matrix(shape.feed_forward, shape.width),
            f"blk.{block}.ffn_down.weight": matrix(shape.width, shape.feed_forward, residual),
        }
    weights["output_norm.weight"] = torch.ones(shape.width)
    weights["output.weight"] = matrix(shape.vocabulary, shape.width)
    return weights


def _rotate(x: torch.Tensor, base: float) -> torch.Tensor:
    """Rotate the pairs (2i, 2i + 1) of each head by position: the order that llama has in GGUF."""
    n_tokens, head_width = x.shape[-3], x.shape[-1]
    frequency = base ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angle = torch.arange(n_tokens, dtype=torch.float32)[:, None, None] * frequency
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


def forward(weights: Weights, shape: Shape, tokens: torch.Tensor) -> torch.Tensor:
    """Compute the logits of a batch, `[rows, n, vocabulary]`, from int64 tokens `[rows, n]`."""

    def heads(x: torch.Tensor, name: str, count: int) -> torch.Tensor:
        return F.linear(x, weights[name]).unflatten(-1, (count, shape.head_width))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (shape.width,), weights[name], shape.epsilon)

    group = shape.heads // shape.kv_heads
    x = F.embedding(tokens, weights["token_embd.weight"])
    for block in (f"blk.{index}" for index in range(shape.blocks)):
        y = norm(x, f"{block}.attn_norm.weight")
        q = _rotate(heads(y, f"{block}.attn_q.weight", shape.heads), shape.rope_base)
        k = _rotate(heads(y, f"{block}.attn_k.weight", shape.kv_heads), shape.rope_base)
        v = heads(y, f"{block}.attn_v.weight", shape.kv_heads)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.repeat_interleave(group, 2).transpose(1, 2),
            v.repeat_interleave(group, 2).transpose(1, 2),
            is_causal=True,
        )
        x = x + F.linear(y.transpose(1, 2).flatten(2), weights[f"{block}.attn_output.weight"])
        y = norm(x, f"{block}.ffn_norm.weight")
        gate = F.silu(F.linear(y, weights[f"{block}.ffn_gate.weight"]))
        y = gate * F.linear(y, weights[f"{block}.ffn_up.weight"])
        x = x + F.linear(y, weights[f"{block}.ffn_down.weight"])
    return F.linear(norm(x, "output_norm.weight"), weights["output.weight"])


def loss_of(weights: Weights, shape: Shape, batch: torch.Tensor) -> torch.Tensor:
    """Compute the mean loss of a batch of windows, in nats per token."""
    # bfloat16 products are faster where the processor has them; all else stays float32.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = forward(weights, shape, batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def _rate(schedule: Schedule, step: int) -> float:
    """Rise over the warm-up, then fall to zero as a half wave of the cosine does."""
    if step < schedule.warmup:
        return schedule.rate * (step + 1) / schedule.warmup
    done = (step - schedule.warmup) / (schedule.steps - schedule.warmup)
    return schedule.rate * 0.5 * (1 + math.cos(math.pi * done))


def train(
    weights: Weights,
    shape: Shape,
    schedule: Schedule,
    tokenizer: sentencepiece.SentencePieceProcessor,
) -> float:
    """Train the weights in place and return the mean loss of the last 100 steps."""
    for weight in weights.values():
        weight.requires_grad_()
    optimizer = torch.optim.AdamW(
        [
            {"params": [w for w in weights.values() if w.ndim > 1], "weight_decay": schedule.decay},
            {"params": [w for w in weights.values() if w.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )
    short, long = (
        windows(tokenizer, seed, length, schedule.tokens_per_step // length)
        for seed, length in ((TRAIN_SEED, schedule.window), (LONG_SEED, shape.context))
    )
    losses = []
    start = time.monotonic()
    for step in range(schedule.steps):
        batch = next(short if (step + 1) % schedule.long_every else long)
        for group in optimizer.param_groups:
            group["lr"] = _rate(schedule, step)
        loss = loss_of(weights, shape, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), schedule.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0:
            seconds = time.monotonic() - start
            sys.stderr.write(
                f"step {step} loss {np.mean(losses[-100:]):.4f} after {seconds:.0f} s\n"
            )
    return float(np.mean(losses[-100:]))


def held_out_loss(
    weights: Weights, shape: Shape, tokenizer: sentencepiece.SentencePieceProcessor
) -> float:
    """Compute the mean loss over 64 windows of stories that were not trained on."""
    batches = itertools.islice(windows(tokenizer, HELD_OUT_SEED, 256, 16), 4)
    with torch.no_grad():
        return float(np.mean([loss_of(weights, shape, batch).item() for batch in batches]))


def continue_greedily(
    weights: Weights, shape: Shape, tokenizer: sentencepiece.SentencePieceProcessor, prompt: str
) -> str:
    """Write the likeliest story that begins with the prompt."""
    tokens = [BOS, *tokenizer.encode(prompt)]
    while len(tokens) < shape.context:
        with torch.no_grad():
            logits = forward(weights, shape, torch.tensor([tokens]))
        token = int(logits[0, -1].argmax())
        if token == EOS:
            break
        tokens.append(token)
    return str(tokenizer.decode(tokens))


def quantize(weights: Weights) -> dict[str, npt.NDArray[Any]]:
    """Turn matrices into Q8_0 bytes, and leave norms as float32."""
    arrays = {name: weight.detach().numpy() for name, weight in weights.items()}
    return {
        name: gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
        if array.ndim > 1
        else array
        for name, array in arrays.items()
    }


def write_gguf(
    path: Path,
    shape: Shape,
    tokenizer: sentencepiece.SentencePieceProcessor,
    arrays: dict[str, npt.NDArray[Any]],
) -> None:
    """Write a GGUF file, version 3, with the model and its tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("unimem-tiny")
    # The path that the script had when the recorded file was made; its digest covers this text.
    writer.add_description("Writes small children's stories. Made by tools/train_tiny.py.")
    writer.add_license("Apache-2.0")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.blocks)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_vocab_size(shape.vocabulary)

    def kind(token: int) -> gguf.TokenType:
        if tokenizer.is_unknown(token):
            return gguf.TokenType.UNKNOWN
        if tokenizer.is_control(token):
            return gguf.TokenType.CONTROL
        return gguf.TokenType.BYTE if tokenizer.is_byte(token) else gguf.TokenType.NORMAL

    tokens = range(shape.vocabulary)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([tokenizer.id_to_piece(token) for token in tokens])
    writer.add_token_scores([tokenizer.get_score(token) for token in tokens])
    writer.add_token_types([kind(token) for token in tokens])
    writer.add_unk_token_id(UNK)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(True)
    for name, array in arrays.items():
        quantized = array.dtype == np.uint8
        writer.add_tensor(
            name, array, raw_dtype=gguf.GGMLQuantizationType.Q8_0 if quantized else None
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Train, write the file and the record of the run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="the GGUF file to write")
    parser.add_argument("--steps", type=int, default=Schedule.steps, help="training steps")
    parser.add_argument("--record", type=Path, default=RECORD, help="where to record the run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(TRAIN_SEED)

    start = time.monotonic()
    shape = Shape()
    schedule = Schedule(steps=options.steps)
    tokenizer = train_tokenizer(shape)
    weights = new_weights(shape)
    last_loss = train(weights, shape, schedule, tokenizer)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(options.out, shape, tokenizer, quantize(weights))
    content = options.out.read_bytes()
    record = {
        "file": options.out.name,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "parameters": sum(weight.numel() for weight in weights.values()),
        "training_loss": round(last_loss, 4),
        "held_out_loss": round(held_out_loss(weights, shape, tokenizer), 4),
        "seconds": round(time.monotonic() - start),
        "seed": TRAIN_SEED,
        "threads": 1,
        "shape": asdict(shape),
        "schedule": asdict(schedule),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "gguf": version("gguf"),
            "sentencepiece": sentencepiece.__version__,
        },
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "sample": continue_greedily(weights, shape, tokenizer, "Once upon a time"),
    }
    options.record.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
