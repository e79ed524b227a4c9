"""Staging: a model once in shared memory, where any process opens it by path."""

from __future__ import annotations

import errno
import mmap
import os
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np

from unimem._core import tmpfs
from unimem._core.block import Block
from unimem._core.load import load as read_parts
from unimem.base.arguments import check_callable, file_path, flag, one_of
from unimem.base.closing import Closing
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
    sweep,
)
from unimem.staging.each_node import stage_copies
from unimem.staging.keeper import show
from unimem.staging.unfinished import Unfinished
from unimem.system import limits, policy
from unimem.system.placement import Lock, Pages, Placement, PlacementOptions, sum_placements
from unimem.system.process import read_process
from unimem.weights import loading
from unimem.weights.files import ModelFiles, Version, durable_path
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
from unimem.weights.staged import proc_folder

# Commands that give huge pages to programs that map a file at any address.
_ALLOW: dict[Backing, str] = {
    "memfd": "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    "shm": f"mount -o remount,huge=advise {limits.SHM}",
}


class _Files(NamedTuple):
    """The files of a staged model."""

    source: str  # the model that is staged
    names: list[str]  # in the order of `Stage.paths`
    first: str  # the name of the file to open
    versions: list[tuple[str, Version]]  # the files that are read
    nbytes: int
    key: str = ""  # of a model on a server: its `url_key`


class Stage(Closing):
    """A model in sealed shared memory, made by `stage`, until it is closed.

    Any number of threads may read its attributes; one thread may close it. A forked child has a
    copy of the descriptor: the paths remain the parent's and go with the parent, and the memory
    goes when both have closed. Other processes that have the model open or mapped keep it.

    Attributes
    ----------
    path : str
        What to open instead of the model that was staged: the file, the first part, or the index.
    paths : tuple of str
        All files, in the model's order; an index comes last. For a repacked model, the image.
    source : str
        The model that was staged.
    backing : {"tmpfs", "hugetlb", "memfd", "shm"}
        The kind of shared memory that it lies in.
    reason : str
        Why this kind was chosen.
    nbytes : int
        Bytes of the files.
    granted : Placement
        What the kernel gives to a process that maps the files at a multiple of the huge page, as
        `open_weights` does. With tmpfs and hugetlb, all processes get the same. With memfd and shm
        others get base pages, unless ``shmem_enabled`` or the mount of ``/dev/shm`` allow more.
    copies : dict of int to Stage
        With ``numa="mirror"``, the stage on each node, first this one; else empty.
        Closing this one closes all.
    """

    def __init__(
        self,
        place: Place,
        files: _Files,
        backing: Backing,
        reason: str,
        granted: Placement,
        blocks: Sequence[Block],
    ) -> None:
        self._place = place
        self._note = Memfd()
        self._names = tuple(files.names)
        self._first = files.first
        self._versions = tuple(files.versions)
        self._key = files.key
        # Mapped, so that reports and the kernel count it as this process's.
        self._blocks = tuple(blocks)
        self._proc = proc_folder()
        self.backing = backing
        self.reason = reason
        self.source = files.source
        self.nbytes = files.nbytes
        self.granted = granted
        self.copies: dict[int, Stage] = {}
        # Runs when it is closed, collected, or the process ends.
        self._end = weakref.finalize(self, _leave, self._note, place)

    def _opened(self) -> Place:
        if not self._end.alive:
            raise ClosedError(f"Stage of '{self.source}' is closed")
        return self._place

    @property
    def path(self) -> str:
        """The file to open instead of the model, for this process's user and root."""
        return os.path.join(self._proc, self._opened().path(self._first))

    @property
    def paths(self) -> tuple[str, ...]:
        """All files, in the model's order; an index comes last."""
        paths = map(self._opened().path, self._names)
        return tuple(os.path.join(self._proc, path) for path in paths)

    @property
    def fd(self) -> int:
        """The descriptor of the folder or the file, which belongs to the stage and keeps it."""
        return self._opened().fd

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._end.alive

    def close(self) -> None:
        """End the stage: its paths go now, the memory with its last user. Twice is no error."""
        for other in list(self.copies.values())[1:]:
            other.close()
        for block in self._blocks:
            block.close()
        self._end()

    def _check_open(self) -> None:
        self._opened()

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

    All files of the model are opened and checked first, as `open_weights` does. The copies are
    sealed against writing.

    Parameters
    ----------
    path : path-like
        A GGUF or safetensors file, a part of a split model, or the index of several files. Or the
        URL of one (see docs/remote.md), whose bytes go from the server to the shared memory.
    backing : {"auto", "tmpfs", "hugetlb", "memfd", "shm"}
        The kind of shared memory. ``"tmpfs"``: a file system of its own that is mounted nowhere,
        with huge pages. ``"hugetlb"``: pages from a pool, for one GGUF file. ``"memfd"``: for one
        file. ``"shm"``: files in ``/dev/shm``. ``"auto"`` takes the first of these that is
        available.
    repack : bool, default False
        Whether to stage the weights in the order that ggml multiplies fastest on this CPU
        (docs/images.md), instead of the model: decoders map them and are ready. `Stage.path` is a
        link to the model then, beside them, and the rest of the model stays in the page cache.
        This needs names, so ``"tmpfs"`` or ``"shm"``. For a URL: stage it first, and give its path.
    verify : bool
        For a URL: compare each file with the hash that the server reports, if it reports one.
    resume : bool
        For a URL: if this is interrupted, a small process keeps the part that has arrived, as that
        of ``unimem stage`` would. The next call with `resume` takes it and asks the server for the
        rest only. Without it, nothing is left.
    progress : callable, optional
        Called as ``progress(done_bytes, total_bytes)`` in this thread. If it raises, staging ends
        and nothing is left.
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
        A limit, which is named, has no room; nothing was taken.
    OSError
        A file cannot be read, or was written to or replaced meanwhile.
    PlacementError
        The chosen backing is not available; or, with `strict`, not all of the placement was
        granted. Without `strict` this is one `PlacementWarning`.
    ValueError
        An unknown option, a backing that cannot hold this model, a model without anything that
        this CPU repacks, or `repack` of a URL.
    ImportError
        unimem-ggml is missing with `repack`, or the extra ``remote`` with a URL.

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
        first = next(iter(made.values()))  # it has all copies, and closes them
        first.copies = {node: each for node, each in made.items() if node is not None}
        return first
    options = _StageOptions(backing, progress, verify, resume, **placement)
    _prepare()
    source = shown(file_path(path))
    if repack:
        if is_url(path):
            raise ValueError(
                f"repack=True: {source}: a model on a server has no file here that its other "
                "tensors could be read from: stage it first, and give the path of that"
            )
        with open_weights(path, load="map") as weights:
            return _RepackedStaging(weights, source, options).run()
    with open_files(path) as model:
        return _ModelStaging(model, source, options).run()


