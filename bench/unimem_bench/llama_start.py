"""llama.cpp's start, in a process that does nothing else: ``python -P llama_start.py MODEL``.

It prints the seconds, and ends when its standard input does, so that a parent can inspect it. The
start is the call that loads a model: it reads the header and the vocabulary, and maps the file with
``MAP_POPULATE``. Weights are used as they lie in the file, without repacking.
"""

from __future__ import annotations

import sys
import time

from cyllama.llama import llama_cpp


def main() -> None:
    """Load the model that the command line names."""
    path = sys.argv[1]
    params = llama_cpp.LlamaModelParams()
    params.n_gpu_layers = 0
    params.use_extra_bufts = False
    start = time.perf_counter()
    model = llama_cpp.LlamaModel(path, params)
    seconds = time.perf_counter() - start
    sys.stdout.write(f"{seconds}\n")
    sys.stdout.flush()
    sys.stdin.read()
    model.close()


if __name__ == "__main__":
    main()
