"""llama.cpp's start, in a process that does nothing else: ``python -m unimem_bench.llama_start``.

The arguments are the library and the model. It prints the seconds, and ends when its standard input
does, so that a parent can inspect it. The start is the call that loads a model: it reads the header
and the vocabulary, and maps the file with ``MAP_POPULATE``. Weights are used as they lie in the
file, without repacking.
"""

from __future__ import annotations

import sys
import time

from unimem_bench.llama_cpp import Flags, Library, PeerModel, options


def main() -> None:
    """Load the model that the command line names."""
    library, path = sys.argv[1:]
    loaded = Library(library)
    start = time.perf_counter()
    model = PeerModel(loaded, path, options(Flags(repack=False, load_mode="mmap")))
    seconds = time.perf_counter() - start
    sys.stdout.write(f"{seconds}\n")
    sys.stdout.flush()
    sys.stdin.read()
    model.close()


if __name__ == "__main__":
    main()
