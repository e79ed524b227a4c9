"""Staging: a model once in shared memory, which any process opens by path."""

from __future__ import annotations

import errno
import mmap
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import numpy as np

from unimem._core import tmpfs
from unimem._core.block import Block
from unimem._core.load import load as read_parts
from unimem._core.safetensors import SafetensorsHeader
from unimem.errors import CapacityError, ClosedError, PlacementError
from unimem.system import limits, policy
from unimem.system.arguments import check_callable, file_path, one_of
from unimem.system.placement import Lock, Pages, Placement, PlacementOptions, sum_placements
from unimem.system.process import read_process
from unimem.system.text import format_bytes
from unimem.weights import loading
from unimem.weights.files import ModelFile, ModelFiles, Version, open_model, version_of
from unimem.weights.loading import Progress
from unimem.weights.staging.places import (
    ACCESS_MODE,
    BACKINGS,
    Backing,
    Folder,
    Memfd,
    Mount,
    Place,
    proc_folder,
    sweep,
)

__all__ = ["Stage", "stage"]

# What lets programs have huge pages that map a file wherever the kernel says.
_ALLOW: dict[Backing, str] = {
    "memfd": "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    "shm": f"mount -o remount,huge=advise {limits.SHM}",
}


class Stage:
    """A model in shared memory, sealed; made by `stage`, and there until it is closed.

    Any number of threads may read its attributes; closing is for one. A forked child has a copy of
    the descriptor: the paths stay its parent's and go with that, and the memory goes when both have
    closed. Other processes that have the model open or mapped keep what they have.

    Attributes
    ----------
    path : str
        What to open instead of the model that was staged: the file, the first part, or the index.
    paths : tuple of str
        All files, in the model's order; an index comes last.
    source : str
        What was staged.
    backing : {"tmpfs", "hugetlb", "memfd", "shm"}
        What kind of shared memory it lies in.
    reason : str
        Why it is of that kind.
    nbytes : int
        Bytes of the files.
    granted : Placement
        What a process gets that maps the files at a multiple of the huge page, as `open_weights`
        does; the kernel was asked. Of tmpfs and hugetlb all others get the same. Of memfd and shm
        they get base pages, unless ``shmem_enabled`` or the mount of ``/dev/shm`` allow more.
    """

    def __init__(
        self,
        place: Place,
        backing: Backing,
        reason: str,
        source: str,
        names: Sequence[str],
        first: str,
        versions: Sequence[tuple[str, Version]],
        nbytes: int,
        granted: Placement,
        blocks: Sequence[Block],
    ) -> None:
        self._place = place
        self._names = tuple(names)
        self._first = first
        self._versions = tuple(versions)
        # Mapped, so that reports and the kernel count it as this process's.
        self._blocks = tuple(blocks)
        self._proc = proc_folder()
        self.backing = backing
        self.reason = reason
        self.source = source
        self.nbytes = nbytes
        self.granted = granted
        # When it is closed, collected, or at the end of the process.
        self._end = weakref.finalize(self, place.close)

    def _opened(self) -> Place:
        if not self._end.alive:
            raise ClosedError(f"Stage of '{self.source}' is closed")
        return self._place

    @property
    def path(self) -> str:
        """What to open instead of what was staged; of this process's user, and root's."""
        return self.paths[self._names.index(self._first)]

    @property
    def paths(self) -> tuple[str, ...]:
        """All files, in the model's order; an index comes last."""
        paths = map(self._opened().path, self._names)
        return tuple(os.path.join(self._proc, path) for path in paths)

    @property
    def fd(self) -> int:
        """The descriptor that keeps it, which stays the stage's: of the folder or of the file."""
        return self._opened().fd

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._end.alive

    def close(self) -> None:
        """Give it up: the paths are gone, the memory goes with its last user. Twice is no error."""
        for block in self._blocks:
            block.close()
        self._end()

    def __enter__(self) -> Self:
        self._opened()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self.closed:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a Stage cannot be pickled: pass its path, and open that there")

    def __repr__(self) -> str:
        if self.closed:
            return f"Stage('{self.source}', closed)"
        return (
            f"Stage('{self.source}', {self.backing}, {format_bytes(self.nbytes)}, {self.granted}; "
            f"{self.reason})"
        )


