"""A store for an engine: only the same chunk of the same model and layout is hit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unimem.errors import PlacementWarning
from unimem.kv.store.engine_store import EngineStore

SIZE = 5000


def opened(folder: Path, engine: str = "E", version: str = "1", **options: Any) -> EngineStore:
    return EngineStore(engine, version, {"where": folder, "disk_bytes": 1 << 20} | options)


def test_a_chunk_is_found_under_the_same_identity_only(tmp_path: Path) -> None:
    def has(name: str = "m", layout: object = (1,), size: int = SIZE, **given: Any) -> bool:
        with opened(tmp_path / "s", **given) as store:
            return store.chunks(name, layout, size).has(b"k")

    with opened(tmp_path / "s") as store:
        assert store.chunks("m", [1], SIZE).put(b"k", np.ones(SIZE, np.uint8))
    assert has()
    others: list[dict[str, Any]] = [
        {"name": "n"},
        {"layout": (2,)},
        {"engine": "F"},
        {"version": "2"},
        {"model": "revision"},
    ]
    assert [has(**other) for other in others] == [False] * len(others)


def test_a_model_in_a_folder_is_hashed_once(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with opened(tmp_path / "s") as store:
        with pytest.warns(PlacementWarning, match="name only"):
            first = store.chunks(str(tmp_path / "m"), [1], SIZE)
        assert store.chunks(str(tmp_path / "m"), [1], SIZE) is first


def test_the_first_chunk_of_a_prompt_is_the_one_used_last(tmp_path: Path) -> None:
    keys = [bytes([i]) for i in range(3)]
    with opened(tmp_path) as store:
        store.note_prompt(keys)
        ages = [store.used_ns(key) for key in keys]
        assert ages == [ages[0], ages[0] - 1, ages[0] - 2]
        assert store.used_ns(b"unknown") > ages[0]
        store.note_prompt(i.to_bytes(4, "big") for i in range(1 << 16))
        assert store.used_ns(keys[0]) > ages[0], "the oldest are forgotten"


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"disk_byte": 1}, ValueError, "options: expected where, and any of .*disk_byte"),
        ({"model": 1}, TypeError, "model: expected a string, got 1"),
        ({"n_threads": 0}, ValueError, "n_threads: expected"),
        ({"disk_bytes": 0}, ValueError, "one that is not 0"),
        ({"disk_bytes": SIZE}, ValueError, "disk_bytes: expected 0, or at least 70536 .* of E"),
        ({"ram_bytes": SIZE}, ValueError, "ram_bytes: expected 0, or at least 70536 .* of E"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match), opened(tmp_path, **options) as store:
        store.chunks("m", [1], SIZE)


@pytest.mark.parametrize("options", [None, {}, {"ram_bytes": 1}])
def test_a_place_is_required(options: Any) -> None:
    with pytest.raises(ValueError, match="options: expected where"):
        EngineStore("E", "1", options)
