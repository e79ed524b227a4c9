# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True
"""What a cache stands on whose layers differ: its parts, its states, and one position for all."""
import warnings
import weakref

from unimem.kv.layer_specs import kinds_of, places_of
from unimem.system.placement import sum_placements
from unimem.base.text import format_bytes, format_count

cimport cython
from cpython.tuple cimport PyTuple_GET_ITEM
from libc.stdint cimport uint32_t, uint64_t

from unimem._core cimport native as um
from unimem.kv.arrays cimport kv_pair, layer_number
from unimem.kv.cache.cache cimport KVCache
from unimem.kv.states cimport LayerStates

# Of the positions that can be gone back to, as many stand in a message.
cdef Py_ssize_t MOST_NAMED = 8


cdef class KVParts(KVCache):
    """What `MixedKVCache` stands on."""

    def __cinit__(self):
        self._parts = self._layers = self._part_of = ()

    # ---- making one ----

    cdef int assemble(self, layers, list parts, max_seq_len, budget_bytes,
                      LayerStates states) except -1:
        """Make it of parts, in the order of their kinds, that end at one position, and states."""
        cdef KVCache part
        places = places_of(layers)
        of_kind = dict(zip(kinds_of(layers), parts, strict=True))
        self._layers = layers
        self._n_layers = len(layers)
        self._max_seq_len = max_seq_len
        self._part_of = tuple([of_kind.get(place.kind) for place in places])
        self._index_of = tuple([place.number for place in places])
        self._owns = bytes([place.is_own for place in places])
        # What may fail comes first: rings forget what they overwrite.
        written = [i for i in range(self._n_layers) if self._owns[i]]
        self._written = sorted(written, key=lambda i: layers[i].window is not None)
        self._n_plain = sum([part.window is None for part in parts])
        self.dtype, self.v_dtype = zip(*[kv_pair(layer.dtype) for layer in layers], strict=True)
        self.window = tuple([getattr(layer, "window", None) for layer in layers])
        self._widest = max([window or 0 for window in self.window])
        self._parts, self._states = tuple(parts), states
        first = self._pieces[0]
        self.name, self._batch = first.name, first.batch
        self.order = parts[0].order if parts else "token"
        self.grow = bool(parts) and parts[0].grow
        self.rotate = bool(parts) and parts[0].rotate
        self.budget_bytes = budget_bytes
        for part in parts:
            part._whole = weakref.ref(self)
        for part in parts[self._n_plain:]:
            part._beside = self._parts[:self._n_plain]
        # What rings have behind that, they lack.
        oldest = min([(<KVCache>part)._oldest_position() for part in parts], default=0)
        self.set_first(oldest, 0)
        return 0

    # ---- the parts ----

    @property
    def _pieces(self):
        """All that has memory: the parts, and the states."""
        return self._parts if self._states is None else (*self._parts, self._states)

    cdef KVCache part_of(self, uint32_t index):
        """The part that has the rows of a layer."""
        cdef object part = <object>PyTuple_GET_ITEM(self._part_of, index)
        if part is None:
            raise ValueError(f"KVCache: layer {index} keeps a state and no tokens: expected "
                             f"state({index})")
        return part

    cdef int begin(self) except -1:
        """`begin_change` of all of them."""
        cdef KVCache part
        if not self._layers:
            self.open_region()  # says that it is closed
        for part in self._parts:
            part.begin_change()
        if self._states is not None:
            self._states.begin_change()
        return 0

    cdef int check_open(self) except -1:
        cdef KVCache part
        if not self._layers:
            self.open_region()  # says that it is closed
        for part in self._parts:
            part.open_region()
        if self._states is not None:
            self._states.open_region()
        return 0

    cdef int check_all_whole(self, str doing) except -1:
        cdef KVCache part
        cdef uint64_t end = self.end_of_all()
        for part in self._parts:
            part.check_whole(doing)
            if um.um_kv_next_position(&part.kv) != end:
                raise RuntimeError(f"KVCache.{doing}: layers differ in length: roll back first")
        if self._reserved:
            raise RuntimeError(f"KVCache.{doing}: rows are reserved: commit or roll back first")
        return 0

    cdef bint is_torn(self) except -1:
        """Whether tokens are reserved, or some layers lack them: states may be those behind."""
        try:
            self.check_all_whole("")
        except RuntimeError:
            return True
        return False

    cdef uint64_t end_of_all(self) noexcept:
        """The position behind the last token that all layers hold."""
        cdef KVCache part
        cdef uint64_t end = <uint64_t>-1
        if not self._parts:
            return self._end
        for part in self._parts:
            end = min(end, um.um_kv_next_position(&part.kv))
        return end

    cdef uint64_t first_of_all(self) noexcept:
        """The position of the first token that counts."""
        cdef KVCache part
        cdef uint64_t end = self.end_of_all(), first = self._first
        if self._parts and self._n_plain == 0 and end > self._widest:
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

    # ---- states ----

    @cython.critical_section
    def state(self, layer):
        """View the state that a layer keeps: see `KVCache.state`."""
        cdef uint32_t index = layer_number(layer, self._n_layers, "layer")
        self.check_open()
        if self._part_of[index] is not None:
            raise ValueError(f"KVCache.state: layer {index} keeps tokens and no state: expected "
                             f"layer({index})")
        return self._states.view(self._index_of[index])

    @property
    @cython.critical_section
    def checkpoints(self):
        """Positions whose checkpoints `crop` can go back to, in their order: a tuple of int."""
        self.check_open()
        return tuple(self.ways_back()) if self._states is not None else ()

    @cython.critical_section
    def checkpoint(self):
        """Keep a copy of all states, to go back to: see `KVCache.checkpoint`."""
        cdef uint64_t end = self.end_of_all()
        self.begin()
        self.check_all_whole("checkpoint")
        if self._states is None:
            raise ValueError("KVCache.checkpoint: no layer keeps a state: crop goes back without "
                             "checkpoints")
        if self._states.n_checkpoints == 0:
            raise ValueError("KVCache.checkpoint: the cache has no room for one: make it with "
                             "checkpoints=")
        self._states.take(end)
        return end

    cdef int checkpoint_if_due(self, uint64_t before) except -1:
        """Take one where the tokens since a position have reached a multiple of `every`."""
        cdef uint64_t every = 0 if self._states is None else self._states.every
        if every and self.end_of_all() // every > before // every:
            self._states.take(self.end_of_all())
        return 0

    cdef list ways_back(self):
        """The positions of checkpoints whose tokens all layers still have."""
        cdef KVCache part
        cdef uint64_t first = self.first_of_all(), end = self.end_of_all(), position
        cdef list found = []
        for position in self._states.positions:
            if first <= position <= end and not any(
                    [um.um_kv_lost_before(&(<KVCache>part).kv, position) for part in
                     self._parts[self._n_plain:]]):
                found.append(position)
        return found

    cdef object refuse_to_go_back(self, str doing, kind):
        cdef uint64_t first = self.first_of_all()
        cdef list found = self.ways_back()
        there = ", ".join([f"{position - first}" for position in found[-MOST_NAMED:]])
        if len(found) > MOST_NAMED:
            there += f" (and {len(found) - MOST_NAMED} before these: see checkpoints)"
        where = (f"crop(n) with n of {there} goes back to a checkpoint" if found else
                 "there is none: take them with checkpoint(), or begin anew with clear()")
        raise kind(f"KVCache.{doing}: states are no rows that can be dropped, and go back to a "
                   f"checkpoint only; {where}")

    # ---- figures ----

    @property
    @cython.critical_section
    def seq_len(self):
        """Tokens that all layers hold, or need not hold any more: windows slide."""
        self.check_open()
        return self.end_of_all() - self.first_of_all()

    @property
    @cython.critical_section
    def next_position(self):
        """The position of the next token, which trimming does not change."""
        self.check_open()
        return self.end_of_all()

    @property
    @cython.critical_section
    def memory_usage_bytes(self):
        """Bytes of the tokens that are there, over all layers, K and V, and of the states."""
        fixed = 0 if self._states is None else self._states.state_bytes
        return fixed + sum([part.memory_usage_bytes for part in self._parts])

    @property
    def capacity_bytes(self):
        """Bytes of memory that back the cache."""
        return sum([piece.capacity_bytes for piece in self._pieces])

    @property
    def resident_bytes(self):
        """Bytes of the storage that are in RAM, in whole pages, once each (Pss)."""
        return sum([piece.resident_bytes for piece in self._pieces])

    @property
    def granted(self):
        """How the memory under the cache is placed, as the kernel says: all blocks together."""
        self.check_open()
        return sum_placements([piece.block.granted for piece in self._pieces])

    cdef tuple of_each(self, str name):
        return tuple([getattr(layer, name, 0) for layer in self._layers])

    cdef tuple of_each_part(self, str name):
        return tuple([0 if part is None else getattr(part, name) for part in self._part_of])

    @property
    def layers(self):
        """What each layer keeps: a tuple of `LayerKV` and `LayerState`."""
        return self._layers

    @property
    def n_layers(self):
        """Layers."""
        return self._n_layers

    @property
    def n_kv_heads(self):
        """Of each layer, its KV heads; 0 of a layer that keeps a state, here and below."""
        return self.of_each("n_kv_heads")

    @property
    def head_dim(self):
        """Of each layer, the elements of a head."""
        return self.of_each("head_dim")

    @property
    def v_head_dim(self):
        """Of each layer, the elements of a head of V."""
        return self.of_each("v_head_dim")

    @property
    def max_seq_len(self):
        """Tokens that fit."""
        return self._max_seq_len

    @property
    def n_rows(self):
        """Of each layer, the rows of a lane."""
        return self.of_each_part("n_rows")

    @property
    def row_bytes(self):
        """Of each layer, the bytes of one token's K of one stream, all heads."""
        return self.of_each_part("row_bytes")

    @property
    def v_row_bytes(self):
        """The same of V."""
        return self.of_each_part("v_row_bytes")

    @property
    def n_growths(self):
        """How often memory was committed."""
        return sum([part.n_growths for part in self._parts])

    # ---- the end ----

    @property
    def closed(self):
        """Whether the cache was closed (or never made), or has rings and is in a forked child."""
        return not self._layers or any([piece.closed for piece in self._pieces])

    def warm(self, threads=None):
        """Bring the storage into RAM: see `KVCache.warm`."""
        self.check_open()
        for piece in self._pieces:
            piece.warm(threads)

    @cython.critical_section
    def _freeze(self, bint frozen):
        """Refuse, or allow again, to commit memory and to give it back unasked."""
        for part in self._parts:
            part._freeze(frozen)

    cdef Py_ssize_t n_users(self):
        cdef KVCache part
        cdef Py_ssize_t n = 0 if self._states is None else self._states.n_users()
        for part in self._parts:
            n += part.n_users()
        return n

    cdef object end(self):
        cdef KVCache part
        self._closed = True
        for part in self._parts:
            part.end()
        if self._states is not None:
            self._states.end()

    def __enter__(self):
        self.check_open()
        return self

    def __repr__(self):
        if self.closed:
            return "KVCache(closed)"
        shared = [layer for layer in self._layers if getattr(layer, "share_of", None) is not None]
        kinds = [f"{n} of {kind.n_kv_heads} heads of {kind.head_dim} {kind.dtype}"
                 + (f" with a window of {kind.window}" if kind.window else "")
                 for kind, n in kinds_of(self._layers).items()]
        if shared:
            kinds.append(f"{len(shared)} that share rows")
        if self._states is not None:
            states = format_count(len(self._states.states), "state")
            kinds.append(f"{states} of {format_bytes(self._states.state_bytes)}")
        batch = f", batch {self._batch}" if self._batch > 1 else ""
        batch += ", rows by head" if self.order == "head" else ""
        batch += ", growing" if self.grow else ""
        return (f"KVCache({self.seq_len} of {self._max_seq_len} tokens, {self._n_layers} layers: "
                f"{', '.join(kinds)}{batch}, {format_bytes(self.capacity_bytes)})")

    def __del__(self):
        if self._layers and not self._closed:
            said = f"unclosed '{self.name}': {self!r}"
            self.end()  # first: the parts say nothing of their own
            warnings.warn(said, ResourceWarning, stacklevel=1, source=self)
