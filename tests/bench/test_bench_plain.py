"""The C that benchmarks compare with, and the states they start from: each does its work."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import unimem as um
from support.kernel import huge_pages
from support.project.checkout import ROOT
from unimem_bench import plain, states
from unimem_bench.empty_call import EmptyCall
from unimem_bench.suite import NotMeasured

Patch = pytest.MonkeyPatch
Words = NDArray[np.uint64]
PAGE = mmap.PAGESIZE
CPUS = sorted(os.sched_getaffinity(0))
NO_CPU = 1023  # that this process may not use
TEAMS = [CPUS[:1], CPUS[:2], [CPUS[0]] * 3]
N_WORDS = 300_000  # more than a huge page, and not a whole number of pages


@pytest.fixture(scope="module")
def words() -> Words:
    found = np.random.default_rng(0).integers(0, 1 << 64, N_WORDS, np.uint64)
    found.flags.writeable = False
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, words: Words) -> Path:
    path = tmp_path_factory.mktemp("plain") / "words"
    path.write_bytes(bytes(24) + words.tobytes())
    return path


@pytest.fixture(autouse=True)
def nothing_stays_pinned() -> Iterator[None]:
    yield
    assert sorted(os.sched_getaffinity(0)) == CPUS


def total(words: Words) -> int:
    return int(words.sum(dtype=np.uint64))


def test_what_the_library_has_is_called() -> None:
    paths = (ROOT / "bench/native").glob("*.[ch]")
    # The runtime is in a library of its own.
    sources = "".join(path.read_text() for path in paths if path.stem != "runtime")
    exported = set(re.findall(r"BENCH_EXPORT double bench_(\w+)\(", sources))
    assert exported == {name for name in plain.__all__ if name.islower()}


def test_an_empty_call_converts_and_does_nothing() -> None:
    EmptyCall().call(64, 64)
    with pytest.raises(OverflowError):
        EmptyCall().call(-1, 64)


def test_churn() -> None:
    assert plain.churn(1000) > 0


def test_copy(words: Words) -> None:
    to = np.zeros_like(words)
    half, source, target = words.nbytes // 16 * 8, words.ctypes.data, to.ctypes.data
    parts = [(target + half, source + half, words.nbytes - half), (target, source, half - 8)]
    assert plain.copy(np.array(parts, np.uint64)) > 0
    assert to[half // 8 - 1] == 0
    to[half // 8 - 1] = words[half // 8 - 1]
    assert np.array_equal(to, words)
    tables: list[Any] = [np.zeros((2, 3)), np.zeros((2, 2), np.uint64)]
    for table in tables:
        with pytest.raises(ValueError, match=r"needs an array of uint64 of shape \(n, 3\), found"):
            plain.copy(table)


def test_fill() -> None:
    room = np.zeros(100, np.uint8)
    assert plain.fill(room.ctypes.data + 1, 98, 7) >= 0
    assert room.tolist() == [0, *[7] * 98, 0]


def test_read_touches_every_page() -> None:
    with um.Block(4 << 20, pages="4k", shared=True) as block:
        assert block.verify().resident_bytes == 0
        assert plain.read(block.address, block.nbytes) > 0
        assert block.verify().resident_bytes == block.nbytes


@pytest.mark.parametrize("cpus", TEAMS)
def test_threads_copy_and_fill_all_of_it(cpus: list[int], words: Words) -> None:
    source = words.view(np.uint8)
    for nbytes in (0, 1, 63, 64, 1000, 8 * N_WORDS - 1):
        to = np.full(source.nbytes, 9, np.uint8)
        assert plain.copy_by_threads(to.ctypes.data, source.ctypes.data, nbytes, cpus) > 0
        assert np.array_equal(to[:nbytes], source[:nbytes])
        assert (to[nbytes:] == 9).all()
        assert plain.fill_by_threads(to.ctypes.data, nbytes, 5, cpus) > 0
        assert (to[:nbytes] == 5).all()
        assert (to[nbytes:] == 9).all()


@pytest.mark.parametrize("cpus", TEAMS)
def test_scan_adds_up_every_word(cpus: list[int], words: Words) -> None:
    start = words.ctypes.data
    for cuts in ((), (1,), (1, 2, 3, N_WORDS - 1), (N_WORDS // 2, N_WORDS // 2)):
        parts = itertools.pairwise([0, *cuts, N_WORDS])
        ranges = [(start + 8 * begin, 8 * (end - begin)) for begin, end in parts]
        seconds, found = plain.scan(ranges, cpus)
        assert seconds > 0
        assert found == total(words)
    assert plain.scan([], cpus)[1] == 0


@pytest.mark.parametrize("cpus", TEAMS)
def test_touch_brings_in_every_page(cpus: list[int]) -> None:
    nbytes = 8 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert plain.touch(nbytes, PAGE, False, cpus) > 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before >= nbytes // PAGE


def test_touch_on_reserved_pages() -> None:
    with huge_pages.reserved(2):
        assert plain.touch(4 << 20, 2 << 20, "2m", CPUS[:1]) > 0
    refused = pytest.raises(OSError, match="touch of libunimem-bench")
    with huge_pages.all_held(), refused as info:
        plain.touch(4 << 20, 2 << 20, "2m", CPUS[:1])
    assert info.value.errno == errno.ENOMEM


@pytest.mark.parametrize(("name", "call"), [
    ("touch", lambda: plain.touch(4096, 4096, "4k", [NO_CPU])),
    ("touch", lambda: plain.touch(4096, 0, "4k", CPUS)),
    ("scan", lambda: plain.scan([], [])),
    ("scan", lambda: plain.scan([], [-1, -1])),
    ("copy_by_threads", lambda: plain.copy_by_threads(0, 0, 0, [1 << 20])),
    ("fill_by_threads", lambda: plain.fill_by_threads(0, 0, 0, [NO_CPU] * 2)),
])  # fmt: skip
def test_errors_name_the_function(name: str, call: Callable[[], object]) -> None:
    if NO_CPU in CPUS:
        pytest.skip(f"this process may use CPU {NO_CPU}")
    with pytest.raises(OSError, match=f"{name} of libunimem-bench: Invalid argument"):
        call()


WAYS: list[tuple[plain.Way, dict[str, Any]]] = [
    ("read", {}),
    ("read", {"populate": True}),
    ("touch", {}),
    ("pread", {"threads": 3}),
    ("pread", {"threads": 2, "populate": True}),
    ("pread", {"threads": 3, "direct": True}),
    ("memcpy", {"threads": 2}),
    ("stream", {"threads": 2}),
    ("io_uring", {"depth": 1}),
    ("io_uring", {"depth": 7, "direct": True}),
]


@pytest.mark.parametrize(("way", "how"), WAYS)
def test_every_way_loads_all(way: plain.Way, how: dict[str, Any], path: Path, words: Words) -> None:
    for request_bytes in (PAGE, 1 << 20, 1 << 40):
        try:
            seconds, found = plain.load(path, 24, way, request_bytes, cpus=CPUS[:2], **how)
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.EPERM) and way in ("stream", "io_uring"):
                pytest.skip(f"this machine has no {way}: {error}")
            if error.errno == errno.EINVAL and how.get("direct"):
                pytest.skip(f"{states.file_system(path)} has no O_DIRECT")
            raise
        assert seconds > 0
        assert found == total(words)


@pytest.mark.parametrize("cpus", TEAMS)
@pytest.mark.parametrize("populate", [True, False])
def test_map_and_scan(cpus: list[int], populate: bool, path: Path, words: Words) -> None:
    seconds, found = plain.map_and_scan(path, 24, populate=populate, cpus=cpus)
    assert seconds > 0
    assert found == total(words)


def test_errors_of_files_name_the_function(path: Path) -> None:
    missing = path.with_name("missing")
    for name, call in (
        ("cached_bytes", lambda: plain.cached_bytes(missing)),
        ("load", lambda: plain.load(missing, 0, "read", PAGE, cpus=CPUS)),
        ("map_and_scan", lambda: plain.map_and_scan(missing, 0, populate=False, cpus=CPUS)),
    ):
        with pytest.raises(FileNotFoundError, match=f"{name} of libunimem-bench: No such file"):
            call()
    for offset, request_bytes in ((0, 100), (0, 0), (1 << 30, PAGE)):
        with pytest.raises(OSError, match="load of libunimem-bench: Invalid argument"):
            plain.load(path, offset, "pread", request_bytes, cpus=CPUS)


def test_drop_and_heat(path: Path) -> None:
    pages = -(-path.stat().st_size // PAGE) * PAGE
    states.read_through(path)
    assert plain.cached_bytes(path) == pages
    try:
        states.drop(path)
    except NotMeasured as error:
        pytest.skip(f"{states.file_system(path)}: {error}")
    assert plain.cached_bytes(path) == 0
    assert 0 <= states.heat(path) <= 1
    assert plain.cached_bytes(path) == pages


def test_what_cannot_be_dropped_is_said(path: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(states, "DROP_CACHES", tmp_path / "asked")
    mapped = np.memmap(path, np.uint8, "r")
    assert mapped.sum(dtype=np.int64) > 0  # in the page tables, so that it stays
    with pytest.raises(NotMeasured, match=r"wants words on disk only, \d+ bytes stay"):
        states.drop(path)
    assert (tmp_path / "asked").read_text() == "3"
    assert 0 <= states.heat(path) <= 1


def test_what_of_a_file_is_in_huge_pages(path: Path) -> None:
    assert 0 <= states.in_huge_pages(path) <= 1
    with um.stage(Path(um.__file__).parent / "engine" / "models" / "tiny.gguf") as staged:
        share = states.in_huge_pages(Path(staged.path))
        # The huge pages of memory are known beforehand, those of a file on a disk are not.
        assert (share > 0) == (staged.granted.huge_bytes > 0)


@pytest.mark.parametrize(("seconds", "calls"), [
    ([1.0, 1.0, 9.0], 2),  # the first one is not known to be fast
    ([9.0, 1.0, 9.0], 2),
    ([1.0, 9.0, 1.0, 9.0], 3),
    ([1.0, 9.0, 9.0, 9.0, 1.0], 4),
])  # fmt: skip
def test_touched_until_that_is_fast(seconds: list[float], calls: int, monkeypatch: Patch) -> None:
    left = iter(seconds)
    touched: list[int] = []

    def touch(nbytes: int, *_: object) -> float:
        touched.append(nbytes)
        return next(left)

    monkeypatch.setattr(plain, "touch", touch)
    monkeypatch.setattr(states, "_fastest", {})
    states.ready(1 << 30, CPUS[:1])
    assert touched == [1 << 30] * calls
    with pytest.raises(NotMeasured, match=r"wants 1024\.0 TiB of memory, [\d.]+ GiB are free"):
        states.ready(1 << 50, CPUS[:1])
