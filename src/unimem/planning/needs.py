"""The needs of a model with given options: every block that will be made, to the byte."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from unimem._core.tmpfs import huge_page_bytes
from unimem.accounting.published import NBYTES as PUBLISHED_BYTES
from unimem.kv.cache.cache import KVCache
from unimem.kv.cache.storage import ring_rows
from unimem.kv.types import kv_pair
from unimem.models.families import KeptState
from unimem.planning.hosts import pressures_on
from unimem.system import policy
from unimem.system.limits import HugePool, Limit, Node
from unimem.system.placement import Lock, Pages, PlacementOptions
from unimem.weights.node_copies import choose_copies

if TYPE_CHECKING:
    from unimem.models.dims import Experts, ModelDims
    from unimem.models.shapes import Layers, Shape
    from unimem.planning.hosts import Host
    from unimem.system.policy import Extent, NumaPolicy, Request
    from unimem.system.pressure import Pressure

Mode = Literal["map", "copy", "direct", "stream", "repack"]
"""The load mode: "repack" maps the file, and repacks the types that ggml has an order for."""

PREFILL_BATCH = 128
"""Tokens of a prompt that the engine computes at once."""

_STREAMED_BATCH = 512  # of these with streamed weights, which are read once for a batch
_MOST_WAVES = 16

# What each thread of ggml unpacks a part of a matrix into, for a batch (`TILED_WS_SLOT`).
_TILE_BYTES = 512 << 10

BYTES_A_THREAD = 32 << 20
"""Bytes of weights for which one more thread computes by default.

