"""The work of the processes of `make soak`: `python tools/soak_work.py KIND FOLDER NUMBER`.

Each does one thing after another, in an order given by its kind and number, until SIGTERM ends it
with status 0. An error ends it with a traceback.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import unimem as um
from unimem.errors import SnapshotError
from unimem.kv import snapshot

Work = Callable[[Path, random.Random], Iterator[str]]

MARK, NAME = "UNIMEM_SOAK", "UNIMEM_SOAK_NAME"
_COUNT_SECONDS = 1
# Large memory avoids the hugetlb pool, since tests beside a soak reserve pages there.
PAGES: Any = ("4k", "thp")


def children_of(folder: Path) -> list[int]:
    """Return the processes of a run in a folder, even if their parents have ended."""
    mark, found = f"{MARK}={folder}".encode(), []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):
                if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found


def _in_child(work: Callable[[], object]) -> None:
    """Do something in a forked child, and check that it ends well."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"a forked child ended with {status}"


def engine(folder: Path, rng: random.Random) -> Iterator[str]:
    """Decode, save, resume, trim and fork; now and then, make another decoder."""
    from unimem.engine import Decoder, embedded_model

    session = folder / "files/session"
    with Decoder(embedded_model(), ctx=160, threads=1) as decoder:
        while True:
            what = rng.choice(("decode", "decode", "decode", "save", "resume", "trim", "open"))
            if rng.random() < 0.02:
                what = "fork"
            if what == "decode" or decoder.kv.seq_len < 2:
                if decoder.kv.next_position > 100:
                    decoder.reset()
                decoder.prefill(rng.choices(range(1, 200), k=rng.randrange(2, 12)))
                for _ in range(8):
                    decoder.generate_next_token()
                what = "decode"
            elif what == "save":
                decoder.save_session(session)
            elif what == "resume":
                if session.exists():
                    snapshot.check(session)
                    # The other engine may save between these two reads of the file.
                    with suppress(SnapshotError):
                        decoder.resume(session)
            elif what == "trim":
                decoder.kv.trim_to(rng.randrange(1, decoder.kv.seq_len))
                decoder.give_back()
            elif what == "open":
                load: Any = rng.choice(("copy", "map", "repack"))
                with Decoder(embedded_model(), ctx=32, threads=1, load=load) as other:
                    other.prefill([1, 2, 3])
            else:
                _in_child(decoder.report)
            yield what


def _append(kv: Any, n: int) -> None:
    shape = (2, n, kv.n_kv_heads, kv.head_dim)
    for layer in range(kv.n_layers):
        kv.append(layer, *np.full(shape, layer + 1, np.float32))


def caches(folder: Path, rng: random.Random) -> Iterator[str]:
    """Let caches grow, trim them, save and restore them, and fork sequences of paged ones."""
    kinds: list[dict[str, Any]] = [{"grow": True}, {"window": 64}, {"dtype": "q8_0"}, {}]
    while True:
        path = folder / f"files/snapshot-{rng.randrange(4)}"
        pages = rng.choice(PAGES)
        with um.KVCache(4, 4, 64, 2048, pages=pages, **rng.choice(kinds)) as kv:
            for _ in range(rng.randrange(1, 5)):
                _append(kv, rng.randrange(1, 60))
                kv.trim_to(rng.randrange(1, kv.seq_len + 1))
                yield "trim"
            kv.give_back()
            kv.save(path, model="soak")
            yield "save"
            with kv.copy() as other:
                _append(other, 5)
        how: dict[str, Any] = rng.choice(({"mode": "map"}, {"mode": "copy", "pages": pages}))
        with um.KVCache.restore(path, verify=True, **how) as restored:
            _append(restored, 3)
        yield "restore"
        with um.PagedKVCache(2, 2, 32, n_blocks=64, block_tokens=8, prefix_cache=True) as paged:
            sequences = [paged.sequence()]
            for _ in range(rng.randrange(1, 12)):
                one = rng.choice(sequences)
                rows = np.ones((2, rng.randrange(1, 9), 2, 32), np.float32)
                for layer in range(2):
                    one.append(layer, *rows)
                sequences.append(one.fork())
                yield "fork"
            for one in sequences:
                one.close()


def store(folder: Path, rng: random.Random) -> Iterator[str]:
    """Put conversations into a shared store, and restore them."""
    sizes: dict[str, Any] = {"ram_bytes": 1 << 20, "disk_bytes": 4 << 20, "chunk_tokens": 4}
    with um.KVCache(2, 8, 128, 32, pages="4k") as kv:
        while True:
            with um.KVStore(folder / "store", **sizes) as opened:
                for _ in range(rng.randrange(1, 200)):
                    tokens = [rng.randrange(3), rng.randrange(9)] * 4 + [rng.randrange(20)] * 8
                    kv.clear()
                    if rng.random() < 0.4:
                        _append(kv, len(tokens))
                        opened.put(kv, tokens, model="soak")
                        yield "put"
                    else:
                        opened.restore_into(kv, tokens, model="soak")
                        yield "restored"
                opened.give_back()


def stage(folder: Path, rng: random.Random) -> Iterator[str]:
    """Stage a model directly and by the command, and drop it."""
    from unimem.engine import embedded_model

    model = folder / f"files/model of {os.environ[NAME]}.gguf"
    was_killed = model.exists()
    shutil.copyfile(embedded_model(), model)
    program = "import sys; from unimem_command import main; sys.exit(main())"
    command = [sys.executable, "-W", "ignore", "-c", program, "stage"]

    def run(*words: str, check: bool = True) -> None:
        subprocess.run([*command, *words], check=check, capture_output=True)

    if was_killed:  # the command's staged model stays until it is dropped
        run("--drop", str(model), check=False)
    try:
        while True:
            if rng.random() < 0.05:
                run("--pages", "4k", str(model))
                run("--drop", str(model))
                yield "stage by the command"
                continue
            backing: Any = rng.choice(("auto", "memfd", "shm"))
            with (
                um.stage(model, backing=backing, pages="4k") as staged,
                um.open_weights(staged.path) as weights,
            ):
                assert len(weights.tensors) > 0
            yield "stage"
            time.sleep(rng.random() / 10)
    finally:
        model.unlink()


def reports(folder: Path, rng: random.Random) -> Iterator[str]:
    """Report on the other processes; some disappear meanwhile."""
    while True:
        pids = children_of(folder)
        with suppress(ProcessLookupError, PermissionError, ValueError):
            assert um.report(rng.choice([os.getpid(), *pids])).rows
        yield "report"
        time.sleep(rng.random() / 10)


KINDS: dict[str, Work] = {
    "engine": engine,
    "caches": caches,
    "store": store,
    "stage": stage,
    "reports": reports,
}


def main() -> int:
    """Work until SIGTERM."""
    kind, folder, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    counts: dict[str, int] = {}
    path = folder / "counts" / f"{os.getpid()}-{number}.json"
    written_at = 0.0
    work = KINDS[kind](folder, random.Random(f"{kind} {number}"))
    for what in work:
        counts[what] = counts.get(what, 0) + 1
        if asked or time.monotonic() > written_at + _COUNT_SECONDS:
            path.write_text(json.dumps(counts))
            written_at = time.monotonic()
        if asked:
            break
    work.close()  # type: ignore[attr-defined]
    return 0


if __name__ == "__main__":
    sys.exit(main())
