"""Kill processes at random moments while they save, stage, repack, store and grow.

``make kills`` kills ``KILLS`` of them, 5,000 by default. After each kill this process checks that
nothing is torn, does what the next start does, and checks that no file and no name in shared memory
is left. It prints a table; ``--page`` puts it into ``docs/hardening.md``. Ends with status 1 and a
traceback if something was lost. The tests do the same with fewer kills.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

import unimem as um
from recorded import put
from unimem.kv import snapshot
from unimem.staging.backings import sweep
from unimem.weights.repack.image_cache import ImageCache

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "hardening.md"
BEGIN, END = "<!-- made by make kills -->\n", "<!-- end of the kills -->"
SHM = "/dev/shm"
MODEL = Path(um.__file__).parent / "engine" / "models" / "tiny.gguf"
TOKENS = list(range(256))
# A child of this many finishes its work, to measure its duration.
LET_THROUGH = 25


class Case(ABC):
    """A kind of work to kill, made in this process, which has one thread, and forks.

    `n_kills` counts the kills, `n_inside` those before the work was done, and `n_left` those that
    left something for the next start.
    """

    name: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.n_kills = self.n_inside = self.n_left = 0
        self.usual_seconds = 0.0

    @abstractmethod
    def work(self, number: int) -> None:
        """Do the work, in a child; the number tells what this kill would leave from the last."""

    @abstractmethod
    def left(self) -> list[str]:
        """List useless remains of the killed process."""

    @abstractmethod
    def check(self, number: int, *, done: bool) -> None:
        """Raise AssertionError if something is torn, or finished work is lost."""

    @abstractmethod
    def begin_anew(self) -> None:
        """Do what the next start does."""


class _Save(Case):
    """`KVCache.save`: the file is the old one or the new one."""

    name = "KVCache.save"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._path = folder / "session"
        self._kv = um.KVCache(2, 8, 64, len(TOKENS), pages="4k")
        _fill(self._kv)
        self._kv.save(self._path, tokens=TOKENS, model="0")
        self._last = 0

    def work(self, number: int) -> None:
        for lane in self._kv._body._lanes():
            self._kv._body._rows(*lane)[:] = number % 251
        self._kv.save(self._path, tokens=TOKENS, model=str(number))

    def left(self) -> list[str]:
        return [name for name in os.listdir(self.folder) if name != "session"]

    def check(self, number: int, *, done: bool) -> None:
        found = snapshot.check(self._path)
        now = int(found.model or -1)
        assert now in (self._last, number), (now, self._last, number)
        assert now == number or not done, "what was saved is lost"
        if now:
            with um.KVCache.restore(self._path) as kv:
                assert all((kv._body._rows(*lane) == now % 251).all() for lane in kv._body._lanes())
        self._last = now

    def begin_anew(self) -> None:
        self._kv.save(self._path, tokens=TOKENS, model="0")
        self._last = 0


class _Stage(Case):
    """`stage`, in folders of shared memory, which have names."""

    name = "stage"

    def work(self, number: int) -> None:
        with um.stage(MODEL, backing="shm" if number % 2 else "auto") as staged:
            assert os.stat(staged.path).st_size == MODEL.stat().st_size

    def left(self) -> list[str]:
        return unkept("unimem-stage-")

    def check(self, number: int, *, done: bool) -> None:
        pass  # staged memory ends with its process

    def begin_anew(self) -> None:
        sweep()


class _Repack(Case):
    """`repack`, which writes an image to the cache: none, or a whole one."""

    name = "repack, with a cache"

    def __init__(self, folder: Path, model: Path) -> None:
        super().__init__(folder)
        self._weights = um.open_weights(model)
        self._cache = ImageCache(str(folder))
        self._is_there = False
        self.work(0)
        self.begin_anew()

    def work(self, number: int) -> None:
        um.repack(self._weights, cache=self.folder).close()

    def left(self) -> list[str]:
        return [name for name in os.listdir(self.folder) if not name.endswith(".repacked")]

    def check(self, number: int, *, done: bool) -> None:
        images = self._cache.images()
        assert len(images) == 1 or not done, "what was repacked is lost"
        assert all(self._cache.verify(image) is None for image in images), "an image is torn"

    def begin_anew(self) -> None:
        self._cache.drop(self._cache.images())


class _Store(Case):
    """`KVStore`: the disk keeps whole chunks, and RAM keeps nothing after the last process."""

    name = "KVStore.put"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._kv = um.KVCache(2, 2, 32, len(TOKENS), pages="4k")
        _fill(self._kv)

    def _open(self) -> um.KVStore:
        return um.KVStore(self.folder, ram_bytes=1 << 20, disk_bytes=1 << 20, chunk_tokens=64)

    def work(self, number: int) -> None:
        with self._open() as store:
            assert store.put(self._kv, [number, *TOKENS[1:]], model="m") == len(TOKENS)

    def left(self) -> list[str]:
        own = os.stat(self.folder)
        found = [name for name in os.listdir(self.folder) if not name.endswith((".kv", ".lock"))]
        return found + unkept(f"unimem-kv-{os.geteuid()}-{own.st_dev:x}-{own.st_ino:x}")

    def check(self, number: int, *, done: bool) -> None:
        with self._open() as store, um.KVCache(2, 2, 32, len(TOKENS), pages="4k") as kv:
            n = store.restore_into(kv, [number, *TOKENS[1:]], model="m")
            assert n == len(TOKENS) or not done, "what was put is lost"
            assert store.stat().damaged_chunks == 0, "a chunk is torn"
            for lane in kv._body._lanes() if n else ():
                there, ours = kv._body._rows(*lane), self._kv._body._rows(*lane)
                assert (there == ours[: there.size]).all()

    def begin_anew(self) -> None:
        with self._open() as store:
            for tier in store.stat().tiers:
                for path in Path(tier.path).glob("*.kv"):
                    path.unlink()
            store.stat()


class _Growth(Case):
    """Caches that grow, rings, and shared blocks."""

    name = "growth"

    def work(self, number: int) -> None:
        k = np.zeros((100, 2, 32), np.float32)
        with (
            um.KVCache(2, 2, 32, 1 << 16, grow=True, pages="4k") as kv,
            um.KVCache(2, 2, 32, 1 << 16, window=64, pages="4k") as ring,
            um.Block(1 << 20, pages="4k", reserve=64 << 20, shared=True) as block,
        ):
            for i in range(20):
                for layer in range(2):
                    kv.append(layer, k, k)
                    ring.append(layer, k, k)
                block.commit((1 + i) << 20)
                block.as_array()[:: 1 << 12] = 1

    def left(self) -> list[str]:
        return []  # its memory has no name

    def check(self, number: int, *, done: bool) -> None:
        pass  # memory goes with its process

    def begin_anew(self) -> None:
        pass


def unkept(prefix: str) -> list[str]:
    """List the names in shared memory that no process has locked."""
    found = []
    for name in os.listdir(SHM):
        if name.startswith(prefix):
            with suppress(OSError):  # locked, gone, or another user's
                fd = os.open(f"{SHM}/{name}", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    found.append(name)
                finally:
                    os.close(fd)
    return found


def _fill(kv: um.KVCache) -> None:
    rows = np.random.default_rng(0).standard_normal(
        (len(TOKENS), kv.n_kv_heads, kv.head_dim), np.float32
    )
    for layer in range(kv.n_layers):
        kv.append(layer, rows, rows)


# ---- kills ----


def start(case: Case, number: int) -> tuple[int, int]:
    """Do the work in a child: its process id, and a pipe that tells the end of the work."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(told)
            case.work(number)
            os.write(tell, b"d")
            signal.pause()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(tell)
    return pid, told


