"""The caches of llama.cpp: cells of whole pads, conversations in slots, and built-in predictors.

The arithmetic is that of build b11549 with llama-server's defaults (`llama_context`,
`llama_kv_cache_iswa`, `llama_kv_cache_dsv4`, `llama_memory_recurrent`), and
``tools/llama_cpp_caches.py`` compares it with what llama.cpp prints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from unimem.kv.types import kv_pair, row_bytes_of
from unimem.models.families import KeptState
from unimem.planning.needs import Budget, Need

if TYPE_CHECKING:
    from unimem.models.shapes import Layers, Shape

__all__ = ["Engine", "LlamaSession", "Slots"]

Engine: TypeAlias = Literal["unimem", "llama.cpp"]
"""The engine that a plan is for."""

_UBATCH = 512
"""Tokens of a prompt that llama.cpp computes at once."""
MOST_SLOTS = 256
NO_SCRATCH = (
    "the scratch: llama.cpp's compute buffers follow from its graphs, and it may keep a repacked "
    "copy of some weights (--no-repack); it prints both"
)
_PAD = 256  # cells
_N_DRAFTED = 3  # tokens, by llama-server's default: a state is kept for each, to go back to


class Slots(NamedTuple):
    """Conversations of one llama-server.

    Attributes
    ----------
    n : int
        Their number.
    is_divided : bool
        Whether each has an equal part of the context; else they share the whole.
    """

    n: int = 1
    is_divided: bool = False

    @classmethod
    def parse(cls, text: object) -> Slots:
        """Read ``4`` or ``"4:divided"``; ValueError names them."""
        found = re.fullmatch(r"([0-9]{1,3})(:divided)?", str(text))
        if isinstance(text, bool) or found is None or not 1 <= int(found[1]) <= MOST_SLOTS:
            raise ValueError(
                f"slots: expected a number from 1 to {MOST_SLOTS}, or one with ':divided', as in "
                f"'4:divided', got {text!r:.40}"
            )
        return cls(int(found[1]), bool(found[2]))

    def __str__(self) -> str:
        return f"{self.n}:divided" if self.is_divided else str(self.n)


@dataclass(frozen=True, slots=True)
class LlamaSession:
    """The memory of a process of llama.cpp beside the weights, by its context. Immutable.

    Attributes
    ----------
    shape : Shape
        The model's.
    batch, kv_dtype
        As for `plan`, checked.
    slots : Slots
        The conversations that have the context.
    predicts : bool
        Whether the model's own layers, or others that read its states, predict further tokens.
    """

    shape: Shape
    batch: int
    kv_dtype: str
    slots: Slots
    predicts: bool = False

    @property
    def is_known(self) -> bool:
        """Whether the memory of a token is known."""
        return self.shape.cache is not None

    def history_bytes(self, ctx: int) -> int:
        """Return the bytes of its caches and states."""
        cells = -(-ctx // _PAD) * _PAD
        n, is_divided = self.slots
        # Streams of a batch have the whole context each.
        each = -(-(cells // n) // _PAD) * _PAD if is_divided else cells
        rows = sum(self._rows_bytes(layers, ctx, each) for layers in self.shape.cache or ())
        states = sum(one.nbytes for one in self.shape.layers if isinstance(one, KeptState))
        kept = 1 + _N_DRAFTED if self.predicts and self.shape.goes_back else 1
        return self.batch * (rows + n * kept * states)

    whole_bytes = history_bytes

    def _rows_bytes(self, layers: Layers, ctx: int, each: int) -> int:
        n, is_divided = self.slots
        shares = not (is_divided or layers.is_divided)
        rows = each
        if layers.window is not None:
            least = layers.window * (n if shares else 1) + min(_UBATCH, ctx)
            rows = -(-min(each, least) // _PAD) * _PAD
        elif layers.every > 1:
            rows = -(-max(1, -(-each // layers.every)) // _PAD) * _PAD
        row = sum(
            row_bytes_of(1, layers.n_heads * size, kind)
            for size, kind in zip(
                (layers.k_size, layers.v_size), kv_pair(self.kv_dtype), strict=True
            )
            if size
        )
        return int(layers.n_layers * (1 if shares else n) * rows * row)

    def scratch_bytes(self, _ctx: int) -> int:
        """Return 0: the compute buffers follow from its graphs, which no file has."""
        return 0

    def needs(self, ctx: int, _budget: Budget | None = None, name: str = "kv") -> list[Need]:
        """List the logits and the caches, which llama.cpp allocates as they are."""
        vocab, history = self.shape.vocab_size, self.history_bytes(ctx)
        found = [] if vocab is None else [("logits", 4 * vocab * self.slots.n * self.batch)]
        found += [(name, history)] if history else []
        return [Need({kind: nbytes}, ram_bytes=nbytes) for kind, nbytes in found]