def stage(
    path: str | os.PathLike[str],
    *,
    backing: Backing | Literal["auto"] = "auto",
    progress: Progress | None = None,
    **placement: Unpack[PlacementOptions],
) -> Stage:
    """Read a model into shared memory that any process of the user can open by path.

    All files of the model are read and checked first as `open_weights` does. The copies are sealed:
    nobody can write to them any more.

    Parameters
    ----------
    path : path-like
        A GGUF or safetensors file, a part of a split model, or the index of several files.
    backing : {"auto", "tmpfs", "hugetlb", "memfd", "shm"}
        The kind of shared memory. ``"tmpfs"``: a file system of its own that is mounted nowhere,
        with huge pages. ``"hugetlb"``: pages from a pool, for one GGUF file. ``"memfd"``: for one
        file. ``"shm"``: files in ``/dev/shm``. ``"auto"`` takes the first of these that can be had.
    progress : callable, optional
        Called as ``progress(done_bytes, total_bytes)`` in this thread. What it raises ends the
        staging, and nothing is left.
    **placement
        See `PlacementOptions`; `warm` changes nothing, since all of it is in RAM. With `lock` it is
        locked for as long as this process has it.

    Returns
    -------
    Stage

    Raises
    ------
    GGUFError, SafetensorsError
        The model is refused; nothing was staged.
    CapacityError
        There is no room, in a limit that is named; nothing was taken.
    OSError
        A file cannot be read, or was written to or replaced meanwhile.
    PlacementError
        The backing that was asked for cannot be had; with `strict`, when not all of the placement
        was granted. Without, one `PlacementWarning`.
    ValueError
        An unknown option, or a backing that cannot hold this model.

    Examples
    --------
    >>> import unimem as um
    >>> model = os.path.dirname(um.__file__) + "/engine/models/tiny.gguf"
    >>> with um.stage(model) as st, um.open_weights(st.path) as w:
    ...     len(w.tensors) > 0
    True
    """
    one_of(backing, "backing", ("auto", *BACKINGS))
    check_callable(progress)
    policy.check_options(placement)
    options = _StageOptions(**placement)
    proc_folder()  # without it, nobody could open what would be read in
    sweep()
    with open_model(path) as model:
        return _Staging(model, file_path(path), backing, options, progress).run()


@dataclass(frozen=True)
class _StageOptions:
    """`PlacementOptions`, with their defaults."""

    pages: Pages = "auto"
    numa: str | None = None
    lock: Lock = False
    warm: bool | int = True
    strict: bool = False


