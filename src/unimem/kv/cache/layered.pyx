# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True
"""KV caches whose layers differ: a cache for each kind of them, states, and one position for all.

Layers of one kind (`unimem.kv.layer_specs.RowsKind`) share a part: a fixed or growing cache if they
keep all tokens, a ring if they have a window. All parts end at one position, and hold tokens from
one position on, except that a ring holds no more than its rows. A layer that keeps a state has no
part: its state belongs to the same position.

      layers      full   sliding   sliding   state   full (shares)
                    |       |_________|        |       |
      parts     [ fixed ] [    ring     ]      |   rows of layer 0
      states                              [ LayerStates ]
"""
import bisect
import weakref

import numpy as np

from unimem.base.arguments import flag, one_of, string
from unimem.base.text import format_bytes, format_count
from unimem.errors import CacheFull, ClosedError
from unimem.kv.cache.spec import KVSpec
from unimem.kv.cache.storage import ring_rows
from unimem.kv.layer_specs import check_layers, kinds_of, places_of, states_of
from unimem.system.placement import sum_placements

cimport cython
cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.tuple cimport PyTuple_GET_ITEM
from libc.stdint cimport uint32_t, uint64_t

from unimem._core cimport native as um
from unimem._core.arrays cimport bytes_of, size_of
from unimem._core.status cimport full_text
from unimem.kv.inputs cimport Given, check_token, contiguous, layer_number
from unimem.kv.types cimport kv_pair
from unimem.kv.cache.one_kind cimport OneKindCache
from unimem.kv.cache.rows cimport refuse_torn, refuse_views
from unimem.kv.states cimport LayerStates

#: from unimem.kv.cache.spec import LayersSpec
#: from unimem.kv.layer_specs import Layer

cnp.import_array()

# Rows whose bytes are whole lanes of fixed caches, which are rounded up to 64 bytes.
cdef size_t ROUND_ROWS = 64
# The most checkpoints that a message names.
cdef Py_ssize_t MOST_NAMED = 8

# ---- bytes ----


def _plain_bytes(kind, n_layers, n_rows, batch, order):
    """Return the bytes of a fixed cache of layers that keep all tokens."""
    return OneKindCache.storage_bytes(n_layers, kind.n_kv_heads, kind.head_dim, n_rows, batch=batch,
                                      dtype=kind.dtype, order=order, v_head_dim=kind.v_head_dim)