def kill(case: Case, number: int, rng: random.Random) -> None:
    """Kill a process in the middle of its work, and check."""
    pid, told = start(case, number)
    begin = time.perf_counter()
    if number % LET_THROUGH == 1:
        assert os.read(told, 1) == b"d", f"{case.name} has failed"
        case.usual_seconds = time.perf_counter() - begin
    else:
        time.sleep(rng.uniform(0, 1.1 * case.usual_seconds))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"{case.name} has failed"
    done = number % LET_THROUGH == 1 or os.read(told, 1) == b"d"
    os.close(told)
    case.n_kills += 1
    case.n_inside += not done
    case.n_left += bool(case.left())
    case.check(number, done=done)
    case.begin_anew()
    assert case.left() == [], f"{case.name}: the next start leaves {case.left()}"


def make_cases(folder: Path) -> list[Case]:
    """Make all cases that can be tried here."""

    def own(name: str) -> Path:
        (folder / name).mkdir(mode=0o700)
        return folder / name

    cases: list[Case] = [_Save(own("save")), _Stage(own("stage"))]
    sys.path += [str(ROOT / "tests"), str(ROOT / "bench")]
    try:
        from support.models.make import TINY, write_model

        model = write_model(own("model") / "q4_0.gguf", shape=TINY, kind="q4_0")
        cases.append(_Repack(own("repack"), model))
    except (ImportError, AssertionError) as error:
        print(f"not killed: {_Repack.name}: {error}", file=sys.stderr)
    return [*cases, _Store(own("store")), _Growth(own("growth"))]


def table(cases: Sequence[Case], seconds: float) -> str:
    """Write the cases in Markdown."""
    lines = [
        "| what was killed | kills | before it was done | left for the next start | lost | left |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {c.name} | {c.n_kills:,} | {c.n_inside:,} | {c.n_left:,} | 0 | 0 |" for c in cases
    ]
    kills, inside, left = (
        sum(getattr(case, name) for case in cases) for name in ("n_kills", "n_inside", "n_left")
    )
    lines.append(f"| all, in {seconds:.0f} s | {kills:,} | {inside:,} | {left:,} | 0 | 0 |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Kill processes at random moments.")
    parser.add_argument("--kills", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, help="where files are made; a temporary folder")
    parser.add_argument("--page", action="store_true", help="put the table into the document")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore", um.PlacementWarning)
    rng, begin = random.Random(given.seed), time.monotonic()
    with tempfile.TemporaryDirectory(dir=given.dir) as name:
        cases = make_cases(Path(name))
        for number in range(given.kills):
            case = cases[number % len(cases)]
            kill(case, number // len(cases) + 1, rng)
    text = table(cases, time.monotonic() - begin)
    print(text, end="")
    if given.page:
        put(PAGE, BEGIN, text, END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
