"""LMCache's memory and files, in a process: ``PYTHON lmcache_side.py FOLDER CHUNKS BYTES``.

`unimem_bench.suites.store` starts it by its path in an environment that has LMCache. It answers
each line of standard input, an action, with the milliseconds that all chunks took, or with an error
in quotes. ``put`` and ``get`` copy chunks to its allocator and back. ``write`` and ``read`` are its
adapter for a file system, which neither checks nor syncs.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class LMCacheSide:
    """Chunks in LMCache's allocator, and in files of its adapter for a file system."""

    def __init__(self, folder: str, n: int, nbytes: int) -> None:
        import torch
        from lmcache.v1.distributed.api import ObjectKey
        from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
        from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator

        self._folder, self._dtype = Path(folder), torch.uint8
        self._allocator: Any = MixedMemoryAllocator(n * (nbytes + (1 << 12)))
        self._engine = torch.randint(0, 256, (n, 1, 1, 1, nbytes), dtype=torch.uint8)
        self._copy = self._engine.clone()
        self._files: Any = FSL2Adapter(FSL2AdapterConfig(folder))
        self._keys = [ObjectKey(i.to_bytes(4, "little"), "model", 0) for i in range(n)]
        self._held: list[Any] = []

    def put(self) -> float:
        """Copy the engine's chunks."""
        for held in self._held:
            held.ref_count_down()
        self._held.clear()
        begin = time.perf_counter()
        for chunk in self._engine:
            held = self._allocator.allocate(chunk.shape, self._dtype)
            held.tensor.copy_(chunk)
            self._held.append(held)
        return time.perf_counter() - begin

    def get(self) -> float:
        """Copy them back."""
        self._engine.zero_()
        begin = time.perf_counter()
        for held, chunk in zip(self._held, self._engine, strict=True):
            chunk.copy_(held.tensor)
        elapsed = time.perf_counter() - begin
        self._check(self._engine)
        return elapsed

    def write(self) -> float:
        """Write all chunks that are held to files, one by one."""
        for path in self._folder.iterdir():
            path.unlink()
        os.sync()
        return self._each(self._files.submit_store_task, self._files.get_store_event_fd())

    def read(self) -> float:
        """Read them back."""
        for held in self._held:
            held.tensor.zero_()
        elapsed = self._each(self._files.submit_load_task, self._files.get_load_event_fd())
        for held, chunk in zip(self._held, self._copy, strict=True):
            self._check(held.tensor, chunk)
        return elapsed

    def _each(self, submit: Callable[..., int], fd: int) -> float:
        begin = time.perf_counter()
        for key, held in zip(self._keys, self._held, strict=True):
            submit([key], [held])
            select.select([fd], [], [])
            os.read(fd, 8)
        return time.perf_counter() - begin

    def _check(self, found: Any, expected: Any = None) -> None:
        if not bool((found == (self._copy if expected is None else expected)).all()):
            raise AssertionError("LMCache gives other bytes than it was given")


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library's own output must not mix with the answers
    side = LMCacheSide(sys.argv[1], *map(int, sys.argv[2:]))
    for line in sys.stdin:
        try:
            answer: Any = getattr(side, line.strip())() * 1e3
        except Exception as error:  # any: the answer names it
            answer = f"{type(error).__name__}: {error}"
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
