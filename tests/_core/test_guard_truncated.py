"""Files that somebody truncates while they are mapped: an OSError that names them, and the process
goes on. Rows of KV caches, blocks, and the tensors of a model."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from conftest import Run
from support.files import gguf_files as gf
from support.files.snapshot_files import append, cache, rows
from support.kernel.proc_maps import PAGE
from support.processes.at_once import at_once
from support.processes.forks import needs_fork
from support.project.tiers import examples, slow_after
from unimem._core import guard
from unimem._core.status import counters
from unimem.errors import SnapshotError
from unimem.kv import snapshot
from unimem.kv.snapshot import reader
from unimem.weights.opened import Weights

pytestmark = pytest.mark.usefixtures("gives_memory_back")

N = 40
#: Rows of 2 heads of 32 float16 values.
ROWS_A_PAGE = PAGE // 128
DIES_OF_IT = -signal.SIGBUS


def elsewhere(path: Path, nbytes: int) -> None:
    """As ``os.truncate``, by another process."""
    script = "import os, sys; os.truncate(sys.argv[1], int(sys.argv[2]))"
    subprocess.run([sys.executable, "-S", "-c", script, str(path), str(nbytes)], check=True)


@contextlib.contextmanager
def lost(path: Path, doing: str = "") -> Iterator[None]:
    """What is done inside raises, and names the file."""
    with pytest.raises(OSError, match=f"{doing}.*: the file has become shorter") as caught:
        yield
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))


def bus_handler() -> bytes:
    """What the kernel calls for SIGBUS, and for whom: its bits in /proc."""
    lines = Path("/proc/self/status").read_bytes().splitlines()
    return b" ".join(line for line in lines if line.startswith((b"SigIgn", b"SigCgt")))


# ---- KV caches that are mapped from a snapshot ----


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "session"
    with cache(N, 2 * N) as kv:
        kv.save(path)
    return path


def keep_one_lane(path: Path, cut: Callable[[Path, int], None] = os.truncate) -> None:
    """K of the first layer stays, and all others are lost."""
    facts = snapshot.describe(path)
    cut(path, facts.data_offset + facts.lane_stride)


def ones(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


def append_all(kv: um.KVCache) -> None:
    kv.append_all(ones(2, 2, 32), ones(2, 2, 32))


#: What touches rows: of a cache, and a folder to write to.
TOUCHING: dict[str, Callable[[um.KVCache, Path], object]] = {
    "append": lambda kv, _: kv.append(1, ones(1, 2, 32), ones(1, 2, 32)),
    "append, converted from nothing": lambda kv, _: kv.append(
        1, *[ones(1, 2, 32).astype("f2")] * 2
    ),
    "append, heads first": lambda kv, _: kv.append(1, ones(1, 2, 3, 32), ones(1, 2, 3, 32)),
    "append, to V that is lost": lambda kv, _: kv.append(0, ones(2, 2, 32), ones(2, 2, 32)),
    "append_all": lambda kv, _: append_all(kv),
    "layer, converted": lambda kv, _: kv.layer(1, "float32"),
    "layer, converted to what is there": lambda kv, _: kv.layer(
        1, "float64", (np.empty((1, 2, N, 32)), np.empty((1, 2, N, 32)))
    ),
    "copy": lambda kv, _: kv.copy(),
    "save": lambda kv, folder: kv.save(folder / "another"),
    "warm": lambda kv, _: kv.warm(),
    "warm with threads": lambda kv, _: kv.warm(2),
    "trim_to, whose first tokens move": lambda kv, _: kv.trim_to(20, keep_first=3),
}


@pytest.mark.parametrize("name", TOUCHING)
def test_what_touches_lost_rows_changes_nothing(name: str, file: Path, tmp_path: Path) -> None:
    with um.KVCache.restore(file) as kv:
        before = kv._body._rows(0, "k", 0).tobytes()
        keep_one_lane(file, elsewhere if name == "append" else os.truncate)
        was = (kv.seq_len, kv.next_position, kv.capacity_bytes, bus_handler())
        for _ in range(2):
            with lost(file):
                TOUCHING[name](kv, tmp_path)
        assert (kv.seq_len, kv.next_position, kv.capacity_bytes, bus_handler()) == was
        assert kv._body._rows(0, "k", 0).tobytes() == before
        assert os.listdir(tmp_path) == ["session"]
        # What is lost can be given up, once nobody views it, and the cache goes on.
        gc.collect()
        kv.clear()
        append(kv, 7)
        assert kv.seq_len == 7
        with cache(7, 2 * N) as other:
            assert rows(kv) == rows(other)


@pytest.mark.usefixtures("no_collection")
def test_what_touches_no_lost_row_goes_on(file: Path) -> None:
    with um.KVCache.restore(file) as kv:
        keep_one_lane(file)
        assert kv.layer(1)[0].shape == (1, 2, N, 32)
        assert kv.reserve(3) == N
        kv.rollback()
        assert kv.row_of(5) == 5
        assert kv.granted.pages == "4k"
        assert kv.resident_bytes >= 0
        kv.crop(N - 1)
        assert kv.trim_to(20)
        assert kv.enforce_memory_limit(10 * 4 * kv.row_bytes)
        assert (kv.seq_len, kv.next_position) == (10, N - 1)
        with pytest.raises(SnapshotError, match=r"was truncated .* are lost") as caught:
            kv.verify()
        assert caught.value.path == str(file)
    # A cache without pages of a file pays nothing.
    with cache(0, 64) as fixed, cache(N, 2 * N) as other:
        for kv in (fixed, other):
            before = counters()["os_calls"]
            append(kv, 3)
            append_all(kv)
            kv.layer(0, "float32")
            assert kv.trim_to(kv.seq_len - 2, keep_first=1)
            assert counters()["os_calls"] == before


@pytest.mark.usefixtures("no_collection")
def test_an_append_beyond_the_pages_of_the_file_needs_none_of_them(file: Path) -> None:
    with um.KVCache.restore(file) as kv:
        append(kv, ROWS_A_PAGE - N % ROWS_A_PAGE)
        os.truncate(file, 0)
        before = counters()["os_calls"]
        append(kv, 1)
        assert kv.seq_len % ROWS_A_PAGE == 1
        # Memory for the row was committed; nothing was guarded.
        grown = counters()["os_calls"] - before
        append(kv, 1)
        assert counters()["os_calls"] - before == grown


@pytest.mark.parametrize(("n", "most", "kept", "many"), [(N, 2 * N, N, N), (300, 1000, 10, 200)])
def test_an_append_is_all_or_none(n: int, most: int, kept: int, many: int, tmp_path: Path) -> None:
    """Of few rows, which are appended with the interpreter's lock, and of more."""
    path = tmp_path / "session"
    with cache(n, most) as kv:
        kv.save(path)
    with um.KVCache.restore(path) as kv:
        kv.crop(kept)
        keep_one_lane(path)
        capacity = kv.capacity_bytes
        with lost(path):
            kv.append(1, ones(many, 2, 32), ones(many, 2, 32))
        assert kv.seq_len == kept
        kv.rollback()
        assert kv.seq_len == kept
        assert kv.capacity_bytes >= capacity
        kv.crop(5)


