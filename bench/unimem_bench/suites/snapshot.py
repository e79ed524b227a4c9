"""What snapshots of KV memory cost: saving, restoring, and resuming sessions."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

import unimem as um
from unimem.base.install_hint import install_hint
from unimem.kv import snapshot
from unimem_bench import models, states
from unimem_bench.kv_sides import SHAPE, Array, check_holds, stored, tokens
from unimem_bench.rounds import Side, milliseconds
from unimem_bench.suite import Measure, NotMeasured, Suite, faster

SUITE = Suite(
    "snapshot",
    "What do snapshots cost, beside writing and reading the same bytes, and prefilling anew?",
)

MIB = 1 << 20
SAVED_BYTES, QUICK_SAVED_BYTES = 1024 * MIB, 64 * MIB
N_LAYERS = 8
PIECE_BYTES = 8 * MIB  # written at once
HUGE_PAGE = 2 * MIB
N_WRITERS = 4  # more keep no disk busier
SETTLE_S = 0.05  # that threads poll after they have computed
READ = "read()"


def sizes(measure: Measure) -> tuple[int, int]:
    """Return the bytes that are saved, and the number of tokens in them."""
    nbytes = QUICK_SAVED_BYTES if measure.quick else SAVED_BYTES
    return nbytes, nbytes // (N_LAYERS * sum(part.nbytes for part in tokens(1)))


def filled(n: int) -> um.KVCache:
    """Make a cache of `N_LAYERS` layers that each hold the same n tokens."""
    cache = um.KVCache(N_LAYERS, *SHAPE, n)
    for layer in range(N_LAYERS):
        cache.append(layer, *tokens(n))
    return cache


# ---- saving ----


@SUITE.case(
    "save",
    "How fast is 1 GiB (a quick run: 64 MiB) brought to the disk?",
    unit="GB/s",
    targets=[faster("write, fsync", 1.7, issue=4)],
)
def save(measure: Measure) -> None:
    """Compare with write() into the page cache, and with writing past it, without checksums."""
    measure.pin(None)
    nbytes, n = sizes(measure)
    states.require_room(memory=4 * nbytes, disk=4 * nbytes, folder=measure.folder)
    lanes = page_aligned(tokens(n)) * N_LAYERS
    with tempfile.TemporaryDirectory(dir=measure.folder) as name, filled(n) as cache:
        folder = Path(name)
        measure.fact("file_system", states.file_system(folder))

        def saving(name: str, write: Callable[[Path], object]) -> Side:
            path = folder / name

            def run() -> float:
                # Otherwise the fsync of another side would wait for this deletion.
                path.unlink(missing_ok=True)
                os.sync()
                states.ready(nbytes, measure.cpus)  # for the page cache
                return nbytes / milliseconds(partial(write, path)) / 1e6

            return run

        limits = {}
        if takes_direct(folder):
            limits["O_DIRECT"] = saving("direct", partial(write_direct, lanes=lanes))
        else:
            measure.leave_out("O_DIRECT", f"the file system of {measure.folder} does not take it")
        ours = {"unimem": saving("snapshot", cache.save)}
        peers = {"write, fsync": saving("buffered", partial(write_buffered, lanes=lanes))}
        measure.compare(ours, peers, limits, rounds=11, quick_rounds=5, warmup=1)
        check_file("write, fsync", folder / "buffered", lanes)
        if limits:
            check_file("O_DIRECT", folder / "direct", lanes)
        with um.KVCache.restore(folder / "snapshot", verify=True) as restored:
            for layer in range(N_LAYERS):
                check_holds("unimem", stored(restored, layer), tokens(n))


def page_aligned(arrays: Sequence[Array]) -> list[Array]:
    """Copy arrays to page borders, as O_DIRECT requires, on huge pages if possible."""
    copies = []
    for array in arrays:
        # NumPy requests huge pages; the kernel would have to pin each small page by itself.
        room = np.empty(array.nbytes + HUGE_PAGE, np.uint8)
        begin = -room.ctypes.data % HUGE_PAGE
        copy = room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        copies.append(copy)
    return copies


def takes_direct(folder: Path) -> bool:
    """Say whether files of a folder can be written past the page cache."""
    try:
        fd = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
    except OSError:
        return False
    os.close(fd)
    return True


def pieces(lanes: Sequence[Array]) -> Iterator[tuple[memoryview, int]]:
    """Cut the data into pieces, each with its place in the file."""
    offset = 0
    for lane in lanes:
        data = lane.reshape(-1).view(np.uint8).data
        for begin in range(0, len(data), PIECE_BYTES):
            yield data[begin : begin + PIECE_BYTES], offset + begin
        offset += len(data)


def write_buffered(path: Path, lanes: Sequence[Array]) -> None:
    """Write into the page cache, then fsync."""
    with open(path, "wb", buffering=0) as file:
        for piece, _ in pieces(lanes):
            file.write(piece)
        os.fsync(file.fileno())


def write_direct(path: Path, lanes: Sequence[Array]) -> None:
    """Write past the page cache, with enough under way to keep the disk busy, then fsync."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
    try:
        with suppress(OSError):  # if the file system cannot reserve room
            os.posix_fallocate(fd, 0, sum(lane.nbytes for lane in lanes))
        with ThreadPoolExecutor(N_WRITERS) as pool:
            for _ in pool.map(lambda piece: os.pwrite(fd, *piece), pieces(lanes)):
                pass
        os.fsync(fd)
    finally:
        os.close(fd)


