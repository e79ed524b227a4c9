"""Three lifetimes: the weights stay, a pass clears scratch, a new talk clears the rest.

What holds for main memory and for a GPU's is tested for both.
"""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.files import gguf_files as gf
from support.gpu.devices import Device
from support.kernel import proc_maps
from support.processes.forks import counts_faults
from unimem._core import tmpfs
from unimem._core.status import counters, ledger
from unimem.layout import Stat
from unimem.system import limits

pytestmark = pytest.mark.usefixtures("gives_memory_back")

KIB = 1024


@pytest.fixture
def layout(device: Device) -> Iterator[Any]:
    with device.package.Layout(64 * KIB, 16 * KIB, 32 * KIB) as layout:
        yield layout


@pytest.fixture
def host_layout() -> Iterator[um.Layout]:
    with um.Layout(64 * KIB, 16 * KIB, 32 * KIB, pages="4k") as layout:
        yield layout


def model(tmp_path: Path) -> Path:
    """A file with one tensor of eight float32."""
    path = tmp_path / "model.gguf"
    data = np.arange(8, dtype="float32").tobytes()
    parts = [gf.head(1, 0), gf.string("w"), gf.u32(1), gf.u64(8), gf.u32(gf.F32), gf.u64(0)]
    header = b"".join(parts)
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path


def used(layout: Any) -> tuple[int, int, int]:
    stat = layout.stat()
    return stat.weights_used, stat.scratch_used, stat.history_used


def mapped() -> dict[str, int]:
    return {name: row["mapped_bytes"] for name, row in ledger().items() if row["mapped_bytes"]}


def test_each_lifetime_is_cleared_when_it_ends(device: Device, layout: Any) -> None:
    assert isinstance(layout.weights, device.package.Tape)
    weight = layout.weights.take(100)
    device.seen(weight)[:] = 1
    layout.history.take(200)
    layout.scratch.take(300)
    assert used(layout) == (400, 1200, 800)
    layout.clear_pass()
    assert used(layout) == (400, 0, 800)
    layout.scratch.take(300)
    layout.scratch.keep()
    layout.scratch.take(300)
    layout.clear_pass()
    assert used(layout) == (400, 1200, 800)  # what is kept stays
    layout.clear_talk()
    assert used(layout) == (400, 1200, 0)
    assert (device.seen(weight) == 1).all()
    del weight


def test_stat_and_sizes(layout: Any) -> None:
    layout.scratch.take_bytes(10)
    assert layout.stat() == Stat(0, 64 * KIB, 10, 16 * KIB, 0, 32 * KIB)
    assert layout.total_bytes == 112 * KIB
    text = "weights: 1.5/4.0 MiB | scratch: 0.0/1.0 MiB | history: 0.2/0.5 MiB"
    assert str(Stat(1536 * KIB, 4096 * KIB, 0, 1024 * KIB, 256 * KIB, 512 * KIB)) == text
    assert repr(layout) == f"Layout({layout.stat()})"


def test_options_are_for_all_three(host_layout: um.Layout) -> None:
    for tape in (host_layout.weights, host_layout.scratch, host_layout.history):
        assert isinstance(tape, um.Tape)
        assert tape.block.requested["pages"] == "4k"


def test_the_ledger_tells_the_lifetimes_apart(device: Device) -> None:
    gc.collect()  # what other tests have left
    before = device.held()
    with device.package.Layout(64 * KIB, 16 * KIB, 32 * KIB):
        more = {name: n - before.get(name, 0) for name, n in device.held().items()}
    sizes = {"weights": 64 * KIB, "scratch": 16 * KIB, "history": 32 * KIB}
    assert {name: n for name, n in more.items() if n} == sizes


def test_a_cache_on_history(host_layout: um.Layout) -> None:
    kv = um.KVCache(2, 2, 8, 16, tape=host_layout.history)
    host_layout.attach(kv)
    storage = host_layout.history.used_bytes
    assert storage == kv.capacity_bytes
    address = kv.address(1, "v")
    token = np.ones((2, 2, 8), "float32")
    host_layout.history.take(10)  # something else of this talk
    for talk in range(3):
        assert kv.is_empty
        for n in range(5):
            kv.append_all(token * talk, token)
            host_layout.clear_pass()
            assert kv.seq_len == n + 1  # a pass does not touch it
        host_layout.clear_talk()
        assert kv.is_empty
        assert host_layout.history.used_bytes == storage  # its memory stays, the rest goes
        assert kv.address(1, "v") == address
    kv.append_all(token, token)
    assert host_layout.history.owns(kv.layer(0)[0])


