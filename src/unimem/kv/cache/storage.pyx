# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True
"""The memory under a KV cache: where its lanes lie, how they grow, and what is given back.

      fixed    | K of layer 0 | V of layer 0 | K of layer 1 | ...        one piece, taken at once
      growing  | K: [given back][committed   ][reserved      ] | V: ...  rows _low to _high
      ring     | K | K again | V | V again | ...                         each memfd mapped twice

A growing cache commits whole steps (pages) of each lane; all lanes have the same rows. Memory under
a view stays until the view has gone: a `Settler` waits for it.
"""
import math
import weakref

import numpy as np

from unimem._core import guard
from unimem.errors import CacheFull, CapacityError, ClosedError, FrozenError, PlacementError
from unimem.base.text import format_bytes

cimport cython
cimport numpy as cnp
from cpython.ref cimport PyObject
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memmove

from unimem._core cimport native as um
from unimem._core.arrays cimport dtype_of, new_array, size_of
from unimem._core.block cimport Block
from unimem._core.lock cimport hold, let_go
from unimem.kv.inputs cimport layer_number
from unimem.kv.types cimport rounded
from unimem.kv.cache.rows cimport KVRows, is_v
from unimem._core.region cimport Region, Watcher, enter_holder, new_window, n_references
from unimem._core.status cimport raise_file_status, raise_status
from unimem._core.tape cimport Tape

#: from unimem.system.placement import Placement

cnp.import_array()

cdef enum:
    HUGE_BYTES = 2 << 20
    # The most that a growing cache takes of a lane in advance, and keeps when it becomes shorter.
    MOST_SPARE_BYTES = 2 << 20
# More address space than a process has.
cdef object MOST_BYTES = 1 << 47


cdef struct Move:
    void *to
    const void *from_
    size_t nbytes


cdef void _run_move(void *context) noexcept nogil:
    cdef Move *move = <Move *>context
    memmove(move.to, move.from_, move.nbytes)


cdef um.um_status _move_guarded(void *context, void *to, const void *from_,
                                size_t nbytes) noexcept:
    """Move rows under the guard: pages of a file may be lost."""
    cdef um.um_block *block = <um.um_block *>context
    cdef Move move
    move.to, move.from_, move.nbytes = to, from_, nbytes
    return um.um_guard_run(block.base, block.reserved_nbytes, _run_move, &move, NULL)


cdef size_t least_row(size_t row, size_t v_row) noexcept:
    """Return the bytes of the smaller row of K and V; there may be no V."""
    return row if v_row == 0 else min(row, v_row)