def check_file(side: str, path: Path, lanes: Sequence[Array]) -> None:
    """Raise AssertionError unless a file holds these lanes in order."""
    want = sum(lane.nbytes for lane in lanes)
    if path.stat().st_size != want:
        raise AssertionError(f"{side} wrote {path.stat().st_size} bytes of {want}")
    with open(path, "rb") as file:
        for lane in lanes:
            check_holds(side, [np.fromfile(file, lane.dtype, lane.size)], [lane])


# ---- restoring ----


@SUITE.case(
    "restore",
    "How soon is the first token of 1 GiB (a quick run: 64 MiB) in the page cache in hand?",
    unit="ms",
)
def restore(measure: Measure) -> None:
    """Compare with reading the file, into new memory and into existing memory."""
    measure.pin(None)
    nbytes, n = sizes(measure)
    states.require_room(memory=4 * nbytes, disk=2 * nbytes, folder=measure.folder)
    first = tokens(n)[0][:1]
    with tempfile.TemporaryDirectory(dir=measure.folder) as name:
        path = Path(name, "snapshot")
        with filled(n) as cache:
            cache.save(path)
        measure.fact("share_in_huge_pages", states.heat(path))
        begin = snapshot.describe(path).data_offset

        def restoring(side: str, *, mode: Literal["map", "copy"], verify: bool) -> Side:
            found: list[Array] = []

            def take(stack: ExitStack) -> None:
                cache = stack.enter_context(um.KVCache.restore(path, mode=mode, verify=verify))
                found[:] = [stored(cache)[0][:1].copy()]

            def run() -> float:
                states.ready(nbytes, measure.cpus)
                with ExitStack() as stack:  # giving memory back is not measured
                    elapsed = milliseconds(partial(take, stack))
                check_holds(side, found, [first])
                return elapsed

            return run

        def reading(side: str, read: Callable[[], Array]) -> Side:
            found: list[Array] = []

            def run() -> float:
                states.ready(nbytes, measure.cpus)
                elapsed = milliseconds(lambda: found.append(read()))
                whole = found.pop()[begin:]
                check_holds(side, [whole[: first.nbytes].view(first.dtype)], [first])
                return elapsed

            return run

        measure.compare(
            ours={
                # The first, since it reads and keeps as much as the peers do.
                "unimem, copy": restoring("unimem, copy", mode="copy", verify=True),
                "unimem, map, verify": restoring("unimem, map, verify", mode="map", verify=True),
                "unimem, map": restoring("unimem, map", mode="map", verify=False),
            },
            peers={"np.fromfile": reading("np.fromfile", partial(np.fromfile, path, np.uint8))},
            limits={READ: reading(READ, partial(read_into, path, room_for(path)))},
            rounds=11,
            quick_rounds=5,
            warmup=1,
        )


