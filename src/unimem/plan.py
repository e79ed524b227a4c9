"""What a model will need, before anything is mapped or loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass

from unimem import limits, loading
from unimem._core.kv import KVCache
from unimem.dims import ModelDims
from unimem.errors import CapacityError
from unimem.loading import Load
from unimem.model_file import open_model
from unimem.placement import Pages, format_bytes
from unimem.report import Row, table
from unimem.weights import Weights

__all__ = ["PREFILL_BATCH", "Plan", "nodes_bound", "plan", "scratch_parts"]

PREFILL_BATCH = 128
"""Tokens that the engine computes at once while it reads a prompt."""

DEFAULT_CTX = 4096
_PAGE = 4096
# What ggml needs for one tensor's header, and for a node of a graph: two pointers in lists, and up
# to four slots of a hash table with a pointer, a count and a bit each.
_HEADER_BYTES = 368
_NODE_BYTES = 2 * 8 + 4 * (8 + 4 + 1)
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory that a model needs, by category.

    Attributes
    ----------
    rows : tuple of Row
        Of each, `category` and `nbytes` are known.
    ctx : int
        Tokens of context.
    threads : int
        Threads that compute.
    max_ctx : int
        The longest context that fits, up to the model's own; 0 where none does.
    available_bytes : int
        What this process may take now, with what of the weights has been taken already.
    scratch_bytes, history_bytes : int
        Sizes of the two tapes. With a window the KV cache lies in memory of its own, and the
        history tape is one page, among ``other``.
    """

    rows: tuple[Row, ...]
    ctx: int
    threads: int
    max_ctx: int
    available_bytes: int
    scratch_bytes: int
    history_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(row.nbytes for row in self.rows)

    @property
    def fits(self) -> bool:
        """Whether all of it is available now."""
        return self.total_bytes <= self.available_bytes

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do about a plan that does not fit; empty when it fits."""
        if self.fits:
            return ()
        if self.max_ctx:
            return (f"take a context of at most {self.max_ctx} tokens",)
        return ("take a smaller model, or more memory: the weights alone do not fit",)

    def require_fits(self) -> None:
        """Raise when it does not fit.

        Raises
        ------
        CapacityError
            With the figures, and the limit that has the least room.
        """
        if not self.fits:
            least = limits.tightest()
            raise CapacityError(
                f"the model needs {format_bytes(self.total_bytes)} with a context of {self.ctx} "
                f"tokens, but {format_bytes(self.available_bytes)} are available (the least room "
                f"is in {least.name}, limit {format_bytes(least.limit_bytes)}): "
                f"{'; '.join(self.advice)}",
                self.available_bytes,
                0,
                self.total_bytes,
            )

    def __str__(self) -> str:
        lines = [(row.category, format_bytes(row.nbytes)) for row in self.rows]
        lines.append(("total", format_bytes(self.total_bytes)))
        lines.append(("available", format_bytes(self.available_bytes)))
        longest = f"the longest that fits: {self.max_ctx}" if self.max_ctx else "none fits"
        text = table(("category", "size"), lines)
        return "\n".join([text, f"context: {self.ctx} tokens ({longest})", *self.advice])


def plan(
    path_or_dims: str | os.PathLike[str] | Weights | ModelDims,
    *,
    ctx: int | None = None,
    batch: int = 1,
    kv_dtype: str = "f16",
    window: int | None = None,
    threads: int | None = None,
    load: Load = "auto",
    pages: Pages = "auto",
) -> Plan:
    """Say what a model will need. Of a file only the header is read.

    Parameters
    ----------
    path_or_dims : path-like, Weights or ModelDims
        A model file, an opened one, or dimensions; of these the weights are estimated, those of a
        dense model, at two bytes a value, or 34 bytes for 32 values where they are quantized.
    ctx : int, optional
        Tokens of context; by default the smallest of the model's, 4096 and what fits.
    batch : int, default 1
        Streams of the KV cache.
    kv_dtype : {"f16", "f32", "bf16", "q8_0"}
        Type of the KV cache.
    window : int, optional
        Tokens that attention sees, in a ring; by default all.
    threads : int, optional
        Threads that compute; by default the physical cores that this process may use.
    load : {"auto", "map", "copy", "direct"}
        How a file's data will come into memory, as for `open_weights`.
    pages : {"auto", "4k", "thp", "2m", "1g"}
        Pages of the memory: a ring, and a copy of the weights, are whole ones.

    Returns
    -------
    Plan

    Raises
    ------
    GGUFError, SafetensorsError, OSError
        The file cannot be used.
    ValueError
        An option is out of range, the model's dimensions are not known, or weights that are opened
        have come into memory otherwise.

    Notes
    -----
    Of a file, the weights and the KV cache are exact, and ``scratch`` bounds what the engine takes.
    The engine runs no mixture of experts: of one, ``scratch`` is that of a dense model with its
    `ModelDims`, which leaves out the experts' outputs and the router. A runtime for it counts those
    itself.

    Examples
    --------
    >>> import unimem as um
    >>> p = um.plan(um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512))
    >>> p.ctx, [row.category for row in p.rows]
    (512, ['weights:f16', 'kv', 'scratch', 'logits'])
    """
    loading.check_load(load)
    if isinstance(path_or_dims, ModelDims):
        cache = _Cache(path_or_dims, batch, kv_dtype, window, pages)
        return _plan(_estimate(path_or_dims), path_or_dims.max_seq_len, cache, ctx, threads)
    if isinstance(path_or_dims, Weights):
        weights = path_or_dims
        if load not in ("auto", weights.load):
            raise ValueError(f"load={load!r}: the weights are opened already ({weights.load!r})")
        cache, rows, longest = _needs(weights, weights.mapped_bytes, batch, kv_dtype, window, pages)
        return _plan(rows, longest, cache, ctx, threads, _taken(weights))
    with open_model(path_or_dims) as model:
        mode = loading.choose(model, load, None, {"pages": pages}).mode
        nbytes = loading.bytes_needed(model, mode, pages)
        with Weights(model.files, loading.mapped(model), None) as weights:
            cache, rows, longest = _needs(weights, nbytes, batch, kv_dtype, window, pages)
            taken = _taken(weights) if mode == "map" else 0
    return _plan(rows, longest, cache, ctx, threads, taken)


def _needs(
    weights: Weights,
    nbytes: int,
    batch: int,
    kv_dtype: str,
    window: int | None,
    pages: Pages,
) -> tuple[_Cache, dict[str, int], int]:
    """Return what a model's KV cache takes, its weights by type, and its longest context."""
    rows = {f"weights:{kind}": n for kind, n in weights.by_type().items()}
    rows["other"] = nbytes - weights.nbytes  # headers, and padding between tensors and to pages
    dims = ModelDims.from_weights(weights)
    arch = weights.metadata["general.architecture"]
    longest = dims.max_seq_len
    slides = weights.metadata.get(f"{arch}.attention.sliding_window")
    if isinstance(slides, int) and 0 < slides < (window or longest):
        longest = slides  # the engine shows attention all of a context, or the window
    return _Cache(dims, batch, kv_dtype, window, pages), rows, longest


