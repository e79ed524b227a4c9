"""Processes that are killed while they use a store: budgets hold, no wrong chunk is restored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import Run

# In a process of its own, which has one thread: so that it may fork.
KILLS = """
    import json, mmap, os, random, signal, struct, time, warnings, zlib
    import numpy as np
    import unimem as um
    from unimem.kv.store import KVStore

    folder, n_operations = os.environ["FOLDER"], int(os.environ["OPERATIONS"])
    n_workers, n_kills = int(os.environ["WORKERS"]), int(os.environ["KILLS"])
    CHUNK, N_CHUNKS, N_TALKS = 4, 5, 40
    DISK, RAM = 16384 + 60 * 16384, 16384 + 25 * 16384
    options = dict(ram_bytes=RAM, disk_bytes=DISK, chunk_tokens=CHUNK)
    warnings.simplefilter("ignore")
    counts = mmap.mmap(-1, 4096 * n_workers)  # operations of each worker, and restored tokens

    def talk(number):
        '''Tokens of a conversation: its first chunks are those of others.'''
        return [1] * 4 + [number % 5] * 4 + [number % 10] * 4 + [number] * 8

    def fill(kv, tokens):
        '''Rows that tell which tokens they are of, and all before them.'''
        kv.clear()
        kv.reserve(len(tokens))
        kv.commit(len(tokens))
        for lane, where in enumerate(kv._lanes()):
            kv._rows(*where).view("<u4").reshape(len(tokens), -1)[:] = marks(tokens)[:, None] + lane

    def marks(tokens):
        raw = np.array(tokens, "<u4").tobytes()
        return np.array([zlib.crc32(raw[:4 * i + 4]) for i in range(len(tokens))], "<u4")

    def check(kv, tokens):
        for lane, where in enumerate(kv._lanes() if tokens else ()):
            rows = kv._rows(*where).view("<u4").reshape(len(tokens), -1)
            assert (rows == marks(tokens)[:, None] + np.uint32(lane)).all()

    def work(worker):
        rng = random.Random(os.getpid())
        at = 4096 * worker
        with KVStore(folder, **options) as store, um.KVCache(2, 2, 32, 32, pages="4k") as kv:
            while True:
                tokens = talk(rng.randrange(N_TALKS))[: rng.randrange(1, 21)]
                if rng.random() < 0.4:
                    fill(kv, tokens)
                    store.put(kv, tokens, model="m")
                else:
                    kv.clear()
                    n = store.restore_into(kv, tokens, model="m")
                    assert n == kv.seq_len and n <= len(tokens)
                    check(kv, tokens[:n])
                    done = struct.unpack_from("<Q", counts, at + 8)[0]
                    struct.pack_into("<Q", counts, at + 8, done + n)
                if rng.random() < 0.001:
                    store.give_back()
                done = struct.unpack_from("<Q", counts, at)[0]
                struct.pack_into("<Q", counts, at, done + 1)

    def start(worker):
        pid = os.fork()
        if pid == 0:
            try:
                work(worker)
            finally:
                import traceback; traceback.print_exc()
                os._exit(1)
        return pid

    def total(field):
        return sum(struct.unpack_from("<Q", counts, 4096 * i + field)[0] for i in range(n_workers))

    def taken(folder):
        '''What du says: of a file that goes meanwhile, nothing.'''
        found = 0
        for name in [".", *os.listdir(folder)]:
            try:
                found += os.lstat(f"{folder}/{name}").st_blocks * 512
            except FileNotFoundError:
                pass
        return found

    def damage(rng, folder):
        '''Flip a bit of a chunk, cut it off, or put another in its place.'''
        names = [name for name in os.listdir(folder) if name.endswith(".kv")]
        if len(names) < 2:
            return 0
        first, second = (f"{folder}/{name}" for name in rng.sample(names, 2))
        kind = rng.randrange(3)
        try:
            with open(first, "r+b") as file:
                if kind == 0:
                    data = file.read()
                    if data:
                        at = rng.randrange(len(data))
                        file.seek(at)
                        file.write(bytes([data[at] ^ 1 << rng.randrange(8)]))
                elif kind == 1:
                    file.truncate(rng.randrange(1, 8192))
                else:
                    with open(second, "rb") as other:
                        file.write(other.read())
        except FileNotFoundError:
            return 0
        return 1

    rng = random.Random(1)
    keeper = KVStore(folder, **options)
    ram, disk = (tier.path for tier in keeper.stat().tiers)
    workers = [start(i) for i in range(n_workers)]
    killed = damaged = most_ram = most_disk = 0
    try:
        while total(0) < n_operations or killed < n_kills:
            most_ram, most_disk = max(most_ram, taken(ram)), max(most_disk, taken(disk))
            damaged += damage(rng, rng.choice((ram, disk)))
            if total(0) * n_kills >= killed * n_operations:
                i = rng.randrange(n_workers)
                os.kill(workers[i], signal.SIGKILL)
                _, status = os.waitpid(workers[i], 0)
                assert os.WIFSIGNALED(status), "a worker has failed"
                workers[i] = start(i)
                killed += 1
            pid, status = os.waitpid(-1, os.WNOHANG)
            assert pid == 0, "a worker has failed"
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
    for pid in workers:
        os.waitpid(pid, 0)
    stat = keeper.stat()
    assert most_ram <= RAM and most_disk <= DISK, (most_ram, most_disk)
    assert all(tier.nbytes <= tier.budget_bytes for tier in stat.tiers)
    keeper.close()
    left = sorted({name.rpartition(".")[2] for name in os.listdir(disk)})
    print(json.dumps({
        "operations": total(0), "restored": total(8), "killed": killed, "damaged": damaged,
        "ram": most_ram / RAM, "disk": most_disk / DISK, "left": left,
        "ram_is_gone": not os.path.exists(ram),
    }))
"""


@pytest.mark.parametrize(
    ("workers", "operations", "kills"),
    [(3, 600, 12), pytest.param(8, 10_000, 60, marks=pytest.mark.slow)],
)
def test_kills_at_random_moments(
    run_python: Run, tmp_path: Path, workers: int, operations: int, kills: int
) -> None:
    done = run_python(
        KILLS,
        **{"FOLDER": str(tmp_path / "s"), "OPENBLAS_NUM_THREADS": "1", "WORKERS": str(workers)},
        **{"OPERATIONS": str(operations), "KILLS": str(kills)},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["operations"] >= operations
    assert result["killed"] >= kills
    assert result["restored"] > operations, result
    assert result["damaged"] > 0, result
    # Chunks had to make room: half of what is counted for such small ones is for the file system.
    assert all(0.4 < result[tier] <= 1 for tier in ("ram", "disk")), result
    assert result["left"] in (["kv", "lock"], ["kv", "lock", "unimem-tmp"])
    assert result["ram_is_gone"]
