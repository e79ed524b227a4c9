"""Models whose tensors are repacked here, and the images that a cache keeps of them."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.files import gguf_files as gf
from unimem.weights.repack.image_cache import ImageCache

pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
pytest.importorskip(
    "unimem.backends.ggml",
    reason="the engine needs ggml: pip install ./ggml '.[run]'",
    exc_type=ImportError,
)

import gguf

from unimem.backends import ggml, ggml_orders

KINDS = [kind for kind in ggml.MATMUL_TYPES if ggml_orders.find_order(kind, (256, 64))]
if not KINDS:
    pytest.skip("this build of ggml has no orders of its own on this CPU", allow_module_level=True)

uses_images = pytest.mark.usefixtures("gives_memory_back", "leaves_nothing")


def write_tensors(
    path: Path, tensors: dict[str, tuple[int, tuple[int, ...]]], seed: int = 0
) -> Path:
    """Write a model of random bytes, given the type and shape (ggml's order) of each tensor."""
    data = {}
    for i, (name, (kind, ne)) in enumerate(tensors.items(), seed):
        shape = (*ne[:0:-1], int(ggml.row_size(kind, ne[0])))
        values = gf.random_bytes(int(np.prod(shape)), i).reshape(shape)
        data[name] = (values, gguf.GGMLQuantizationType(kind))
    gf.write_with_gguf_py(path, {}, data)
    return path


def write(path: Path, seed: int = 0) -> Path:
    """Write a model of two matrices, experts, and a table that keeps its order."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (256, 64),
        "up.weight": (512, 160),
        "down.weight": (256, 64),
        "down_exps.weight": (256, 96, 3),
    }
    return write_tensors(path, {name: (KINDS[0], ne) for name, ne in shapes.items()}, seed)


def repacked_bytes(path: Path | str, **options: Any) -> tuple[str | None, dict[str, bytes]]:
    """Repack a model; return the image it came from, if any, and the bytes of its tensors."""
    with um.open_weights(path, load="map") as weights, um.repack(weights, **options) as made:
        found = {
            name: ctypes.string_at(tensor.address, tensor.nbytes)
            for name, tensor in made.tensors.items()
        }
        return made.image, found


def expected_bytes(path: Path) -> dict[str, bytes]:
    image, found = repacked_bytes(path, cache=False)
    assert image is None
    return found


def only(cache: ImageCache) -> Path:
    (image,) = cache.images()
    return Path(image.path)
