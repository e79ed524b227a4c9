"""Every kind of KV cache against the NumPy model: random calls, views that are held meanwhile, and
system calls that fail. A call that fails leaves all as it was.
"""

from __future__ import annotations

import errno
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

import unimem as um
from support.contracts import kv_model as kvm
from support.contracts.faulty_calls import FaultyCalls, Refusals
from support.contracts.kv_model import Array, given, same_bits, stored
from support.kernel import proc_maps
from support.project.tiers import examples

pytestmark = pytest.mark.usefixtures("gives_memory_back")

PAGE = proc_maps.PAGE

# None, or what fails: the nth system call with an errno, or the nth question for room.
FAULTS = st.one_of(
    st.none(),
    st.none(),
    st.tuples(st.integers(1, 6), st.sampled_from([errno.ENOMEM, errno.EAGAIN])),
    st.tuples(st.integers(1, 2), st.just(0)),
)
LAYERS = st.integers(0, 1)
ORDERS = st.sampled_from(["token", "head"])
# Of the tokens that are there; above 100, more than there are.
PERCENT = st.one_of(st.integers(0, 100), st.integers(0, 100), st.integers(0, 110))
# Whether tokens that some layers lack, and what is reserved, are dropped first.
WHOLE = st.sampled_from([True, True, True, False])
ROTATE = st.sampled_from([False, False, True])
SHORT = dict(zip(kvm.GIVEN_DTYPES, kvm.KV_DTYPES, strict=False))


@dataclass
class Held:
    """A view that is held, and what it must show as long as its rows are not written anew."""

    view: Array
    expected: Array
    layer: int
    rows: tuple[int, ...]
    clean: Array = field(init=False)

    def __post_init__(self) -> None:
        self.clean = np.ones(len(self.rows), bool)

    def written(self, layer: int, rows: set[int]) -> None:
        if layer == self.layer:
            self.clean &= [row not in rows for row in self.rows]


