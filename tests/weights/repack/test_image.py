"""Repacked images: a second start has the same bytes, and damaged ones are never used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.files.weight_bytes import cached_bytes, drop_from_cache
from support.models.image_models import expected_bytes, only, repacked_bytes, uses_images
from unimem.weights.repack.image_cache import ImageCache

pytestmark = uses_images

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("way", ["mapped", "mapped, cold", "thp", "tape", "numa"])
def test_a_second_start_has_the_same_bytes(
    way: str, model: Path, cache: ImageCache, repacks: list[str]
) -> None:
    expected = expected_bytes(model)
    assert repacked_bytes(model) == (None, expected)
    assert len(repacks) == 2
    path = only(cache)
    drop_from_cache(path)
    told: list[tuple[int, int]] = []
    options: dict[str, Any] = {"progress": lambda *done: told.append(done)}
    if way == "mapped":
        path.read_bytes()
    if way in ("numa", "thp"):
        options |= {"numa": "bind:0"} if way == "numa" else {"pages": "thp"}
    with um.Tape(4 << 20) as tape:
        if way == "tape":
            tape.take_bytes(100)
            options["tape"] = tape
        assert repacked_bytes(model, **options) == (str(path), expected)
    assert len(repacks) == 2
    with um.open_weights(model) as weights:
        total = sum(weights.tensors[name].nbytes for name in expected)
    assert told[-1] == (total, total)
    assert all(done < total for done, _ in told[:-1])
    assert told == sorted(told)
    # A mapping leaves it in the page cache, for later starts and other processes; a copy does not.
    assert (cached_bytes(path) > path.stat().st_size / 2) == way.startswith("mapped")


@pytest.mark.locks
def test_a_mapped_image_is_locked_on_request(model: Path, cache: ImageCache) -> None:
    repacked_bytes(model)
    only(cache).read_bytes()
    with um.open_weights(model, load="map") as weights, um.repack(weights, lock=True) as made:
        assert made.image == str(only(cache))
        assert made.blocks[0].granted.locked_bytes >= made.nbytes


def flip(raw: bytearray, at: int) -> bytearray:
    raw[at] ^= 1
    return raw


DAMAGES: dict[str, tuple[Callable[[bytearray], bytes | bytearray], str]] = {
    "empty": (lambda raw: b"", "does not begin with UNIMEMRP"),
    "cut in the table": (lambda raw: raw[:200], "cut off"),
    "cut in the data": (lambda raw: raw[:-1], "cut off"),
    "a bit of the header": (lambda raw: flip(raw, 33), "header's checksum"),
    "a bit of a tensor": (lambda raw: flip(raw, len(raw) - 5000), "hash of"),
    "half written": (lambda raw: raw[:4096] + bytes(len(raw) - 4096), "hash of"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_image_is_removed_and_made_again(
    damage: str, model: Path, cache: ImageCache, repacks: list[str]
) -> None:
    _, expected = repacked_bytes(model)
    path = only(cache)
    raw, (change, rule) = path.read_bytes(), DAMAGES[damage]
    path.write_bytes(change(bytearray(raw)))  # in the page cache: it would be mapped
    with pytest.warns(um.PlacementWarning, match=rule):
        assert repacked_bytes(model) == (None, expected)
    assert len(repacks) == 2
    assert path.read_bytes() == raw


@pytest.mark.parametrize("way", ["mapped", "thp", "tape"])
def test_every_way_of_loading_finds_a_flipped_bit(way: str, model: Path, cache: ImageCache) -> None:
    _, expected = repacked_bytes(model)
    path = only(cache)
    path.write_bytes(flip(bytearray(path.read_bytes()), path.stat().st_size - 5000))
    if way != "mapped":
        drop_from_cache(path)
    with um.Tape(4 << 20) as tape:
        ways: dict[str, dict[str, Any]] = {"thp": {"pages": "thp"}, "tape": {"tape": tape}}
        with pytest.warns(um.PlacementWarning, match="hash of"):
            assert repacked_bytes(model, **ways.get(way, {})) == (None, expected)
