"""The cgroups above a process, of version 1 and 2: their folders and their limits."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from unimem.base import kernel_files

_NO_LIMIT = 1 << 60  # version 1 writes "none" as a number near 2**63


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A cgroup: the folder of its files, its path in the tree, and the tree's version.

    The versions name the same files differently.
    """

    folder: str
    name: str
    version: Literal[1, 2]

    def unlimit(self, path: str) -> str:
        """Return the command that removes the limit of a file."""
        return f"echo max > {path}" if self.version == 2 else f"echo -1 > {path}  # -1: no limit"

    def path(self, v1: str, v2: str) -> str:
        """Return the path of a file by its names in the two versions."""
        return f"{self.folder}/{v2 if self.version == 2 else v1}"

    def read_limit(self, v1: str, *v2: str) -> tuple[int, str] | None:
        """Return the least limit that some files set, and the path of its file, or None."""
        names = v2 if self.version == 2 else (v1,)
        paths = [f"{self.folder}/{name}" for name in names]
        found = [(n, path) for path in paths if (n := kernel_files.read_number(path)) is not None]
        return min((each for each in found if each[0] < _NO_LIMIT), default=None)


def cgroups_above(
    controller: str, pid: int | None = None, folder: str | None = None
) -> Iterator[Cgroup]:
    """Walk up the cgroups above a process, its own first.

    The controller is such as "memory", or "" for version 2 only; the process is this one, another
    one, or one in the cgroup of a folder (ValueError as `locate`).
    """
    if folder is not None:
        version, path = locate(folder)
        mount = _mounts().get("" if version == 2 else controller)
        if mount is not None:
            yield from _walk_up(*mount, [part for part in path.split("/") if part], version)
        return
    for line in (kernel_files.read_text(f"/proc/{pid or 'self'}/cgroup") or "").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        mount = _mounts().get(controller if names else "")
        if mount is None:
            continue
        where, root = mount
        # A container may see only a part of the tree, from `root` on. Its path may also be the
        # host's, or lead out of its namespace.
        inside = root in ("/", path) or path.startswith(f"{root}/")
        above = "" if root == "/" or not inside else root
        parts = [part for part in path[len(above) :].split("/") if part]
        yield from _walk_up(where, above, [] if ".." in parts else parts, 1 if names else 2)


def sees_all_above(controller: str) -> bool:
    """Whether no limit above this process is hidden from it, as that of a container's host is."""
    version, mount = 1, _mounts().get(controller)
    if mount is None:
        version, mount = 2, _mounts().get("")
    if mount is None or mount[1] != "/":
        return False
    # In a namespace of cgroups, "/" is its own; the root of version 2 alone has no type.
    return version == 1 or kernel_files.read_text(f"{mount[0]}/cgroup.type") is None


def _walk_up(mount: str, root: str, parts: list[str], version: Literal[1, 2]) -> Iterator[Cgroup]:
    above = "" if root == "/" else root
    for depth in range(len(parts), -1, -1):
        below = "".join(f"/{part}" for part in parts[:depth])
        yield Cgroup(mount + below, above + below or "/", version)


def locate(folder: str) -> tuple[Literal[1, 2], str]:
    """Return the version of a cgroup's tree, and the path below the tree's mount point.

    In version 1, the folder is in the tree of any controller. ValueError is raised if it does not
    exist, or is in no mounted tree.
    """
    real = os.path.realpath(folder)
    inside = [
        (len(mount), controller, real[len(mount) :])
        for controller, (mount, _) in _mounts().items()
        if real == mount or real.startswith(f"{mount}/")
    ]
    if not inside or not kernel_files.is_folder(real):
        trees = ", ".join(sorted({mount for mount, _ in _mounts().values()})) or "none"
        raise ValueError(
            f"expected the folder of a cgroup (trees are mounted at: {trees}), got {folder!r}"
        )
    _, controller, path = max(inside)
    return 1 if controller else 2, path


@cache
def _mounts() -> dict[str, tuple[str, str]]:
    """Return the mount point of each controller's tree and its mounted part; "" is version 2.

    Read once: the trees are mounted when the system or the container starts.
    """
    found: dict[str, tuple[str, str]] = {}
    for line in (kernel_files.read_text("/proc/self/mountinfo") or "").splitlines():
        mount, _, kind = line.partition(" - ")
        kinds = kind.split()
        if not kinds or kinds[0] not in ("cgroup", "cgroup2"):
            continue
        root, folder = (
            re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), part)
            for part in mount.split()[3:5]
        )
        for controller in kinds[2].split(",") if kinds[0] == "cgroup" else ("",):
            # The mount that shows most of a tree counts.
            if controller not in found or len(root) < len(found[controller][1]):
                found[controller] = folder, root
    return found
