"""Identities of images: equal for equal bytes, and different for all else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import unimem as um
from support.models.image_models import (
    KINDS,
    expected_bytes,
    only,
    repacked_bytes,
    uses_images,
    write,
)
from unimem.backends import ggml_orders
from unimem.weights.files import version_of
from unimem.weights.repack import image_identity
from unimem.weights.repack.arrangement import arrange
from unimem.weights.repack.image_cache import ImageCache
from unimem.weights.repack.image_format import key_of

pytestmark = uses_images

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("other", ["model", "model of the same size", "build", "cpu", "probe"])
def test_an_image_of_another_identity_is_not_used(
    other: str, model: Path, cache: ImageCache, repacks: list[str], monkeypatch: Patch
) -> None:
    repacked_bytes(model)
    path = only(cache)
    if other.startswith("model"):
        second = write(model.with_name("second.gguf"), seed=7 if other == "model" else 8)
        os.replace(second, model)
        os.utime(model, ns=(0, 0))  # another time, as another inode has
        # Under the name of its own image.
        with um.open_weights(model) as weights:
            identity = image_identity.identify(weights, arrange(weights))
        shutil.copy(path, cache.path_of(key_of(identity)))
        with pytest.warns(um.PlacementWarning, match="not of what its name says"):
            image, found = repacked_bytes(model)
        assert (image, found) == (None, expected_bytes(model))
        return
    build = ggml_orders.build()
    if other == "build":
        build = build | {"libraries": "0"}
    elif other == "cpu":
        build = build | {"features": {}}
    else:
        monkeypatch.setattr(image_identity, "_hash_pattern", lambda *_: "0")
    monkeypatch.setattr(ggml_orders, "build", lambda: build)
    assert repacked_bytes(model)[0] is None
    assert len(repacks) == 2
    assert len(cache.images()) == 2


def test_a_rewritten_model_of_equal_size_and_time_is_another(
    model: Path, cache: ImageCache, repacks: list[str]
) -> None:
    repacked_bytes(model)
    before = model.stat()
    model.write_bytes(write(model.with_name("other.gguf"), seed=5).read_bytes())
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert version_of(model.stat()) == version_of(before)
    assert repacked_bytes(model) == (None, expected_bytes(model))


def test_the_probe_depends_on_the_order_alone(model: Path) -> None:
    """Equal code gives equal probes; a byte in another place changes them."""
    with um.open_weights(model) as weights:
        found = arrange(weights)
        first = image_identity.identify(weights, found)
        image_identity._hash_pattern.cache_clear()
        assert image_identity.identify(weights, found) == first
        assert all(len(digest) == 32 for digest in first["probe"].values())
        shape = image_identity._pattern_shape(KINDS[0], (512, 160))
        assert image_identity._hash_pattern(KINDS[0], shape) in first["probe"].values()
