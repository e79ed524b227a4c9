# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True
"""KV caches whose layers differ."""
import bisect

import numpy as np

from unimem.errors import CacheFull
from unimem.kv.cache.cache import set_mixed
from unimem.kv.layer_specs import check_layers, kinds_of, states_of
from unimem.base.arguments import flag, one_of, string
from unimem.system.placement import PlacementOptions

cimport cython
cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.tuple cimport PyTuple_GET_ITEM
from libc.stdint cimport uint32_t, uint64_t

from unimem._core cimport native as um
from unimem._core.arrays cimport size_of
from unimem._core.status cimport full_text
from unimem.kv.arrays cimport Given, check_token, contiguous, layer_number
from unimem.kv.cache.cache cimport KVCache
from unimem.kv.cache.parts cimport KVParts
from unimem.kv.states cimport LayerStates

cnp.import_array()

cdef tuple _PLACEMENT = tuple(PlacementOptions.__annotations__)
# Rows whose bytes are whole lanes of fixed caches, which are rounded up to 64 bytes.
cdef size_t ROUND_ROWS = 64


# ---- bytes ----


def _plain_bytes(kind, n_layers, n_rows, batch, order):
    """What a fixed cache of layers that keep all tokens takes."""
    return KVCache.storage_bytes(n_layers, kind.n_kv_heads, kind.head_dim, n_rows, batch=batch,
                                 dtype=kind.dtype, order=order, v_head_dim=kind.v_head_dim)


