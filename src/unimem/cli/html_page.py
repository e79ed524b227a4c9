"""`unimem report --html`: a process as a page in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version

import numpy as np

from unimem.accounting.report_page import report_page
from unimem.accounting.samples import MemoryGrowth, Sample
from unimem.base.atomic_file import NewFile, write_text


def write_page(path: str, sample: Sample) -> None:
    """Write the page of a sample, whole or not at all; OSError leaves the old file."""
    write_text(path, _page(sample, MemoryGrowth()))


@contextmanager
def page_at_end(
    path: str, seen: Callable[[], tuple[Sample | None, MemoryGrowth]]
) -> Iterator[None]:
    """Write a page at the end of a watch, however it ends; check the path before it begins.

    `seen` returns the last sample, or None, and the growth of memory.

    Raises
    ------
    OSError
        It cannot be written. The old file is unchanged.
    """
    with NewFile(path) as file:
        try:
            yield
        finally:
            sample, growth = seen()
            if sample is not None:
                file.write(np.frombuffer(_page(sample, growth).encode(), np.uint8), 0)
                file.publish()


def _page(sample: Sample, growth: MemoryGrowth) -> str:
    return report_page(sample, growth.points, f"Read by unimem {version('unimem-llm')}.")