def test_rows_that_were_written_over_come_back_when_a_later_lane_is_lost(file: Path) -> None:
    with um.KVCache.restore(file) as kv:
        append(kv, N)
        keep_one_lane(file)
        before = kv._body._rows(0, "k", 0).tobytes()
        # The first tokens are read from the file, and go to memory of the cache's own.
        assert kv.row_of(2 * N - 10) > 2 * ROWS_A_PAGE
        with lost(file, "trim_to: moving rows"):
            kv.trim_to(8, keep_first=3)
        assert (kv.seq_len, kv.next_position) == (2 * N, 2 * N)
        assert kv._body._rows(0, "k", 0).tobytes() == before


def test_tokens_that_begin_anew_at_the_first_row_stay_where_they_were(tmp_path: Path) -> None:
    path, most = tmp_path / "session", ROWS_A_PAGE + ROWS_A_PAGE // 2
    with cache(most, most) as kv:
        kv.save(path)
    with um.KVCache.restore(path) as kv:
        kv.trim_to(10)
        append(kv, most - 10)
        kv.trim_to(most - 12)
        append(kv, 10)
        first = kv.next_position - kv.seq_len
        # The last row is used, and the first tokens lie in the last page of the file.
        assert kv.row_of(kv.next_position - 1) == 2 * most - 1
        assert most <= kv.row_of(first) < 2 * ROWS_A_PAGE
        before, was = kv._body._rows(0, "k", 0).tobytes(), kv.seq_len
        keep_one_lane(path)
        with lost(path, "move: moving rows"):
            append_all(kv)
        assert kv.seq_len == was
        assert kv.row_of(kv.next_position - 1) == 2 * most - 1
        assert kv._body._rows(0, "k", 0).tobytes() == before


