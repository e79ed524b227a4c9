"""The graph of one forward pass, and where each of its values lies.

ggml writes the headers of tensors, nodes and graphs into given memory. No tensor owns memory: this
module writes every tensor's address. Values whose lifetimes do not overlap share bytes.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unimem.backends import ggml
from unimem.buffers.buffer_plan import BufferPlan, BufferUse
from unimem.engine.model import Model
from unimem.engine.rotation_op import node_address, rotation_block
from unimem.planning.needs import nodes_bound

_WORD = 8
_ROPE_MODES = {"normal": ggml.ROPE_NORMAL, "neox": ggml.ROPE_NEOX}
# Of the gate "oai" of a feed-forward network, as in llama.cpp (`build_moe_ffn`).
_OAI_STEEPNESS, _OAI_LIMIT = 1.702, 7.0
# The least divisor of the weights of a token's experts: float16's smallest normal number.
_LEAST_SUM = 2.0**-14


def view(address: int, shape: int | tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Make an array over memory that the caller keeps alive."""
    kind = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * kind.itemsize
    memory = memoryview((ctypes.c_char * nbytes).from_address(address))
    return np.frombuffer(memory, kind).reshape(shape)


@dataclass(frozen=True)
class Arrays:
    """Memory that the graphs of one decoder read and write, by address."""

    tokens: int  # int32 [batch]
    positions: int  # int32 [batch]
    rows: tuple[int, ...]  # int64 [batch] for each part of the cache
    last: int  # int32 [1]: the token of the batch that gets logits
    logits: int  # float32 [vocab]


class KVLane(NamedTuple):
    """K or V of a layer: an address, and the bytes from row to row and from head to head."""

    address: int
    row_stride: int
    head_stride: int


class Bringer(NamedTuple):
    """The addresses of a function for ``ggml_map_custom1``, and of its `userdata`."""

    function: int
    data: int


class Wave(NamedTuple):
    """What brings the experts of a wave, and the addresses of sizes that it sets, or 0, as uintp.

    A wave computes pairs of a token and an expert, and nothing if its nodes have no pairs.
    """

    bringer: Bringer
    sizes: NDArray[np.uintp]


class Waves(NamedTuple):
    """How the experts of a layer are computed: all at once, or in waves if they have no room.

    `whole` brings them all, and its nodes have no tokens in waves. `tokens` and `slots`, int32, and
    `rows`, int64, are the pairs of a wave; `rows` numbers them among the pairs of all waves.
    """

    whole: Wave
    each: list[Wave]
    tokens: int
    slots: int
    rows: int


class Headers:
    """ggml's headers of the weights and of the cache's parts, in `nbytes` at `address`.

    `tensors` has the type number, the shape in ggml's order and the address of each name. `layers`
    has the part of each layer, its keys and its values. `n_rows` has the rows of a
    lane for each part, and `kv_kinds` ggml's types of K and V.

    `layers` and `experts` have what brings the weights of a layer, or the experts that were chosen
    there, from the disk, by the layer's prefix such as ``"blk.0"``; `waves` has what brings those
    of a batch, and `ahead` what begins to read those that a token will probably choose, with the
    addresses of sizes as in `Wave`. They may be filled until graphs are made.
    """

    def __init__(
        self,
        model: Model,
        tensors: dict[str, tuple[int, tuple[int, ...], int]],
        layers: list[tuple[int, KVLane, KVLane]],
        n_rows: Sequence[int],
        kv_kinds: tuple[int, int],
        rotates: bool,
        address: int,
        nbytes: int,
    ) -> None:
        self.context = ggml.new_context(address, nbytes)
        self.n_rows = n_rows
        self.rotates = rotates
        self.layers: dict[str, Bringer] = {}
        self.experts: dict[str, Bringer] = {}
        self.ahead: dict[str, tuple[Bringer, NDArray[np.uintp]]] = {}
        self.waves: dict[str, Waves] = {}
        self.weights = {
            name: self._header(kind, ne, data) for name, (kind, ne, data) in tensors.items()
        }
        self._dims = model.dims
        k_kind, v_kind = kv_kinds
        self.cache = [
            (part, self._lane(k_kind, n_rows[part], k), self._lane(v_kind, n_rows[part], v))
            for part, k, v in layers
        ]

    def _header(self, kind: int, ne: tuple[int, ...], data: int) -> int:
        address = ggml.new_tensor(self.context, kind, *ne)
        ggml.Tensor.at(address).data = data
        return address

    def _lane(self, kind: int, n_rows: int, lane: KVLane) -> int:
        """Make the header of K or V, as [head_dim, rows, heads]."""
        ne = self._dims.head_dim, n_rows, self._dims.num_kv_heads
        address = self._header(kind, ne, lane.address)
        tensor = ggml.Tensor.at(address)
        whole = lane.head_stride * self._dims.num_kv_heads
        tensor.nb = tensor.nb[0], lane.row_stride, lane.head_stride, whole
        return address

    @staticmethod
    def bytes_needed(n_tensors: int, n_layers: int) -> int:
        """Bytes of memory that the headers take."""
        return ggml.tensor_overhead() * (n_tensors + 2 * n_layers)

    @property
    def n_waves(self) -> int:
        """The most waves of a layer; 0 if all its experts are computed at once."""
        return max((len(waves.each) for waves in self.waves.values()), default=0)

    def free(self) -> None:
        """Free what ggml holds beside the given memory."""
        ggml.free(self.context)


