"""How fast a model comes into memory, against what people use and what the machine can.

On a file of 4 GB: mapped and read once, against C that does just that and safetensors'
``load_file``; copied to huge pages, against the best of several programs in C; read past the page
cache, against the best of plain reads, a mapping, threads with O_DIRECT and io_uring; and
llama.cpp's start from a staged model, against its start from the file. The C is in `load.c`,
`bench/README.md` says how each figure is taken.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import unimem as um
from bench.harness import Bench, pin, ratios, spread
from unimem.bench.files import ALIGNMENT, string

ROOT = Path(__file__).resolve().parent.parent
MB = 1 << 20
SHAPE = 8192, 4096  # of each tensor: 64 MiB of float16
CASES = ("mapped", "copied", "cold", "safetensors", "staged")
TENSOR_BYTES = SHAPE[0] * SHAPE[1] * 2
F16, UINT32, STRING = 1, 4, 8  # GGUF's numbers
N_TRIES = 10  # to get memory back from the host

Way = Literal["read", "pread", "memcpy", "stream", "touch", "io_uring"]
WAYS: tuple[Way, ...] = ("read", "pread", "memcpy", "stream", "touch", "io_uring")
Ranges = Sequence[tuple[int, int]]
Side = Callable[[], float]


class Range(ctypes.Structure):
    """``range`` of load.c."""

    _fields_ = (("at", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class InC:
    """The functions of load.c. Each returns seconds, and checks what it has read."""

    def __init__(self, cpus: list[int]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            module = Path(folder, "load.so")
            run = [
                "cc",
                "-std=gnu17",
                "-O3",
                "-march=native",
                "-fPIC",
                "-shared",
                "-o",
                str(module),
            ]
            subprocess.run([*run, str(ROOT / "bench" / "load.c"), "-lpthread"], check=True)
            self._library = ctypes.CDLL(str(module), use_errno=True)
        self._cpus = (ctypes.c_int * len(cpus))(*cpus)
        self._fastest_touch = 0.0

    def _call(self, name: str, *arguments: object) -> float:
        function = getattr(self._library, name)
        function.restype = ctypes.c_double
        result = float(function(*arguments))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"{os.strerror(code)}, in {name} of load.c")
        return result

    def scan(self, ranges: Ranges, n_threads: int, expected: int) -> None:
        """Read every byte of some ranges of memory; the caller measures."""
        table = (Range * len(ranges))(*(Range(*each) for each in ranges))
        found = ctypes.c_uint64()
        size = ctypes.c_size_t(len(ranges))
        self._call("scan", table, size, n_threads, self._cpus, ctypes.byref(found))
        check(found.value, expected)

    def map_and_scan(self, file: File, *, populate: bool, n_threads: int) -> float:
        """Map a file and read every byte of its data."""
        path, offset = os.fsencode(file.path), ctypes.c_size_t(file.data_offset)
        found = ctypes.c_uint64()
        rest = (int(populate), n_threads, self._cpus, ctypes.byref(found))
        seconds = self._call("map_and_scan", path, offset, *rest)
        check(found.value, file.sum)
        return seconds

    def load(
        self,
        file: File,
        way: Way,
        request_bytes: int,
        *,
        threads: int = 1,
        direct: bool = False,
        populate: bool = False,
        depth: int = 0,
    ) -> float:
        """Bring a file into new huge pages, or its pages into a mapping (``touch``)."""
        found = ctypes.c_uint64()
        seconds = self._call(
            "load",
            os.fsencode(file.path),
            ctypes.c_size_t(file.data_offset),
            WAYS.index(way),
            int(direct),
            int(populate),
            threads,
            ctypes.c_size_t(request_bytes),
            depth,
            self._cpus,
            len(self._cpus),
            ctypes.byref(found),
        )
        check(found.value, file.sum)
        return seconds

    def cached_bytes(self, path: Path) -> int:
        """Bytes of a file that are in the page cache."""
        return int(self._call("cached_bytes", os.fsencode(path)))

    def ready(self, nbytes: int) -> None:
        """Touch and free so much, until that is fast: what was free for long is the host's."""
        for _ in range(N_TRIES):
            size = ctypes.c_size_t(nbytes)
            speed = nbytes / self._call("touch", size, self._cpus, len(self._cpus))
            self._fastest_touch = max(self._fastest_touch, speed)
            if speed > self._fastest_touch / 2:
                return


