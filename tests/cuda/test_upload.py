"""Model files to the GPU, over a driver in main memory: every byte arrives, or nothing happens."""

from __future__ import annotations

import _thread
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="gguf is not installed")
import gguf

import unimem as um
from support.files import gguf_files as gf
from support.files import safetensors_files as sf
from support.gpu.host_gpu import HostDriver, HostStream, numpy_of
from support.processes import interrupts
from unimem._core.status import ledger
from unimem.backends import cuda_driver
from unimem.base import threads

pytestmark = pytest.mark.usefixtures("gives_memory_back")

I8 = 24
N_SLOTS = 16
PAGE = 4096
RING = N_SLOTS * PAGE
N_PIECES = 50


def write(path: Path, *nbytes: int) -> Path:
    """A file of tensors of random bytes, each of this many."""
    rows, offset = [], 0
    for i, n in enumerate(nbytes):
        rows.append(gf.tensor(f"t{i}", (n,), I8, offset))
        offset += -(-n // 32) * 32
    raw, _ = gf.join(gf.head(len(nbytes), 0), *rows)
    raw += bytes(-len(raw) % 32)
    data = gf.random_bytes(offset, seed=offset)[: offset - (-nbytes[-1] % 32)] if nbytes else b""
    path.write_bytes(raw + bytes(data))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of pieces of a page."""
    return write(tmp_path / "model.gguf", 20 * PAGE, 1, (N_PIECES - 20) * PAGE - 100)


def staging() -> tuple[int, int]:
    row = ledger()["staging"]
    return row["n_mappings"], row["mapped_bytes"]


def uploaders() -> list[int]:
    from unimem.cuda import upload

    return interrupts.others_in(upload)


def check(weights: um.Weights, arrays: dict[str, Any]) -> None:
    assert list(arrays) == list(weights.tensors)
    for name, array in arrays.items():
        here = weights.tensors[name].as_array()
        assert (array.dtype, array.shape) == (here.dtype, here.shape)
        assert numpy_of(array).tobytes() == here.tobytes(), name


# ---- what arrives ----


def test_every_type_arrives_as_it_is_in_main_memory(cuda: Any, tmp_path: Path) -> None:
    file = tmp_path / "types.gguf"
    tensors = {}
    for number, (block_values, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        bits = gf.random_bytes(6 * block_bytes, seed=int(number))
        tensors[f"{number.name} {block_values}"] = (bits.reshape(3, 2 * block_bytes), number)
    gf.write_with_gguf_py(file, {}, tensors)
    with um.open_weights(file) as w, cuda.Tape(w.mapped_bytes) as tape:
        assert len(w.by_type()) > 30
        check(w, w.to_device(tape))


@pytest.mark.parametrize("shapes", [[], [(4, 0)]])
def test_a_file_without_data_takes_nothing(
    cuda: Any, host_gpu: HostDriver, tmp_path: Path, shapes: list[tuple[int, ...]]
) -> None:
    file = tmp_path / "empty.gguf"
    rows = [gf.tensor(f"t{i}", ne, gf.F32, 0) for i, ne in enumerate(shapes)]
    file.write_bytes(gf.with_data(gf.head(len(rows), 0), *rows, nbytes=0)[0])
    told: list[tuple[int, int]] = []
    with um.open_weights(file) as w, cuda.Tape(256) as tape:
        check(w, w.to_device(tape, progress=lambda *figures: told.append(figures)))
        assert tape.used_bytes == 0
    assert told == [(0, 0)]
    assert not any(call[0] == "copy" for call in host_gpu.calls)


@pytest.mark.parametrize("threads", [1, 2, 7, 16, 40])
def test_sizes_around_the_borders_of_slots(cuda: Any, tmp_path: Path, threads: int) -> None:
    sizes = (1, PAGE - 1, PAGE, PAGE + 1, RING - 1, RING, RING + 1, 5 * RING + 17)
    for nbytes in sizes:
        file = write(tmp_path / f"{nbytes}.gguf", nbytes)
        with um.open_weights(file) as w, cuda.Tape(nbytes + 512) as tape:
            before = tape.take_bytes(100)
            whole = numpy_of(tape.block.as_array())
            arrays = w.to_device(tape, threads=threads, staging_bytes=RING)
            check(w, arrays)
            # Exactly the data are taken, and nothing else is written.
            assert arrays["t0"].data.ptr == before.data.ptr + 256
            assert tape.used_bytes == 256 + nbytes
            assert np.all(whole[:256] == 0xA5)
            assert np.all(whole[256 + nbytes :] == 0xA5)
            del before, whole, arrays


def test_tensors_lie_as_in_the_file(up: Upload) -> None:
    first = up.tape.take_bytes(1)
    for _ in range(2):  # one behind the other
        arrays = up.run()
        base = arrays["t0"].data.ptr
        assert base % 256 == 0
        for name, tensor in up.weights.tensors.items():
            assert arrays[name].data.ptr - base == tensor.offset - up.weights.tensors["t0"].offset
        check(up.weights, arrays)
    del first


def test_arrays_keep_the_memory_not_the_file(cuda: Any, host_gpu: HostDriver, path: Path) -> None:
    with um.open_weights(path) as w, cuda.Tape(w.mapped_bytes) as tape:
        arrays = w.to_device(tape)
        expected = w.tensors["t0"].as_array().copy()
        with pytest.raises(BufferError, match="live"):
            tape.close()
    assert w.closed
    assert np.array_equal(numpy_of(arrays["t0"]), expected)
    assert len(host_gpu.allocated) == 1
    del arrays
    assert host_gpu.allocated == {}


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model of several files whose data end at any byte."""
    whole = write(tmp_path / "whole.gguf", 100, 5 * PAGE + 1, 33, 1, 3 * PAGE, 7, RING + 5)
    return gf.split(whole, 2, no_tensor_first=True)


@pytest.mark.parametrize(("load", "threads"), [("map", 7), ("copy", 1)])
def test_many_files_arrive_in_turn(cuda: Any, parts: list[Path], load: Any, threads: int) -> None:
    told: list[tuple[int, int]] = []
    options = {"threads": threads, "staging_bytes": RING}
    with um.open_weights(parts[0], load=load) as w, cuda.Tape(2 * w.mapped_bytes) as tape:
        arrays = w.to_device(tape, **options, progress=lambda *n: told.append(n))
        check(w, arrays)
        base = min(array.data.ptr for array in arrays.values())
        end = 0
        for path in w.files:
            here = [tensor for tensor in w.tensors.values() if tensor.file == path]
            if not here:
                continue
            first = here[0]
            # Its data begins at the next multiple of 256, and lies as in the file.
            begin = arrays[first.name].data.ptr - base
            assert begin == -(-end // 256) * 256
            for tensor in here:
                at = arrays[tensor.name].data.ptr - base
                assert at - begin == tensor.offset - first.offset
                end = at + tensor.nbytes
        assert tape.used_bytes == end
    data = sum(path.stat().st_size for path in parts)
    total = told[-1][1]
    assert told[-1] == (total, total)
    assert total <= min(end, data)


EVERYTHING = {
    "gguf": (gf.everything, {"scalar": "float32", "empty": "float32"}),
    "safetensors": (
        sf.everything,
        {"t.F8_E4M3": "float8_e4m3fn", "t.BF16": "bfloat16", "t.F4": "uint8"},
    ),
}


@pytest.mark.parametrize("suffix", EVERYTHING)
def test_tensors_of_any_number_of_dimensions_arrive(cuda: Any, tmp_path: Path, suffix: str) -> None:
    everything, dtypes = EVERYTHING[suffix]
    file = tmp_path / f"everything.{suffix}"
    file.write_bytes(everything())
    with um.open_weights(file) as w, cuda.Tape(w.mapped_bytes) as tape:
        arrays = w.to_device(tape)
        check(w, arrays)
        assert {name: arrays[name].dtype.name for name in dtypes} == dtypes


def test_unaligned_tensors_are_refused(cuda: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(sf.write({"three": ("U8", (3,)), "unaligned": ("F16", (2,))}))
    with um.open_weights(file) as w, cuda.Tape(4096) as tape:
        assert w.tensors["unaligned"].as_array().shape == (2,)
        with pytest.raises(ValueError, match=r"'unaligned' of .* no multiple of 2 bytes.*float16"):
            w.to_device(tape)
        assert tape.used_bytes == 0


@pytest.mark.parametrize("i", [0, 2])
def test_a_part_that_changed_is_named(cuda: Any, parts: list[Path], i: int) -> None:
    with um.open_weights(parts[0]) as w, cuda.Tape(2 * w.mapped_bytes) as tape:
        for change in (replace, write_a_byte):
            change(parts[i])
            with pytest.raises(OSError, match="open it again") as caught:
                w.to_device(tape)
            assert (caught.value.filename, tape.used_bytes) == (str(parts[i]), 0)


# ---- how it gets there ----


@pytest.mark.parametrize(
    ("nbytes", "staging_bytes", "ring_bytes"),
    [
        (2 * PAGE + 1, RING, 3 * PAGE),  # no larger than the file needs
        (17 * PAGE, RING, RING),
        (34 << 20, None, 32 << 20),
        (34 << 20, 1 << 40, 32 << 20),  # more would take longer to pin than it saves
    ],
)
def test_the_ring_is_pinned_and_given_back(
    cuda: Any,
    host_gpu: HostDriver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nbytes: int,
    staging_bytes: int | None,
    ring_bytes: int,
) -> None:
    seen: set[Any] = set()
    true, (n_mappings, mapped_bytes) = os.preadv, staging()

    def preadv(*args: Any) -> int:
        seen.add((staging(), tuple(host_gpu.registered.values())))
        return true(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    file = write(tmp_path / "model.gguf", 1)
    data = file.stat().st_size - 1
    file.write_bytes(gf.join(gf.head(1, 0), gf.tensor("t0", (nbytes,), I8, 0))[0])
    os.truncate(file, data + nbytes)
    with um.open_weights(file) as w, cuda.Tape(nbytes) as tape:
        check(w, w.to_device(tape, staging_bytes=staging_bytes))
        assert host_gpu.n_allocations == 1  # the tape's
    assert seen == {((n_mappings + 1, mapped_bytes + ring_bytes), (ring_bytes,))}
    assert (staging(), host_gpu.registered) == ((n_mappings, mapped_bytes), {})


class LateDriver(HostDriver):
    """Its streams copy in threads of their own, each copy after `may_copy`."""

    def __init__(self, device: int = 0) -> None:
        super().__init__(device)
        self._lanes: dict[int, ThreadPoolExecutor] = {}
        self.may_copy: Callable[[int], object] = lambda from_: None
        self.copied: list[int] = []

    def new_stream(self) -> HostStream:
        stream = super().new_stream()
        self._lanes[stream.ptr] = ThreadPoolExecutor(1, "stream")
        return stream

    def _queue(self, stream: int, work: Callable[[], object]) -> Future[object]:
        return self._lanes[stream].submit(work)

    def copy(self, to: int, from_: int, nbytes: int, stream: int) -> None:
        copy = super().copy

        def late() -> None:
            self.may_copy(from_)
            copy(to, from_, nbytes, stream)
            self.copied.append(from_)

        self._queue(stream, late)

    def synchronize(self, stream: int) -> None:
        if stream in self._lanes:
            self._queue(stream, lambda: None).result()
        super().synchronize(stream)

    def new_event(self) -> Any:
        return LateEvent(self)

    def close(self) -> None:
        for stream in self._lanes.values():
            stream.shutdown()


class LateEvent:
    def __init__(self, driver: LateDriver) -> None:
        self._driver = driver
        self._recorded: Future[object] | None = None

    def record(self, stream: int) -> None:
        self._recorded = self._driver._queue(stream, lambda: None)

    def synchronize(self) -> None:
        if self._recorded is not None:
            self._recorded.result()


class Reads:
    """The target of each read, in order; replaces `os.preadv`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._true = os.preadv
        self.begun: list[int] = []
        self.n_ended = 0
        self.before: Callable[[int, int], object] = lambda fd, address: None
        patch.setattr(os, "preadv", self)

    def __call__(self, fd: int, buffers: list[Any], offset: int) -> int:
        address = np.frombuffer(buffers[0], np.uint8).ctypes.data
        self.begun.append(address)
        try:
            self.before(fd, address)
            return self._true(fd, buffers, offset)
        finally:
            self.n_ended += 1


class Upload:
    """A file of pieces of a page, a tape with room for it, and the events of the upload."""

    def __init__(self, driver: LateDriver, reads: Reads, weights: um.Weights, tape: Any) -> None:
        self.driver, self.reads, self.weights, self.tape = driver, reads, weights, tape
        self._staging = staging()

    def run(self, **options: Any) -> dict[str, Any]:
        return self.weights.to_device(self.tape, **{"staging_bytes": RING} | options)

    def check_that_it_works(self, **options: Any) -> None:
        check(self.weights, self.run(**options))

    def check_that_nothing_is_under_way(self, used_bytes: int = 0) -> None:
        assert (uploaders(), len(self.reads.begun)) == ([], self.reads.n_ended)
        assert (staging(), self.driver.registered) == (self._staging, {})
        assert self.tape.used_bytes == used_bytes


@pytest.fixture
def up(cuda: Any, monkeypatch: pytest.MonkeyPatch, path: Path) -> Iterator[Upload]:
    monkeypatch.setattr(cuda_driver, "Driver", LateDriver)
    monkeypatch.setattr(cuda_driver, "_drivers", {})
    driver = cuda_driver.driver(0)
    assert isinstance(driver, LateDriver)
    with um.open_weights(path) as weights, cuda.Tape(3 * weights.mapped_bytes) as tape:
        yield Upload(driver, Reads(monkeypatch), weights, tape)
    driver.close()


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 100
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_copies_wait_for_the_stream_and_are_waited_for(up: Upload) -> None:
    up.run(stream=77, threads=4)
    calls = up.driver.calls
    copies = [i for i, call in enumerate(calls) if call[0] == "copy"]
    assert calls[0] == ("synchronize", 77)
    assert len(copies) == N_PIECES
    streams = {calls[i][4] for i in copies}
    assert 77 not in streams
    for stream in streams:
        assert ("synchronize", stream) in calls[max(i for i in copies if calls[i][4] == stream) :]


@pytest.mark.parametrize("threads", [1, 8])
def test_reading_goes_on_while_copies_are_under_way(up: Upload, threads: int) -> None:
    """No copy is done before the whole ring was filled."""
    up.driver.may_copy = lambda _: wait_for(lambda: len(up.reads.begun) >= N_SLOTS)
    up.check_that_it_works(threads=threads)
    assert len(set(up.reads.begun)) == N_SLOTS


@pytest.mark.parametrize("threads", [1, 5, 16])
def test_no_slot_is_filled_before_its_copy_is_done(up: Upload, threads: int) -> None:
    rng = np.random.default_rng(threads)
    up.driver.may_copy = lambda _: time.sleep(rng.choice([0, 0, 0.01]))
    copied, begun, too_early = up.driver.copied, up.reads.begun, []

    def before(_: int, address: int) -> None:
        if copied.count(address) < begun.count(address) - 1:
            too_early.append(address)

    up.reads.before = before
    up.check_that_it_works(threads=threads)
    assert too_early == []
    assert len(copied) == len(begun) == N_PIECES


# ---- progress ----


def test_progress_is_told_in_this_thread(up: Upload) -> None:
    told: list[tuple[int, int]] = []
    times: list[float] = []

    def progress(done: int, total: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        told.append((done, total))
        times.append(time.monotonic())

    # It is called three times before the fifth piece arrives.
    up.reads.before = lambda *_: wait_for(lambda: len(told) >= min(3, len(up.reads.begun) - 1))
    up.check_that_it_works(progress=progress, threads=2)
    total = up.tape.used_bytes
    assert told == sorted(told)
    assert {figures[1] for figures in told} == {total}
    assert told[-1] == (total, total)
    assert [done for done, _ in told].count(total) == 1
    assert len(told) >= 4
    assert min(np.diff(times[:-1])) >= 0.045  # the last one comes at once


# ---- all or nothing ----


def fails(error: BaseException, n_good: int = 0, then: Any = None) -> Callable[..., Any]:
    """A function that raises after some calls of `then`."""
    n_calls = itertools.count()

    def fail(*arguments: Any) -> Any:
        if next(n_calls) >= n_good:
            raise error
        return then and then(*arguments)

    return fail


# Ways to break an upload.
Break = Callable[[pytest.MonkeyPatch, Upload], object]


def device(name: str, n_good: int = 0) -> tuple[Break, type[BaseException], str]:
    def break_it(patch: pytest.MonkeyPatch, up: Upload) -> None:
        error = RuntimeError("cudaErrorIllegalAddress")
        true = getattr(up.driver, name)
        fail = fails(error, n_good, true)

        def late(stream: int) -> None:
            true(stream)  # a device that reports an error copies no more
            fail(stream)

        patch.setattr(up.driver, name, late if name == "synchronize" else fail)

    return break_it, RuntimeError, "IllegalAddress"


def read(before: Callable[..., object], message: str) -> tuple[Break, type[BaseException], str]:
    def break_it(_: pytest.MonkeyPatch, up: Upload) -> None:
        up.reads.before = before

    return break_it, OSError, f"{message}.*model.gguf"


def no_threads(patch: pytest.MonkeyPatch, _: Upload) -> None:
    error = RuntimeError("can't start new thread")
    patch.setattr(threads, "start_new_thread", fails(error, 1, _thread.start_new_thread))


FAILURES: dict[str, tuple[Break, type[BaseException], str]] = {
    "first read": read(fails(OSError(5, "x")), "Input/output error"),
    "read": read(fails(OSError(5, "x"), 20), "Input/output error"),
    "truncated": read(lambda fd, _: os.truncate(f"/proc/self/fd/{fd}", 9000), "has become shorter"),
    "written": read(
        lambda fd, _: os.utime(f"/proc/self/fd/{fd}", ns=(0, 0)), "after it was opened"
    ),
    "no thread": (no_threads, OSError, "new thread"),
    "first copy": device("copy"),
    "copy": device("copy", 20),
    "stream": device("new_stream", 1),
    "event": device("new_event", 3),
    "pinning": device("register"),
    "earlier": device("synchronize"),
    "last": device("synchronize", 1),
}


@pytest.mark.parametrize("name", FAILURES)
def test_after_a_failure_all_is_as_before(up: Upload, name: str) -> None:
    break_it, kind, message = FAILURES[name]
    first = up.tape.take_bytes(100)
    with pytest.MonkeyPatch.context() as patch:
        break_it(patch, up)
        with pytest.raises(kind, match=message) as caught:
            up.run(threads=5)
    up.check_that_nothing_is_under_way(used_bytes=100)
    if name not in ("truncated", "written"):
        up.reads.before = lambda *_: None
        up.check_that_it_works()
    # The error keeps no memory alive.
    del first
    up.tape.close()
    assert up.driver.allocated == {}
    assert caught.value is not None


def test_one_failure_ends_all_threads(up: Upload) -> None:
    def has_failed() -> bool:
        # The failed thread stops the others, and then waits for its own stream.
        return any(call[0] == "synchronize" and call[1] != 0 for call in up.driver.calls)

    def before(_: int, address: int) -> None:
        if address == up.reads.begun[0]:
            raise OSError(5, "x")
        wait_for(has_failed)

    up.reads.before = before
    with pytest.raises(OSError, match="Input/output"):
        up.run(threads=4)
    assert len(up.reads.begun) <= 4


@pytest.mark.parametrize("at_end", [False, True])
def test_progress_may_end_it(monkeypatch: pytest.MonkeyPatch, up: Upload, at_end: bool) -> None:
    def progress(done: int, total: int) -> None:
        if (done == total) is at_end:
            raise LookupError("enough")

    told_to_stop, wait_until = threading.Event(), threads.wait_until

    def waiting(holds: Callable[[], bool]) -> None:
        told_to_stop.set()
        wait_until(holds)

    def may_read() -> bool:
        return len(up.reads.begun) <= 10 or told_to_stop.is_set()

    monkeypatch.setattr(threads, "wait_until", waiting)
    if not at_end:
        up.reads.before = lambda *_: wait_for(may_read)
    with pytest.raises(LookupError, match="enough"):
        up.run(progress=progress, threads=8)
    up.check_that_nothing_is_under_way()
    assert (len(up.reads.begun) == N_PIECES) is at_end


def test_interrupts_leave_nothing_under_way(monkeypatch: pytest.MonkeyPatch, up: Upload) -> None:
    """Interrupts arrive while threads read and copies are late, and while it waits for them."""
    main, once, n_handled = threading.main_thread().ident, threading.Lock(), 0
    assert main is not None

    def handle(*_: Any) -> None:
        nonlocal n_handled
        n_handled += 1
        raise KeyboardInterrupt(n_handled)

    def sleep(seconds: float) -> None:
        if n_handled < 3:
            signal.raise_signal(signal.SIGINT)
        time.sleep(seconds)

    def before(*_: Any) -> None:
        if len(up.reads.begun) > 10:
            if once.acquire(blocking=False):
                signal.pthread_kill(main, signal.SIGINT)
            wait_for(lambda: n_handled == 3)

    # The waiting thread sleeps meanwhile.
    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    up.reads.before = before
    up.driver.may_copy = lambda _: time.sleep(0.01)
    true = signal.signal(signal.SIGINT, handle)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            up.run(threads=4)
    finally:
        signal.signal(signal.SIGINT, true)
    n_copied = len(up.driver.copied)
    up.check_that_nothing_is_under_way()
    assert len(up.reads.begun) == n_copied < N_PIECES
    assert caught.value.args == (3,)
    up.driver.close()  # waits for copies
    assert len(up.driver.copied) == n_copied


def test_an_interrupt_at_any_moment_leaves_nothing_under_way(up: Upload) -> None:
    up.reads.before = lambda *_: time.sleep(0.001)
    files = ("unimem/base/threads.py", "threading.py", "concurrent/")
    for _ in interrupts.at_each_line(lambda: up.run(threads=3), *files):
        up.check_that_nothing_is_under_way()


def test_memory_that_others_take_meanwhile_stays_taken(up: Upload) -> None:
    theirs = 0

    def progress(*_: int) -> None:
        nonlocal theirs
        theirs = up.tape.take_bytes(64).data.ptr
        raise LookupError

    with pytest.raises(LookupError):
        up.run(progress=progress)
    assert up.tape.used_bytes == theirs + 64 - up.tape.block.address


def test_a_full_tape_is_told_before_anything_is_read(cuda: Any, up: Upload) -> None:
    with cuda.Tape(50 * PAGE) as tape:
        first = tape.take_bytes(PAGE)
        with pytest.raises(um.TapeFull):
            up.weights.to_device(tape)
        assert (up.reads.begun, up.driver.calls, tape.used_bytes) == ([], [], PAGE)
        del first


# ---- the file ----


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(0, path.stat().st_mtime_ns))
    other.rename(path)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def write_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(path, ns=(0, 0))  # two writes within a kernel tick have the same time


CHANGES: dict[str, tuple[Callable[[Path], object], type[OSError]]] = {
    "truncated": (lambda path: os.truncate(path, 9000), OSError),
    "longer": (lambda path: os.truncate(path, 900_000), OSError),
    "replaced": (replace, OSError),
    "pipe": (replace_by_pipe, OSError),
    "written to": (write_a_byte, OSError),
    "removed": (Path.unlink, FileNotFoundError),
}


def test_a_relative_path_stays_so(cuda: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    with um.open_weights(path.name) as w, cuda.Tape(w.mapped_bytes) as tape:
        monkeypatch.chdir("/")
        check(w, w.to_device(tape))
        path.unlink()
        with pytest.raises(FileNotFoundError) as caught:
            w.to_device(tape)
        assert caught.value.filename == path.name == w.files[0]


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_is_not_what_was_opened(up: Upload, path: Path, name: str) -> None:
    change, kind = CHANGES[name]
    change(path)
    with pytest.raises(kind) as caught:
        up.run()
    assert caught.value.filename == str(path)
    assert kind is not OSError or "open it again" in str(caught.value)
    assert (up.reads.begun, up.tape.used_bytes) == ([], 0)


# ---- wrong use ----


def test_a_tape_in_main_memory(up: Upload) -> None:
    with um.Tape(1 << 20) as tape:
        with pytest.raises(TypeError, match=r"unimem\.cuda\.Tape, got Tape.*as_array"):
            up.weights.to_device(tape)  # type: ignore[arg-type]
        assert tape.used_bytes == 0


def test_wrong_options(up: Upload) -> None:
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"threads": 0}, ValueError, "threads: expected an integer from 1 on, got 0"),
        ({"staging_bytes": RING - 1}, ValueError, f"at least {RING}, .*got {RING - 1}"),
        ({"staging_bytes": "32X"}, ValueError, "expected a size such as"),
        ({"stream": "default"}, TypeError, "expected a CUDA stream, got str"),
    ]
    for options, kind, message in refused:
        with pytest.raises(kind, match=message):
            up.run(**options)
        assert up.tape.used_bytes == 0


def test_closed_and_frozen(cuda: Any, up: Upload) -> None:
    up.tape.freeze()
    with pytest.raises(um.FrozenError):
        up.run()
    up.tape.close()
    with pytest.raises(um.ClosedError, match="Tape"):
        up.run()
    up.weights.close()
    with cuda.Tape(1 << 20) as other, pytest.raises(um.ClosedError, match=r"Weights.*are closed"):
        up.weights.to_device(other)
