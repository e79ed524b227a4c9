"""Loading a model's data into memory: mapped, copied, or read past the page cache."""

from __future__ import annotations

import errno
import mmap
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, cast, get_args
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from unimem._core.block import Block
from unimem._core.load import load as read_parts
from unimem._core.tape import Tape
from unimem.base.arguments import check_callable, flag, integer, one_of
from unimem.base.kernel_files import read_text
from unimem.base.text import format_bytes
from unimem.errors import ClosedError, PlacementError
from unimem.remote.arrivals import Arrivals
from unimem.remote.client import is_url, shown
from unimem.system import limits, policy
from unimem.system.placement import PlacementOptions
from unimem.system.pressure import Pressure, memory_pressure, why_exposed
from unimem.system.sizes import parse_size
from unimem.weights.files import FileRange, ModelFile, ModelFiles
from unimem.weights.node_copies import (
    choose_copies,
    copy_from,
    is_mirrored,
    nodes_for_copies,
    without_lone_mirror,
)
from unimem.weights.remote_files import RemoteFiles
from unimem.weights.stream.stream import Stream

Load = Literal["auto", "map", "copy", "direct", "stream"]
EngineLoad = Literal["auto", "map", "copy", "direct", "stream", "repack"]
"""The load modes of the engine: those of `Load`, or in ggml's order (`um.repack`)."""

AccessPattern = Literal["willneed", "sequential", "random"]
Progress = Callable[[int, int], object]
# A range as `unimem._core.load.load` takes it.
Range = tuple[int, int, Block, int, int, str]

# Each fault in a file mapped from one of these waits for a network; if its server is gone, the
# fault is a signal instead of an error.
_NETWORK = re.compile(
    r"nfs\d?|cifs|smb3?|smbfs|9p|virtiofs|vboxsf|ceph|lustre|gpfs|glusterfs|orangefs|pvfs2|afs|"
    r"coda|beegfs|fuse(\..+)?"
)
ALIGN = 4096  # of files and memory, as reads past the page cache need it
WHY_MAPPED = "a mapping shares the page cache, and reads nothing twice"
ONE_COPY = "the machine has one node, so numa='mirror' is one copy"
MOSTLY = 0.5  # a file with this part in the page cache is read through it
_ANYWHERE = -1  # the key of a block that is not bound to a node
# The pieces that failed loads from servers have left on tapes, whose memory stays in place.
_ARRIVED: WeakKeyDictionary[Tape, Arrivals] = WeakKeyDictionary()


class Lifetime:
    """The lifetime of loaded data, shared by one `Weights`, its tensors and the tape they lie on.

    Any number of threads may ask; one may end it. A forked child has its own. `taken` is the array
    taken from a tape, which keeps the tape's memory for as long; else None.
    """

    __slots__ = ("__weakref__", "_ended", "name", "taken")

    def __init__(self, name: str) -> None:
        self.name = name
        self.taken: Any = None
        self._ended = ""

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self._ended != ""

    def end(self, how: str) -> None:
        """End it; later errors say how, as in "are closed". The first end counts."""
        self._ended = self._ended or how
        self.taken = None

    def check(self) -> None:
        """Raise ClosedError if it is over."""
        if self._ended:
            raise ClosedError(f"Weights '{self.name}' {self._ended}")


