"""The remembered hash of a model: all bytes count, and they are read once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import unimem as um
from support.models.decoders import WIDE_HEADS as SHAPE
from support.models.make import write_model
from unimem.weights import whole_hash as module
from unimem.weights.content_hash import content_hash
from unimem.weights.files import open_model
from unimem.weights.tensors import headers_of
from unimem.weights.whole_hash import is_hash_known, whole_hash


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf", shape=SHAPE, kind="f32")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, for files that count as settled at once."""
    monkeypatch.setenv("UNIMEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_STEP_NS", -1)
    new_process(monkeypatch)
    return tmp_path / "cache" / "hashes"


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_by_key", {})


def is_known(path: Path) -> bool:
    with open_model(path) as files:
        return is_hash_known(headers_of(files))


@pytest.fixture
def reads() -> Iterator[Any]:
    """How often all data is read."""
    with patch.object(module, "content_hash", side_effect=content_hash) as spy:
        yield spy


@pytest.mark.parametrize("load", ["map", "copy"])
def test_a_model_is_read_once(
    model: Path, cache: Path, reads: Any, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_known(model)
    with um.open_weights(model, load=load) as weights:
        expected = weights.content_hash()
        assert whole_hash(weights) == whole_hash(weights) == expected
    assert reads.call_count == 1
    new_process(monkeypatch)
    assert is_known(model)
    with um.open_weights(model) as weights:
        assert whole_hash(weights) == expected
    assert reads.call_count == 1
    (kept,) = cache.iterdir()
    kept.write_text("no hash")
    new_process(monkeypatch)
    assert not is_known(model)


@pytest.mark.parametrize("at", [0.2, 0.5, -1])
def test_every_byte_of_the_data_counts(model: Path, at: float, reads: Any) -> None:
    """Written in place, with the time of the last write set back."""
    with um.open_weights(model) as weights:
        before = whole_hash(weights)
        fingerprint = weights.fingerprint
    info, data = model.stat(), model.read_bytes()
    with model.open("r+b") as file:
        file.seek(int(len(data) * at) if at > 0 else len(data) - 1)
        file.write(bytes([data[file.tell()] ^ 1]))
    os.utime(model, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert not is_known(model)
    with um.open_weights(model) as weights:
        assert weights.fingerprint == fingerprint
        assert whole_hash(weights) != before
    assert reads.call_count == 2


def test_a_file_that_may_change_unseen_is_not_remembered(
    model: Path, reads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STEP_NS", 3600 * 10**9)
    with um.open_weights(model, load="map") as weights:
        assert whole_hash(weights) == whole_hash(weights)
    assert reads.call_count == 2
    assert not is_known(model)
    # Memory of its own does not change.
    with um.open_weights(model, load="copy") as weights:
        assert whole_hash(weights) == whole_hash(weights)
    assert reads.call_count == 3


def test_another_file_under_the_name_is_another_model(
    model: Path, tmp_path: Path, reads: Any
) -> None:
    other = write_model(tmp_path / "other.gguf", shape=SHAPE, kind="f32", seed=1)
    with um.open_weights(model, load="copy") as weights:
        expected = whole_hash(weights)
        model.unlink()
        shutil.copy(other, model)
        assert whole_hash(weights) == expected == weights.content_hash()
    with um.open_weights(model) as weights:
        assert whole_hash(weights) != expected


@pytest.mark.parametrize("where", ["off", "others"])
def test_without_a_folder_the_process_remembers(
    model: Path, tmp_path: Path, reads: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "hashes").mkdir()
    (folder / "hashes").chmod(0o777)
    monkeypatch.setenv("UNIMEM_CACHE", "off" if where == "off" else str(folder))
    with um.open_weights(model) as weights:
        assert whole_hash(weights) == whole_hash(weights)
    assert reads.call_count == 1
    assert is_known(model)
    new_process(monkeypatch)
    assert not is_known(model)
    assert list((folder / "hashes").iterdir()) == []


def test_old_hashes_make_room(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_FILES", 4)
    cache.mkdir(parents=True, mode=0o700)
    for i in range(6):
        path = cache / f"{i:064x}.hash"
        path.write_text("0" * 32)
        os.utime(path, (i, i))
    with um.open_weights(model) as weights:
        whole_hash(weights)
    assert is_known(model)
    left = sorted(path.name[63] for path in cache.iterdir() if path.name.startswith("0" * 60))
    assert left == ["4", "5"]


def test_a_file_of_another_place_is_read_again(model: Path, tmp_path: Path, reads: Any) -> None:
    with um.open_weights(model) as weights:
        expected = whole_hash(weights)
    copied = Path(shutil.copy(model, tmp_path / "copied.gguf"))
    assert not is_known(copied)
    with um.open_weights(copied) as weights:
        assert whole_hash(weights) == expected
    assert reads.call_count == 2
