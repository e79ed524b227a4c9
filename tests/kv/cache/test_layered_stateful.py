"""Caches of random layers, states among them, against the NumPy model: random calls, views that are
held meanwhile, and system calls that fail. A call that fails leaves all as it was.
"""

from __future__ import annotations

import errno
import math
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

import unimem as um
from support.contracts.faulty_calls import FaultyCalls, Refusals
from support.contracts.kv_model import Array, as_float32, given, kept, memory, same_bits
from support.contracts.layers_model import LayersModel, sides_of
from support.project.tiers import examples

pytestmark = pytest.mark.usefixtures("gives_memory_back")

MOST = 40
# Large rows, so that rings have few: 1 to 8 to a page.
LAYERS = st.builds(
    um.LayerKV,
    st.sampled_from([1, 4]),
    st.just(256),
    st.sampled_from([256, 256, 64, 0]),
    window=st.sampled_from([None, None, 3, 9]),
    dtype=st.sampled_from(["f32", "f16", "bf16", "q8_0", "q8_0,f16", "bf16,q8_0"]),
)
STATES = st.builds(
    um.LayerState, st.sampled_from([(3,), (2, 40), (5, 30, 7)]), st.sampled_from(["f32", "bf16"])
)
FAULTS = st.one_of(
    st.none(), st.none(), st.tuples(st.integers(1, 6), st.sampled_from([errno.ENOMEM]))
)
PERCENT = st.one_of(st.integers(0, 100), st.integers(0, 110))
WHOLE = st.sampled_from([True, True, True, False])
COUNTS = st.one_of(st.integers(1, 9), st.integers(0, 30))


@st.composite
def layers_of(draw: st.DrawFn) -> list[um.LayerKV | um.LayerState]:
    kinds = draw(st.lists(LAYERS, min_size=1, max_size=3))
    layers: list[Any] = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))
    if draw(st.booleans()):
        of = draw(st.integers(0, len(layers) - 1))
        one = layers[of]
        dims = one.n_kv_heads, one.head_dim, one.v_head_dim
        layers.append(um.LayerKV(*dims, window=one.window, share_of=of))
    states = draw(st.sampled_from([0, 0, 1, 2]))
    # Behind the others, so that the numbers of layers that are shared stay.
    layers += [draw(STATES) for _ in range(states)]
    if states and draw(st.sampled_from([False, False, False, True])):
        layers = layers[-states:]
    return layers


