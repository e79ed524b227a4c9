"""Layers that keep a state: views of it, ways back to it, and refused calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.contracts.kv_caches import each_call_fails
from support.contracts.kv_model import same_bits
from support.kernel.proc_maps import address_of
from unimem._core.status import ledger
from unimem.kv import snapshot

pytestmark = pytest.mark.usefixtures("gives_memory_back")

FULL = um.LayerKV(2, 64)
# Rows of a page each: a ring has no more of them than its window.
WIDE = um.LayerKV(4, 512, window=4)
STATE, CONV = um.LayerState((3, 5)), um.LayerState((7,), "bf16")


def made(*layers: Any, most: int = 64, **options: Any) -> Any:
    return um.KVCache(layers=layers, max_seq_len=most, **{"pages": "4k"} | options)


def step(kv: Any, n: int = 1) -> None:
    """A pass over n tokens: rows by commit, and states that say how far they have come."""
    kv.reserve(n)
    end = kv.next_position + n
    for i, layer in enumerate(kv.layers):
        if isinstance(layer, um.LayerState):
            kv.state(i)[...] = end + 10 * i
    kv.commit(n)


def states_at(kv: Any) -> int:
    """The position that all states are those of."""
    found = {
        float(value) - 10 * i
        for i, layer in enumerate(kv.layers)
        if isinstance(layer, um.LayerState)
        for value in kv.state(i).astype("f4").ravel()
    }
    assert len(found) == 1
    return int(found.pop())


def at_start(kv: Any) -> bool:
    return all(
        not kv.state(i).astype("f4").any()
        for i, layer in enumerate(kv.layers)
        if isinstance(layer, um.LayerState)
    )


# ---- what a layer keeps ----


def test_a_state_is_an_array_that_stays() -> None:
    with made(STATE, FULL, CONV, um.LayerKV(2, 64, share_of=1), batch=2) as kv:
        first, second = kv.state(0), kv.state(2)
        assert (first.shape, first.dtype) == ((2, 3, 5), np.dtype("f4"))
        assert (second.shape, second.dtype.name) == ((2, 7), "bfloat16")
        assert at_start(kv)
        addresses = [address_of(first), address_of(second)]
        assert all(at % 64 == 0 for at in addresses)
        for _ in range(5):
            step(kv, 3)
        assert states_at(kv) == kv.next_position == 15
        assert (first == 15).all()
        assert [address_of(kv.state(i)) for i in (0, 2)] == addresses
        assert kv.n_kv_heads == (0, 2, 0, 2)
        assert kv.window == (None,) * 4
        assert kv.row_bytes[0] == kv.n_rows[0] == kv.head_dim[0] == 0
        assert kv.layers[2] == CONV
        assert "2 states of " in repr(kv)
        del first, second


def test_states_alone() -> None:
    """A model of states has no rows, and goes on without end."""
    with made(STATE, CONV, most=8, checkpoints=2) as kv:
        assert kv.reserve(30) == (None, None)
        with pytest.raises(RuntimeError, match="rows are reserved"):
            kv.reserve(1)
        kv.commit(30)
        step(kv, 3)
        assert (kv.seq_len, kv.next_position, kv.checkpoint()) == (33, 33, 33)
        step(kv)
        kv.crop(33)
        assert (kv.seq_len, states_at(kv)) == (33, 33)
        assert kv.trim_to(3)
        assert (kv.seq_len, kv.next_position) == (3, 33)
        with pytest.raises(ValueError, match="reserve and commit tell that states have advanced"):
            kv.append_all([], [])
        with pytest.raises(ValueError, match="expected n of at least 1"):
            kv.reserve(0)
        with kv.copy() as other:
            assert (other.seq_len, other.next_position, states_at(other)) == (3, 33, 33)
        kv.clear()
        assert (kv.seq_len, kv.next_position, kv.checkpoints) == (0, 0, ())
        assert at_start(kv)


# ---- going back ----


def test_crop_says_where_it_can_go_back_to() -> None:
    with made(STATE, FULL, checkpoints=10) as kv:
        step(kv, 3)
        with pytest.raises(ValueError, match=r"no checkpoint exists: take them with checkpoint"):
            kv.crop(2)
        kv.crop(3)  # the end
        kv.checkpoint()
        step(kv, 2)
        kv.checkpoint()
        step(kv)
        with pytest.raises(ValueError, match=r"crop\(n\) with n of 3, 5 goes back to a checkpoint"):
            kv.crop(4)
        with pytest.raises(ValueError, match="at most 6"):
            kv.crop(7)
        assert (kv.seq_len, states_at(kv), kv.checkpoints) == (6, 6, (3, 5))
        # In tokens that are kept, and the positions stay.
        kv.trim_to(2)
        assert kv.checkpoints == (5,)
        with pytest.raises(ValueError, match=r"with n of 1 goes"):
            kv.crop(0)
        kv.crop(1)
        assert (kv.seq_len, states_at(kv)) == (1, 5)


def test_many_checkpoints_are_not_all_named() -> None:
    with made(STATE, FULL, checkpoints=20, checkpoint_every=2) as kv:
        for _ in range(19):
            step(kv)
        with pytest.raises(ValueError, match=r"n of 4, 6, .*, 18 \(and 1 earlier ones"):
            kv.crop(1)


def test_the_oldest_checkpoint_makes_room() -> None:
    with made(STATE, FULL, checkpoints=2) as kv:
        for _ in range(4):
            step(kv)
            kv.checkpoint()
        assert kv.checkpoints == (3, 4)
        # One of the same position takes the other's place.
        kv.state(0)[...] = 7
        kv.checkpoint()
        assert kv.checkpoints == (3, 4)
        kv.state(0)[...] = 1
        kv.crop(4)
        assert (kv.state(0) == 7).all()


def test_a_checkpoint_every_few_tokens() -> None:
    with made(STATE, FULL, checkpoints=3, checkpoint_every=4, dtype="f32") as kv:
        for n in (3, 2, 1, 9, 1):
            step(kv, n)
        assert kv.checkpoints == (5, 15, 16)
        k = np.zeros((1, 2, 64), "f4")
        for _ in range(4):
            kv.append_all(k, k)
        assert kv.checkpoints == (15, 16, 20)


def test_what_is_torn_goes_back_to_a_checkpoint() -> None:
    """Rows can be dropped, and a state that was written over cannot."""
    rows = np.zeros((2, 2, 64), "f2")
    with made(FULL, STATE, FULL, checkpoints=2) as kv:
        step(kv, 3)
        kv.rollback()  # nothing to drop
        kv.append(0, rows, rows)
        for call in (kv.rollback, lambda: kv.crop(3)):
            with pytest.raises(RuntimeError, match="no checkpoint exists"):
                call()
        with pytest.raises(RuntimeError, match="layers differ in length"):
            kv.checkpoint()
        kv.append(2, rows, rows)
        kv.state(1)[...] = 15
        kv.checkpoint()
        kv.append(0, rows, rows)
        kv.state(1)[...] = 0
        kv.rollback()
        assert (kv.seq_len, states_at(kv)) == (5, 5)
        step(kv)
        kv.reserve(2)
        kv.state(1)[...] = 0
        with pytest.raises(ValueError, match="expected n of 2, all reserved rows"):
            kv.commit(1)
        with pytest.raises(RuntimeError, match=r"crop\(n\) with n of 5 goes back"):
            kv.rollback()
        with pytest.raises(RuntimeError, match="reserved"):
            kv.copy()
        kv.crop(5)
        assert (kv.seq_len, states_at(kv)) == (5, 5)
        with pytest.raises(RuntimeError, match="nothing is reserved"):
            kv.commit(1)


def test_a_window_that_was_overwritten_is_no_way_back() -> None:
    with made(WIDE, STATE, FULL, checkpoints=4, spare_rows=2) as kv:
        for _ in range(10):
            step(kv)
            kv.checkpoint()
        assert kv.n_rows[0] == 6
        assert kv.checkpoints == (8, 9, 10)
        with pytest.raises(ValueError, match="expected n of at least 8, got 7; spare_rows="):
            kv.crop(7)
        kv.crop(8)
        assert (kv.next_position, states_at(kv), kv.checkpoints) == (8, 8, (8,))


# ---- memory ----


def test_what_is_planned_is_taken() -> None:
    layers = (STATE, WIDE, FULL, CONV)
    planned = um.KVCache.storage_bytes(
        layers=layers, max_seq_len=64, batch=2, checkpoints=3, pages="4k"
    )
    before = um.KVCache.storage_bytes(layers=[WIDE, FULL], max_seq_len=64, batch=2, pages="4k")
    one = 128 + 64  # 2 * 60 bytes and 2 * 14, each rounded up to 64
    assert planned == before + 4 * one
    mapped = ledger()["history"]["mapped_bytes"]
    with made(*layers, batch=2, checkpoints=3) as kv:
        assert kv.capacity_bytes == planned
        assert kv.memory_usage_bytes == one
        assert ledger()["history"]["mapped_bytes"] > mapped
        assert um.report()["kv"].nbytes >= planned
        row = um.report()["kv"]
        assert row.active_bytes == one
        kv.warm()
        assert kv.resident_bytes >= kv.capacity_bytes
        assert sum(kv.granted.nodes.values()) >= kv.capacity_bytes
    with made(STATE, checkpoints=1, budget_bytes=128) as kv:
        assert kv.capacity_bytes == 128
    for too_little, options in ((127, {}), (128 + 255, {"grow": True}), (128 + 255, {})):
        with pytest.raises(um.CacheFull, match="budget_bytes="):
            made(STATE, FULL, checkpoints=1, budget_bytes=too_little, **options)


def test_a_checkpoint_takes_nothing() -> None:
    with (
        um.Layout(1 << 12, 1 << 12, 1 << 12, pages="4k") as layout,
        made(STATE, FULL, checkpoints=2) as kv,
    ):
        layout.attach(kv)
        layout.freeze()
        assert kv.resident_bytes >= kv.capacity_bytes
        before = ledger()
        for _ in range(5):
            step(kv)
            kv.checkpoint()
        kv.crop(4)
        after = ledger()
        assert {name: of["mapped_bytes"] for name, of in after.items()} == {
            name: of["mapped_bytes"] for name, of in before.items()
        }
        layout.thaw()
        layout.clear_talk()
        assert kv.is_empty
        assert at_start(kv)


def test_a_limit_counts_states() -> None:
    with made(STATE, FULL, checkpoints=1, dtype="f32") as kv:
        step(kv, 20)
        token = 2 * 2 * 64 * 4
        assert kv.memory_usage_bytes == 64 + 20 * token
        with pytest.raises(um.CacheFull, match="the states alone take 64 bytes"):
            kv.enforce_memory_limit(63)
        assert kv.enforce_memory_limit(64 + 5 * token + 1)
        assert (kv.seq_len, kv.memory_usage_bytes, states_at(kv)) == (5, 64 + 5 * token, 20)


def test_making_it_may_fail() -> None:
    before = ledger()["history"]["mapped_bytes"]
    for _, outcome in each_call_fails(lambda: made(STATE, FULL, checkpoints=2)):
        if isinstance(outcome, Exception):
            assert ledger()["history"]["mapped_bytes"] == before
    with outcome as kv:
        step(kv, 3)
        kv.checkpoint()
        during = ledger()["history"]["mapped_bytes"]
        for _, copied in each_call_fails(kv.copy):
            if isinstance(copied, Exception):
                assert ledger()["history"]["mapped_bytes"] == during
        with copied as other:
            step(other, 2)
            other.crop(3)
            assert (states_at(other), other.checkpoints) == (3, (3,))
            step(other)
            assert states_at(kv) == 3


# ---- what is refused ----

MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no dimensions": (lambda: um.LayerState(()), ValueError, "shape: expected 1 to 8 dimensions"),
    "a size of 0": (lambda: um.LayerState((3, 0)), ValueError, "shape: expected an integer from 1"),
    "blocks": (lambda: um.LayerState((32,), "q8_0"), ValueError, "expected f32, f16 or bf16 of a"),
    "two types": (lambda: um.LayerState((3,), "f32,f16"), ValueError, "got 'f32,f16'"),
    "sharing a state": (
        lambda: made(STATE, um.LayerKV(2, 64, share_of=0)),
        ValueError,
        "the number of another layer, with rows of its own, got 0",
    ),
    "checkpoints of no state": (
        lambda: made(FULL, checkpoints=2),
        ValueError,
        "checkpoints: expected together with a LayerState",
    ),
    "every of none": (
        lambda: made(STATE, checkpoint_every=2),
        ValueError,
        "checkpoint_every: expected together with checkpoints",
    ),
    "every 0": (
        lambda: made(STATE, checkpoints=1, checkpoint_every=0),
        ValueError,
        "checkpoint_every: expected",
    ),
    "too many": (
        lambda: made(STATE, checkpoints=2**31 - 1, batch=2**20),
        ValueError,
        r"too large: expected below 2\*\*47 bytes, .*: take fewer checkpoints",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str) -> None:
    call, error, said = MISTAKES[name]
    with pytest.raises(error, match=said):
        call()


def test_a_layer_has_tokens_or_a_state() -> None:
    rows = np.zeros((1, 2, 64), "f2")
    with made(STATE, FULL) as kv:
        for call, said in (
            (lambda: kv.append(0, rows, rows), r"layer 0 keeps a state.*write into state\(0\)"),
            (lambda: kv.layer(0), r"layer 0 keeps a state and no tokens: expected state\(0\)"),
            (lambda: kv.address(0, "k"), "keeps a state"),
            (lambda: kv.row_of(0), "keeps a state"),
            (lambda: kv.state(1), r"layer 1 keeps tokens and no state: expected layer\(1\)"),
            (kv.checkpoint, "no room for one: make it with checkpoints="),
        ):
            with pytest.raises(ValueError, match=said):
                call()


# ---- snapshots ----


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    layers = (STATE, WIDE, FULL, CONV, um.LayerKV(2, 64, share_of=2))
    with made(*layers, batch=2, checkpoints=3, checkpoint_every=50, spare_rows=4) as kv:
        for n in (8, 2, 6, 4):
            step(kv, n)
            kv.checkpoint()
        step(kv)
        kv.save(tmp_path / "session", tokens=list(range(21)), model="tiny")
    return tmp_path / "session"


@pytest.mark.parametrize("mode", ["map", "copy"])
def test_a_snapshot_has_its_checkpoints(tmp_path: Path, mode: Any) -> None:
    with made(STATE, FULL, CONV, batch=2, checkpoints=3, checkpoint_every=50) as kv:
        for n in (10, 6, 4, 2):
            step(kv, n)
            kv.checkpoint()
        step(kv)
        kv.save(tmp_path / "session", tokens=list(range(23)), model="tiny")
        expected = [kv.state(i).copy() for i in (0, 2)]
    said: dict[str, Any] = {"tokens": list(range(30)), "model": "tiny"}
    with um.KVCache.restore(tmp_path / "session", mode=mode, **said) as kv:
        assert (kv.seq_len, kv.next_position, kv.batch) == (23, 23, 2)
        assert kv.checkpoints == (16, 20, 22)
        for i, state in zip((0, 2), expected, strict=True):
            assert same_bits(kv.state(i), state)
        if mode == "map":
            kv.verify()
        kv.crop(20)
        assert (kv.next_position, states_at(kv)) == (20, 20)
        kv.checkpoint()
        step(kv, 31)
        assert kv.checkpoints == (16, 20, 51)


def test_a_snapshot_of_states_alone(tmp_path: Path) -> None:
    path = tmp_path / "session"
    with made(STATE, CONV, checkpoints=1) as kv:
        step(kv, 9)
        kv.checkpoint()
        step(kv, 2)
        kv.save(path, tokens=list(range(11)))
    described: Any = snapshot.check(path)
    assert (described.n_layers, described.parts, described.order) == (2, (), "token")
    assert described.tokens.tolist() == list(range(11))
    with um.KVCache.restore(path, tokens=list(range(11))) as kv:
        assert (kv.seq_len, states_at(kv), kv.checkpoints) == (11, 11, (9,))
        assert kv.layers == (STATE, CONV)
        kv.crop(9)
        assert states_at(kv) == 9
    with pytest.raises(um.SnapshotError, match="no prefix"):
        um.KVCache.restore(path, tokens=[1])


def test_a_snapshot_describes_its_states(saved: Path) -> None:
    described: Any = snapshot.describe(saved)
    assert described.layers[0] == STATE
    assert described.layers[4] == um.LayerKV(2, 64, dtype="f16", share_of=2)
    states = described.states
    assert (states.states, states.positions, states.batch) == ((STATE, CONV), (10, 16, 20), 2)
    assert (states.max_checkpoints, states.every, described.model) == (3, 50, "tiny")
    assert described.file_bytes == saved.stat().st_size
    assert "2 states of " in str(described)
    assert "3 checkpoints" in str(described)


def test_a_snapshot_is_read_into_a_cache_with_less_room(saved: Path) -> None:
    described: Any = snapshot.describe(saved)
    options = {"batch": 2, "spare_rows": 4, "most": 99}
    with made(*described.layers, checkpoints=2, **options) as kv:
        snapshot.read_into(kv, saved, model="tiny")
        assert (kv.next_position, states_at(kv), kv.seq_len) == (21, 21, 21)
        assert kv._body._states.positions == [16, 20]
        assert kv.checkpoints == ()  # of the window only what is shown was saved
        damaged = bytearray(saved.read_bytes())
        damaged[-1] ^= 1
        saved.write_bytes(damaged)
        kv.clear()
        with pytest.raises(um.SnapshotError, match="checksum"):
            snapshot.read_into(kv, saved)
        assert (kv.next_position, kv.checkpoints, at_start(kv)) == (0, (), True)
    other = (um.LayerState((5, 3)), *described.layers[1:])
    with made(*other, **options) as kv, pytest.raises(um.SnapshotError, match="layers="):
        snapshot.read_into(kv, saved)


def test_every_byte_of_a_snapshot_counts(saved: Path) -> None:
    whole = saved.read_bytes()
    described: Any = snapshot.describe(saved)
    begin, data = described.states.base, described.states.data_offset
    places = [8, 60, *range(begin, begin + 136, 8), begin + 140, begin + data - 1, begin + data]
    for at in (*places, begin + described.states.file_bytes - 1):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        saved.write_bytes(damaged)
        with pytest.raises(um.SnapshotError):
            snapshot.check(saved)
        with pytest.raises(um.SnapshotError):
            um.KVCache.restore(saved, mode="copy")
    for n in (begin + 5, begin + 140, begin + data + 5):
        saved.write_bytes(whole[:n])
        with pytest.raises(um.SnapshotError):
            um.KVCache.restore(saved)