def test_caches_elsewhere_are_cleared_too(host_layout: um.Layout) -> None:
    with um.KVCache(1, 2, 8, 4) as kv:
        host_layout.attach(kv)
        assert host_layout.history.used_bytes == 0
        kv.append(0, *[np.ones((2, 2, 8), "float32")] * 2)
        host_layout.history.take(8)
        host_layout.clear_talk()
        assert kv.is_empty
        assert host_layout.history.used_bytes == 0
    host_layout.history.take(8)
    host_layout.clear_talk()  # the closed one is not asked
    assert host_layout.history.used_bytes == 0


@counts_faults
@pytest.mark.parametrize("mode", ["c", "r+"])
def test_freezing_warms_a_mapped_file_for_writing(mode: Any, tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(bytes(range(256)) * 4096)
    with (
        um.Block.map(path, mode=mode, category="scratch") as block,
        um.Layout(64 * KIB, block, 32 * KIB) as layout,
    ):
        layout.scratch.take_bytes(KIB * KIB)
        layout.clear_pass()
        layout.freeze()
        taken = layout.scratch.take_bytes(KIB * KIB)
        for change in (0, 1):  # with 0, for what Python and NumPy touch with it
            part = taken[: 1 if change == 0 else None]
            with um.measure() as m:
                part += change
        assert m.thread_minor_faults == 0
        del taken, part
    changed = bytes(range(1, 256)) + b"\0"
    assert path.read_bytes() == (bytes(range(256)) if mode == "c" else changed) * 4096


INCREMENT = """
import mmap, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
    print("ready", flush=True)
    for _ in range(1_000_200):
        memory[0] = memory[0] + 1 & 255
"""


def test_freezing_loses_nothing_that_another_process_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("limits.require", "warm_python_heap"):  # which take nearly all of its time
        monkeypatch.setattr(f"unimem.layout.{name}", lambda *_: None)
    path = tmp_path / "memory"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with (
        um.Block.map(path, mode="r+", category="scratch") as block,
        um.Layout(64 * KIB, block, 32 * KIB) as layout,
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", INCREMENT, str(path)], stdout=subprocess.PIPE
        ) as other,
    ):
        layout.scratch.take_bytes(block.nbytes)
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        while other.poll() is None:
            layout.freeze()
            layout.thaw()
        assert other.returncode == 0
    assert path.read_bytes() == bytes([1_000_200 % 256]) + bytes(mmap.PAGESIZE - 1)


def test_freezing_a_tape_over_a_full_disk_is_an_error() -> None:
    """The pages of a file with holes are taken from the disk at the first write."""
    try:
        folder = tmpfs.open_mount(1 << 20, False)
    except um.PlacementError:
        pytest.skip("this process may not mount a tmpfs")
    try:
        path = f"/proc/self/fd/{folder}/file"
        with open(path, "wb") as file:
            file.truncate(4 << 20)
        with (
            um.Block.map(path, mode="r+", category="scratch") as block,
            um.Layout(64 * KIB, block, 32 * KIB) as layout,
        ):
            layout.scratch.take_bytes(block.nbytes)
            with pytest.raises(OSError, match="become shorter, or cannot be read or written"):
                layout.freeze()
            assert not layout.frozen
    finally:
        os.close(folder)


def test_frozen_means_no_new_memory(device: Device, layout: Any) -> None:
    layout.scratch.take_bytes(1000)
    layout.clear_pass()
    layout.freeze()
    assert layout.frozen
    takes: list[Callable[[], Any]] = [
        lambda: layout.weights.take(1),
        lambda: layout.history.take(1),
        lambda: layout.history.take(0),
        lambda: layout.scratch.take_bytes(1001),
    ]
    before, costs = device.held(), device.costs()
    for _ in range(16):
        layout.scratch.take_bytes(900, align=1)
        layout.scratch.take_bytes(100, align=1)  # up to the high water
        for take in takes:
            with pytest.raises(um.FrozenError):
                take()
        layout.clear_pass()
    layout.clear_talk()
    assert device.held() == before
    assert device.costs() == costs
    layout.thaw()
    assert not layout.frozen
    layout.weights.take(1)
    layout.history.take(1)
    layout.scratch.take_bytes(2000)


