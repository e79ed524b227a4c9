"""Pieces of files in slots: contents, eviction, sizes and errors, beside a model."""

from __future__ import annotations

import errno
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

import unimem as um
from support.kernel import proc_maps
from support.processes.forks import needs_fork
from unimem._core.pieces import Holder, Pieces, strides
from unimem._core.status import counters

pytestmark = pytest.mark.usefixtures("gives_memory_back")

PARTS = (5000, 301)
N_PIECES = 24
DATA = np.random.default_rng(3).integers(0, 256, 400_000, np.uint8)


def offsets_of(piece: int) -> list[tuple[int, int]]:
    """Both parts of a piece: at any place, and at whole units."""
    return [(0, 32 + piece * 7001), (0, 200_704 + piece * 4096)]


PIECES = [(0, offsets_of(piece)) for piece in range(N_PIECES)]
N_GROUPS = 3
GROUPS = [piece // 8 for piece in range(N_PIECES)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pieces") / "model.bin"
    path.write_bytes(DATA.tobytes())
    return path


def make(path: Path, n_slots: int = 6, **options: Any) -> Pieces:
    with path.open("rb") as file:
        return Pieces(
            [(file.fileno(), str(path))], [PARTS], PIECES, slots=[n_slots], pages="4k", **options
        )


@pytest.fixture(params=["ring", "threads"])
def pieces(path: Path, request: pytest.FixtureRequest) -> Iterator[Pieces]:
    try:
        made = make(path, io=request.param)
    except OSError as error:
        pytest.skip(f"no {request.param}: {error}")
    with made:
        yield made


def content_of(pieces: Pieces, slot: int) -> list[bytes]:
    return [
        pieces.array(0, part, "uint8", (nbytes,))[slot].tobytes()
        for part, nbytes in enumerate(PARTS)
    ]


def wanted_of(piece: int) -> list[bytes]:
    return [
        DATA[at : at + nbytes].tobytes()
        for (_, at), nbytes in zip(offsets_of(piece), PARTS, strict=True)
    ]


def check(pieces: Pieces, holder: Holder, ids: list[int]) -> None:
    for piece, slot in zip(ids, holder.ensure(ids), strict=True):
        assert content_of(pieces, slot) == wanted_of(piece)
        assert pieces.slot(piece) == slot


# ---- contents ----


def test_slots_hold_what_the_file_holds(pieces: Pieces) -> None:
    with pieces.holder() as holder:
        for piece in range(N_PIECES):
            check(pieces, holder, [piece, (piece + 1) % N_PIECES, piece])
        check(pieces, holder, [3, 20, 5, 6, 7, 8])
        assert holder.ensure([]).tolist() == []
        assert holder.ensure(np.array([[3, 20], [20, 3]])).shape == (2, 2)
    found = pieces.stat()
    assert found["resident"] == 6
    assert found["resident_bytes"] == 6 * sum(PARTS)
    assert found["misses"] == found["evicted"] + 6


def test_arrays_lie_over_all_slots(pieces: Pieces) -> None:
    array = pieces.array(0, 0, "<i4", (2, 625))
    assert array.shape == (6, 2, 625)
    assert array.strides == (pieces.stride(0), 2500, 4)
    assert array.ctypes.data == pieces.address(0) + pieces.part_offset(0, 0)
    assert pieces.part_offset(0, 1) % 32 == 0
    assert strides([PARTS], PIECES) == [pieces.stride(0)]
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="shape: expected 5000 bytes"):
        pieces.array(0, 0, "<i4", (2, 600))
    with pytest.raises(ValueError, match="part: expected 0 to 1"):
        pieces.array(0, 2, "uint8", (301,))
    with pytest.raises(ValueError, match="pool: expected 0 to 0"):
        pieces.stride(1)


def settled_counters() -> Any:
    """Return the counters once threads that have read are asleep again."""
    found = None
    while found != (found := counters()):
        time.sleep(0.1)
    return found


