"""How the data of a model comes into memory: mapped, copied, or read past the page cache."""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, cast, get_args
from weakref import WeakKeyDictionary

from unimem._core.block import Block
from unimem._core.load import load as read_parts
from unimem._core.tape import Tape
from unimem.base.arguments import check_callable, integer, one_of
from unimem.base.kernel_files import read_text
from unimem.base.text import format_bytes
from unimem.errors import ClosedError, PlacementError
from unimem.remote.arrivals import Arrivals
from unimem.system import limits, policy
from unimem.system.placement import PlacementOptions
from unimem.system.pressure import Pressure, memory_pressure, why_exposed
from unimem.weights.files import ModelFile, ModelFiles
from unimem.weights.node_copies import (
    choose_copies,
    copy_from,
    is_mirrored,
    nodes_for_copies,
    without_lone_mirror,
)
from unimem.weights.remote_files import RemoteFiles, is_url

__all__ = [
    "EngineLoad",
    "Lifetime",
    "Load",
    "LoadChoice",
    "LoadMemory",
    "Loaded",
    "NoDirectReadsError",
    "Progress",
    "RoomFacts",
    "cached_bytes",
    "check_load",
    "check_request",
    "check_tape",
    "choose",
    "copy_bytes",
    "load_model",
    "read_direct",
    "take_room",
    "unloaded_memory",
    "way_of",
    "why_model_exposed",
]

Load = Literal["auto", "map", "copy", "direct"]
EngineLoad = Literal["auto", "map", "copy", "direct", "repack"]
"""How a model comes into memory for the engine: as `Load`, or in ggml's order (`um.repack`)."""

AccessPattern = Literal["willneed", "sequential", "random"]
Progress = Callable[[int, int], object]
# As `unimem._core.load.load` takes them.
Range = tuple[int, int, Block, int, int, str]

# A mapping of a file on one of these waits for a network with every fault, and a server that is
# gone is a signal instead of an error.
_NETWORK = re.compile(
    r"nfs\d?|cifs|smb3?|smbfs|9p|virtiofs|vboxsf|ceph|lustre|gpfs|glusterfs|orangefs|pvfs2|afs|"
    r"coda|beegfs|fuse(\..+)?"
)
_ALIGN = 4096  # of files and memory, for reads past the page cache
WHY_MAPPED = "a mapping shares the page cache, and reads nothing twice"
ONE_COPY = "the machine has one node, so numa='mirror' is one copy"
MOSTLY = 0.5  # of a file in the page cache: then it is read through it
_ANYWHERE = -1  # stands for the node of memory that is no copy on one
# What loads from servers have left on tapes: their memory stays where it is when a load fails.
_ARRIVED: WeakKeyDictionary[Tape, Arrivals] = WeakKeyDictionary()


class Lifetime:
    """How long what was loaded is there: of one `Weights`, its tensors, and the tape they lie on.

    Any number of threads may ask; ending it is for one. A forked child has its own.

    Parameters
    ----------
    name : str
        What was loaded, for messages.

    Attributes
    ----------
    taken : object
        What was taken of a tape, which keeps the tape's memory as long; else None.
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
        """End it; how, as in "are closed", is told from then on. What ends it first counts."""
        self._ended = self._ended or how
        self.taken = None

    def check(self) -> None:
        """Raise ClosedError when it is over."""
        if self._ended:
            raise ClosedError(f"Weights '{self.name}' {self._ended}")


class LoadMemory(NamedTuple):
    """Where the data of one file lies.

    Attributes
    ----------
    block : Block
        The mapping, which may hold other files' data too.
    file_offset, nbytes : int
        What of the file is there.
    block_offset : int
        Where in the block it begins.
    lifetime : Lifetime
        How long it lies there.
    """

    block: Block
    file_offset: int
    block_offset: int
    nbytes: int
    lifetime: Lifetime


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """How a model is brought into memory, and why so; and what of the request that leaves out.

    Attributes
    ----------
    mode : {"map", "copy", "direct"}
        How.
    reason, warning : str
        Why, and what is to be warned of.
    exposed : str
        Why pages of a mapping could be taken away, where that is the reason: a mapping still is
        better than nothing, where all else has no room for the copy.
    """

    mode: Literal["map", "copy", "direct"]
    reason: str
    warning: str = ""
    exposed: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory.

    Attributes
    ----------
    memory : tuple of LoadMemory
        One a file, in the files' order; of a mirrored model, those of the first copy.
    blocks : tuple of Block
        The blocks they lie in, each once.
    choice : LoadChoice
        What was done.
    lifetime : Lifetime
        How long it is there.
    mapped_bytes : int
        Bytes of the blocks, or what was taken of a tape.
    copies : mapping of int to tuple of LoadMemory
        Of a mirrored model, what `memory` is of the copy on each node; else empty.
    """

    memory: tuple[LoadMemory, ...]
    blocks: tuple[Block, ...]
    choice: LoadChoice
    lifetime: Lifetime
    mapped_bytes: int
    copies: Mapping[int, tuple[LoadMemory, ...]] = field(default_factory=dict)


