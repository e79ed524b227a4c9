"""Files of weights: float16 tensors whose words add up to a known sum, in two formats."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from unimem.base.text import format_bytes
from unimem_bench.files import ALIGNMENT, FLOAT16, TensorEntry, gguf_header, made_once, text
from unimem_bench.states import available_bytes
from unimem_bench.suite import NotMeasured

Format = Literal["gguf", "safetensors"]

SHAPE = 8192, 4096
TENSOR_BYTES = SHAPE[0] * SHAPE[1] * 2  # 64 MiB
WRITE_BYTES = 8 << 20  # at once

# A file in the page cache, a copy of it, and as much to touch before that copy.
ROOM = 3


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file of tensors of 64 MiB, with the same data in both formats."""

    path: Path
    nbytes: int  # of the whole file
    data_offset: int  # of the tensors, which have no gaps between them
    sum: int  # of all words of 8 bytes of the data, modulo 2 to the power of 64

    def check(self, total: int) -> None:
        """Raise AssertionError unless `total` is the sum of the words in the file."""
        if total != self.sum:
            raise AssertionError(
                f"the words read of {self.path.name} add up to {total:#x}, not {self.sum:#x}"
            )


def tensors_that_fit(folder: Path, wanted: int) -> int:
    """Return how many tensors a file can have, at most `wanted`; NotMeasured if not one."""
    folder.mkdir(parents=True, exist_ok=True)
    there = sum(path.stat().st_size for path in folder.glob("weights-*"))
    disk_bytes = shutil.disk_usage(folder).free + there
    most = min(available_bytes(), disk_bytes) // (ROOM * TENSOR_BYTES)
    if most < 1:
        raise NotMeasured(
            f"wants {format_bytes(ROOM * TENSOR_BYTES)} of memory and of disk, "
            f"{format_bytes(available_bytes())} and {format_bytes(disk_bytes)} are free"
        )
    # A power of two: free space varies, and a later run must find the same file.
    return wanted if wanted <= most else 1 << int(most).bit_length() - 1


def weight_file(folder: Path, kind: Format, n_tensors: int) -> WeightFile:
    """Return a file of `n_tensors`, made if the folder has none."""
    names = [f"blk.{i}.ffn_down.weight" for i in range(n_tensors)]
    header = _gguf_header(names) if kind == "gguf" else _safetensors_header(names)
    # No two tensors are the same: word 0 of each is its number.
    words = np.random.default_rng(0).integers(0, 1 << 64, TENSOR_BYTES // 8, np.uint64)
    words[0] = 0
    total = int(words.sum(dtype=np.uint64)) * n_tensors + n_tensors * (n_tensors - 1) // 2
    path = folder / f"weights-{n_tensors}x64MiB.{kind}"
    made_once(path, partial(_write, header=header, words=words, n_tensors=n_tensors))
    nbytes = len(header) + n_tensors * TENSOR_BYTES
    return WeightFile(path, nbytes, len(header), total % (1 << 64))


def _write(path: Path, *, header: bytes, words: Any, n_tensors: int) -> None:
    data = words.view(np.uint8)
    with open(path, "wb", buffering=0) as file:
        file.write(header)
        for i in range(n_tensors):
            words[0] = i
            for begin in range(0, TENSOR_BYTES, WRITE_BYTES):
                file.write(data[begin : begin + WRITE_BYTES])
        os.fsync(file.fileno())


def _gguf_header(names: Sequence[str]) -> bytes:
    tensors = [TensorEntry(name, SHAPE[::-1], FLOAT16, TENSOR_BYTES) for name in names]
    return gguf_header([text("general.architecture", "llama")], tensors)


def _safetensors_header(names: Sequence[str]) -> bytes:
    tensors = {
        name: {
            "dtype": "F16",
            "shape": SHAPE,
            "data_offsets": [i * TENSOR_BYTES, (i + 1) * TENSOR_BYTES],
        }
        for i, name in enumerate(names)
    }
    entries = json.dumps(tensors).encode()
    entries += b" " * (-(8 + len(entries)) % ALIGNMENT)
    return struct.pack("<Q", len(entries)) + entries
