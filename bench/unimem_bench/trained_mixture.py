"""A small mixture of experts that is trained here in minutes, for a routing that is not invented.

It learns to continue the project's own documents and sources, in the tokens of the model in the
package. torch trains it; without torch it cannot be had.
"""

from __future__ import annotations

import math
import random
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unimem_bench.files import made_once
from unimem_bench.llama_build import ROOT
from unimem_bench.models import ModelShape
from unimem_bench.suite import NotMeasured

TRAINED = ModelShape(
    hidden=128, layers=12, heads=4, kv_heads=1, inner=32, vocab=1024, ctx=512, head_dim=64,
    experts=64, used=8,
)  # fmt: skip
ROPE_BASE = 10000.0
EPSILON = 1e-5
TEXTS = ("docs/*.md", "src/unimem/*/*.py", "native/src/*/*.c")
PIECE, MOST_CHARS = 3000, 12000  # characters of a file that are learnt
STEPS, QUICK_STEPS = 300, 20
WINDOW, ROWS = 256, 2  # tokens of a step
HELD_OUT = 1 << 14  # tokens
WARMUP, RATE, CLIP = 40, 3e-3, 1.0
BALANCE = 0.01  # the weight of the loss that makes a router use all its experts


def trained_mixture(folder: Path, *, quick: bool = False) -> dict[str, NDArray[Any]]:
    """Train it, unless its file is in the folder, and return its arrays.

    Matrices have their names in a GGUF file, without ``.weight``. ``tokens`` is a text that it did
    not learn, int64 of shape (n,), and ``experts`` the experts that its first tokens use, int64 of
    shape (tokens, layers, used). NotMeasured without torch, or without the repository's texts.
    """

    def write(path: Path) -> None:
        try:
            torch = import_module("torch")
        except ImportError:
            raise NotMeasured("wants torch to train a small mixture: pip install torch") from None
        found = _Trainer(torch, _tokens()).train(QUICK_STEPS if quick else STEPS)
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, **found)

    path = made_once(folder / f"trained-mixture{'-quick' * quick}.npz", write)
    with np.load(path) as kept:
        return dict(kept)


def _tokens() -> NDArray[np.int64]:
    """Return the texts as tokens, in pieces that are shuffled."""
    from unimem.engine import Decoder, embedded_model

    texts = [path.read_text("utf-8")[:MOST_CHARS] for glob in TEXTS for path in ROOT.glob(glob)]
    if not texts:
        raise NotMeasured(f"wants unimem's repository, whose texts it learns; {ROOT} is none")
    pieces = [text[i : i + PIECE] for text in sorted(texts) for i in range(0, len(text), PIECE)]
    random.Random(1).shuffle(pieces)
    with Decoder(embedded_model(), ctx=64, threads=1) as decoder:
        return np.array([token for each in pieces for token in decoder.tokenizer.encode(each)])


