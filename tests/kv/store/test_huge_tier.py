"""Stores with chunks in pages of the hugetlb pool, and their fallbacks."""

from __future__ import annotations

import fcntl
import os
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.files.prefix_stores import bytes_of, large_cache, shm
from support.kernel.huge_pages import PAGE_BYTES, count
from unimem.kv.store import huge_tier
from unimem.kv.store.store import KVStore
from unimem.system import limits

__all__ = ["shm"]  # a fixture

MODEL, CHUNK = "tiny", 512
# A chunk of 4 MiB with its header takes three huge pages.
COST = 3 * PAGE_BYTES
# Room for two chunks and the table; the kernel's pool has eight pages.
BUDGET = 2 * COST + 65536
OPTIONS: dict[str, Any] = {"ram_bytes": BUDGET, "disk_bytes": 0, "chunk_tokens": CHUNK}
OPTIONS |= {"pages": "2m"}


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[KVStore]:
    with um.KVStore(folder, **OPTIONS | options) as store:
        yield store


@pytest.fixture
def hugetlbfs(tmp_path: Path, eight_huge_pages: None) -> Iterator[Path]:
    """A hugetlbfs, mounted at a path with a blank."""
    path = tmp_path / "huge pages"
    path.mkdir()
    command = ["mount", "-t", "hugetlbfs", "-o", "pagesize=2M,mode=700", "none", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this process may not mount: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def there(hugetlbfs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hugetlbfs, with all others of the machine hidden."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    own = [line for line in mounts if str(hugetlbfs).replace(" ", "\\040") in line]
    monkeypatch.setattr(huge_tier, "read_text", lambda _: "\n".join(own))
    return hugetlbfs


@pytest.mark.parametrize("numa", [None, "node"])
def test_chunks_lie_in_pages_of_the_pool(tmp_path: Path, there: Path, numa: str | None) -> None:
    if numa and not limits.nodes():
        pytest.skip("this kernel has no NUMA")
    options = {"numa": f"bind:{min(limits.nodes())}"} if numa else {}
    free = count("free_hugepages")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opened(tmp_path / "s", **options) as store, opened(tmp_path / "s") as other:
            for value in range(3):
                with large_cache(value) as kv:
                    kept = store.put(kv, [value, *range(CHUNK - 1)], model=MODEL)
                    assert kept == CHUNK
                    expected = bytes_of(kv, CHUNK)
            # There was room for two, and the first had to go.
            tier = other.stat().tiers[0]
            assert (tier.n_chunks, tier.nbytes) == (2, 2 * COST)
            assert Path(tier.path).parent == there
            assert count("free_hugepages") == free - 6, "all of them are taken at once"
            granted = other.granted
            assert granted is not None
            assert (granted.pages, granted.huge_bytes) == ("2m", 6 * PAGE_BYTES)
            with large_cache(None) as kv:
                assert other.restore_into(kv, [0, *range(CHUNK - 1)], model=MODEL) == 0
                assert other.restore_into(kv, [2, *range(CHUNK - 1)], model=MODEL) == CHUNK
                assert bytes_of(kv, CHUNK) == expected
            assert store.give_back() == 2 * COST
            assert count("free_hugepages") == free
    assert list(there.iterdir()) == []


def test_remains_of_a_killed_process_are_removed(tmp_path: Path, there: Path) -> None:
    left = there / f"unimem-kv-{os.geteuid()}-1-2"
    left.mkdir()
    with opened(tmp_path / "s"):
        assert not left.exists()


def test_a_damaged_chunk_is_a_miss(tmp_path: Path, there: Path) -> None:
    tokens = range(CHUNK)
    with opened(tmp_path / "s") as store, large_cache(7) as kv:
        store.put(kv, tokens, model=MODEL)
        (path,) = there.glob("*/pool")
        with um.Block.map(path, mode="r+") as block:
            block.as_array("uint8", 4 << 20)[100_000] ^= 1
        kv.clear()
        with pytest.warns(um.PlacementWarning, match="was removed"):
            assert store.restore_into(kv, tokens, model=MODEL) == 0


@pytest.fixture
def mount(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plain folder in place of the hugetlbfs, and one in place of ``/dev/shm``."""
    path = tmp_path / "mount"
    path.mkdir()
    monkeypatch.setattr(huge_tier, "_mount_point", lambda: str(path))
    monkeypatch.setattr("unimem.system.policy.pool_shortfall", lambda *_: None)
    return path


def found(store: KVStore, value: int) -> int:
    with large_cache(None) as kv:
        return store.restore_into(kv, [value, *range(CHUNK - 1)], model=MODEL)


def put(store: KVStore, value: int) -> None:
    with large_cache(value) as kv:
        store.put(kv, [value, *range(CHUNK - 1)], model=MODEL)


def test_the_last_process_closes_while_another_one_opens(
    tmp_path: Path, mount: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = um.KVStore(
        tmp_path / "s", ram_bytes=BUDGET, disk_bytes=0, chunk_tokens=CHUNK, pages="2m"
    )
    put(last, 1)
    flock = fcntl.flock

    def close_between(fd: int, how: int) -> None:
        """Close once the folder of the table is kept."""
        flock(fd, how)
        if how == fcntl.LOCK_SH:
            last.close()

    monkeypatch.setattr(fcntl, "flock", close_between)
    with opened(tmp_path / "s") as store:
        monkeypatch.setattr(fcntl, "flock", flock)
        assert found(store, 1) == CHUNK
    assert [*mount.iterdir(), *shm.iterdir()] == []


def test_two_tables_have_two_pools(tmp_path: Path, mount: Path, shm: Path) -> None:
    (tmp_path / "s").mkdir(0o700)
    info = (tmp_path / "s").stat()
    taken = shm / f"unimem-kv-{os.geteuid()}-{info.st_dev:x}-{info.st_ino:x}-2m"
    taken.touch()  # as another user may
    with pytest.warns(um.PlacementWarning, match="lie in"):
        first = um.KVStore(tmp_path / "s", **OPTIONS)
    with first:
        put(first, 1)
        taken.unlink()
        with opened(tmp_path / "s") as second:
            put(second, 2)
            assert (found(first, 1), found(second, 1)) == (CHUNK, 0)
        assert found(first, 1) == CHUNK
    assert [*mount.iterdir(), *shm.iterdir()] == []


def falls_back(folder: Path, match: str) -> None:
    """Check that the tier takes the next best pages, in shared memory, and says why."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with opened(folder) as store, large_cache(5) as kv:
            assert store.put(kv, range(CHUNK), model=MODEL) == CHUNK
            assert store.stat().tiers[0].path.startswith(limits.SHM)
            kv.clear()
            assert store.restore_into(kv, range(CHUNK), model=MODEL) == CHUNK
    text = str(said[0].message)
    assert said[0].category is um.PlacementWarning
    assert match in text
    assert "they get pages='thp'" in text


def test_without_a_hugetlbfs_chunks_are_thp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_tier, "read_text", lambda _: "none /x hugetlbfs rw,pagesize=1024M 0 0")
    falls_back(tmp_path / "s", "'mount -t hugetlbfs -o pagesize=2M,mode=700,uid=")


@pytest.mark.usefixtures("no_huge_pages")
def test_without_room_in_the_pool_chunks_are_thp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mount").mkdir()
    monkeypatch.setattr(huge_tier, "_mount_point", lambda: str(tmp_path / "mount"))
    falls_back(tmp_path / "s", "pages='2m'")
    assert list((tmp_path / "mount").iterdir()) == []