def test_a_hit_makes_no_system_call(pieces: Pieces) -> None:
    ids = np.array([1, 2, 3, 1], np.int32)
    with pieces.holder() as holder:
        holder.ensure(ids)
        before = settled_counters()
        for _ in range(100):
            holder.ensure(ids)
        assert counters() == before


def test_prefetched_pieces_are_hits(pieces: Pieces) -> None:
    with pieces.holder() as holder:
        pieces.prefetch([4, 5])
        pieces.prefetch([])
        check(pieces, holder, [5, 4])
        found = pieces.stat()
        assert (found["misses"], found["prefetched"], found["prefetch_hits"]) == (0, 2, 2)


def test_the_memory_is_in_the_ledger(pieces: Pieces) -> None:
    assert [block.name for block in pieces.blocks] == ["pieces:slots"]
    assert [block.category for block in pieces.blocks] == ["weights"]
    assert pieces.blocks[0].nbytes >= 6 * pieces.stride(0)


# ---- beside a model ----


class Machine(RuleBasedStateMachine):
    """Any calls, beside a model that knows which pieces are there, and what each is worth.

    Until the first prefetch, which ends at any time.
    """

    path: Path

    @initialize(n_slots=st.integers(1, 8), policy=st.sampled_from(["recent", "cycle", "frequent"]))
    def begin(self, n_slots: int, policy: Any) -> None:
        self.pieces = make(self.path, n_slots, policy=policy, groups=GROUPS)
        self.policy, self.n_slots = policy, n_slots
        self.holders = [self.pieces.holder() for _ in range(2)]
        self.kept: list[set[int]] = [set(), set()]
        self.there: set[int] = set()
        self.known = True  # whether the model knows what is there
        self.n_calls, self.turn = 0, 0  # and the group that the last one asked for
        self.clocks = [0] * N_GROUPS
        self.uses: list[list[tuple[int, int]]] = [[] for _ in PIECES]  # calls, all and its group's

    def teardown(self) -> None:
        if hasattr(self, "pieces"):
            for holder in self.holders:
                holder.close()
            self.pieces.close()

    def now_there(self) -> set[int]:
        return {piece for piece in range(N_PIECES) if self.pieces.slot(piece) is not None}

    def use(self, ids: list[int]) -> None:
        self.n_calls += 1
        for group in {GROUPS[piece] for piece in ids}:
            self.clocks[group] += 1
        for piece in set(ids):
            self.uses[piece].append((self.n_calls, self.clocks[GROUPS[piece]]))
        self.turn = GROUPS[ids[-1]]

    def worth(self, piece: int) -> float:
        group = GROUPS[piece]
        if self.policy != "frequent":
            return self.uses[piece][-1][0] * (-1 if self.policy == "cycle" else 1)
        ages = [self.clocks[group] - clock for _, clock in self.uses[piece]]
        far = (group - self.turn - 1) % N_GROUPS + 1
        value = sum(math.pow(2, -age / 64) for age in ages) + 8 * (0 in ages)
        return value * (1 - 0.3 * far / N_GROUPS)

    def check_evicted(self, wanted: set[int]) -> None:
        """No more went than had to, and what went is worth no more than what stayed."""
        found, before = self.now_there(), self.there | wanted
        assert found <= before
        assert len(found) == min(self.n_slots, len(before))
        gone = [self.worth(piece) for piece in before - found]
        stayed = [self.worth(piece) for piece in found - wanted - self.kept[0] - self.kept[1]]
        assert max(gone, default=-1e9) <= min(stayed, default=1e9) + 1e-4
        self.there = found

    @rule(
        holder=st.integers(0, 1),
        ids=st.lists(st.integers(0, N_PIECES - 1), max_size=10)
        | st.integers(0, N_PIECES - 1).map(lambda piece: [piece]),
    )
    def ensure(self, holder: int, ids: list[int]) -> None:
        wanted, others = set(ids), self.kept[1 - holder]
        if len(wanted) > self.n_slots:
            with pytest.raises(um.CapacityError):
                self.holders[holder].ensure(ids)
            return
        self.kept[holder] = set()
        if ids:
            self.use(ids)
        if len(wanted | others) > self.n_slots:
            with pytest.raises(BufferError, match="keep too many slots: try again when they let"):
                self.holders[holder].ensure(ids)
            self.known &= len(wanted) == 1  # else some are being read
            return
        check(self.pieces, self.holders[holder], ids)
        if self.known:
            self.check_evicted(wanted)
        self.kept[holder] = wanted

    @rule(ids=st.lists(st.integers(0, N_PIECES - 1), max_size=10))
    def prefetch(self, ids: list[int]) -> None:
        self.pieces.prefetch(ids)
        self.known = False

    @rule(holder=st.integers(0, 1))
    def release(self, holder: int) -> None:
        self.holders[holder].release()
        self.kept[holder] = set()

    @rule(n_slots=st.integers(1, 12))
    def resize(self, n_slots: int) -> None:
        at_end = {
            piece
            for piece in self.kept[0] | self.kept[1]
            if (self.pieces.slot(piece) or 0) >= n_slots
        }
        if at_end:
            with pytest.raises(BufferError):
                self.pieces.resize(0, n_slots)
            return
        self.pieces.resize(0, n_slots)
        self.n_slots, self.there = n_slots, self.now_there()

    @invariant()
    def what_is_kept_stays(self) -> None:
        if hasattr(self, "pieces"):
            for piece in self.kept[0] | self.kept[1]:
                slot = self.pieces.slot(piece)
                assert slot is not None
                assert slot < self.n_slots
                assert content_of(self.pieces, slot) == wanted_of(piece)
            assert self.pieces.stat()["resident"] <= self.n_slots == self.pieces.n_slots(0)


