"""Files in small folios of the page cache are read anew in large ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.files import gguf_files as gf
from unimem.weights import large_folios
from unimem.weights.large_folios import ask_for_huge_pages, read_anew
from unimem.weights.opened import Weights, open_weights

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model of 68 MiB, written piece by piece and on the disk."""
    path = tmp_path / "m.gguf"
    header, _ = gf.join(gf.head(1, 0), gf.tensor("w", (MIB, 17), gf.F32, 0))
    data = header + bytes(-len(header) % 32 + 4 * 17 * MIB)
    with open(path, "wb") as file:
        for begin in range(0, len(data), 65536):
            file.write(data[begin : begin + 65536])
            file.flush()
        os.fsync(file.fileno())
    return path


def warmed(path: Path) -> Weights:
    weights = open_weights(path, load="map")
    weights.warm()
    return weights


def test_a_file_is_read_anew_where_that_gives_huge_pages(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_folios, "_LEAST_RATE", 0)
    with warmed(path) as weights:
        before = weights.residency()
        ask_for_huge_pages(weights)
        if before.huge_bytes > before.nbytes // 2:
            pytest.skip("this file system writes files in large folios")
        assert read_anew(weights) >= 68 * MIB
        weights.warm()
        after = weights.residency()
        assert after.mapped_bytes == before.mapped_bytes
        if not after.huge_bytes:
            pytest.skip("this kernel or file system has no large folios for mapped files")
        assert after.huge_bytes > before.huge_bytes
        assert read_anew(weights) == 0  # once
        assert not weights.tensors["w"].as_array().any()
    with warmed(path) as weights:  # and so for every process
        assert weights.residency().huge_bytes == after.huge_bytes


def test_a_slow_disk_is_read_no_further(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_folios, "_LEAST_RATE", float("inf"))
    monkeypatch.setattr(large_folios, "_ENOUGH", 2)
    with warmed(path) as weights:
        ask_for_huge_pages(weights)
        assert read_anew(weights) == 64 * MIB
        weights.warm()
        assert not weights.tensors["w"].as_array().any()


def test_small_models_and_huge_ones_are_left_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_folios, "_LEAST_RATE", 0)
    with warmed(path) as weights:
        monkeypatch.setattr(large_folios, "_ENOUGH", 0)
        assert read_anew(weights) == 0
        monkeypatch.setattr(large_folios, "_ENOUGH", 2)
        monkeypatch.setattr(large_folios, "_LEAST_BYTES", 1 << 30)
        assert read_anew(weights) == 0


def test_a_file_on_the_disk_arrives_in_large_folios(path: Path) -> None:
    with warmed(path) as weights:
        weights.evict()
        ask_for_huge_pages(weights)
        weights.warm()
        if not weights.residency().huge_bytes:
            pytest.skip("this kernel or file system has no large folios for mapped files")
        assert read_anew(weights) == 0  # nothing is read twice
