"""Writes what the tests attack the parsers with as inputs for the fuzzers: `make fuzz` runs it.

    python tools/fuzz_seeds.py {gguf,safetensors} FOLDER

A file each; those of more than 4 KiB are left out, since small inputs are tried most often.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
MAX_NBYTES = 4096


def halved(whole: Iterable[bytes]) -> Iterator[bytes]:
    """Files that are read, and the first half of each."""
    for raw in whole:
        yield raw
        yield raw[: len(raw) // 2]


def gguf_files() -> Iterator[bytes]:
    """Files that are read, in full and cut, and those for each way to break a rule."""
    yield from halved(import_module("test_gguf_mutation").VALID)
    yield from (raw for _, _, (raw, _) in import_module("test_gguf").RULES)
    # What the least slip in a bound would let pass.
    gf = import_module("gguf_files")
    i8, iq1_s = 24, 19
    for kind, ne, nbytes in (
        (i8, (256,), 255),
        (iq1_s, (2**63,), 256),
        (gf.F32, (1,) * 5, 256),
    ):
        yield gf.with_data(gf.head(1, 0), gf.tensor("t", ne, kind, 0), nbytes=nbytes)[0]
    for key in (b"\xc0\x80", b"\xe0\x80\x80", b"\xf0\x80\x80\x80", b"\xf4\x90\x80\x80", b"a\xc3"):
        yield gf.join(gf.head(0, 1), gf.kv(key, gf.UINT8, b"\0"))[0]
        yield gf.join(gf.head(0, 1), gf.string(key))[0]


def safetensors_files() -> Iterator[bytes]:
    """Files that are read, in full and cut, and those for each way to break a rule."""
    files = import_module("safetensors_files")
    yield from halved([files.everything(), files.everything(pad=3), files.write({})])
    yield from (case.raw for case in import_module("test_safetensors").RULES.values())
    # What the least slip in a bound would let pass.
    for dtype, dim in (("F4", 1), ("F6_E2M3", 1), ("F6_E3M2", 3)):
        yield files.write({"t": (dtype, (dim,))})
    for text in (r"\udc00\udc00", r"\ud800\ud800", r"\udbff\udfff", r"\ue000", "\x7f"):
        yield files.file(f'{{"__metadata__":{{"{text}":"{text}"}}}}')
    for raw in (
        rb"\u123",
        rb"\ud83d\ude0",
        rb"\ud83d\u",
        rb"\ud83d",
        b"\\",
        b"\xc3",
        b"\xf0\x9f\x98",
    ):
        yield files.file(b'{"' + raw)


FORMATS: dict[str, Callable[[], Iterator[bytes]]] = {
    "gguf": gguf_files,
    "safetensors": safetensors_files,
}


def main() -> int:
    """Write the files, named after what they hold."""
    parser = argparse.ArgumentParser(description="Write the tests' files as inputs for a fuzzer.")
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    sys.path[:0] = [str(TESTS / "support"), str(TESTS / "_core")]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for raw in FORMATS[arguments.format]():
        if len(raw) <= MAX_NBYTES:
            name = hashlib.sha1(raw, usedforsecurity=False).hexdigest()  # as libFuzzer names them
            (arguments.folder / f"{name}.{arguments.format}").write_bytes(raw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