class LoadMemory(NamedTuple):
    """The place of one file's data in memory."""

    block: Block  # it may also hold data of other files
    file_offset: int
    block_offset: int
    nbytes: int
    lifetime: Lifetime


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The options of `open_weights`, where the docstring explains them."""

    load: Load = "auto"
    progress: Progress | None = None
    tape: Tape | None = None
    threads: int | None = None
    advice: AccessPattern | None = None
    verify: bool = True
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    part: FileRange | None = None
    budget: int | str | None = None
    # Why a plan maps a model that would be copied, since its mapped pages may be reclaimed.
    why_mapped: str = ""

    def check(self) -> None:
        """Check all options, in the same way for each mode; an error names the option."""
        if self.part is not None:
            self.part.check()
        check_load(self.load)
        check_tape(self.tape, self.placement)
        if self.budget is not None:
            parse_size(self.budget, "budget")
        if self.load == "stream":
            self._check_streamed()
        elif self.budget is not None:
            raise ValueError(
                f"budget={self.budget!r} is for load='stream', and load={self.load!r} has all "
                "weights in memory, or mapped: leave out one"
            )
        if self.tape is not None and self.load == "map":
            raise ValueError("load='map' maps the file, and takes nothing of a tape: leave out one")
        if self.threads is not None:
            integer(self.threads, "threads", 1)
        check_callable(self.progress)
        flag(self.verify, "verify")
        if self.advice is None:
            return
        one_of(self.advice, "advice", get_args(AccessPattern))
        # It is meant for a mapping, whatever `auto` chooses.
        if self.load in ("copy", "direct", "stream"):
            raise ValueError(
                f"advice={self.advice!r} is for mapped files, and load={self.load!r} reads them"
            )

    def _check_streamed(self) -> None:
        """Refuse options that streamed weights cannot have."""
        if self.tape is not None:
            raise ValueError(
                "tape: load='stream' makes memory of its own, whose size may change: leave out "
                "the tape, and give a budget"
            )
        if is_mirrored(self.placement):
            raise ValueError(
                f"numa={self.placement['numa']!r}: load='stream' has one pool of slots, and no "
                "copies on nodes: numa='interleave' uses the memory of all nodes"
            )


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """The chosen load mode, the reason, and the text of a warning.

    `exposed` says why mapped pages may be reclaimed, if that is the reason to copy. If there is no
    room for the copy beside everything else, the model is mapped after all.
    """

    mode: Literal["map", "copy", "direct", "stream"]
    reason: str
    warning: str = ""
    exposed: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory."""

    memory: tuple[LoadMemory, ...]  # one for each file; for a mirrored model, of the first copy
    blocks: tuple[Block, ...]  # each once
    choice: LoadChoice
    lifetime: Lifetime
    mapped_bytes: int  # bytes of the blocks, or those taken from a tape
    # For a mirrored model, the `memory` of the copy on each node.
    copies: Mapping[int, tuple[LoadMemory, ...]] = field(default_factory=dict)
    # For a streamed model, its pieces, and the ranges of each file that stay.
    stream: Stream | None = None
    kept: tuple[tuple[LoadMemory, ...], ...] = ()


class RoomFacts(policy.Facts, Protocol):
    """The resources and limits of a system: those of the module `limits`, or of a plan's budget."""

    def available_bytes(self) -> int:
        """Return the bytes that can be taken."""

    def memory_limits(self) -> tuple[limits.Limit, ...]:
        """Return every limit on memory."""


class NoDirectReadsError(Exception):
    """A file system has no reads past the page cache."""


def check_tape(tape: Tape | None, placement: PlacementOptions) -> None:
    """Check a tape and a placement; an error names the option."""
    if tape is not None and not isinstance(tape, Tape):
        raise TypeError(
            f"tape: expected a unimem.Tape, got {type(tape).__name__}: Weights.to_device brings "
            "a model to a GPU"
        )
    policy.check_options(placement)
    if tape is not None and placement:
        raise ValueError(f"{', '.join(placement)}: the tape's memory is placed already")


def load_model(model: ModelFiles, request: LoadRequest, undo: ExitStack) -> Loaded:
    """Bring the data of a model into memory, as `unimem.open_weights` does.

    The request is checked. `undo` takes the steps that give memory back, each before it is taken:
    until the caller empties it, an error leaves no block, and a tape as it was.
    """
    asked = request.placement
    request = replace(request, placement=without_lone_mirror(asked, limits))
    if isinstance(model, RemoteFiles):
        if request.load == "map":
            raise ValueError(
                f"load='map' of {model.path}: a file on a server cannot be mapped: load='direct' "
                "reads it into memory"
            )
        return read_model(model, request, LoadChoice("direct", "it is read from a server"), undo)
    choice = choose(model, request.load, request.tape, request.placement)
    if model.files[0].memory is not None and choice.mode == "direct":
        if request.load == "direct":
            raise ValueError("load='direct' of a buffer: it is in memory: load='copy' copies it")
        choice = replace(choice, mode="copy")
    if asked is not request.placement:
        choice = replace(choice, reason=f"{choice.reason}; {ONE_COPY}")
    if choice.exposed and request.why_mapped:
        choice = LoadChoice("map", request.why_mapped)
    if choice.warning:
        policy.warn(choice.warning)
    if request.load == "map":
        _check_mapping_placement(model, request.placement)
    if choice.mode == "map":
        return _map(model, choice, undo, request.advice)
    try:
        return read_model(model, request, choice, undo)
    except NoDirectReadsError:
        undo.close()
    return read_model(model, request, _choose_buffered(model, request, choice), undo)


