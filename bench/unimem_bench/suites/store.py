"""What a store of prefixes saves before the first token, what it costs, and its lookups."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

import unimem as um
from unimem._core.hashing import copy_hashed
from unimem.kv.store.engine_chunks import EngineChunks
from unimem.planning.needs import PREFILL_BATCH
from unimem_bench import decoding, states
from unimem_bench.llama_build import ROOT
from unimem_bench.rounds import Side, milliseconds
from unimem_bench.suite import OURS, Measure, NotMeasured, Suite, at_most, costs, faster
from unimem_bench.suites.snapshot import require_engine

SUITE = Suite("store", "What does a store of prefixes save, and what does it cost?", in_quick=False)

IN_RAM, ON_DISK, PUT, PREFILL = "unimem, RAM", "unimem, disk", "unimem, put", "prefill"
QUESTION_TOKENS = 16  # that follow the known ones, and are computed
QUICK_SHARE = 8  # of the tokens, in a quick run
SETTLE_S = 0.05  # that threads poll after they have computed
N_CHUNKS, N_CHUNKS_QUICK = 100_000, 2_000
N_LOOKUPS = 100  # in one measurement
MIB = 1 << 20


def prompt_of(n: int) -> NDArray[np.int32]:
    """Return a prompt whose first n tokens are known."""
    return np.random.default_rng(n).integers(3, 259, n + QUESTION_TOKENS).astype(np.int32)


class Stores:
    """A decoder that has computed a prompt, and stores with its first tokens."""

    def __init__(self, measure: Measure, n: int, undo: ExitStack) -> None:
        from unimem.engine import Decoder
        from unimem.engine.stored_prefixes import Prefixes, model_name

        path, cpus = decoding.prepared(measure, "q4_k_m", 2)
        self.ids = prompt_of(n)
        self.decoder = undo.enter_context(
            Decoder(path, ctx=len(self.ids) + 8, kv_dtype="f16", threads=len(cpus))
        )
        self.decoder.prefill(self.ids)
        self.token = self.decoder.generate_next_token()
        self.nbytes = self.decoder.kv.memory_usage_bytes
        measure.fact("tokens", n)
        measure.fact("prefix_bytes", self.nbytes * n // self.decoder.kv.seq_len)
        states.require_room(disk=6 * self.nbytes, folder=measure.folder)
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(dir=measure.folder)))
        room = 2 * self.nbytes + 64 * MIB
        budgets = {IN_RAM: (room, 0), ON_DISK: (0, room), PUT: (room, room)}
        self.stores = {
            name: undo.enter_context(um.KVStore(folder / str(i), ram_bytes=ram, disk_bytes=disk))
            for i, (name, (ram, disk)) in enumerate(budgets.items())
        }
        # One decoder for all sides, so that memory and threads are the same.
        self._prefixes = {
            name: Prefixes(self.stores[name], self.decoder.weights, PREFILL_BATCH)
            for name in (IN_RAM, ON_DISK)
        }
        self._name = model_name(self.decoder.weights)
        for name in self._prefixes:
            self.stores[name].put(self.decoder.kv, self.ids, model=self._name)
        self._numbers = count()

    def arriving(self, name: str) -> Side:
        """Return a side that prefills the prompt and chooses a token."""

        def arrive() -> None:
            self.decoder.prefill(self.ids)
            if (token := self.decoder.generate_next_token()) != self.token:
                raise AssertionError(f"{name} goes on with token {token}, not {self.token}")

        def run() -> float:
            self.decoder._prefixes = self._prefixes.get(name)
            self.decoder.reset()
            if name == ON_DISK:
                for path in Path(self.stores[name].folder).glob("*.kv"):
                    states.drop(path)
            time.sleep(SETTLE_S)
            elapsed = milliseconds(arrive)
            prefixes = self.decoder._prefixes
            if prefixes and prefixes.n_restored != len(self.ids) - QUESTION_TOKENS:
                raise AssertionError(f"{name} restored {prefixes.n_restored} tokens")
            return elapsed

        return run

    def putting(self) -> Side:
        """Return a side that puts the unknown prompt into RAM and on disk."""

        def run() -> float:
            self.decoder._prefixes = self._prefixes[IN_RAM]
            self.decoder.reset()
            self.decoder.prefill(self.ids)
            os.sync()
            time.sleep(SETTLE_S)
            model = f"{self._name}, {next(self._numbers)}"
            return milliseconds(
                partial(self.stores[PUT].put, self.decoder.kv, self.ids, model=model)
            )

        return run


def first_token(measure: Measure, n: int, rounds: int) -> None:
    """Compare a prompt whose first tokens are known with computing it."""
    require_engine()
    with ExitStack() as undo:
        stores = Stores(measure, n // QUICK_SHARE if measure.quick else n, undo)
        sides: dict[str, Side] = {name: stores.arriving(name) for name in (IN_RAM, ON_DISK)}
        measure.compare(
            ours=sides | {PUT: stores.putting()},
            peers={PREFILL: stores.arriving(PREFILL)},
            rounds=rounds,
            quick_rounds=3,
            warmup=0,  # it was computed and put once
        )


for length, called, n_rounds in ((2 << 10, "2k", 5), (8 << 10, "8k", 3)):
    SUITE.case(
        f"first-token, {called}",
        f"How soon is the first token of a prompt whose first {called} tokens are known?",
        unit="ms",
        targets=[
            faster(PREFILL, 10.0, issue=21, side=IN_RAM),
            faster(PREFILL, 8.0, issue=21, side=ON_DISK),
            costs(PREFILL, 0.05, issue=21, side=PUT),
        ],
    )(partial(first_token, n=length, rounds=n_rounds))


# ---- looking up ----


def looking_up(look: Callable[[], int], expected: int) -> Side:
    """Return a side that measures the microseconds of a lookup."""

    def run() -> float:
        begin = time.perf_counter()
        for _ in range(N_LOOKUPS):
            found = look()
        elapsed = time.perf_counter() - begin
        if found != expected:
            raise AssertionError(f"{found} tokens were found, not {expected}")
        return elapsed / N_LOOKUPS * 1e6

    return run


def make_chunks(folder: Path, keys: Sequence[bytes], n: int, nbytes: int) -> None:
    """Make files of n chunks, with these identities first, without data."""
    rng = np.random.default_rng(0)
    for i in range(n):
        key = keys[i] if i < len(keys) else rng.bytes(32)
        with open(folder / f"{key.hex()}.kv", "wb") as file:
            os.truncate(file.fileno(), nbytes)


@SUITE.case(
    "lookup",
    "What does it cost to look a prompt of 2048 tokens up among 100,000 chunks?",
    unit="us",
    targets=[at_most(200.0, issue=21, side=side) for side in ("hit", "miss")],
)
def lookup(measure: Measure) -> None:
    """Look up a prompt whose chunks are all there, and one whose chunks are all missing."""
    from unimem.kv.store.chunk import ChunkShape, EqualLayers, chunk_keys

    n = N_CHUNKS_QUICK if measure.quick else N_CHUNKS
    ids, others = prompt_of(2048)[:2048], prompt_of(2049)[:2048]
    # The rows of TinyLlama.
    dims: tuple[int, int, int] = (22, 4, 64)
    kind = EqualLayers(*dims, "f16", "f16")
    options: dict[str, Any] = {"ram_bytes": MIB, "disk_bytes": 1 << 50}
    with (
        tempfile.TemporaryDirectory(dir=measure.folder) as folder,
        um.KVStore(folder, **options) as store,
        um.KVCache(*dims, 2048, grow=True, pages="4k") as kv,
    ):
        size = store.chunk_tokens
        keys = list(chunk_keys(kind, "m", ids, size))
        make_chunks(Path(folder), keys, n, ChunkShape(kind.groups[0], size).nbytes)
        measure.fact("chunks", n)
        sides = {
            name: looking_up(partial(store.longest, given, model="m", kv=kv), expected)
            for name, given, expected in (("hit", ids, 2048), ("miss", others, 0))
        }
        measure.compare(ours=sides, rounds=31)


# ---- beside LMCache ----

LMCACHE, UNSYNCED, ONE_PASS = "LMCache", "unimem, not synced", "copied and hashed in memory"
CHUNK_BYTES = 5_900 << 10  # as 256 tokens of a model of some billion weights
N_BESIDE, N_BESIDE_QUICK = 40, 8


class LMCacheProcess:
    """`lmcache_side` in the environment that ``make test-lmcache`` makes."""

    def __init__(self, folder: Path, n: int, undo: ExitStack) -> None:
        python = os.environ.get("LMCACHE_PYTHON", str(ROOT / "build/lmcache/bin/python"))
        script = Path(__file__).parents[1] / "lmcache_side.py"
        try:
            self._process = subprocess.Popen(
                [python, str(script), str(folder), str(n), str(CHUNK_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError as error:
            raise NotMeasured(
                f"wants LMCache in {python}: 'make test-lmcache' makes it, or LMCACHE_PYTHON names "
                f"another: {error}"
            ) from None
        undo.enter_context(self._process)
        undo.callback(self._process.kill)
        self.pid = self._process.pid

    def ask(self, action: str) -> float:
        """Return the milliseconds of an action on all chunks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{action}\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '"it has ended"')
        if isinstance(answer, str):
            raise AssertionError(f"LMCache: {answer}")
        return float(answer)


