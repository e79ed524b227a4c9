"""Writes what the tests attack the parsers with as inputs for the fuzzers: `make fuzz` runs it.

    python tools/fuzz_seeds.py gguf FOLDER

A file each; those of more than 4 KiB are left out, since small inputs are tried most often.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
MAX_NBYTES = 4096


def gguf_files() -> Iterator[bytes]:
    """Files that are read, in full and cut, and one for each way to break a rule."""
    valid = import_module("test_gguf_mutation").VALID
    yield from valid
    for whole in valid:
        yield whole[: len(whole) // 2]
    for _, _, (raw, _) in import_module("test_gguf").RULES:
        yield raw


FORMATS: dict[str, Callable[[], Iterator[bytes]]] = {"gguf": gguf_files}


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