class RoomFacts(policy.Facts, Protocol):
    """What a system has and allows, of which the module `limits` is one, and a plan's budget."""

    def available_bytes(self) -> int:
        """Return the bytes that can be taken."""

    def memory_limits(self) -> tuple[limits.Limit, ...]:
        """Return every limit on memory."""


class NoDirectReadsError(Exception):
    """A file system has no reads past the page cache."""


class _ProgressCallback:
    """A progress callback, and whether it raised: its errors are not the file system's."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.raised = False

    def __call__(self, done: int, total: int) -> None:
        try:
            self._progress(done, total)
        except BaseException:
            self.raised = True
            raise


def check_request(
    load: Load,
    *,
    tape: Tape | None,
    threads: int | None,
    advice: AccessPattern | None,
    progress: Progress | None,
    placement: PlacementOptions,
) -> None:
    """Check what `load_model` takes, the same for each mode, before a file is opened.

    Raises
    ------
    TypeError, ValueError
        An option that is none, or does not go with another; the message names it.
    """
    check_load(load)
    check_tape(tape, placement)
    if tape is not None and load == "map":
        raise ValueError("load='map' maps the file, and takes nothing of a tape: leave out one")
    if threads is not None:
        integer(threads, "threads", 1)
    check_callable(progress)
    if advice is not None:
        one_of(advice, "advice", get_args(AccessPattern))
    # An option that holds for mappings alone was meant for one, whatever `auto` takes.
    if advice is not None and load in ("copy", "direct"):
        raise ValueError(f"advice={advice!r} is for mapped files, and load={load!r} reads them")


def check_tape(tape: Tape | None, placement: PlacementOptions) -> None:
    """Check where weights shall lie; an error names the option."""
    if tape is not None and not isinstance(tape, Tape):
        raise TypeError(
            f"tape: expected a unimem.Tape, got {type(tape).__name__}: Weights.to_device brings "
            "a model to a GPU"
        )
    policy.check_options(placement)
    if tape is not None and placement:
        raise ValueError(f"{', '.join(placement)}: the tape's memory is placed already")


def load_model(
    model: ModelFiles,
    load: Load,
    undo: ExitStack,
    *,
    tape: Tape | None,
    threads: int | None,
    advice: AccessPattern | None,
    progress: Progress | None,
    placement: PlacementOptions,
    why_mapped: str = "",
    verify: bool = True,
) -> Loaded:
    """Bring the data of a model into memory: see `unimem.open_weights`, and `check_request` first.

    What gives it back is on `undo` before it is taken: until the caller empties that, whatever is
    raised leaves no block, and a tape as it was. `why_mapped` is why a plan maps what is better
    copied, since pages of a mapping could be taken away. `verify` is for files on a server.
    """
    asked, placement = placement, without_lone_mirror(placement, limits)
    if isinstance(model, RemoteFiles):
        choice = _choose_remote(model, load)
        return _read(model, choice, undo, tape, threads, progress, placement, verify)
    choice = choose(model, load, tape, placement)
    if asked is not placement:
        choice = replace(choice, reason=f"{choice.reason}; {ONE_COPY}")
    if choice.exposed and why_mapped:
        choice = LoadChoice("map", why_mapped)
    if choice.warning:
        policy.warn(choice.warning)
    if load == "map":
        _check_mapping_placement(model, placement)
    if choice.mode == "map":
        return _map(model, choice, undo, advice)
    try:
        return _read(model, choice, undo, tape, threads, progress, placement)
    except NoDirectReadsError:
        undo.close()
    choice = _choose_buffered(model, choice, load, placement)
    return _read(model, choice, undo, tape, threads, progress, placement)


def way_of(path: object, load: EngineLoad) -> EngineLoad:
    """Return how a model comes into memory of which a plan is to be made, before it is loaded.

    A plan of a URL is that of its file. What is loaded from a server is read, and not mapped.
    """
    check_load(load, for_engine=True)
    return "direct" if load == "auto" and is_url(path) else load


# ---- the choice -------------------------------------------------------------------------------


def check_load(load: object, *, for_engine: bool = False) -> None:
    """Raise ValueError for what is no `Load`, or for the engine no `EngineLoad`."""
    one_of(load, "load", get_args(EngineLoad if for_engine else Load))


def choose(
    model: ModelFiles,
    load: Load,
    tape: Tape | None,
    placement: PlacementOptions,
    facts: RoomFacts = limits,
    pressures: Sequence[Pressure] | None = None,
) -> LoadChoice:
    """Choose how a model is brought into memory; nothing of it is read.

    A plan gives its own `facts` and `pressures`: it asks as the load will, of the machine that it
    is for.
    """
    if load != "auto":
        return LoadChoice(load, "it was asked for")
    network = next(
        (kind for kind in map(_file_system, model.files) if _NETWORK.fullmatch(kind)), ""
    )
    unkept, exposed = True, ""
    if tape is not None:
        why = "a tape was given"
    elif placement.get("pages", "auto") not in ("auto", "4k"):
        why = f"pages='{placement['pages']}' cannot be had for a mapped file"
    elif placement.get("numa") is not None:
        why = f"numa='{placement['numa']}' cannot be had for a mapped file"
    elif network:
        unkept = False
        why = f"a mapping on {network} would wait for the network with every fault"
    else:
        unkept = False
        if not placement.get("lock"):  # what is locked stays
            exposed = why_model_exposed(model.files, facts, pressures)
        if not exposed:
            return LoadChoice("map", WHY_MAPPED)
        why = exposed
    # Where it does not fit, a mapping still does: the kernel drops its pages when it must.
    needed, room = _layout_of(model)[1], facts.available_bytes()
    if is_mirrored(placement):
        needed *= max(1, len(choose_copies(needed, placement, facts).nodes))
    if tape is None and needed > room and not _fits_pool(needed, placement, facts):
        why += f", but a copy of {format_bytes(needed)} does not fit into {format_bytes(room)}"
        if exposed or not placement.get("strict"):
            warning = f"load='auto' maps {model.files[0].path}: {why}" if unkept else ""
            return LoadChoice("map", why, warning)
        facts.require(needed, f"a copy of {model.files[0].path}")  # a plan goes on, and says so
    cached, total = cached_bytes(model), sum(file.nbytes for file in model.files)
    why += f"; {cached / total:.0%} of the file are in the page cache"
    if cached < total and _is_cache_hidden(model):
        why += ", as far as the kernel tells this user, who neither owns nor may write it"
    return LoadChoice("copy" if cached >= MOSTLY * total else "direct", why, exposed=exposed)


def why_model_exposed(
    files: Iterable[ModelFile],
    facts: RoomFacts = limits,
    pressures: Sequence[Pressure] | None = None,
) -> str:
    """Say why pages of a model could be taken away that is mapped; "" where nothing presses.

    Files that lie in shared memory, as those of a staged model, stay there.
    """
    nbytes = sum(file.nbytes for file in files if not file.in_memory)
    pressures = memory_pressure() if pressures is None else pressures
    return why_exposed(nbytes, facts.memory_limits(), pressures)


def _fits_pool(nbytes: int, placement: PlacementOptions, facts: RoomFacts) -> bool:
    """Whether a block of this size would be of hugetlb pages, which are not of the room in RAM."""
    numa = None if is_mirrored(placement) else policy.parse_numa(placement.get("numa"))
    request = policy.Request(nbytes, placement.get("pages", "auto"), numa)
    return policy.decide(request, facts).pages in policy.HUGETLB


def _choose_remote(model: RemoteFiles, load: Load) -> LoadChoice:
    if load == "map":
        raise ValueError(
            f"load='map' of {model.path}: a file on a server cannot be mapped: load='direct' reads "
            "it into memory"
        )
    return LoadChoice("direct", "it is read from a server")


def _choose_buffered(
    model: ModelFiles, choice: LoadChoice, load: Load, placement: PlacementOptions
) -> LoadChoice:
    """Choose what to do on a file system that cannot be read past the page cache."""
    why = f"{_file_system(model.files[0])} has no reads past the page cache (O_DIRECT)"
    if load == "direct":
        text = f"load='direct' of {model.files[0].path}: {why}: load='copy' reads through it"
        if placement.get("strict"):
            raise PlacementError(text)
        policy.warn(text)
    return LoadChoice("copy", f"{choice.reason}; {why}")


def _file_system(file: ModelFile) -> str:
    """Return the type of the file system that a file is on, as in ``mount``; "" if unknown."""
    device = file.version[0]
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in (read_text("/proc/self/mountinfo") or "").splitlines():
        head, _, tail = line.partition(" - ")
        if head.split()[2] == wanted:
            return tail.split()[0]
    return ""


def cached_bytes(model: ModelFiles) -> int:
    """Bytes of the files that are in the page cache, as far as the kernel tells this user."""
    found = 0
    for block in _mapped_files(model):
        found += min(block._resident_range(0, block.nbytes), block.nbytes)
    return found


def _is_cache_hidden(model: ModelFiles) -> bool:
    return any(block._is_cache_hidden for block in _mapped_files(model))


def _mapped_files(model: ModelFiles) -> Iterator[Block]:
    # Files on a server have no descriptors, and nothing of them is in the page cache.
    for file, fd in zip(model.files, model.fds, strict=False):
        with Block._map_fd(fd, 0, file.nbytes, "r", file.path) as block:
            yield block


def copy_bytes(model: ModelFiles) -> int:
    """Tell what a copy asks for, before it is rounded to pages."""
    return _layout_of(model)[1]


# ---- mapped -----------------------------------------------------------------------------------


def unloaded_memory(model: ModelFiles) -> tuple[LoadMemory, ...]:
    """Return the memory of a model of which only the headers are read: none."""
    lifetime = Lifetime(model.files[0].path)
    lifetime.end("were not opened")
    block = cast(Block, None)  # never reached: the lifetime has ended
    return tuple(LoadMemory(block, 0, 0, file.nbytes, lifetime) for file in model.files)


def _map(
    model: ModelFiles, choice: LoadChoice, undo: ExitStack, advice: AccessPattern | None
) -> Loaded:
    lifetime = Lifetime(model.files[0].path)
    blocks: list[Block] = []
    for file, fd in zip(model.files, model.fds, strict=True):
        try:
            blocks.append(undo.enter_context(Block._map_fd(fd, 0, file.nbytes, "r", file.path)))
        except ValueError:  # the range was inside the file when its header was read
            raise OSError(errno.EIO, "The file has become shorter", file.path) from None
        if advice is not None:
            blocks[-1].advise(advice)
    model.check_versions()
    memory = tuple(LoadMemory(block, 0, 0, block.nbytes, lifetime) for block in blocks)
    nbytes = sum(file.nbytes for file in model.files)
    return Loaded(memory, tuple(blocks), choice, lifetime, nbytes)


def _check_mapping_placement(model: ModelFiles, placement: PlacementOptions) -> None:
    pages, numa = placement.get("pages", "auto"), placement.get("numa")
    asked = [f"pages='{pages}'"] if pages not in ("auto", "4k") else []
    asked += [f"numa='{numa}'"] if is_mirrored(placement) else []  # to other nodes, pages move
    if asked:
        text = (
            f"mapping {model.files[0].path}: {', '.join(asked)}: the pages of a mapped file are "
            "the page cache's: load='copy' or 'direct' puts a copy where it shall be"
        )
        if placement.get("strict"):
            raise PlacementError(text)
        policy.warn(text)


# ---- read -------------------------------------------------------------------------------------


class _Slot(NamedTuple):
    """What of a file is read, and where it shall be among all of the data."""

    file_offset: int
    nbytes: int
    at: int


def _layout_of(model: ModelFiles) -> tuple[list[_Slot], int]:
    """Lay the files' data out one behind the other; and tell the bytes of it all."""
    slots = []
    end = 0
    for file in model.files:
        first = file.header.data_offset // _ALIGN * _ALIGN
        nbytes = max(0, _data_end(file) - first)
        slots.append(_Slot(first, nbytes, end))
        end += -(-nbytes // _ALIGN) * _ALIGN
    return slots, max(end, _ALIGN)


def _data_end(file: ModelFile) -> int:
    rows = (file.header.tensor(i) for i in file.header.tensor_names().values())
    return max((offset + nbytes for _, _, _, offset, nbytes in rows), default=0)


def _read(
    model: ModelFiles,
    choice: LoadChoice,
    undo: ExitStack,
    tape: Tape | None,
    threads: int | None,
    progress: Progress | None,
    placement: PlacementOptions,
    verify: bool = True,
) -> Loaded:
    slots, nbytes = _layout_of(model)

    def fill(block: Block, base: int = 0) -> None:
        if isinstance(model, RemoteFiles):
            rows = [
                (slot.file_offset, block.as_array("uint8", slot.nbytes, base + slot.at))
                for slot in slots
            ]
            arrivals = None if tape is None else _ARRIVED.setdefault(tape, Arrivals())
            try:
                model.read_data(
                    rows, verify=verify, threads=threads, progress=progress, arrivals=arrivals
                )
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # the threads', which keep the memory
                raise
            finally:
                rows.clear()
            if tape is not None:
                _ARRIVED.pop(tape, None)
        else:
            parts = [
                (fd, slot.file_offset, block, base + slot.at, slot.nbytes, file.path)
                for file, fd, slot in zip(model.files, model.fds, slots, strict=True)
            ]
            read = read_direct if choice.mode == "direct" else read_parts
            read(parts, threads=threads, progress=progress)
        if tape is None:  # what is left of whole pages shall be there, too
            end = max(slot.at + slot.nbytes for slot in slots)
            block._warm_range(end, block.nbytes - end)
        model.check_versions()

    lifetime = Lifetime(model.files[0].path)
    if tape is not None:
        block, base = tape.block, take_room(tape, nbytes, lifetime, undo)
        block._require_room([(base, nbytes)])
        fill(block, base)
        if block.closed:
            lifetime.end("lay on a tape that was closed")
        lifetime.check()
    else:
        blocks = _fill_blocks(model.files[0].path, nbytes, fill, undo, placement)
        copies = {node: _memory_of(slots, block, 0, lifetime) for node, block in blocks.items()}
        first, *_ = copies.values()
        copies.pop(_ANYWHERE, None)
        nbytes = sum(block.nbytes for block in blocks.values())
        return Loaded(first, tuple(blocks.values()), choice, lifetime, nbytes, copies)
    return Loaded(_memory_of(slots, block, base, lifetime), (block,), choice, lifetime, nbytes)


def _memory_of(
    slots: Iterable[_Slot], block: Block, base: int, lifetime: Lifetime
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
    """Fill a block, or one for each node that gets a copy: the others are copied from the first."""
    options = {key: value for key, value in placement.items() if key != "warm"}  # it is anyway
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
    """Take memory of a tape, and tell where in its block it is."""
    mark = tape.mark()
    # The block begins with a page, and the tape with the block. Where others take something at this
    # moment, it is not so, and all stays taken.
    base = -(-mark // _ALIGN) * _ALIGN

    def give_back() -> None:
        lifetime.end("were not loaded")
        if not tape.closed and tape.used_bytes == base + nbytes:
            tape.rewind(mark)

    undo.callback(give_back)
    lifetime.taken = tape.take_bytes(nbytes, align=_ALIGN)
    at = int(lifetime.taken.ctypes.data) - tape.block.address
    tape._tell(lifetime, at + nbytes)
    return at


def read_direct(
    parts: Sequence[Range], *, threads: int | None = None, progress: Progress | None = None
) -> None:
    """Read ranges of files past the page cache: see `unimem._core.load.load`.

    Raises
    ------
    NoDirectReadsError
        A file system has no such reads; what was read by then may be read anew.
    """

    def direct(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_DIRECT)

    callback = None if progress is None else _ProgressCallback(progress)
    with ExitStack() as opened:
        try:
            # By their descriptors, for others may have their paths by now. Python's files are
            # closed even where an interrupt comes before they are kept.
            files = [
                opened.enter_context(
                    open(f"/proc/self/fd/{part[0]}", "rb", buffering=0, opener=direct)
                )
                for part in parts
            ]
            read_parts(
                [(file.fileno(), *part[1:]) for file, part in zip(files, parts, strict=True)],
                threads=threads,
                direct=True,
                progress=callback,
            )
        except OSError as error:
            if error.errno != errno.EINVAL or (callback is not None and callback.raised):
                raise
            raise NoDirectReadsError from error
