"""How a model is loaded: mapped, copied, past the page cache, and staged for other processes."""

from __future__ import annotations

import importlib
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import unimem as um
from unimem.system.process import read_process
from unimem_bench import decoding, models, plain
from unimem_bench.files import downloaded
from unimem_bench.rounds import Side, milliseconds, thread_counts
from unimem_bench.states import HUGE_PAGE, drop, file_system, heat, in_huge_pages, ready
from unimem_bench.suite import Measure, NotMeasured, Suite, at_most, costs, faster, faster_than_best
from unimem_bench.weight_files import Format, WeightFile, tensors_that_fit, weight_file

SUITE = Suite("load", "How fast does a model come into memory?")

MB = 1 << 20
N_TENSORS = 60  # 4 GB
QUICK_TENSORS = 4  # 256 MiB
# A gigabyte: opening takes part of a millisecond, and two threads read 256 MiB in six.
QUICK_MAP_TENSORS = 16
BUFFER_BYTES = 256 * MB  # the target of the limit, used again and again
SAFETENSORS = "safetensors load_file"
MAPPED_BY_TORCH = "safetensors load_file for torch, without a copy"
MEMCPY = "C memcpy to memory that is there"
AS_WRITTEN, IN_FOLIOS = "the file, as it was written", "the file, in large folios"


def hot_file(measure: Measure, kind: Format, quick_tensors: int = QUICK_TENSORS) -> WeightFile:
    """Make a file, and read it into the page cache in large folios."""
    file = cold_file(measure, kind, quick_tensors)
    measure.fact("mapped_by_huge_pages", heat(file.path))
    return file


def cold_file(measure: Measure, kind: Format, quick_tensors: int = QUICK_TENSORS) -> WeightFile:
    """Make a file, and record its facts."""
    wanted = quick_tensors if measure.quick else N_TENSORS
    file = weight_file(measure.folder, kind, tensors_that_fit(measure.folder, wanted))
    measure.fact("file_bytes", file.nbytes)
    measure.fact("file_system", file_system(file.path))
    return file


def in_state(prepare: Callable[[], object], run: Side) -> Side:
    """Return a side that first prepares a state, untimed."""

    def prepared() -> float:
        prepare()
        return run()

    return prepared


def in_c(file: WeightFile, run: Callable[..., tuple[float, int]], *args: Any, **how: Any) -> Side:
    """Return a side that loads a file in C; ms."""

    def measured() -> float:
        seconds, total = run(file.path, file.data_offset, *args, **how)
        file.check(total)
        return seconds * 1e3

    return measured


def scan_tensors(file: WeightFile, weights: um.Weights, cpus: Sequence[int]) -> None:
    """Read every byte of a model's tensors."""
    ranges = [(tensor.address, tensor.nbytes) for tensor in weights.tensors.values()]
    file.check(plain.scan(ranges, cpus)[1])


def can_load(measure: Measure, peer: str, way: plain.Way, depth: int = 0) -> bool:
    """Try a way to load on a small file; leave the peer out if it fails."""
    try:
        plain.load(um.get_library(), 0, way, mmap.PAGESIZE, cpus=measure.cpus, depth=depth)
    except OSError as error:
        measure.leave_out(peer, str(error))
        return False
    return True


# ---- mapped, and read once ----


def open_and_scan(file: WeightFile, cpus: Sequence[int]) -> float:
    """Map a file with unimem and read every byte of its tensors; ms."""
    with ExitStack() as stack:

        def run() -> None:
            weights = stack.enter_context(um.open_weights(file.path, load="map"))
            scan_tensors(file, weights, cpus)

        return milliseconds(run)


def reading_what_is_mapped(file: WeightFile, cpus: Sequence[int]) -> Side:
    """Return a side that reads every byte of a file that is already in the page tables; ms."""
    data = np.memmap(file.path, np.uint8, "r", offset=file.data_offset)

    def run() -> float:
        seconds, total = plain.scan([(data.ctypes.data, data.nbytes)], cpus)
        file.check(total)
        return seconds * 1e3

    run()
    return run


