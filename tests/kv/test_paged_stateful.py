"""A paged cache against plain lists: sequences are forked, cropped and closed in any order.

They share prefixes, and allocations that fail change nothing. A model's values for a token depend
on all tokens before it. The values here do, too, so that a block that is shared wrongly shows.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import unimem as um
from support.contracts.kv_caches import check_that_making_it_may_fail
from support.contracts.kv_model import GIVEN_DTYPES, KV_DTYPES, Array, same_bits, stored
from support.contracts.paged_tokens import state
from support.kernel.os_faults import os_faults
from support.project.tiers import examples
from unimem._core.status import ledger
from unimem.kv import prefix

pytestmark = pytest.mark.usefixtures("gives_memory_back")

N_LAYERS, N_HEADS, MOST_SEQUENCES = 2, 2, 6

IDS = st.lists(st.integers(0, 1), max_size=12)  # few, so that many prefixes are equal
WHICH = st.integers(0, MOST_SEQUENCES - 1)
LAYERS = st.integers(0, N_LAYERS - 1)
FAILS = st.sampled_from([False, False, False, True])  # whether the first allocation does


@dataclass
class Model:
    """The tokens of a sequence: their ids, and how many ids the pool knows."""

    ids: list[int] = field(default_factory=list)
    n_known: int = 0
    lens: list[int] = field(default_factory=lambda: [0] * N_LAYERS)

    def copy(self) -> Model:
        return Model(self.ids[:], self.n_known, self.lens[:])

    def is_level(self) -> bool:
        return len(set(self.lens)) == 1


def weak_digest(ids: bytes, parent_key: int) -> int:
    return (zlib.crc32(ids) + parent_key) % 4


class PagedAgainstModel(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.faults = self.stack.enter_context(os_faults())

    @initialize(
        dtype=st.sampled_from(KV_DTYPES),
        n_blocks=st.integers(1, 14),
        block_tokens=st.integers(1, 5),
        weak=st.booleans(),
        prefix_cache=st.sampled_from([True, True, True, False]),
    )
    def start(
        self, dtype: Any, n_blocks: int, block_tokens: int, weak: bool, prefix_cache: bool
    ) -> None:
        self.digest = prefix.digest
        if weak:
            prefix.digest = weak_digest
        self.dim = 32 if dtype == "q8_0" else 3
        options: Any = {"n_blocks": n_blocks, "block_tokens": block_tokens, "dtype": dtype}
        self.pg = um.PagedKVCache(N_LAYERS, N_HEADS, self.dim, prefix_cache=prefix_cache, **options)
        self.live: list[tuple[um.Sequence, Model]] = []
        self.values: dict[bytes, Array] = {}

    def teardown(self) -> None:
        prefix.digest = self.digest
        for s, _ in self.live:
            s.close()
        assert self.pg.n_blocks_in_use == 0
        assert self.pg.n_blocks_available == self.pg.n_blocks
        self.pg.close()
        self.stack.close()

    # ---- what tokens are worth ----

    def tokens(self, model: Model, layer: int, first: int, end: int) -> Array:
        """K and V of tokens: float32 [2, end - first, heads, dim]."""
        out = np.empty((2, end - first, N_HEADS, self.dim), np.float32)
        for i in range(first, end):
            key = bytes([layer, *model.ids[: i + 1]])
            if key not in self.values:
                seed = np.random.default_rng(zlib.crc32(key))
                # Small numbers, which all dtypes but q8_0 store exactly.
                self.values[key] = seed.integers(-99, 99, (2, N_HEADS, self.dim)).astype("f4")
            out[:, i - first] = self.values[key]
        return out

    def pick(self, which: int) -> tuple[um.Sequence, Model]:
        if not self.live:
            self.live.append((self.pg.sequence(), Model()))
        return self.live[which % len(self.live)]

    def add(self, s: um.Sequence, model: Model) -> None:
        if len(self.live) == MOST_SEQUENCES:
            self.live.pop(0)[0].close()
        self.live.append((s, model))

    def failing(self, call: Callable[[], um.Sequence]) -> None:
        """What makes a sequence says that there is no memory, and changes nothing."""
        before = state(self.pg)
        self.faults.arm(1)
        try:
            with pytest.raises(MemoryError):
                call()
        finally:
            self.faults.disarm()
        assert self.faults.failed == "calloc"
        assert state(self.pg) == before

    # ---- operations ----

    @rule(ids=IDS, fails=FAILS)
    def begin(self, ids: list[int], fails: bool = False) -> None:
        if fails:
            self.failing(lambda: self.pg.sequence(ids))
        s = self.pg.sequence(ids)
        assert len(s) == s.n_cached
        assert s.n_cached % self.pg.block_tokens == 0
        assert s.n_cached == 0 or s.n_cached < len(ids)
        self.add(s, Model(ids[:], len(ids), [s.n_cached] * N_LAYERS))

    @rule(which=WHICH, ids=IDS, fails=FAILS)
    def begin_with_the_tokens_of_another(self, which: int, ids: list[int], fails: bool) -> None:
        _, model = self.pick(which)
        self.begin([*model.ids[: model.n_known], *ids], fails)

    @rule(which=WHICH, ids=IDS)
    def extend(self, which: int, ids: list[int]) -> None:
        s, model = self.pick(which)
        # Tokens that are there already have the ids that they have.
        ids = [*model.ids[model.n_known : model.n_known + len(ids)], *ids][: len(ids)]
        s.extend(ids)
        model.ids[model.n_known : model.n_known + len(ids)] = ids
        model.n_known += len(ids)

    @rule(
        which=WHICH,
        layers=st.sampled_from([(0,), (1,), (0, 1), (0, 1), (0, 1), (1, 0)]),
        ids=IDS,
        heads_first=st.booleans(),
        dtype=st.sampled_from(GIVEN_DTYPES),
    )
    def append(
        self, which: int, layers: tuple[int, ...], ids: list[int], heads_first: bool, dtype: str
    ) -> None:
        s, model = self.pick(which)
        for layer in layers:
            n, first = len(ids), model.lens[layer]
            missing = first + n - len(model.ids)
            grown = model.copy()
            grown.ids += ids[n - missing :] if missing > 0 else []
            k, v = self.tokens(grown, layer, first, first + n)
            if heads_first:
                k, v = k.transpose(1, 0, 2)[None], v.transpose(1, 0, 2)[None]
            kind = stored(k[:0], {"float32": "f32", "float16": "f16"}.get(dtype, "bf16")).dtype
            asked = self.asked(s, first, n)
            if asked > self.pg.n_blocks_available:
                self.check_full(s, asked, layer, k, v)
                return
            s.append(layer, k.astype(kind), v.astype(kind))
            grown.lens[layer] += n
            self.replace(s, model, grown)
            model = grown

    @rule(which=WHICH, token=st.integers(0, 1))
    def append_all(self, which: int, token: int) -> None:
        s, model = self.pick(which)
        grown = model.copy()
        first = model.lens[0]
        if first == len(grown.ids):
            grown.ids.append(token)
        layers = [self.tokens(grown, layer, first, first + 1)[:, 0] for layer in range(N_LAYERS)]
        k, v = np.stack(layers, axis=1)
        if not model.is_level():
            with pytest.raises(RuntimeError, match="layers differ"):
                s.append_all(k, v)
        elif (asked := self.asked(s, first, 1)) > self.pg.n_blocks_available:
            self.check_full(s, asked, None, k, v)
        else:
            s.append_all(k, v)
            grown.lens = [first + 1] * N_LAYERS
            self.replace(s, model, grown)

    def replace(self, s: um.Sequence, old: Model, new: Model) -> None:
        self.live = [(s, new) if model is old else (other, model) for other, model in self.live]

    def asked(self, s: um.Sequence, first: int, n: int) -> int:
        """The blocks that n more tokens need, a copy of a shared one included."""
        size, table = self.pg.block_tokens, s.block_table
        needed = max(-(-(first + n) // size) - len(table), 0)
        tail = first // size
        shared = n > 0 and tail < len(table) and self.pg._n_holders(int(table[tail])) > 1
        return needed + shared

    def check_full(self, s: um.Sequence, asked: int, layer: int | None, k: Array, v: Array) -> None:
        used = self.pg.n_blocks_in_use
        append = s.append_all if layer is None else partial(s.append, layer)
        said = rf"asked for {asked} blocks?, but {used} of {self.pg.n_blocks} "
        with pytest.raises(um.CacheFull, match=said) as caught:
            append(k, v)
        figures = caught.value.limit, caught.value.used, caught.value.asked
        assert figures == (self.pg.n_blocks, used, asked)

    @rule(which=WHICH, fails=FAILS)
    def fork(self, which: int, fails: bool) -> None:
        s, model = self.pick(which)
        if model.is_level():
            if fails:
                self.failing(s.fork)
            used = self.pg.n_blocks_in_use
            fork = s.fork()
            assert fork.block_table.tolist() == s.block_table.tolist()
            assert self.pg.n_blocks_in_use == used
            self.add(fork, model.copy())
        else:
            with pytest.raises(RuntimeError, match="layers differ"):
                s.fork()

    @rule(which=WHICH, back=st.integers(0, 12))
    def crop(self, which: int, back: int) -> None:
        s, model = self.pick(which)
        if not model.is_level():
            with pytest.raises(RuntimeError, match="layers differ"):
                s.crop(0)
            return
        n = max(model.lens[0] - back, 0)
        s.crop(n)
        del model.ids[n:]
        model.n_known = min(model.n_known, n)
        model.lens = [n] * N_LAYERS

    @rule(which=WHICH)
    def rollback(self, which: int) -> None:
        s, model = self.pick(which)
        s.rollback()
        model.lens = [min(model.lens)] * N_LAYERS
        # Ids that were told stay; others come with the tokens.
        del model.ids[max(model.n_known, model.lens[0]) :]

    @rule(which=WHICH)
    def close(self, which: int) -> None:
        s, model = self.pick(which)
        probe = [*model.ids[: model.n_known], 7]
        with self.pg.sequence(probe) as before:
            n_cached = before.n_cached
        s.close()
        self.live = [pair for pair in self.live if pair[0] is not s]
        # What was found is found still: nothing was taken.
        with self.pg.sequence(probe) as after:
            assert after.n_cached == n_cached

    # ---- what holds always ----

    @invariant()
    def every_sequence_holds_its_tokens(self) -> None:
        for s, model in self.live:
            assert len(s) == min(model.lens)
            assert s.block_table.dtype == np.int32
            assert len(s.block_table) == -(-max(model.lens) // self.pg.block_tokens)
            for layer in range(N_LAYERS):
                expected = self.tokens(model, layer, 0, model.lens[layer])
                for part, whole in zip(s.gather(layer), expected, strict=True):
                    assert same_bits(part, stored(whole.transpose(1, 0, 2), self.pg.dtype))

    @invariant()
    def blocks_are_counted(self) -> None:
        tables = [block for s, _ in self.live for block in s.block_table.tolist()]
        holders = Counter(tables)
        for s, _ in self.live:
            assert len(set(s.block_table.tolist())) == len(s.block_table)
        for block in range(self.pg.n_blocks):
            assert self.pg._n_holders(block) == holders[block]
        assert self.pg.n_blocks_in_use == len(holders)
        assert self.pg.n_blocks_available == self.pg.n_blocks - len(holders)
        assert self.pg.memory_usage_bytes == len(holders) * self.pg.block_bytes


TestPagedAgainstModel = PagedAgainstModel.TestCase
TestPagedAgainstModel.settings = settings(
    max_examples=examples(300),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def test_every_system_call_of_the_constructor_may_fail() -> None:
    before = ledger()["history"]["mapped_bytes"]
    make = partial(um.PagedKVCache, 2, 2, 64, n_blocks=40, pages="4k")
    with check_that_making_it_may_fail(make, "calloc") as pg, pg.sequence([1, 2, 3]) as s:
        s.append(0, np.ones((3, 2, 64), "f4"), np.ones((3, 2, 64), "f4"))
    assert ledger()["history"]["mapped_bytes"] == before
