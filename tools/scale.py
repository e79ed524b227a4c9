"""Measure the parts of a cluster on this machine, and add them up for a large one.

    python tools/scale.py               # prints the tables of docs/scale.md
    python tools/scale.py --page        # and puts them there

One process on one machine is measured. `ASSUMED` has the assumptions, which the page names as such.
Without Ray, its part is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

import unimem as um
from unimem import ray as ur
from unimem.base.atomic_file import write_text
from unimem.engine import embedded_model
from unimem.kv.store.chunk import ChunkShape, EqualLayers, find_fault, seal
from unimem.kv.store.tiers import DiskTier
from unimem_bench.weight_files import weight_file

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "scale.md"
BEGIN, END = "<!-- made by tools/scale.py --page -->", "<!-- end -->"
N_NODES, WEIGHT_BYTES, N_CHUNKS = 1000, 600e9, 1e9
# A model of that size, with grouped attention.
CHUNK = ChunkShape(EqualLayers(61, 8, 128, "f16", "f16").groups[0], 256)
PROMPT_TOKENS = 131072
# The assumed network and store: bytes a second, and seconds.
ASSUMED = {
    "a node's network": (12.5e9, "GB/s", "100 Gbit/s"),
    "a store, all nodes together": (200e9, "GB/s", "an object store of some dozen servers"),
    "an answer of a file system on the network": (0.5e-3, "ms", "NFS within a building"),
    "an answer of an object store": (20e-3, "ms", "S3, first byte"),
}
ROUNDS = 5
FEW, MANY = 10_000, 100_000
FILE_TENSORS = 8  # 64 MiB each
MIB = 1 << 20


def timed(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the seconds of the median round."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def measure(folder: Path) -> dict[str, float]:
    """Measure the parts: seconds of each, or bytes a second."""
    machines = {str(i): um.doctor() for i in range(100)}
    model, engines = str(embedded_model()), ur._Engines(8, 512, "f16")
    parts = {
        "plan": timed(lambda: ur._plan_all(model, machines, engines)) / len(machines),
        "look": timed(um.doctor),
        "identity": identity_seconds(),
    }
    parts |= file_seconds(folder / "chunks")
    parts |= chunk_rates(folder / "rates")
    path = weight_file(folder, "gguf", FILE_TENSORS).path
    nbytes = path.stat().st_size
    parts["stage"] = nbytes / timed(lambda: um.stage(path).close(), 3)
    received = receive_rate(path)
    return parts | ({} if received is None else {"receive": received})


def identity_seconds() -> float:
    """Hash the ids of a chunk, chained, as `chunk_keys` does."""
    words = bytes(4 * CHUNK.n_tokens)

    def hash_all() -> None:
        key = bytes(32)
        for _ in range(1000):
            key = hashlib.sha256(key + words).digest()

    return timed(hash_all) / 1000


def file_seconds(folder: Path) -> dict[str, float]:
    """Look up chunks in a folder of many, and count such a folder."""
    tier = DiskTier(str(folder), 1 << 40)
    found = {}
    keys: list[bytes] = []
    for n in (FEW, MANY):
        while len(keys) < n:
            keys.append(hashlib.sha256(b"%d" % len(keys)).digest())
            (folder / f"{keys[-1].hex()}.kv").write_bytes(b"1")
        some = keys[:: n // 1000]
        found[f"hit {n}"] = timed(partial(looked_up, tier, some)) / len(some)
        found[f"count {n}"] = timed(tier.stat, 3) / n
    absent = [hashlib.sha256(key).digest() for key in keys[:1000]]
    found["miss"] = timed(partial(looked_up, tier, absent)) / len(absent)
    tier.close()
    return found


def looked_up(tier: DiskTier, keys: list[bytes]) -> int:
    """Count the chunks that are there."""
    return sum(tier.has(key) for key in keys)


def chunk_rates(folder: Path) -> dict[str, float]:
    """Write and read a chunk, checked."""
    tier = DiskTier(str(folder), 8 * CHUNK.nbytes)
    blob = np.random.default_rng(0).integers(0, 256, CHUNK.nbytes, np.uint8)
    key = hashlib.sha256(b"chunk").digest()

    def write() -> None:
        tier.remove(key)
        seal(CHUNK, key, blob)
        assert tier.write(key, blob, time.time_ns())

    def read() -> None:
        assert tier.read(key, blob) == CHUNK.nbytes
        assert find_fault(CHUNK, key, blob) is None

    found = {"put": CHUNK.nbytes / timed(write, 3), "get": CHUNK.nbytes / timed(read, 3)}
    tier.close()
    return found


def receive_rate(path: Path) -> float | None:
    """Copy a file from a neighbour: two Ray nodes on this machine, in separate processes."""
    run = subprocess.run(
        [sys.executable, ROOT / "tests/support/servers/two_ray_copies.py", path],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
        timeout=300,
    )
    if run.returncode:
        print(run.stderr[-2000:], file=sys.stderr)
        return None
    return path.stat().st_size / float(json.loads(run.stdout.splitlines()[-1]))


def part_lines(parts: dict[str, float]) -> Iterator[str]:
    """Write the measurements."""
    yield from ("| part | measured |", "|---|---|")
    rows = {
        "planning 8 engines on one node": f"{parts['plan'] * 1e3:.1f} ms",
        "asking a node what memory it has": f"{parts['look'] * 1e3:.1f} ms",
        f"the identity of a chunk of {CHUNK.n_tokens} tokens": f"{parts['identity'] * 1e6:.2f} us",
        f"finding a chunk among {FEW:,} files": f"{parts[f'hit {FEW}'] * 1e6:.1f} us",
        f"finding a chunk among {MANY:,} files": f"{parts[f'hit {MANY}'] * 1e6:.1f} us",
        "missing one": f"{parts['miss'] * 1e6:.1f} us",
        f"counting {FEW:,} files": f"{parts[f'count {FEW}'] * 1e6:.1f} us a file",
        f"counting {MANY:,} files": f"{parts[f'count {MANY}'] * 1e6:.1f} us a file",
        f"putting a chunk of {CHUNK.nbytes / 1e6:.0f} MB, with its hash": gbs(parts["put"]),
        "reading it again out of the page cache, checked": gbs(parts["get"]),
        "staging a file that is in the page cache": gbs(parts["stage"]),
        "bringing in a file from a neighbour, on one machine": gbs(parts.get("receive")),
    }
    yield from (f"| {name} | {value} |" for name, value in rows.items())


def assumed_lines() -> Iterator[str]:
    """Write the assumptions."""
    yield from ("| assumed | figure | such as |", "|---|---|---|")
    for name, (value, unit, such_as) in ASSUMED.items():
        shown = value / 1e9 if unit == "GB/s" else value * 1e3
        yield f"| {name} | {shown:g} {unit} | {such_as} |"


def sum_lines(parts: dict[str, float]) -> Iterator[str]:
    """Add the parts up."""
    network, store, answer, first_byte = (value for value, _, _ in ASSUMED.values())
    rounds = math.ceil(math.log2(N_NODES))
    receive = min(network, parts.get("receive", network))
    one = WEIGHT_BYTES / min(network, parts["stage"])
    from_store = max(WEIGHT_BYTES * N_NODES / store, one)
    by_neighbours = one + rounds * WEIGHT_BYTES / receive
    chunks = PROMPT_TOKENS // CHUNK.n_tokens
    prompt_bytes = chunks * CHUNK.nbytes
    count = parts[f"count {MANY}"]
    folder = N_CHUNKS * 8192
    rows = {
        "planning, one node after the other": duration(N_NODES * parts["plan"]),
        "all nodes from a file system or a store at once": duration(from_store),
        f"one from the store, the others in {rounds} rounds from neighbours": duration(
            by_neighbours
        ),
        "a store that does as well as neighbours": gbs(WEIGHT_BYTES * N_NODES / by_neighbours),
        "the bytes of all chunks": f"{N_CHUNKS * CHUNK.nbytes / 1e15:.0f} PB",
        "the same, of each node's disks": f"{N_CHUNKS * CHUNK.nbytes / N_NODES / 1e12:.0f} TB",
        "what a folder allows its file system for their names": f"{folder / 1e12:.1f} TB",
        "counting all of them in one folder": duration(N_CHUNKS * count),
        "files that are counted in 1 s": f"{1 / count:,.0f}",
        f"looking for a prompt of {PROMPT_TOKENS:,} tokens ({chunks} chunks): local": duration(
            chunks * (parts["identity"] + parts[f"hit {MANY}"])
        ),
        "the same on a network's file system, one by one": duration(chunks * answer),
        "the same in an object store, one by one": duration(chunks * first_byte),
        f"restoring it ({prompt_bytes / 1e9:.1f} GB): from the page cache, checked": duration(
            prompt_bytes / parts["get"]
        ),
        "the same through a node's network": duration(prompt_bytes / min(network, parts["get"])),
        "the same, each of all nodes at once, from a store": duration(
            max(prompt_bytes * N_NODES / store, chunks * first_byte)
        ),
    }
    yield from ("| what | added up |", "|---|---|")
    yield from (f"| {name} | {value} |" for name, value in rows.items())


def gbs(rate: float | None) -> str:
    """Write bytes a second."""
    return "not measured: no Ray" if rate is None else f"{rate / 1e9:.2f} GB/s"


def duration(seconds: float) -> str:
    """Write seconds as a person would."""
    for unit, size in (("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3)):
        if seconds >= 2 * size or unit == "ms":
            return f"{seconds / size:.1f} {unit}"
    raise AssertionError


def lines(parts: dict[str, float], load: float) -> Iterator[str]:
    """Write the text between the markers of the page; `load` is that of other work."""
    yield f"Measured on {os.cpu_count()} CPUs that {load:.1f} threads of other work wanted as well."
    for table in (part_lines(parts), assumed_lines(), sum_lines(parts)):
        yield ""
        yield from table


def main() -> None:
    """Measure, add up, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", action="store_true", help="put the tables into the page")
    parser.add_argument("--folder", help="on the disk to measure")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        load = os.getloadavg()[0]
        text = "\n".join(lines(measure(Path(name)), load))
    print(text)
    if asked.page:
        before, rest = PAGE.read_text().split(BEGIN)
        write_text(PAGE, f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
