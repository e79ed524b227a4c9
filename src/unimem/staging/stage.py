"""Staging: a model once in shared memory, which any process opens by path."""

from __future__ import annotations

import errno
import mmap
import os
import traceback
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import numpy as np

from unimem._core import tmpfs
from unimem._core.block import Block
from unimem._core.load import load as read_parts
from unimem.base.arguments import check_callable, file_path, flag, one_of
from unimem.base.descriptors import Descriptors
from unimem.base.text import format_bytes
from unimem.errors import CapacityError, ClosedError, FormatError, PlacementError
from unimem.remote.client import is_url, shown
from unimem.staging.backings import (
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
from unimem.staging.each_node import stage_copies
from unimem.staging.keeper import show
from unimem.staging.unfinished import Unfinished
from unimem.system import limits, policy
from unimem.system.placement import Lock, Pages, Placement, PlacementOptions, sum_placements
from unimem.system.process import read_process
from unimem.weights import loading
from unimem.weights.files import ModelFile, ModelFiles, Version
from unimem.weights.loading import Progress
from unimem.weights.node_copies import is_mirrored, without_lone_mirror
from unimem.weights.opened import Weights, open_weights
from unimem.weights.remote_files import RemoteFiles, open_files
from unimem.weights.repack.arrangement import arrange
from unimem.weights.repack.image import IMAGE_NAME, pack_image
from unimem.weights.repack.image_cache import choose_cache
from unimem.weights.repack.image_format import image_bytes
from unimem.weights.repack.image_identity import identify
from unimem.weights.repack.repack import repack_into, why_nothing
from unimem.weights.safetensors import SafetensorsHeader

__all__ = ["Stage", "stage", "stage_files"]

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
        All files, in the model's order; an index comes last. Of a repacked model, the image.
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
    copies : dict of int to Stage
        Of a model that was staged with ``numa="mirror"``, the stage on each node, of which this is
        the first; else empty. Closing this one closes all.
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
        self._note = Memfd()
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
        self.copies: dict[int, Stage] = {}
        # When it is closed, collected, or at the end of the process.
        self._end = weakref.finalize(self, _leave, self._note, place)

    def _opened(self) -> Place:
        if not self._end.alive:
            raise ClosedError(f"Stage of '{self.source}' is closed")
        return self._place

    @property
    def path(self) -> str:
        """What to open instead of what was staged; of this process's user, and root's."""
        return os.path.join(self._proc, self._opened().path(self._first))

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
        for other in list(self.copies.values())[1:]:
            other.close()
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
        if hasattr(self, "_end") and not self.closed:
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
    repack: bool = False,
    verify: bool = True,
    resume: bool = False,
    progress: Progress | None = None,
    **placement: Unpack[PlacementOptions],
) -> Stage:
    """Read a model into shared memory that any process of the user can open by path.

    All files of the model are read and checked first as `open_weights` does. The copies are sealed:
    nobody can write to them any more.

    Parameters
    ----------
    path : path-like
        A GGUF or safetensors file, a part of a split model, or the index of several files. Or the
        URL of one (see docs/remote.md), whose bytes go from the server to the shared memory.
    backing : {"auto", "tmpfs", "hugetlb", "memfd", "shm"}
        The kind of shared memory. ``"tmpfs"``: a file system of its own that is mounted nowhere,
        with huge pages. ``"hugetlb"``: pages from a pool, for one GGUF file. ``"memfd"``: for one
        file. ``"shm"``: files in ``/dev/shm``. ``"auto"`` takes the first of these that can be had.
    repack : bool, default False
        Whether to stage, instead of the model, its weights in the order that ggml multiplies
        fastest on this CPU (docs/images.md): decoders map these and are ready. `Stage.path` then
        is a link to the model, beside them, and the rest of the model stays in the page cache. It
        takes names, so ``"tmpfs"`` or ``"shm"``. Of a URL: stage it first, and give its path.
    verify : bool
        Of a URL: compare each file with the hash that the server tells of it, if it does.
    resume : bool
        Of a URL: where this is broken off, a small process keeps what has come, as that of
        ``unimem stage`` would, and the next call with `resume` takes it and asks the server for
        the rest only. Otherwise nothing is left.
    progress : callable, optional
        Called as ``progress(done_bytes, total_bytes)`` in this thread. What it raises ends the
        staging, and nothing is left.
    **placement
        See `PlacementOptions`; `warm` changes nothing, since all of it is in RAM. With `lock` it is
        locked for as long as this process has it. With ``numa="mirror"`` the model is staged once
        on each node, one after the other: see `Stage.copies`.

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
        An unknown option, a backing that cannot hold this model, a model of which this CPU
        repacks nothing, or `repack` of a URL.
    ImportError
        With `repack`, ggml-python is not installed; of a URL, what reads it.

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
    if not isinstance(repack, bool):
        raise TypeError(f"repack: expected True or False, got {repack!r:.60}")
    flag(verify, "verify")
    flag(resume, "resume")
    policy.check_options(placement)
    placement = without_lone_mirror(placement, limits)
    if is_mirrored(placement):
        same = {"backing": backing, "repack": repack, "verify": verify, "resume": resume}
        made = stage_copies(stage, path, placement, progress, same)
        first = next(iter(made.values()))  # which has all of them, and closes them
        first.copies = {node: each for node, each in made.items() if node is not None}
        return first
    options = _StageOptions(**placement)
    proc_folder()  # without it, nobody could open what would be read in
    sweep()
    source = shown(file_path(path))
    if repack:
        if is_url(path):
            raise ValueError(
                f"repack=True: {source}: a model on a server has no file here that its other "
                "tensors could be read from: stage it first, and give the path of that"
            )
        with open_weights(path, load="map") as weights:
            return _RepackedStaging(weights, source, backing, options, progress).run()
    with open_files(path) as model:
        return _ModelStaging(
            model, source, backing, options, progress, verify=verify, resume=resume
        ).run()


def stage_files(model: ModelFiles, source: str, **placement: Unpack[PlacementOptions]) -> Stage:
    """Stage a model whose files are opened, here or on a server, as `stage` does.

    Parameters
    ----------
    model : ModelFiles
        It stays open.
    source : str
        What it is called.
    **placement
        As for `stage`.
    """
    policy.check_options(placement)
    policy.parse_numa(placement.get("numa"))  # which is that of one copy
    proc_folder()
    sweep()
    return _ModelStaging(model, source, "auto", _StageOptions(**placement), None).run()


@dataclass(frozen=True)
class _StageOptions:
    """`PlacementOptions`, with their defaults."""

    pages: Pages = "auto"
    numa: str | None = None
    lock: Lock = False
    warm: bool | int = True
    strict: bool = False


class _Staging(ABC):
    """One call of `stage`: whatever it raises, nothing is left.

    Attributes
    ----------
    nbytes : int
        Bytes of the files.
    names : list of str
        Of the files, in the order of `Stage.paths`.
    mapped : list of (str, int)
        Those that are mapped, and their bytes.
    first : str
        The name of what is to be opened.
    versions : list of (str, Version)
        The files that are read, and what they are.
    """

    nbytes: int
    names: list[str]
    mapped: list[tuple[str, int]]
    first: str
    versions: list[tuple[str, Version]]

    def __init__(
        self,
        source: str,
        backing: Backing | Literal["auto"],
        options: _StageOptions,
        progress: Progress | None,
    ) -> None:
        self.source = source
        self.asked = backing
        self.options = options
        self.pages = options.pages
        self.progress = progress

    @abstractmethod
    def _fill_files(self, place: Place, backing: Backing) -> None:
        """Make the files of a place."""

    @abstractmethod
    def _name_refusal(self, backing: Backing) -> str | None:
        """Say why these files cannot lie in a place that gives no names; None where they can."""

    def _has_broken_off(  # noqa: B027 - of files there is nothing to save
        self, place: Place, backing: Backing, error: BaseException
    ) -> None:
        """Save what is in a place that was not filled; it goes if nobody takes it."""

    def _room_bytes(self) -> int:
        """Return what of the room that there is not yet comes back as files are filled."""
        return 0

    def run(self) -> Stage:
        """Choose a place, and fill it."""
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
        if backing in ("hugetlb", "memfd") and (why := self._name_refusal(backing)):
            return why
        if backing != "hugetlb":
            if self.pages in policy.HUGETLB:
                return f"pages='{self.pages}' come from a pool: backing='hugetlb'"
        elif self.pages in ("4k", "thp"):
            return f"pages='{self.pages}' come from no pool"
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
        needed = max(0, self.nbytes - self._room_bytes())
        limits.require(needed, what)
        if backing == "memfd":
            return Memfd()
        if backing == "shm":
            if not os.path.isdir(limits.SHM):
                raise PlacementError(errno.ENOENT, f"there is no {limits.SHM}")
            limits.require_shm(needed, what)
            return Folder()
        # While a file is read in, it ends with a whole huge page.
        page = max(tmpfs.huge_page_bytes(), 1 << 16)
        size = sum(-(-version[2] // page) * page for _, version in self.versions)
        size = max(size, -(-self.nbytes // page) * page)  # some orders take more than the file
        return Mount(size, huge=self.pages != "4k" and tmpfs.huge_page_bytes() > 0)

    def _fill(self, place: Place, backing: Backing, reason: str) -> Stage:
        with ExitStack() as undo:
            undo.callback(place.close)
            try:
                self._fill_files(place, backing)
            except BaseException as error:
                self._has_broken_off(place, backing, error)
                raise
            place.seal()
            granted, blocks = self._look(place, backing, undo)
            stage = Stage(
                place,
                backing,
                reason or ("it was asked for" if self.asked != "auto" else "the first choice"),
                self.source,
                self.names,
                self.first,
                self.versions,
                self.nbytes,
                granted,
                blocks,
            )
            undo.callback(stage.close)
            path = self.source if is_url(self.source) else os.path.abspath(self.source)
            show(stage, path, self._asked())
            undo.pop_all()
        return stage

    def _asked(self) -> dict[str, Any]:
        """Return the options as the command has them."""
        options = self.options
        asked = {"pages": options.pages, "numa": options.numa, "lock": options.lock}
        return asked | {"backing": self.asked}

    def _put(
        self,
        place: Place,
        backing: Backing,
        name: str,
        nbytes: int,
        label: str,
        fill: Callable[[Block], None],
    ) -> None:
        """Make one file of the place, through a block that puts it where it shall be."""
        with Descriptors() as fds:
            target = fds.add(place.create, name)
            with Block._filled(
                nbytes,
                fill,
                fd=target,
                pages=self.pages,
                numa=self.options.numa,
                lock=self.options.lock,
                strict=self.options.strict,
                name=f"{backing}:{label}",
                category="staging",
            ):
                pass
            if backing != "hugetlb":
                os.ftruncate(target, nbytes)
            os.fchmod(target, ACCESS_MODE)

    def _look(
        self, place: Place, backing: Backing, undo: ExitStack
    ) -> tuple[Placement, list[Block]]:
        """Map the files as others will, and ask the kernel what that gives."""
        placements: list[Placement] = []
        blocks: list[Block] = []
        for name, _ in self.mapped:
            with Descriptors() as fds:
                fd = fds.add(place.open, name)
                block = undo.enter_context(Block.attach(fd, name=name, category="staging"))
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
        for name, nbytes in self.mapped:
            whole += nbytes // page * page if page else 0
            with Descriptors() as fds:
                found += _huge_bytes(fds.add(place.open, name), nbytes)
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


class _ModelStaging(_Staging):
    """Of the files of a model, as they are."""

    def __init__(
        self,
        model: ModelFiles,
        source: str,
        backing: Backing | Literal["auto"],
        options: _StageOptions,
        progress: Progress | None,
        *,
        verify: bool = True,
        resume: bool = False,
    ) -> None:
        super().__init__(source, backing, options, progress)
        self.model, self.verify = model, verify
        self.nbytes = sum(file.nbytes for file in model.files)
        # What is not in the page cache need not come there on its way.
        self.direct = loading.cached_bytes(model) < loading.MOSTLY * self.nbytes
        self.names = [model.name_of(file.path) for file in model.files]
        sizes = [file.nbytes for file in model.files]
        self.mapped = list(zip(self.names, sizes, strict=True))
        self.versions = [(file.path, file.version) for file in model.files]
        self.first = self.names[0]
        if model.index is not None:
            self.names.append(model.name_of(model.index))
            self.versions.append((model.index, model.version_of(model.index)))
            self.first = self.names[-1]
        self.unfinished: Unfinished | None = None
        if resume and isinstance(model, RemoteFiles):
            self.unfinished = Unfinished(model, source, self.versions)

    def run(self) -> Stage:
        """Stage the model, and go on with what was left of it."""
        if self.unfinished is None:
            return super().run()
        with self.unfinished:
            return super().run()

    def _room_bytes(self) -> int:
        return 0 if self.unfinished is None else self.unfinished.room_bytes

    def _has_broken_off(self, place: Place, backing: Backing, error: BaseException) -> None:
        if self.unfinished is not None:
            self.unfinished.keep(place, backing, self.names, self._asked(), error)

    def _name_refusal(self, backing: Backing) -> str | None:
        if len(self.names) > 1:
            return "several files need names side by side, which only tmpfs and shm give"
        if backing == "hugetlb" and isinstance(self.model.files[0].header, SafetensorsHeader):
            return "a safetensors file ends exactly, and a file of hugetlb pages with a whole page"
        return None

    def _fill_files(self, place: Place, backing: Backing) -> None:
        done = 0
        for i, (name, file) in enumerate(zip(self.names, self.model.files, strict=False)):
            read = self._fetching if isinstance(self.model, RemoteFiles) else self._reading
            self._put(place, backing, name, file.nbytes, file.path, read(i, done))
            done += file.nbytes
        if self.model.index is not None:
            _write(place, self.names[-1], self.model.index_text)
        self._check_versions()

    def _check_versions(self) -> None:
        self.model.check_versions()
        index = self.model.index
        if index is not None and self.versions[-1][1] != self.model.version_of(index):
            raise OSError(errno.ESTALE, "The index was replaced or written to meanwhile", index)

    def _progress_of(self, file: ModelFile, done: int) -> Progress:
        def progress(n: int, _: int) -> None:
            # The end of a file is not the end of all.
            if self.progress is not None and (n < file.nbytes or done + n == self.nbytes):
                self.progress(done + n, self.nbytes)

        return progress

    def _reading(self, number: int, done: int) -> Callable[[Block], None]:
        """Return what reads a file, when so many bytes of those before it are there."""
        file, source = self.model.files[number], self.model.fds[number]
        progress = self._progress_of(file, done)

        def fill(block: Block) -> None:
            _warm_end(block, file.nbytes)
            parts = [(source, 0, block, 0, file.nbytes, file.path)]
            if self.direct:
                try:
                    return loading.read_direct(parts, progress=progress)
                except loading.NoDirectReadsError:
                    self.direct = False
            read_parts(parts, progress=progress)

        return fill

    def _fetching(self, number: int, done: int) -> Callable[[Block], None]:
        """Return what reads a file on a server."""
        model, file = self.model, self.model.files[number]
        assert isinstance(model, RemoteFiles)
        progress = self._progress_of(file, done)
        arrivals = None if self.unfinished is None else self.unfinished.arrivals

        def fill(block: Block) -> None:
            _warm_end(block, file.nbytes)
            rows = [block.as_array("uint8", file.nbytes)]
            try:
                model.read_file(
                    file, rows[0], verify=self.verify, progress=progress, arrivals=arrivals
                )
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # the threads', which keep the memory
                raise
            finally:
                rows.clear()

        return fill


class _RepackedStaging(_Staging):
    """Of the image of a model, beside links to the model's files."""

    def __init__(
        self,
        weights: Weights,
        source: str,
        backing: Backing | Literal["auto"],
        options: _StageOptions,
        progress: Progress | None,
    ) -> None:
        super().__init__(source, backing, options, progress)
        self.weights = weights
        self.found = arrange(weights)
        if not self.found.slots:
            raise ValueError(f"repack=True: {source}: {why_nothing(weights)}")
        self.identity = identify(weights, self.found)
        files = [part.file for part in weights._parts]
        self.links = [os.path.realpath(file.absolute_path) for file in files]
        self.data_offset = len(pack_image(self.found, self.identity, self.links[0], None))
        self.nbytes = image_bytes(self.data_offset, self.found.nbytes)
        self.names = [IMAGE_NAME]
        self.mapped = [(IMAGE_NAME, self.nbytes)]
        self.versions = [(file.path, file.identity) for file in files]
        self.first = os.path.basename(files[0].path)
        if source.endswith(".index.json"):
            self.links.append(os.path.realpath(source))
            self.first = os.path.basename(source)

    def _asked(self) -> dict[str, Any]:
        return super()._asked() | {"repack": True}

    def _name_refusal(self, backing: Backing) -> str | None:
        return "an image lies beside links to its model, which only tmpfs and shm give"

    def _fill_files(self, place: Place, backing: Backing) -> None:
        self._put(place, backing, IMAGE_NAME, self.nbytes, self.source, self._fill_image)
        names = [os.path.basename(part.file.path) for part in self.weights._parts]
        for name, target in zip((*names, self.first), self.links, strict=False):
            place.link(name, target)

    def _fill_image(self, block: Block) -> None:
        """Read it from the cache, or repack; then write what is in front of it."""
        found, base = self.found, self.data_offset
        end = base + found.nbytes
        _warm_end(block, end)
        head = self._read_kept(block)
        if head is None:
            repack_into(self.weights, found, block, base, self.progress)
            head = pack_image(found, self.identity, self.links[0], block, base)
        block.as_array("uint8", len(head))[:] = np.frombuffer(head, np.uint8)

    def _read_kept(self, block: Block) -> bytes | None:
        """Read the image that the cache has; None without one."""
        found, base = self.found, self.data_offset
        cache = choose_cache(self.weights, None)
        image = None if cache is None else cache.find(found, self.identity)
        if cache is None or image is None:
            return None
        with image:
            try:
                image.read(block, base, self.progress)
            except FormatError as error:
                cache.discard(image.header.key, str(error))
                return None
        return pack_image(found, self.identity, self.links[0], block, base)


def _leave(note: Memfd, place: Place) -> None:
    """Say no more that it is kept, and let it go."""
    note.leave()
    place.close()


def _warm_end(block: Block, nbytes: int) -> None:
    """Warm what is behind the end, in its last page: it is there as well until it is cut off."""
    end = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if end < block.nbytes:
        block._warm_range(end, block.nbytes - end)


def _huge_bytes(fd: int, nbytes: int) -> int:
    """Map a file as any program does, wherever the kernel says, and count what is in huge pages."""
    with mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        view[:: mmap.PAGESIZE].sum()
        start = view.ctypes.data
        del view
        return sum(area.huge_bytes for area in read_process().areas if area.start == start)


def _write(place: Place, name: str, data: bytes) -> None:
    with open(place.create(name), "wb") as file:
        os.fchmod(file.fileno(), ACCESS_MODE)
        file.write(data)
