"""The most memory of each test, for ``pytest --peaks FILE``.

A line of FILE is a test that took more than `NOTED_MIB`: its name, the most MiB of its process, and
how many of these came with the test. A child counts if it is larger than all before it, and than
this process, whose size the kernel counts as that of a child that it starts.
"""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOTED_MIB = 250


def _mib(field: str) -> int:
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) >> 10


def _of_children() -> int:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10


@contextmanager
def noted(test: str, file: Path) -> Iterator[None]:
    """Append a line for a test that runs in the ``with``."""
    Path("/proc/self/clear_refs").write_text("5")  # the most so far becomes what there is
    before, child = _mib("VmRSS"), _of_children()
    yield
    peak, larger = _mib("VmHWM"), _of_children()
    taken = max(peak - before, larger if larger > max(child, peak) else 0)
    if taken > NOTED_MIB:
        with file.open("a") as out:
            out.write(json.dumps([test, max(peak, taken), taken]) + "\n")