class _Trainer:
    """The small model, its weights and how it learns."""

    def __init__(self, torch: ModuleType, tokens: NDArray[np.int64]) -> None:
        self.torch, self.F = torch, torch.nn.functional
        self.tokens = torch.from_numpy(tokens)
        self.random = torch.Generator().manual_seed(1)
        self.weights = dict(self._new_weights())
        for weight in self.weights.values():
            weight.requires_grad_()

    def _new_weights(self) -> Any:
        shape, wide = TRAINED, TRAINED.hidden**-0.5

        def matrix(*dims: int, std: float) -> Any:
            return self.torch.randn(*dims, generator=self.random) * std

        q, kv = shape.heads * shape.head, shape.kv_heads * shape.head
        yield "token_embd", matrix(shape.vocab, shape.hidden, std=1.0)
        for i in range(shape.layers):
            for name in ("attn_norm", "ffn_norm"):
                yield f"blk.{i}.{name}", self.torch.ones(shape.hidden)
            for name in ("attn_q_norm", "attn_k_norm"):
                yield f"blk.{i}.{name}", self.torch.ones(shape.head)
            for name, n in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
                yield f"blk.{i}.{name}", matrix(n, shape.hidden, std=wide)
            yield f"blk.{i}.attn_output", matrix(shape.hidden, q, std=0.2 * q**-0.5)
            yield f"blk.{i}.ffn_gate_inp", matrix(shape.experts, shape.hidden, std=wide)
            for name in ("ffn_gate_exps", "ffn_up_exps"):
                rows = shape.experts * shape.inner
                yield f"blk.{i}.{name}", matrix(rows, shape.hidden, std=wide)
            down = 0.3 * shape.inner**-0.5
            rows = shape.experts * shape.inner
            yield f"blk.{i}.ffn_down_exps", matrix(shape.hidden, rows, std=down)
        yield "output_norm", self.torch.ones(shape.hidden)
        yield "output", matrix(shape.vocab, shape.hidden, std=0.02)

    def _norm(self, x: Any, name: str) -> Any:
        return self.F.rms_norm(x, (x.shape[-1],), self.weights[name], EPSILON)

    def _rotate(self, x: Any) -> Any:
        """Rotate the halves of each head by position."""
        half = TRAINED.head // 2
        frequency = ROPE_BASE ** (-self.torch.arange(half) / half)
        angle = self.torch.arange(x.shape[1])[:, None, None] * frequency
        first, second = x[..., :half], x[..., half:]
        cos, sin = angle.cos(), angle.sin()
        return self.torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def _attend(self, x: Any, layer: str) -> Any:
        shape, w = TRAINED, self.weights
        y = self._norm(x, f"{layer}.attn_norm")

        def heads(name: str, n: int) -> Any:
            return self.F.linear(y, w[f"{layer}.{name}"]).unflatten(-1, (n, shape.head))

        q = self._rotate(self._norm(heads("attn_q", shape.heads), f"{layer}.attn_q_norm"))
        k = self._rotate(self._norm(heads("attn_k", shape.kv_heads), f"{layer}.attn_k_norm"))
        v = heads("attn_v", shape.kv_heads)
        group = shape.heads // shape.kv_heads
        k, v = (each.repeat_interleave(group, 2) for each in (k, v))
        given = (each.transpose(1, 2) for each in (q, k, v))
        y = self.F.scaled_dot_product_attention(*given, is_causal=True)
        return x + self.F.linear(y.transpose(1, 2).flatten(2), w[f"{layer}.attn_output"])

    def _mix(self, x: Any, layer: str) -> tuple[Any, Any, Any]:
        """Return the state behind the experts, the experts used, and the loss of their balance."""
        shape, w = TRAINED, self.weights
        y = self._norm(x, f"{layer}.ffn_norm")
        shares = self.F.linear(y, w[f"{layer}.ffn_gate_inp"]).softmax(-1)
        top, experts = shares.topk(shape.used, -1)
        top = top / top.sum(-1, keepdim=True)
        mixed = self.torch.zeros_like(shares).scatter(-1, experts, top)
        use = (mixed > 0).float().mean((0, 1))
        balance = shape.experts / shape.used * (use * shares.mean((0, 1))).sum()
        # All experts are computed, which is simple; those that are not used count nothing.
        gate = self.F.silu(self.F.linear(y, w[f"{layer}.ffn_gate_exps"]))
        y = gate * self.F.linear(y, w[f"{layer}.ffn_up_exps"])
        y = y.unflatten(-1, (shape.experts, shape.inner)) * mixed[..., None]
        x = x + self.F.linear(y.flatten(-2), w[f"{layer}.ffn_down_exps"])
        return x, experts, balance

    def forward(self, tokens: Any) -> tuple[Any, Any, Any]:
        """Return logits, the experts of each token in each layer, and the loss of balance."""
        x = self.F.embedding(tokens, self.weights["token_embd"])
        experts, balance = [], 0.0
        for i in range(TRAINED.layers):
            x, used, each = self._mix(self._attend(x, f"blk.{i}"), f"blk.{i}")
            experts.append(used)
            balance = balance + each / TRAINED.layers
        logits = self.F.linear(self._norm(x, "output_norm"), self.weights["output"])
        return logits, self.torch.stack(experts, -2), balance

    def train(self, steps: int) -> dict[str, NDArray[Any]]:
        """Learn, and return weights, the text that was held out, and its experts."""
        torch, weights = self.torch, list(self.weights.values())
        optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
        most = len(self.tokens) - HELD_OUT - WINDOW - 1
        for step in range(steps):
            begins = torch.randint(0, most, (ROWS,), generator=self.random).tolist()
            batch = torch.stack([self.tokens[i : i + WINDOW + 1] for i in begins])
            for group in optimizer.param_groups:
                wave = 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.02
                group["lr"] = RATE * min(1.0, (step + 1) / WARMUP) * wave
            logits, _, balance = self.forward(batch[:, :-1])
            loss = self.F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            (loss + BALANCE * balance).backward()
            torch.nn.utils.clip_grad_norm_(weights, CLIP)
            optimizer.step()
            optimizer.zero_grad()
            if step % 50 == 0 or step == steps - 1:
                sys.stderr.write(f"a small mixture: step {step} of {steps}, loss {loss:.2f}\n")
        return self._result(float(loss.detach()))

    def _result(self, loss: float) -> dict[str, NDArray[Any]]:
        shape, text = TRAINED, self.tokens[-HELD_OUT:]
        with self.torch.no_grad():
            experts = [self.forward(part[None])[1][0] for part in text[:2048].split(shape.ctx)]
        found = {name: each.detach().numpy() for name, each in self.weights.items()}
        for i in range(shape.layers):
            for name in ("ffn_gate_exps", "ffn_up_exps"):
                rows = found[f"blk.{i}.{name}"]
                found[f"blk.{i}.{name}"] = rows.reshape(shape.experts, shape.inner, shape.hidden)
            down = found[f"blk.{i}.ffn_down_exps"]
            down = down.reshape(shape.hidden, shape.experts, shape.inner)
            found[f"blk.{i}.ffn_down_exps"] = np.ascontiguousarray(down.transpose(1, 0, 2))
        del found["output"], found["output_norm"]
        experts = self.torch.cat(experts).numpy()
        return found | {"tokens": text.numpy(), "experts": experts, "loss": np.array(loss)}
