"""The hash of a model's folder: engines know a model only by its name or its path."""

from __future__ import annotations

import errno
from pathlib import Path

import xxhash

from unimem.errors import FormatError
from unimem.system import policy
from unimem.weights.opened import open_weights
from unimem.weights.whole_hash import whole_hash


def files_hash(path: Path, engine: str) -> str | None:
    """Hash all bytes of a model's weights and its configurations.

    None, with a warning that names the engine, if they cannot be read.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    total = xxhash.xxh3_128()
    try:
        if not files:
            raise FileNotFoundError(errno.ENOENT, "expected *.safetensors, found none")
        for file in files:
            with open_weights(file, load="map") as weights:
                total.update(whole_hash(weights).encode())
    except (FormatError, OSError) as error:
        policy.warn(f"{path}: {engine}'s model is known by its name only: {error}")
        return None
    for file in sorted([*path.glob("*config.json"), *path.glob("params.json")]):
        total.update(xxhash.xxh3_128_digest(file.read_bytes()))
    return total.hexdigest()
