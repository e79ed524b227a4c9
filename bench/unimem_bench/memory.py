"""What a process, and files in the page cache, take of memory, by what the kernel says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from unimem.base import kernel_files
from unimem_bench import plain

__all__ = ["PeakMemory", "private_bytes", "pss_bytes"]

SAMPLE_S = 0.005  # between two looks: a start takes some hundred of these


def private_bytes(pid: int) -> int:
    """Count the memory of a process that is no file's; of one that has ended, none."""
    fields = kernel_files.read_fields(f"/proc/{pid}/status")
    names = ("RssAnon", "RssShmem", "HugetlbPages")
    return sum(kernel_files.parse_kib(fields.get(name)) for name in names)


def pss_bytes(pid: int) -> int:
    """Count the memory of a process, of what it shares with others its share.

    Raises
    ------
    KeyError
        It has ended.
    """
    fields = kernel_files.read_fields(f"/proc/{pid}/smaps_rollup")
    return kernel_files.parse_kib(fields["Pss"])


class PeakMemory:
    """The most that a process and some files have in memory, while a ``with`` lasts.

    A file counts with what of it is in the page cache, mapped or not, and private memory with what
    is there. A thread looks at both every 5 ms, from `watch` on.

    Parameters
    ----------
    files : callable
        Lists the files, anew at each look.

    Attributes
    ----------
    nbytes : int
        The most so far.
    """

    def __init__(self, files: Callable[[], Iterable[Path]]) -> None:
        self.nbytes = 0
        self._files = files
        self._pid: int | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look_again)

    def watch(self, pid: int) -> None:
        """Say which process it is."""
        self._pid = pid

    def look(self) -> None:
        """Look at once."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ends.set()
        self._thread.join()