def test_any_calls_beside_a_model(path: Path) -> None:
    class WithFile(Machine):
        pass

    WithFile.path = path
    WithFile.TestCase().runTest()


# ---- sizes ----


def test_a_smaller_pool_gives_memory_back(path: Path) -> None:
    with make(path, 16) as pieces, pieces.holder() as holder:
        array = pieces.array(0, 0, "uint8", (5000,))
        check(pieces, holder, list(range(16)))
        with pytest.raises(BufferError, match="a holder keeps a piece"):
            pieces.resize(0, 4)
        holder.release()
        full = pieces.blocks[0].verify().resident_bytes
        pieces.resize(0, 4)
        assert pieces.n_slots(0) == 4
        assert pieces.blocks[0].verify().resident_bytes <= full // 4 + proc_maps.PAGE
        assert array[15, 0] in range(256)  # memory under an array stays readable
        check(pieces, holder, [9, 10, 11, 12])
        pieces.resize(0, N_PIECES)
        check(pieces, holder, list(range(N_PIECES)))
        with pytest.raises(ValueError, match=f"expected at most {N_PIECES}"):
            pieces.resize(0, N_PIECES + 1)
        with pytest.raises(ValueError, match="n_slots"):
            pieces.resize(0, 0)


# ---- errors ----


