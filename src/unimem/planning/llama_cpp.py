"""The memory of llama.cpp: caches of whole pads, conversations in slots, and compute buffers.

The arithmetic of caches is that of build b11549 with llama-server's defaults (`llama_context`,
`llama_kv_cache_iswa`, `llama_kv_cache_dsv4`, `llama_memory_recurrent`). Compute buffers follow from
its graphs, which no file has: they are counted from above, by the widths of a model's matrices.
``tools/llama_cpp_caches.py`` compares both with what llama.cpp prints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from unimem.kv.types import kv_pair, row_bytes_of
from unimem.models.families import KeptState
from unimem.planning.needs import Budget, Need
from unimem.planning.widths import Widths

if TYPE_CHECKING:
    from unimem.models.shapes import Layers, Shape

Engine: TypeAlias = Literal["unimem", "llama.cpp"]
"""The engine that a plan is for."""

_UBATCH = 512
"""Tokens of a prompt that llama.cpp computes at once."""
MOST_SLOTS = 256
CACHE_RAM = 8 << 30
"""The default of llama-server's --cache-ram: what one keeps of earlier prompts, filled in days."""
NOT_EXACT = (
    "the scratch: the row has llama.cpp's compute buffers, as a bound from above. It may also keep "
    "a repacked copy of some weights instead of their pages of the file (--no-repack)"
)
NO_COMPUTE = (
    "the scratch: the file lacks what llama.cpp's compute buffers follow from ('embedding_length', "
    "'token_embd.weight')"
)
_PAD = 256  # cells
_N_DRAFTED = 3  # tokens, by llama-server's default: a state is kept for each, to go back to


_THREADS_BYTES = 4 << 20  # for what its threads note beside the buffers


class ArchGraph(NamedTuple):
    """What the graphs of an architecture hold more than others do.

    Attributes
    ----------
    logits : int
        Copies of the logits.
    scores, by_head, by_index : float
        Float32 values of a token for each cell that attention reads; for each cell and head of
        queries, without flash attention; for each cell and head of the index.
    by_slot : bool
        Whether each conversation has scores of its own.
    chunk : int
        Values of a token for each head of queries, of attention within a batch.
    states : float
        Copies of the states of one layer.
    encodes : bool
        Whether it reads the output of an encoder, of as many tokens as it was made for.
    """

    logits: int = 1
    scores: float = 0
    by_head: float = 0
    by_index: float = 0
    by_slot: bool = False
    chunk: int = 0
    states: float = 3
    encodes: bool = False


