"""llama.cpp's start, in a process of its own: prints what `bench.load` asks for as one JSON line.

``python -m bench.load_llama MODEL``. The start is the call that loads a model: it reads the header
and the vocabulary, and maps the file with ``MAP_POPULATE``, so that all weights are in the page
tables when it returns; how much of the file that is, is counted afterwards. Weights are used as
they lie in the file (no repacking, which would copy them).
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
from pathlib import Path


def mapped_bytes(path: str) -> int:
    """Bytes of a file that are in this process's page tables."""
    info = os.stat(path)
    device = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}"
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()
        if re.fullmatch(r"[0-9a-f]+-[0-9a-f]+", head[0]):
            ours = head[3] == device and head[4] == str(info.st_ino)
        elif ours and head[0] in ("Rss:", "Shared_Hugetlb:", "Private_Hugetlb:"):
            found += int(head[1]) << 10
    return found


def main() -> None:
    from cyllama.llama import llama_cpp

    path = sys.argv[1]
    params = llama_cpp.LlamaModelParams()
    params.n_gpu_layers = 0
    params.use_extra_bufts = False
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    model = llama_cpp.LlamaModel(path, params)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    result = {"seconds": seconds, "cpu_s": cpu, "mapped_bytes": mapped_bytes(path)}
    print(json.dumps(result), flush=True)
    model.close()


if __name__ == "__main__":
    main()