class OurChunks:
    """The same chunks in stores of unimem, in RAM and on a disk."""

    def __init__(self, folder: Path, n: int, undo: ExitStack) -> None:
        self._given = np.random.default_rng(0).integers(0, 256, (n, CHUNK_BYTES), np.uint8)
        self._out = np.zeros_like(self._given)
        room = 2 * self._given.nbytes + 64 * MIB
        budgets = ("ram", room, 0), ("disk", 0, room)
        self._ram, self._disk = (
            EngineChunks(
                undo.enter_context(
                    um.KVStore(folder / name, ram_bytes=ram, disk_bytes=disk, pages="thp")
                ),
                *("engine", CHUNK_BYTES),
            )
            for name, ram, disk in budgets
        )

    def ask(self, action: str) -> float:
        """Return the milliseconds of an action on all chunks."""
        chunks = self._ram if action in ("put", "get") else self._disk
        if action in ("put", "write"):
            for tier in chunks._store._tiers:
                for i in range(len(self._given)):
                    tier.remove(chunks.identity(b"%d" % i))
            os.sync()
            return milliseconds(partial(self._put, chunks))
        self._out[:] = 0
        elapsed = milliseconds(partial(self._get, chunks))
        if not np.array_equal(self._out, self._given):
            raise AssertionError("unimem gives other bytes than it was given")
        return elapsed

    def _put(self, chunks: EngineChunks) -> None:
        for i, data in enumerate(self._given):
            chunks.put(b"%d" % i, data)
        chunks.sync()

    def _get(self, chunks: EngineChunks) -> None:
        for i, out in enumerate(self._out):
            chunks.get(b"%d" % i, out)

    def write_unsynced(self) -> float:
        """Write chunks without bringing them to the disk."""
        with patch("os.fsync"):
            return self.ask("write")

    def copy(self) -> float:
        """Copy and hash as many bytes in the memory of this process."""

        def copy() -> None:
            for data, out in zip(self._given, self._out, strict=True):
                copy_hashed(data, out)

        return milliseconds(copy)