def _ring_bytes(kind, n_layers, spare_rows, batch, order, pages):
    """Return the bytes of a ring of sliding layers."""
    heads = 1 if order == "head" else kind.n_kv_heads  # in a row of a lane
    dims = 1, heads, kind.head_dim, ROUND_ROWS
    row, both = [OneKindCache.storage_bytes(*dims, dtype=kind.dtype, v_head_dim=size) // ROUND_ROWS
                 for size in (0, kind.v_head_dim)]
    n_rows = ring_rows(row, both - row, kind.window + spare_rows, pages)
    return n_layers * batch * (kind.n_kv_heads // heads) * n_rows * both


def _budgets(kinds, max_seq_len, batch, order, grow, budget_bytes, left):
    """Return the budget of each kind that keeps all tokens: all get room for equally many."""
    if budget_bytes is None:
        return dict.fromkeys(kinds)
    if grow:
        token = {kind: _plain_bytes(kind, n, ROUND_ROWS, batch, order) for kind, n in kinds.items()}
        return {kind: max(left * token[kind] // sum(token.values()), 1) for kind in kinds}

    def needed(n_rows):
        return sum([_plain_bytes(kind, n, n_rows, batch, order) for kind, n in kinds.items()])

    n_rows = bisect.bisect_right(range(1, max_seq_len + 1), left, key=needed)
    if n_rows == 0 and kinds:
        least = needed(1)
        raise CacheFull(f"KVCache: windows and states take {budget_bytes - left} bytes of "
                        f"budget_bytes={budget_bytes}, and the rest is less than a token of the "
                        f"other layers needs, {least} bytes", budget_bytes, budget_bytes - left,
                        least)
    return {kind: _plain_bytes(kind, n, n_rows, batch, order) for kind, n in kinds.items()}


def _left_of(left, states, batch, checkpoints):
    """Return the rest of a budget after states and their checkpoints."""
    needed = LayerStates.storage_bytes(states, size_of(batch, "batch", 1), checkpoints)
    if needed > left:
        raise CacheFull(f"KVCache: budget_bytes={left}, and {len(states)} states with "
                        f"checkpoints={checkpoints} need {needed} bytes", left, 0, needed)
    return max(left - needed, 1)


cdef tuple _tokens_of(object given, str what, Py_ssize_t n):
    """Return the arrays of n layers: a given sequence, or the items of one array."""
    cdef cnp.ndarray whole
    if isinstance(given, (list, tuple)):
        found = tuple(given)
    else:
        whole = contiguous(given, what)
        found = tuple([whole[i] for i in range(len(whole))]) if whole.ndim else ()
    if len(found) != n:
        raise ValueError(f"{what}: expected an array of each of the {n} layers that have rows of "
                         f"their own, got {len(found)}")
    return found


cdef class LayeredKVCache:
    """A cache whose layers differ.

    Its public methods are those of `KVCache`, which documents them.
    """
    #: _parts: tuple[OneKindCache, ...]
    #: _states: LayerStates | None
    #: order: Any
    #: dtype: tuple[str, ...]
    #: v_dtype: tuple[str, ...]
    #: window: tuple[int | None, ...]
    #: layers: tuple[Layer, ...]
    #: n_kv_heads: tuple[int, ...]
    #: head_dim: tuple[int, ...]
    #: v_head_dim: tuple[int, ...]
    #: n_rows: tuple[int, ...]
    #: row_bytes: tuple[int, ...]
    #: v_row_bytes: tuple[int, ...]
    #: budget_bytes: int | None
    #: block: None
    #: tape: None

    def __cinit__(self):
        self._parts = self.layers = self._part_of = ()
        self._closed = True

    def __init__(self, wanted: LayersSpec) -> None:
        cdef size_t most = size_of(wanted.max_seq_len, "max_seq_len", 1)
        cdef size_t spare = size_of(wanted.spare_rows, "spare_rows")
        cdef size_t n_checkpoints = size_of(wanted.checkpoints, "checkpoints")
        cdef bint is_growing = flag(wanted.grow, "grow")
        cdef LayerStates kept = None
        if most >= 2**32:
            raise ValueError(f"max_seq_len: expected at most 2**32 - 1, got {most}")
        batch, order, budget_bytes = wanted.batch, wanted.order, wanted.budget_bytes
        layers = check_layers(wanted.layers, most, wanted.dtype)
        one_of(order, "order", ("token", "head"))
        kinds, states = kinds_of(layers), states_of(layers)
        rings = {kind: n for kind, n in kinds.items() if kind.window is not None}
        plain = {kind: n for kind, n in kinds.items() if kind.window is None}
        if spare and not rings:
            raise ValueError("spare_rows: expected together with a window")
        if wanted.checkpoint_every is not None and not n_checkpoints:
            raise ValueError("checkpoint_every: expected together with checkpoints")
        if n_checkpoints and not states:
            raise ValueError("checkpoints: expected together with a LayerState: layers that keep "
                             "tokens go back without them")
        if budget_bytes is not None:
            budget_bytes = bytes_of(budget_bytes, "budget_bytes", 1)
        left = budget_bytes
        made = {}

        def make(kind, **options):
            made[kind] = OneKindCache(KVSpec(
                kinds[kind], kind.n_kv_heads, kind.head_dim, most, batch, kind.dtype,
                v_head_dim=kind.v_head_dim, order=order, rotate=wanted.rotate, name=wanted.name,
                placement=wanted.placement, **options))

        try:
            # States and rings take all of their memory at once; the rest is for the other parts.
            if states:
                if left is not None:
                    left = _left_of(left, states, batch, n_checkpoints)
                kept = LayerStates(states, batch, n_checkpoints, wanted.checkpoint_every,
                                   string(wanted.name, "name", "kv"), dict(wanted.placement))
            for kind in rings:
                make(kind, window=kind.window, spare_rows=spare, budget_bytes=left)
                if left is not None:
                    left = max(left - made[kind].capacity_bytes, 1)
            budgets = _budgets(plain, most, batch, order, is_growing, budget_bytes, left)
            for kind in plain:
                make(kind, grow=is_growing, budget_bytes=budgets[kind])
            self.assemble(layers, [made[kind] for kind in kinds], most, budget_bytes, kept)
        except BaseException:
            for part in made.values():
                part.__exit__()
            if kept is not None:
                kept.end()
            raise

    @staticmethod
    def of_parts(layers: tuple[Layer, ...], list parts: list[OneKindCache], max_seq_len: int,
                 LayerStates states: LayerStates | None = None) -> LayeredKVCache:
        """Return a cache of the parts and states of a snapshot."""
        cdef LayeredKVCache cache = LayeredKVCache.__new__(LayeredKVCache)
        cache.assemble(layers, parts, max_seq_len, None, states)
        return cache

    #: @staticmethod
    #: def storage_bytes(layers: Any, max_seq_len: int, **options: Any) -> int: ...
    @staticmethod
    def storage_bytes(layers, max_seq_len, *, batch=1, dtype="f16", order="token", spare_rows=0,
                      checkpoints=0, pages="auto"):
        layers = check_layers(layers, max_seq_len, dtype)
        kinds = kinds_of(layers)
        states = LayerStates.storage_bytes(states_of(layers), size_of(batch, "batch", 1),
                                           size_of(checkpoints, "checkpoints"))
        rows = [_plain_bytes(kind, n, max_seq_len, batch, order) if kind.window is None else
                _ring_bytes(kind, n, spare_rows, batch, order, pages)
                for kind, n in kinds.items()]
        return states + sum(rows)

    cdef int assemble(self, layers, list parts, max_seq_len, budget_bytes,
                      LayerStates states) except -1:
        """Take over parts that end at one position, in the order of their kinds, and states."""
        cdef OneKindCache part
        places = places_of(layers)
        of_kind = dict(zip(kinds_of(layers), parts, strict=True))
        self.layers = layers
        self.n_layers = len(layers)
        self.max_seq_len = max_seq_len
        self._part_of = tuple([of_kind.get(place.kind) for place in places])
        self._index_of = tuple([place.number for place in places])
        self._owns = bytes([place.is_own for place in places])
        # Layers whose append may fail come first: rings lose the tokens that they overwrite.
        written = [i for i in range(self.n_layers) if self._owns[i]]
        self._written = sorted(written, key=lambda i: layers[i].window is not None)
        self._n_plain = sum([part.window is None for part in parts])
        self.dtype, self.v_dtype = zip(*[kv_pair(layer.dtype) for layer in layers], strict=True)
        self.window = tuple([getattr(layer, "window", None) for layer in layers])
        self._widest = max([window or 0 for window in self.window])
        self._parts, self._states = tuple(parts), states
        first = self._pieces[0]
        self.name, self.batch = first.name, first.batch
        self.n_kv_heads, self.head_dim, self.v_head_dim = [
            tuple([getattr(layer, name, 0) for layer in layers])
            for name in ("n_kv_heads", "head_dim", "v_head_dim")]
        self.n_rows, self.row_bytes, self.v_row_bytes = [
            tuple([0 if part is None else getattr(part, name) for part in self._part_of])
            for name in ("n_rows", "row_bytes", "v_row_bytes")]
        self.order = parts[0].order if parts else "token"
        self.grow = bool(parts) and parts[0].grow
        self.rotate = bool(parts) and parts[0].rotate
        self.budget_bytes = budget_bytes
        for part in parts:
            part._whole = weakref.ref(self)
        for part in parts[self._n_plain:]:
            part._beside = self._parts[:self._n_plain]
        self._closed = False
        return self.set_first(self.first_of_parts(), 0)

    cdef uint64_t first_of_parts(self) noexcept:
        """Return the position before which tokens were dropped in some part."""
        cdef OneKindCache part
        cdef uint64_t first = 0
        for part in self._parts:
            first = max(first, part.kv.first)
        return first

    # ---- the parts ----

    @property
    def _pieces(self):
        """All objects that have memory: the parts, and the states."""
        return self._parts if self._states is None else (*self._parts, self._states)

    cdef OneKindCache part_of(self, uint32_t index):
        """Return the part that has the rows of a layer."""
        cdef object part = <object>PyTuple_GET_ITEM(self._part_of, index)
        if part is None:
            raise ValueError(f"KVCache: layer {index} keeps a state and no tokens: expected "
                             f"state({index})")
        return part

    cdef int begin(self) except -1:
        """Call `begin_change` of all parts and the states."""
        cdef OneKindCache part
        if not self.layers:
            self.refuse_closed()
        for part in self._parts:
            part.begin_change()
        if self._states is not None:
            self._states.begin_change()
        return 0

    #: def check_open(self) -> None: ...
    cpdef int check_open(self) except -1:
        """Raise ClosedError if a part is closed."""
        cdef OneKindCache part
        if not self.layers:
            self.refuse_closed()
        for part in self._parts:
            part.open_region()
        if self._states is not None:
            self._states.open_region()
        return 0

    cdef int check_whole(self, str doing) except -1:
        return refuse_torn(doing, self.is_reserved(), self.is_uneven())

    cdef bint is_reserved(self) except -1:
        cdef OneKindCache part
        for part in self._parts:
            if part._reserved:
                return True
        return self._reserved > 0

    cdef bint is_uneven(self) except -1:
        """Return whether some layers hold tokens that other layers lack."""
        cdef OneKindCache part
        cdef uint64_t end = self.end_of_all()
        for part in self._parts:
            if part.end_position() != end:
                return True
        return False

    cdef bint is_torn(self) except -1:
        """Return whether rows are reserved or layers uneven: states may have gone further."""
        return self.is_reserved() or self.is_uneven()

    cdef uint64_t end_of_all(self) noexcept:
        """Return the position behind the last token that all layers hold."""
        cdef OneKindCache part
        cdef uint64_t end = <uint64_t>-1
        if not self._parts:
            return self._end
        for part in self._parts:
            end = min(end, um.um_kv_next_position(&part.kv))
        return end

    cdef uint64_t first_of_all(self) noexcept:
        """Return the position of the first token that counts."""
        cdef OneKindCache part
        cdef uint64_t end = self.end_of_all(), first = self._first
        if self._parts and self._n_plain == 0 and end > self._widest:
            first = max(first, end - self._widest)
        for part in self._parts[self._n_plain:]:
            first = max(first, um.um_kv_lost_before(&part.kv, end))
        return min(first, end)

    cdef int set_first(self, uint64_t first, uint64_t held) except -1:
        """Note where the tokens begin; rings lack those before `held`."""
        cdef OneKindCache part
        self._first = first
        for part in self._parts[self._n_plain:]:
            um.um_kv_set_first(&part.kv, first, max(held, um.um_kv_oldest_position(&part.kv)))
        return self.limit_ends()

    cdef int limit_ends(self) except -1:
        """Stop rings where the other parts have no room: they would lose tokens in vain."""
        cdef OneKindCache part
        for part in self._parts[self._n_plain:]:
            part.limit_end()
        return 0

    cdef int keep(self, uint64_t n, uint64_t keep_first) except -1:
        """Keep the last n tokens, and the first in parts that have them; all is checked."""
        cdef OneKindCache part
        cdef uint64_t end = self.end_of_all()
        cdef list rings = [(part, part.seq_len) for part in self._parts[self._n_plain:]]
        for part in self._parts[:self._n_plain]:
            part.trim_to(n, keep_first=keep_first)
        for part, _ in rings:
            part._most_bytes = part.most_bytes()
        self.set_first(end - n - keep_first, end - n if keep_first else 0)
        for part, held in rings:
            part._dropped += (held - part.seq_len) * part.kv.row_bytes
            part.settle()
        return 0

    cdef int roll_back_to(self, uint64_t end) except -1:
        cdef OneKindCache part
        cdef uint64_t lost = self.lost_before(end)
        for part in self._parts:
            part._most_bytes = part.most_bytes()
            um.um_kv_rollback_to(&part.kv, end)
            part._reserved = 0
        return self.end_at(end, lost)

    cdef uint64_t lost_before(self, uint64_t end) noexcept:
        """Return the position before which a ring lacks tokens of its window, or 0."""
        cdef OneKindCache part
        cdef uint64_t lost = 0
        for part in self._parts[self._n_plain:]:
            lost = max(lost, um.um_kv_lost_before(&part.kv, end))
        return lost

    cdef int end_at(self, uint64_t end, uint64_t lost) except -1:
        """Let tokens that a ring lacks in its window count no longer in any layer."""
        cdef OneKindCache part
        cdef um.um_error err
        if lost > self._first:
            for part in self._parts[:self._n_plain]:
                if um.um_kv_trim(&part.kv, end - lost, 0, &err) != um.UM_OK:
                    part.fail(&err, "rollback")
        for part in self._parts:
            part.note_end()
            part.settle()
        return self.set_first(max(self._first, lost), 0)

    # ---- appending ----

    cdef object refuse_append(self, uint32_t index):
        if self._part_of[index] is None:
            raise ValueError(f"KVCache.append: layer {index} keeps a state and no tokens: write "
                             f"into state({index})")
        raise ValueError(f"KVCache.append: layer {index} shows the rows of layer "
                         f"{self.layers[index].share_of}: append to that one")

    cdef int append_tokens(self, layer, k, v) except -1:
        cdef uint32_t index = layer_number(layer, self.n_layers, "layer")
        if not PyBytes_AS_STRING(self._owns)[index]:
            self.refuse_append(index)
        return (<OneKindCache>PyTuple_GET_ITEM(self._part_of, index)).append_tokens(
            <object>PyTuple_GET_ITEM(self._index_of, index), k, v)

    cdef OneKindCache part_to_append(self, uint32_t layer):
        layer_number(layer, self.n_layers, "layer")
        if not PyBytes_AS_STRING(self._owns)[layer]:
            self.refuse_append(layer)
        return <OneKindCache>PyTuple_GET_ITEM(self._part_of, layer)

    cdef int append_rows(self, uint32_t layer, const void *k, const void *v, um.um_dtype type,
                         uint64_t n) except -1:
        return self.part_to_append(layer).append_rows(self._index_of[layer], k, v, type, n)

    cdef void *lane(self, uint32_t layer, bint v, uint32_t stream) noexcept:
        if layer >= self.n_layers or self._part_of[layer] is None:  # it keeps a state
            return NULL
        return (<OneKindCache>self._part_of[layer]).lane(self._index_of[layer], v, stream)

    cdef void *rows(self, uint32_t layer, bint v, uint64_t *out_n, uint32_t stream) noexcept:
        out_n[0] = 0
        if layer >= self.n_layers or self._part_of[layer] is None:  # it keeps a state
            return NULL
        return (<OneKindCache>self._part_of[layer]).rows(self._index_of[layer], v, out_n, stream)

    @cython.critical_section
    def append_all(self, k: Any, v: Any) -> None:
        cdef OneKindCache part
        cdef Given given
        cdef um.um_error err
        cdef uint64_t row = 0, end
        cdef dict tokens = {}
        cdef tuple ks = _tokens_of(k, "k", len(self._written))
        cdef tuple vs = _tokens_of(v, "v", len(self._written))
        for i, a, b in zip(sorted(self._written), ks, vs, strict=True):
            ka, va = contiguous(a, "k")[None], contiguous(b, "v")[None]
            part = self._part_of[i]
            check_token(&given, ka, va, part.given_blocks(), 1, part._heads, part.kv.spec.head_dim,
                        part._v_head_dim, f"KVCache.append_all: layer {i}")
            tokens[i] = ka, va
        if self.batch != 1:
            raise ValueError("KVCache.append_all: batch is not 1")
        if not self._parts:
            raise ValueError("KVCache.append_all: no layer keeps tokens: reserve and commit tell "
                             "that states have advanced")
        self.begin()
        self.check_whole("append_all")
        for part in self._parts:
            while um.um_kv_append_begin(&part.kv, 0, 1, &row, &err) != um.UM_OK:
                if not part.find_rows(&err, 1):
                    part.fail(&err, "append_all")
        self.limit_ends()
        end = self.end_of_all()
        try:
            for i in self._written:
                part = self._part_of[i]
                ka, va = tokens[i]
                part.append_tokens(self._index_of[i], ka, va)
        except BaseException:
            self.roll_back_to(end)
            raise
        self.checkpoint_if_due(end)

    @cython.critical_section
    def reserve(self, n: int) -> tuple[int | None, ...]:
        cdef OneKindCache part
        cdef uint64_t count = size_of(n, "n")
        cdef list rows = []
        self.begin()
        self.check_whole("reserve")
        for part in self._parts[self._n_plain:]:
            if count > part.kv.n_rows:
                raise CacheFull(full_text("KVCache.reserve", n, "tokens", part.kv.n_rows, 0),
                                part.kv.n_rows, 0, n)
        if count == 0 and not self._parts:
            raise ValueError("KVCache.reserve: expected n of at least 1, got 0")
        try:
            for part in self._parts:
                if len(rows) == self._n_plain:
                    self.limit_ends()
                rows.append(part.reserve(count))
        except BaseException:
            for part in self._parts[:len(rows)]:
                part.rollback()
            raise
        if self._states is not None:
            self._reserved = count
        of_part = dict(zip(self._parts, rows, strict=True))
        return tuple([of_part.get(part) for part in self._part_of])

    @cython.critical_section
    def commit(self, n: int) -> None:
        cdef OneKindCache part
        cdef uint64_t count = size_of(n, "n"), end = self.end_of_all(), lost
        self.begin()
        if self._states is not None and count != self._reserved:
            if not self._reserved:
                raise RuntimeError("KVCache.commit: nothing is reserved")
            raise ValueError(f"KVCache.commit: expected n of {self._reserved}, all reserved rows, "
                             f"since states have advanced as far, got {n}: rollback goes back to a "
                             "checkpoint")
        for part in self._parts:
            part.commit(n)
        # Reserved rows that are not committed may have taken those of tokens in a window.
        lost = self.lost_before(end + count)
        if lost > self._first:
            for part in self._parts:
                part._most_bytes = part.most_bytes()
            self.end_at(end + count, lost)
        if self._states is not None:
            self._end, self._reserved = end + count, 0
            self.checkpoint_if_due(end)

    @cython.critical_section
    def rollback(self) -> None:
        cdef uint64_t end = self.end_of_all()
        self.begin()
        if self._states is None or not self.is_torn():
            self.roll_back_to(end)
            return
        if end not in self.ways_back():
            self.refuse_to_go_back("rollback", RuntimeError)
        self.go_back(end)

    cdef int go_back(self, uint64_t end) except -1:
        """Roll back to a checkpoint whose tokens are still there."""
        self.roll_back_to(end)
        self._states.go_back(end)
        self._end, self._reserved = end, 0
        return 0

    # ---- forgetting ----

    @cython.critical_section
    def crop(self, n: int) -> None:
        cdef OneKindCache part
        cdef um.um_error err
        cdef uint64_t count = size_of(n, "n"), held, target, least
        self.begin()
        if self._states is None:
            self.check_whole("crop")
        held = self.seq_len
        if count > held:
            raise ValueError(f"KVCache.crop: expected n of at most {held}, the tokens that are "
                             f"there, got {n}")
        target = self.end_of_all() - (held - count)
        if self._states is not None and target in self.ways_back():
            self.go_back(target)
            return
        if self._states is not None and self.is_torn():
            self.refuse_to_go_back("crop", RuntimeError)
        least = target
        for part in self._parts[self._n_plain:]:
            least = max(least, um.um_kv_lowest_crop(&part.kv))
        if least > target:
            raise ValueError(
                f"KVCache.crop: the last {held - count} of {held} tokens cannot be dropped, since "
                "tokens that the windows would then show were overwritten: expected n of at least "
                f"{count + least - target}, got {n}; spare_rows= keeps more of them")
        if self._states is not None and count < held:
            self.refuse_to_go_back("crop", ValueError)
        for part in self._parts:
            part._most_bytes = part.most_bytes()
            if um.um_kv_crop_to(&part.kv, target, &err) != um.UM_OK:
                part.fail(&err, "crop")
            part.note_end()
        for part in self._parts:
            part.settle()
        self.limit_ends()

    @cython.critical_section
    def trim_to(self, n: int, *, keep_first: int = 0) -> bool:
        cdef OneKindCache part
        cdef uint64_t last = size_of(n, "n"), first = size_of(keep_first, "keep_first"), held
        self.begin()
        self.check_whole("trim_to")
        held = self.seq_len
        if last >= held or first >= held - last:
            return False
        if first and (last < self._widest or self._n_plain == 0):
            raise ValueError(f"keep_first: expected 0, or n of at least {self._widest}, the "
                             "largest window, in which a token's row follows from its position, "
                             f"got keep_first={keep_first} and n={n}")
        for part in self._parts[:self._n_plain]:
            if first:
                part.check_kept(last, first)
                _check_readable(part, last, first)
        self.keep(last, first)
        return True

    @cython.critical_section
    def clear(self) -> None:
        cdef OneKindCache part
        self.begin()
        for part in self._parts:
            part.clear()
        if self._states is not None:
            self._states.clear()
        self._end = self._reserved = 0
        self.set_first(0, 0)

    @cython.critical_section
    def enforce_memory_limit(self, max_bytes: int | str) -> bool:
        cdef OneKindCache part
        cdef size_t most = bytes_of(max_bytes, "max_bytes")
        cdef size_t fixed = 0 if self._states is None else self._states.state_bytes
        cdef uint64_t held, n
        self.begin()
        self.check_whole("enforce_memory_limit")
        held = self.seq_len
        if fixed > most:
            raise CacheFull(f"KVCache.enforce_memory_limit: the states alone take {fixed} bytes, "
                            "whatever tokens are dropped: expected max_bytes of at least that, got "
                            f"{max_bytes}", most, 0, fixed)

        def needed(n):
            return fixed + sum([min(n, window) * nbytes for window, nbytes in sizes])

        sizes = [(part.kv.spec.window or held,
                  part._n_lanes // 2 * (part.kv.row_bytes + part.kv.v_row_bytes))
                 for part in self._parts]
        n = bisect.bisect_right(range(1, held + 1), most, key=needed)
        if self.memory_usage_bytes <= most:
            if self.capacity_bytes <= most or self.resident_bytes <= most:
                return False
            n = held
        for part in self._parts:
            part.check_droppable(min(n, um.um_kv_seq_len(&part.kv)))
        if n < held:
            self.keep(n, 0)
        for part in self._parts:
            part.settle(True)
        self.limit_ends()
        return n < held

    @cython.critical_section
    def give_back(self) -> int:
        given_back = sum([part.give_back() for part in self._parts])
        self.limit_ends()
        return given_back

    # ---- reading ----

    @cython.critical_section
    def layer(self, i: int, dtype: Any = None, out: Any = None) -> Any:
        cdef uint32_t index = layer_number(i, self.n_layers, "i")
        return self.part_of(index).layer(self._index_of[index], dtype, out)

    def address(self, layer: int, part: str) -> int:
        cdef uint32_t index = layer_number(layer, self.n_layers, "layer")
        return self.part_of(index).address(self._index_of[index], part)

    def row_of(self, position: int, layer: int = 0) -> int:
        return self.part_of(layer_number(layer, self.n_layers, "layer")).row_of(position)

    # ---- copies and snapshots ----

    @cython.critical_section
    def copy(self) -> LayeredKVCache:
        cdef LayeredKVCache other = LayeredKVCache.__new__(LayeredKVCache)
        cdef list parts = []
        cdef LayerStates states = None
        self.check_open()
        self.check_whole("copy")
        try:
            for part in self._parts:
                parts.append(part.copy())
            if self._states is not None:
                states = self._states.copy()
            other.assemble(self.layers, parts, self.max_seq_len, self.budget_bytes, states)
            other._end = self._end
            other._first = max(other._first, self._first)
        except BaseException:
            for part in parts:
                part.__exit__()
            if states is not None:
                states.end()
            raise
        return other

    def check_saveable(self) -> None:
        self.check_open()
        self.check_whole("save")

    @cython.critical_section
    def _finish_restore(self, next_position: int, n: int) -> None:
        """Take over tokens that were written into the parts."""
        self._end = next_position
        self.set_first(self.first_of_parts() if self._parts else next_position - n, 0)

    # ---- states ----

    @cython.critical_section
    def state(self, layer: int) -> Any:
        cdef uint32_t index = layer_number(layer, self.n_layers, "layer")
        self.check_open()
        if self._part_of[index] is not None:
            raise ValueError(f"KVCache.state: layer {index} keeps tokens and no state: expected "
                             f"layer({index})")
        return self._states.view(self._index_of[index])

    @property
    @cython.critical_section
    def checkpoints(self) -> tuple[int, ...]:
        self.check_open()
        return tuple(self.ways_back()) if self._states is not None else ()

    @cython.critical_section
    def checkpoint(self) -> int:
        cdef uint64_t end = self.end_of_all()
        self.begin()
        self.check_whole("checkpoint")
        if self._states is None:
            raise ValueError("KVCache.checkpoint: no layer keeps a state: crop goes back without "
                             "checkpoints")
        if self._states.n_checkpoints == 0:
            raise ValueError("KVCache.checkpoint: the cache has no room for one: make it with "
                             "checkpoints=")
        self._states.take(end)
        return end

    cdef int checkpoint_if_due(self, uint64_t before) except -1:
        """Take a checkpoint if the tokens since a position have reached a multiple of `every`."""
        cdef uint64_t every = 0 if self._states is None else self._states.every
        if every and self.end_of_all() // every > before // every:
            self._states.take(self.end_of_all())
        return 0

    cdef list ways_back(self):
        """Return the positions of checkpoints whose tokens all layers still have."""
        cdef OneKindCache part
        cdef uint64_t first = self.first_of_all(), end = self.end_of_all(), position
        cdef list found = []
        for position in self._states.positions:
            if first <= position <= end and not any(
                    [um.um_kv_lost_before(&(<OneKindCache>part).kv, position) for part in
                     self._parts[self._n_plain:]]):
                found.append(position)
        return found

    cdef object refuse_to_go_back(self, str doing, kind):
        cdef uint64_t first = self.first_of_all()
        cdef list found = self.ways_back()
        there = ", ".join([f"{position - first}" for position in found[-MOST_NAMED:]])
        if len(found) > MOST_NAMED:
            there += f" (and {len(found) - MOST_NAMED} earlier ones: see checkpoints)"
        where = (f"crop(n) with n of {there} goes back to a checkpoint" if found else
                 "no checkpoint exists: take them with checkpoint(), or start again with clear()")
        raise kind(f"KVCache.{doing}: states can only go back to a checkpoint; {where}")

    # ---- figures ----

    @property
    @cython.critical_section
    def seq_len(self) -> int:
        self.check_open()
        return self.end_of_all() - self.first_of_all()

    @property
    @cython.critical_section
    def next_position(self) -> int:
        self.check_open()
        return self.end_of_all()

    @property
    @cython.critical_section
    def memory_usage_bytes(self) -> int:
        fixed = 0 if self._states is None else self._states.state_bytes
        return fixed + sum([part.memory_usage_bytes for part in self._parts])

    @property
    def capacity_bytes(self) -> int:
        return sum([piece.capacity_bytes for piece in self._pieces])

    @property
    def resident_bytes(self) -> int:
        return sum([piece.resident_bytes for piece in self._pieces])

    @property
    def granted(self) -> Any:
        self.check_open()
        return sum_placements([piece.block.granted for piece in self._pieces])

    @property
    def n_growths(self) -> int:
        return sum([part.n_growths for part in self._parts])

    # ---- the end ----

    @property
    def closed(self) -> bool:
        return not self.layers or any([piece.closed for piece in self._pieces])

    def warm(self, threads: int | None = None) -> None:
        self.check_open()
        for piece in self._pieces:
            piece.warm(threads)

    @cython.critical_section
    def _freeze(self, bint frozen):
        """Refuse, or allow again, to commit memory and to give it back unasked."""
        for part in self._parts:
            part._freeze(frozen)

    cdef Py_ssize_t n_users(self):
        cdef OneKindCache part
        cdef Py_ssize_t n = 0 if self._states is None else self._states.n_users()
        for part in self._parts:
            n += part.n_users()
        return n

    cdef object end(self):
        cdef OneKindCache part
        self._closed = True
        for part in self._parts:
            part.end()
        if self._states is not None:
            self._states.end()

    @cython.critical_section
    def close(self) -> None:
        n_users = 0 if self._closed else self.n_users()
        if n_users > 0:
            refuse_views(self.name, n_users)
        self.end()

    @cython.critical_section
    def __exit__(self, *exc_info):
        self.end()

    cdef int refuse_closed(self) except -1:
        raise ClosedError(f"KVCache '{self.name}' is closed")

    cdef bint is_left_open(self):
        return not self._closed

    def __repr__(self):
        if self.closed:
            return "KVCache(closed)"
        shared = [layer for layer in self.layers if getattr(layer, "share_of", None) is not None]
        kinds = [f"{n} of {kind.n_kv_heads} heads of {kind.head_dim} {kind.dtype}"
                 + (f" with a window of {kind.window}" if kind.window else "")
                 for kind, n in kinds_of(self.layers).items()]
        if shared:
            kinds.append(f"{len(shared)} that share rows")
        if self._states is not None:
            states = format_count(len(self._states.states), "state")
            kinds.append(f"{states} of {format_bytes(self._states.state_bytes)}")
        batch = f", batch {self.batch}" if self.batch > 1 else ""
        batch += ", rows by head" if self.order == "head" else ""
        batch += ", growing" if self.grow else ""
        return (f"KVCache({self.seq_len} of {self.max_seq_len} tokens, {self.n_layers} layers: "
                f"{', '.join(kinds)}{batch}, {format_bytes(self.capacity_bytes)})")


cdef int _check_readable(OneKindCache part, uint64_t last, uint64_t first) except -1:
    """Touch the rows that a trim copies from and to, if they may be mapped from a file.

    A lost page then fails before any part is changed.
    """
    cdef uint64_t row
    if part._file is None:
        return 0
    for row in (part.first_row(), part.end_row() - last - first):
        for layer, which, stream in part._lanes():
            rows = part._lane_rows(layer, which, stream, row, first)
            part.copy_rows(np.empty_like(rows), rows)
    return 0