class Mask:
    """The mask that a graph adds to attention's scores over one part of the cache."""

    def __init__(self, address: int, header: int, lengths: list[int]) -> None:
        self.address = address  # of its values
        self._header = header
        # The strides that depend on `n_kv`, and all header fields that hold it.
        self.strides_address = header + ggml.NB_OFFSET + _WORD
        self.lengths = np.array(lengths, np.uint64)

    @property
    def n_kv(self) -> int:
        """The rows of the cache that attention reads."""
        return int(ggml.Tensor.at(self._header).ne[0])

    @property
    def values(self) -> NDArray[Any]:
        """float16 [n_tokens, n_kv]: 0, or minus infinity for rows that a token does not see."""
        shape = int(ggml.Tensor.at(self._header).ne[1]), self.n_kv
        return view(self.address, shape, "float16")


class Graph:
    """The forward pass of up to `batch` tokens, with logits for one of them.

    The nodes are the same for every number of tokens, so values are placed once, for a full batch,
    and a graph for fewer tokens uses the same addresses. `masks` are addresses of float16
    [batch, n_rows] for each part of the cache; `nbytes` at `address` are for headers of nodes.

    Attributes
    ----------
    n_tokens : int
        The current number of tokens.
    address, plan_address : int
        Addresses of ggml's graph, and of the plan of its computation.
    masks : list of Mask
        One for each part of the cache.
    values : BufferPlan
        Where each value lies in the arena. A value is named by the number of its node, and a step
        is the computation of one node.
    """

    def __init__(
        self,
        model: Model,
        headers: Headers,
        arrays: Arrays,
        batch: int,
        masks: Sequence[int],
        address: int,
        nbytes: int,
    ) -> None:
        self._model = model
        self._headers = headers
        self._arrays = arrays
        self._context = ggml.new_context(address, nbytes)
        self._words = view(address, nbytes // _WORD, "uint64")
        self._base = address
        self._nodes: NDArray[Any] = np.empty(0, np.int64)
        self._offsets: NDArray[Any] = np.empty(0, np.int64)
        self._arena = 0
        self._work = 0
        self._plan = ctypes.create_string_buffer(ggml.PLAN_BYTES)
        self.plan_address = ctypes.addressof(self._plan)
        self._mask_addresses = tuple(masks)
        self.batch = batch
        self.n_tokens = batch
        self._build(batch)
        self.values = BufferPlan(self._uses())
        # -1 marks a node without memory of its own.
        self._offsets = np.full(len(self._nodes), -1, np.int64)
        for name, offset in self.values.offsets.items():
            self._offsets[int(name)] = offset

    @staticmethod
    def bytes_needed(model: Model, n_waves: int = 0) -> int:
        """Bytes of memory that the headers of nodes and the graph take, with waves of experts."""
        n = _nodes_of(model, n_waves)
        return int(n * ggml.tensor_overhead() + ggml.graph_overhead(n))

    def set_memory(self, arena: int, work: int, n_threads: int, threadpool: int) -> None:
        """Give the graph memory for its `values`, and `work_bytes` for these threads."""
        self._arena, self._work = arena, work
        self._n_threads, self._threadpool = n_threads, threadpool
        self._bind()

    def work_bytes(self, n_threads: int, threadpool: int) -> int:
        """Return the working memory that ggml needs to compute the graph."""
        return ggml.plan(self.plan_address, self.address, n_threads, threadpool)

    def resize(self, n_tokens: int) -> None:
        """Rebuild the graph for `n_tokens` tokens, in the same memory."""
        if n_tokens != self.n_tokens:
            self.n_tokens = 0  # until it is complete
            self._build(n_tokens)
            self._bind()
            self.n_tokens = n_tokens

    def free(self) -> None:
        """Free what ggml holds beside the given memory."""
        ggml.free(self._context)

    def addresses(self) -> list[int]:
        """Return the address of every node's value."""
        data = ggml.DATA_OFFSET // _WORD
        return [int(a) for a in self._words[(self._nodes - self._base) // _WORD + data]]

    def _build(self, n: int) -> None:
        ggml.reset(self._context)
        # The nodes are those of a batch, for a single token as well.
        waves = self._headers.waves if self.batch > 1 else {}
        builder = _Builder(self._model, self._headers, self._arrays, self._context, n, waves)
        builder.build(self._mask_addresses)
        self._output = builder.output
        self.address = builder.graph
        n_nodes = ggml.n_nodes(builder.graph)
        self._nodes = np.array(view(ggml.nodes(builder.graph), n_nodes, "int64"))
        ne = ggml.NE_OFFSET
        self.masks = [
            Mask(address, header, [tensor + ne + _WORD * dim for tensor, dim in kv_dims])
            for address, header, kv_dims in zip(
                self._mask_addresses, builder.masks, builder.kv_dims, strict=True
            )
        ]

    def _uses(self) -> list[BufferUse]:
        """Return the size, first and last use of each value that needs memory."""
        nodes = [int(address) for address in self._nodes]
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for number, address in enumerate(nodes):
            node = ggml.Tensor.at(address)
            if not node.view_src and address != self._output:
                first[address] = number
            for source in (address, *node.src):
                if not source:
                    continue
                root = ggml.Tensor.at(source).view_src or source
                # ggml fuses an RMS norm with the multiplication after it, and reads the norm's
                # input while it writes the product: an input lives one node longer.
                last[root] = number + 1
        return [BufferUse(str(i), ggml.Tensor.at(a).nbytes, i, last[a]) for a, i in first.items()]

    def _bind(self) -> None:
        """Write the address of every node's value, and plan the computation."""
        words = self._words
        node = (self._nodes - self._base) // _WORD
        data = ggml.DATA_OFFSET // _WORD
        own = self._offsets >= 0
        words[node[own] + data] = self._arena + self._offsets[own]
        ggml.Tensor.at(self._output).data = self._arrays.logits
        for index in self._nodes[~own]:
            tensor = ggml.Tensor.at(int(index))
            if tensor.view_src:
                root = ggml.Tensor.at(tensor.view_src)
                tensor.data = root.data + tensor.view_offs
        ggml.plan(self.plan_address, self.address, self._n_threads, self._threadpool, self._work)


def _size(tensor: int, dim: int) -> int:
    """Return the address of one size of a tensor."""
    return tensor + ggml.NE_OFFSET + _WORD * dim


def _nodes_of(model: Model, n_waves: int) -> int:
    return nodes_bound(model.dims.num_layers, model.experts, n_waves)


class _Builder:
    """Makes the nodes of one graph."""

    def __init__(
        self,
        model: Model,
        headers: Headers,
        arrays: Arrays,
        context: int,
        n_tokens: int,
        waves: Mapping[str, Waves],
    ) -> None:
        self._model, self._kind = model, model.graph_kind
        self._weights = headers.weights
        self._headers = headers
        self._arrays = arrays
        self._context = context
        self._n = n_tokens
        self._waves = waves
        # For each part of the cache, every (tensor, dimension) that is the KV length.
        self.kv_dims: list[list[tuple[int, int]]] = []
        self.masks: list[int] = []
        self.output = 0
        n_waves = headers.n_waves if waves else 0
        self.graph = ggml.new_graph(context, _nodes_of(model, n_waves))

    def build(self, masks: Sequence[int]) -> None:
        n, arrays, context = self._n, self._arrays, self._context
        tokens = self._input(ggml.I32, arrays.tokens, n)
        self._positions = self._input(ggml.I32, arrays.positions, n)
        self._rows = [self._input(ggml.I64, rows, n) for rows in arrays.rows]
        last = self._input(ggml.I32, arrays.last, 1)
        for mask, n_rows in zip(masks, self._headers.n_rows, strict=True):
            self.masks.append(self._input(ggml.F16, mask, n_rows, n))
            self.kv_dims.append([(self.masks[-1], 0)])
        x = ggml.get_rows(context, self._weights["token_embd.weight"], tokens)
        if self._kind.scales_embedding:
            x = ggml.scale(context, x, math.sqrt(self._model.dims.hidden_size))
        n_layers = self._model.dims.num_layers
        for layer in range(n_layers):
            blk = f"blk.{layer}"
            x = self._bring(self._headers.layers.get(blk), x)
            attended = self._attention(layer, self._norm(x, f"{blk}.attn_norm"))
            if layer == n_layers - 1:
                # The rest of the last layer computes only the token that gets logits.
                attended = ggml.get_rows(context, attended, last)
                x = ggml.get_rows(context, x, last)
            x = self._add_output(x, attended, f"{blk}.post_attention_norm")
            normed = self._norm(x, f"{blk}.{self._kind.ffn_norm}")
            if self._kind.is_mixture:
                fed = self._mixture(layer, normed, x, 1 if layer == n_layers - 1 else n)
            else:
                fed = self._feed_forward(blk, normed)
            x = self._add_output(x, fed, f"{blk}.post_ffw_norm")
        x = self._norm(x, "output_norm")
        head = "output" if "output.weight" in self._weights else "token_embd"
        self.output = ggml.mul_mat(context, self._weights[f"{head}.weight"], x)
        ggml.set_output(self.output)
        ggml.expand(self.graph, self.output)

    def _input(self, kind: int, data: int, *ne: int) -> int:
        address = ggml.new_tensor(self._context, kind, *ne)
        ggml.set_input(address)
        ggml.Tensor.at(address).data = data
        return address

    def _norm(self, x: int, name: str) -> int:
        normed = ggml.rms_norm(self._context, x, self._model.eps)
        return ggml.mul(self._context, normed, self._weights[f"{name}.weight"])

    def _add_output(self, x: int, output: int, norm: str) -> int:
        """Add the output of a block, normed if the model does so, to its input."""
        if self._kind.norms_outputs:
            output = self._norm(output, norm)
        return ggml.add(self._context, output, x)

    def _linear(self, x: int, name: str) -> int:
        product = ggml.mul_mat(self._context, self._weights[f"{name}.weight"], x)
        bias = self._weights.get(f"{name}.bias")
        return int(ggml.add(self._context, product, bias) if bias else product)

    def _heads(self, layer: int, x: int, name: str, n_heads: int) -> int:
        """Project to heads, norm them if the model does so, and rotate them by position."""
        dims, rope = self._model.dims, self._model.rope_of(layer)
        heads = self._linear(x, f"blk.{layer}.{name}")
        heads = ggml.reshape_3d(self._context, heads, dims.head_dim, n_heads, self._n)
        if self._kind.norms_heads:
            heads = self._norm(heads, f"blk.{layer}.{name}_norm")
        return int(
            ggml.rope_ext(
                self._context, heads, self._positions, self._weights.get("rope_freqs.weight", 0),
                dims.head_dim, _ROPE_MODES[rope.mode], rope.original_ctx, rope.freq_base,
                rope.freq_scale,
                rope.ext_factor, rope.attn_factor, rope.beta_fast, rope.beta_slow,
            )
        )  # fmt: skip

    def _attention(self, layer: int, x: int) -> int:
        context, dims, n = self._context, self._model.dims, self._n
        part, k_cache, v_cache = self._headers.cache[layer]
        q = self._rotate(self._heads(layer, x, "attn_q", dims.num_attention_heads), "k")
        k = self._rotate(self._heads(layer, x, "attn_k", dims.num_kv_heads), "k")
        v = self._rotate(self._linear(x, f"blk.{layer}.attn_v"), "v")
        # Expanding the writes first puts them before attention: ggml knows no such dependency.
        v = ggml.reshape_3d(context, v, dims.head_dim, dims.num_kv_heads, n)
        for cache, rows in ((k_cache, k), (v_cache, v)):
            by_head = ggml.permute(context, rows, 0, 2, 1, 3)
            written = ggml.set_rows(context, cache, by_head, self._rows[part])
            ggml.expand(self.graph, written)
        attended = ggml.flash_attn_ext(
            context, ggml.permute(context, q, 0, 2, 1, 3), self._view_cache(part, k_cache),
            self._view_cache(part, v_cache), self.masks[part], self._model.attention_scale,
            0.0, 0.0, self._weights.get(f"blk.{layer}.attn_sinks.weight", 0),
        )  # fmt: skip
        attended = ggml.reshape_2d(context, self._rotate(attended, "v"), dims.q_size, n)
        return self._linear(attended, f"blk.{layer}.attn_output")

    def _rotate(self, heads: int, part: Literal["k", "v"]) -> int:
        """Rotate heads in place if the cache stores them rotated."""
        if not self._headers.rotates:
            return heads
        block = rotation_block(self._model.dims.head_dim, part)
        return int(
            ggml.map_custom1_inplace(self._context, heads, node_address, ggml.ALL_THREADS, block)
        )

    def _view_cache(self, part: int, cache: int) -> int:
        """View the cache as [head_dim, n_kv, heads]."""
        whole = ggml.Tensor.at(cache)
        head_dim, n_rows, n_heads, _ = whole.ne
        _, row, head, _ = whole.nb
        rows = ggml.view_3d(self._context, cache, head_dim, n_rows, n_heads, row, head, 0)
        self.kv_dims[part].append((rows, 1))
        return rows

    def _feed_forward(self, blk: str, x: int) -> int:
        up = self._linear(x, f"{blk}.ffn_up")
        gate = self._linear(x, f"{blk}.ffn_gate")
        return self._linear(self._gated(gate, up), f"{blk}.ffn_down")

    def _gated(self, gate: int, up: int) -> int:
        if self._kind.gate == "oai":
            return int(ggml.swiglu_oai(self._context, gate, up, _OAI_STEEPNESS, _OAI_LIMIT))
        act = ggml.geglu_split if self._kind.gate == "gelu" else ggml.swiglu_split
        return int(act(self._context, gate, up))

    def _mixture(self, layer: int, x: int, state: int, n: int) -> int:
        """Send each of n tokens through its likeliest experts, and add up their outputs.

        `x` is the normalized `state`, the hidden state before the network.

        The weights of a token's experts are their probabilities divided by the sum of these, or
        their probabilities among each other, which is the same but for rounding. Experts are added
        in the order of their probabilities, as in llama.cpp (`build_moe_ffn` in
        ``src/llama-graph.cpp``).
        """
        context, experts, blk = self._context, self._model.experts, f"blk.{layer}"
        assert experts is not None  # of a mixture
        hidden, n_used = self._model.dims.hidden_size, experts.n_used
        scores = self._linear(x, f"{blk}.ffn_gate_inp")
        if not self._kind.weighs_chosen:
            scores = ggml.soft_max(context, scores)
        chosen = ggml.argsort_top_k(context, scores, n_used)
        scores = ggml.reshape_3d(context, scores, 1, experts.n, n)
        shares = ggml.reshape_2d(context, ggml.get_rows(context, scores, chosen), n_used, n)
        if self._kind.weighs_chosen:
            shares = ggml.soft_max(context, shares)
        else:
            total = ggml.clamp(context, ggml.sum_rows(context, shares), _LEAST_SUM, math.inf)
            shares = ggml.div(context, shares, total)
        shares = ggml.reshape_3d(context, shares, 1, n_used, n)
        if blk in self._headers.experts:
            # They may replace the numbers of experts by slots; ggml knows no such dependency.
            ggml.expand(self.graph, shares)
        waves = self._waves.get(blk)
        bringer = self._headers.experts.get(blk) if waves is None else waves.whole.bringer
        brought = self._bring(bringer, chosen)
        if n == 1 and waves is None:
            self._begin_ahead(f"blk.{layer + 1}", brought, state)
        nodes = self._experts(blk, ggml.reshape_3d(context, x, hidden, 1, n), brought)
        outputs = nodes[-1]
        if waves is not None:
            waves.whole.sizes[: len(nodes)] = [_size(node, 2) for node in nodes]
            outputs = self._in_waves(blk, waves, x, chosen, outputs)
        outputs = ggml.mul(context, outputs, shares)
        strides = ggml.Tensor.at(outputs).nb
        one, *others = (
            ggml.view_2d(context, outputs, hidden, n, strides[2], i * strides[1])
            for i in range(n_used)
        )
        for other in others:
            one = ggml.add(context, one, other)
        return int(one if others else ggml.cont(context, one))

    def _begin_ahead(self, blk: str, brought: int, state: int) -> None:
        """Begin to read, after `brought`, the likeliest half of the experts of layer `blk`.

        Its router foresees them from the hidden state of the layer before ("Speculating Experts",
        arXiv 2603.19289). The other half is wrong more often, and delays what is demanded. The
        nodes have no values while nothing has to be read.
        """
        experts = self._model.experts
        if experts is None or blk not in self._headers.ahead:
            return
        bringer, sizes = self._headers.ahead[blk]
        ggml.expand(self.graph, brought)
        normed = self._norm(state, f"{blk}.{self._kind.ffn_norm}")
        scores = self._linear(normed, f"{blk}.ffn_gate_inp")
        foreseen = ggml.argsort_top_k(self._context, scores, -(-experts.n_used // 2))
        begun = self._bring(bringer, foreseen)
        ggml.expand(self.graph, begun)
        nodes = [normed, scores, ggml.Tensor.at(foreseen).view_src, foreseen, begun]
        if f"{blk}.ffn_gate_inp.bias" in self._weights:
            nodes.append(ggml.Tensor.at(scores).src[0])
        sizes[: len(nodes)] = [_size(node, 1) for node in nodes]

    def _experts(self, blk: str, x: int, chosen: int) -> list[int]:
        """Send tokens through chosen experts; the last of these nodes has their outputs."""
        context = self._context
        nodes: list[int] = []

        def linear(x: int, name: str) -> int:
            tensor = f"{blk}.ffn_{name}_exps"
            nodes.append(ggml.mul_mat_id(context, self._weights[f"{tensor}.weight"], x, chosen))
            if bias := self._weights.get(f"{tensor}.bias"):
                nodes.append(ggml.add_id(context, nodes[-1], bias, chosen))
            return nodes[-1]

        up, gate = linear(x, "up"), linear(x, "gate")
        nodes.append(self._gated(gate, up))
        linear(nodes[-1], "down")
        return nodes

    def _in_waves(self, blk: str, waves: Waves, x: int, chosen: int, outputs: int) -> int:
        """Compute the pairs of tokens and experts of each wave into the outputs of all at once."""
        context, (hidden, n_used, n, _) = self._context, ggml.Tensor.at(outputs).ne
        _, row, token, _ = ggml.Tensor.at(outputs).nb
        ggml.expand(self.graph, outputs)
        flat = ggml.view_2d(context, outputs, hidden, n_used * n, row, 0)
        for wave in waves.each:
            ggml.expand(self.graph, self._bring(wave.bringer, chosen))
            tokens = self._input(ggml.I32, waves.tokens, n_used * n)
            slots = self._input(ggml.I32, waves.slots, 1, n_used * n)
            rows = self._input(ggml.I64, waves.rows, n_used * n)
            found = ggml.get_rows(context, x, tokens)
            by_pair = ggml.reshape_3d(context, found, hidden, 1, n_used * n)
            nodes = self._experts(blk, by_pair, slots)
            computed = ggml.reshape_2d(context, nodes[-1], hidden, n_used * n)
            ggml.expand(self.graph, ggml.set_rows(context, flat, computed, rows))
            ones, pairs = (slots, found, computed), (by_pair, *nodes)
            sizes = [
                *(_size(node, 0) for node in (tokens, rows)),
                *(_size(node, 1) for node in ones),
                *(_size(node, 2) for node in pairs),
            ]
            wave.sizes[: len(sizes)] = sizes
        return int(ggml.view_3d(context, outputs, hidden, n_used, n, row, token, 0))

    def _bring(self, bringer: Bringer | None, values: int) -> int:
        """Bring weights from the disk between the making of these values and their use."""
        if bringer is None:
            return values
        function, data = bringer
        return int(ggml.map_custom1_inplace(self._context, values, function, 1, data))