def ring_rows(size_t row_bytes, size_t v_row_bytes, uint64_t n, pages: str) -> int:
    """Return the rows of a ring for n tokens: its lanes of K and of V are whole pages."""
    cdef size_t page = um.um_page_bytes()
    if pages == "1g":
        page = 1 << 30
    elif pages == "2m" or (pages == "thp"
                           and n * least_row(row_bytes, v_row_bytes) >= HUGE_BYTES):
        page = max(um.um_huge_page_bytes(), HUGE_BYTES)
    return rounded(n, math.lcm(page // math.gcd(page, row_bytes),
                               page // math.gcd(page, v_row_bytes)))


cdef object bytes_in(list ranges):
    return sum([nbytes for _, nbytes in ranges])


cdef class Settler(Watcher):
    """What a region calls when a view has gone: memory may be given back."""

    cdef int window_ended(self) except -1:
        cdef KVStorage cache = self.cache()
        if cache is None:
            return 0
        whole = None if cache._whole is None else cache._whole()
        whole = cache if whole is None else whole
        with cython.critical_section(whole):
            cache._waiting = False
            try:
                if not cache.closed:
                    cache.settle()
            except Exception:  # the view goes even if memory cannot be given back
                return 0
        return 0


cdef class KVStorage(KVRows):
    """The storage of rows in main memory: fixed, growing or a ring."""
    #: tape: Tape | None
    #: block: Block | None

    cdef int place_fixed(self, um.um_kv_spec *spec, Tape tape, dict placement) except -1:
        cdef um.um_kv_storage storage
        cdef size_t total = self.plan_fixed(spec, &storage)
        cdef void *base
        if tape is None:
            self.block = Block(total, name=self.name, category="kv", **placement)
            self.block._is_part = True
            self._region = self.block.region()
            base = self._region.block.base
        else:
            base = tape.take_raw(total)
            self.tape = tape
            self._begin = <uintptr_t>base - <uintptr_t>tape.tape.base
        storage.base = base
        return self.start(spec, &storage)

    cdef int place_growing(self, um.um_kv_spec *spec, dict placement) except -1:
        cdef um.um_kv_storage storage
        cdef um.um_error err
        cdef size_t row = self.check_row(spec), v_row = self._v_row, step
        # Twice the tokens, so that trims and appends in turn seldom move any.
        cdef uint64_t n_rows = 2 * spec.max_seq_len
        cdef object n_pairs = self._n_lanes // 2
        pages = placement.get("pages", "auto")
        huge_bytes = HUGE_BYTES * <object>self._n_lanes
        if pages == "auto" and (<object>n_rows * least_row(row, v_row) < HUGE_BYTES or (
                self.budget_bytes is not None and self.budget_bytes < 4 * huge_bytes)):
            pages = "4k"  # huge pages are larger than the lanes, or the budget has too few
        unit = {"4k": um.um_page_bytes(), "1g": 1 << 30}.get(
            pages, max(um.um_huge_page_bytes(), HUGE_BYTES))
        lane, v_lane = [-(-<object>n_rows * size // unit) * unit for size in (row, v_row)]
        reserve = n_pairs * (lane + v_lane)
        if reserve >= MOST_BYTES:
            raise ValueError(f"KVCache: {spec.max_seq_len} tokens need {format_bytes(reserve)} of "
                             "address space, more than a process has: expected a smaller "
                             "max_seq_len")
        placement = placement | {"pages": pages}
        # A block begins with one step. It is given back, since all lanes grow alike.
        self.block = Block(1, name=self.name, category="kv", reserve=reserve, **placement)
        self.block._is_part = True
        self._region = self.block.region()
        step = self._region.block.step_nbytes
        if self.budget_bytes is not None:
            least = n_pairs * (rounded(row, step) + rounded(v_row, step))
            if least > self.budget_bytes:
                raise CacheFull(f"KVCache: budget_bytes={self.budget_bytes} is less than a token "
                                f"needs on pages of {format_bytes(step)}, {least} bytes",
                                self.budget_bytes, 0, least)
        if um.um_block_release(&self._region.block, 0, step, NULL, &err) != um.UM_OK:
            raise_status(err.status, &err, "KVCache")
        self.grow = True
        storage.base = self._region.block.base
        storage.lane_stride, storage.v_lane_stride = lane, v_lane
        storage.n_rows = n_rows
        storage.usable_rows = 0
        return self.start(spec, &storage)

    cdef int place_ring(self, um.um_kv_spec *spec, uint64_t spare_rows, dict placement) except -1:
        cdef um.um_kv_storage storage
        cdef size_t row = self.check_row(spec), v_row = self._v_row
        cdef object token = self._n_lanes // 2 * (<object>row + v_row)
        cdef uint64_t n_rows
        if (<object>spec.window + spare_rows) * token >= MOST_BYTES // 2:
            raise ValueError(f"KVCache: a ring of {spec.window} rows and {spare_rows} to spare is "
                             "too large: expected below 2**46 bytes, since a ring is mapped twice: "
                             "take a smaller window, or fewer spare_rows")
        n_rows = ring_rows(row, v_row, spec.window + spare_rows,
                           placement.get("pages", "auto"))
        total = n_rows * token
        if self.budget_bytes is not None and total > self.budget_bytes:
            raise CacheFull(f"KVCache: a ring of {n_rows} rows, in whole pages, needs {total} "
                            f"bytes, and budget_bytes is {self.budget_bytes}", self.budget_bytes,
                            0, total)
        if placement.get("pages") == "thp":
            # Shared memory gets huge pages only by collapsing pages in RAM.
            placement = {"warm": True} | placement
        other = 0 if row == v_row else n_rows * v_row
        self.block = Block._mirrored(total, n_rows * row, other_bytes=other, run=spec.batch,
                                     name=self.name, **placement)
        self.block._is_part = True
        self._region = self.block.region()
        self._storage_bytes = total
        storage.base = self._region.block.base
        storage.lane_stride, storage.v_lane_stride = 2 * n_rows * row, 2 * n_rows * v_row
        storage.n_rows = storage.usable_rows = n_rows
        return self.start(spec, &storage)

    cdef int overlay(self, int fd, str path, list offsets, uint64_t n) except -1:
        cdef um.um_error err
        cdef um.um_block *block = &self.open_region().block
        cdef size_t lane, begin, nbytes
        cdef uint64_t offset
        cdef um.um_status status
        if n == 0:
            return 0
        self._file = self._region.file = path
        um.um_kv_set_mover(&self.kv, _move_guarded, block)
        for lane in range(self._n_lanes):
            if self.lane_row(lane) == 0:  # there is no V
                continue
            begin = self.lane_offset(lane)
            nbytes = rounded(n * self.lane_row(lane), block.step_nbytes)
            offset = offsets[lane]
            hold(&self._region.lock)
            status = um.um_block_overlay(block, begin, fd, offset, nbytes, &err)
            let_go(&self._region.lock)
            if status != um.UM_OK:
                if err.detail == um.UM_BLOCK_PAST_FILE:
                    err.status = um.UM_E_IO  # it was inside when the header was read
                raise_file_status(err.status, &err, "KVCache.restore", path)
        self._high = self.whole_to(n)
        return self._set_usable()

    # ---- lanes, in the order of the storage ----

    @cython.final
    cdef size_t lane_offset(self, size_t lane) noexcept:
        """Return where the rows of a lane begin in the block."""
        cdef size_t batch = self.kv.spec.batch
        cdef char *rows = <char *>um.um_kv_lane(&self.kv, lane // batch // 2, lane // batch % 2,
                                                lane % batch)
        return rows - <char *>self._region.block.base

    @cython.final
    cdef size_t lane_row(self, size_t lane) noexcept:
        """Return the bytes of a row of a lane."""
        return self.kv.row_bytes if lane // self.kv.spec.batch % 2 == 0 else self.kv.v_row_bytes

    # ---- what is there ----

    cdef int start(self, um.um_kv_spec *spec, um.um_kv_storage *storage) except -1:
        KVRows.start(self, spec, storage)
        enter_holder(self)
        return 0

    @cython.critical_section
    def _ledger_parts(self):
        cdef Region region = self.held()
        cdef uintptr_t address
        cdef size_t nbytes = self._storage_bytes
        if region is None or self._closed:
            return ()
        address = <uintptr_t>region.block.base + self._begin
        if self.tape is None:
            nbytes = region.memory_bytes()
        elif not self.tape._holds(address, nbytes):
            return ()
        return (("kv", address, nbytes, self.used_bytes(), self.most_bytes()),)

    @cython.final
    cdef Region held(self):
        cdef Region found
        if self.tape is not None:
            return self.tape.held()
        hold(&self._guard)
        found = self._region
        let_go(&self._guard)
        return found

    cdef Region open_region(self):
        cdef Region region = self.held()
        if region is None or self._closed:
            if self.tape is not None and not self._closed:
                self.tape.check_open()
            raise ClosedError(f"KVCache '{self.name}' is closed")
        if region.block.base == NULL:
            raise ClosedError(f"KVCache '{self.name}' is shared memory, which a forked child does "
                              "not have: make or restore a cache there")
        return region

    cdef list images(self, first, end):
        cdef size_t whole = self.kv.n_rows
        return [(max(first + shift, 0), min(end + shift, 2 * whole))
                for shift in (-2 * <object>whole, -<object>whole, 0, whole)]

    cdef list ranges_but(self, uint64_t n):
        cdef uint64_t last = um.um_kv_next_position(&self.kv), whole = self.kv.n_rows
        cdef uint64_t first = um.um_kv_row(&self.kv, last - n)
        if self.kv.spec.window != 0:
            return self.images(first + n, first + whole)
        return [(0, first), (self.end_row(), whole)]

    cdef int check_droppable(self, uint64_t n) except -1:
        if self._n_busy or self.has_views(self.ranges_but(n)):
            raise BufferError(f"KVCache '{self.name}': views, or another thread that copies, use "
                              "memory that would be given back: drop them first")
        return 0

    cdef list dead_ranges(self):
        cdef uint64_t oldest, held, first, whole = self.kv.n_rows
        if self.kv.spec.window == 0:
            return [(0, self.first_row()), (self.end_row(), whole)]
        # Tokens that a crop may bring back into the window are kept, too.
        oldest = min(um.um_kv_oldest_position(&self.kv), self.end_position())
        held = min(self.end_position() + self._reserved - oldest, self.kv.n_rows)
        first = um.um_kv_row(&self.kv, oldest)
        return self.images(first + held, first + whole)

    # ---- growing: rows from _low to _high are committed, in whole steps of each lane ----

    @cython.final
    cdef uint64_t whole_from(self, uint64_t row) noexcept:
        """Return the first row that lies wholly in the steps of rows from `row` on."""
        return max(self.first_whole(row, self.kv.row_bytes),
                   self.first_whole(row, self.kv.v_row_bytes))

    @cython.final
    cdef uint64_t first_whole(self, uint64_t row, size_t nbytes) noexcept:
        """As `whole_from`, in lanes with rows of `nbytes` bytes."""
        cdef size_t step = self._region.block.step_nbytes
        return 0 if nbytes == 0 else (row * nbytes // step * step + nbytes - 1) // nbytes

    @cython.final
    cdef uint64_t whole_to(self, uint64_t row) noexcept:
        """Return the row behind the last that lies wholly in the steps of rows up to `row`."""
        return min(self.kv.n_rows, min(self.end_whole(row, self.kv.row_bytes),
                                       self.end_whole(row, self.kv.v_row_bytes)))

    @cython.final
    cdef uint64_t end_whole(self, uint64_t row, size_t nbytes) noexcept:
        """As `whole_to`, in lanes with rows of `nbytes` bytes."""
        cdef size_t step = self._region.block.step_nbytes
        return self.kv.n_rows if nbytes == 0 else rounded(row * nbytes, step) // nbytes

    @cython.final
    cdef list steps_of(self, uint64_t first, uint64_t end, uint64_t but_first, uint64_t but_end):
        """Return the steps of each lane that cover rows [first, end) and not [but_first, but_end).

        The latter lie at one end of the former. A step is an offset in the block, and bytes.
        """
        cdef size_t step = self._region.block.step_nbytes, lane, row, begin, stop
        cdef list found = []
        for lane in range(self._n_lanes if first < end else 0):
            row = self.lane_row(lane)
            begin, stop = first * row // step * step, rounded(end * row, step)
            if but_first < but_end and but_first <= first:
                begin = max(begin, rounded(but_end * row, step))
            elif but_first < but_end:
                stop = min(stop, but_first * row // step * step)
            if begin < stop:
                found.append((self.lane_offset(lane) + begin, stop - begin))
        return found

    cdef list spare_ranges(self, bint exactly):
        cdef size_t step = self._region.block.step_nbytes
        cdef size_t row = max(self.kv.row_bytes, self.kv.v_row_bytes)
        cdef uint64_t first = self.first_row(), end = self.end_row(), high, spare
        if first == end:
            # There are no tokens. Memory at the beginning is kept for the next ones, unless it is
            # mapped from a file.
            exactly = exactly or self.mapped(0, self.kv.n_rows) != NULL
            spare = max(step // row, <size_t>1)
            high = min(spare, self._high) if self._low == 0 and not exactly else self._low
            return [(self._low, self._low), (high, self._high)]
        spare = min((end - first) * row // 4, <size_t>MOST_SPARE_BYTES) // step * step + step
        spare = 0 if exactly else (spare + row - 1) // row
        # Twice the spare memory may stay, or the next token would take it again.
        high = self._high if self._high <= self.whole_to(end + 2 * spare) else (
            self.whole_to(end + spare))
        return [(self._low, self.whole_from(first)), (high, self._high)]

    cdef int _grow_to(self, uint64_t rows) except -1:
        cdef size_t step = self.open_region().block.step_nbytes
        cdef size_t row = max(self.kv.row_bytes, self.kv.v_row_bytes)
        cdef uint64_t needed = self.whole_to(rows), wanted = needed
        cdef uint64_t used = self._high - self._low, half
        if used > 0:
            wanted += min(used * row // 4, <size_t>MOST_SPARE_BYTES) // step * step // row
            wanted = self.whole_to(wanted)
        if self.budget_bytes is not None:
            rows = wanted
            wanted = needed
            while wanted < rows:
                half = wanted + (rows - wanted + 1) // 2
                if bytes_in(self.steps_of(self._low, half, 0, 0)) <= self.budget_bytes:
                    wanted = half
                else:
                    rows = half - 1
            wanted = max(needed, self.whole_to(wanted))
        try:
            self._commit_rows(self._high, wanted)
        except (CapacityError, PlacementError):
            if wanted == needed:
                raise
            wanted = needed  # no memory in advance
            self._commit_rows(self._high, wanted)
        self._high = wanted
        self._set_usable()
        return 0

    cdef int _set_usable(self) except -1:
        cdef um.um_error err
        if um.um_kv_set_usable(&self.kv, self._high, &err) != um.UM_OK:
            raise_status(err.status, &err, f"KVCache '{self.name}'")
        return 0

    cdef int _commit_rows(self, uint64_t first, uint64_t end) except -1:
        """Commit rows of all lanes, and bring them into RAM, or change nothing."""
        cdef Region region = self.open_region()
        cdef list lanes = self.steps_of(first, end, self._low, self._high)
        asked = bytes_in(lanes)
        if asked == 0:
            return 0
        if self._frozen:
            raise FrozenError(f"KVCache '{self.name}': {asked} bytes more would have to be "
                              "committed, and the layout is frozen: thaw() it, or let the cache "
                              "grow first")
        if self.budget_bytes is not None and self.capacity_bytes + asked > self.budget_bytes:
            raise CacheFull(f"KVCache '{self.name}': {asked} bytes more are needed, and "
                            f"{self.capacity_bytes} of budget_bytes={self.budget_bytes} are used",
                            self.budget_bytes, self.capacity_bytes, asked)
        self.block.commit_ranges(lanes)
        try:
            for begin, nbytes in lanes:
                self.block.populate(region, begin, nbytes, 1, None, 0, nbytes)
        except BaseException:
            self._release(lanes)
            raise
        self._n_growths += 1
        return 0

    cdef int take_beside(self, uint64_t end) except -1:
        cdef KVStorage other
        cdef um.um_error err
        cdef uint64_t first = 0, row = 0, held, n
        for other in self._beside:
            held = um.um_kv_layer_len(&other.kv, 0, &first)
            n = max(end, first + held) - first - held
            while um.um_kv_append_begin(&other.kv, 0, n, &row, &err) != um.UM_OK:
                if not other.find_rows(&err, n):
                    other.fail(&err, "append")
        return self.limit_end()

    cdef int limit_end(self) except -1:
        cdef KVStorage other
        cdef uint64_t end = <uint64_t>-1, first
        for other in self._beside:
            first = um.um_kv_oldest_position(&other.kv)
            end = min(end, first + other.kv.spec.max_seq_len)
            end = min(end, first + other.kv.usable_rows - um.um_kv_row(&other.kv, first))
        um.um_kv_limit_end(&self.kv, end)
        return 0

    cdef int take_rows(self, uint64_t row, uint64_t n) except -1:
        if self._beside is not None:
            return self.take_beside(row + n)  # the position where the ring will end
        if self.grow and n <= self.kv.n_rows - row:
            return self._grow_to(row + n)
        return KVRows.take_rows(self, row, n)

    cdef int start_over(self, uint64_t rows) except -1:
        cdef uint64_t target
        self.open_region()
        if not self.grow:
            return KVRows.start_over(self, rows)
        target = min(self.whole_to(rows), self._low)
        ranges = [(0, target), (self._low, self._high)]
        self.check_movable(ranges)
        self._commit_rows(0, target)
        try:
            self.check_movable(ranges)  # another thread may have run meanwhile
            self.move_to(0)
        except BaseException:
            self._release(self.steps_of(0, target, self._low, self._high))
            raise
        if target < self._low:
            self._release(self.steps_of(self._low, self._high, 0, target))
            self._high = target
        self._low = 0
        self._set_usable()
        return 0

    # ---- giving back ----

    cdef int _release(self, list ranges) except -1:
        """Give steps back. Those that the system refuses stay committed, unused."""
        cdef size_t begin, nbytes
        for begin, nbytes in ranges:
            if self._region.release_unused(begin, nbytes, 0, NULL, NULL) != um.UM_OK:
                self._left_behind = True
        return 0

    cdef int settle(self, bint exactly=False) except -1:
        cdef Region region = self.open_region()
        cdef um.um_status status = um.UM_OK, found
        cdef size_t lane
        if self._n_busy:
            self._postponed = True
            return 0
        if self._frozen and not exactly:
            # Memory stays in RAM: new tokens must not fault, and cannot commit.
            self._stay_inside()
            return 0
        if not self.grow and not exactly and self._dropped < region.block.step_nbytes:
            return 0
        ranges = self.spare_ranges(exactly) if self.grow else self.dead_ranges()
        if not self.grow and not exactly and self.kv.spec.window == 0:
            ranges = ranges[:1]  # no token behind the last was dropped
        if self.has_views(ranges):
            if not self._waiting:
                self._waiting = True
                if self._settler is None:
                    self._settler = Settler.__new__(Settler)
                    self._settler.cache = weakref.ref(self)
                region.watch(self._settler)
            # Making the watch may have collected the last view.
            if self.has_views(ranges):
                self._stay_inside()
                return 0
        if self.grow:
            self._shrink(ranges)
        else:
            # Only the first image of a ring: the second is the same memory.
            ranges = [(first, min(end, self.kv.n_rows)) for first, end in ranges]
            for lane in range(self._n_lanes):
                for first, end in ranges:
                    if first < end:
                        found = self.discard(region, lane, first, end)
                        status = status or found
            if status == um.UM_OK:
                self._dropped = 0  # or the next call tries again
        return 0

    cdef um.um_status discard(self, Region region, size_t lane, uint64_t first,
                              uint64_t end) noexcept:
        """Give back the pages under rows of a lane."""
        cdef size_t batch = self.kv.spec.batch, row = self.lane_row(lane)
        cdef um.um_status status
        cdef char *rows = <char *>um.um_kv_lane(&self.kv, lane // batch // 2, lane // batch % 2,
                                                lane % batch)
        if row == 0 or first == end:  # there is no V, or no row
            return um.UM_OK
        hold(&region.lock)
        status = um.um_block_discard(&region.block, rows - <char *>region.block.base + first * row,
                                     (end - first) * row, NULL, NULL)
        let_go(&region.lock)
        return status

    cdef int _shrink(self, list ranges) except -1:
        cdef bint empty = self.first_row() == self.end_row()
        cdef uint64_t low, high
        (first, low), (high, end) = ranges
        if self._left_behind:
            first, end = 0, self.kv.n_rows
            self._left_behind = False
        elif first >= low and high >= end:
            return 0
        self._release(self.steps_of(first, low, low, high))
        self._release(self.steps_of(high, end, low, high))
        self._low, self._high = max(self._low, low), min(self._high, high)
        if self._low >= self._high:
            self._low = self._high = 0
        if empty:
            self._stay_inside()
        self._set_usable()
        return 0

    cdef int _stay_inside(self) except -1:
        """Let an empty growing cache continue in committed rows."""
        cdef uint64_t first = self.first_row()
        cdef bint inside = self._low <= first <= self._high
        if self.grow and not inside and first == self.end_row():
            self.move_to(self._low)
        return 0

    @cython.critical_section
    def give_back(self) -> int:
        """Give back memory that holds no tokens. No token is lost, and no address changes.

        A growing cache gives back all spare memory, and commits it again when it needs it. Fixed
        storage and a ring give back the pages before and behind the tokens; new tokens fault them
        in again.

        Returns
        -------
        int
            The bytes that were given back: 0 if there are none, if the memory is locked, in hugetlb
            pages or under views, if another thread writes, or if the cache is closed or attached to
            a frozen layout.
        """
        if self.closed or self._frozen or self._writing or self._n_busy:
            return 0
        before = self.capacity_bytes if self.grow else self.resident_bytes
        if self.closed or self._frozen or self._writing or self._n_busy:
            return 0  # another thread may have run meanwhile
        self.settle(True)
        return max(0, before - (self.capacity_bytes if self.grow else self.resident_bytes))

    # ---- rows that are mapped from a file ----

    cdef um.um_block *mapped(self, uint64_t row, uint64_t n) noexcept:
        cdef um.um_block *block
        cdef size_t lane
        if self._file is None:
            return NULL
        block = &self._region.block
        for lane in (0, self.kv.spec.batch):  # a lane of K, and one of V
            if um.um_block_is_overlaid(block, self.lane_offset(lane) + row * self.lane_row(lane),
                                       n * self.lane_row(lane)):
                return block
        return NULL

    cdef um.um_status trim(self, uint64_t n, uint64_t keep_first, uint64_t row,
                           um.um_error *err) except *:
        cdef um.um_status status = um.UM_OK
        cdef size_t nbytes = keep_first * max(self.kv.row_bytes, self.kv.v_row_bytes), lane, size
        cdef char *base = <char *>self.open_region().block.base
        cdef cnp.ndarray kept
        if self.mapped(0, self.kv.n_rows) == NULL or row == 0:
            return um.um_kv_trim(&self.kv, n, keep_first, err)
        # A lane may be lost when other lanes have moved: the tokens are restored.
        kept = np.empty((self._n_lanes, nbytes), np.uint8)
        for lane in range(self._n_lanes):
            size = self.lane_row(lane)
            status = um.um_guard_copy(cnp.PyArray_BYTES(kept) + lane * nbytes,
                                      base + self.lane_offset(lane) + row * size,
                                      keep_first * size, err)
            if status != um.UM_OK:
                return status
        status = um.um_kv_trim(&self.kv, n, keep_first, err)
        if status != um.UM_OK:
            for lane in range(self._n_lanes):
                size = self.lane_row(lane)
                _move_guarded(&self._region.block, base + self.lane_offset(lane) + row * size,
                              cnp.PyArray_BYTES(kept) + lane * nbytes, keep_first * size)
        return status

    # ---- rows as bytes, to be copied, saved and restored ----

    cdef object _lane_rows(self, layer, part, stream, uint64_t row, uint64_t n):
        cdef Region region = self.open_region()
        cdef bint v = is_v(part)
        cdef char *data = <char *>um.um_kv_lane(&self.kv, layer, v, stream)
        cdef size_t row_bytes = self.kv.v_row_bytes if v else self.kv.row_bytes
        cdef cnp.npy_intp nbytes = n * row_bytes
        data += row * row_bytes
        window = new_window(region, data - <char *>region.block.base, nbytes)
        return new_array(data, 1, &nbytes, NULL, dtype_of("uint8"), window, True)

    cdef int copy_rows(self, out, rows) except -1:
        """Copy rows that `_rows` returned, under the guard if they may be mapped from a file."""
        if out.nbytes != rows.nbytes:
            raise RuntimeError(f"KVCache '{self.name}': another thread changed it during the copy: "
                               "copy it again")
        if self._file is None:
            np.copyto(out, rows)
        else:
            guard.copy(out, rows.ctypes.data, rows.nbytes, self._file)
        return 0

    @cython.critical_section
    def _rows(self, layer: int, part: Literal["k", "v"], stream: int) -> npt.NDArray[np.uint8]:
        """View the bytes of one lane, of the tokens that all layers hold."""
        cdef uint64_t first = um.um_kv_first_position(&self.kv)
        return self._lane_rows(layer, part, stream, um.um_kv_row(&self.kv, first),
                               um.um_kv_seq_len(&self.kv))

    @cython.critical_section
    def _rows_at(self, layer: int, part: Literal["k", "v"], stream: int, position: int,
                 n: int) -> npt.NDArray[np.uint8]:
        """View the bytes of one lane, of n present or future tokens from a position on."""
        return self._lane_rows(layer, part, stream, um.um_kv_row(&self.kv, position), n)

    @cython.critical_section
    def _restore_rows(self, layer: int, part: Literal["k", "v"], stream: int, n: int,
                      next_position: int) -> npt.NDArray[np.uint8]:
        """View where n tokens up to a position go, in one lane."""
        row = 0 if self.kv.spec.window == 0 else (next_position - n) % self.kv.n_rows
        return self._lane_rows(layer, part, stream, row, n)

    # ---- figures and the end ----

    @property
    def capacity_bytes(self) -> int:
        """Bytes of memory that back the cache; of a growing one, the committed bytes."""
        if self.grow and not self.closed:
            return self._region.block.committed_nbytes
        return self._storage_bytes

    @property
    @cython.critical_section
    def resident_bytes(self) -> int:
        """Bytes of the storage that are in RAM, in whole pages, once each (Pss)."""
        self.open_region()
        if self.tape is None:
            return self.block.verify().pss_bytes
        return self.tape.block._resident_range(self._begin, self._storage_bytes)

    @property
    def granted(self) -> Placement:
        """The placement of the memory, as the kernel reports it."""
        self.open_region()
        return (self.block if self.tape is None else self.tape.block).granted

    @property
    def closed(self) -> bool:
        """Whether the cache was closed (or never made), or is a ring in a forked child."""
        if self._closed or self.tape is not None:
            return self._closed or self.tape.closed
        return self._region is None or self._region.block.base == NULL

    @cython.critical_section
    def warm(self, threads: int | None = None) -> None:
        """Bring the storage into RAM, as `Block.warm`; of a growing cache, the committed memory."""
        cdef Region region = self.open_region()
        if self.tape is not None:
            self.tape.block._warm_range(self._begin, self._storage_bytes, threads)
        elif not self.grow:
            self.block.warm(threads)
        elif self._high > self._low:
            n_threads = self.block.check_threads(threads)
            self._n_busy += 1
            try:
                for begin, size in self.steps_of(self._low, self._high, 0, 0):
                    self.block.populate(region, begin, size, n_threads, None, 0, size)
            finally:
                self.end_busy()

    def _freeze(self, bint frozen) -> None:
        """Forbid, or allow again, to commit memory and to give it back unasked."""
        self._frozen = frozen

    cdef Py_ssize_t n_users(self):
        # The block and this cache hold the region; all other references are views.
        return 0 if self._region is None else n_references(<PyObject *>self._region) - 2

    cdef object end(self):
        cdef Region last
        self._closed = True
        hold(&self._guard)
        last = self._region
        self._region = None
        let_go(&self._guard)
        last = None
        if self.block is not None:
            self.block.__exit__()

    # ---- for unimem.transformers, which writes rows itself ----

    @cython.critical_section
    def _append_begin(self, layer: int, n: int) -> int:
        """Make room for n tokens of a layer, and return the row of the first.

        Raises
        ------
        CacheFull, CapacityError, MemoryError, PlacementError, RuntimeError, BufferError
            As `append`.
        """
        cdef um.um_error err
        cdef uint64_t row = 0, count = size_of(n, "n")
        cdef uint32_t index = layer_number(layer, self.kv.spec.n_layers, "layer")
        self.begin_change()
        while um.um_kv_append_begin(&self.kv, index, count, &row, &err) != um.UM_OK:
            if not self.find_rows(&err, count):
                self.fail(&err, "append")
        return row

    @cython.critical_section
    def _append_end(self, layer: int, n: int) -> None:
        """Count the n tokens of `_append_begin`, which were written."""
        cdef uint32_t index = layer_number(layer, self.kv.spec.n_layers, "layer")
        self.begin_change()
        um.um_kv_append_end(&self.kv, index, size_of(n, "n"))

    def _oldest_position(self) -> int:
        """Return the first position that still has a row in every layer, visible or not."""
        return um.um_kv_oldest_position(&self.kv)
