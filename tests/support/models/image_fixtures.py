"""A model that is repacked here, and the cache of its images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import unimem as um
from unimem.weights.repack import repack
from unimem.weights.repack.image_cache import ImageCache


@pytest.fixture
def model(tmp_path: Path) -> Path:
    from support.models import image_models  # skips without what writes and repacks it

    folder = tmp_path / "models"
    folder.mkdir()
    return image_models.write(folder / "model.gguf")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageCache:
    folder = tmp_path / "cache"
    monkeypatch.setenv("UNIMEM_CACHE", str(folder))
    monkeypatch.setenv("UNIMEM_CACHE_BYTES", "1G")
    return ImageCache(str(folder), create=True)


@pytest.fixture
def repacks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were repacked, in order."""
    found: list[str] = []
    plain = repack.repack_into

    def counted(weights: um.Weights, *rest: Any) -> None:
        found.append(weights.files[0])
        plain(weights, *rest)

    monkeypatch.setattr(repack, "repack_into", counted)
    return found
