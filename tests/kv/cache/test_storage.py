"""What a KV cache has of the machine's memory, with the kernel as the witness; and forks."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.contracts import kv_caches
from support.contracts.kv_caches import KINDS
from support.contracts.kv_model import KV_DTYPES, Talk
from support.kernel import proc_maps
from support.processes.forks import counts_faults, in_child
from support.processes.warm_python import run_script
from support.project.tiers import slow_after
from unimem._core.status import counters

pytestmark = pytest.mark.usefixtures("gives_memory_back")

MIB = 1 << 20
PAGE = proc_maps.PAGE
HUGE = proc_maps.huge_page_bytes()
N_LAYERS = 2
LANES = 2 * N_LAYERS
ROW = 2048  # bytes of f16: 8 heads of 128
SLOW = pytest.mark.slow


def cache(kind: str, n_tokens: int, pages: Any = "4k", **options: Any) -> Any:
    return kv_caches.cache(kind, N_LAYERS, 8, 128, n_tokens, pages=pages, **options)


def block_of(kv: um.KVCache) -> um.Block:
    block = kv.block if kv.tape is None else kv.tape.block
    assert block is not None
    return block


def fill(kv: um.KVCache, n: int) -> None:
    """Tokens in pieces, so that a ring has them through both of its images."""
    k = np.ones((min(n, 500), 8, 128), "float16")
    for first in range(0, n, 500):
        for layer in range(N_LAYERS):
            kv.append(layer, k[: n - first], k[: n - first])


def in_ram(kv: um.KVCache) -> int:
    """Bytes under the cache, a page that is mapped twice counted once."""
    block = block_of(kv)
    parts = proc_maps.mappings(block.address, block.reserved_bytes)
    return sum(part.fields["Pss"] for part in parts)


# ---- giving back ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pages", "use"), [
    ("4k", "trim_to"), ("thp", "enforce_memory_limit"),
    pytest.param("4k", "enforce_memory_limit", marks=pytest.mark.slow),
    pytest.param("thp", "trim_to", marks=pytest.mark.slow),
])  # fmt: skip
def test_memory_falls_by_what_was_trimmed(kind: str, pages: str, use: str) -> None:
    n = 5001
    warm = {"warm": True} if kind in ("fixed", "ring") else {}
    with cache(kind, n, pages, **warm) as kv:
        fill(kv, n + 2000 * (kind == "ring"))
        granted = block_of(kv).verify()
        if pages == "thp" and granted.huge_bytes < LANES * n * ROW * 9 // 10:
            pytest.skip("this machine gives too few transparent huge pages just now")
        for left in (4000, 1100, 3):
            held, before = kv.seq_len, in_ram(kv)
            getattr(kv, use)(left if use == "trim_to" else left * LANES * ROW)
            assert kv.seq_len == left
            trimmed = (held - left) * LANES * ROW
            fell = before - in_ram(kv)
            assert fell >= trimmed - 2 * granted.page_bytes * LANES, (fell, trimmed)
            # More goes than that only where it was taken in advance.
            assert in_ram(kv) >= left * LANES * ROW
            assert (kv.layer(1)[1] == 1).all()
            if kind != "tape":
                assert kv.resident_bytes == in_ram(kv)


# Each kind, and each way to drop a view: fast are those that have one of both anew.
DROPS = (kv_caches.drop_here, kv_caches.drop_in_a_thread, kv_caches.drop_in_a_collection)
VIEWS = [
    pytest.param(kind, drop, marks=() if DROPS[i % 3] is drop else [SLOW])
    for i, kind in enumerate(KINDS)
    for drop in DROPS
]


@pytest.mark.parametrize(("kind", "drop"), VIEWS)
def test_a_view_keeps_the_pages_and_they_go_with_it(
    kind: str, drop: Callable[[list[Any]], None]
) -> None:
    with cache(kind, 1000) as kv:
        talk = Talk(kv)
        talk.append(1300 if kind == "ring" else 1000)
        views: list[Any] = [kv.layer(1)[0]]
        contents, before = views[0].tobytes(), in_ram(kv)
        talk.trim_to(100)
        talk.check()
        assert in_ram(kv) == before
        assert views[0].tobytes() == contents
        drop(views)
        assert in_ram(kv) <= before - LANES * (900 * ROW - 2 * PAGE)
        talk.check()
        talk.append(500)
        talk.check()


@pytest.mark.parametrize("kind", ["fixed", "ring"])
def test_what_was_written_meanwhile_stays_when_the_view_goes(kind: str) -> None:
    """Rows that were trimmed under a view, and hold tokens again."""
    with cache(kind, 1000) as kv:
        talk = Talk(kv)
        talk.append(1000)
        view = kv.layer(0)[0]
        talk.trim_to(100)
        if kind == "fixed":
            kv.clear()
            talk.model.clear()
        talk.append(950)
        talk.check()
        del view
        talk.check()


def test_what_a_ring_can_go_back_to_stays_when_a_view_goes() -> None:
    with um.KVCache(N_LAYERS, 8, 128, 1000, window=500, spare_rows=400, pages="4k") as kv:
        talk = Talk(kv)
        talk.append(1000)
        view = kv.layer(0)[0]
        talk.trim_to(100)
        talk.append(800)
        talk.check()
        del view
        talk.check()
        talk.crop(100)
        talk.check()
        assert kv.seq_len == 500


@counts_faults
@pytest.mark.parametrize("kind", ["fixed", "tape", "ring"])
def test_crop_and_clear_keep_what_was_taken_at_once(kind: str) -> None:
    with cache(kind, 1000) as kv:
        fill(kv, 1000)
        before = in_ram(kv)
        kv.crop(1000 if kind == "ring" else 10)
        kv.clear()
        assert in_ram(kv) == before
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        fill(kv, 1000)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 500  # of 2000 pages


@pytest.mark.parametrize("kind", ["fixed", "grow", "ring"])
@pytest.mark.locks
def test_locked_memory(kind: str) -> None:
    with ExitStack() as stack:
        try:
            kv = stack.enter_context(cache(kind, 200, lock=True))
        except (um.PlacementError, MemoryError) as error:
            pytest.skip(f"memory cannot be locked: {error}")
        talk = Talk(kv)
        talk.append(200)
        assert kv.granted.locked_bytes == kv.granted.resident_bytes
        talk.trim_to(20)
        talk.check()
        assert kv.enforce_memory_limit(10 * LANES * ROW)
        talk.model.trim_to(10)
        talk.check()
        if kind == "grow":
            assert kv.capacity_bytes < 100 * LANES * ROW
        talk.append(100)
        talk.check()


# ---- what may become long ----


def test_a_million_tokens_and_a_hundred_in_them() -> None:
    with cache("grow", 1_000_000) as kv:
        fill(kv, 100)
        active = kv.memory_usage_bytes
        assert active == 100 * LANES * ROW
        assert in_ram(kv) < 3 * active
        assert in_ram(kv) == kv.capacity_bytes == kv.resident_bytes


@pytest.mark.skipif(HUGE == 0, reason="this kernel gives no transparent huge pages")
@pytest.mark.parametrize("pages", ["auto", "thp"])
def test_a_million_tokens_on_huge_pages(pages: str) -> None:
    with cache("grow", 1_000_000, pages) as kv:
        fill(kv, 100)
        assert in_ram(kv) < kv.memory_usage_bytes + N_LAYERS * 4_000_000


def test_the_process_stays_small_with_it() -> None:
    """Tables of what is committed, and pages of page tables, are memory, too."""
    done = run_script("""
        import numpy as np
        import unimem as um

        def rss():
            return int(open("/proc/self/statm").read().split()[1]) * 4096

        k = np.ones((100, 8, 128), "float16")
        def talk():
            kv = um.KVCache(4, 8, 128, 1_000_000, grow=True, pages="4k")
            for layer in range(4):
                kv.append(layer, k, k)
            return kv

        talk().close()  # imports, and what Python keeps
        before = rss()
        kv = talk()
        print((rss() - before) / kv.memory_usage_bytes)
        kv.close()
    """)
    assert done.returncode == 0, done.stderr
    assert 1 <= float(done.stdout) < 3


def charged(kv: um.KVCache) -> int:
    """What the kernel has charged for: the areas of the block that are accountable (VmFlags)."""
    assert kv.block is not None
    parts = proc_maps.mappings(kv.block.address, kv.block.reserved_bytes)
    return sum(part.end - part.start for part in parts if "ac" in part.flags)


def test_the_commit_charge_comes_and_goes_with_the_tokens() -> None:
    with cache("grow", 1_000_000) as kv:
        assert charged(kv) == 0  # of 16 GiB of addresses
        fill(kv, 16_000)
        assert 16_000 * LANES * ROW <= charged(kv) == kv.capacity_bytes
        kv.clear()
        assert charged(kv) == kv.capacity_bytes < 8 * MIB


# ---- huge pages ----


@pytest.mark.usefixtures("eight_huge_pages")
@pytest.mark.parametrize("kind", slow_after(1, ["grow", "fixed", "ring"]))
def test_reserved_huge_pages(kind: str) -> None:
    rows = (2 * MIB) // 512
    with kv_caches.cache(kind, 1, 2, 128, rows, pages="2m", strict=True) as kv:
        assert kv.block is not None
        talk = Talk(kv)
        talk.append(300)
        assert kv.block.verify().pages == "2m"
        assert kv.granted.huge_bytes == kv.capacity_bytes == 2 * 2 * MIB
        if kind == "ring":
            assert kv.n_rows == rows
            talk.append(rows)
        talk.check()
        talk.trim_to(10)
        talk.check()


def test_a_ring_on_transparent_huge_pages_is_rounded_to_whole_ones() -> None:
    with um.KVCache(1, 3, 64, 1 << 20, window=6000, pages="thp", warm=True) as kv:
        assert kv.n_rows >= 6000
        if HUGE:
            assert kv.n_rows * kv.row_bytes % HUGE == 0
        talk = Talk(kv)
        talk.append(100)
        talk.append(kv.n_rows + 17)
        talk.check()


# ---- the steady state ----


def costs(talk: Callable[[], None]) -> tuple[int, bool]:
    """Minor faults, and whether unimem allocated or called the system."""
    gc.collect()
    gc.disable()
    try:
        before = counters()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        talk()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        return faults, counters() != before
    finally:
        gc.enable()


# Each kind, and each type: fast are those that have one of both anew.
APPENDS = [
    pytest.param(kind, dtype, marks=() if KV_DTYPES[i % len(KV_DTYPES)] == dtype else [SLOW])
    for i, kind in enumerate(KINDS)
    for dtype in KV_DTYPES
]


@counts_faults
@pytest.mark.parametrize(("kind", "dtype"), APPENDS)
def test_appending_costs_nothing_but_the_copy(kind: str, dtype: str) -> None:
    tokens = [np.zeros((n, 8, 128), "float16") for n in (1, 7)]
    both = np.zeros((N_LAYERS, 8, 128), "float32")
    # The kernel may take a page for a moment, to move it, and its return counts as a fault: seldom.
    # What a call costs by itself would show in every round.
    for _ in range(20):
        with cache(kind, 3000, dtype=dtype) as kv:

            def talk() -> None:
                for _ in range(20):
                    for token in tokens:
                        for layer in range(N_LAYERS):
                            kv.append(layer, token, token)
                    kv.append_all(both, both)
                    kv.reserve(1)
                    kv.commit(1)
                    kv.layer(0)

            if kind == "grow":
                # A step is prefaulted: begin where one was made just now.
                n_growths = -1
                while kv.seq_len < 2000 or kv.n_growths == n_growths:
                    n_growths = kv.n_growths
                    kv.append_all(both, both)
            else:
                kv.warm()
                talk()
            faults, worked = costs(talk)
        assert not worked
        if faults == 0:
            break
    assert faults == 0


# ---- fork ----


@pytest.mark.parametrize("options", [{}, {"grow": True}, {"window": 10}], ids=str)
def test_a_forked_child_has_its_own_copy_but_of_a_ring(options: dict[str, Any]) -> None:
    k = np.full((3, 2, 64), 5, "f2")
    with um.KVCache(1, 2, 64, 10_000, name="talk", **options) as kv:
        kv.append(0, k, k)
        view: Any = kv.layer(0)[0] if kv.window is None else None
        uses: list[Callable[[], Any]] = [
            *(lambda: kv.append(0, k, k), lambda: kv.append_all(k[:1], k[:1])),
            *(lambda: kv.layer(0), lambda: kv.address(0, "k"), lambda: kv.reserve(1)),
            *(lambda: kv.crop(0), lambda: kv.trim_to(1), lambda: kv.enforce_memory_limit(0)),
            *(kv.clear, kv.copy, kv.warm, lambda: kv.seq_len, lambda: kv.resident_bytes),
            lambda: kv.memory_usage_bytes,
        ]

        def is_left_out() -> bool:
            for use in uses:
                with pytest.raises(um.ClosedError, match=r"KVCache 'talk'.*forked child"):
                    use()
            assert repr(kv) == "KVCache(closed)"
            kv.close()
            with um.KVCache(1, 2, 64, 100, window=10) as own:
                own.append(0, k, k)
                return own.seq_len == 3

        def has_its_own() -> bool:
            nonlocal view
            assert (view == 5).all()
            kv.layer(0)[0][:] = 6
            kv.append(0, *np.full((2, 2000, 2, 64), 7, "f2"))
            view = None
            kv.trim_to(100)
            kv.clear()
            kv.append(0, k, k)
            return kv.seq_len == 3

        assert in_child(is_left_out if kv.window else has_its_own)
        assert (kv.layer(0)[0] == 5).all()
        assert kv.seq_len == 3
        view = None
