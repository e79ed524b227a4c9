"""The search for an image: staged ones first, and none that merely lies beside a model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import unimem as um
from support.models.image_models import expected_bytes, only, repacked_bytes, uses_images, write
from unimem.weights.repack.image import IMAGE_NAME, Image
from unimem.weights.repack.image_cache import ImageCache

pytestmark = uses_images

Patch = pytest.MonkeyPatch


def test_a_staged_image_is_mapped_by_all(
    model: Path, cache: ImageCache, repacks: list[str], monkeypatch: Patch
) -> None:
    monkeypatch.setenv("UNIMEM_CACHE", "off")
    expected = expected_bytes(model)
    try:
        staged = um.stage(model, repack=True)
    except um.PlacementError as error:
        pytest.skip(f"neither tmpfs nor /dev/shm: {error}")
    repacks.clear()
    with staged:
        (image,) = staged.paths
        assert repacked_bytes(model) == (image, expected)  # without the link
        assert Path(staged.path).read_bytes() == model.read_bytes()
        # A mapping satisfies the request, so nothing is hashed again.
        with monkeypatch.context() as patch:
            patch.setattr(Image, "_check", None)
            assert repacked_bytes(staged.path) == (image, expected)
        # For another node it is read and checked.
        assert repacked_bytes(staged.path, numa="bind:0") == (image, expected)
        assert repacks == []
        write(model, seed=9)  # then the image is of another model
        assert repacked_bytes(staged.path)[0] is None


def test_staging_reads_the_kept_image(model: Path, cache: ImageCache, monkeypatch: Patch) -> None:
    expected = repacked_bytes(model)[1]
    monkeypatch.setattr("unimem.staging.stage.repack_into", None)
    with um.stage(model, repack=True, backing="shm") as staged:
        assert repacked_bytes(staged.path) == (staged.paths[0], expected)
    # A damaged image is repacked; here the function for that is missing.
    path = only(cache)
    raw = bytearray(path.read_bytes())
    raw[-5000] ^= 1
    path.write_bytes(raw)
    with pytest.warns(um.PlacementWarning, match="hash"), pytest.raises(TypeError):
        um.stage(model, repack=True, backing="shm")
    assert cache.images() == []


def test_an_image_on_disk_beside_a_model_is_not_trusted(
    model: Path, cache: ImageCache, repacks: list[str]
) -> None:
    _, expected = repacked_bytes(model)
    shutil.copy(only(cache), model.with_name(IMAGE_NAME))
    only(cache).unlink()
    assert repacked_bytes(model) == (None, expected)
    assert len(repacks) == 2
