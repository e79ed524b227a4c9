"""The stream of a model: asking for pieces from threads, giving slots back, and forks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unimem as um
from support.files import gguf_files as gf
from support.files import streamed_models as models
from support.processes.at_once import at_once
from support.processes.forks import in_child, refuses

pytestmark = pytest.mark.usefixtures("gives_memory_back", "leaves_no_descriptor")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return models.write(tmp_path / "m.gguf", models.mixture(other=True), n_used=2)


@pytest.fixture
def weights(path: Path) -> Iterator[um.Weights]:
    with um.open_weights(path, load="stream") as opened:
        yield opened


@pytest.mark.parametrize(
    ("ids", "error", "match"),
    [
        (8, ValueError, "the 8 pieces of 'blk.1.ffn_up_exps.weight', from 0 to 7, got 8"),
        ([0, -1], ValueError, "from 0 to 7, got -1"),
        (np.uint64(2**64 - 1), ValueError, "got 18446744073709551615"),
        ([0.0], TypeError, "expected integers.*float64"),
        ([True], TypeError, "expected integers.*bool"),
        ("a", TypeError, "expected integers"),
    ],
)
def test_ids_that_are_no_pieces_are_refused(
    weights: um.Weights, ids: Any, error: type[Exception], match: str
) -> None:
    up = models.streamed(weights)["blk.1.ffn_up_exps.weight"]
    for call in (up.ensure, up.prefetch):
        with pytest.raises(error, match=f"^ids: .*{match}"):
            call(ids)
    assert models.stream(weights).misses == 0


def test_what_was_prefetched_is_asked_for_without_a_miss(weights: um.Weights) -> None:
    up = models.streamed(weights)["blk.1.ffn_up_exps.weight"]
    up.prefetch([3, 4])
    models.check(up, [3, 4])
    assert (models.stream(weights).hits, models.stream(weights).misses) == (2, 0)


def test_threads_have_pieces_of_their_own(weights: um.Weights) -> None:
    """What a thread has asked for stays while another asks for as much as there is room for."""
    stream, found = models.stream(weights), models.streamed(weights)
    gate = found["blk.0.ffn_gate_exps.weight"]
    stream.resize(stream.least_bytes + 4 * 4096 * 8)
    mine = models.check(gate, [0, 1])

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(50):
            tensor = found[f"blk.{rng.integers(2)}.ffn_up_exps.weight"]
            models.check(tensor, rng.integers(0, 8, 1))

    assert len(gate.pool) >= 4
    at_once(2, work)
    pool, data = gate.pool, models.in_file(gate)
    assert [pool[slot].tobytes() for slot in mine] == [data[0].tobytes(), data[1].tobytes()]


def test_the_pieces_of_a_thread_that_ended_are_free_again(weights: um.Weights) -> None:
    stream, gate = models.stream(weights), models.streamed(weights)["blk.0.ffn_gate_exps.weight"]
    stream.resize(stream.least_bytes)
    for first in range(0, 8, 2):
        thread = threading.Thread(target=models.check, args=(gate, [first, first + 1]))
        thread.start()
        thread.join()
    models.check(gate, [0, 1])
    assert len(stream._holders) == 1


def test_a_pool_waits_for_those_that_use_its_last_slots(weights: um.Weights) -> None:
    stream, gate = models.stream(weights), models.streamed(weights)["blk.0.ffn_gate_exps.weight"]
    asked, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        gate.ensure(range(8))
        asked.set()
        go_on.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    asked.wait()
    before = stream.budget_bytes, stream.slot_bytes
    with pytest.raises(BufferError):
        stream.resize(stream.least_bytes)
    assert (stream.budget_bytes, stream.slot_bytes) == before
    go_on.set()
    thread.join()
    models.check(gate, range(8))  # this thread's own are let go
    stream.resize(stream.least_bytes)
    assert stream.slot_bytes < before[1]


def test_slots_are_given_back_to_the_least(weights: um.Weights) -> None:
    stream, gate = models.stream(weights), models.streamed(weights)["blk.0.ffn_gate_exps.weight"]
    whole = weights.mapped_bytes
    with um.Governor() as governor:
        governor.add(weights)
        first = governor.give_back()
        assert 0 < first == whole - weights.mapped_bytes
        assert governor.events[-1].given_back == ((f"slots of {stream.path}", first),)
        while governor.give_back():
            assert weights.mapped_bytes <= stream.budget_bytes
        assert weights.mapped_bytes == stream.least_bytes
    models.check(gate, [6, 7])
    stream.resize()
    assert weights.mapped_bytes == whole


def test_slots_move_to_the_pool_that_misses_more(tmp_path: Path) -> None:
    """Layers 2 and 3 use two of their experts, the others all alike."""
    shape = models.mixture(4)
    for i in (2, 3):
        shape[f"blk.{i}.ffn_down_exps.weight"] = (96, 64, 8), gf.F16
    path = models.write(tmp_path / "m.gguf", shape, n_used=2)
    with um.open_weights(path, load="stream") as w:
        stream, rng = models.stream(w), np.random.default_rng(1)
        found = [models.tensor(w, f"blk.{i}.ffn_down_exps.weight") for i in range(4)]
        stream.resize((stream.least_bytes + stream.budget_bytes) // 2)
        stream._move_slots()
        before = [len(tensor.pool) for tensor in found]
        assert before[0] < 16
        for _ in range(300):
            for i, tensor in enumerate(found):
                tensor.ensure(rng.choice(2 if i > 1 else 8, 2, replace=False))
        stream._move_slots()  # a piece that is held may be in the way
        stream._holder().release()
        stream._move_slots()
        after = [len(tensor.pool) for tensor in found]
        assert after[0] > before[0]
        assert after[2] < before[2]
        assert weight_bytes() == w.mapped_bytes <= stream.budget_bytes
        for tensor in found:
            models.check(tensor, [7, 0])


def weight_bytes() -> int:
    return sum(row.nbytes for row in um.report().rows if row.category.startswith("weights:"))


def test_slots_go_before_all_else(weights: um.Weights) -> None:
    class Spare:
        def give_back(self) -> int:
            return 1

    with um.Governor() as governor, um.PagedKVCache(1, 2, 8, n_blocks=8) as pool:
        governor.add(Spare()).add(pool).add(weights)
        governor.give_back(1)
        assert [name for name, _ in governor.events[-1].given_back] == [
            f"slots of {models.stream(weights).path}"
        ]


def test_a_forked_child_has_what_stays_and_no_reads(weights: um.Weights) -> None:
    gate = models.streamed(weights)["blk.0.ffn_gate_exps.weight"]
    norm = weights["output_norm.weight"]
    models.check(gate, [0])

    def in_a_child() -> bool:
        is_there = norm.as_array().tobytes() == models.in_file(norm).tobytes()
        return is_there and refuses(lambda: gate.ensure([0]), "")

    assert in_child(in_a_child)
    models.check(gate, [0, 5])


def test_a_forked_child_reports_no_pieces(weights: um.Weights) -> None:
    """The report of a child is not lost for a stream of its parent."""
    models.check(models.streamed(weights)["blk.0.ffn_gate_exps.weight"], [0])
    stream = models.stream(weights)
    assert stream.misses == 1

    def in_a_child() -> bool:
        (found,) = um.report().facts["streams"]
        return found == stream.to_dict() and found["misses"] == 0 and "0 misses" in repr(stream)

    assert in_child(in_a_child)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_slots_hold_what_was_asked_for_after_any_change(data: Any, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("stream") / "m.gguf"
    shape = data.draw(st.sampled_from([models.mixture(other=True), models.blocks()]))
    models.write(path, shape, n_used=2)
    with um.open_weights(path, load="stream") as w:
        found = list(models.streamed(w).values())
        most, least = models.stream(w).budget_bytes, models.stream(w).least_bytes
        for _ in range(data.draw(st.integers(1, 8))):
            if data.draw(st.booleans()):
                models.stream(w).resize(data.draw(st.integers(least, most)))
            assert w.mapped_bytes <= models.stream(w).budget_bytes
            tensor = data.draw(st.sampled_from(found))
            ids = data.draw(st.lists(st.integers(0, tensor.n_pieces - 1), min_size=1, max_size=2))
            before = models.stream(w).hits + models.stream(w).misses
            models.check(tensor, ids)
            assert models.stream(w).hits + models.stream(w).misses - before == len(set(ids))