def _taken(weights: Weights) -> int:
    """Count what weights have taken of the memory that would be available without them.

    What is cached of a file could be dropped, unless it is locked, or there is nothing behind it.
    """
    if weights.load != "map":
        return weights.mapped_bytes
    taken = 0
    for part in weights._parts:
        block, nbytes = part.memory.block, part.file.nbytes
        if part.file.in_memory:
            taken += min(block._resident_range(0, nbytes), nbytes)
        else:
            taken += min(block.verify().locked_bytes, nbytes)
    return taken


class _Cache:
    """What a KV cache takes, by its context."""

    def __init__(
        self, dims: ModelDims, batch: int, dtype: str, window: int | None, pages: Pages
    ) -> None:
        self.dims = dims
        self.batch = _count("batch", batch, 2**20)
        self.dtype = dtype
        self.window = None if window is None else _count("window", window, 2**31 - 1)
        self.pages = pages

    def _storage_bytes(self, n_rows: int) -> int:
        dims = self.dims
        return KVCache.storage_bytes(
            dims.num_layers,
            dims.num_kv_heads,
            dims.head_dim,
            n_rows,
            batch=self.batch,
            dtype=self.dtype,
        )

    def n_rows(self, ctx: int) -> int:
        """Rows of a lane: a ring has room for a batch beside the window."""
        if self.window is None:
            return ctx
        lanes = 2 * self.dims.num_layers * self.batch
        row_bytes = self._storage_bytes(_ALIGN) // (_ALIGN * lanes)  # so many need no padding
        return KVCache._ring_rows(row_bytes, self.window + min(PREFILL_BATCH, ctx), self.pages)

    def nbytes(self, ctx: int) -> int:
        """Bytes of the storage."""
        return self._storage_bytes(self.n_rows(ctx))


