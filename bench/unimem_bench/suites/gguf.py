"""Opening a GGUF file with a large vocabulary: unimem against ggml, gguf-py, and reading it.

The file has the header of a model with 150 thousand tokens, 280 thousand merges and 400 tensors,
and next to no data. It is in the page cache. Beside gguf-py, which takes seconds to decode it, a
quick run has a tenth of each.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import unimem as um
from unimem_bench import decoding, files
from unimem_bench.files import TensorEntry
from unimem_bench.llama_build import NoPeer
from unimem_bench.llama_cpp import Library
from unimem_bench.rounds import Side
from unimem_bench.suite import Measure, Suite, costs, faster

SUITE = Suite(
    "gguf", "How fast does a file with a large vocabulary open?", passes=3, quick_passes=3
)

N_TOKENS, N_MERGES, N_TENSORS = 150_000, 280_000, 400
STRINGS = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
BLOCK_VALUES, BLOCK_BYTES = 32, 34  # of q8_0
NEW_MEMORY = "reading it to new memory"


@SUITE.case(
    "open",
    "How fast does a header with 150 thousand tokens open, its strings not decoded?",
    unit="ms",
    targets=[faster("ggml", 5.0, issue=2), costs(NEW_MEMORY, 3.0, issue=6)],
)
def open_header(measure: Measure) -> None:
    """Compare with ggml, which decodes all strings, and with reading the bytes.

    They are read to new huge pages, since opening a file needs new memory, and to memory that is
    warm from the last reading.
    """
    path = vocabulary(measure, 1)
    peers = {}
    if (pair := of_ggml(measure, path)) is not None:
        peers["ggml"] = timed(*pair)
    ours = {"unimem": timed(lambda: um.open_weights(path), um.Weights.close)}
    limits = {
        NEW_MEMORY: timed(lambda: read_to_new_pages(path), mmap.mmap.close),
        "reading it to warm memory": timed(path.read_bytes, len),
    }
    measure.compare(ours, peers, limits, rounds=21, quick_rounds=6)


@SUITE.case(
    "open, strings decoded",
    "How fast does such a header open with all tokens and merges as Python strings?",
    unit="ms",
    targets=[faster("gguf-py", 50.0, issue=2)],
)
def decoded(measure: Measure) -> None:
    """Compare with gguf-py, which must find the same strings; it takes seconds."""
    path = vocabulary(measure, 10 if measure.quick else 1)

    def decode() -> tuple[um.Weights, list[Any]]:
        weights = um.open_weights(path)
        return weights, [weights.metadata[key] for key in STRINGS]

    weights, expected = decode()
    weights.close()

    def check(strings: list[Any]) -> None:
        if strings != expected:
            raise AssertionError("unimem and gguf-py read different strings")

    peers = {}
    if measure.installed("gguf", "gguf-py"):
        import gguf

        def decode_with_gguf_py() -> list[Any]:
            fields = gguf.GGUFReader(path).fields
            return [fields[key].contents() for key in STRINGS]

        peers["gguf-py"] = timed(decode_with_gguf_py, check)
    ours = {"unimem": timed(decode, lambda decoded: decoded[0].close())}
    limits = {NEW_MEMORY: timed(lambda: read_to_new_pages(path), mmap.mmap.close)}
    measure.compare(ours, peers, limits, rounds=1, quick_rounds=1, warmup=0)


def timed(open_it: Callable[[], Any], close_it: Callable[[Any], object]) -> Side:
    """Measure the milliseconds of opening, without closing."""

    def run() -> float:
        start = time.perf_counter()
        found = open_it()
        elapsed = time.perf_counter() - start
        close_it(found)
        return elapsed * 1e3

    return run


def of_ggml(
    measure: Measure, path: Path
) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Return functions that open a file with ``gguf_init_from_file``, and close it.

    ggml is that of llama.cpp; without it, None, and ``ggml`` is left out.
    """
    try:
        library = Library(decoding.llama_cpp(measure))
    except NoPeer as reason:
        measure.leave_out("ggml", str(reason))
        return None

    def open_it() -> Any:
        context = library.c.peer_gguf(str(path).encode())
        if not context:
            raise AssertionError(f"ggml does not open {path}")
        return context

    return open_it, library.c.gguf_free


def read_to_new_pages(path: Path) -> mmap.mmap:
    """Read a file to memory that is new to the process."""
    with open(path, "rb", buffering=0) as file:
        room = mmap.mmap(-1, path.stat().st_size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        room.madvise(mmap.MADV_HUGEPAGE)
        file.readinto(room)
    return room


def vocabulary(measure: Measure, part: int) -> Path:
    """Return a file with one `part`th of the strings, made if it is missing."""
    path = measure.folder / f"vocabulary-of-{N_TOKENS // part}.gguf"
    files.made_once(path, lambda unfinished: write_file(unfinished, part))
    measure.fact("tokens", N_TOKENS // part)
    measure.fact("bytes", path.stat().st_size)
    return path


def write_file(path: Path, part: int) -> None:
    """Write the header, and tensors of one block each."""
    n_tokens, n_merges = N_TOKENS // part, N_MERGES // part
    rng = np.random.default_rng(3)
    tokens = words(n_tokens, 22, 0)
    pairs = zip(words(n_merges, 16, 1), words(n_merges, 10, 2), strict=True)
    merges = [a + b" " + b for a, b in pairs]
    scores = rng.random(n_tokens, dtype=np.float32)
    kinds = np.ones(n_tokens, np.int32)
    metadata = [
        files.text("general.architecture", "llama"),
        files.array(
            "tokenizer.ggml.tokens", files.STRING, n_tokens, b"".join(map(files.string, tokens))
        ),
        files.array("tokenizer.ggml.scores", files.FLOAT32, n_tokens, scores.tobytes()),
        files.array("tokenizer.ggml.token_type", files.INT32, n_tokens, kinds.tobytes()),
        files.array(
            "tokenizer.ggml.merges", files.STRING, n_merges, b"".join(map(files.string, merges))
        ),
    ]
    tensors = [
        TensorEntry(f"blk.{i}.ffn_down.weight", (BLOCK_VALUES, 1), files.Q8_0, BLOCK_BYTES)
        for i in range(N_TENSORS // part)
    ]
    with open(path, "wb") as file:
        header = files.gguf_header(metadata, tensors)
        file.write(header)
        file.truncate(len(header) + len(tensors) * files.ALIGNMENT)


def words(n: int, longest: int, seed: int) -> list[bytes]:
    """Make words of 2 to `longest` random letters."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest + 1, n)
    letters = rng.integers(ord("a"), ord("z") + 1, int(lengths.sum()), dtype=np.uint8).tobytes()
    ends = np.cumsum(lengths)
    return [letters[end - n_letters : end] for n_letters, end in zip(lengths, ends, strict=True)]