def way_of(path: object, load: EngineLoad, budget: int | str | None = None) -> EngineLoad:
    """Return the load mode to plan for.

    A model from a server is planned by its headers, and read instead of mapped. ValueError if it
    would be streamed, for which a `budget` asks, too.
    """
    check_load(load, for_engine=True)
    if not is_url(path):
        return load
    if load == "stream" or budget is not None:
        raise ValueError(
            f"load='stream' of {shown(path)}: pieces are read again and again, from a local disk: "
            "copy the model there first; um.stage keeps one from a server in memory, if it fits"
        )
    return "direct" if load == "auto" else load


def check_load(load: object, *, for_engine: bool = False) -> None:
    """Raise ValueError for anything but a `Load`, or an `EngineLoad` for the engine."""
    one_of(load, "load", get_args(EngineLoad if for_engine else Load))


def choose(
    model: ModelFiles,
    load: Load,
    tape: Tape | None,
    placement: PlacementOptions,
    facts: RoomFacts = limits,
    pressures: Sequence[Pressure] | None = None,
) -> LoadChoice:
    """Choose how to load a model, without reading it.

    A plan passes `facts` and `pressures` of the machine that it is for, and gets the choice that
    the load will make there.
    """
    if load != "auto":
        return LoadChoice(load, "it was asked for")
    network = next(
        (kind for kind in map(_file_system, model.files) if _NETWORK.fullmatch(kind)), ""
    )
    is_wish, exposed = True, ""
    if tape is not None:
        why = "a tape was given"
    elif placement.get("pages", "auto") not in ("auto", "4k"):
        why = f"pages='{placement['pages']}' cannot be had for a mapped file"
    elif placement.get("numa") is not None:
        why = f"numa='{placement['numa']}' cannot be had for a mapped file"
    elif network:
        is_wish = False
        why = f"a mapping on {network} would wait for the network with every fault"
    else:
        is_wish = False
        if not placement.get("lock"):  # locked pages stay
            exposed = why_model_exposed(model.files, facts, pressures)
        if not exposed:
            return LoadChoice("map", WHY_MAPPED)
        why = exposed
    # A mapping fits where a copy does not: the kernel drops its pages when it must.
    needed, room = copy_bytes(model), facts.available_bytes()
    if is_mirrored(placement):
        needed *= max(1, len(choose_copies(needed, placement, facts).nodes))
    if tape is None and needed > room and not _fits_pool(needed, placement, facts):
        why += f", but a copy of {format_bytes(needed)} does not fit into {format_bytes(room)}"
        if exposed or not placement.get("strict"):
            warning = f"load='auto' maps {model.files[0].path}: {why}" if is_wish else ""
            return LoadChoice("map", why, warning)
        facts.require(needed, f"a copy of {model.files[0].path}")  # for a plan, this returns
    cached, total = cached_bytes(model), sum(file.nbytes for file in model.files)
    why += f"; {cached / total:.0%} of the file are in the page cache"
    if cached < total and any(block._is_cache_hidden for block in _mapped_files(model)):
        why += ", as far as the kernel tells this user, who neither owns nor may write it"
    return LoadChoice("copy" if cached >= MOSTLY * total else "direct", why, exposed=exposed)


def why_model_exposed(
    files: Iterable[ModelFile],
    facts: RoomFacts = limits,
    pressures: Sequence[Pressure] | None = None,
) -> str:
    """Explain why a mapped model's pages may be reclaimed; "" if they are safe.

    Files in shared memory, such as those of a staged model, are safe.
    """
    nbytes = sum(file.nbytes for file in files if not file.in_memory)
    pressures = memory_pressure() if pressures is None else pressures
    return why_exposed(nbytes, facts.memory_limits(), pressures)


