"""Kill processes that use one store of prefixes, and damage its files.

It does 100,000 random operations in 8 processes. Meanwhile the size of the folders
of both tiers is measured as ``du`` does, processes are killed at random moments, and files are
damaged. Every restored row is checked. Then 2,000 chunks are damaged one by one, and each must be
noticed. Ends with status 1 and a traceback if a budget was exceeded, a wrong row was restored, or a
process failed. The tests do the same for a shorter time.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import unimem as um
from unimem.kv.store.ram_tier import RamTier
from unimem.kv.store.tiers import Tier

CHUNK_TOKENS, N_TALKS, MOST_TOKENS = 4, 40, 20
# One of these chunks: a header, the rows of 4 tokens, and what a file system adds.
CHUNK_BYTES = 4096 + CHUNK_TOKENS * 8192 + 8192
# For too few chunks, so that most conversations do not fit.
RAM_BYTES, DISK_BYTES = (16384 + n * CHUNK_BYTES for n in (20, 60))
MODEL = "m"


# ---- conversations, and rows that tell whose they are ----


def talk(number: int) -> list[int]:
    """Return the tokens of a conversation; other conversations share its first chunks."""
    return [1] * 4 + [number % 5] * 4 + [number % 10] * 4 + [number] * 8


def marks(tokens: Sequence[int]) -> NDArray[np.uint32]:
    """Return for each token a hash of it and all before it."""
    raw = np.array(tokens, "<u4").tobytes()
    return np.array([zlib.crc32(raw[: 4 * i + 4]) for i in range(len(tokens))], np.uint32)


def make_cache() -> um.KVCache:
    """Return a cache of 8 KiB a token."""
    return um.KVCache(2, 8, 128, 32, pages="4k")


def rows_of(kv: um.KVCache, n: int) -> list[NDArray[np.uint32]]:
    """Return the words of n tokens, of each lane."""
    return [kv._body._rows(*lane).view(np.uint32).reshape(n, -1) for lane in kv._body._lanes()]


def fill(kv: um.KVCache, tokens: Sequence[int]) -> None:
    """Give a cache rows that encode their tokens, and all tokens before them."""
    kv.clear()
    kv.reserve(len(tokens))
    kv.commit(len(tokens))
    for lane, rows in enumerate(rows_of(kv, len(tokens))):
        rows[:] = marks(tokens)[:, None] + np.uint32(lane)


def check(kv: um.KVCache, tokens: Sequence[int]) -> None:
    """Raise AssertionError unless a cache holds the rows of these tokens."""
    assert kv.seq_len == len(tokens)
    for lane, rows in enumerate(rows_of(kv, len(tokens)) if tokens else ()):
        wanted = marks(tokens)[:, None] + np.uint32(lane)
        if (rows != wanted).any():
            wrong = np.argwhere(rows != wanted)
            (row, word), now = wrong[0], int((rows != wanted).sum())
            raise AssertionError(
                f"a wrong row was restored: {len(wrong)} words ({now} if compared again) of lane "
                f"{lane}, the first is {rows[row, word]:#x} instead of {wanted[row, 0]:#x}, word "
                f"{word} of token {row} of {tokens}, the last at {wrong[-1]}; process {os.getpid()}"
            )


# ---- processes, and what stops them ----


class Counts:
    """Two counters for each worker, which outlive it: operations, and restored tokens."""

    def __init__(self, n_workers: int) -> None:
        self._n, self._memory = n_workers, mmap.mmap(-1, 4096 * n_workers)

    def add(self, worker: int, n_restored: int) -> None:
        """Count an operation."""
        at = 4096 * worker
        done, restored = struct.unpack_from("<QQ", self._memory, at)
        struct.pack_into("<QQ", self._memory, at, done + 1, restored + n_restored)

    def total(self) -> tuple[int, int]:
        """Sum them up."""
        found = [struct.unpack_from("<QQ", self._memory, 4096 * i) for i in range(self._n)]
        return sum(done for done, _ in found), sum(restored for _, restored in found)


def open_store(folder: Path) -> um.KVStore:
    """Open the shared store."""
    return um.KVStore(folder, ram_bytes=RAM_BYTES, disk_bytes=DISK_BYTES, chunk_tokens=CHUNK_TOKENS)


def work(folder: Path, worker: int, counts: Counts) -> None:
    """Put and restore until killed."""
    rng = random.Random(os.getpid())
    with open_store(folder) as store, make_cache() as kv:
        while True:
            tokens, n = talk(rng.randrange(N_TALKS))[: rng.randrange(1, MOST_TOKENS + 1)], 0
            if rng.random() < 0.4:
                fill(kv, tokens)
                store.put(kv, tokens, model=MODEL)
            else:
                kv.clear()
                n = store.restore_into(kv, tokens, model=MODEL)
                check(kv, tokens[:n])
            if rng.random() < 0.001:
                store.give_back()
            counts.add(worker, n)


def start(folder: Path, worker: int, counts: Counts) -> int:
    """Start a worker and return its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            work(folder, worker, counts)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def taken(folder: Path) -> int:
    """Return the size of a folder as ``du`` does; files that disappear meanwhile count as 0."""
    found = os.lstat(folder).st_blocks
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):
            found += os.lstat(folder / name).st_blocks
    return found * 512


