"""How the data of a model comes into memory: mapped, copied, or read past the page cache."""

from __future__ import annotations

import errno
import mmap
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from unimem import limits, placing
from unimem._core.block import Block
from unimem._core.load import load as read_parts
from unimem._core.tape import Tape
from unimem._core.tmpfs import huge_page_bytes
from unimem.errors import PlacementError
from unimem.model_file import Model, ModelFile
from unimem.placement import Pages, PlacementOptions, format_bytes

__all__ = [
    "Choice",
    "Load",
    "Loaded",
    "Memory",
    "Progress",
    "bring",
    "bytes_needed",
    "cached_bytes",
    "check_load",
    "choose",
    "mapped",
]

Load = Literal["auto", "map", "copy", "direct"]
Advice = Literal["willneed", "sequential", "random"]
Progress = Callable[[int, int], object]

# A mapping of a file on one of these waits for a network with every fault, and a server that is
# gone is a signal instead of an error.
_NETWORK = re.compile(r"nfs\d?|cifs|smb3?|9p|ceph|lustre|gpfs|glusterfs|afs|beegfs|fuse\..+")
_PAGES_BYTES = {"4k": mmap.PAGESIZE, "2m": 2 << 20, "1g": 1 << 30}
_ALIGN = 4096  # of files and memory, for reads past the page cache
MOSTLY = 0.5  # of a file in the page cache: then it is read through it


