"""llama.cpp's start, in a process of its own: ``python -m unimem.bench.llama_start MODEL``.

Writes a line of JSON. The start is the call that loads a model: it reads the header and the
vocabulary, and maps the file with ``MAP_POPULATE``, so that all weights are in the page tables when
it returns; how much of the file that is, is counted afterwards. Weights are used as they lie in the
file (no repacking, which would copy them).
"""

from __future__ import annotations

import json
import os
import sys
import time

from unimem.process import read_process

__all__ = ["mapped_bytes"]


def mapped_bytes(path: str) -> int:
    """Count the bytes of a file that are in this process's page tables."""
    info = os.stat(path)
    file = (os.major(info.st_dev), os.minor(info.st_dev)), info.st_ino
    areas = read_process().areas
    return sum(area.resident_bytes for area in areas if (area.device, area.inode) == file)


def main() -> None:
    """Load the model that the command line names."""
    from cyllama.llama import llama_cpp

    path = sys.argv[1]
    params = llama_cpp.LlamaModelParams()
    params.n_gpu_layers = 0
    params.use_extra_bufts = False
    start = time.perf_counter()
    model = llama_cpp.LlamaModel(path, params)
    seconds = time.perf_counter() - start
    answer = {"seconds": seconds, "mapped_bytes": mapped_bytes(path)}
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()
    model.close()


if __name__ == "__main__":
    main()
