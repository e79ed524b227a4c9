"""What zstd makes of a chunk of a store: ratio, and the time to pack and to unpack it.

    python tools/chunk_zstd.py MODEL.gguf TEXT [--turns N]

A decoder computes the beginning of a text. Its chunks of 256 tokens, of a cache of f16 and of q8_0,
are packed by zstd on one thread: as they are, and with the first bytes of all values before the
second ones. It prints medians, beside the time to read a chunk from the page cache and check it.
`pip install zstandard` first. `docs/store.md` has what it printed.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

import unimem as um
from unimem.engine import Decoder
from unimem.kv.store.chunk import HEADER_BYTES, find_fault_alone

zstandard: Any = importlib.import_module("zstandard")
N_TOKENS, CHUNK_TOKENS = 1024, 256
LEVELS = 1, 3
# The bytes that repeat: a value of f16, and a block of q8_0.
STRIDES = {"f16": 2, "q8_0": 34}


def chunks_of(model: Path, text: str, kv_dtype: str) -> list[tuple[bytes, NDArray[np.uint8]]]:
    """Return the identities and files of the chunks of a text."""
    with (
        tempfile.TemporaryDirectory() as folder,
        um.KVStore(folder, ram_bytes=0, disk_bytes=1 << 30, chunk_tokens=CHUNK_TOKENS) as store,
        Decoder(model, ctx=N_TOKENS, kv_dtype=kv_dtype, rotate=False, store=store) as decoder,
    ):
        decoder.prefill(decoder.tokenize(text)[:N_TOKENS])
        return [
            (bytes.fromhex(path.stem), np.fromfile(path, np.uint8))
            for path in sorted(Path(folder).glob("*.kv"))
        ]


def timed(work: Callable[[], Any], turns: int) -> tuple[float, Any]:
    """Return the median of some turns in milliseconds, and the last answer."""
    times, answer = [], None
    for _ in range(turns):
        begin = time.perf_counter()
        answer = work()
        times.append(time.perf_counter() - begin)
    return 1000 * median(times), answer


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    print("| chunk | zstd | ratio | pack | unpack | read and check |\n|---|---|---|---|---|---|")
    for kv_dtype, stride in STRIDES.items():
        found = chunks_of(given.model, given.text.read_text(), kv_dtype)
        for is_split in (False, True):
            for level in LEVELS:
                rows = [measure(*chunk, level, stride * is_split, given.turns) for chunk in found]
                nbytes = found[0][1].nbytes / (1 << 20)
                ratio, pack, unpack, read = (median(column) for column in zip(*rows, strict=True))
                print(
                    f"| `{kv_dtype}`, {nbytes:.1f} MiB | {level}{', split' * is_split} "
                    f"| {ratio:.3f} | {pack:.1f} ms | {unpack:.1f} ms | {read:.1f} ms |"
                )


def measure(
    key: bytes, blob: NDArray[np.uint8], level: int, stride: int, turns: int
) -> tuple[float, float, float, float]:
    """Return the ratio of one chunk, and its times in milliseconds."""
    data = blob[HEADER_BYTES:]

    def pack() -> bytes:
        body = data
        if stride:
            n = data.nbytes // stride * stride
            body = np.concatenate([data[:n].reshape(-1, stride).T.reshape(-1), data[n:]])
        return bytes(zstandard.ZstdCompressor(level=level).compress(body.data))

    def unpack() -> NDArray[np.uint8]:
        body = np.frombuffer(zstandard.ZstdDecompressor().decompress(packed), np.uint8)
        if not stride:
            return body
        n = data.nbytes // stride * stride
        return np.concatenate([body[:n].reshape(stride, -1).T.reshape(-1), body[n:]])

    def read() -> None:
        file.seek(0)
        there = np.fromfile(file, np.uint8)
        assert find_fault_alone(key, there, {}) is None

    with tempfile.TemporaryFile() as file:
        file.write(blob.tobytes())
        file.flush()
        pack_ms, packed = timed(pack, turns)
        unpack_ms, back = timed(unpack, turns)
        assert np.array_equal(back, data)
        return data.nbytes / len(packed), pack_ms, unpack_ms, timed(read, turns)[0]


if __name__ == "__main__":
    main()