All threads meet behind each node of a graph. That costs microseconds if each has a core, and
milliseconds if another process uses one: more than a thread saves in a small model.
"""

# ggml's bytes for a tensor's header, and for a node of a graph: two pointers in lists, and up to
# four slots of a hash table with a pointer, a count and a bit each.
_HEADER_BYTES = 368
_NODE_BYTES = 2 * 8 + 4 * (8 + 4 + 1)
_ALIGN = 64  # of pieces of a tape, and of lanes of the KV cache
_LEAST_BYTES = 4096  # of a history tape that a ring leaves empty
_PAGE_BYTES = {"2m": 2 << 20, "1g": 1 << 30}


# ---- what there is ------------------------------------------------------------------------------


class MachineBudget:
    """The memory that a process may have on a host; each figure is read once. For one thread."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.memory = host.memory_limits()
        self.pressures = pressures_on(host)

    @cached_property
    def pools(self) -> Mapping[str, HugePool]:
        """The pools of hugetlb pages."""
        return self._host.huge_pools()

    @cached_property
    def nodes(self) -> Mapping[int, Node]:
        """The NUMA nodes."""
        return self._host.nodes()

    @cached_property
    def memlock(self) -> Limit | None:
        """The limit on locked memory."""
        return self._host.memlock()

    @property
    def thread_count(self) -> int:
        """The threads that can work at the same time."""
        return self._host.thread_count()

    def node_shares(self, numa: NumaPolicy | None, nbytes: int) -> dict[int, int]:
        """Return the bytes that a policy puts on each node, rounded up; {} if it does not say.

        The kernel fills bound nodes one after the other: each counts with an equal share.
        """
        if numa is None or numa.mode == "preferred" or not numa.nodes:
            return {}
        weights: Mapping[int, int] = dict.fromkeys(numa.nodes, 1)
        if numa.mode == "weighted":
            weights = self._host.node_weights(numa.nodes)
        total = sum(weights.values())
        return {node: -(-nbytes * weight // total) for node, weight in weights.items()}


class Budget:
    """A machine's budget less the promises of a plan: the `policy.Facts` of the next block.

    For one thread.
    """

    def __init__(self, machine: MachineBudget) -> None:
        self._machine = machine
        self._pages: dict[str, list[tuple[int, tuple[int, ...]]]] = {}  # with the bound nodes
        self._on_nodes: dict[int, int] = {}
        self._locked_bytes = 0

    def copy(self) -> Budget:
        """Copy it, promises included."""
        other = Budget(self._machine)
        other._pages = {size: list(taken) for size, taken in self._pages.items()}
        other._on_nodes = dict(self._on_nodes)
        other._locked_bytes = self._locked_bytes
        return other

    def huge_pools(self) -> Mapping[str, HugePool]:
        """Return the pools with their remaining pages."""
        if not self._pages:
            return self._machine.pools
        return {
            size: self._subtract(pool, self._pages.get(size, []))
            for size, pool in self._machine.pools.items()
        }

    def _subtract(self, pool: HugePool, taken: list[tuple[int, tuple[int, ...]]]) -> HugePool:
        n_pages = sum(n for n, _ in taken)
        nbytes = n_pages * pool.page_bytes
        groups = tuple(replace(one, used_bytes=one.used_bytes + nbytes) for one in pool.cgroups)
        on_nodes = dict(pool.nodes)
        for n, bound in taken:
            _use_pages(on_nodes, bound, n)
        reserved = pool.reserved + n_pages
        return replace(pool, reserved=reserved, cgroups=groups, nodes=on_nodes)

    def nodes(self) -> Mapping[int, Node]:
        """Return the nodes with their remaining memory."""
        return {
            n: replace(node, available_bytes=node.available_bytes - self._on_nodes.get(n, 0))
            for n, node in self._machine.nodes.items()
        }

    def memlock(self) -> Limit | None:
        """Return the limit on locked memory with its remaining room."""
        limit = self._machine.memlock
        if limit is None:
            return None
        return replace(limit, used_bytes=limit.used_bytes + self._locked_bytes)

    def memory_limits(self) -> tuple[Limit, ...]:
        """Return every limit on memory, without promises."""
        return self._machine.memory

    def memory_pressure(self) -> tuple[Pressure, ...]:
        """Return the pressure on memory."""
        return self._machine.pressures

    def available_bytes(self) -> int:
        """Return the least room in any limit on memory, without promises."""
        return min(limit.room_bytes for limit in self._machine.memory)

    def require(self, nbytes: int, what: str) -> None:
        """Refuse nothing: the plan's checks report what does not fit."""

    def thread_count(self) -> int:
        """Return how many threads can work at the same time."""
        return self._machine.thread_count

    def lock(self, nbytes: int) -> None:
        """Promise memory to be locked."""
        self._locked_bytes += nbytes

    def take(self, request: Request, *, strict: bool) -> Extent:
        """Return the extent that a block will map, and promise it."""
        found = policy.extent(request, self, strict=strict)
        choice = found.choice
        if found.is_hugetlb:
            n_pages = found.nbytes // _PAGE_BYTES[choice.pages]
            numa = choice.numa
            nodes = () if numa is None or numa.mode != "bind" else numa.nodes
            self._pages.setdefault(choice.pages, []).append((n_pages, nodes))
        else:
            self.lock(locked_bytes(found.nbytes, choice.lock, request))
            for node, share in self._machine.node_shares(choice.numa, found.nbytes).items():
                self._on_nodes[node] = self._on_nodes.get(node, 0) + share
        return found


def _use_pages(on_nodes: dict[int, tuple[int, int]], bound: Iterable[int], n: int) -> None:
    """Deduct n pages from those of bound nodes, which the kernel fills one after the other."""
    for node in bound:
        total, free = on_nodes.get(node, (0, 0))
        on_nodes[node] = total, max(0, free - n)
        n = max(0, n - free)


def locked_bytes(nbytes: int, lock: Lock, request: Request) -> int:
    """Return a block's bytes of the memlock limit: memory that is mapped twice counts twice."""
    return nbytes * (2 if request.mirror else 1) if lock else 0


# ---- what will be made --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Need:
    """One block of a plan, or the files that it maps. Immutable.

    Attributes
    ----------
    rows : dict of str to int
        Its bytes by category.
    ram_bytes : int
        The part that has to be in RAM, outside of reserved huge pages.
    file_bytes : int
        The droppable part, which belongs to a file.
    unread_bytes : int
        The part of `file_bytes` that no token reads, and that needs no room: it was repacked.
    kept_bytes : int
        The part of `file_bytes` that needs room in RAM all the same: an image that cannot stay
        there is refused.
    asked_bytes : dict of str to int
        Requested bytes of pools of hugetlb pages, by page size.
    lock_bytes : int
        Bytes to lock.
    numa : NumaPolicy or None
        The requested policy.
    taken_bytes : int
        The part of `ram_bytes` that is there already.
    is_private : bool
        Whether these bytes are private memory of this process, and go when it ends.
    pool_bytes : dict of str to int
        Bytes that lie in pools of hugetlb pages, by page size.
    on_nodes : dict of int to int
        For a copy of mirrored weights: its node and its bytes in RAM, even if the node has no room
        and the rows lack it.
    """

    rows: dict[str, int]
    ram_bytes: int = 0
    file_bytes: int = 0
    unread_bytes: int = 0
    kept_bytes: int = 0
    asked_bytes: dict[str, int] = field(default_factory=dict)
    lock_bytes: int = 0
    numa: NumaPolicy | None = None
    taken_bytes: int = 0
    is_private: bool = False
    pool_bytes: dict[str, int] = field(default_factory=dict)
    on_nodes: dict[int, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of all rows."""
        return sum(self.rows.values())

    @property
    def room_bytes(self) -> int:
        """The bytes that need room in RAM."""
        return self.ram_bytes + self.kept_bytes

    @property
    def loose_bytes(self) -> int:
        """The bytes that are read from the disk again if RAM has no room for them."""
        return self.file_bytes - self.unread_bytes - self.kept_bytes


@dataclass(frozen=True, slots=True)
class Storage:
    """The placement of blocks: checked `PlacementOptions`. Immutable."""

    pages: Pages = "auto"
    numa: NumaPolicy | None = None
    lock: Lock = False
    strict: bool = False

    @classmethod
    def from_options(cls, placement: Mapping[str, Any]) -> Storage:
        """Read options that `policy.check_options` has checked."""
        return cls(
            placement.get("pages", "auto"),
            policy.parse_numa(placement.get("numa"), mirror=True),
            placement.get("lock", False),
            placement.get("strict", False),
        )

    @property
    def is_mirrored(self) -> bool:
        """Whether weights have a copy on each node."""
        return self.numa is not None and self.numa.mode == "mirror"

    def beside_weights(self) -> Storage:
        """Return the placement of written memory, which has no copies."""
        return replace(self, numa=None) if self.is_mirrored else self

    def weights(
        self, nbytes: int, category: str, budget: Budget, types: Mapping[str, int]
    ) -> list[Need]:
        """Plan the weights, as `block`: one of `nbytes`, or a copy for each node."""
        if self.numa is None or not self.is_mirrored:
            return [self.block(nbytes, category, budget, types)]
        asked = PlacementOptions(pages=self.pages, numa=str(self.numa))
        found = choose_copies(nbytes, asked, budget)
        needs = []
        for node in found.asked:
            bound = replace(self, numa=policy.NumaPolicy("bind", (node,)))
            if node in found.nodes:
                need = bound.block(nbytes, category, budget, types)
                needs.append(replace(need, numa=None, on_nodes={node: need.ram_bytes}))
            else:
                need = bound.block(nbytes, category, budget.copy(), types)
                needs.append(Need({}, on_nodes={node: need.ram_bytes}))
        if not found.nodes:
            needs.append(self.beside_weights().block(nbytes, category, budget, types))
        return needs

    def locks_file(self, nbytes: int, budget: Budget) -> bool:
        """Tell whether a mapped file is locked; then it takes its share."""
        locks = bool(self.lock)
        if locks and not self.strict:
            locks = policy.lock_refusal(self.lock, nbytes, budget) is None
        if locks:
            budget.lock(nbytes)
        return locks

    def block(
        self,
        nbytes: int,
        category: str,
        budget: Budget,
        parts: Mapping[str, int] | None = None,
        mirrored: bool = False,
    ) -> Need:
        """Plan a block of `nbytes`, which takes its share of the budget.

        Parameters
        ----------
        nbytes, category : int, str
            Its size, and the category of all bytes outside of `parts`.
        budget : Budget
            The remaining memory.
        parts : mapping of str to int, optional
            Its bytes of other categories.
        mirrored : bool, default False
            Whether it is mapped twice.
        """
        parts = parts or {}
        request = policy.Request(
            nbytes=nbytes,
            pages=self.pages,
            numa=self.numa,
            lock=self.lock,
            shared=mirrored,
            mirror=(nbytes, 0, 1) if mirrored else (),
            page_bytes=mmap.PAGESIZE,
            thp_bytes=huge_page_bytes(),
        )
        found = budget.take(request, strict=self.strict)
        rest = found.nbytes - sum(parts.values())
        asked: dict[str, int] = {}
        if self.pages in policy.HUGETLB:
            page = _PAGE_BYTES[self.pages]
            asked[self.pages] = -(-nbytes // page) * page
        return Need(
            rows={**({category: rest} if rest else {}), **parts},
            ram_bytes=0 if found.is_hugetlb else found.nbytes,
            asked_bytes=asked,
            pool_bytes={found.choice.pages: found.nbytes} if found.is_hugetlb else {},
            lock_bytes=0 if asked else locked_bytes(found.nbytes, self.lock, request),
            numa=self.numa,
        )


@dataclass(frozen=True, slots=True)
class Session:
    """The memory of a conversation beside the weights, as a function of its context. Immutable.

    Attributes
    ----------
    shape : Shape
        The model's.
    batch, kv_dtype, window, threads
        As for `plan`, checked.
    storage : Storage
        The placement of its blocks.
    most_slots : int or None
        The most slots of streamed experts, or 0; None if no weights are streamed.
    """

    shape: Shape
    batch: int
    kv_dtype: str
    window: int | None
    threads: int
    storage: Storage
    most_slots: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether the memory of a token is known."""
        return self.shape.cache is not None

    def history_bytes(self, ctx: int) -> int:
        """Return the size of the history tape in bytes."""
        if any(layers.window for layers in self._parts(ctx)):
            # Only the engine has a tape beside its rings.
            return 0 if self.shape.dims is None else _LEAST_BYTES
        return self.whole_bytes(ctx)

    def whole_bytes(self, ctx: int) -> int:
        """Return the bytes of a cache that keeps every token in every layer, states included."""
        by_head = self.shape.dims is not None  # as the engine's cache
        rows = sum(self._part_bytes(layers, ctx, by_head) for layers in self.shape.cache or ())
        return rows + self._state_bytes()

    def scratch_bytes(self, ctx: int) -> int:
        """Return the size of the scratch tape in bytes; 0 if unknown."""
        if self.shape.dims is None:
            return 0
        n_rows = [self._n_rows(layers, ctx) for layers in self._parts(ctx)]
        parts = scratch_parts(
            self.shape.dims, ctx, self.threads, n_rows, self.shape.experts, self.shape.is_tiled,
            self.most_slots,
        )  # fmt: skip
        return -(-sum(parts.values()) // _LEAST_BYTES) * _LEAST_BYTES

    def needs(self, ctx: int, budget: Budget) -> list[Need]:
        """List its blocks with a context, in the order of their making."""
        found = []
        vocab, batch = self.shape.vocab_size, self._prompt_batch(ctx)
        outputs = {} if vocab is None else {"logits": 4 * vocab}
        scratch = self.scratch_bytes(ctx)
        kinds = self._parts(ctx)
        if scratch:
            parts = outputs | {"tokens": token_bytes(ctx, batch, len(kinds))}
            found.append(self.storage.block(scratch, "scratch", budget, parts))
        elif outputs:
            found.append(Need(outputs, ram_bytes=sum(outputs.values())))
        return found + self._cache_needs(ctx, budget)

    def _cache_needs(self, ctx: int, budget: Budget) -> list[Need]:
        """List the blocks of the cache: the tape, or rings and the blocks beside them."""
        kinds = self._parts(ctx)
        rings = [layers for layers in kinds if layers.window is not None]
        beside = [layers for layers in kinds if layers.window is None] if rings else []
        history = self.history_bytes(ctx)
        found = [self.storage.block(history, "kv", budget)] if history else []
        for layers in rings + beside:
            nbytes = self._part_bytes(layers, self._n_rows(layers, ctx))
            is_ring = layers.window is not None
            found.append(self.storage.block(nbytes, "kv", budget, mirrored=is_ring))
        if rings and self._state_bytes():
            found.append(self.storage.block(self._state_bytes(), "kv", budget))
        return found

    def _prompt_batch(self, ctx: int) -> int:
        return prompt_batch(ctx, is_streamed=self.most_slots is not None)

    def _parts(self, ctx: int) -> list[Layers]:
        """List the layers by what they keep: all tokens, or a window of them in a ring.

        `Model.windows` of the engine follows the same rule.
        """
        cache = self.shape.cache or ()
        slides = any(layers.window is not None for layers in cache)
        found: dict[Layers, int] = {}
        for layers in cache:
            window = least_window(layers.window, self.window)
            if slides and window is not None and window >= ctx:
                window = None
            kind = layers._replace(n_layers=0, window=window)
            found[kind] = found.get(kind, 0) + layers.n_layers
        return [kind._replace(n_layers=n) for kind, n in found.items()]

    def _n_rows(self, layers: Layers, ctx: int) -> int:
        """Return the rows of a lane: a ring holds its window and a batch, in whole pages."""
        if layers.window is None:
            return ctx
        least = layers.window + self._prompt_batch(ctx)
        row, v_row = self._row_bytes(layers)
        return int(ring_rows(row, v_row, least, self.storage.pages))

    def _row_bytes(self, layers: Layers) -> tuple[int, int]:
        """Return the bytes of a row of K, and of V, which may be 0."""
        sizes = zip((layers.k_size, layers.v_size), kv_pair(self.kv_dtype), strict=True)
        # A lane of _ALIGN rows needs no padding.
        k, v = (
            int(KVCache.storage_bytes(1, layers.n_heads, size, _ALIGN, dtype=dtype)) // (2 * _ALIGN)
            if size
            else 0
            for size, dtype in sizes
        )
        return k, v

    def _part_bytes(self, layers: Layers, n_rows: int, by_head: bool = False) -> int:
        heads = layers.n_heads if by_head else 1
        lanes = self.batch * layers.n_layers * heads
        return sum(
            lanes * (-(-n_rows * row // heads // _ALIGN) * _ALIGN)
            for row in self._row_bytes(layers)
        )

    def _state_bytes(self) -> int:
        """Return the bytes of the states of all streams, each in whole lanes."""
        states = (one for one in self.shape.layers if isinstance(one, KeptState))
        return self.batch * sum(-(-one.nbytes // _ALIGN) * _ALIGN for one in states)


def least_window(*windows: int | None) -> int | None:
    """Return the least window; None without any."""
    return min((window for window in windows if window is not None), default=None)


def prompt_batch(ctx: int, *, is_streamed: bool) -> int:
    """Return how many tokens of a prompt the engine computes at once."""
    return min(_STREAMED_BATCH if is_streamed else PREFILL_BATCH, ctx)


def n_waves(experts: Experts) -> int:
    """Return in how many waves the engine may compute streamed experts.

    A wave has slots for half of a token's experts or more, while those of the next one are read.
    """
    return min(_MOST_WAVES, -(-2 * experts.n // experts.n_used))


def diagnostics_need() -> Need:
    """Return the need of publishing the ledger: once in a process, with its first decoder."""
    return Need({"diagnostics": PUBLISHED_BYTES}, ram_bytes=PUBLISHED_BYTES)


def token_bytes(ctx: int, batch: int | None = None, n_parts: int = 1) -> int:
    """Return the bytes of the engine's input vectors.

    These are ids, positions (4 bytes each) and rows (8 bytes) of a batch, the indices of the logits
    (4 bytes), and the ids of the conversation.

    Parameters
    ----------
    ctx : int
        Tokens of context.
    batch : int, optional
        Tokens that are computed at once; by default those of a prompt.
    n_parts : int, default 1
        Parts of the KV cache, each with rows of its own.
    """
    n = min(PREFILL_BATCH, ctx) if batch is None else batch
    return n * (4 + 4 + 8 * n_parts) + 4 + 4 * ctx


def nodes_bound(n_layers: int, experts: Experts | None = None, waves: int = 0) -> int:
    """Bound the headers of tensors in a graph of the engine: inputs, nodes and views.

    A layer has 28, and four more for rotated heads, up to three for biases, and four each for norms
    of queries and keys, and behind attention and the network. The network of a mixture, whose
    tokens use some `experts`, has two for each of these and 15 more, and up to seven that foresee
    the next layer's; and in waves two, and 12 for each wave, or 15 if experts have biases. Those
    with biases have no norms of queries and keys.
    """
    if experts is None:
        return 40 * n_layers + 16
    each = 15 if experts.has_biases else 12
    mixture = 22 + 2 * experts.n_used + (2 + each * waves if waves else 0)
    return (40 + mixture) * n_layers + 16


def default_threads(weight_bytes: int, most: int) -> int:
    """Choose the number of threads: one per whole `BYTES_A_THREAD` of weights, from 1 to `most`.

    Examples
    --------
    >>> [default_threads(mib << 20, 16) for mib in (1, 63, 64, 4096)]
    [1, 1, 2, 16]
    """
    return max(1, min(most, weight_bytes // BYTES_A_THREAD))


def scratch_parts(
    dims: ModelDims,
    ctx: int,
    threads: int,
    n_rows: Sequence[int],
    experts: Experts | None = None,
    tiled: bool = False,
    most_slots: int | None = None,
) -> dict[str, int]:
    """Bound what the engine takes from the scratch tape.

    Parameters
    ----------
    dims, experts
        The model, and the experts of a mixture.
    ctx, threads : int
        Tokens of context, and threads.
    n_rows : sequence of int
        The rows of a lane in each part of the KV cache.
    tiled : bool
        Whether ggml may unpack matrices tile by tile: see `Shape`.
    most_slots : int or None
        The most slots of streamed experts, or 0; None if no weights are streamed.

    Returns
    -------
    dict
        ``headers`` (of weights and of the nodes of two graphs), ``inputs`` (tokens, positions,
        rows, attention masks and the ids of the conversation), ``values`` (of a batch, after
        sharing memory), ``work`` (ggml's own, for quantized inputs and attention tiles) and
        ``logits``, in bytes. Only ``logits`` is exact; the others are upper bounds.
    """
    n = prompt_batch(ctx, is_streamed=most_slots is not None)
    hidden, q, inner = dims.hidden_size, dims.q_size, dims.intermediate_size
    n_experts, n_used = (experts.n, experts.n_used) if experts else (0, 0)
    nodes = nodes_bound(dims.num_layers, experts)
    waves = n_waves(experts) if experts and most_slots else 0
    nodes += nodes_bound(dims.num_layers, experts, waves)
    # Of weights, and both parts of the cache.
    has_biases = experts is not None and experts.has_biases
    headers = _HEADER_BYTES * ((21 if has_biases else 18) * dims.num_layers + 8)
    graphs = nodes * (_HEADER_BYTES + _NODE_BYTES) + 2 * 4096
    # The residual, the normed input, three wide values at once, and a gap that is too narrow.
    wide = 3 * max(inner, q)
    if experts is not None:
        # The outputs of all experts of a token, twice; their inputs; and the router's scores.
        outputs = n_used * hidden
        wide = max(3 * q, 3 * inner + outputs, inner + 2 * outputs)
        if waves:  # a wave has inputs for each of its outputs, which are put among all outputs
            wide = max(wide, 3 * inner + 2 * outputs)
        if experts.has_biases:  # a product outlives its sum with a bias by a node
            wide = max(wide, max(4 * inner, 3 * outputs) + (outputs if waves else 0))
        wide += 3 * n_experts + 2 * n_used
    values = 4 * n * (3 * hidden + wide) + 64 * _ALIGN
    # A batch of inputs in 16 bits, and a tile of a matrix for each thread; or, for each thread,
    # four tiles of 64 rows of heads, or partial results of attention over all heads.
    heads, size = dims.num_attention_heads, dims.head_dim
    batch_work = 2 * n * max(hidden, q, inner) + (threads * _TILE_BYTES if tiled else 0)
    if experts is not None:
        # The rows of each expert or slot, and a line of the CPU's caches for each.
        n_experts = max(n_experts, most_slots or 0)
        if waves:
            batch_work += 2 * n * n_used * hidden
        batch_work += 8 * (n_experts * (n * n_used + 1) + 4) + _ALIGN * (n_experts + 1)
    tiles = 4 * threads * (256 * size + 2 * 64 * 64)
    partials = 4 * threads * (heads * (2 + size) + 3 * size)
    token_inputs = sum(8 * n + 2 * (n + 1) * rows + 3 * _ALIGN for rows in n_rows)
    return {
        "headers": headers + graphs,
        "inputs": n * (4 + 4) + token_inputs + 4 * ctx + 6 * _ALIGN,
        "values": values,
        "work": max(batch_work, tiles, partials) + _ALIGN * (threads + 1),
        "logits": 4 * dims.vocab_size,
    }
