"""What a model will need, before anything is mapped or loaded."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from unimem import limits, loading
from unimem._core.kv import KVCache
from unimem.advice import Advice
from unimem.dims import ModelDims
from unimem.errors import CapacityError
from unimem.loading import Load
from unimem.model_file import open_model
from unimem.placement import Pages, format_bytes
from unimem.report import Row, table
from unimem.weights import Weights

__all__ = ["PREFILL_BATCH", "Advice", "Check", "Plan", "nodes_bound", "plan", "scratch_parts"]

SCHEMA = "unimem.plan/1"
Mode = Literal["map", "copy", "direct"]

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
class Check:
    """A limit, and what a plan needs of it. Any number of threads may use it.

    Attributes
    ----------
    name : str
        What limits, as `Limit.name`: "memory of the machine", "cgroup /a/b", "commit limit
        (overcommit_memory=2)", "locked memory (memlock)", "hugetlb pool of 2m pages"; "node 0",
        "cuda:0".
    needed_bytes, available_bytes, limit_bytes : int
        What is needed of it in all, what this process may have of it, with what of the plan has
        been taken already, and the limit itself.
    remedy : str
        A command or a setting that raises it.
    is_hard : bool
        Whether memory beyond it is refused, or ends the process. Beyond any other limit a block
        takes what it can have instead, and says so, unless it is asked to be `strict`.
    """

    name: str
    needed_bytes: int
    available_bytes: int
    limit_bytes: int
    remedy: str
    is_hard: bool = True

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.needed_bytes <= self.available_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory that a model needs, by category. Any number of threads may use it.

    Attributes
    ----------
    rows : tuple of Row
        Of each, `category`, `nbytes` (in whole pages) and `device` are known.
    checks : tuple of Check
        Of each limit that applies.
    advice : tuple of Advice
        What to do, in the order of what it costs; empty where all fits and nothing spills.
    unknown : tuple of str
        Sentences: what could not be planned, and why.
    facts : dict
        ``"model"`` (path), ``"name"``, ``"architecture"``, ``"format"`` ("GGUF", "safetensors",
        "dimensions"), ``"ggml"`` (what it has of its own), as far as they are known.
    ctx : int or None
        Tokens of context; None where it is not given, and what a token takes is not known.
    batch : int
        Streams of the KV cache.
    kv_dtype : str
        Type of the KV cache.
    window : int or None
        Tokens that attention sees; None for all.
    threads, sessions : int
        Threads that compute; decoders over the same weights.
    load : {"map", "copy", "direct"}
        How a file comes into memory.
    load_reason : str
        Why so.
    pages : str
        Pages that were asked for.
    numa : str or None
        The NUMA policy that was asked for.
    max_ctx : int or None
        The longest context, up to the model's own, with which nothing spills; of a file that
        spills anyway, the longest that fits. 0 where none does, None where it is not known.
    required_bytes : int
        Main memory that cannot be dropped: all but the pages of a mapped file, unless it is locked.
    spilled_bytes : int
        Bytes of a mapped file that cannot stay in main memory beside the rest.
    available_bytes : int
        Main memory that this process may take now, with what of the weights has been taken already:
        the least of the checks.
    scratch_bytes, history_bytes : int
        Sizes of the two tapes of one session. With a window the KV cache lies in memory of its own,
        and the history tape is one page.
    """

    rows: tuple[Row, ...]
    checks: tuple[Check, ...]
    advice: tuple[Advice, ...]
    unknown: tuple[str, ...]
    facts: dict[str, Any]
    ctx: int | None
    batch: int
    kv_dtype: str
    window: int | None
    threads: int
    sessions: int
    load: Mode
    load_reason: str
    pages: Pages
    numa: str | None
    max_ctx: int | None
    required_bytes: int
    spilled_bytes: int
    available_bytes: int
    scratch_bytes: int
    history_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows of main memory."""
        return sum(row.nbytes for row in self.rows if row.device is None)

    @property
    def fits(self) -> bool:
        """Whether every limit has room; pages of a mapped file can be dropped (`spilled_bytes`)."""
        return all(check.fits for check in self.checks)

    def require_fits(self, *, strict: bool = True) -> None:
        """Raise when it does not fit.

        Parameters
        ----------
        strict : bool, default True
            False: only for limits that are hard.

        Raises
        ------
        CapacityError
            With the limit that has the least room for what it is to hold, its figures, and advice.
        """
        lacking = [c for c in self.checks if not c.fits and (strict or c.is_hard)]
        if not lacking:
            return
        worst = max(lacking, key=lambda check: check.needed_bytes - check.available_bytes)
        context = "" if self.ctx is None else f" with a context of {self.ctx} tokens"
        hints = "; ".join([item.text for item in self.advice[:2]] or [worst.remedy])
        raise CapacityError(
            f"the model needs {format_bytes(worst.needed_bytes)}{context}, but "
            f"{format_bytes(worst.available_bytes)} are available: the least room is in "
            f"{worst.name} (limit {format_bytes(worst.limit_bytes)}): {hints}",
            worst.available_bytes,
            0,
            worst.needed_bytes,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, numbers and texts, as docs/schemas/plan-1.json has them."""
        return {
            "schema": SCHEMA,
            "fits": self.fits,
            "total_bytes": self.total_bytes,
            **{
                item.name: getattr(self, item.name)
                for item in fields(self)
                if item.name not in ("rows", "checks", "advice")
            },
            "unknown": list(self.unknown),
            "rows": [
                {"category": row.category, "nbytes": row.nbytes, "device": row.device}
                for row in self.rows
            ],
            "checks": [asdict(check) | {"fits": check.fits} for check in self.checks],
            "advice": [asdict(item) for item in self.advice],
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        lines = [(_label(row), format_bytes(row.nbytes)) for row in self.rows]
        lines.append(("total", format_bytes(self.total_bytes)))
        lines.append(("available", format_bytes(self.available_bytes)))
        if self.max_ctx is None:
            longest = "the longest that fits is not known"
        elif self.max_ctx:
            longest = f"the longest that fits: {self.max_ctx}"
        else:
            longest = "none fits"
        tokens = "not known" if self.ctx is None else f"{self.ctx} tokens"
        told = [f"context: {tokens} ({longest})"]
        told += [f"not known: {text}" for text in self.unknown]
        told += [item.text for item in self.advice]
        return "\n".join([table(("category", "size"), lines), *told])


def _label(row: Row) -> str:
    return row.category if row.device is None else f"{row.category} on {row.device}"


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
    total = mapped + kv + scratch
    checks = tuple(
        Check(one.name, total, one.room_bytes + taken, one.limit_bytes, one.remedy)
        for one in limits.memory_limits()
    )
    checks = tuple(replace(c, available_bytes=min(c.available_bytes, available)) for c in checks)
    hints: tuple[Advice, ...] = ()
    if total > available and low:
        hints = (Advice(f"take a context of at most {low} tokens", 0, {"ctx": low}, True),)
    elif total > available:
        text = "take a smaller model, or more memory: the weights alone do not fit"
        hints = (Advice(text, 0, {}, False),)
    return Plan(
        rows=tuple(Row(name, nbytes) for name, nbytes in rows.items()),
        checks=checks,
        advice=hints,
        unknown=(),
        facts={},
        ctx=ctx,
        batch=cache.batch,
        kv_dtype=cache.dtype,
        window=window,
        threads=threads,
        sessions=1,
        load="map",
        load_reason="",
        pages=cache.pages,
        numa=None,
        max_ctx=low,
        required_bytes=total,
        spilled_bytes=0,
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