def test_a_snapshot_is_read_into_a_cache_whose_file_was_lost(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with cache(N, 2 * N, seed=3) as kv:
        kv.save(other)
        expected = rows(kv)
    with um.KVCache.restore(file) as kv:
        os.truncate(file, 0)
        held = kv.layer(0)
        kv.clear()
        with pytest.raises(BufferError, match="views hold memory"):
            snapshot.read_into(kv, other)
        del held
        snapshot.read_into(kv, other)
        assert rows(kv) == expected


def test_a_file_truncated_before_it_is_mapped(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = reader._check_wanted

    def cut(*args: Any) -> None:
        checked(*args)
        keep_one_lane(file)

    monkeypatch.setattr(reader, "_check_wanted", cut)
    with lost(file):
        um.KVCache.restore(file)


@pytest.mark.parametrize("replace", [os.replace, lambda new, old: os.unlink(old)])
def test_a_replaced_or_removed_file_is_read_on(replace: Any, file: Path, tmp_path: Path) -> None:
    with um.KVCache.restore(file, mode="copy") as kv:
        expected = rows(kv)
    new = tmp_path / "new"
    new.write_bytes(b"short")
    with um.KVCache.restore(file) as kv:
        replace(new, file)
        assert rows(kv) == expected
        append(kv, 3)
        kv.verify()


def test_a_file_that_grew_again_reads_as_zeros_and_its_checksums_tell(file: Path) -> None:
    size = file.stat().st_size
    with um.KVCache.restore(file) as kv:
        keep_one_lane(file)
        os.truncate(file, size)
        assert not kv.layer(1, "float32")[0].any()
        append(kv, 1)
        with pytest.raises(SnapshotError, match="checksum does not match in v of layer 0"):
            kv.verify()


# ---- blocks ----


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(range(256)) * (8 * PAGE // 256))
    return path


@pytest.mark.parametrize("mode", ["r", "c", "r+"])
def test_blocks_over_a_truncated_file(mode: Any, data: Path) -> None:
    with um.Block.map(data, mode=mode, name="called otherwise") as block:
        (elsewhere if mode == "c" else os.truncate)(data, 3 * PAGE)
        for touch in (block.warm, lambda: block.warm(2), block.sealed_copy):
            with lost(data):
                touch()
        # What the kernel does without touching goes on.
        assert block.verify().resident_bytes <= 8 * PAGE
        block.advise("willneed")
        block._pages(0, 8 * PAGE)
        assert block.as_array("uint8", 3 * PAGE).tobytes() == data.read_bytes()
        if block._lock("onfault") is not False:
            block._lock(False)
        with pytest.raises(OSError, match="locking block"):
            block._lock(True)
    with um.Block.attach(data) as block:  # as a file in /dev/shm is
        os.truncate(data, PAGE)
        with lost(data):
            block.sealed_copy()


# ---- guard.copy ----


def test_copy(data: Path) -> None:
    with um.Block.map(data) as block:
        for nbytes in (0, 1, 100, 8 * PAGE):
            out = bytearray(b"?" * (8 * PAGE))
            guard.copy(out, block.address, nbytes, "what")
            assert out == data.read_bytes()[:nbytes] + b"?" * (8 * PAGE - nbytes)
        os.truncate(data, PAGE)
        with lost(data):
            guard.copy(np.empty(2 * PAGE, np.uint8), block.address, 2 * PAGE, str(data))
        with pytest.raises(ValueError, match="out: expected at least 2 bytes, got 1"):
            guard.copy(bytearray(1), block.address, 2, "")
        with pytest.raises(BufferError, match="not writable"):
            guard.copy(b"12", block.address, 2, "")  # type: ignore[arg-type]
        with pytest.raises((ValueError, BufferError), match="contiguous"):
            guard.copy(np.empty((4, 4), np.uint8)[:, ::2], block.address, 2, "")
        with pytest.raises(ValueError, match="address: expected an integer from 1"):
            guard.copy(bytearray(1), 0, 1, "")


def test_copies_of_many_threads(data: Path, tmp_path: Path) -> None:
    """Some of files that are there, some of files that are cut; a mebibyte without the lock."""
    whole = tmp_path / "whole"
    whole.write_bytes(os.urandom(1 << 20))
    expected = whole.read_bytes()

    def work(_: int) -> None:
        out = bytearray(1 << 20)
        for _ in range(30):
            guard.copy(out, good.address, 1 << 20, "whole")
            assert out == expected
            for first, nbytes in ((0, 8 * PAGE), (7 * PAGE, 1)):
                with lost(data):
                    guard.copy(out, bad.address + first, nbytes, str(data))

    with um.Block.map(whole) as good, um.Block.map(data) as bad:
        os.truncate(data, PAGE)
        before = bus_handler()
        at_once(6, work)
        assert bus_handler() == before


# ---- handlers of others ----

SCRIPT = """
import faulthandler, os, signal, sys, threading, warnings
from contextlib import contextmanager
import numpy as np
import unimem as um
from unimem._core import guard

path = sys.argv[1]
with open(path, "wb") as file:
    file.write(bytes(1 << 20))
block = um.Block.map(path)
array = block.as_array()
os.truncate(path, 4096)
out = bytearray(1 << 20)

def guarded():
    try:
        guard.copy(out, block.address, 1 << 20, path)
    except OSError as error:
        assert error.filename == path
    else:
        raise SystemExit("nothing was lost")

def end():
    print("comes here", flush=True)
    array[8192] + 1  # as NumPy, which nobody guards

@contextmanager
def meanwhile(call, n_threads=3):
    over = threading.Event()
    def work():
        while not over.is_set():
            call()
    threads = [threading.Thread(target=work) for _ in range(n_threads)]
    [thread.start() for thread in threads]
    try:
        yield
    finally:
        over.set()
        [thread.join() for thread in threads]
"""


def run_script(run_python: Run, path: Path, body: str) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.replace("sys.argv[1]", repr(str(path))) + body
    # A sanitizer would tell of the signal in the place of the kernel.
    asan = os.environ.get("ASAN_OPTIONS", "") + ":handle_sigbus=0"
    return run_python(script, PYTHONFAULTHANDLER="", ASAN_OPTIONS=asan)


FAULTHANDLER: dict[str, tuple[str, int]] = {
    "before": ("faulthandler.enable(); guarded(); end()", 1),
    "between": (
        """
for _ in range(5):
    guarded(); faulthandler.enable(); guarded(); faulthandler.disable()
guarded(); faulthandler.enable(); guarded(); guarded(); end()
""",
        1,
    ),
    "not any more": (
        "faulthandler.enable(); guarded(); faulthandler.disable(); guarded(); end()",
        0,
    ),
}


@pytest.mark.parametrize(("body", "times"), slow_after(1, FAULTHANDLER.values()), ids=FAULTHANDLER)
def test_faulthandler_still_works(body: str, times: int, run_python: Run, tmp_path: Path) -> None:
    done = run_script(run_python, tmp_path / "data", body)
    assert done.returncode == DIES_OF_IT, done.stderr
    assert done.stdout == "comes here\n"
    assert done.stderr.count("Fatal Python error: Bus error") == times


def test_faulthandler_comes_and_goes_while_pages_are_copied(
    run_python: Run, tmp_path: Path
) -> None:
    body = f"""
os.truncate(path, 1 << 20)
with meanwhile(lambda: guard.copy(out, block.address, 1 << 20, path)):
    for _ in range({examples(300)}):
        faulthandler.enable(); faulthandler.disable(); os.sched_yield()
    faulthandler.enable()
os.truncate(path, 4096)
guarded(); guarded(); end()
"""
    done = run_script(run_python, tmp_path / "data", body)
    # Enabled at the very moment at which a run ends, faulthandler can keep itself as the handler
    # before it (native/src/os/guard.c), and calls itself until its stack ends.
    assert done.returncode in (DIES_OF_IT, -signal.SIGSEGV), done.stderr
    assert done.stdout == "comes here\n"
    assert "Fatal Python error: Bus error" in done.stderr


@needs_fork
def test_a_python_handler_hears_what_was_sent_and_no_more(run_python: Run, tmp_path: Path) -> None:
    n_signals, n_forks = examples(200), examples(50)
    body = f"""
heard = []
def handler(number, frame):
    heard.append(number)
signal.signal(signal.SIGBUS, handler)
guarded()
assert heard == [] and signal.getsignal(signal.SIGBUS) is handler
os.kill(os.getpid(), signal.SIGBUS)
assert heard == [signal.SIGBUS]
with meanwhile(guarded):
    for i in range({n_signals}):
        signal.raise_signal(signal.SIGBUS)
        assert len(heard) == 2 + i
os.kill(os.getpid(), signal.SIGBUS)
assert len(heard) == 2 + {n_signals} and signal.getsignal(signal.SIGBUS) is handler
signal.signal(signal.SIGBUS, signal.SIG_IGN)
guarded()
os.kill(os.getpid(), signal.SIGBUS)
signal.signal(signal.SIGBUS, signal.SIG_DFL)
guarded()
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
with meanwhile(guarded, 2):
    for _ in range({n_forks}):
        pid = os.fork()
        if pid == 0:
            guarded()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
print("well", flush=True)
os.kill(os.getpid(), signal.SIGBUS)
"""
    done = run_script(run_python, tmp_path / "data", body)
    assert (done.returncode, done.stdout, done.stderr) == (DIES_OF_IT, "well\n", "")


# ---- a model's tensors ----


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of one tensor of 64 pages, mapped."""
    path = tmp_path / "model.gguf"
    raw, _ = gf.join(gf.head(1, 0), gf.tensor("t", (64 * PAGE // 4,), gf.F32, 0))
    path.write_bytes(raw + bytes(-len(raw) % 32) + bytes(64 * PAGE))
    return path


#: What touches tensors of a mapped model.
OF_WEIGHTS: dict[str, Callable[[Weights], object]] = {
    "warm": lambda w: w.warm(),
    "lock": lambda w: w.lock(True),
    "content_hash": lambda w: w.content_hash(),
    "dequantize": lambda w: w.tensors["t"].dequantize(),
    "evict": lambda w: w.evict(),
    "sealed_copy": lambda w: w.blocks[0].sealed_copy(),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.locks] if name == "lock" else [])
        for name in OF_WEIGHTS
    ],
)
def test_what_touches_lost_tensors_raises(name: str, model: Path) -> None:
    with um.open_weights(model, load="map") as w:
        before = bus_handler()
        (elsewhere if name == "warm" else os.truncate)(model, 3 * PAGE)
        for _ in range(2):
            with pytest.raises(OSError, match=r"become shorter|was replaced") as caught:
                OF_WEIGHTS[name](w)
            assert caught.value.filename == str(model)
        assert bus_handler() == before
        # What touches none goes on.
        assert w.residency().nbytes > 0
        assert w.tensors["t"].as_array().shape == (64 * PAGE // 4,)