class Mixed(FaultyCalls):
    """A cache of layers, and the model of it."""

    @initialize(
        layers=layers_of(),
        batch=st.sampled_from([1, 1, 2]),
        order=st.sampled_from(["token", "head"]),
        grow=st.booleans(),
        rotate=st.sampled_from([False, False, True]),
        spare=st.sampled_from([0, 0, 5]),
        checkpoints=st.sampled_from([1, 3]),
        every=st.sampled_from([None, 4]),
    )
    def make(
        self,
        layers: list[Any],
        batch: int,
        order: str,
        grow: bool,
        rotate: bool,
        spare: int,
        checkpoints: int,
        every: int | None,
    ) -> None:
        self.batch = batch
        rows = [layer for layer in layers if isinstance(layer, um.LayerKV)]
        options: dict[str, Any] = {"batch": batch, "order": order, "grow": grow, "pages": "4k"}
        options["rotate"] = rotate
        options["spare_rows"] = spare if any(layer.window for layer in rows) else 0
        self.every = None
        if len(rows) < len(layers):
            options |= {"checkpoints": checkpoints, "checkpoint_every": every}
            self.every = every
        made: Any = um.KVCache(layers=layers, max_seq_len=MOST, **options)
        self.kv = made
        room = checkpoints if len(rows) < len(layers) else 0
        self.model = LayersModel(self.kv.layers, self.kv.n_rows, batch, MOST, room)
        own = {i: self.kv.layers[i] for i in self.model.own}
        self.kinds = [[i for i in own if own[i] == kind] for kind in dict.fromkeys(own.values())]

    def tokens(self, layer: int, n: int) -> tuple[Array, Array]:
        spec = self.kv.layers[layer]
        shape = (self.batch, spec.n_kv_heads, n)
        k, v = ((*shape, dim) for dim in (spec.head_dim, spec.v_head_dim))
        return given(self.rng, k, "float32"), given(self.rng, v, "float32")

    def go_on(self) -> None:
        """What a pass makes of the states, of both."""
        for i, state in self.model.states.items():
            state[...] = given(self.rng, state.shape, "float32")
            self.kv.state(i)[...] = state

    def note_checkpoint(self, before: int) -> None:
        if self.every and self.model.next_position // self.every > before // self.every:
            self.model.checkpoint()

    def note(self, layer: int, k: Array, v: Array) -> None:
        self.model.append(layer, *self.kept(layer, (k, v)))

    def kept(self, layer: int, token: tuple[Array, Array]) -> list[Array]:
        """What the cache keeps of K and V."""
        parts: tuple[Literal["k", "v"], ...] = ("k", "v")
        sides = zip(token, sides_of(self.kv.layers[layer]), parts, strict=True)
        return [kept(x, part, dtype, self.kv.rotate) for x, (_, dtype), part in sides]

    def room(self, layer: int, n: int) -> tuple[Refusals, Refusals]:
        """How n more tokens of a layer must be refused, and how they may be."""
        model = self.model
        if model.reserved:
            return RuntimeError, ()
        if model.plain and n > MOST - (model.end[layer] - model.first):
            return um.CacheFull, ()
        return (), (BufferError,) if self.views else ()

    def make_whole(self, wanted: bool) -> None:
        if wanted and not self.model.is_whole:
            self.rollback()
        if wanted and not self.model.is_whole:  # states have no way back to the end
            ways = self.model.ways_back()
            if ways:
                self.crop_to(ways[-1] - self.model.first_position)
            else:
                self.clear()

    # ---- the calls ----

    @rule(pick=st.integers(0, 9), n=COUNTS, fault=FAULTS)
    @precondition(lambda self: self.model.own)
    def append(self, pick: int, n: int, fault: Any) -> None:
        layer = self.model.own[pick % len(self.model.own)]
        k, v = self.tokens(layer, n)
        must, may = self.room(layer, n)
        if self.attempt(lambda: self.kv.append(layer, k, v), must=must, may=may, fault=fault):
            self.note(layer, k, v)

    @rule(n=COUNTS, fault=FAULTS, whole=WHOLE)
    def append_to_each(self, n: int, fault: Any, whole: bool) -> None:
        self.make_whole(whole)
        self.go_on()
        for layer in range(len(self.model.own)):
            self.append(layer, n, fault)

    @rule(fault=FAULTS, whole=WHOLE)
    @precondition(lambda self: self.batch == 1 and self.model.own)
    def append_all(self, fault: Any, whole: bool) -> None:
        self.make_whole(whole)
        before = self.model.next_position
        tokens = {i: self.tokens(i, 1) for i in self.model.own}
        k, v = ([token[part][0, :, 0] for token in tokens.values()] for part in range(2))
        must, may = self.room(self.model.own[0], 1)
        if not self.model.is_whole:
            must = RuntimeError
        if self.attempt(lambda: self.kv.append_all(k, v), must=must, may=may, fault=fault):
            for layer, token in tokens.items():
                self.note(layer, *token)
            self.note_checkpoint(before)

    @rule(n=st.integers(0, 20), keep=st.integers(0, 22), fault=FAULTS, whole=WHOLE)
    def reserve_and_commit(self, n: int, keep: int, fault: Any, whole: bool) -> None:
        self.make_whole(whole)
        model = self.model
        must, may = self.room(model.own[0], n) if model.own else ((), ())
        if not model.is_whole:
            must = RuntimeError
        elif n == 0:
            must = ValueError
        elif any(n > model.n_rows[i] for i in model.rings):
            must = um.CacheFull
        got = self.attempt(lambda: self.kv.reserve(n), must=must, may=may, fault=fault)
        if got is None:
            return
        model.reserve(n)
        self.agree()
        tokens = {i: self.tokens(i, n) for i in model.own}
        for layer, token in tokens.items():
            self.write(layer, got[0][layer], token)
        self.go_on()
        if keep > n or (model.states and keep != n):
            with pytest.raises(ValueError, match=f"n of (at most )?{n}"):
                self.kv.commit(keep)
            if not model.states:
                self.rollback()
                return
            keep = n
        before = model.next_position
        self.kv.commit(keep)
        model.reserved = 0
        model.end_of_states = before + keep
        for layer, (k, v) in tokens.items():
            self.note(layer, k[:, :, :keep], v[:, :, :keep])
        model.first = max(model.first, model.missing(model.next_position))
        self.note_checkpoint(before)

    @rule(whole=WHOLE)
    @precondition(lambda self: self.model.states)
    def checkpoint(self, whole: bool) -> None:
        self.make_whole(whole)
        must: Refusals = () if self.model.is_whole else RuntimeError
        if got := self.attempt(self.kv.checkpoint, must=must):
            assert got[0] == self.model.next_position
            self.model.checkpoint()

    @rule(pick=st.integers(0, 9))
    @precondition(lambda self: self.model.ways_back())
    def go_back(self, pick: int) -> None:
        """Also from the middle of a pass."""
        ways = self.model.ways_back()
        self.go_on()
        self.crop_to(ways[pick % len(ways)] - self.model.first_position)

    def write(self, layer: int, row: int, token: tuple[Array, Array]) -> None:
        """Write rows as an engine does, from row on: a ring's go on in its mirror."""
        kv, spec = self.kv, self.kv.layers[layer]
        by_head = kv.order == "head"
        heads = spec.n_kv_heads
        sizes = (kv.row_bytes[layer], kv.v_row_bytes[layer])
        n_lanes = self.batch * (heads if by_head else 1)
        # From one lane to the next.
        lane_bytes = [part.strides[by_head and heads > 1] for part in kv.layer(layer)]
        stored = self.kept(layer, token)
        for rows, size, stride, name in zip(stored, sizes, lane_bytes, "kv", strict=True):
            at, row_bytes = kv.address(layer, name), size // (heads if by_head else 1)
            lanes = rows.swapaxes(1, 2)
            if by_head:
                lanes = rows.reshape(n_lanes, rows.shape[2], rows.shape[3])
            for lane, values in enumerate(lanes):
                begin = at + lane * stride + row * row_bytes
                data = np.frombuffer(values.tobytes(), np.uint8)
                memory(begin, max(len(data), 1))[: len(data)] = data

    @rule(n=COUNTS, n_layers=st.integers(1, 4))
    @precondition(lambda self: self.model.own)
    def interrupt(self, n: int, n_layers: int) -> None:
        """A forward pass ends in the middle: some layers have its tokens."""
        self.make_whole(True)
        for layer in range(min(n_layers, len(self.model.own) - 1)):
            self.append(layer, n, None)
        self.agree()
        self.rollback()

    @rule()
    def rollback(self) -> None:
        model, end = self.model, self.model.next_position
        if not model.states or model.is_whole:
            self.kv.rollback()
            model.rollback(self.kinds)
        elif self.attempt(self.kv.rollback, must=() if end in model.ways_back() else RuntimeError):
            model.go_back(end, self.kinds)

    @rule(percent=PERCENT, whole=WHOLE)
    def crop(self, percent: int, whole: bool) -> None:
        self.make_whole(whole)
        self.crop_to(self.part(percent))

    @rule(n=st.integers(1, 9))
    def crop_a_little(self, n: int) -> None:
        self.make_whole(True)
        self.crop_to(max(0, self.model.seq_len - n))

    def crop_to(self, n: int) -> None:
        must: Refusals = ()
        model, position = self.model, self.model.first_position + n
        if model.states and n <= model.seq_len and position in model.ways_back():
            assert self.attempt(lambda: self.kv.crop(n))
            model.go_back(position, self.kinds)
            return
        if n > model.seq_len and (model.is_whole or model.states):
            must = ValueError
        elif not model.is_whole:
            must = RuntimeError
        elif n < model.least_crop() or (model.states and n < model.seq_len):
            must = ValueError
        if self.attempt(lambda: self.kv.crop(n), must=must):
            model.crop(n)

    @rule(percent=PERCENT, keep_first=st.sampled_from([0, 0, 1, 3, 12]), whole=WHOLE)
    def trim_to(self, percent: int, keep_first: int, whole: bool) -> None:
        self.make_whole(whole)
        model, n = self.model, self.part(percent)
        must: Refusals = ()
        windows = [model.layers[i].window or 0 for i in model.rings]
        if not model.is_whole:
            must = RuntimeError
        elif keep_first and n + keep_first < model.seq_len and not model.plain:
            must = ValueError
        elif keep_first and n + keep_first < model.seq_len and model.rings:
            must = ValueError if n < max(windows) else ()
        may = BufferError if self.views else ()
        if got := self.attempt(
            lambda: self.kv.trim_to(n, keep_first=keep_first), must=must, may=may
        ):
            assert got[0] is model.trim_to(n, keep_first)

    @rule(percent=PERCENT, more=st.integers(0, 100), whole=WHOLE)
    def enforce_memory_limit(self, percent: int, more: int, whole: bool) -> None:
        self.make_whole(whole)
        model, n = self.model, self.part(percent)
        most = model.usage_of(min(n, model.seq_len)) + more
        must: Refusals = () if model.is_whole else RuntimeError
        may = BufferError if self.views else ()
        drops = model.memory_usage_bytes > most
        if got := self.attempt(lambda: self.kv.enforce_memory_limit(most), must=must, may=may):
            assert got[0] is drops
            if drops:
                fits = (n for n in range(MOST * 9, -1, -1) if model.usage_of(n) <= most)
                model.trim_to(next(fits))
            assert self.kv.memory_usage_bytes <= most

    @rule()
    @precondition(lambda self: self.model.next_position > 30)
    def clear(self) -> None:
        self.kv.clear()
        self.model.clear()

    @rule(how=st.sampled_from(["copy", "map", "read"]), back=st.integers(1, 9), fault=FAULTS)
    @precondition(lambda self: self.model.next_position > 10)
    def copy(self, how: str, back: int, fault: Any) -> None:
        """Go on with a copy, or with what was saved."""
        self.make_whole(True)
        if how == "copy":
            got = self.attempt(self.kv.copy, fault=fault)
        else:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "session")
                self.kv.save(path)
                mode: Any = "map" if how == "map" else "copy"
                got = self.attempt(lambda: um.KVCache.restore(path, mode=mode), fault=fault)
        if got is None:
            return
        self.views.clear()
        self.kv.close()
        (self.kv,) = got
        self.model.forget_unsaved(is_copy=how == "copy")
        self.model.n_rows = self.kv.n_rows
        self.agree()
        self.crop_a_little(back)

    @rule(pick=st.integers(0, 9))
    @precondition(lambda self: len(self.views) < 3)
    def hold(self, pick: int) -> None:
        layer = pick % self.kv.n_layers
        if layer in self.model.states:
            self.views.append(self.kv.state(layer))
        else:
            self.views.append(self.kv.layer(layer)[pick % 2])

    @rule()
    @precondition(lambda self: self.views)
    def drop(self) -> None:
        self.views.pop()

    # ---- what always holds ----

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "model"):
            return
        kv, model = self.kv, self.model
        assert kv.next_position == model.next_position
        assert kv.seq_len == len(kv) == model.seq_len
        assert kv.is_empty is (model.seq_len == 0)
        assert kv.memory_usage_bytes == model.memory_usage_bytes <= kv.capacity_bytes
        for i in model.layers:
            for ours, expected in zip(kv.layer(i), model.layer(i), strict=True):
                assert same_bits(ours, expected)
        assert kv.checkpoints == tuple(model.ways_back())
        for i, state in model.states.items():
            assert same_bits(kv.state(i), state)
        for view in self.views:
            first = as_float32(view)[:1].ravel()[:1]
            assert math.isfinite(float(first.sum()))


Mixed.TestCase.settings = settings(
    max_examples=examples(150),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestMixed = Mixed.TestCase