def _ring_bytes(kind, n_layers, spare_rows, batch, order, pages):
    """What the ring of layers that slide takes."""
    heads = 1 if order == "head" else kind.n_kv_heads  # in a row of a lane
    dims = 1, heads, kind.head_dim, ROUND_ROWS
    row, both = [KVCache.storage_bytes(*dims, dtype=kind.dtype, v_head_dim=size) // ROUND_ROWS
                 for size in (0, kind.v_head_dim)]
    n_rows = KVCache._ring_rows(row, both - row, kind.window + spare_rows, pages)
    return n_layers * batch * (kind.n_kv_heads // heads) * n_rows * both


def _budgets(kinds, max_seq_len, batch, order, grow, budget_bytes, left):
    """What of a budget each kind gets that keeps all tokens: all have room for as many."""
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
        raise CacheFull(f"KVCache: budget_bytes={budget_bytes}, of which {budget_bytes - left} are "
                        "for windows and states, is less than a token of the other layers needs, "
                        f"{least} bytes", budget_bytes, budget_bytes - left, least)
    return {kind: _plain_bytes(kind, n, n_rows, batch, order) for kind, n in kinds.items()}


def _left_of(left, states, batch, checkpoints):
    """What of a budget is left behind states and their checkpoints."""
    needed = LayerStates.storage_bytes(states, size_of(batch, "batch", 1), checkpoints)
    if needed > left:
        raise CacheFull(f"KVCache: budget_bytes={left}, and {len(states)} states with "
                        f"checkpoints={checkpoints} need {needed} bytes", left, 0, needed)
    return max(left - needed, 1)


cdef tuple _tokens_of(object given, str what, Py_ssize_t n):
    """The arrays of n layers: as they are, or those that an array of one more dimension has."""
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


cdef class MixedKVCache(KVParts):
    """What ``KVCache(layers=[...])`` is.

    Layers of one kind (`unimem.kv.layer_specs.RowsKind`) are a cache, a part of this one: those that
    keep all tokens a fixed or growing one, and those of a window a ring. All parts end at one
    position, and hold tokens from one position on, but that rings hold no more than their rows.
    Layers that keep a state have no part: their states are those of that position.
    """

    def __init__(self, *dims, layers, max_seq_len, batch=1, dtype="f16", order="token",
                 spare_rows=0, budget_bytes=None, grow=False, rotate=False, checkpoints=0,
                 checkpoint_every=None, name=None, **placement):
        if self._layers:
            raise RuntimeError("the KVCache is made already")
        if dims:
            raise TypeError("KVCache: expected n_layers, n_kv_heads, head_dim and max_seq_len, or "
                            "layers= and max_seq_len=, got both")
        for option in placement:
            if option not in _PLACEMENT:
                raise TypeError(f"KVCache: unexpected option {option!r} beside layers=; placement "
                                f"is {', '.join(_PLACEMENT)}")
        cdef size_t most = size_of(max_seq_len, "max_seq_len", 1)
        cdef size_t spare = size_of(spare_rows, "spare_rows")
        cdef bint is_growing = flag(grow, "grow")
        cdef size_t n_checkpoints = size_of(checkpoints, "checkpoints")
        layers = check_layers(layers, most, dtype)
        one_of(order, "order", ("token", "head"))
        kinds, states = kinds_of(layers), states_of(layers)
        rings = {kind: n for kind, n in kinds.items() if kind.window is not None}
        plain = {kind: n for kind, n in kinds.items() if kind.window is None}
        if spare and not rings:
            raise ValueError("spare_rows: expected together with a window")
        if checkpoint_every is not None and not n_checkpoints:
            raise ValueError("checkpoint_every: expected together with checkpoints")
        if n_checkpoints and not states:
            raise ValueError("checkpoints: expected together with a LayerState: layers that keep "
                             "tokens go back without them")
        left = None if budget_bytes is None else size_of(budget_bytes, "budget_bytes", 1)
        common = {"batch": batch, "order": order, "rotate": flag(rotate, "rotate"), "name": name,
                  **placement}
        made = {}
        cdef LayerStates kept = None

        def make(kind, **options):
            made[kind] = KVCache(kinds[kind], kind.n_kv_heads, kind.head_dim, most,
                                 v_head_dim=kind.v_head_dim, dtype=kind.dtype, **options, **common)

        try:
            # States and rings take all of their memory at once, and the rest is for the others.
            if states:
                if left is not None:
                    left = _left_of(left, states, batch, n_checkpoints)
                kept = LayerStates(states, batch, n_checkpoints, checkpoint_every,
                                   string(name, "name", "kv"), placement)
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
    def _of_layers(layers, list parts, max_seq_len, LayerStates states=None):
        """A cache of the layers of a snapshot, of its parts and states."""
        cdef MixedKVCache cache = MixedKVCache.__new__(MixedKVCache)
        cache.assemble(layers, parts, max_seq_len, None, states)
        return cache

    @staticmethod
    def _storage_bytes(layers, max_seq_len, *, batch=1, dtype="f16", order="token", spare_rows=0,
                       checkpoints=0, pages="auto"):
        layers = check_layers(layers, max_seq_len, dtype)
        kinds = kinds_of(layers)
        states = LayerStates.storage_bytes(states_of(layers), size_of(batch, "batch", 1),
                                           size_of(checkpoints, "checkpoints"))
        rows = [_plain_bytes(kind, n, max_seq_len, batch, order) if kind.window is None else
                _ring_bytes(kind, n, spare_rows, batch, order, pages)
                for kind, n in kinds.items()]
        return states + sum(rows)

    # ---- appending ----

    cdef object refuse_append(self, uint32_t index):
        if self._part_of[index] is None:
            raise ValueError(f"KVCache.append: layer {index} keeps a state and no tokens: write "
                             f"into state({index})")
        raise ValueError(f"KVCache.append: layer {index} shows the rows of layer "
                         f"{self._layers[index].share_of}: append to that one")

    @cython.critical_section
    def append(self, layer, k, v):
        """Append tokens to one layer: see `KVCache.append`."""
        cdef uint32_t index = layer_number(layer, self._n_layers, "layer")
        cdef KVCache part = self.part_to_append(index)
        part.append_tokens(<object>PyTuple_GET_ITEM(self._index_of, index), k, v)

    cdef KVCache part_to_append(self, uint32_t layer):
        layer_number(layer, self._n_layers, "layer")
        if not PyBytes_AS_STRING(self._owns)[layer]:
            self.refuse_append(layer)
        return <KVCache>PyTuple_GET_ITEM(self._part_of, layer)

    cdef int append_rows(self, uint32_t layer, const void *k, const void *v, um.um_dtype type,
                         uint64_t n) except -1 nogil:
        with gil:
            self.part_to_append(layer).append_rows(self._index_of[layer], k, v, type, n)
        return 0

    cdef void *lane(self, uint32_t layer, bint v, uint32_t stream=0) noexcept nogil:
        with gil:
            return (NULL if layer >= self._n_layers or self._part_of[layer] is None  # a state
                    else (<KVCache>self._part_of[layer]).lane(self._index_of[layer], v, stream))

    cdef void *rows(self, uint32_t layer, bint v, uint64_t *out_n,
                    uint32_t stream=0) noexcept nogil:
        out_n[0] = 0
        with gil:
            return (NULL if layer >= self._n_layers or self._part_of[layer] is None  # a state
                    else (<KVCache>self._part_of[layer]).rows(self._index_of[layer], v, out_n,
                                                              stream))

    @cython.critical_section
    def append_all(self, k, v):
        """Append one token to all layers (batch 1): to those that have rows of their own.

        Parameters
        ----------
        k, v : array or sequence of array
            ``[n_kv_heads, head_dim]`` of each of these layers.

        Raises
        ------
        CacheFull, CapacityError, ValueError, TypeError, RuntimeError, BufferError, OSError
            As `KVCache.append_all`.
        """
        cdef KVCache part
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
        if self._batch != 1:
            raise ValueError("KVCache.append_all: batch is not 1")
        if not self._parts:
            raise ValueError("KVCache.append_all: no layer keeps tokens: reserve and commit say "
                             "that states have gone on")
        self.begin()
        self.check_all_whole("append_all")
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
    def reserve(self, n):
        """Reserve n rows in every layer: see `KVCache.reserve`.

        Returns
        -------
        tuple of int
            Of each layer the first row; None of a layer that keeps a state.
        """
        cdef KVCache part
        cdef uint64_t count = size_of(n, "n")
        cdef list rows = []
        self.begin()
        self.check_all_whole("reserve")
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
    def commit(self, n):
        """Make the first n reserved rows tokens of all layers: see `KVCache.commit`.

        States are those behind all that was reserved: with states, n is all of it.
        """
        cdef KVCache part
        cdef uint64_t count = size_of(n, "n"), end = self.end_of_all()
        self.begin()
        if self._states is not None and count != self._reserved:
            if not self._reserved:
                raise RuntimeError("KVCache.commit: nothing is reserved")
            raise ValueError(f"KVCache.commit: expected n of {self._reserved}, all that is "
                             f"reserved, since states have gone on as far, got {n}: rollback goes "
                             "back to a checkpoint")
        for part in self._parts:
            part.commit(n)
        if self._states is not None:
            self._end, self._reserved = end + count, 0
            self.checkpoint_if_due(end)

    @cython.critical_section
    def rollback(self):
        """Drop what is reserved, and tokens that not all layers hold.

        Where a window has overwritten tokens that it would have to show then, all layers drop the
        tokens before these; `spare_rows` keeps as many of them. With states there has to be a
        checkpoint of the position where the tokens end then.
        """
        cdef uint64_t end = self.end_of_all()
        self.begin()
        if self._states is None or not self.is_torn():
            self.roll_back_to(end)
            return
        if end not in self.ways_back():
            self.refuse_to_go_back("rollback", RuntimeError)
        self.go_back(end)

    cdef int go_back(self, uint64_t end) except -1:
        """Roll back to a checkpoint that there is a way to."""
        self.roll_back_to(end)
        self._states.go_back(end)
        self._end, self._reserved = end, 0
        return 0

    # ---- forgetting ----

    @cython.critical_section
    def crop(self, n):
        """Keep the first n tokens: see `KVCache.crop`.

        With states, these go back to the checkpoint of that position, which there has to be. Then
        what is reserved, and tokens that not all layers hold, are dropped, too.
        """
        cdef KVCache part
        cdef um.um_error err
        cdef uint64_t count = size_of(n, "n"), held, target, least
        self.begin()
        if self._states is None:
            self.check_all_whole("crop")
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
                "those that the windows would show then were overwritten: expected n of at least "
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
    def trim_to(self, n, *, keep_first=0):
        """Keep the last n tokens, and the first `keep_first`: see `KVCache.trim_to`.

        The first tokens are kept in layers that keep all tokens. So n has to be at least the
        largest window: none may need them.
        """
        cdef KVCache part
        cdef uint64_t last = size_of(n, "n"), first = size_of(keep_first, "keep_first"), held
        self.begin()
        self.check_all_whole("trim_to")
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
    def clear(self):
        """Forget all tokens, and what is reserved: see `KVCache.clear`."""
        cdef KVCache part
        self.begin()
        for part in self._parts:
            part.clear()
        if self._states is not None:
            self._states.clear()
        self._end = self._reserved = 0
        self.set_first(0, 0)

    @cython.critical_section
    def enforce_memory_limit(self, max_bytes):
        """Keep as many of the last tokens as fit: see `KVCache.enforce_memory_limit`."""
        cdef KVCache part
        cdef size_t most = size_of(max_bytes, "max_bytes")
        cdef size_t fixed = 0 if self._states is None else self._states.state_bytes
        cdef uint64_t held, n
        self.begin()
        self.check_all_whole("enforce_memory_limit")
        held = self.seq_len
        if fixed > most:
            raise CacheFull(f"KVCache.enforce_memory_limit: the states alone are {fixed} bytes, "
                            f"and stay whatever tokens go: expected max_bytes of at least that, "
                            f"got {max_bytes}", most, 0, fixed)

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
    def give_back(self):
        """Give back memory that holds no tokens: see `KVCache.give_back`."""
        given_back = sum([part.give_back() for part in self._parts])
        self.limit_ends()
        return given_back

    # ---- reading ----

    @cython.critical_section
    def layer(self, i, dtype=None, out=None):
        """View the tokens that one layer holds: see `KVCache.layer`."""
        cdef uint32_t index = layer_number(i, self._n_layers, "i")
        return self.part_of(index).layer(self._index_of[index], dtype, out)

    def address(self, layer, part):
        """Return where a layer's K or V begins: see `KVCache.address`."""
        cdef uint32_t index = layer_number(layer, self._n_layers, "layer")
        return self.part_of(index).address(self._index_of[index], part)

    def row_of(self, position, layer=0):
        """Return the row of the token of a position in a layer: see `KVCache.row_of`."""
        return self.part_of(layer_number(layer, self._n_layers, "layer")).row_of(position)

    # ---- copies and snapshots ----

    @cython.critical_section
    def copy(self):
        """Return a cache of the same layers with the same tokens: see `KVCache.copy`."""
        cdef MixedKVCache other = MixedKVCache.__new__(MixedKVCache)
        cdef list parts = []
        cdef LayerStates states = None
        self.check_open()
        self.check_all_whole("copy")
        try:
            for part in self._parts:
                parts.append(part.copy())
            if self._states is not None:
                states = self._states.copy()
            other.assemble(self._layers, parts, self._max_seq_len, self.budget_bytes, states)
            other._end = self._end
            other._first = max(other._first, self._first)
        except BaseException:
            for part in parts:
                part.__exit__()
            if states is not None:
                states.end()
            raise
        return other

    def save(self, path, *, tokens=None, model=None):
        """Write the tokens to a file: see `KVCache.save`."""
        from unimem.kv import snapshot

        self.check_open()
        self.check_all_whole("save")
        snapshot.save_layers(self, path, tokens, model)

    @cython.critical_section
    def _finish_restore(self, next_position, n):
        """The tokens are in the parts."""
        self._end = next_position
        self.set_first(next_position - n, 0)

    def verify(self):
        """Compare the data of the file that the cache was restored from: see `KVCache.verify`."""
        from unimem.kv import snapshot

        self.check_open()
        snapshot.verify(self)

cdef int _check_readable(KVCache part, uint64_t last, uint64_t first) except -1:
    """Touch the rows that a trim copies, and those that it copies them to, where these are a
    file's: it may fail in none of several parts, or in the first."""
    cdef uint64_t row
    if part._file is None:
        return 0
    for row in (part.first_row(), part.end_row() - last - first):
        for layer, which, stream in part._lanes():
            rows = part._lane_rows(layer, which, stream, row, first)
            part.copy_rows(np.empty_like(rows), rows)
    return 0


set_mixed(MixedKVCache)