def kill_at_random(folder: Path, n_workers: int, n_operations: int, n_kills: int) -> dict[str, Any]:
    """Let processes use a store while they are killed and files are damaged.

    `n_workers` run at a time; `n_operations` and `n_kills` are totals. Returns what the program
    prints.
    """
    rng, counts = random.Random(1), Counts(n_workers)
    n_killed = n_damaged = n_looks = 0
    begin = time.monotonic()
    with open_store(folder) as keeper:
        budgets = {Path(tier.path): tier.budget_bytes for tier in keeper.stat().tiers}
        most = dict.fromkeys(budgets, 0)
        workers = [start(folder, i, counts) for i in range(n_workers)]
        try:
            while counts.total()[0] < n_operations or n_killed < n_kills:
                for path, budget in budgets.items():
                    most[path] = max(most[path], taken(path))
                    assert most[path] <= budget, f"{path} takes {most[path]} bytes of {budget}"
                n_looks += 1
                # Not more, or the budgets would never be used up.
                if n_damaged * 20 < counts.total()[0]:
                    n_damaged += damage(rng, rng.choice(keeper._tiers))
                if counts.total()[0] * n_kills >= n_killed * n_operations:
                    i = rng.randrange(n_workers)
                    os.kill(workers[i], signal.SIGKILL)
                    _, status = os.waitpid(workers[i], 0)
                    assert os.WIFSIGNALED(status), "a worker has failed"
                    workers[i] = start(folder, i, counts)
                    n_killed += 1
                pid, _ = os.waitpid(-1, os.WNOHANG)
                assert pid == 0, "a worker has failed"
        finally:
            for pid in workers:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for pid in workers:
            os.waitpid(pid, 0)
        for tier in keeper.stat().tiers:
            assert tier.nbytes <= tier.budget_bytes
    ram, disk = budgets
    assert not ram.exists(), "the RAM of a closed store is left"
    n_done, n_restored = counts.total()
    return {
        "operations": n_done,
        "restored_tokens": n_restored,
        "kills": n_killed,
        "damaged_meanwhile": n_damaged,
        "looks": n_looks,
        "most_of_ram": round(most[ram] / RAM_BYTES, 3),
        "most_of_disk": round(most[disk] / DISK_BYTES, 3),
        "left": sorted({name.rpartition(".")[2] for name in os.listdir(disk)}),
        "seconds": round(time.monotonic() - begin, 1),
    }


# ---- damage ----

# From where on a chunk is replaced by another one: a header has its hash behind its identity.
FIRSTS = (0, 64)


def flip(rng: random.Random, path: Path, _: Path) -> None:
    """Flip a bit."""
    with open(path, "r+b") as file:
        at = rng.randrange(max(1, os.fstat(file.fileno()).st_size))
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes(each ^ 1 << rng.randrange(8) for each in byte), at)