def mapped(n_threads: int, measure: Measure) -> None:
    """Map a file in the page cache, and read all of it once."""
    cpus, file = measure.pin(n_threads), hot_file(measure, "gguf", QUICK_MAP_TENSORS)
    ours = {"unimem": partial(open_and_scan, file, cpus)}
    peers = {
        "C, mmap": in_c(file, plain.map_and_scan, populate=False, cpus=cpus),
        "C, MAP_POPULATE": in_c(file, plain.map_and_scan, populate=True, cpus=cpus),
    }
    limits = {"C, reading what is mapped": reading_what_is_mapped(file, cpus)}
    measure.compare(ours, peers, limits, rounds=15, quick_rounds=5)


for n, word in ((1, "one thread"), (2, "two threads")):
    SUITE.case(
        f"map-{word.replace(' ', '-')}",
        f"How fast is a file in the page cache mapped, and read once by {word}?",
        unit="ms",
        targets=[faster("C, mmap", 0.97, issue=6)],
    )(partial(mapped, n))


def address_of_numpy(array: NDArray[Any]) -> int:
    """Return where an array begins; torch's tensors have `data_ptr` for it."""
    return array.ctypes.data


def load_file_and_scan(
    load_file: Callable[[Path], dict[str, Any]],
    address: Callable[[Any], int],
    file: WeightFile,
    cpus: Sequence[int],
) -> float:
    """Load a file with safetensors and read every byte of its arrays; ms."""
    arrays: dict[str, Any] = {}

    def run() -> None:
        arrays.update(load_file(file.path))
        file.check(plain.scan([(address(a), a.nbytes) for a in arrays.values()], cpus)[1])

    return milliseconds(run)


def safetensors(n_threads: int, measure: Measure) -> None:
    """Open a safetensors file in the page cache, and read all of it once."""
    cpus, file = measure.pin(n_threads), hot_file(measure, "safetensors")
    peers = {}
    if measure.installed("safetensors", SAFETENSORS, MAPPED_BY_TORCH):
        load_file = importlib.import_module("safetensors.numpy").load_file
        theirs = partial(load_file_and_scan, load_file, address_of_numpy, file, cpus)
        peers[SAFETENSORS] = in_state(partial(ready, file.nbytes, cpus), theirs)
        if measure.installed("torch", MAPPED_BY_TORCH):
            load_file = importlib.import_module("safetensors.torch").load_file
            address = importlib.import_module("torch").Tensor.data_ptr
            peers[MAPPED_BY_TORCH] = partial(load_file_and_scan, load_file, address, file, cpus)
    ours = {"unimem": partial(open_and_scan, file, cpus)}
    limits = {"C, reading what is mapped": reading_what_is_mapped(file, cpus)}
    measure.compare(ours, peers, limits, rounds=5, warmup=1)


for n, word in ((1, "one thread"), (2, "two threads")):
    SUITE.case(
        f"safetensors-{word.replace(' ', '-')}",
        f"How fast is a safetensors file in the page cache opened, and read once by {word}?",
        unit="ms",
        targets=[faster(SAFETENSORS, 12, issue=6)],
        in_quick=n == 1,
    )(partial(safetensors, n))


# ---- copied ----


def copy(
    file: WeightFile, load: Literal["copy", "direct"], cpus: Sequence[int], threads: int | None
) -> float:
    """Load a file into a block on huge pages with unimem; ms."""
    with ExitStack() as stack:

        def run() -> None:
            options: dict[str, Any] = {"load": load, "pages": "thp", "threads": threads}
            opened.append(stack.enter_context(um.open_weights(file.path, **options)))

        opened: list[um.Weights] = []
        elapsed = milliseconds(run)
        (weights,) = opened
        granted = weights.blocks[0].granted
        if weights.load != load or granted.pages != "thp":
            raise NotMeasured(
                f"wants load={load!r} on transparent huge pages, "
                f"got load={weights.load!r} ({weights.load_reason}) on {granted}"
            )
        scan_tensors(file, weights, cpus)
        return elapsed


def copying_what_is_mapped(file: WeightFile, cpus: Sequence[int]) -> Side:
    """Return a side that copies a file to resident memory; ms."""
    data = np.memmap(file.path, np.uint8, "r")
    room = np.ones(min(data.nbytes, BUFFER_BYTES), np.uint8)

    def run() -> float:
        seconds = 0.0
        for begin in range(0, data.nbytes, room.nbytes):
            nbytes = min(room.nbytes, data.nbytes - begin)
            source = data.ctypes.data + begin
            seconds += plain.copy_by_threads(room.ctypes.data, source, nbytes, cpus)
        return seconds * 1e3

    return run