_GRAPHS = {
    "chameleon": ArchGraph(logits=2),
    "qwen3tts": ArchGraph(logits=2),
    "grok": ArchGraph(scores=1, by_head=1),
    "t5": ArchGraph(by_head=4, encodes=True),
    "t5encoder": ArchGraph(by_head=4),
    "deepseek32": ArchGraph(scores=2),
    "glm-dsa": ArchGraph(scores=2),
    "deepseek4": ArchGraph(scores=2.5, states=10),
    "glm5-next": ArchGraph(scores=1.25, by_slot=True),
    "qwen4exp": ArchGraph(scores=1.25, by_slot=True),
    "minimax-m3": ArchGraph(scores=2, by_index=2),
    "minimax-01": ArchGraph(chunk=3 * _UBATCH),
}


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
    widths : Widths or None
        The widths of its graph, if known.
    predicts : bool
        Whether the model's own layers, or others that read its states, predict further tokens.
    cache_ram : int
        The bytes that it keeps of earlier prompts.
    """

    shape: Shape
    batch: int
    kv_dtype: str
    slots: Slots
    widths: Widths | None = None
    predicts: bool = False
    cache_ram: int = 0

    @property
    def is_known(self) -> bool:
        """Whether the memory of a token is known."""
        return self.shape.cache is not None

    def history_bytes(self, ctx: int) -> int:
        """Return the bytes of its caches and states."""
        n = self.slots.n
        rows = sum(self._rows_bytes(layers, ctx) for layers in self.shape.cache or ())
        states = sum(one.nbytes for one in self.shape.layers if isinstance(one, KeptState))
        return self.batch * (rows + n * self._kept * states)

    whole_bytes = history_bytes

    @property
    def _kept(self) -> int:
        """How many states a conversation keeps of each layer."""
        return 1 + _N_DRAFTED if self.predicts and self.shape.goes_back else 1

    def _cells(self, layers: Layers, ctx: int) -> int:
        """Return the cells of one stream of a layer."""
        cells = -(-ctx // _PAD) * _PAD
        n, is_divided = self.slots
        # Streams of a batch have the whole context each.
        each = -(-(cells // n) // _PAD) * _PAD if is_divided else cells
        if layers.window is not None:
            shares = not (is_divided or layers.is_divided)
            least = layers.window * (n if shares else 1) + min(_UBATCH, ctx)
            return -(-min(each, least) // _PAD) * _PAD
        return -(-max(1, -(-each // layers.every)) // _PAD) * _PAD

    def _rows_bytes(self, layers: Layers, ctx: int) -> int:
        row = sum(
            row_bytes_of(1, layers.n_heads * size, kind)
            for size, kind in zip(
                (layers.k_size, layers.v_size), kv_pair(self.kv_dtype), strict=True
            )
            if size
        )
        return int(layers.n_layers * self._n_streams(layers) * self._cells(layers, ctx) * row)

    def _n_streams(self, layers: Layers) -> int:
        return self.slots.n if self.slots.is_divided or layers.is_divided else 1

    def _cast_bytes(self, ctx: int) -> int:
        """Return the bytes of the float16 copies that are made of one layer's float32."""
        if "f32" not in kv_pair(self.kv_dtype):
            return 0
        found = 0
        for layers in self.shape.cache or ():
            values = layers.n_heads * (layers.k_size + (layers.v_size or layers.k_size))
            found += 2 * self._n_streams(layers) * self._cells(layers, ctx) * values
        return found

    @property
    def is_computed(self) -> bool:
        """Whether the compute buffers are known."""
        return self.widths is not None and self.shape.vocab_size is not None

    def compute_bytes(self, ctx: int) -> int:
        """Return a bound of the compute buffers of a batch, from above; 0 if it is unknown.

        They hold a mask of each kind of cache, the states of a layer, and the values of the widest
        block or the logits, whose matrices also need them in another type.
        """
        widths, vocab = self.widths, self.shape.vocab_size
        if widths is None or vocab is None:
            return 0
        graph, n = _GRAPHS.get(str(self.shape.arch), ArchGraph()), self.slots.n * self.batch
        kinds = {(k.window, k.every, k.is_divided): k for k in self.shape.cache or ()}
        cells = sum(self._cells(layers, ctx) for layers in kinds.values())
        seen = cells + _UBATCH  # and its own
        scores = graph.scores * (n if graph.by_slot else 1)
        scores += graph.by_head * widths.heads + graph.by_index * widths.index_heads
        values = max(2 * widths.block, graph.logits * vocab) + 2 * widths.beside
        values += (8 + 2 * widths.streams) * widths.hidden + graph.chunk * widths.heads
        found = 4 * _UBATCH * (values + scores * seen) + 2 * _UBATCH * seen
        states = (one.nbytes for one in self.shape.layers if isinstance(one, KeptState))
        found += graph.states * n * self._kept * max(states, default=0)
        found += self.batch * self._cast_bytes(ctx)
        if graph.encodes:
            encoded = self.shape.max_ctx or ctx
            found += 4 * encoded * (3 * widths.keys + widths.hidden + 3 * _UBATCH)
        return int(found) + _THREADS_BYTES

    def scratch_bytes(self, _ctx: int) -> int:
        """Return 0: it has no tape of unimem."""
        return 0

    def needs(self, ctx: int, _budget: Budget | None = None, suffix: str = "") -> list[Need]:
        """List the logits, the caches and the compute buffers, as llama.cpp allocates them."""
        vocab, history = self.shape.vocab_size, self.history_bytes(ctx)
        found = [] if vocab is None else [("logits", 4 * vocab * self.slots.n * self.batch)]
        found += [(f"kv{suffix}", history)] if history else []
        found += [(f"compute{suffix}", self.compute_bytes(ctx))] if self.is_computed else []
        found += [("prompts", self.cache_ram)] if self.cache_ram and history else []
        return [Need({kind: nbytes}, ram_bytes=nbytes) for kind, nbytes in found]