def room_for(path: Path) -> Array:
    """Return touched memory for a file."""
    return np.full(path.stat().st_size, 1, np.uint8)


def read_into(path: Path, room: Array) -> Array:
    """Read a whole file; one read() returns at most 2 GB."""
    rest = room.data
    with open(path, "rb", buffering=0) as file:
        while got := file.readinto(rest):
            rest = rest[got:]
    return room


# ---- sessions ----


def first_token(measure: Measure, model: Path, n: int, rounds: int) -> None:
    """Compare a saved session with prefilling it, and with reading its file.

    The decoder exists, its memory is warm, and the file is in the page cache.
    """
    from unimem.engine import Decoder

    ids = np.random.default_rng(0).integers(3, 259, n).tolist()
    first: dict[str, int] = {}
    with (
        tempfile.TemporaryDirectory(dir=measure.folder) as name,
        Decoder(model, ctx=n + 8, kv_dtype="f16") as decoder,
    ):
        path = Path(name, "session")
        decoder.prefill(ids)
        decoder.save_session(path)
        first["saved"] = decoder.generate_next_token()
        measure.fact("tokens", n)
        measure.fact("session_bytes", path.stat().st_size)
        states.heat(path)

        def arriving(side: str, arrive: Callable[[], object]) -> Side:
            def run() -> float:
                # Over a conversation the file would be read twice, to be checked first.
                decoder.reset()
                time.sleep(SETTLE_S)
                start = time.perf_counter()
                arrive()
                first[side] = decoder.generate_next_token()
                elapsed = time.perf_counter() - start
                if first[side] != first["saved"]:
                    raise AssertionError(f"{side} goes on with another token: {first}")
                return elapsed * 1e3

            return run

        def read() -> float:
            time.sleep(SETTLE_S)
            return milliseconds(partial(read_into, path, room))

        room = room_for(path)
        measure.compare(
            ours={"unimem": arriving("unimem", partial(decoder.resume, path))},
            peers={"prefill": arriving("prefill", partial(decoder.prefill, ids))},
            limits={READ: read},
            rounds=rounds,
            quick_rounds=3,
            warmup=0,  # it was prefilled and saved once
        )


def require_engine() -> None:
    """Raise NotMeasured unless the engine of the decoder is installed."""
    if importlib.util.find_spec("unimem_ggml") is None:
        raise NotMeasured(
            f"wants the decoder, whose unimem-ggml is not installed: {install_hint('run')}"
        )


@SUITE.case(
    "first-token",
    "How soon is the first token of a session of 2048 tokens, 1 GiB "
    "(a quick run: 64 tokens, 32 MiB)?",
    unit="ms",
    targets=[faster("prefill", 1.0, issue=4)],
)
def first_token_wide(measure: Measure) -> None:
    """Use a small model with the KV cache of a large one."""
    require_engine()
    measure.pin(None)
    n = 64 if measure.quick else 2048
    nbytes = n * 512 << 10
    memory = 4 * nbytes + (1 << 30)
    states.require_room(memory=memory, disk=2 * nbytes, folder=measure.folder)
    first_token(measure, models.write_model(measure.folder, "wide", "q8_0"), n, rounds=3)


@SUITE.case(
    "first-token-small",
    "How soon is the first token of a session of 500 tokens, 1 KiB each?",
    unit="ms",
    targets=[faster("prefill", 1.0, issue=4)],
)
def first_token_small(measure: Measure) -> None:
    """Use the model in the package."""
    require_engine()
    measure.pin(None)
    from unimem.engine import embedded_model

    first_token(measure, embedded_model(), 500, rounds=11)