class CacheAgainstModel(FaultyCalls):
    """The rules of all caches. A kind says how it is made, and what its model is."""

    N_LAYERS, HEADS, DIM, MAX = 2, 2, 64, 40
    kv: um.KVCache
    model: kvm.Model

    @initialize(
        batch=st.sampled_from([1, 1, 2]),
        dtype=st.sampled_from(kvm.KV_DTYPES),
        order=ORDERS,
        rotate=ROTATE,
    )
    def make(self, batch: int, dtype: str, order: str, rotate: bool) -> None:
        self.dims = (self.N_LAYERS, self.HEADS, self.DIM)
        self.dtype, self.rotate = dtype, rotate
        heads = self.HEADS if order == "head" else 1
        row_bytes = kvm.Model(*self.dims, batch=batch, dtype=dtype, n_rows=1).row_bytes
        # Of a lane, and how many of them there are.
        self.row_bytes, self.n_lanes = row_bytes // heads, 2 * self.N_LAYERS * batch * heads
        self.kv = self.make_cache(batch=batch, dtype=dtype, order=order)
        assert (self.kv.order, self.kv.rotate) == (order, rotate)
        window = self.kv.window
        self.most = self.kv.n_rows if window else min(self.MAX, self.kv.n_rows)
        self.model = kvm.Model(
            *self.dims, batch=batch, dtype=dtype, n_rows=self.kv.n_rows, window=window
        )
        self.addresses = self.all_addresses()

    def make_cache(self, **options: Any) -> um.KVCache:
        raise NotImplementedError

    # ---- what a call may do ----

    def all_addresses(self) -> list[int]:
        return [self.kv.address(i, part) for i in range(self.N_LAYERS) for part in ("k", "v")]

    def row(self, position: int) -> int:
        """Where the model's first token of some layer really is says where the others are."""
        if self.model.window:
            return position % self.model.n_rows
        for layer in range(self.N_LAYERS):
            if shown := self.model.shown(layer):
                return kvm.first_row(self.kv, layer) + position - shown[0]
        return -1

    def write(self, layer: int, first: int, end: int) -> None:
        """Tokens of these positions were written."""
        rows = {self.row(position) for position in range(first, end)}
        for held in self.views:
            held.written(layer, rows)

    def is_held(self, rows: set[int], layers: range | None = None) -> bool:
        """Whether a view surely lies over one of these rows."""
        return any(
            rows & set(held.rows) and held.layer in (layers or range(self.N_LAYERS))
            for held in self.views
        )

    def room(self, layer: int, n: int) -> tuple[Refusals, Refusals]:
        """How n more tokens of a layer must be refused, and how they may be."""
        model = self.model
        if model.reserved:
            return RuntimeError, ()
        if model.window:
            return (), ()
        used = model.end[layer] - model.first
        if n > self.most - used:
            return um.CacheFull, ()
        may = self.over_budget(n)
        most = max(end - model.first for end in model.end)
        # Without tokens, the row that the next one was to have: only the cache knows it.
        row = self.row(model.first) if most else self.kv.row_of(model.next_position)
        if row + most + n > model.n_rows and self.views:
            may += (BufferError,)  # the tokens move to row 0
            if row + used + n > model.n_rows and self.is_held(set(range(most))):
                return BufferError, may
        return (), may

    def over_budget(self, n: int) -> tuple[type[Exception], ...]:
        """Whether the budget may be in the way."""
        return ()

    def kept(self, k: Array, v: Array) -> list[Array]:
        """What the cache makes of K and V."""
        how = self.dtype, self.rotate
        return [kvm.kept(k, "k", *how), kvm.kept(v, "v", *how)]

    # ---- the calls ----

    @rule(
        layer=LAYERS,
        n=st.integers(0, 20),
        dtype=st.sampled_from(kvm.GIVEN_DTYPES),
        how=st.sets(st.sampled_from(["token-major", "strided", "as stored"])),
        fault=FAULTS,
    )
    def append(self, layer: int, n: int, dtype: str, how: set[str], fault: Any) -> None:
        shape = (self.model.batch, self.HEADS, n, self.DIM)
        arguments = [given(self.rng, shape, dtype) for _ in range(2)]
        if "as stored" in how:
            arguments = [stored(row, self.dtype) for row in arguments]
        kept = self.kept(*arguments)
        if "token-major" in how and self.model.batch == 1:
            arguments = [row[0].swapaxes(0, 1) for row in arguments]
        if "strided" not in how:
            arguments = [np.ascontiguousarray(a) for a in arguments]
        must, may = self.room(layer, n)
        if self.attempt(lambda: self.kv.append(layer, *arguments), must=must, may=may, fault=fault):
            first = self.model.end[layer]
            self.model.append(layer, kept[0], kept[1])
            self.write(layer, first, first + n)

    def make_whole(self, wanted: bool) -> None:
        if wanted and not self.model.is_whole:
            self.rollback()

    @rule(
        n=st.one_of(st.integers(1, 9), st.integers(1, 30)),
        dtype=st.sampled_from(kvm.GIVEN_DTYPES),
        fault=FAULTS,
        whole=WHOLE,
    )
    def append_to_all(self, n: int, dtype: str, fault: Any, whole: bool) -> None:
        """Whole tokens, which the other rules would seldom make."""
        self.make_whole(whole)
        for layer in range(self.N_LAYERS):
            self.append(layer, n, dtype, set(), fault)

    @rule(dtype=st.sampled_from(kvm.GIVEN_DTYPES), fault=FAULTS)
    def append_all(self, dtype: str, fault: Any) -> None:
        shape = (self.N_LAYERS, self.HEADS, self.DIM)
        k, v = given(self.rng, shape, dtype), given(self.rng, shape, dtype)
        must, may = self.room(0, 1)
        if self.model.batch != 1:
            must = ValueError
        elif not self.model.is_whole:
            must = RuntimeError
        if self.attempt(lambda: self.kv.append_all(k, v), must=must, may=may, fault=fault):
            end = self.model.next_position
            for layer in range(self.N_LAYERS):
                token = [part[None, :, None] for part in self.kept(k[layer], v[layer])]
                self.model.append(layer, token[0], token[1])
                self.write(layer, end, end + 1)

    @rule(n=st.integers(0, 20), fault=FAULTS, whole=WHOLE)
    def reserve(self, n: int, fault: Any, whole: bool) -> None:
        self.make_whole(whole)
        must, may = self.room(0, n)
        if n == 0:
            must = ValueError
        elif not self.model.is_whole:
            must = RuntimeError
        elif self.model.window and n > self.model.n_rows:
            must = um.CacheFull
        if got := self.attempt(lambda: self.kv.reserve(n), must=must, may=may, fault=fault):
            (self.reserved_row,) = got
            end = self.model.next_position
            if self.model.window or self.model.seq_len:
                assert self.reserved_row == self.row(end)
            self.model.reserve(n)

    @rule(n=st.integers(0, 12))
    @precondition(lambda self: self.model.reserved or self.model.seq_len % 5 == 0)
    def commit(self, n: int) -> None:
        if n > self.model.reserved or not self.model.reserved:
            must = ValueError if self.model.reserved else RuntimeError
            self.attempt(lambda: self.kv.commit(n), must=must)
            return
        count = self.model.reserved
        shape = (self.model.batch, self.HEADS, count, self.DIM)
        new = [
            [stored(given(self.rng, shape, "float32"), self.model.dtype) for _ in range(2)]
            for _ in range(self.N_LAYERS)
        ]
        rows = {self.reserved_row + i for i in range(count)}
        if self.model.window:
            rows = {row % self.model.n_rows for row in rows}
        for layer, parts in enumerate(new):
            for part, tokens in enumerate(parts):
                kvm.write_rows(self.kv, layer, part, self.reserved_row, tokens)
            for held in self.views:
                held.written(layer, rows)
        self.kv.commit(n)
        self.model.reserved = 0
        for layer, (k, v) in enumerate(new):
            self.model.append(layer, k[:, :, :n], v[:, :, :n])

    @rule()
    def rollback(self) -> None:
        self.kv.rollback()
        self.model.rollback()

    @rule(percent=PERCENT, fault=FAULTS, whole=WHOLE)
    def crop(self, percent: int, fault: Any, whole: bool) -> None:
        self.make_whole(whole)
        n = self.part(percent)
        must: Refusals = ()
        if not self.model.is_whole:
            must = RuntimeError
        elif n > self.model.seq_len or n < self.model.least_crop():
            must = ValueError
        if self.attempt(lambda: self.kv.crop(n), must=must, fault=fault):
            self.model.crop(n)

    @rule(percent=PERCENT, keep_first=st.sampled_from([0, 0, 1, 3, 12]), fault=FAULTS, whole=WHOLE)
    def trim_to(self, percent: int, keep_first: int, fault: Any, whole: bool) -> None:
        self.make_whole(whole)
        model, n = self.model, self.part(percent)
        must: Refusals = ()
        may: Refusals = ()
        if model.window and keep_first:
            must = ValueError
        elif not model.is_whole:
            must = RuntimeError
        elif keep_first and n + keep_first < model.seq_len:
            last = model.next_position - n
            rows = {self.row(position) for position in range(last - keep_first, last)}
            if self.is_held(rows):
                must = BufferError
            elif self.views:
                may = BufferError
        if must is RuntimeError and self.views:
            must = (RuntimeError, BufferError)
        if got := self.attempt(
            lambda: self.kv.trim_to(n, keep_first=keep_first), must=must, may=may, fault=fault
        ):
            assert got[0] is model.trim_to(n, keep_first)

    @rule(percent=PERCENT, more=st.integers(0, 100), fault=FAULTS, whole=WHOLE)
    def enforce_memory_limit(self, percent: int, more: int, fault: Any, whole: bool) -> None:
        self.make_whole(whole)
        model, n = self.model, self.part(percent)
        token_bytes = model.token_bytes * self.N_LAYERS
        most = n * token_bytes + more
        drops = model.memory_usage_bytes > most
        must: Refusals = ()
        may: Refusals = ()
        if drops and not model.is_whole:
            must = (RuntimeError, BufferError) if self.views else RuntimeError
        elif not drops:
            if self.kv.capacity_bytes > most:  # memory without tokens goes back, where it can
                may = (RuntimeError, BufferError)
        else:
            dropped = range(model.first_position, model.next_position - n)
            if self.is_held({self.row(position) for position in dropped}):
                must = BufferError
            elif self.views:
                may = BufferError
        if got := self.attempt(
            lambda: self.kv.enforce_memory_limit(most), must=must, may=may, fault=fault
        ):
            assert got[0] is drops
            if drops:
                model.trim_to(n)
            assert self.kv.memory_usage_bytes <= most

    @rule(fault=FAULTS)
    @precondition(lambda self: self.model.next_position > 30)
    def clear(self, fault: Any) -> None:
        if self.attempt(self.kv.clear, fault=fault):
            self.model.clear()

    @rule(swap=st.booleans(), fault=FAULTS, whole=WHOLE)
    @precondition(lambda self: self.model.next_position > 10)
    def copy(self, swap: bool, fault: Any, whole: bool) -> None:
        self.make_whole(whole)
        must: Refusals = () if self.model.is_whole else RuntimeError
        got = self.attempt(self.kv.copy, must=must, fault=fault)
        if got is None:
            return
        (copy,) = got
        original = self.kv
        self.kv = copy
        addresses, self.addresses = self.addresses, self.all_addresses()
        assert not set(addresses) & set(self.addresses)
        self.agree()
        if swap:
            with original:
                pass
            for held in self.views:
                held.layer = -1  # nothing writes there any more
            if self.model.window:  # what it does not show was not copied
                oldest = self.model.first_position
                self.model.top = [oldest + self.model.n_rows] * self.N_LAYERS
        else:
            copy.close()
            self.kv, self.addresses = original, addresses

    @rule(layer=LAYERS, part=st.integers(0, 1), cut=st.tuples(*[st.integers(0, 12)] * 2))
    @precondition(lambda self: len(self.views) < 4)
    def hold(self, layer: int, part: int, cut: tuple[int, int]) -> None:
        """A view of some tokens: the whole of it is what keeps the memory."""
        view, shown = self.kv.layer(layer)[part], self.model.shown(layer)
        some = slice(cut[0], max(0, len(shown) - cut[1]))
        positions = shown[some]
        if positions:
            rows = tuple(self.row(position) for position in positions)
            # Of a row that is held but not looked at, only that it is held counts.
            self.views.append(Held(view[:, :, some], view[:, :, some].copy(), layer, rows))

    @rule(index=st.integers(0, 3), fault=FAULTS)
    @precondition(lambda self: self.views)
    def drop(self, index: int, fault: Any) -> None:
        """The last use of memory that is no longer needed gives it back; that never raises."""
        self.attempt(lambda: self.views.pop(index % len(self.views)), fault=fault)

    @rule(layer=LAYERS, dtype=st.sampled_from(kvm.GIVEN_DTYPES))
    def read_converted(self, layer: int, dtype: str) -> None:
        copies = self.kv.layer(layer, dtype=dtype)
        for ours, model in zip(copies, self.model.layer(layer), strict=True):
            assert same_bits(ours, stored(kvm.as_float32(model), SHORT[dtype]))

    # ---- what always holds ----

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "model"):
            return
        kv, model = self.kv, self.model
        kvm.assert_same(kv, model)
        assert self.all_addresses() == self.addresses
        for held in self.views:
            assert same_bits(held.view[:, :, held.clean], held.expected[:, :, held.clean])
        self.check_memory()

    def check_memory(self) -> None:
        """What holds of the memory."""
        assert self.kv.capacity_bytes >= self.kv.memory_usage_bytes


