"""One object, many threads: what they do is done one after the other, or refused by a typed error.

Without the interpreter's lock they do it at the same time (`tools/free_threaded.py`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.processes.at_once import at_once
from unimem._core.ledger import entries

N_THREADS = 8
N_ROUNDS = 30
# What an object may answer that another thread has closed, or is changing.
REFUSALS = (um.ClosedError, BufferError, RuntimeError, um.CapacityError)

pytestmark = pytest.mark.usefixtures("gives_memory_back")


def in_turn(*works: Callable[[], object]) -> None:
    """Let each thread do one of these, again and again; a refusal ends a round."""

    def work(number: int) -> None:
        for i in range(N_ROUNDS):
            with contextlib.suppress(*REFUSALS):
                works[(number + i) % len(works)]()

    at_once(N_THREADS, work)


def test_arrays_come_and_go_while_a_block_grows_and_shrinks() -> None:
    step = 4096
    with um.Block(step, pages="4k", reserve=64 * step) as block:

        def write() -> None:
            for i in range(64):
                with contextlib.suppress(ValueError):  # it is not committed now
                    array = block.as_array("uint8", step, i * step)
                    array[:] = 1
                    assert array.all()

        def look() -> None:
            assert block.granted.resident_bytes >= 0
            assert block.verify().page_bytes == step
            assert len(memoryview(block)) >= step

        in_turn(
            write,
            write,
            look,
            lambda: block.commit(64 * step),
            lambda: block.release(step, 9 * step),
        )
        assert block.committed_bytes <= 64 * step


def test_a_block_is_closed_while_others_use_it() -> None:
    for _ in range(N_ROUNDS):
        block = um.Block(4096, pages="4k")

        def use(number: int, block: um.Block = block) -> None:
            with contextlib.suppress(*REFUSALS):
                if number == 0:
                    block.close()
                array = block.as_array()
                array[:] = number
                assert repr(block).startswith("Block")
                assert block.granted is not None

        at_once(4, use)
        block.__exit__()
        assert block.closed


def test_a_tape_is_taken_from_cleared_and_closed() -> None:
    for _ in range(N_ROUNDS):
        tape = um.Tape(1 << 16, pages="4k")

        def use(number: int, tape: um.Tape = tape) -> None:
            with contextlib.suppress(*REFUSALS):
                for _ in range(20):
                    tape.take((4, 8), "float32").fill(number)
                    tape.take_bytes(100)[:] = number
                    assert tape.owns(tape.take_address(8))
                if number == 0:
                    tape.clear()
                if number == 1:
                    tape.__exit__()

        at_once(4, use)
        tape.__exit__()


def test_a_cell_is_given_back_once() -> None:
    with um.Grid(64, 4, pages="4k") as grid:
        for _ in range(N_ROUNDS):
            cell = grid.take()
            refused: list[int] = []

            def give(_: int, cell: um.Cell = cell, refused: list[int] = refused) -> None:
                try:
                    grid.give(cell)
                except REFUSALS:
                    refused.append(1)

            at_once(4, give)
            assert len(refused) == 3
            assert grid.n_available == 4


KINDS: dict[str, dict[str, Any]] = {"fixed": {}, "grow": {"grow": True}, "ring": {"window": 48}}


@pytest.mark.parametrize("kind", KINDS)
def test_many_write_to_one_cache(kind: str) -> None:
    token = np.ones((1, 2, 32), "float32")
    many = np.ones((100, 2, 32), "float32")
    with um.KVCache(1, 2, 32, 4096, dtype="f32", pages="4k", **KINDS[kind]) as kv:

        def read() -> None:
            k, v = kv.layer(0)
            assert k.shape == v.shape
            assert k.size == 0 or k[..., 0].all()

        def reserve() -> None:
            kv.reserve(2)
            kv.rollback()

        def large() -> None:
            if kv.window is None:
                kv.append(0, many, many)

        def crop() -> None:
            with contextlib.suppress(ValueError):  # another thread dropped them meanwhile
                kv.crop(min(5, kv.seq_len))

        def copy() -> None:
            kv.copy().close()

        in_turn(
            lambda: kv.append(0, token, token),
            read,
            large,
            reserve,
            lambda: kv.trim_to(10),
            kv.give_back,
            crop,
            kv.clear,
            lambda: kv.enforce_memory_limit(1 << 20),
            copy,
            entries,
        )
        kv.rollback()
        kv.clear()
        kv.append(0, token, token)
        assert kv.seq_len == 1


def test_layers_that_differ_share_one_position() -> None:
    layers: list[um.LayerKV | um.LayerState]
    layers = [um.LayerKV(2, 32), um.LayerKV(2, 32, window=16), um.LayerState((4, 4))]
    token = np.ones((2, 2, 32), "float32")
    with um.KVCache(layers=layers, max_seq_len=512, dtype="f32", pages="4k", checkpoints=2) as kv:
        in_turn(
            lambda: kv.append_all(token, token),
            lambda: kv.layer(1),
            kv.checkpoint,
            entries,
            lambda: kv.state(2),
            kv.give_back,
            kv.clear,
            lambda: kv.seq_len,
        )
        kv.clear()
        kv.append_all(token, token)
        assert kv.seq_len == 1


def test_sequences_of_a_pool_are_made_and_dropped_by_all() -> None:
    prompt = list(range(20))
    rows = np.ones((20, 1, 32), "float32")
    turn = threading.Lock()
    with um.PagedKVCache(1, 1, 32, n_blocks=64, block_tokens=4, pages="4k") as pool:

        def talk() -> None:
            with turn:  # one writes at a time
                s = pool.sequence(prompt)
                s.append(0, rows[s.n_cached :], rows[s.n_cached :])
                fork = s.fork()
                fork.append(0, rows[:3], rows[:3])
            k, _ = fork.gather(0)
            assert k.shape == (1, 23, 32)
            assert k.all()
            s.close()
            with turn:
                fork.crop(5)
            assert len(fork.block_table) == 2
            fork.close()

        in_turn(talk, talk, talk, lambda: pool.layer(0), pool.give_back, entries)
        assert pool.n_blocks_in_use == 0


def test_one_sequence_has_one_writer() -> None:
    rows = np.ones((2, 1, 32), "float32")
    with (
        um.PagedKVCache(1, 1, 32, n_blocks=300, block_tokens=4, pages="4k") as pool,
        pool.sequence() as s,
    ):

        def gather() -> None:
            with contextlib.suppress(ValueError):  # it was cropped meanwhile
                assert s.gather(0)[0].all()

        in_turn(lambda: s.append(0, rows, rows), gather, lambda: s.crop(min(1, len(s))), s.rollback)
        assert len(s) == s.gather(0)[0].shape[1]


@pytest.mark.parametrize("paged", [False, True])
def test_a_scratchpad_loses_no_row(paged: bool) -> None:
    row, n_refused = np.ones(8, "float32"), 0
    lock = threading.Lock()
    make = um.PagedScratchpad if paged else um.Scratchpad
    with make(N_THREADS * N_ROUNDS, 8, pages="4k") as pad:

        def append(_: int) -> None:
            nonlocal n_refused
            for _ in range(N_ROUNDS):
                try:
                    pad.append(row)
                except RuntimeError:
                    with lock:
                        n_refused += 1

        at_once(N_THREADS, append)
        assert len(pad) == N_THREADS * N_ROUNDS - n_refused
        assert pad.as_array().all()
