"""llama.cpp's start, in a process that does nothing else: ``python -P llama_start.py MODEL``.

Writes the seconds, and ends when its standard input does; so one can look at it meanwhile. The
start is the call that loads a model: it reads the header and the vocabulary, and maps the file with
``MAP_POPULATE``, so that all weights are in the page tables when it returns. Weights are used as
they lie in the file (no repacking, which would copy them).
"""

from __future__ import annotations

import sys
import time

from cyllama.llama import llama_cpp

__all__: list[str] = []


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
