"""Small cgroups for tests, made below this process's one and removed afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from support.processes.forks import SANITIZED
from unimem.base.threads import wait_until
from unimem.system.cgroups import cgroups_above
from unimem_bench.cgroup import entering, limited_cgroup
from unimem_bench.suite import NotMeasured

LIMIT_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class SmallCgroup:
    """A cgroup with a limit: its name in `limits` ("cgroup /a/b"), and its folder."""

    name: str
    folder: Path
    kind: str = ""

    def entering(self, command: list[str]) -> list[str]:
        """Return a command that runs another one in the cgroup."""
        return entering(self.folder, command)

    def run(self, script: str) -> str:
        """Run a Python script in the cgroup and return its output; fail if it fails."""
        ended = subprocess.run(
            self.entering([sys.executable, "-c", script]),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        # The status is -9 after a kill by the kernel.
        assert ended.returncode == 0, f"status {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout


@contextmanager
def small_cgroup(limit_bytes: int = LIMIT_BYTES) -> Iterator[SmallCgroup]:
    """Make a cgroup with a limit on memory, and remove it at the end."""
    if SANITIZED:
        pytest.skip("AddressSanitizer's shadow memory has no room in a small cgroup")
    if os.geteuid() != 0:
        pytest.skip("making a cgroup needs root")
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(limited_cgroup(limit_bytes))
        except NotMeasured as reason:
            pytest.skip(str(reason))
        (above,) = (each for each in cgroups_above("memory") if Path(each.folder) == folder.parent)
        yield SmallCgroup(f"cgroup {above.name.rstrip('/')}/{folder.name}", folder)
    assert not folder.exists(), f"{folder} is left behind"


@contextmanager
def hugetlb_cgroup(limit_bytes: int, kind: str = "") -> Iterator[SmallCgroup]:
    """Make a cgroup with a limit on pages of 2 MiB in use, or, with "rsvd.", on promised ones."""
    for above in reversed(list(cgroups_above("hugetlb"))):
        folder = Path(above.folder) / f"unimem-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        file = "max" if above.version == 2 else "limit_in_bytes"
        try:
            if above.version == 2:
                (Path(above.folder) / "cgroup.subtree_control").write_text("+hugetlb")
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / f"hugetlb.2MB.{kind}{file}").write_text(str(limit_bytes))
            yield SmallCgroup(
                f"hugetlb cgroup {above.name.rstrip('/')}/{folder.name}", folder, kind
            )
        finally:
            wait_until(partial(_is_empty, folder))
            folder.rmdir()
        return
    pytest.skip("making a cgroup with a limit on hugetlb pages needs root and the controller")


def _is_empty(folder: Path) -> bool:
    # The kernel removes a process a moment after it has ended.
    return not (folder / "cgroup.procs").read_text()


@pytest.fixture
def cgroup_512mb() -> Iterator[SmallCgroup]:
    """Make a cgroup to run scripts in: `cgroup_512mb.run(script)`."""
    with small_cgroup() as cgroup:
        yield cgroup


@pytest.fixture
def cgroup_1gb() -> Iterator[SmallCgroup]:
    """Make one of a GiB."""
    with small_cgroup(1 << 30) as cgroup:
        yield cgroup