def resize(rng: random.Random, path: Path, _: Path) -> None:
    """Shorten a file, or lengthen it."""
    size = path.stat().st_size
    os.truncate(path, rng.choice([rng.randrange(1, max(2, size)), size + rng.randrange(1, 4096)]))


def swap(rng: random.Random, path: Path, other: Path) -> None:
    """Replace it by another chunk, as far as that fits, as a whole or but for the beginning."""
    with open(path, "r+b") as file:
        first = file.seek(rng.choice(FIRSTS))
        file.write(other.read_bytes()[first : os.fstat(file.fileno()).st_size])


DAMAGES: tuple[Callable[[random.Random, Path, Path], None], ...] = (flip, resize, swap)


def chunks_of(folder: Path) -> list[Path]:
    """List the chunks of a folder."""
    return sorted(path for path in folder.iterdir() if path.suffix == ".kv")


def damage(rng: random.Random, tier: Tier) -> int:
    """Damage one of the chunks; 0 if it disappeared meanwhile."""
    if isinstance(tier, RamTier):
        return damage_pool(rng, tier)
    chunks = chunks_of(Path(tier.stat().path))
    if len(chunks) < 2:
        return 0
    path, other = rng.sample(chunks, 2)
    try:
        rng.choice(DAMAGES)(rng, path, other)
    except FileNotFoundError:
        return 0
    return 1


def damage_pool(rng: random.Random, tier: RamTier) -> int:
    """Flip a bit of a chunk in RAM, or replace it by another chunk, as `swap` does."""
    chunks = tier.extents()
    if len(chunks) < 2:
        return 0
    (at, nbytes), (other, _) = rng.sample(chunks, 2)
    with open(Path(tier.folder, "pool"), "r+b") as pool:
        if rng.random() < 0.5:
            at += rng.randrange(nbytes)
            data = bytes([os.pread(pool.fileno(), 1, at)[0] ^ 1 << rng.randrange(8)])
        else:
            first = rng.choice(FIRSTS)
            at += first
            data = os.pread(pool.fileno(), nbytes - first, other + first)
        os.pwrite(pool.fileno(), data, at)
    return 1


def notice_each(folder: Path, n_damages: int) -> int:
    """Damage `n_damages` chunks one by one, in alternating tiers; return how many were noticed."""
    rng, tokens = random.Random(2), talk(7)
    n_chunks = len(tokens) // CHUNK_TOKENS
    most: dict[str, Any] = {"chunk_tokens": CHUNK_TOKENS}
    noticed = 0
    for name, budgets in (("ram", (RAM_BYTES, 0)), ("disk", (0, DISK_BYTES))):
        ram, disk = budgets
        with (
            um.KVStore(folder / name, ram_bytes=ram, disk_bytes=disk, **most) as store,
            make_cache() as kv,
            make_cache() as out,
        ):
            fill(kv, tokens)
            assert store.put(kv, tokens, model=MODEL) == len(tokens)
            for i in range(n_damages // 2):
                noticed += damage(rng, store._tiers[0])
                n = store.restore_into(out, tokens, model=MODEL)
                assert n < len(tokens), "a damaged chunk was restored"
                check(out, tokens[:n])
                assert store.stat().damaged_chunks == i + 1, "a damaged chunk was not noticed"
                out.clear()
                assert store.put(kv, tokens, model=MODEL) == len(tokens)
            assert store.stat().tiers[0].n_chunks == n_chunks
    return noticed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Kill processes that use a store of prefixes.")
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--kills", type=int, default=600)
    parser.add_argument("--damages", type=int, default=2_000)
    parser.add_argument("--dir", type=Path, help="where the store is made; a temporary folder")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore", um.PlacementWarning)  # of each damaged chunk
    with tempfile.TemporaryDirectory(dir=given.dir) as name:
        found = kill_at_random(Path(name, "killed"), given.workers, given.operations, given.kills)
        found["noticed"] = notice_each(Path(name), given.damages)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