def check(found: int, expected: int) -> None:
    if found != expected:
        raise AssertionError(f"the words that were read add up to {found:#x}, not {expected:#x}")


# ---- files and their states ----


class File:
    """A model file of float16 tensors of 64 MiB, whose data is the same in both formats."""

    def __init__(self, path: Path, n_tensors: int) -> None:
        self.path = path
        names = [f"blk.{i}.ffn_down.weight" for i in range(n_tensors)]
        header = gguf_header(names) if path.suffix == ".gguf" else safetensors_header(names)
        words = np.random.default_rng(0).integers(0, 1 << 64, TENSOR_BYTES // 8, np.uint64)
        data: Any = words.view(np.uint8)
        with open(path, "wb", buffering=0) as out:
            out.write(header)
            for i in range(n_tensors):
                words[0] = i  # no two tensors are the same
                for begin in range(0, TENSOR_BYTES, 8 * MB):
                    out.write(data[begin : begin + 8 * MB])
            os.fsync(out.fileno())
        self.data_offset = len(header)
        self.nbytes = path.stat().st_size
        words[0] = 0
        total = int(words.sum(dtype=np.uint64)) * n_tensors + n_tensors * (n_tensors - 1) // 2
        self.sum = total % (1 << 64)


def gguf_header(names: list[str]) -> bytes:
    metadata = [
        string(b"general.architecture") + struct.pack("<I", STRING) + string(b"llama"),
        string(b"general.alignment") + struct.pack("<II", UINT32, ALIGNMENT),
    ]
    tensors = [
        string(name.encode()) + struct.pack("<IQQIQ", 2, *SHAPE[::-1], F16, i * TENSOR_BYTES)
        for i, name in enumerate(names)
    ]
    counts = struct.pack("<IQQ", 3, len(names), len(metadata))
    header = b"".join([b"GGUF", counts, *metadata, *tensors])
    return header + bytes(-len(header) % ALIGNMENT)


def safetensors_header(names: list[str]) -> bytes:
    tensors = {
        name: {
            "dtype": "F16",
            "shape": SHAPE,
            "data_offsets": [i * TENSOR_BYTES, (i + 1) * TENSOR_BYTES],
        }
        for i, name in enumerate(names)
    }
    text = json.dumps(tensors).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def drop(c: InC, path: Path) -> None:
    """Take a file out of the page cache, and see that it is gone."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    if c.cached_bytes(path) and os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    if left := c.cached_bytes(path):
        raise RuntimeError(f"{left} bytes of {path} stay in the page cache: it is not cold")


def read_through(path: Path) -> None:
    """Bring a file into the page cache as reading from begin to end does."""
    room = bytearray(8 * MB)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(room):
            pass


def in_huge_pages(path: Path) -> float:
    """Share of a file that huge pages map, when all of it is touched."""
    with um.Block.map(path) as block:
        view = block.as_array()
        view[::4096].sum()
        start = f"{block.address:x}-"
        del view
        ours = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-", line):
                ours = line.startswith(start)
            elif ours and line.startswith("FilePmdMapped:"):
                return (int(line.split()[1]) << 10) / path.stat().st_size
    raise RuntimeError(f"the kernel does not say how {path} is mapped")


def heat(bench: Bench, c: InC, path: Path) -> None:
    """Drop a file and read it again: then it lies in large folios, which huge pages map."""
    drop(c, path)
    read_through(path)
    share = in_huge_pages(path)
    bench.facts.setdefault("mapped_by_huge_pages", {})[path.name] = share
    print(f"\n{path.name}: hot, {share:.0%} of it in huge pages")


# ---- sides ----


def milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def in_milliseconds(run: Callable[..., float], *arguments: Any, **options: Any) -> Side:
    return lambda: run(*arguments, **options) * 1e3


def after(prepare: Callable[[], object], run: Side) -> Side:
    """Return a side that is measured in a state, which is made before."""

    def prepared() -> float:
        prepare()
        return run()

    return prepared


def open_and_scan(c: InC, file: File, n_threads: int) -> float:
    """Milliseconds to map a file with unimem and to read every byte of its tensors."""
    with ExitStack() as stack:

        def run() -> None:
            weights = stack.enter_context(um.open_weights(file.path, load="map"))
            ranges = [(tensor.address, tensor.nbytes) for tensor in weights.tensors.values()]
            c.scan(ranges, n_threads, file.sum)

        return milliseconds(run)


def load_file_and_scan(c: InC, load_file: Any, file: File, n_threads: int) -> float:
    """Milliseconds to load a file with safetensors and to read every byte of its arrays."""
    arrays: dict[str, NDArray[Any]] = {}

    def run() -> None:
        arrays.update(load_file(file.path))
        ranges = [(array.ctypes.data, array.nbytes) for array in arrays.values()]
        c.scan(ranges, n_threads, file.sum)

    return milliseconds(run)


def copy(c: InC, file: File, load: Literal["copy", "direct"]) -> float:
    """Milliseconds until unimem has the data in a block on huge pages."""
    start = time.perf_counter()
    with um.open_weights(file.path, load=load, pages="thp") as weights:
        elapsed = time.perf_counter() - start
        if weights.load != load or weights.blocks[0].granted.pages != "thp":
            raise AssertionError(f"asked for {load}, got {weights.load}, {weights.blocks[0]}")
        ranges = [(tensor.address, tensor.nbytes) for tensor in weights.tensors.values()]
        c.scan(ranges, 1, file.sum)
    return elapsed * 1e3


def against_best(
    bench: Bench, title: str, samples: Mapping[str, Sequence[float]], limit: float
) -> None:
    """Claim a speed next to that of the best other side.

    The best median of the even rounds says which side that is, and the odd rounds how it compares:
    of several equal sides, the luckiest would win if the same rounds said both.
    """
    others = {
        name: spread(values[::2]).median for name, values in samples.items() if name != "unimem"
    }
    best = min(others, key=others.__getitem__)
    faster = ratios(samples[best][1::2], samples["unimem"][1::2])
    bench.at_least(title, f"speed of unimem / {best}", faster, limit)


# ---- cases ----


def mapped(bench: Bench, c: InC, file: File) -> None:
    """Map a file that is in the page cache, and read all of it once."""
    for n_threads in (1, 2):
        title = f"hot, mapped and read, threads: {n_threads}"
        plain = partial(c.map_and_scan, file, n_threads=n_threads)
        samples = bench.compare(
            title,
            {
                "unimem": partial(open_and_scan, c, file, n_threads),
                "C, mmap": in_milliseconds(plain, populate=False),
                "C, MAP_POPULATE": in_milliseconds(plain, populate=True),
            },
            unit="ms",
            rounds=31,
            warmup=2,
        )
        faster = ratios(samples["C, mmap"], samples["unimem"])
        bench.at_least(title, "speed of unimem / C, mmap", faster, 0.97)


def against_safetensors(bench: Bench, c: InC, file: File) -> None:
    """Open a safetensors file that is in the page cache, and read all of it once."""
    load_file = importlib.import_module("safetensors.numpy").load_file
    for n_threads in (1, 2):
        title = f"hot, safetensors file, threads: {n_threads}"
        theirs = partial(load_file_and_scan, c, load_file, file, n_threads)
        samples = bench.compare(
            title,
            {
                "unimem": partial(open_and_scan, c, file, n_threads),
                "safetensors, load_file": after(partial(c.ready, file.nbytes), theirs),
            },
            unit="ms",
            rounds=7,
            warmup=1,
        )
        faster = ratios(samples["safetensors, load_file"], samples["unimem"])
        bench.at_least(title, "load_file / unimem", faster, 12)


def copied(bench: Bench, c: InC, file: File) -> None:
    """Copy a file that is in the page cache to huge pages."""
    sides: dict[str, Side] = {
        "unimem": partial(copy, c, file, "copy"),
        "C, read": in_milliseconds(c.load, file, "read", 8 * MB),
        "C, pread, 2 MiB": in_milliseconds(c.load, file, "pread", 2 * MB, threads=2),
        "C, pread, 8 MiB": in_milliseconds(c.load, file, "pread", 8 * MB, threads=2),
        "C, MADV_POPULATE_WRITE, pread": in_milliseconds(
            c.load, file, "pread", 2 * MB, threads=2, populate=True
        ),
        "C, mmap, memcpy": in_milliseconds(c.load, file, "memcpy", 2 * MB, threads=2),
        "C, mmap, non-temporal copy": in_milliseconds(c.load, file, "stream", 2 * MB, threads=2),
    }
    title = "hot, copied to huge pages"
    prepare = partial(c.ready, file.nbytes)
    samples = bench.compare(
        title,
        {name: after(prepare, side) for name, side in sides.items()},
        unit="ms",
        rounds=14,
        warmup=1,
    )
    against_best(bench, title, samples, 0.9)


def cold(bench: Bench, c: InC, file: File) -> None:
    """Bring a file into memory that is on the disk only."""

    def prepare() -> None:
        drop(c, file.path)
        c.ready(2 * file.nbytes)  # for the page cache, too

    def direct() -> float:
        elapsed = copy(c, file, "direct")
        cached.append(c.cached_bytes(file.path) / file.nbytes * 100)
        return elapsed

    cached: list[float] = []
    sides = {
        "unimem": direct,
        "C, mmap, touched": in_milliseconds(c.load, file, "touch", 1 << 40),
        "C, read": in_milliseconds(c.load, file, "read", 8 * MB),
        "C, O_DIRECT, 8 threads": in_milliseconds(
            c.load, file, "pread", 4 * MB, threads=8, direct=True
        ),
        "C, O_DIRECT, 16 threads": in_milliseconds(
            c.load, file, "pread", 4 * MB, threads=16, direct=True
        ),
        "C, io_uring, 16 x 4 MiB": in_milliseconds(
            c.load, file, "io_uring", 4 * MB, depth=16, direct=True
        ),
        "C, io_uring, 32 x 1 MiB": in_milliseconds(
            c.load, file, "io_uring", 1 * MB, depth=32, direct=True
        ),
    }
    title = "cold, brought into memory"
    samples = bench.compare(
        title,
        {name: after(prepare, side) for name, side in sides.items()},
        unit="ms",
        rounds=14,
        warmup=0,
    )
    against_best(bench, title, samples, 0.95)
    bench.show("in the page cache after load='direct'", {"unimem": cached}, unit="% of the file")
    bench.at_most(title, "in the page cache afterwards, %", cached, 1)


def llama_start(model: str, nbytes: int) -> float:
    """Milliseconds of llama.cpp's start, which leaves the whole file mapped."""
    run = [sys.executable, "-m", "bench.load_llama", model]
    done = subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    if answer["mapped_bytes"] < 0.99 * nbytes:
        raise AssertionError(f"{answer['mapped_bytes']} bytes of {nbytes} are mapped")
    return float(answer["seconds"] * 1e3)


def staged(bench: Bench, c: InC, folder: Path) -> None:
    """Start llama.cpp from a file in the page cache, and from what is staged of it."""
    model, download = folder / "model.gguf", folder / "download.gguf"
    make = [sys.executable, ROOT / "tests" / "models" / "make.py", model, "llama", "1.1b", "q8_0"]
    subprocess.run(list(map(str, make)), check=True)
    nbytes = model.stat().st_size
    with open(model, "rb", buffering=0) as source, open(download, "wb", buffering=0) as out:
        while piece := source.read(64 << 10):
            out.write(piece)
        os.fsync(out.fileno())
    heat(bench, c, model)
    share = in_huge_pages(download)
    bench.facts["mapped_by_huge_pages"][download.name] = share
    print(f"{download.name}: hot, {share:.0%} of it in huge pages")
    with ExitStack() as stack:
        chosen = stack.enter_context(um.stage(model))
        staged_as = f"staged, {chosen.backing}"
        sides = {
            "file, as it was written": partial(llama_start, str(download), nbytes),
            "file, in large folios": partial(llama_start, str(model), nbytes),
            staged_as: partial(llama_start, chosen.path, nbytes),
        }
        for backing in ("tmpfs", "hugetlb", "memfd", "shm"):
            if backing == chosen.backing:
                continue
            try:
                stage = stack.enter_context(um.stage(model, backing=backing))
            except (um.PlacementError, um.CapacityError) as error:
                print(f"not staged, {backing}: {error}")
                continue
            sides[f"staged, {backing}"] = partial(llama_start, stage.path, nbytes)
        bench.facts["staged"] = {"backing": chosen.backing, "granted": str(chosen.granted)}
        title = f"llama.cpp's start, {nbytes / 1e9:.3g} GB"
        samples = bench.compare(title, sides, unit="ms", rounds=13, warmup=1)
    faster = ratios(samples[staged_as], samples["file, as it was written"])
    bench.at_most(title, f"{staged_as} / file, as it was written", faster, 0.6)


def main() -> int:
    bench = Bench("load", __doc__)
    option = bench.parser.add_argument
    option("--dir", type=Path, help="for the files, 4 GB (by default the system's temporary one)")
    option("--nbytes", type=int, help="of a file, 4 GB (--quick: 512 MB)")
    option("--keep", action="store_true", help="leave the files there")
    option("--only", choices=CASES, help="one case")
    options = bench.parse()
    nbytes = options.nbytes or (512 * 10**6 if options.quick else 4 * 10**9)
    n_tensors = -(-nbytes // TENSOR_BYTES)
    c = InC(pin(2))
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="unimem-bench-", dir=options.dir))
        if options.keep:
            print(f"files: {folder}")
        else:
            stack.callback(remove, folder)
        bench.facts = {
            "file_bytes": n_tensors * TENSOR_BYTES,
            "folder": file_system(folder),
            "numpy": np.__version__,
            "peers": {name: version(name) for name in ("safetensors", "cyllama")},
        }
        cases = CASES if options.only is None else (options.only,)
        if {"mapped", "copied", "cold"} & set(cases):
            measure_gguf(bench, c, File(folder / "load.gguf", n_tensors), cases, keep=options.keep)
        if "safetensors" in cases and installed("safetensors"):
            file = File(folder / "load.safetensors", n_tensors)
            heat(bench, c, file.path)
            against_safetensors(bench, c, file)
            if not options.keep:
                file.path.unlink()
        if "staged" in cases and installed("cyllama"):
            staged(bench, c, folder)
    return bench.finish()


def measure_gguf(bench: Bench, c: InC, file: File, cases: Collection[str], *, keep: bool) -> None:
    heat(bench, c, file.path)
    for name, case in (("mapped", mapped), ("copied", copied), ("cold", cold)):
        if name in cases:
            case(bench, c, file)
    if not keep:
        file.path.unlink()


def installed(name: str) -> bool:
    """Whether a peer is there; says so if not."""
    if importlib.util.find_spec(name) is None:
        print(f"\n{name} is not installed, and left out")
        return False
    return True


def version(name: str) -> str:
    return importlib.metadata.version(name) if importlib.util.find_spec(name) else "not installed"


def remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def file_system(folder: Path) -> str:
    """Name the file system that a folder lies on."""
    run = ["stat", "--file-system", "--format=%T", str(folder)]
    return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