def _fits_pool(nbytes: int, placement: PlacementOptions, facts: RoomFacts) -> bool:
    """Whether a block of this size would get hugetlb pages, which do not count as room in RAM."""
    numa = None if is_mirrored(placement) else policy.parse_numa(placement.get("numa"))
    request = policy.Request(nbytes, placement.get("pages", "auto"), numa)
    return policy.decide(request, facts).pages in policy.HUGETLB


def _choose_buffered(model: ModelFiles, request: LoadRequest, choice: LoadChoice) -> LoadChoice:
    """Choose a mode for a file system that cannot be read past the page cache."""
    why = f"{_file_system(model.files[0])} has no reads past the page cache (O_DIRECT)"
    if request.load == "direct":
        text = f"load='direct' of {model.files[0].path}: {why}: load='copy' reads through it"
        _raise_or_warn(text, request.placement)
    return LoadChoice("copy", f"{choice.reason}; {why}")


def _raise_or_warn(text: str, placement: PlacementOptions) -> None:
    if placement.get("strict"):
        raise PlacementError(text)
    policy.warn(text)


def _file_system(file: ModelFile) -> str:
    """Return the type of a file's file system, as in ``mount``; "" if unknown."""
    device = file.version[0]
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in (read_text("/proc/self/mountinfo") or "").splitlines():
        head, _, tail = line.partition(" - ")
        if head.split()[2] == wanted:
            return tail.split()[0]
    return ""


def cached_bytes(model: ModelFiles) -> int:
    """Return how much of the files is in the page cache, as far as the kernel tells this user."""
    return sum(
        min(block._resident_range(0, block.nbytes), block.nbytes) for block in _mapped_files(model)
    )


def _mapped_files(model: ModelFiles) -> Iterator[Block]:
    # Files on a server have no descriptors, and are not in the page cache.
    for file, fd in zip(model.files, model.fds, strict=False):
        with _map_file(file, fd)[0] as block:
            yield block


def _map_file(file: ModelFile, fd: int) -> tuple[Block, int]:
    """Map a file, in whole pages; return the mapping, and the file's offset in it."""
    page = max(mmap.PAGESIZE, os.fstatvfs(fd).f_bsize if file.begin and file.in_memory else 0)
    first = file.begin // page * page
    block = Block._map_fd(fd, first, file.end - first, "r", file.path)
    return block, file.begin - first


def copy_bytes(model: ModelFiles) -> int:
    """Return the size of a copy, before it is rounded to pages."""
    return _layout_of(model)[1]


def unloaded_memory(model: ModelFiles) -> tuple[LoadMemory, ...]:
    """Return empty memory for files whose headers alone are read."""
    lifetime = Lifetime(model.files[0].path)
    lifetime.end("were not opened")
    block = cast(Block, None)  # never reached: the lifetime has ended
    return tuple(LoadMemory(block, 0, 0, file.nbytes, lifetime) for file in model.files)


def _map(
    model: ModelFiles, choice: LoadChoice, undo: ExitStack, advice: AccessPattern | None
) -> Loaded:
    lifetime = Lifetime(model.files[0].path)
    memory: list[LoadMemory] = []
    for i, file in enumerate(model.files):
        try:
            block, at = _map_file(file, model.fds[i]) if file.memory is None else _lend(file)
        except ValueError:  # the range was inside the file when its header was read
            raise OSError(errno.EIO, "The file has become shorter", file.path) from None
        undo.enter_context(block)
        memory.append(LoadMemory(block, file.begin, at, file.nbytes, lifetime))
        if advice is not None:
            block.advise(advice)
    model.check_versions()
    nbytes = sum(file.nbytes for file in model.files)
    blocks = tuple(each.block for each in memory)
    return Loaded(tuple(memory), blocks, choice, lifetime, nbytes)