def stage_files(model: ModelFiles, source: str, **placement: Unpack[PlacementOptions]) -> Stage:
    """Stage a model whose files are already opened, here or on a server, as `stage` does.

    The files stay open; `source` is the name of the model.
    """
    policy.check_options(placement)
    policy.parse_numa(placement.get("numa"))  # "mirror" is refused
    _prepare()
    return _ModelStaging(model, source, _StageOptions(**placement)).run()


def _prepare() -> None:
    proc_folder()  # without it, no process could open the paths
    sweep()


@dataclass(frozen=True)
class _StageOptions:
    """The options of `stage`, with their defaults."""

    backing: Backing | Literal["auto"] = "auto"
    progress: Progress | None = None
    verify: bool = True
    resume: bool = False
    pages: Pages = "auto"
    numa: str | None = None
    lock: Lock = False
    warm: bool | int = True
    strict: bool = False


class _Staging(ABC):
    """One call of `stage`. If it raises, nothing is left."""

    files: _Files
    mapped: list[tuple[str, int]]  # names and sizes of the files that are mapped

    def __init__(self, source: str, options: _StageOptions) -> None:
        self.source = source
        self.options = options
        self.pages = options.pages

    @abstractmethod
    def _fill_files(self, place: Place, backing: Backing) -> None:
        """Make the files of a place."""

    @abstractmethod
    def _name_refusal(self, backing: Backing) -> str | None:
        """Explain why these files cannot lie in a place without names; None if they can."""

    def _save_part(  # noqa: B027 - only loads from servers are worth saving
        self, place: Place, backing: Backing, error: BaseException
    ) -> None:
        """Save what an interrupted call leaves in a place."""

    def _room_bytes(self) -> int:
        """Return the bytes that become free while the files are filled."""
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
                except (PlacementError, CapacityError) as error:
                    if self.options.backing != "auto":
                        raise
                    if isinstance(error, CapacityError):  # a pool may still have room
                        no_room = no_room or error
                    refusal = getattr(error, "strerror", None) or str(error)
                else:
                    return self._fill(place, backing, "; ".join(refusals))
            elif self.options.backing != "auto":
                raise ValueError(f"backing='{backing}': {refusal}")
            refusals.append(f"not {backing}: {refusal}")
        if no_room is not None:
            raise no_room
        raise PlacementError(f"staging {self.source}: {'; '.join(refusals)}")

    def _candidates(self) -> Sequence[Backing]:
        """Return the backings to try, in this order.

        If no pool can hold the requested hugetlb pages, they are given up.
        """
        if self.options.backing != "auto":
            return (self.options.backing,)
        if self.pages not in policy.HUGETLB:
            return BACKINGS
        why = self._refusal("hugetlb") or self._pool_shortfall()
        if why is None:
            return ("hugetlb",)
        self._warn(why)
        self.pages = "thp"
        return BACKINGS

    def _warn(self, why: str) -> None:
        """Warn that a wish was not granted; with `strict`, raise PlacementError."""
        text = f"staging {self.source}: {why}"
        if self.options.strict:
            raise PlacementError(text)
        policy.warn(text)

    def _refusal(self, backing: Backing) -> str | None:
        """Explain why a backing cannot hold this model as requested; None if it can."""
        if backing in ("hugetlb", "memfd") and (why := self._name_refusal(backing)):
            return why
        if backing != "hugetlb":
            if self.pages in policy.HUGETLB:
                return f"pages='{self.pages}' come from a pool: backing='hugetlb'"
        elif self.pages in ("4k", "thp"):
            return f"pages='{self.pages}' come from no pool"
        return None

    def _pool_shortfall(self) -> str | None:
        numa = policy.parse_numa(self.options.numa)
        return policy.pool_shortfall(self.pages, self.files.nbytes, limits, numa)

    def _make(self, backing: Backing) -> Place:
        """Make an empty place, if there is room for the model."""
        if backing == "hugetlb":
            if self.pages == "auto":
                self.pages = "2m"
            if (shortfall := self._pool_shortfall()) is not None:
                self.pages = self.options.pages
                raise PlacementError(shortfall)
            return Memfd(self.pages)
        what = f"staging {self.source}"
        needed = max(0, self.files.nbytes - self._room_bytes())
        limits.require(needed, what)
        if backing == "memfd":
            return Memfd()
        if backing == "shm":
            if not os.path.isdir(limits.SHM):
                raise PlacementError(errno.ENOENT, f"there is no {limits.SHM}")
            limits.require_shm(needed, what)
            return Folder()
        # While a file is filled, it ends with a whole huge page.
        page = max(tmpfs.huge_page_bytes(), 1 << 16)
        size = sum(-(-version[2] // page) * page for _, version in self.files.versions)
        size = max(size, -(-self.files.nbytes // page) * page)  # some orders need more bytes
        return Mount(size, huge=self.pages != "4k" and tmpfs.huge_page_bytes() > 0)

    def _fill(self, place: Place, backing: Backing, reason: str) -> Stage:
        with ExitStack() as undo:
            undo.callback(place.close)
            try:
                self._fill_files(place, backing)
            except BaseException as error:
                self._save_part(place, backing, error)
                raise
            place.seal()
            granted, blocks = self._map_files(place, backing, undo)
            is_wish = self.options.backing != "auto"
            reason = reason or ("it was asked for" if is_wish else "the first choice")
            stage = Stage(place, self.files, backing, reason, granted, blocks)
            undo.callback(stage.close)
            path = self.source if is_url(self.source) else durable_path(self.source)
            show(stage, path, self._asked())
            undo.pop_all()
        return stage

    def _asked(self) -> dict[str, Any]:
        """Return the options as the command has them."""
        return {name: getattr(self.options, name) for name in ("pages", "numa", "lock", "backing")}

    def _put(
        self, place: Place, backing: Backing, name: str, nbytes: int, fill: Callable[[Block], None]
    ) -> None:
        """Make one file of the place, through a block that has the requested placement."""
        options = self.options
        with Descriptors() as fds:
            target = fds.add(place.create, name)
            with Block._filled(
                nbytes,
                fill,
                fd=target,
                pages=self.pages,
                numa=options.numa,
                lock=options.lock,
                strict=options.strict,
                name=f"{backing}:{self._label_of(name)}",
                category="staging",
            ):
                pass
            if backing != "hugetlb":
                os.ftruncate(target, nbytes)
            os.fchmod(target, ACCESS_MODE)

    def _label_of(self, name: str) -> str:
        """Return what a file is made from, for messages."""
        return self.source

    def _map_files(
        self, place: Place, backing: Backing, undo: ExitStack
    ) -> tuple[Placement, list[Block]]:
        """Map the files as other processes will, and ask the kernel for their placement."""
        blocks: list[Block] = []
        for name, _ in self.mapped:
            with Descriptors() as fds:
                fd = fds.add(place.open, name)
                block = undo.enter_context(Block.attach(fd, name=name, category="staging"))
            block.warm()
            if self.options.lock:
                # A refusal was already reported when the file was filled.
                with suppress(PlacementError):
                    block._lock(self.options.lock)
            blocks.append(block)
        if self.pages == "thp":
            self._require_huge_pages(place, backing)
        return sum_placements([block.verify() for block in blocks]), blocks

    def _require_huge_pages(self, place: Place, backing: Backing) -> None:
        """Warn if programs that just map the files do not get huge pages."""
        page = tmpfs.huge_page_bytes()
        found = whole = 0
        for name, nbytes in self.mapped:
            whole += nbytes // page * page if page else 0
            with Descriptors() as fds:
                found += _huge_bytes(fds.add(place.open, name), nbytes)
        if found == whole:
            return
        allow = f"'{_ALLOW[backing]}' allows them, and " if backing in _ALLOW else ""
        self._warn(
            f"pages='thp': a program that maps it gets "
            f"{format_bytes(found)} of {format_bytes(whole)} in huge pages: as root, {allow}"
            "'echo 1 > /proc/sys/vm/compact_memory' joins free memory"
        )


class _ModelStaging(_Staging):
    """The staging of a model's files as they are."""

    def __init__(self, model: ModelFiles, source: str, options: _StageOptions) -> None:
        super().__init__(source, options)
        self.model = model
        nbytes = sum(file.nbytes for file in model.files)
        # A file that is not in the page cache need not go through it.
        self.direct = loading.cached_bytes(model) < loading.MOSTLY * nbytes
        names = [model.name_of(file.absolute_path) for file in model.files]
        self.mapped = list(zip(names, (file.nbytes for file in model.files), strict=True))
        versions = model.versions()
        first = names[0]
        if model.index is not None:
            first = model.name_of(model.index)
            names.append(first)
        key = model.key if isinstance(model, RemoteFiles) else ""
        self.files = _Files(source, names, first, versions, nbytes, key)
        self.unfinished: Unfinished | None = None
        if options.resume and isinstance(model, RemoteFiles):
            self.unfinished = Unfinished(model, source, versions)

    def run(self) -> Stage:
        """Stage the model, from where an earlier load was interrupted."""
        with self.unfinished or nullcontext():
            return super().run()

    def _room_bytes(self) -> int:
        return 0 if self.unfinished is None else self.unfinished.room_bytes

    def _save_part(self, place: Place, backing: Backing, error: BaseException) -> None:
        if self.unfinished is not None:
            self.unfinished.keep(place, backing, self.files.names, self._asked(), error)

    def _name_refusal(self, backing: Backing) -> str | None:
        if len(self.files.names) > 1:
            return "several files need names side by side, which only tmpfs and shm give"
        if backing == "hugetlb" and isinstance(self.model.files[0].header, SafetensorsHeader):
            return "a safetensors file ends exactly, and a file of hugetlb pages with a whole page"
        return None

    def _label_of(self, name: str) -> str:
        return self.model.files[self.files.names.index(name)].path

    def _fill_files(self, place: Place, backing: Backing) -> None:
        done = 0
        read = self._fetch if isinstance(self.model, RemoteFiles) else self._read
        for i, (name, nbytes) in enumerate(self.mapped):
            self._put(place, backing, name, nbytes, partial(read, i, self._progress_of(i, done)))
            done += nbytes
        self.model.check_versions()
        if (index := self.model.index) is None:
            return
        with open(place.create(self.files.names[-1]), "wb") as file:
            os.fchmod(file.fileno(), ACCESS_MODE)
            file.write(self.model.index_text)
        if self.files.versions[-1][1] != self.model.version_of(index):
            raise OSError(errno.ESTALE, "The index was replaced or written to meanwhile", index)

    def _progress_of(self, number: int, done: int) -> Progress:
        """Return the callback for a file that `done` bytes of other files precede."""
        nbytes, total, tell = self.mapped[number][1], self.files.nbytes, self.options.progress

        def progress(n: int, _: int) -> None:
            # The end of a file is not always the end of the model.
            if tell is not None and (n < nbytes or done + n == total):
                tell(done + n, total)

        return progress

    def _read(self, number: int, progress: Progress, block: Block) -> None:
        """Read a file into its block."""
        file = self.model.files[number]
        _warm_end(block, file.nbytes)
        parts = [(self.model.fds[number], 0, block, 0, file.nbytes, file.path)]
        if self.direct:
            try:
                return loading.read_direct(parts, progress=progress)
            except loading.NoDirectReadsError:
                self.direct = False
        return read_parts(parts, progress=progress)

    def _fetch(self, number: int, progress: Progress, block: Block) -> None:
        """Read a file on a server into its block."""
        model, file = self.model, self.model.files[number]
        assert isinstance(model, RemoteFiles)
        arrivals = None if self.unfinished is None else self.unfinished.arrivals
        _warm_end(block, file.nbytes)
        with loading.rows_of_block(block, [(0, file.nbytes)]) as rows:
            model.read_file(
                file, rows[0], verify=self.options.verify, progress=progress, arrivals=arrivals
            )


class _RepackedStaging(_Staging):
    """The staging of a model's image, beside links to the model's files."""

    def __init__(self, weights: Weights, source: str, options: _StageOptions) -> None:
        super().__init__(source, options)
        self.weights = weights
        self.found = arrange(weights)
        if not self.found.slots:
            raise ValueError(f"repack=True: {source}: {why_nothing(weights)}")
        self.identity = identify(weights, self.found)
        files = [part.file for part in weights._parts]
        self.links = [os.path.realpath(file.absolute_path) for file in files]
        self.data_offset = len(pack_image(self.found, self.identity, self.links[0], None))
        nbytes = image_bytes(self.data_offset, self.found.nbytes)
        first = os.path.basename(files[0].absolute_path)
        if source.endswith(".index.json"):
            self.links.append(os.path.realpath(source))
            first = os.path.basename(source)
        self.mapped = [(IMAGE_NAME, nbytes)]
        versions = [(file.absolute_path, file.identity) for file in files]
        self.files = _Files(source, [IMAGE_NAME], first, versions, nbytes)

    def _asked(self) -> dict[str, Any]:
        return super()._asked() | {"repack": True}

    def _name_refusal(self, backing: Backing) -> str | None:
        return "an image lies beside links to its model, which only tmpfs and shm give"

    def _fill_files(self, place: Place, backing: Backing) -> None:
        self._put(place, backing, IMAGE_NAME, self.files.nbytes, self._fill_image)
        names = [os.path.basename(part.file.absolute_path) for part in self.weights._parts]
        for name, target in zip((*names, self.files.first), self.links, strict=False):
            place.link(name, target)

    def _fill_image(self, block: Block) -> None:
        """Read the image from the cache, or repack; then write its header."""
        found, base = self.found, self.data_offset
        _warm_end(block, base + found.nbytes)
        if not self._read_kept(block):
            repack_into(self.weights, found, block, base, self.options.progress)
        head = pack_image(found, self.identity, self.links[0], block, base)
        block.as_array("uint8", len(head))[:] = np.frombuffer(head, np.uint8)

    def _read_kept(self, block: Block) -> bool:
        """Read the image from the cache; False if it has none."""
        cache = choose_cache(self.weights, None)
        image = None if cache is None else cache.find(self.found, self.identity)
        if cache is None or image is None:
            return False
        with image:
            try:
                image.read(block, self.data_offset, self.options.progress)
            except FormatError as error:
                cache.discard(image.header.key, str(error))
                return False
        return True


def _leave(note: Memfd, place: Place) -> None:
    """Withdraw the note, then let the place go."""
    note.leave()
    place.close()


def _warm_end(block: Block, nbytes: int) -> None:
    """Warm the rest of the last page, which exists until the file is cut to its size."""
    end = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if end < block.nbytes:
        block._warm_range(end, block.nbytes - end)


def _huge_bytes(fd: int, nbytes: int) -> int:
    """Map a file at any address, as programs do, and count the bytes in huge pages."""
    with mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        view[:: mmap.PAGESIZE].sum()
        start = view.ctypes.data
        del view
        return sum(area.huge_bytes for area in read_process().areas if area.start == start)