class Memory(NamedTuple):
    """Where the data of one file lies.

    Attributes
    ----------
    block : Block
        The mapping, which may hold other files' data too.
    file_offset, nbytes : int
        What of the file is there.
    block_offset : int
        Where in the block it begins.
    """

    block: Block
    file_offset: int
    block_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """How a model is brought into memory, and why so; and what of the request that leaves out."""

    mode: Literal["map", "copy", "direct"]
    reason: str
    warning: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory.

    Attributes
    ----------
    memory : tuple of Memory
        One a file, in the files' order.
    blocks : tuple of Block
        The blocks they lie in, each once.
    choice : Choice
        What was done.
    taken : object
        What was taken of a tape, which keeps the tape's memory alive; else None.
    mapped_bytes : int
        Bytes of the blocks, or what was taken of a tape.
    """

    memory: tuple[Memory, ...]
    blocks: tuple[Block, ...]
    choice: Choice
    taken: Any
    mapped_bytes: int


def bring(
    model: Model,
    load: Load,
    *,
    tape: Tape | None,
    threads: int | None,
    advice: Advice | None,
    progress: Progress | None,
    placement: PlacementOptions,
) -> Loaded:
    """Bring the data of a model into memory: see `unimem.open_weights`.

    Whatever is raised, nothing is left: no block, no thread, and a tape is as it was.
    """
    choice = choose(model, load, tape, placement)
    if choice.warning:
        placing.warn(choice.warning)
    # An option that holds for mappings alone was meant for one, whatever `auto` takes.
    if advice is not None and load in ("copy", "direct"):
        raise ValueError(f"advice={advice!r} is for mapped files, and load={load!r} reads them")
    if load == "map":
        _tell_what_a_mapping_lacks(model, placement)
    if choice.mode == "map":
        return _map(model, choice, advice)
    try:
        return _read(model, choice, tape, threads, progress, placement)
    except OSError as error:
        if choice.mode != "direct" or error.errno != errno.EINVAL:
            raise
        choice = _without_direct(model, choice, load, placement)
        return _read(model, choice, tape, threads, progress, placement)


# ---- the choice -------------------------------------------------------------------------------


def check_load(load: object) -> None:
    """Raise ValueError for what is no `Load`."""
    if load not in ("auto", "map", "copy", "direct"):
        raise ValueError(f"load: expected 'auto', 'map', 'copy' or 'direct', got {load!r}")


def choose(model: Model, load: Load, tape: Tape | None, placement: PlacementOptions) -> Choice:
    """Choose how a model is brought into memory; nothing of it is read."""
    check_load(load)
    if tape is not None and load == "map":
        raise ValueError("load='map' maps the file, and takes nothing of a tape: leave out one")
    if load != "auto":
        return Choice(load, "it was asked for")
    network = next(
        (kind for kind in map(_file_system, model.files) if _NETWORK.fullmatch(kind)), ""
    )
    unkept = True
    if tape is not None:
        why = "a tape was given"
    elif placement.get("pages", "auto") not in ("auto", "4k"):
        why = f"pages='{placement['pages']}' are not had of a mapped file"
    elif placement.get("numa") is not None:
        why = f"numa='{placement['numa']}' is not kept by a mapped file"
    elif network:
        unkept = False
        why = f"a mapping on {network} would wait for the network with every fault"
    else:
        return Choice("map", "a mapping shares the page cache, and reads nothing twice")
    # Where it does not fit, a mapping still does: the kernel drops its pages when it must. hugetlb
    # pages are not of this room.
    needed, room = _layout_of(model)[1], limits.available_bytes()
    if tape is None and placement.get("pages") not in placing.HUGETLB and needed > room:
        why += f", but a copy of {format_bytes(needed)} does not fit into {format_bytes(room)}"
        if placement.get("strict"):
            limits.require(needed, f"a copy of {model.files[0].path}")
        warning = f"load='auto' maps {model.files[0].path}: {why}" if unkept else ""
        return Choice("map", why, warning)
    cached, total = cached_bytes(model), sum(file.nbytes for file in model.files)
    if cached >= MOSTLY * total:
        return Choice("copy", f"{why}; {cached / total:.0%} of the file are in the page cache")
    return Choice("direct", f"{why}; {cached / total:.0%} of the file are in the page cache")


def _without_direct(
    model: Model, choice: Choice, load: Load, placement: PlacementOptions
) -> Choice:
    """Choose what to do on a file system that cannot be read past the page cache."""
    why = f"{_file_system(model.files[0])} has no reads past the page cache (O_DIRECT)"
    if load == "direct":
        text = f"load='direct' of {model.files[0].path}: {why}: load='copy' reads through it"
        if placement.get("strict"):
            raise PlacementError(text)
        placing.warn(text)
    return Choice("copy", f"{choice.reason}; {why}")


def _file_system(file: ModelFile) -> str:
    """Return the type of the file system that a file is on, as in ``mount``; "" if unknown."""
    device = file.version[0]
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", errors="replace") as mounts:
        for line in mounts:
            head, _, tail = line.partition(" - ")
            if head.split()[2] == wanted:
                return tail.split()[0]
    return ""


def cached_bytes(model: Model) -> int:
    """Bytes of the files that are in the page cache."""
    found = 0
    for file, fd in zip(model.files, model.fds, strict=True):
        with Block._map_fd(fd, 0, file.nbytes, "r", file.path) as block:
            found += min(block._resident_range(0, file.nbytes), file.nbytes)
    return found


def bytes_needed(model: Model, mode: Literal["map", "copy", "direct"], pages: Pages) -> int:
    """Tell what `Loaded.mapped_bytes` will be, before anything is taken.

    Of a copy they are whole pages of those that are asked for; ``"auto"`` may get larger ones.
    """
    if mode == "map":
        return sum(file.nbytes for file in model.files)
    nbytes, huge = _layout_of(model)[1], huge_page_bytes()
    page = _PAGES_BYTES.get(pages, huge)
    if page == 0 or (pages == "auto" and nbytes < huge):
        page = mmap.PAGESIZE
    return -(-nbytes // page) * page


# ---- mapped -----------------------------------------------------------------------------------


def mapped(model: Model) -> Loaded:
    """Map a model, of which only the header will be looked at."""
    return _map(model, Choice("map", "only its header is looked at"), None)


def _map(model: Model, choice: Choice, advice: Advice | None) -> Loaded:
    blocks: list[Block] = []
    try:
        for file, fd in zip(model.files, model.fds, strict=True):
            try:
                blocks.append(Block._map_fd(fd, 0, file.nbytes, "r", file.path))
            except ValueError:  # the range was inside the file when its header was read
                raise OSError(errno.EIO, "The file has become shorter", file.path) from None
            if advice is not None:
                blocks[-1].advise(advice)
        model.check_versions()
    except BaseException:
        for block in blocks:
            block.__exit__()
        raise
    memory = tuple(Memory(block, 0, 0, block.nbytes) for block in blocks)
    nbytes = sum(file.nbytes for file in model.files)
    return Loaded(memory, tuple(blocks), choice, None, nbytes)


def _tell_what_a_mapping_lacks(model: Model, placement: PlacementOptions) -> None:
    asked = [
        f"{name}='{value}'"
        for name, value in (("pages", placement.get("pages")), ("numa", placement.get("numa")))
        if value not in (None, "auto", "4k")
    ]
    if asked:
        text = (
            f"mapping {model.files[0].path}: {', '.join(asked)}: the pages of a mapped file are "
            "the page cache's: load='copy' or 'direct' puts a copy where it shall be"
        )
        if placement.get("strict"):
            raise PlacementError(text)
        placing.warn(text)


# ---- read -------------------------------------------------------------------------------------


class _Slot(NamedTuple):
    """What of a file is read, and where it shall be among all of the data."""

    file_offset: int
    nbytes: int
    at: int


def _layout_of(model: Model) -> tuple[list[_Slot], int]:
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
    model: Model,
    choice: Choice,
    tape: Tape | None,
    threads: int | None,
    progress: Progress | None,
    placement: PlacementOptions,
) -> Loaded:
    slots, nbytes = _layout_of(model)

    def fill(block: Block, base: int = 0) -> None:
        direct = choice.mode == "direct"
        fds = _direct_fds(model) if direct else model.fds
        try:
            read_parts(
                [
                    (fd, slot.file_offset, block, base + slot.at, slot.nbytes, file.path)
                    for file, fd, slot in zip(model.files, fds, slots, strict=True)
                ],
                threads=threads,
                direct=direct,
                progress=progress,
            )
            if tape is None:  # what is left of whole pages shall be there, too
                end = max(slot.at + slot.nbytes for slot in slots)
                block._warm_range(end, block.nbytes - end)
            model.check_versions()
        finally:
            if fds is not model.fds:
                for fd in fds:
                    os.close(fd)

    if tape is not None:
        return _read_to_tape(tape, slots, nbytes, choice, fill)
    options = {key: value for key, value in placement.items() if key != "warm"}  # all is touched
    block = Block._filled(
        nbytes,
        fill,
        name=model.files[0].path,
        category="weights",
        **options,  # type: ignore[arg-type]
    )
    memory = tuple(Memory(block, slot.file_offset, slot.at, slot.nbytes) for slot in slots)
    return Loaded(memory, (block,), choice, None, block.nbytes)


def _read_to_tape(
    tape: Tape,
    slots: list[_Slot],
    nbytes: int,
    choice: Choice,
    fill: Callable[[Block, int], None],
) -> Loaded:
    mark = tape.mark()
    taken: Any = tape.take_bytes(nbytes, align=_ALIGN)
    base = taken.ctypes.data - tape.block.address
    try:
        fill(tape.block, base)
    except BaseException:
        # The traceback would keep it, and it the tape.
        taken = None
        # Where others took from the tape meanwhile, it stays taken.
        if not tape.closed and tape.used_bytes == base + nbytes:
            tape.rewind(mark)
        raise
    memory = tuple(
        Memory(tape.block, slot.file_offset, base + slot.at, slot.nbytes) for slot in slots
    )
    return Loaded(memory, (tape.block,), choice, taken, nbytes)


def _direct_fds(model: Model) -> list[int]:
    """Open the files once more; by their descriptors, for another may have their paths by now."""
    fds: list[int] = []
    try:
        for fd in model.fds:
            fds.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds
