# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True
"""KV caches whose layers differ: a cache for each kind of layers, and one position for all."""
import bisect
import warnings

import numpy as np

from unimem.errors import CacheFull
from unimem.kv.cache import set_mixed
from unimem.kv.layers import check_layers, kinds_of, places_of
from unimem.system.arguments import flag
from unimem.system.placement import PlacementOptions, sum_placements
from unimem.system.text import format_bytes

cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.tuple cimport PyTuple_GET_ITEM
from libc.stdint cimport uint32_t, uint64_t

from unimem._core cimport native as um
from unimem._core.arrays cimport size_of
from unimem._core.status cimport full_text
from unimem.kv.arrays cimport Given, check_token, contiguous, layer_number
from unimem.kv.cache cimport KVCache

cnp.import_array()

cdef tuple _PLACEMENT = tuple(PlacementOptions.__annotations__)
# Rows whose bytes are whole lanes of fixed caches, which are rounded up to 64 bytes.
cdef size_t ROUND_ROWS = 64


# ---- bytes ----


def _plain_bytes(kind, n_layers, n_rows, batch, order):
    """What a fixed cache of layers that keep all tokens takes."""
    return KVCache.storage_bytes(n_layers, kind.n_kv_heads, kind.head_dim, n_rows, batch=batch,
                                 dtype=kind.dtype, order=order)


def _ring_bytes(kind, n_layers, spare_rows, batch, order, pages):
    """What the ring of layers that slide takes."""
    heads = 1 if order == "head" else kind.n_kv_heads  # in a row of a lane
    row = KVCache.storage_bytes(1, heads, kind.head_dim, ROUND_ROWS, dtype=kind.dtype)
    row //= 2 * ROUND_ROWS
    n_rows = KVCache._ring_rows(row, row, kind.window + spare_rows, pages)
    return 2 * n_layers * batch * (kind.n_kv_heads // heads) * n_rows * row


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
                        f"for windows, is less than a token of the other layers needs, {least} "
                        "bytes", budget_bytes, budget_bytes - left, least)
    return {kind: _plain_bytes(kind, n, n_rows, batch, order) for kind, n in kinds.items()}


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


cdef class MixedKVCache(KVCache):
    """What ``KVCache(layers=[...])`` is.

    Layers of one kind (`unimem.kv.layers.RowsKind`) are a cache, a part of this one: those that
    keep all tokens a fixed or growing one, and those of a window a ring. All parts end at one
    position, and hold tokens from one position on, but that rings hold no more than their rows.
    """

    # The parts, those that keep all tokens first; and how many these are.
    cdef readonly tuple _parts
    cdef Py_ssize_t _n_plain
    cdef tuple _layers
    # Of each layer, its part, its number there, and whether it has rows of its own.
    cdef tuple _part_of, _index_of
    cdef bytes _owns
    # The layers that have rows, in the order in which `append_all` writes them.
    cdef list _written
    cdef uint32_t _n_layers
    cdef uint64_t _max_seq_len
    # Where the tokens begin; and the largest window, or 0.
    cdef readonly uint64_t _first
    cdef uint64_t _widest

    def __cinit__(self):
        self._parts = self._layers = self._part_of = ()

    def __init__(self, *dims, layers, max_seq_len, batch=1, dtype="f16", order="token",
                 spare_rows=0, budget_bytes=None, grow=False, name=None, **placement):
        if self._parts:
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
        layers = check_layers(layers, most, dtype)
        kinds = kinds_of(layers)
        rings = {kind: n for kind, n in kinds.items() if kind.window is not None}
        plain = {kind: n for kind, n in kinds.items() if kind.window is None}
        if spare and not rings:
            raise ValueError("spare_rows: expected together with a window")
        left = None if budget_bytes is None else size_of(budget_bytes, "budget_bytes", 1)
        common = {"batch": batch, "order": order, "name": name, **placement}
        made = {}

        def make(kind, **options):
            made[kind] = KVCache(kinds[kind], kind.n_kv_heads, kind.head_dim, most,
                                 dtype=kind.dtype, **options, **common)

        try:
            # Rings take all of their memory at once, and the rest is for the others.
            for kind in rings:
                make(kind, window=kind.window, spare_rows=spare, budget_bytes=left)
                if left is not None:
                    left = max(left - made[kind].capacity_bytes, 1)
            budgets = _budgets(plain, most, batch, order, is_growing, budget_bytes, left)
            for kind in plain:
                make(kind, grow=is_growing, budget_bytes=budgets[kind])
            self.assemble(layers, [made[kind] for kind in kinds], most, budget_bytes)
        except BaseException:
            for part in made.values():
                part.__exit__()
            raise

    @staticmethod
    def _of_layers(layers, list parts, max_seq_len):
        """A cache of the layers of a snapshot, of its parts."""
        cdef MixedKVCache cache = MixedKVCache.__new__(MixedKVCache)
        cache.assemble(layers, parts, max_seq_len, None)
        return cache

    @staticmethod
    def _storage_bytes(layers, max_seq_len, *, batch=1, dtype="f16", order="token", spare_rows=0,
                       pages="auto"):
        kinds = kinds_of(check_layers(layers, max_seq_len, dtype))
        return sum([_plain_bytes(kind, n, max_seq_len, batch, order) if kind.window is None else
                    _ring_bytes(kind, n, spare_rows, batch, order, pages)
                    for kind, n in kinds.items()])

    cdef int assemble(self, layers, list parts, max_seq_len, budget_bytes) except -1:
        """Make it of parts, in the order of their kinds, that end at one position."""
        cdef KVCache part = parts[0]
        places = places_of(layers)
        of_kind = dict(zip(kinds_of(layers), parts, strict=True))
        self._layers = layers
        self._n_layers = len(layers)
        self._max_seq_len = max_seq_len
        self._part_of = tuple([of_kind[place.kind] for place in places])
        self._index_of = tuple([place.number for place in places])
        self._owns = bytes([place.is_own for place in places])
        # What may fail comes first: rings forget what they overwrite.
        written = [i for i in range(self._n_layers) if self._owns[i]]
        self._written = sorted(written, key=lambda i: layers[i].window is not None)
        self._n_plain = sum([part.window is None for part in parts])
        self.dtype = self.v_dtype = tuple([layer.dtype for layer in layers])
        self.window = tuple([layer.window for layer in layers])
        self._widest = max([layer.window or 0 for layer in layers])
        self.order, self.name, self._batch = part.order, part.name, part._batch
        self.budget_bytes = budget_bytes
        self.grow = part.grow
        self._parts = tuple(parts)
        for part in parts[self._n_plain:]:
            part._beside = self._parts[:self._n_plain]
        # What rings have behind that, they lack.
        first = min([(<KVCache>part)._oldest_position() for part in parts])
        self.set_first(first, 0)
        return 0

    # ---- the parts ----

    cdef int begin(self) except -1:
        """`begin_change` of all of them."""
        cdef KVCache part
        if not self._parts:
            self.open_region()  # says that it is closed
        for part in self._parts:
            part.begin_change()
        return 0

    cdef int check_open(self) except -1:
        cdef KVCache part
        if not self._parts:
            self.open_region()  # says that it is closed
        for part in self._parts:
            part.open_region()
        return 0

    cdef int check_all_whole(self, str doing) except -1:
        cdef KVCache part
        cdef uint64_t end = self.end_of_all()
        for part in self._parts:
            part.check_whole(doing)
            if um.um_kv_next_position(&part.kv) != end:
                raise RuntimeError(f"KVCache.{doing}: layers differ in length: roll back first")
        return 0

    cdef uint64_t end_of_all(self) noexcept:
        """The position behind the last token that all layers hold."""
        cdef KVCache part
        cdef uint64_t end = <uint64_t>-1
        for part in self._parts:
            end = min(end, um.um_kv_next_position(&part.kv))
        return end

    cdef uint64_t first_of_all(self) noexcept:
        """The position of the first token that counts."""
        cdef KVCache part
        cdef uint64_t end = self.end_of_all(), first = self._first
        if self._n_plain == 0 and end > self._widest:
            first = max(first, end - self._widest)
        for part in self._parts[self._n_plain:]:
            first = max(first, um.um_kv_lost_before(&part.kv, end))
        return min(first, end)

    cdef int set_first(self, uint64_t first, uint64_t held) except -1:
        """Note where the tokens begin, of which rings lack those before `held`."""
        cdef KVCache part
        self._first = first
        for part in self._parts[self._n_plain:]:
            um.um_kv_set_first(&part.kv, first, max(held, um.um_kv_oldest_position(&part.kv)))
        return self.limit_ends()

    cdef int limit_ends(self) except -1:
        """Where the others have no room, a ring would forget for nothing."""
        cdef KVCache part
        for part in self._parts[self._n_plain:]:
            part.limit_end()
        return 0

    cdef int keep(self, uint64_t n, uint64_t keep_first) except -1:
        """Keep the last n tokens, and the first of the parts that have them. All was checked."""
        cdef KVCache part
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
        cdef KVCache part
        cdef um.um_error err
        cdef uint64_t first = self._first, lost = 0
        for part in self._parts[self._n_plain:]:
            lost = max(lost, um.um_kv_lost_before(&part.kv, end))
        for part in self._parts:
            part._most_bytes = part.most_bytes()
            um.um_kv_rollback_to(&part.kv, end)
            part._reserved = 0
        if lost > first:
            # What a ring lacks inside of its window counts no more in any layer.
            first = lost
            for part in self._parts[:self._n_plain]:
                if um.um_kv_trim(&part.kv, end - lost, 0, &err) != um.UM_OK:
                    part.fail(&err, "rollback")
        for part in self._parts:
            part.note_end()
            part.settle()
        return self.set_first(first, 0)

    # ---- appending ----

    cdef object refuse_append(self, uint32_t index):
        raise ValueError(f"KVCache.append: layer {index} shows the rows of layer "
                         f"{self._layers[index].share_of}: append to that one")

    def append(self, layer, k, v):
        """Append tokens to one layer: see `KVCache.append`."""
        cdef uint32_t index = layer_number(layer, self._n_layers, "layer")
        cdef KVCache part = <KVCache>PyTuple_GET_ITEM(self._part_of, index)
        if not PyBytes_AS_STRING(self._owns)[index]:
            self.refuse_append(index)
        part.append_tokens(<object>PyTuple_GET_ITEM(self._index_of, index), k, v)

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
                        f"KVCache.append_all: layer {i}")
            tokens[i] = ka, va
        if self._batch != 1:
            raise ValueError("KVCache.append_all: batch is not 1")
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

    def reserve(self, n):
        """Reserve n rows in every layer: see `KVCache.reserve`.

        Returns
        -------
        tuple of int
            Of each layer the first row.
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
        try:
            for part in self._parts:
                if len(rows) == self._n_plain:
                    self.limit_ends()
                rows.append(part.reserve(count))
        except BaseException:
            for part in self._parts[:len(rows)]:
                part.rollback()
            raise
        of_part = dict(zip(self._parts, rows, strict=True))
        return tuple([of_part[part] for part in self._part_of])

    def commit(self, n):
        """Make the first n reserved rows tokens of all layers: see `KVCache.commit`."""
        cdef KVCache part
        self.begin()
        for part in self._parts:
            part.commit(n)

    def rollback(self):
        """Drop what is reserved, and tokens that not all layers hold.

        Where a window has overwritten tokens that it would have to show then, all layers drop the
        tokens before these; `spare_rows` keeps as many of them.
        """
        self.begin()
        self.roll_back_to(self.end_of_all())

    # ---- forgetting ----

    def crop(self, n):
        """Keep the first n tokens: see `KVCache.crop`."""
        cdef KVCache part
        cdef um.um_error err
        cdef uint64_t count = size_of(n, "n"), held, target, least
        self.begin()
        self.check_all_whole("crop")
        held = self.seq_len
        if count > held:
            raise ValueError(f"KVCache.crop: expected n of at most {held}, the tokens that are "
                             f"there, got {n}")
        target = self.end_of_all() - (held - count)
        least = target
        for part in self._parts[self._n_plain:]:
            least = max(least, um.um_kv_lowest_crop(&part.kv))
        if least > target:
            raise ValueError(
                f"KVCache.crop: the last {held - count} of {held} tokens cannot be dropped, since "
                "those that the windows would show then were overwritten: expected n of at least "
                f"{count + least - target}, got {n}; spare_rows= keeps more of them")
        for part in self._parts:
            part._most_bytes = part.most_bytes()
            if um.um_kv_crop_to(&part.kv, target, &err) != um.UM_OK:
                part.fail(&err, "crop")
            part.note_end()
        for part in self._parts:
            part.settle()
        self.limit_ends()

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

    def clear(self):
        """Forget all tokens, and what is reserved: see `KVCache.clear`."""
        cdef KVCache part
        self.begin()
        for part in self._parts:
            part.clear()
        self.set_first(0, 0)

    def enforce_memory_limit(self, max_bytes):
        """Keep as many of the last tokens as fit: see `KVCache.enforce_memory_limit`."""
        cdef KVCache part
        cdef size_t most = size_of(max_bytes, "max_bytes")
        cdef uint64_t held, n
        self.begin()
        self.check_all_whole("enforce_memory_limit")
        held = self.seq_len

        def needed(n):
            return sum([min(n, window) * nbytes for window, nbytes in sizes])

        sizes = [(part.kv.spec.window or held, part._n_lanes * part.kv.row_bytes)
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

    def give_back(self):
        """Give back memory that holds no tokens: see `KVCache.give_back`."""
        given_back = sum([part.give_back() for part in self._parts])
        self.limit_ends()
        return given_back

    # ---- reading ----

    def layer(self, i, dtype=None, out=None):
        """View the tokens that one layer holds: see `KVCache.layer`."""
        cdef uint32_t index = layer_number(i, self._n_layers, "i")
        return self._part_of[index].layer(self._index_of[index], dtype, out)

    def address(self, layer, part):
        """Return where a layer's K or V begins: see `KVCache.address`."""
        cdef uint32_t index = layer_number(layer, self._n_layers, "layer")
        return self._part_of[index].address(self._index_of[index], part)

    def row_of(self, position, layer=0):
        """Return the row of the token of a position in a layer: see `KVCache.row_of`."""
        return self._part_of[layer_number(layer, self._n_layers, "layer")].row_of(position)

    # ---- copies and snapshots ----

    def copy(self):
        """Return a cache of the same layers with the same tokens: see `KVCache.copy`."""
        cdef MixedKVCache other = MixedKVCache.__new__(MixedKVCache)
        cdef list parts = []
        self.check_open()
        self.check_all_whole("copy")
        try:
            for part in self._parts:
                parts.append(part.copy())
            other.assemble(self._layers, parts, self._max_seq_len, self.budget_bytes)
        except BaseException:
            for part in parts:
                part.__exit__()
            raise
        return other

    def save(self, path, *, tokens=None, model=None):
        """Write the tokens to a file: see `KVCache.save`."""
        from unimem.kv import snapshot

        self.check_open()
        self.check_all_whole("save")
        snapshot.save_layers(self, path, tokens, model)

    def _finish_restore(self, next_position, n):
        """The tokens are in the parts."""
        self.set_first(next_position - n, 0)

    def verify(self):
        """Compare the data of the file that the cache was restored from: see `KVCache.verify`."""
        from unimem.kv import snapshot

        self.check_open()
        snapshot.verify(self)

    # ---- figures ----

    @property
    def seq_len(self):
        """Tokens that all layers hold, or need not hold any more: windows slide."""
        self.check_open()
        return self.end_of_all() - self.first_of_all()

    @property
    def next_position(self):
        """The position of the next token, which trimming does not change."""
        self.check_open()
        return self.end_of_all()

    @property
    def memory_usage_bytes(self):
        """Bytes of the tokens that are there, over all layers, K and V."""
        return sum([part.memory_usage_bytes for part in self._parts])

    @property
    def capacity_bytes(self):
        """Bytes of memory that back the cache."""
        return sum([part.capacity_bytes for part in self._parts])

    @property
    def resident_bytes(self):
        """Bytes of the storage that are in RAM, in whole pages, once each (Pss)."""
        return sum([part.resident_bytes for part in self._parts])

    @property
    def granted(self):
        """How the memory under the cache is placed, as the kernel says: all blocks together."""
        self.check_open()
        return sum_placements([part.granted for part in self._parts])

    @property
    def layers(self):
        """What each layer keeps: a tuple of `LayerKV`."""
        return self._layers

    @property
    def n_layers(self):
        """Layers."""
        return self._n_layers

    @property
    def n_kv_heads(self):
        """Of each layer, its KV heads."""
        return tuple([layer.n_kv_heads for layer in self._layers])

    @property
    def head_dim(self):
        """Of each layer, the elements of a head."""
        return tuple([layer.head_dim for layer in self._layers])

    @property
    def max_seq_len(self):
        """Tokens that fit."""
        return self._max_seq_len

    @property
    def n_rows(self):
        """Of each layer, the rows of a lane."""
        return tuple([part.n_rows for part in self._part_of])

    @property
    def row_bytes(self):
        """Of each layer, the bytes of one token's K of one stream, all heads."""
        return tuple([part.row_bytes for part in self._part_of])

    @property
    def v_row_bytes(self):
        """The same of V: each layer stores both in one type."""
        return self.row_bytes

    @property
    def n_growths(self):
        """How often memory was committed."""
        return sum([part.n_growths for part in self._parts])

    # ---- the end ----

    @property
    def closed(self):
        """Whether the cache was closed (or never made), or has rings and is in a forked child."""
        return not self._parts or any([part.closed for part in self._parts])

    def warm(self, threads=None):
        """Bring the storage into RAM: see `KVCache.warm`."""
        self.check_open()
        for part in self._parts:
            part.warm(threads)

    def _freeze(self, bint frozen):
        """Refuse, or allow again, to commit memory and to give it back unasked."""
        for part in self._parts:
            part._freeze(frozen)

    cdef Py_ssize_t n_users(self):
        cdef KVCache part
        cdef Py_ssize_t n = 0
        for part in self._parts:
            n += part.n_users()
        return n

    cdef object end(self):
        cdef KVCache part
        self._closed = True
        for part in self._parts:
            part.end()

    def __enter__(self):
        self.check_open()
        return self

    def __repr__(self):
        if self.closed:
            return "KVCache(closed)"
        own = [layer for layer in self._layers if layer.share_of is None]
        kinds = [f"{n} of {kind.n_kv_heads} heads of {kind.head_dim} {kind.dtype}"
                 + (f" with a window of {kind.window}" if kind.window else "")
                 for kind, n in kinds_of(own).items()]
        if len(own) < self._n_layers:
            kinds.append(f"{self._n_layers - len(own)} that share rows")
        batch = f", batch {self._batch}" if self._batch > 1 else ""
        batch += ", rows by head" if self.order == "head" else ""
        batch += ", growing" if self.grow else ""
        return (f"KVCache({self.seq_len} of {self._max_seq_len} tokens, {self._n_layers} layers: "
                f"{', '.join(kinds)}{batch}, {format_bytes(self.capacity_bytes)})")

    def __del__(self):
        if self._parts and not self._closed:
            said = f"unclosed '{self.name}': {self!r}"
            self.end()  # first: the parts say nothing of their own
            warnings.warn(said, ResourceWarning, stacklevel=1, source=self)


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
