"""Memory that is put aside in a store comes back byte for byte, or is known to be lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import unimem as um
from support.files.prefix_stores import files_of, opened, shm
from unimem.kv.store.aside import _PIECE_BYTES, Aside

__all__ = ["shm"]  # a fixture


def views(*sizes: int) -> list[np.ndarray]:
    chance = np.random.default_rng(len(sizes))
    return [chance.integers(0, 256, (size, 1), np.uint8) for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "n"),
    [((), 0), ((1, 0, 5), 1), ((_PIECE_BYTES,), 1), ((_PIECE_BYTES - 1, 2, 2 * _PIECE_BYTES), 4)],
)
def test_all_bytes_come_back(tmp_path: Path, shm: Path, sizes: tuple[int, ...], n: int) -> None:
    given = views(*sizes)
    with opened(tmp_path, ram_bytes=1 << 22) as store:
        aside = Aside(store, "m")
        aside.put(given)
        assert (len(files_of(tmp_path)), aside.nbytes) == (n, sum(sizes))
        assert store.stat().tiers[0].n_chunks == 0  # RAM would be memory as well
        found = [np.zeros_like(view) for view in given]
        assert aside.read(found)
        assert all(map(np.array_equal, found, given))
        for path in files_of(tmp_path)[:1]:
            path.write_bytes(path.read_bytes()[:-1])
            assert not aside.read(found)
            path.unlink()
            assert not aside.read(found)
        aside.drop()
        assert files_of(tmp_path) == []
        aside.drop()


def test_without_room_nothing_stays(tmp_path: Path) -> None:
    with opened(tmp_path, disk_bytes=3 << 20) as store:
        aside = Aside(store, "m")
        with pytest.raises(um.CapacityError, match="no room for 4194304 bytes"):
            aside.put(views(4 << 20))
        assert files_of(tmp_path) == []
        aside.put(views(1 << 20))
    aside.drop()  # the store is closed
    assert len(files_of(tmp_path)) == 1


def test_ram_alone_is_refused(tmp_path: Path, shm: Path) -> None:
    with (
        opened(tmp_path, ram_bytes=1 << 20, disk_bytes=0) as store,
        pytest.raises(ValueError, match="expected one with a disk or a server"),
    ):
        Aside(store, "m")