class _Staging:
    """One call of `stage`: whatever it raises, nothing is left."""

    def __init__(
        self,
        model: ModelFiles,
        source: str,
        backing: Backing | Literal["auto"],
        options: _StageOptions,
        progress: Progress | None,
    ) -> None:
        self.model = model
        self.source = source
        self.asked = backing
        self.options = options
        self.pages = options.pages
        self.progress = progress
        self.nbytes = sum(file.nbytes for file in model.files)
        # What is not in the page cache need not come there on its way.
        self.direct = loading.cached_bytes(model) < loading.MOSTLY * self.nbytes
        self.names = [os.path.basename(file.path) for file in model.files]
        self.versions = [(file.path, file.version) for file in model.files]
        if model.index is not None:
            self.names.append(os.path.basename(model.index))
            self.versions.append((model.index, version_of(os.stat(model.index))))

    def run(self) -> Stage:
        refusals: list[str] = []
        no_room: CapacityError | None = None
        for backing in self._candidates():
            refusal = self._refusal(backing)
            if refusal is None:
                try:
                    place = self._make(backing)
                except PlacementError as error:
                    if self.asked != "auto":
                        raise
                    refusal = error.strerror or str(error)
                except CapacityError as error:
                    if self.asked != "auto":
                        raise
                    # A pool may have what is not left of other memory.
                    no_room = no_room or error
                    refusal = str(error)
                else:
                    return self._fill(place, backing, "; ".join(refusals))
            elif self.asked != "auto":
                raise ValueError(f"backing='{backing}': {refusal}")
            refusals.append(f"not {backing}: {refusal}")
        if no_room is not None:
            raise no_room
        raise PlacementError(f"staging {self.source}: {'; '.join(refusals)}")

    def _candidates(self) -> Sequence[Backing]:
        """Return what to try, in this order.

        Where no pool can hold the hugetlb pages that were asked for, they are given up.
        """
        if self.asked != "auto":
            return (self.asked,)
        if self.pages not in policy.HUGETLB:
            return BACKINGS
        why = self._refusal("hugetlb") or self._pool_shortfall(self.pages)
        if why is None:
            return ("hugetlb",)
        text = f"staging {self.source}: {why}"
        if self.options.strict:
            raise PlacementError(text)
        policy.warn(text)
        self.pages = "thp"
        return BACKINGS

    def _refusal(self, backing: Backing) -> str | None:
        """Say why this model cannot lie there as it is asked to; None where it can."""
        if backing in ("hugetlb", "memfd") and len(self.names) > 1:
            return "several files need names side by side, which only tmpfs and shm give"
        if backing != "hugetlb":
            if self.pages in policy.HUGETLB:
                return f"pages='{self.pages}' come from a pool: backing='hugetlb'"
        elif self.pages in ("4k", "thp"):
            return f"pages='{self.pages}' come from no pool"
        elif isinstance(self.model.files[0].header, SafetensorsHeader):
            return "a safetensors file ends exactly, and a file of hugetlb pages with a whole page"
        return None

    def _pool_shortfall(self, pages: str) -> str | None:
        return policy.pool_shortfall(
            pages, self.nbytes, limits, policy.parse_numa(self.options.numa)
        )

    def _make(self, backing: Backing) -> Place:
        """Make an empty place, once there is room for the model."""
        if backing == "hugetlb":
            if self.pages == "auto":
                self.pages = "2m"
            shortfall = self._pool_shortfall(self.pages)
            if shortfall is not None:
                self.pages = self.options.pages
                raise PlacementError(shortfall)
            return Memfd(self.pages)
        what = f"staging {self.source}"
        limits.require(self.nbytes, what)
        if backing == "memfd":
            return Memfd()
        if backing == "shm":
            if not os.path.isdir(limits.SHM):
                raise PlacementError(errno.ENOENT, f"there is no {limits.SHM}")
            limits.require_shm(self.nbytes, what)
            return Folder()
        # While a file is read in, it ends with a whole huge page.
        page = max(tmpfs.huge_page_bytes(), 1 << 16)
        size = sum(-(-version[2] // page) * page for _, version in self.versions)
        return Mount(size, huge=self.pages != "4k" and tmpfs.huge_page_bytes() > 0)

    def _fill(self, place: Place, backing: Backing, reason: str) -> Stage:
        with ExitStack() as undo:
            undo.callback(place.close)
            done = 0
            for name, file, fd in zip(self.names, self.model.files, self.model.fds, strict=False):
                self._copy(place, backing, name, file, fd, done)
                done += file.nbytes
            if self.model.index is not None:
                _copy_index(place, self.names[-1], self.model.index)
            self._check_versions()
            place.seal()
            granted, blocks = self._look(place, backing, undo)
            stage = Stage(
                place,
                backing,
                reason or ("it was asked for" if self.asked != "auto" else "the first choice"),
                self.source,
                self.names,
                self.names[0 if self.model.index is None else -1],
                self.versions,
                self.nbytes,
                granted,
                blocks,
            )
            undo.pop_all()
        return stage

    def _check_versions(self) -> None:
        self.model.check_versions()
        if self.model.index is not None and self.versions[-1][1] != version_of(
            os.stat(self.model.index)
        ):
            raise OSError(
                errno.ESTALE, "The index was replaced or written to meanwhile", self.model.index
            )

    def _copy(
        self, place: Place, backing: Backing, name: str, file: ModelFile, source: int, done: int
    ) -> None:
        """Read one file into the place, through a block that puts it where it shall be."""
        target = place.create(name)
        try:
            with Block._filled(
                file.nbytes,
                self._reading(file, source, done),
                fd=target,
                pages=self.pages,
                numa=self.options.numa,
                lock=self.options.lock,
                strict=self.options.strict,
                name=f"{backing}:{file.path}",
                category="staging",
            ):
                pass
            if backing != "hugetlb":
                os.ftruncate(target, file.nbytes)
            os.fchmod(target, ACCESS_MODE)
        finally:
            os.close(target)

    def _reading(self, file: ModelFile, source: int, done: int) -> Callable[[Block], None]:
        def progress(n: int, _: int) -> None:
            # The end of a file is not the end of all.
            if self.progress is not None and (n < file.nbytes or done + n == self.nbytes):
                self.progress(done + n, self.nbytes)

        def fill(block: Block) -> None:
            # What is behind the end, in its last page, is there as well until it is cut off.
            end = -(-file.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            if end < block.nbytes:
                block._warm_range(end, block.nbytes - end)
            parts = [(source, 0, block, 0, file.nbytes, file.path)]
            if self.direct:
                try:
                    return loading.read_direct(parts, progress=progress)
                except loading.NoDirectReadsError:
                    self.direct = False
            read_parts(parts, progress=progress)

        return fill

    def _look(
        self, place: Place, backing: Backing, undo: ExitStack
    ) -> tuple[Placement, list[Block]]:
        """Map the files as others will, and ask the kernel what that gives."""
        placements: list[Placement] = []
        blocks: list[Block] = []
        for name in self.names[: len(self.model.files)]:
            fd = place.open(name)
            try:
                block = undo.enter_context(Block.attach(fd, name=name, category="staging"))
            finally:
                os.close(fd)
            block.warm()
            if self.options.lock:
                # Where it cannot be, that was told when the file was read in.
                with suppress(PlacementError):
                    block._lock(self.options.lock)
            placements.append(block.verify())
            blocks.append(block)
        if self.pages == "thp":
            self._require_huge_pages(place, backing)
        return sum_placements(placements), blocks

    def _require_huge_pages(self, place: Place, backing: Backing) -> None:
        """Tell, or raise, when programs that just map the files do not get huge pages."""
        page = tmpfs.huge_page_bytes()
        found = whole = 0
        for name, file in zip(self.names, self.model.files, strict=False):
            whole += file.nbytes // page * page if page else 0
            fd = place.open(name)
            try:
                found += _huge_bytes(fd, file.nbytes)
            finally:
                os.close(fd)
        if found == whole:
            return
        allow = f"'{_ALLOW[backing]}' allows them, and " if backing in _ALLOW else ""
        text = (
            f"staging {self.source}: pages='thp': a program that maps it gets "
            f"{format_bytes(found)} of {format_bytes(whole)} in huge pages: as root, {allow}"
            "'echo 1 > /proc/sys/vm/compact_memory' joins free memory"
        )
        if self.options.strict:
            raise PlacementError(text)
        policy.warn(text)


def _huge_bytes(fd: int, nbytes: int) -> int:
    """Map a file as any program does, wherever the kernel says, and count what is in huge pages."""
    with mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        view[:: mmap.PAGESIZE].sum()
        start = view.ctypes.data
        del view
        return sum(area.huge_bytes for area in read_process().areas if area.start == start)


def _copy_index(place: Place, name: str, path: str) -> None:
    with open(path, "rb") as source, open(place.create(name), "wb") as target:
        os.fchmod(target.fileno(), ACCESS_MODE)
        target.write(source.read())
