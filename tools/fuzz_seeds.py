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


def safetensors_files() -> Iterator[bytes]:
    """Files that are read, in full and cut, and those for each way to break a rule."""
    files = import_module("safetensors_files")
    yield from halved([files.everything(), files.everything(pad=3), files.write({})])
    yield from (case.raw for case in import_module("test_safetensors").RULES.values())


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
    sys.path.insert(0, str(TESTS))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for raw in FORMATS[arguments.format]():
        if len(raw) <= MAX_NBYTES:
            name = hashlib.sha1(raw, usedforsecurity=False).hexdigest()  # as libFuzzer names them
            (arguments.folder / f"{name}.{arguments.format}").write_bytes(raw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