def beside_lmcache(measure: Measure, action: str, *, is_cold: bool = False) -> None:
    """Put or get chunks of an engine, in LMCache's process and in this one."""
    n = N_BESIDE_QUICK if measure.quick else N_BESIDE
    nbytes = n * CHUNK_BYTES
    measure.pin(None)
    states.require_room(memory=8 * nbytes, disk=4 * nbytes, folder=measure.folder)
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(dir=measure.folder)))
        peer = LMCacheProcess(folder / "theirs", n, undo)
        ours = OurChunks(folder / "ours", n, undo)
        measure.fact("chunks", n)
        measure.fact("chunk_bytes", CHUNK_BYTES)
        for ask in (peer.ask, ours.ask):
            ask("put")
            ask("write")

        def side(ask: Callable[[str], float]) -> float:
            os.sync()
            for path in folder.rglob("*") if is_cold else ():
                if path.is_file():
                    states.drop(path)
            time.sleep(SETTLE_S)
            return ask(action)

        limits: dict[str, Side] = {}
        if action in ("put", "get"):
            limits[ONE_PASS] = ours.copy
        elif action == "write":
            limits[UNSYNCED] = ours.write_unsynced
        measure.compare(
            ours={OURS: partial(side, ours.ask)},
            peers={LMCACHE: partial(side, peer.ask)},
            limits=limits,
            rounds=11,
            warmup=1,
            pids=[peer.pid],
        )


for called, did, how in (
    ("RAM put", "to copy an engine's chunks into RAM", {"action": "put"}),
    ("RAM get", "to copy them back", {"action": "get"}),
    ("disk put", "to write them to a disk", {"action": "write"}),
    ("disk get, warm", "to read them from the page cache", {"action": "read"}),
    ("disk get, cold", "to read them from a disk", {"action": "read", "is_cold": True}),
):
    SUITE.case(
        f"{called} beside LMCache",
        f"What does it cost {did}, beside LMCache, which neither checks nor syncs?",
        unit="ms",
        targets=[costs(LMCACHE, 1.15, issue=44)] if called.startswith("RAM") else [],
    )(partial(beside_lmcache, **how))
