"""Small cgroups for tests, made below this process's one and removed afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.processes.forks import SANITIZED
from unimem.system.cgroups import cgroups_above

LIMIT_BYTES = 512 << 20

# The shell enters the cgroup before the interpreter starts, so that all its memory counts.
_ENTER = 'echo $$ > "$1/cgroup.procs" && exec "$2" -c "$3"'


@dataclass(frozen=True, slots=True)
class SmallCgroup:
    """A cgroup with a limit on memory: its name in `limits` ("cgroup /a/b"), and its folder."""

    name: str
    folder: Path

    def run(self, script: str) -> str:
        """Run a Python script in the cgroup and return its output; fail if it fails."""
        ended = subprocess.run(
            ["sh", "-c", _ENTER, "sh", str(self.folder), sys.executable, script],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        # The status is -9 after a kill by the kernel.
        assert ended.returncode == 0, f"status {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout


def _make(limit_bytes: int) -> tuple[SmallCgroup, Callable[[], None]]:
    own = f"unimem-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    refusal = "no memory controller is mounted"
    # Below this process's cgroup if that may have children with limits, else at the root of the
    # tree.
    places = list(cgroups_above("memory"))
    for above in [*places[:1], *places[-1:]]:
        folder = Path(above.folder) / own
        file = folder / ("memory.max" if above.version == 2 else "memory.limit_in_bytes")
        try:
            folder.mkdir()
            try:
                if above.version == 2 and not file.exists():
                    (Path(above.folder) / "cgroup.subtree_control").write_text("+memory")
                file.write_text(str(limit_bytes))
            except OSError:
                folder.rmdir()
                raise
        except OSError as error:
            refusal = str(error)
            continue
        return SmallCgroup(f"cgroup {above.name.rstrip('/')}/{own}", folder), folder.rmdir
    pytest.skip(f"a cgroup with a limit on memory cannot be made: {refusal}")


@contextmanager
def small_cgroup(limit_bytes: int = LIMIT_BYTES) -> Iterator[SmallCgroup]:
    """Make a cgroup with a limit on memory, and remove it at the end."""
    if SANITIZED:
        pytest.skip("AddressSanitizer's shadow memory has no room in a small cgroup")
    if os.geteuid() != 0:
        pytest.skip("making a cgroup needs root")
    cgroup, remove = _make(limit_bytes)
    try:
        yield cgroup
    finally:
        # The kernel may still hold the last process.
        end = time.monotonic() + 60
        while cgroup.folder.exists():
            with suppress(OSError):
                remove()
                break
            assert time.monotonic() < end, f"{cgroup.folder} is left behind"
            time.sleep(0.02)


@pytest.fixture
def cgroup_512mb() -> Iterator[SmallCgroup]:
    """Import this into a test module to use it: `cgroup_512mb.run(script)`."""
    with small_cgroup() as cgroup:
        yield cgroup


@pytest.fixture
def cgroup_1gb() -> Iterator[SmallCgroup]:
    """Import this into a test module to use it: `cgroup_1gb.run(script)`."""
    with small_cgroup(1 << 30) as cgroup:
        yield cgroup
