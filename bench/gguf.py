"""Opening a GGUF file with a large vocabulary: unimem against ggml, gguf-py, and reading it.

The file has the header of a model with 150 thousand tokens, 280 thousand merges and 400 tensors,
and next to no data. Opening it alone is compared with reading its bytes to new memory and with
ggml's ``gguf_init_from_file`` (which decodes all strings), and opening it with all tokens and
merges as Python strings with gguf-py's ``GGUFReader``. The file is in the page cache.
"""

from __future__ import annotations

import mmap
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import unimem as um
from bench.harness import Bench, pin, ratios

N_TOKENS = 150_000
N_MERGES = 280_000
N_TENSORS = 400
STRINGS = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
INT32, FLOAT32, STRING, ARRAY = 5, 6, 8, 9
Q8_0, BLOCK_VALUES, BLOCK_BYTES, ALIGNMENT = 8, 32, 34, 64


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def array(key: bytes, kind: int, n: int, items: bytes) -> bytes:
    return string(key) + struct.pack("<IIQ", ARRAY, kind, n) + items


def words(n: int, longest: int, seed: int) -> list[bytes]:
    """Words of random letters, of 2 to `longest`."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest + 1, n)
    letters = rng.integers(ord("a"), ord("z") + 1, int(lengths.sum()), dtype=np.uint8).tobytes()
    ends = np.cumsum(lengths)
    return [letters[end - n_letters : end] for n_letters, end in zip(lengths, ends, strict=True)]


def write_file(path: Path) -> None:
    tokens = words(N_TOKENS, 22, 0)
    merges = [
        a + b" " + b for a, b in zip(words(N_MERGES, 16, 1), words(N_MERGES, 10, 2), strict=True)
    ]
    rng = np.random.default_rng(3)
    metadata = [
        string(b"general.architecture") + struct.pack("<I", STRING) + string(b"llama"),
        string(b"general.alignment") + struct.pack("<II", 4, ALIGNMENT),
        array(b"tokenizer.ggml.tokens", STRING, N_TOKENS, b"".join(map(string, tokens))),
        array(
            b"tokenizer.ggml.scores",
            FLOAT32,
            N_TOKENS,
            rng.random(N_TOKENS, dtype=np.float32).tobytes(),
        ),
        array(b"tokenizer.ggml.token_type", INT32, N_TOKENS, np.ones(N_TOKENS, np.int32).tobytes()),
        array(b"tokenizer.ggml.merges", STRING, N_MERGES, b"".join(map(string, merges))),
    ]
    tensors = [
        string(f"blk.{i}.ffn_down.weight".encode())
        + struct.pack("<IQQIQ", 2, BLOCK_VALUES, 1, Q8_0, i * ALIGNMENT)
        for i in range(N_TENSORS)
    ]
    header = b"".join(
        [b"GGUF", struct.pack("<IQQ", 3, N_TENSORS, len(metadata)), *metadata, *tensors]
    )
    padding = bytes(-len(header) % ALIGNMENT)
    path.write_bytes(header + padding + bytes(N_TENSORS * ALIGNMENT))


def timed(open_it: Callable[[], Any], close_it: Callable[[Any], object]) -> Callable[[], float]:
    """Milliseconds to open; closing is not measured."""

    def run() -> float:
        start = time.perf_counter()
        opened = open_it()
        elapsed = time.perf_counter() - start
        close_it(opened)
        return elapsed * 1e3

    return run


def read_to_new_pages(path: Path) -> mmap.mmap:
    """Read a file to memory that the process did not have, as at its start."""
    with open(path, "rb", buffering=0) as file:
        room = mmap.mmap(-1, path.stat().st_size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        room.madvise(mmap.MADV_HUGEPAGE)
        file.readinto(room)
    return room


def main() -> int:
    bench = Bench("gguf", __doc__)
    bench.parse()
    pin(1)
    import ggml

    import gguf

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        write_file(path)
        bench.facts["file_bytes"] = path.stat().st_size
        parameters = ggml.gguf_init_params(no_alloc=True, ctx=None)

        def open_with_ggml() -> Any:
            context = ggml.gguf_init_from_file(str(path).encode(), parameters)
            if not context:
                raise RuntimeError(f"ggml does not open {path}")
            return context

        def decode() -> tuple[um.Weights, list[Any]]:
            weights = um.open_weights(path)
            return weights, [weights.metadata[key] for key in STRINGS]

        def decode_with_gguf_py() -> list[Any]:
            fields = gguf.GGUFReader(path).fields
            return [fields[key].contents() for key in STRINGS]

        weights, expected = decode()
        weights.close()

        def check(strings: list[Any]) -> None:
            if strings != expected:
                raise RuntimeError("unimem and gguf-py read different strings")

        title = "open, alone"
        samples = bench.compare(
            title,
            {
                "unimem": timed(lambda: um.open_weights(path), lambda opened: opened.close()),
                "ggml": timed(open_with_ggml, ggml.gguf_free),
                "reading it to new huge pages": timed(
                    lambda: read_to_new_pages(path), mmap.mmap.close
                ),
                "reading it to warm memory": timed(path.read_bytes, len),
            },
            unit="ms",
        )
        slower = ratios(samples["unimem"], samples["reading it to new huge pages"])
        bench.at_most(title, "unimem / reading it to new huge pages", slower, 3.0)
        bench.at_least(title, "ggml / unimem", ratios(samples["ggml"], samples["unimem"]), 5.0)

        title = "open, with all tokens and merges decoded"
        samples = bench.compare(
            title,
            {
                "unimem": timed(decode, lambda opened: opened[0].close()),
                "gguf-py": timed(decode_with_gguf_py, check),
            },
            unit="ms",
            rounds=3,  # gguf-py takes many seconds
            warmup=0,
        )
        quotients = ratios(samples["gguf-py"], samples["unimem"])
        bench.at_least(title, "gguf-py / unimem", quotients, 50.0)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
