"""Memory of processes, and of files in the page cache, as the kernel counts it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

from unimem.base import kernel_files
from unimem_bench import plain

SAMPLE_S = 0.005  # between two samples; a start takes some hundred of them


def private_bytes(pid: int) -> int:
    """Count the memory of a process that is not file-backed; 0 if it has ended."""
    fields = kernel_files.read_fields(f"/proc/{pid}/status")
    names = ("RssAnon", "RssShmem", "HugetlbPages")
    return sum(kernel_files.parse_kib(fields.get(name)) for name in names)


def pss_bytes(pid: int) -> int:
    """Count the memory of a process, with its share of shared pages; KeyError if it has ended."""
    fields = kernel_files.read_fields(f"/proc/{pid}/smaps_rollup")
    return kernel_files.parse_kib(fields["Pss"])


class PeakMemory:
    """The peak memory of a process and some files, while a ``with`` lasts.

    A file counts with its pages in the page cache, mapped or not; private memory counts as
    resident. A thread samples both every 5 ms, from `watch` on, and calls `files` each time.
    `nbytes` is the peak so far.
    """

    def __init__(self, files: Callable[[], Iterable[Path]]) -> None:
        self.nbytes = 0
        self._files = files
        self._pid: int | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look_again)

    def watch(self, pid: int) -> None:
        """Set the process."""
        self._pid = pid

    def look(self) -> None:
        """Sample at once."""
        if self._pid is None:
            return
        nbytes = private_bytes(self._pid)
        for path in self._files():
            with suppress(OSError):  # it is gone, or empty
                nbytes += plain.cached_bytes(path)
        self.nbytes = max(self.nbytes, nbytes)

    def _look_again(self) -> None:
        while not self._ends.wait(SAMPLE_S):
            self.look()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ends.set()
        self._thread.join()