@SUITE.case(
    "copy",
    "How fast is a file in the page cache copied to huge pages?",
    unit="ms",
    targets=[faster_than_best(0.9, issue=6)],
)
def copied(measure: Measure) -> None:
    """Compare load="copy" with the ways of C."""
    cpus, file = measure.pin(2), hot_file(measure, "gguf")
    load = partial(in_c, file, plain.load, cpus=cpus)
    peers = {
        "C, read": load("read", 8 * MB),
        "C, pread": load("pread", 2 * MB, threads=2),
        "C, MADV_POPULATE_WRITE, pread": load("pread", 2 * MB, threads=2, populate=True),
        "C, mmap, memcpy": load("memcpy", 2 * MB, threads=2),
    }
    if can_load(measure, streamed := "C, mmap, non-temporal copy", "stream"):
        peers[streamed] = load("stream", 2 * MB, threads=2)
    prepare = partial(ready, file.nbytes, cpus)
    measure.compare(
        ours={"unimem": in_state(prepare, partial(copy, file, "copy", cpus, None))},
        peers={name: in_state(prepare, side) for name, side in peers.items()},
        limits={MEMCPY: copying_what_is_mapped(file, cpus)},
        rounds=7,
        quick_rounds=4,
        warmup=1,
    )


@SUITE.case(
    "copy-threads",
    "How does copying a file in the page cache to huge pages scale with threads?",
    unit="ms",
    x="threads",
    in_quick=False,
)
def copy_threads(measure: Measure) -> None:
    """Copy with 1, 2, 4 and so on up to all cores."""
    cpus, file = measure.pin(None), hot_file(measure, "gguf")
    counts = thread_counts(len(cpus))
    prepare = partial(ready, file.nbytes, cpus)

    def by_threads(side: Callable[[int], Side]) -> dict[float, Side]:
        return {n: in_state(prepare, side(n)) for n in counts}

    ours = {"unimem": by_threads(lambda n: partial(copy, file, "copy", cpus, n))}
    load = partial(in_c, file, plain.load, "memcpy", 2 * MB)
    peers = {"C, mmap, memcpy": by_threads(lambda n: load(threads=n, cpus=cpus[:n]))}
    limits = {MEMCPY: by_threads(lambda n: copying_what_is_mapped(file, cpus[:n]))}
    measure.scale(ours, peers, limits, rounds=4, warmup=1)


# ---- from the disk ----


def disk(path: Path, rooms: Sequence[memoryview]) -> None:
    """Read a file past the page cache with a thread for each buffer."""
    nbytes = path.stat().st_size
    begins = iter(range(0, nbytes, rooms[0].nbytes))  # shared by the threads
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(room: memoryview) -> int:
        return sum(os.preadv(fd, [room], begin) for begin in begins)

    try:
        with ThreadPoolExecutor(len(rooms)) as pool:
            total = sum(pool.map(read, rooms))
    finally:
        os.close(fd)
    if total != nbytes:
        raise AssertionError(f"{total} bytes of {nbytes} were read of {path.name}")


@SUITE.case(
    "cold",
    "How fast does a file on the disk come into memory?",
    unit="ms",
    targets=[faster_than_best(0.95, issue=6)],
)
def cold(measure: Measure) -> None:
    """Compare load="direct" with the ways of C, past the page cache and through it."""
    cpus, file = measure.pin(2), cold_file(measure, "gguf")
    load = partial(in_c, file, plain.load, cpus=cpus)

    def prepare() -> None:
        drop(file.path)
        ready(2 * file.nbytes, cpus)  # for the page cache, too

    prepare()
    copy(file, "direct", cpus, None)  # as a warm-up, and to see whether it works
    peers = {
        "C, mmap, touched": load("touch", 1 << 40),
        "C, read": load("read", 8 * MB),
        "C, O_DIRECT, 16 threads": load("pread", 4 * MB, threads=16, direct=True),
    }
    for depth, request in ((16, 4), (32, 1)):
        name = f"C, io_uring, {depth} x {request} MiB"
        if can_load(measure, name, "io_uring", depth):
            peers[name] = load("io_uring", request * MB, depth=depth, direct=True)
    with um.Block(16 * 4 * MB, pages="thp", warm=True, category="diagnostics") as room:
        pieces = memoryview(room)
        rooms = [pieces[begin : begin + 4 * MB] for begin in range(0, room.nbytes, 4 * MB)]
        reading = partial(milliseconds, partial(disk, file.path, rooms))
        measure.compare(
            ours={"unimem": in_state(prepare, partial(copy, file, "direct", cpus, None))},
            peers={name: in_state(prepare, side) for name, side in peers.items()},
            limits={"the disk": in_state(prepare, reading)},
            rounds=5,
            quick_rounds=3,
            warmup=0,
        )