@pytest.mark.usefixtures("no_collection")
def test_frozen_caches_go_on_in_the_memory_that_they_have(host_layout: um.Layout) -> None:
    kv = um.KVCache(1, 2, 8, 16, tape=host_layout.history, dtype="f32")
    host_layout.attach(kv)
    host_layout.freeze()
    token = np.ones((1, 2, 8), "float32")
    before, system = mapped(), counters()
    for n in range(16):
        with pytest.raises(um.FrozenError):
            um.KVCache(1, 2, 8, 16, tape=host_layout.history)
        kv.append(0, token, token)
        assert kv.seq_len == n + 1
    host_layout.clear_talk()
    assert kv.is_empty
    assert mapped() == before
    assert counters() == system


@pytest.mark.usefixtures("no_collection")
def test_frozen_caches_do_not_grow(host_layout: um.Layout) -> None:
    token = np.ones((1, 2, 8), "float32")
    options: dict[str, Any] = {"dtype": "f32", "grow": True, "pages": "4k"}
    with (
        um.KVCache(1, 2, 8, 1000, **options) as kv,
        um.KVCache(1, 2, 8, 1000, **options) as late,
        um.KVCache(1, 2, 8, 16, window=4) as ring,
    ):
        for cache in (kv, ring):
            host_layout.attach(cache)
        kv.append(0, token, token)
        host_layout.freeze()
        host_layout.attach(late)
        committed, before = kv.capacity_bytes, counters()
        n = committed // (2 * token.nbytes)
        for _ in range(n - 1):
            kv.append(0, token, token)
            ring.append(0, token, token)
        for cache, held in ((kv, n), (late, 0)):
            with pytest.raises(um.FrozenError, match="frozen"):
                cache.append(0, token, token)
            assert cache.seq_len == held
        assert counters() == before
        host_layout.clear_talk()
        assert kv.is_empty
        assert ring.is_empty
        kv.append(0, token, token)
        host_layout.thaw()
        for cache in (kv, late):
            for _ in range(n):
                cache.append(0, token, token)
        assert kv.capacity_bytes > committed
        late.close()
        host_layout.freeze()  # the closed one is not asked


KINDS: dict[str, Callable[[um.Layout], Any]] = {
    "on history": lambda layout: um.KVCache(8, 2, 64, 128, dtype="f32", tape=layout.history),
    "on another tape": lambda _: um.KVCache(8, 2, 64, 128, dtype="f32", tape=um.Tape(2 << 20)),
    "fixed": lambda _: um.KVCache(8, 2, 64, 128, dtype="f32"),
    "growing": lambda _: um.KVCache(8, 2, 64, 128, dtype="f32", grow=True, pages="4k"),
    "ring": lambda _: um.KVCache(8, 2, 64, 128, dtype="f32", window=32),
    "pad": lambda _: um.Scratchpad(128, 512),
    "paged pad": lambda _: um.PagedScratchpad(128, 512),
}


def faults_of_a_frozen_layout(kind: str, pages: Any) -> int:
    """Two conversations, with tokens that are dropped, in memory that nobody has touched."""
    token, row = np.ones((8, 2, 64), "float32"), np.ones(512, "float32")
    with um.Layout(1 << 20, 1 << 20, 2 << 20, pages=pages) as layout, KINDS[kind](layout) as cache:

        def talk(n: int) -> None:
            for _ in range(n):
                hidden = layout.scratch.take(60_000)
                hidden[::1024] = weight[::1024] = 1
                if isinstance(cache, um.KVCache):
                    cache.append_all(token, token)
                else:
                    cache.append(row)
                layout.clear_pass()

        assert isinstance(layout.weights, um.Tape)
        weight = layout.weights.take(200_000)
        layout.scratch.take(60_000)
        layout.clear_pass()
        layout.attach(cache)
        if kind == "growing":
            talk(120)
        layout.freeze()
        with um.measure() as m:
            for _ in range(2):
                layout.clear_talk()
                talk(100)
                if isinstance(cache, um.KVCache):
                    cache.trim_to(10)  # whose memory stays, for what comes next
                talk(20 if kind in ("growing", "pad", "paged pad") else 60)
    if cache.tape is not None:
        cache.tape.close()
    assert m.thread_minor_faults is not None
    return m.thread_minor_faults