def _lend(file: ModelFile) -> tuple[Block, int]:
    """Look at the memory of a buffer; return that, and the file's offset in it."""
    assert file.memory is not None
    block = Block._lent(file.memory, file.path)
    start = np.frombuffer(file.memory, np.uint8).ctypes.data
    return block, start + file.begin - block.address


def _check_mapping_placement(model: ModelFiles, placement: PlacementOptions) -> None:
    pages, numa = placement.get("pages", "auto"), placement.get("numa")
    asked = [f"pages='{pages}'"] if pages not in ("auto", "4k") else []
    asked += [f"numa='{numa}'"] if is_mirrored(placement) else []  # pages can move to other nodes
    if asked:
        text = (
            f"mapping {model.files[0].path}: {', '.join(asked)}: the pages of a mapped file are "
            "the page cache's: load='copy' or 'direct' puts a copy in place"
        )
        _raise_or_warn(text, placement)


class FileSlot(NamedTuple):
    """The range of a file to read, and its place among all of the data."""

    file_offset: int
    nbytes: int
    at: int
    file: int


def _layout_of(model: ModelFiles) -> tuple[list[FileSlot], int]:
    """Lay out the files' data one after the other; return the slots and their total size."""
    slots = []
    end = 0
    for i, file in enumerate(model.files):
        first = file.header.data_offset // ALIGN * ALIGN
        nbytes = max(0, file.header.data_end - first)
        slots.append(FileSlot(first, nbytes, end, i))
        end += -(-nbytes // ALIGN) * ALIGN
    return slots, max(end, ALIGN)


def read_model(
    model: ModelFiles,
    request: LoadRequest,
    choice: LoadChoice,
    undo: ExitStack,
    layout: tuple[list[FileSlot], int] | None = None,
) -> Loaded:
    """Read the data of a model into memory, or the slots of `layout`, as in `load_model`."""
    slots, nbytes = layout or _layout_of(model)
    tape, path = request.tape, model.files[0].path

    def fill(block: Block, base: int = 0) -> None:
        if isinstance(model, RemoteFiles):
            _fetch(model, request, slots, block, base)
        elif (memory := model.files[0].memory) is not None:
            slot = slots[0]
            with rows_of_block(block, [(base + slot.at, slot.nbytes)]) as rows:
                end = slot.file_offset + slot.nbytes
                rows[0][:] = np.frombuffer(memory, np.uint8)[slot.file_offset : end]
            if request.progress is not None:
                request.progress(slot.nbytes, slot.nbytes)
        else:
            parts = [
                (
                    model.fds[slot.file],
                    slot.file_offset,
                    block,
                    base + slot.at,
                    slot.nbytes,
                    model.files[slot.file].path,
                )
                for slot in slots
            ]
            read = read_direct if choice.mode == "direct" else read_parts
            read(parts, threads=request.threads, progress=request.progress)
        if tape is None:  # warm the rest of the last page, too
            end = max((slot.at + slot.nbytes for slot in slots), default=0)
            block._warm_range(end, block.nbytes - end)
        model.check_versions()

    lifetime = Lifetime(path)
    if tape is not None:
        block, base = tape.block, take_room(tape, nbytes, lifetime, undo)
        block._require_room([(base, nbytes)])
        fill(block, base)
        if block.closed:
            lifetime.end("lay on a tape that was closed")
        lifetime.check()
        memory = _memory_of(slots, block, base, lifetime)
        return Loaded(memory, (block,), choice, lifetime, nbytes)
    blocks = _fill_blocks(path, nbytes, fill, undo, request.placement)
    copies = {node: _memory_of(slots, block, 0, lifetime) for node, block in blocks.items()}
    first, *_ = copies.values()
    copies.pop(_ANYWHERE, None)
    nbytes = sum(block.nbytes for block in blocks.values())
    return Loaded(first, tuple(blocks.values()), choice, lifetime, nbytes, copies)


def _fetch(
    model: RemoteFiles, request: LoadRequest, slots: list[FileSlot], block: Block, base: int
) -> None:
    """Read the data of files on a server; a tape remembers the pieces until all have arrived."""
    tape = request.tape
    arrivals = None if tape is None else _ARRIVED.setdefault(tape, Arrivals())
    with rows_of_block(block, [(base + slot.at, slot.nbytes) for slot in slots]) as rows:
        model.read_data(
            list(zip((slot.file_offset for slot in slots), rows, strict=True)),
            verify=request.verify,
            threads=request.threads,
            progress=request.progress,
            arrivals=arrivals,
        )
    if tape is not None:
        _ARRIVED.pop(tape, None)


@contextmanager
def rows_of_block(
    block: Block, ranges: Iterable[tuple[int, int]]
) -> Iterator[list[NDArray[np.uint8]]]:
    """Lend the bytes of ranges (offset, size); not even an error refers to them afterwards."""
    rows = [block.as_array("uint8", nbytes, at) for at, nbytes in ranges]
    try:
        yield rows
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # those of threads would keep the memory
        raise
    finally:
        rows.clear()


def _memory_of(
    slots: Iterable[FileSlot], block: Block, base: int, lifetime: Lifetime
) -> tuple[LoadMemory, ...]:
    return tuple(
        LoadMemory(block, slot.file_offset, base + slot.at, slot.nbytes, lifetime) for slot in slots
    )


def _fill_blocks(
    path: str,
    nbytes: int,
    fill: Callable[[Block], None],
    undo: ExitStack,
    placement: PlacementOptions,
) -> dict[int, Block]:
    """Fill a block, or one on each node that gets a copy; later ones are copied from the first."""
    options = {key: value for key, value in placement.items() if key != "warm"}  # it is warm anyway
    nodes: tuple[int, ...] = ()
    if is_mirrored(placement):
        nodes, options["numa"] = nodes_for_copies(path, nbytes, placement), None
    blocks: dict[int, Block] = {}
    for node in nodes or (_ANYWHERE,):
        if nodes:
            options["numa"] = f"bind:{node}"
        first = next(iter(blocks.values()), None)
        block = Block._filled(
            nbytes,
            fill if first is None else copy_from(first, nbytes, node),
            name=f"{path} (copy on node {node})" if nodes else path,
            category="weights",
            **options,  # type: ignore[arg-type]
        )
        blocks[node] = undo.enter_context(block)
    return blocks


def take_room(tape: Tape, nbytes: int, lifetime: Lifetime, undo: ExitStack) -> int:
    """Take memory from a tape, and return its offset in the tape's block."""
    mark = tape.mark()
    # Block and tape begin at a page. If another thread takes from the tape meanwhile, the offset
    # differs from this one, and the space stays allocated.
    base = -(-mark // ALIGN) * ALIGN

    def give_back() -> None:
        lifetime.end("were not loaded")
        if not tape.closed and tape.used_bytes == base + nbytes:
            tape.rewind(mark)

    undo.callback(give_back)
    lifetime.taken = tape.take_bytes(nbytes, align=ALIGN)
    at = int(lifetime.taken.ctypes.data) - tape.block.address
    tape._tell(lifetime, at + nbytes)
    return at


def read_direct(
    parts: Sequence[Range], *, threads: int | None = None, progress: Progress | None = None
) -> None:
    """Read ranges of files past the page cache, as `unimem._core.load.load` does.

    NoDirectReadsError says that a file system has no such reads; some ranges may have been read.
    """
    raised = False

    def tell(done: int, total: int) -> None:
        nonlocal raised
        try:
            if progress is not None:
                progress(done, total)
        except BaseException:
            raised = True  # its errors are not the file system's
            raise

    def direct(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_DIRECT)

    with ExitStack() as opened:
        try:
            # Opened by their descriptors: other files may have their paths by now. Python's file
            # objects are closed even if an interrupt comes before they are kept.
            files = {
                fd: opened.enter_context(
                    open(f"/proc/self/fd/{fd}", "rb", buffering=0, opener=direct)
                )
                for fd in dict.fromkeys(part[0] for part in parts)
            }
            read_parts(
                [(files[part[0]].fileno(), *part[1:]) for part in parts],
                threads=threads,
                direct=True,
                progress=None if progress is None else tell,
            )
        except OSError as error:
            if error.errno != errno.EINVAL or raised:
                raise
            raise NoDirectReadsError from error