class Fixed(CacheAgainstModel):
    def make_cache(self, **options: Any) -> um.KVCache:
        return um.KVCache(*self.dims, self.MAX, rotate=self.rotate, pages="4k", **options)


class OnTape(CacheAgainstModel):
    def make_cache(self, **options: Any) -> um.KVCache:
        self.tape = self.stack.enter_context(um.Tape(1 << 20, pages="4k"))
        self.tape.take_bytes(1000)
        return um.KVCache(*self.dims, self.MAX, rotate=self.rotate, tape=self.tape, **options)


class Grows(CacheAgainstModel):
    def make_cache(self, **options: Any) -> um.KVCache:
        options |= {"grow": True, "rotate": self.rotate, "pages": "4k"}
        return um.KVCache(*self.dims, self.MAX, **options)


class Mapped(Grows):
    """Begins as a private mapping of a file, which stays what it was, and grows from there."""

    @initialize(
        batch=st.sampled_from([1, 1, 2]),
        dtype=st.sampled_from(kvm.KV_DTYPES),
        order=ORDERS,
        rotate=ROTATE,
        n=st.integers(1, CacheAgainstModel.MAX),
        percent=PERCENT,
        fault=FAULTS,
    )
    def make(
        self,
        batch: int,
        dtype: str,
        order: str,
        rotate: bool,
        n: int = 1,
        percent: int = 100,
        fault: Any = None,
    ) -> None:
        self.n_saved, self.n_kept, self.fault = n, max(1, n * min(percent, 100) // 100), fault
        super().make(batch, dtype, order, rotate)
        for layer, tokens in enumerate(self.saved_tokens):
            self.model.append(layer, *tokens)
        self.model.trim_to(self.n_kept)

    def make_cache(self, **options: Any) -> um.KVCache:
        shape = (options["batch"], self.HEADS, self.n_saved, self.DIM)
        self.saved_tokens = []
        self.file = Path(self.stack.enter_context(tempfile.TemporaryDirectory())) / "session"
        with um.KVCache(*self.dims, self.MAX, rotate=self.rotate, pages="4k", **options) as kv:
            for layer in range(self.N_LAYERS):
                k, v = given(self.rng, shape, "float32"), given(self.rng, shape, "float32")
                kv.append(layer, k, v)
                self.saved_tokens.append(self.kept(k, v))
            kv.trim_to(self.n_kept)
            kv.save(self.file)
        self.saved = self.file.read_bytes()

        def restore() -> um.KVCache:
            return um.KVCache.restore(self.file, mode="map")

        (kv,) = self.attempt(restore, fault=self.fault) or (restore(),)
        assert kv.grow
        kv.verify()
        return kv

    def teardown(self) -> None:
        if hasattr(self, "saved"):
            assert self.file.read_bytes() == self.saved
        super().teardown()


class GrowsInBudget(Grows):
    """Room for about half of what it may hold."""

    def make_cache(self, **options: Any) -> um.KVCache:
        pages = max(2, self.row_bytes * self.MAX // PAGE // 2)
        self.budget = self.n_lanes * pages * PAGE + 100
        return super().make_cache(budget_bytes=self.budget, **options)

    def over_budget(self, n: int) -> tuple[type[Exception], ...]:
        used = max(self.model.end) - self.model.first
        # Rows begin and end inside of pages; what lies under views is kept, and so is what could
        # not be given back.
        pages = -(-(used + n) * self.row_bytes // PAGE) + 2
        tight = self.n_lanes * pages * PAGE > self.budget
        return (um.CacheFull,) if tight or self.views or self.any_failed else ()

    def check_memory(self) -> None:
        super().check_memory()
        assert self.kv.capacity_bytes <= self.budget


class FixedInBudget(Fixed):
    """Its rows are cut to what fits."""

    def make_cache(self, **options: Any) -> um.KVCache:
        storage = um.KVCache.storage_bytes(*self.dims, self.MAX, **options)
        kv = super().make_cache(budget_bytes=storage // 2, **options)
        assert kv.capacity_bytes <= storage // 2
        assert kv.n_rows < self.MAX
        return kv


class AnyRing(CacheAgainstModel):
    """Appends that wrap, whatever the number of rows is."""

    @rule(layer=LAYERS, percent=st.integers(0, 250), fault=FAULTS)
    def append_far(self, layer: int, percent: int, fault: Any) -> None:
        n = self.model.n_rows * percent // 100
        self.append(layer, n, "float16", {"token-major"}, fault)

    @rule(percent=st.integers(0, 120))
    def reserve_far(self, percent: int) -> None:
        self.reserve(self.model.n_rows * percent // 100, None, True)


class Ring(AnyRing):
    """As few rows as the window: n_rows == window."""

    def make_cache(self, **options: Any) -> um.KVCache:
        window = kvm.rows_of_pages(self.row_bytes, 1)
        options |= {"rotate": self.rotate, "pages": "4k"}
        kv = um.KVCache(*self.dims, 4096, window=window, **options)
        assert kv.n_rows == window
        return kv


class SpaciousRing(AnyRing):
    """Rows beyond the window, asked for or because rows are whole pages."""

    def make_cache(self, **options: Any) -> um.KVCache:
        options |= {"rotate": self.rotate, "pages": "4k"}
        kv = um.KVCache(*self.dims, 4096, window=7, spare_rows=11, **options)
        assert kv.n_rows == kvm.rows_of_pages(self.row_bytes, 18)
        return kv


for _kind in (Fixed, OnTape, Grows, Mapped, GrowsInBudget, FixedInBudget, Ring, SpaciousRing):
    _kind.TestCase.settings = settings(
        max_examples=examples(250),
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    globals()[f"Test{_kind.__name__}"] = _kind.TestCase