@counts_faults
@pytest.mark.parametrize("pages", ["auto", "4k"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_faults_in_a_frozen_layout(kind: str, pages: str) -> None:
    # The kernel may take a page for a moment, to move it, and its return counts as a fault: seldom.
    assert 0 in (faults_of_a_frozen_layout(kind, pages) for _ in range(5))


def test_a_cache_that_comes_to_a_frozen_layout_is_warmed(host_layout: um.Layout) -> None:
    host_layout.freeze()
    with um.KVCache(2, 2, 64, 512, pages="4k") as kv:
        host_layout.attach(kv)
        assert kv.resident_bytes == kv.capacity_bytes


@pytest.mark.parametrize("mapped", [False, True])
def test_what_cannot_be_warmed_is_not_frozen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mapped: bool
) -> None:
    """Each part would fit, and all together do not: nothing is touched."""
    weights = um.open_weights(model(tmp_path), load="map") if mapped else 4 << 20
    with (
        um.Layout(weights, 4 << 20, 4 << 20, pages="4k") as layout,
        um.KVCache(1, 2, 64, 64, window=64) as ring,
    ):
        if not isinstance(layout.weights, um.Weights):
            layout.weights.take_bytes(3 << 20)
        layout.history.take_bytes(3 << 20)
        layout.scratch.take_bytes(3 << 20)
        layout.attach(ring)
        layout.clear_pass()
        full = limits.Limit("cgroup /full", 16 << 20, 12 << 20, "more")
        with monkeypatch.context() as patch:
            patch.setattr(limits, "_memory", lambda: iter([(full.room_bytes, lambda: full)]))
            patch.setattr(limits, "memory_limits", lambda: (full,))
            with pytest.raises(um.CapacityError, match=r"Layout\.freeze: .* cgroup /full has room"):
                layout.freeze()
        assert not layout.frozen
        assert not layout.scratch.frozen
        assert layout.history.block.verify().resident_bytes == 0
        assert ring.resident_bytes == 0
        layout.history.take_bytes(1)
        layout.freeze()
        assert ring.resident_bytes == ring.capacity_bytes
    if isinstance(weights, um.Weights):
        weights.close()


@pytest.mark.usefixtures("eight_huge_pages")
def test_hugetlb_pages_need_no_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    full = limits.Limit("cgroup /full", 16 << 20, 16 << 20, "more")
    with um.Layout(*[2 << 20] * 3, pages="2m") as layout:
        layout.history.take_bytes(1 << 20)
        monkeypatch.setattr(limits, "_memory", lambda: iter([(0, lambda: full)]))
        monkeypatch.setattr(limits, "memory_limits", lambda: (full,))
        layout.freeze()
        assert layout.frozen


@pytest.mark.parametrize(
    ("error", "all_sizes"),
    [
        (ValueError, [(0, 4096, 4096), (4096, -1, 4096), (4096, 4096, 0), (4096, 4096, "big")]),
        (MemoryError, [(4096, 2**62, 4096), (4096, 4096, 2**62)]),
        (TypeError, [(None, 4096, 4096), (4096, 1.5, 4096)]),
    ],
)
def test_all_or_nothing(device: Device, error: type[Exception], all_sizes: list[Any]) -> None:
    before = device.held()
    for sizes in all_sizes:
        with pytest.raises(error):
            device.package.Layout(*sizes)
        assert device.held() == before


def test_a_wrong_option_leaves_nothing() -> None:
    before = mapped()
    for options in ({"pages": "3k"}, {"warm": -1}, {"colour": "red"}):
        with pytest.raises((ValueError, TypeError)):
            um.Layout(4096, 4096, 4096, **options)
    assert mapped() == before


def test_given_blocks_stay_open(device: Device) -> None:
    block, layout_of = device.package.Block, device.package.Layout
    gc.collect()  # an earlier test may have left some to the collector
    at_start = Counter(device.held())
    with block(8192) as ground, block(4096) as other:
        with layout_of(4096, ground, other) as layout:
            assert layout.scratch.block is ground
            assert layout.stat().scratch_total == 8192
        layout = layout_of(4096, ground, other)
        view = layout.scratch.take(4)
        layout.close()  # the view uses the block, which is not the layout's
        device.seen(view)[:] = 1
        assert not ground.closed
        before = device.held()
        with pytest.raises(ValueError, match="nbytes"):
            layout_of(4096, ground, 0)
        assert device.held() == before
        del view
        ground.close()  # and nobody holds it
        with pytest.raises(um.ClosedError):
            layout_of(4096, ground, other)
        held = Counter(device.held()) - at_start
        held.pop("diagnostics", None)  # what a process shows others stays for as long as it runs
        assert held == {"other": 4096}


def test_given_weights_count_as_used_and_stay_open(tmp_path: Path) -> None:
    weights = um.open_weights(model(tmp_path))
    with um.Layout(weights, 4096, 8192) as layout:
        assert layout.weights is weights
        assert layout.stat().weights_used == layout.stat().weights_total == weights.mapped_bytes
        assert layout.total_bytes == weights.mapped_bytes + 12288
        layout.freeze()
        layout.clear_talk()
        layout.thaw()
    assert not weights.closed
    assert weights.tensors["w"].as_array().tolist() == list(range(8))
    layout = um.Layout(weights, 4096, 8192)
    layout.close()
    assert not weights.closed
    before = mapped()
    with pytest.raises(ValueError, match="nbytes"):
        um.Layout(weights, 0, 1)
    assert mapped() == before
    assert not weights.closed
    weights.close()


@pytest.mark.parametrize("which", ["weights", "scratch", "history"])
def test_close_with_live_views_closes_nothing(device: Device, which: str) -> None:
    layout = device.package.Layout(4096, 4096, 4096)
    view = getattr(layout, which).take(8)
    before = device.held()
    with pytest.raises(BufferError, match="live"):
        layout.close()
    assert not layout.closed
    assert device.held() == before
    for tape in (layout.weights, layout.scratch, layout.history):
        assert not tape.closed
        tape.take(1)
    assert view.size == 8
    del view
    layout.close()
    assert layout.closed
    layout.close()


def test_views_of_every_tape_outlive_the_with(device: Device) -> None:
    with device.package.Layout(4096, 4096, 4096) as layout:
        views = [tape.take(8) for tape in (layout.weights, layout.scratch, layout.history)]
        addresses = [device.address_of(view) for view in views]
    assert layout.closed
    for n, view in enumerate(views):
        device.seen(view)[:] = n
        assert device.seen(view).sum() == 8 * n
    del views, view
    gc.collect()
    assert not any(device.is_there(address) for address in addresses)


def test_a_closed_layout_says_so(layout: Any) -> None:
    with um.KVCache(1, 2, 8, 4) as kv:
        layout.close()
        uses: list[Callable[[], Any]] = [
            layout.clear_pass,
            layout.clear_talk,
            layout.freeze,
            layout.thaw,
            layout.stat,
            lambda: layout.total_bytes,
            lambda: layout.attach(kv),
            layout.__enter__,
            lambda: layout.scratch.take(1),
        ]
        for use in uses:
            with pytest.raises(um.ClosedError, match="closed"):
                use()
    assert repr(layout) == "Layout(closed)"


def test_a_closed_layout_closes_its_caches(host_layout: um.Layout) -> None:
    kv = um.KVCache(1, 2, 8, 4, tape=host_layout.history)
    host_layout.attach(kv)
    host_layout.close()
    assert kv.closed
    with pytest.raises(um.ClosedError, match="closed"):
        len(kv.layer(0))


def test_a_layout_that_is_dropped_open_warns_and_gives_the_memory_back(device: Device) -> None:
    before = device.held()
    layout = device.package.Layout(4096, 4096, 4096)
    with pytest.warns(ResourceWarning, match="unclosed") as caught:
        del layout
    assert len(caught) == 3
    caught.clear()
    gc.collect()
    assert device.held() == before


@pytest.mark.usefixtures("no_collection")
def test_steady_state(host_layout: um.Layout) -> None:
    """What a decode step does: nothing is allocated, called, or moved."""
    kv = um.KVCache(2, 2, 8, 64, tape=host_layout.history)
    host_layout.attach(kv)
    token = np.ones((2, 8), "float32")

    def step() -> list[int]:
        hidden = host_layout.scratch.take((4, 16))
        scores = host_layout.scratch.take((2, 64), "float16")
        for i in range(2):
            kv.append(i, token[None], token[None])
        addresses = [proc_maps.address_of(a) for a in (hidden, scores, *kv.layer(0), *kv.layer(1))]
        host_layout.clear_pass()
        return addresses

    first = step()
    host_layout.freeze()
    before = counters()
    for _ in range(60):
        assert step() == first
    assert counters() == before


def test_a_layout_is_made_once() -> None:
    with um.Layout(4096, 4096, 4096) as layout:
        history, before = layout.history, layout.stat()
        with pytest.raises(RuntimeError, match="the Layout is made already"):
            layout.__init__(4096, 4096, 8192)  # type: ignore[misc]
        assert layout.history is history
        assert layout.stat() == before