@SUITE.case(
    "page-cache",
    "How much of a file is in the page cache after it was read past it?",
    unit="% of the file",
    targets=[at_most(1, issue=6)],
)
def page_cache(measure: Measure) -> None:
    """Count what load="direct" leaves: the header, with what the kernel read ahead."""
    cpus, file = measure.pin(2), cold_file(measure, "gguf")
    shares = []
    for _ in range(1 if measure.quick else 3):
        drop(file.path)
        ready(file.nbytes, cpus)
        copy(file, "direct", cpus, None)
        shares.append(plain.cached_bytes(file.path) / file.nbytes * 100)
    measure.count("unimem", shares)


# ---- staged for another process ----


def llama_command(library: Path) -> list[str]:
    """Return the command that starts llama.cpp, with the model as the next argument."""
    return [sys.executable, "-P", "-m", "unimem_bench.llama_start", str(library)]


def llama_start(command: Sequence[str], model: str | Path) -> float:
    """Start llama.cpp in a new process, and check that it leaves the whole file mapped; ms.

    RuntimeError if it does not load the model.
    """
    run = [*command, str(model)]
    pipe = subprocess.PIPE
    with subprocess.Popen(run, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        if child.stdout is None:
            raise AssertionError("a pipe was asked for")
        if not (seconds := child.stdout.readline()):
            raise RuntimeError(f"llama.cpp could not load {model}: {child.communicate()[1][-200:]}")
        info = os.stat(model)
        file = (os.major(info.st_dev), os.minor(info.st_dev)), info.st_ino
        areas = read_process(child.pid).areas
        child.communicate()
    nbytes = sum(area.resident_bytes for area in areas if (area.device, area.inode) == file)
    # It unmaps the file before and behind the tensors, and so the huge pages at both ends.
    if nbytes < info.st_size - 2 * HUGE_PAGE:
        raise AssertionError(f"{nbytes} bytes of {info.st_size} are mapped")
    return float(seconds) * 1e3


@SUITE.case(
    "staged",
    "How fast does llama.cpp start from a staged model?",
    unit="ms",
    targets=[costs(AS_WRITTEN, 0.6, issue=6)],
)
def staged(measure: Measure) -> None:
    """Start llama.cpp from a file in the page cache, and from its staged copy."""
    library = decoding.require_llama_cpp(measure, AS_WRITTEN)
    start = partial(llama_start, llama_command(library))
    model = (
        models.write_model(measure.folder, "wide", "f16")
        if measure.quick
        else models.write_model(measure.folder, "1.1b", "q8_0")
    )
    with ExitStack() as stack:
        download = stack.enter_context(downloaded(model))
        measure.fact("file_bytes", model.stat().st_size)
        by_huge_pages = {AS_WRITTEN: in_huge_pages(download), IN_FOLIOS: heat(model)}
        measure.fact("mapped_by_huge_pages", by_huge_pages)
        chosen = stack.enter_context(um.stage(model))
        measure.fact("staged", f"{chosen.backing}: {chosen.granted}")
        ours = {"unimem": partial(start, chosen.path)}
        for backing in ("tmpfs", "hugetlb", "memfd", "shm"):
            if backing == chosen.backing or measure.quick:
                continue
            name = f"unimem, {backing}"
            try:
                stage = stack.enter_context(um.stage(model, backing=backing))
            except (um.PlacementError, um.CapacityError) as error:
                measure.leave_out(name, str(error))
            else:
                ours[name] = partial(start, stage.path)
        peers = {AS_WRITTEN: partial(start, download), IN_FOLIOS: partial(start, model)}
        measure.compare(ours, peers, rounds=7, quick_rounds=3, warmup=1)