def _plan(
    weights: dict[str, int],
    longest: int,
    cache: _Cache,
    ctx: int | None,
    threads: int | None,
    taken: int = 0,
) -> Plan:
    """Plan with weights of these sizes, for which so many bytes are taken already."""
    threads = limits.thread_count() if threads is None else _count("threads", threads, 512)
    available = limits.available_bytes() + taken
    dims, window = cache.dims, cache.window

    def anonymous(n: int) -> tuple[int, int]:
        scratch = sum(scratch_parts(dims, n, threads, cache.n_rows(n)).values())
        return cache.nbytes(n), -(-scratch // _PAGE) * _PAGE

    if window is not None:
        weights["other"] = weights.get("other", 0) + _PAGE
    mapped = sum(weights.values())
    low, high = 0, longest
    while low < high:
        middle = (low + high + 1) // 2
        if mapped + sum(anonymous(middle)) <= available:
            low = middle
        else:
            high = middle - 1
    if ctx is None:
        # Where nothing fits, the plan is for one token, and says so.
        ctx = max(1, min(DEFAULT_CTX, low))
    ctx = _count("ctx", ctx, 2**31 - 1)
    if window is not None and window > ctx:
        raise ValueError(f"window: expected at most the context, {ctx}, got {window}")
    kv, scratch = anonymous(ctx)
    logits = 4 * dims.vocab_size
    rows = {**weights, "kv": kv, "scratch": scratch - logits, "logits": logits}
    return Plan(
        rows=tuple(Row(name, nbytes) for name, nbytes in rows.items()),
        ctx=ctx,
        threads=threads,
        max_ctx=low,
        available_bytes=available,
        scratch_bytes=scratch,
        history_bytes=kv if window is None else _PAGE,
    )


def _count(name: str, value: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{name}: expected an integer from 1 to {most}, got {value!r}")
    return value


def _estimate(dims: ModelDims) -> dict[str, int]:
    """Weights of a model with these dimensions, without norms and biases."""
    hidden = dims.hidden_size
    layer = hidden * (2 * dims.q_size + 2 * dims.kv_size + 3 * dims.intermediate_size)
    values = 2 * hidden * dims.vocab_size + dims.num_layers * layer
    if dims.quantized:
        return {"weights:q8_0": -(-values // 32) * 34}
    return {"weights:f16": 2 * values}


def nodes_bound(n_layers: int) -> int:
    """Bound the headers of tensors that the engine makes for a graph: inputs, nodes and views.

    A layer has 28, and up to three more for biases and four for norms of queries and keys.
    """
    return 36 * n_layers + 16


def scratch_parts(dims: ModelDims, ctx: int, threads: int, n_rows: int) -> dict[str, int]:
    """Bound what the engine takes from the scratch tape.

    Parameters
    ----------
    dims : ModelDims
        The model.
    ctx : int
        Tokens of context.
    threads : int
        Threads that compute.
    n_rows : int
        Rows of a lane of the KV cache.

    Returns
    -------
    dict
        ``headers`` (of weights and of the nodes of two graphs), ``inputs`` (tokens, positions,
        rows, attention masks and the ids of the conversation), ``values`` (of a batch, after
        sharing memory), ``work`` (ggml's own, for quantized inputs and attention tiles) and
        ``logits``, in bytes. Only ``logits`` is exact; the others are upper bounds.
    """
    n = min(PREFILL_BATCH, ctx)
    hidden, q, inner = dims.hidden_size, dims.q_size, dims.intermediate_size
    nodes = nodes_bound(dims.num_layers)
    headers = _HEADER_BYTES * (18 * dims.num_layers + 8)  # weights, and both parts of the cache
    graph = nodes * (_HEADER_BYTES + _NODE_BYTES) + 4096
    # The residual, the normed input, three wide values at once, and a gap that is too narrow.
    values = 4 * n * (3 * hidden + 3 * max(inner, q)) + 64 * _ALIGN
    # A batch of inputs in 16 bits; or, for each thread, four tiles of 64 rows of heads, or partial
    # results of attention over all heads.
    heads, size = dims.num_attention_heads, dims.head_dim
    batch_work = 2 * n * max(hidden, q, inner)
    tiles = 4 * threads * (256 * size + 2 * 64 * 64)
    partials = 4 * threads * (heads * (2 + size) + 3 * size)
    return {
        "headers": headers + 2 * graph,
        "inputs": n * (4 + 4 + 8 + 2 * n_rows) + 2 * n_rows + 4 * ctx + 9 * _ALIGN,
        "values": values,
        "work": max(batch_work, tiles, partials) + _ALIGN * (threads + 1),
        "logits": 4 * dims.vocab_size,
    }
