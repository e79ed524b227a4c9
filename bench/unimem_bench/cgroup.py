"""A cgroup with a memory limit, for processes that are measured."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from unimem.system.cgroups import cgroups_above
from unimem_bench.suite import NotMeasured

_END_S = 60.0  # that the kernel has to remove the last process


@contextmanager
def limited_cgroup(nbytes: int) -> Iterator[Path]:
    """Make a cgroup with a limit of `nbytes`, yield its folder, and remove it at the end.

    NotMeasured if it cannot be made: that needs root, and a memory controller mounted for writing.
    """
    why = "no memory controller is mounted"
    places = list(cgroups_above("memory"))
    # Below our own cgroup if it may have children with limits, else at the root of the tree.
    for above in [*places[:1], *places[-1:]]:
        folder = Path(above.folder) / f"unimem-bench-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        limit = folder / ("memory.max" if above.version == 2 else "memory.limit_in_bytes")
        try:
            folder.mkdir()
        except OSError as error:
            why = str(error)
            continue
        try:
            if above.version == 2 and not limit.exists():
                (Path(above.folder) / "cgroup.subtree_control").write_text("+memory")
            limit.write_text(str(nbytes))
        except OSError as error:
            why = str(error)
            folder.rmdir()
            continue
        try:
            yield folder
        finally:
            _remove(folder)
        return
    raise NotMeasured(f"wants a cgroup with a limit on memory, which needs root: {why}")


def _remove(folder: Path) -> None:
    end = time.monotonic() + _END_S
    while folder.exists() and time.monotonic() < end:
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.02)


def entering(folder: Path, command: Sequence[str]) -> list[str]:
    """Return a command that runs another one in a cgroup, which counts all its memory."""
    enter = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'
    return ["sh", "-c", enter, "sh", str(folder), *command]