def test_a_file_that_was_cut(path: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.bin"
    cut.write_bytes(path.read_bytes())
    with make(cut) as pieces, pieces.holder() as holder:
        os.truncate(cut, offsets_of(10)[1][1] + 300)
        for _ in range(2):
            with pytest.raises(OSError, match=r"301 bytes at offset 241664 .*shorter") as caught:
                holder.ensure([9, 10])
            assert caught.value.errno == errno.EIO
            assert caught.value.filename == str(cut)
        cut.write_bytes(path.read_bytes())
        check(pieces, holder, [10, 11])
        assert pieces.stat()["failed"] == 2


WRONG: list[tuple[str, type[Exception], str, Callable[[Pieces, Holder], object]]] = [
    ("id", ValueError, f"got {N_PIECES}", lambda p, h: h.ensure([N_PIECES])),
    ("share", TypeError, "integers", lambda p, h: h.ensure([0.5])),
    ("negative id", ValueError, "got -1", lambda p, h: p.prefetch([-1])),
    ("many", um.CapacityError, "asked for 7 slots", lambda p, h: h.ensure(range(7))),
    ("open holder", BufferError, "1 open holders or calls", lambda p, h: p.close()),
    ("file", ValueError, "the number of a file", lambda p, h: p.is_direct(1)),
    ("pickle", TypeError, "cannot be pickled", lambda p, h: p.__reduce__()),
]


@pytest.mark.parametrize(
    ("kind", "match", "call"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG]
)
def test_wrong_calls(
    path: Path, kind: type[Exception], match: str, call: Callable[[Pieces, Holder], object]
) -> None:
    with make(path) as pieces, pieces.holder() as holder:
        with pytest.raises(kind, match=match):
            call(pieces, holder)
        check(pieces, holder, [1])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"pools": [[]]}, "expected 1 to 8 parts"),
        ({"pools": [[0]]}, "part 0 of pool 0"),
        ({"pieces": [(1, [(0, 0)])]}, "got pool 1"),
        ({"pieces": [(0, [])]}, "0 ranges in piece 0"),
        ({"pieces": [(0, [(1, 0)])]}, "got 1 in piece 0"),
        ({"pieces": [(0, [(0, -1)])]}, "offset in piece 0"),
        ({"pieces": []}, "expected files, pools and pieces"),
        ({"slots": [0]}, "slots of pool 0"),
        ({"slots": [1, 1]}, "a number for each of 1 pools"),
        ({"policy": "best"}, "policy"),
        ({"groups": [0, 0]}, "groups: expected a number from 0 to 0 for each of 1 pieces, got 2"),
        ({"groups": [1]}, "groups"),
        ({"io": "aio"}, "io"),
    ],
)
def test_wrong_arguments(path: Path, change: dict[str, Any], match: str) -> None:
    options: dict[str, Any] = {"pools": [[100]], "pieces": [(0, [(0, 0)])], "slots": [1]}
    options |= change
    with path.open("rb") as file, pytest.raises(ValueError, match=match):
        Pieces([(file.fileno(), str(path))], options.pop("pools"), options.pop("pieces"), **options)


def test_after_the_end(path: Path) -> None:
    pieces = make(path)
    holder = pieces.holder()
    holder.close()
    holder.close()
    with pytest.raises(um.ClosedError):
        holder.ensure([1])
    pieces.close()
    pieces.close()
    assert pieces.closed
    for call in (pieces.holder, pieces.stat, lambda: pieces.prefetch([1]), lambda: pieces.slot(1)):
        with pytest.raises(um.ClosedError):
            call()


@needs_fork
def test_a_forked_child_is_refused(path: Path) -> None:
    with make(path) as pieces, pieces.holder() as holder:
        pieces.prefetch([1, 2, 3])
        child = os.fork()
        if child == 0:
            try:
                holder.ensure([1])
            except um.ClosedError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        check(pieces, holder, [1, 2, 3])


def test_signals_do_not_lose_pieces(path: Path) -> None:
    """A handler runs in between, and what it raises comes out."""
    calls = []
    before = signal.signal(signal.SIGALRM, lambda *_: calls.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        with make(path, 3) as pieces, pieces.holder() as holder:
            for piece in range(10 * N_PIECES):
                check(pieces, holder, [piece % N_PIECES])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert calls


def test_threads_share_the_pieces(path: Path) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            with shared.holder() as holder:
                for _ in range(100):
                    ids = random.integers(0, N_PIECES, 2).tolist()
                    shared.prefetch(random.integers(0, N_PIECES, 2).tolist())
                    check(shared, holder, ids)
        except BaseException as error:
            failures.append(error)

    with make(path, 10) as shared:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
