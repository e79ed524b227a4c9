"""The processes that read staged models: they have a file of it open, or mapped."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from typing import NamedTuple

from unimem.base.kernel_files import read_bytes
from unimem.system.process import read_process
from unimem.weights.staged import Held

_MAPPED = re.compile(rb" ([0-9a-f]+):([0-9a-f]+) ([1-9]\d*) ")

_File = tuple[int, int, int]
"""Major and minor number of the device, and inode: as the kernel writes them into maps."""


class Readers(NamedTuple):
    """The readers of a staged model.

    `pids` are the processes that this user may look at, but for the keeper and this one.
    `has_others` is whether hidden processes, of other users or containers, have mapped the model.
    """

    pids: tuple[int, ...]
    has_others: bool = False

    def __bool__(self) -> bool:
        return bool(self.pids) or self.has_others


def find_readers(found: Sequence[Held]) -> list[Readers]:
    """Find the readers of each of these models, in one look at all processes."""
    import psutil

    files = [set(_files(held)) for held in found]
    number_of = {file: number for number, each in enumerate(files) for file in each}
    names = {os.path.basename(path) for held in found for path in _names(held)}
    pids: list[list[int]] = [[] for _ in found]
    for pid in set(psutil.pids()) - {os.getpid()} if number_of else ():
        with suppress(OSError):  # it has ended, or is another user's
            read = {number_of[file] for file in _read_by(pid, names) if file in number_of}
            for number in read:
                if pid != found[number].pid:
                    pids[number].append(pid)
    return [
        Readers(tuple(sorted(each)), not each and _is_shared(held, its))
        for held, its, each in zip(found, files, pids, strict=True)
    ]


def _files(held: Held) -> Iterator[_File]:
    for path in held.paths:
        with suppress(OSError):
            yield _key(os.stat(path))


def _names(held: Held) -> Iterator[str]:
    """Yield the kernel's names of the files, as a descriptor's link has them."""
    for path in held.paths:
        with suppress(OSError):
            yield os.readlink(path)
        yield path


def _key(info: os.stat_result) -> _File:
    return os.major(info.st_dev), os.minor(info.st_dev), info.st_ino


def _read_by(pid: int, names: Set[str]) -> Iterator[_File]:
    """Yield the files that a process has mapped, and those of some names that it has open."""
    for major, minor, inode in _MAPPED.findall(read_bytes(f"/proc/{pid}/maps")):
        yield int(major, 16), int(minor, 16), int(inode)
    with os.scandir(f"/proc/{pid}/fd") as descriptors:
        for entry in descriptors:
            with suppress(OSError):
                # Others are not asked: the file system of one may never answer.
                if os.path.basename(os.readlink(entry.path)) in names:
                    yield _key(os.stat(entry.path))


def _is_shared(held: Held, files: Set[_File]) -> bool:
    """Whether a page of a model in ``/dev/shm`` is mapped by more processes than its keeper.

    The other kinds have paths that no process of another user or container can open.
    """
    if held.backing != "shm":
        return False
    with suppress(OSError):
        return any(
            (*area.device, area.inode) in files and area.pss_bytes < area.rss_bytes
            for area in read_process(held.pid).areas
        )
    return False
