"""Opened model files: metadata and tensors, mapped without a copy or brought into placed memory."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack
from weakref import WeakSet

from unimem._core import ledger
from unimem._core.block import Block
from unimem._core.load import move_pages
from unimem._core.tape import DeviceTape, Tape
from unimem.base.arguments import flag, integer
from unimem.base.text import format_ranges
from unimem.errors import CapacityError, ClosedError, PlacementError
from unimem.system import limits, policy
from unimem.system.placement import Lock, Placement, PlacementOptions, sum_placements
from unimem.weights.files import ModelFile
from unimem.weights.loading import (
    AccessPattern,
    Load,
    Loaded,
    Progress,
    check_request,
    load_model,
    why_model_exposed,
)
from unimem.weights.node_copies import find_nearest, is_mirrored
from unimem.weights.remote_files import open_files
from unimem.weights.tensors import Contents, ModelPart, Tensor

if TYPE_CHECKING:
    from unimem.weights.repack.repacked import Repacked
    from unimem.weights.residency import Residency

__all__ = [
    "Weights",
    "WeightsCopy",
    "lock_what_is_mapped",
    "open_planned",
    "open_weights",
    "warm_where_it_fits",
]


class WeightsCopy(Contents):
    """The copy of a mirrored model on one NUMA node, as `Weights.copies` has it.

    Any number of threads may read it, from any node; it ends with its weights.

    Attributes
    ----------
    node : int
        The node.
    """

    def __init__(self, weights: Weights, node: int, parts: tuple[ModelPart, ...]) -> None:
        super().__init__(parts)
        self.node = node
        self._weights = weights

    def _check_open(self) -> None:
        self._weights._opened()

    def verify(self) -> Placement:
        """Read from the kernel where the copy is.

        Raises
        ------
        OSError
            The kernel does not tell.
        ClosedError
            The weights were closed.
        """
        self._check_open()
        return self._parts[0].memory.block.verify()

    def residency(self) -> Residency:
        """As `Weights.residency`, of this copy."""
        self._check_open()
        from unimem.weights import residency

        return residency.measure_residency(self)

    def __repr__(self) -> str:
        return f"WeightsCopy('{self.files[0]}', on node {self.node})"


class Weights(Contents):
    """An opened model, mapped read-only or read into memory of its own. Made by `open_weights`.

    Any number of threads may read; closing is for one. After a fork the child has it too: a mapping
    is shared, memory of its own is copied page by page as either side writes.
    Leaving a ``with`` closes it to new use, and the memory returns with the last view.

    A mirrored model (``numa="mirror"``) has a copy on each of several nodes: `tensors` are those of
    the copy that is nearest to the thread which asks, and `on` and `copies` give each.
    """

    def __init__(self, files: list[ModelFile], loaded: Loaded, tape: Tape | None) -> None:
        super().__init__(tuple(map(ModelPart, files, loaded.memory)))
        self._loaded: Loaded | None = loaded
        self._choice = loaded.choice
        self._tape = tape
        self._repacked: WeakSet[Repacked] = WeakSet()  # from these
        self._ledger: tuple[ledger.Part, ...] = ()
        self._copies = {
            node: WeightsCopy(self, node, tuple(map(ModelPart, files, memory)))
            for node, memory in loaded.copies.items()
        }
        self._nearest: dict[int, int] = {}  # by node, the node of the nearest copy
        self._node_of: dict[int, int] = {}  # by CPU
        if self._copies:
            nodes = limits.nodes()
            self._nearest = find_nearest(nodes, self._copies)
            self._node_of = {cpu: n for n, node in nodes.items() for cpu in node.cpus}
        n = max(1, len(self._copies))
        sizes = {f"weights:{kind}": n * nbytes for kind, nbytes in self.by_type().items()}
        padding = loaded.mapped_bytes - sum(sizes.values())
        ledger.enter(self, sizes | {"weights:padding": padding})

    def _ledger_is_open(self) -> bool:
        return not self.closed

    def _ledger_parts(self) -> tuple[ledger.Part, ...]:
        loaded = self._loaded
        if loaded is None or self.closed:
            return ()
        if not self._ledger:  # which takes a while where there are very many tensors
            try:
                every = [copy._parts for copy in self._copies.values()] or [self._parts]
                self._ledger = tuple(_parts_of(every, loaded, self._tape))
            except ClosedError:  # just now
                return ()
        return self._ledger

    def _opened(self) -> Loaded:
        if self._loaded is not None:
            self._loaded.lifetime.check()
        if self._loaded is None or self.closed:
            raise ClosedError(f"Weights '{self.files[0]}' are closed")
        return self._loaded

    def _check_open(self) -> None:
        self._opened()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The model's tensors by name, in the order of its files, read-only.

        Of a mirrored model, those of the copy nearest to the calling thread: all that one use of
        this property gives are of one copy.
        """
        self._opened()
        return self.on()._tensors if self._copies else self._tensors

    @property
    def copies(self) -> Mapping[int, WeightsCopy]:
        """Of a mirrored model, the copy on each node, by node; else empty."""
        self._opened()
        return dict(self._copies)

    def on(self, node: int | None = None) -> Contents:
        """Return the copy of a mirrored model that is nearest to a node.

        Parameters
        ----------
        node : int, optional
            By default that of the CPU which the calling thread runs on now: bind a thread to a
            node (``os.sched_setaffinity``, ``numactl``) that shall keep reading its own.

        Returns
        -------
        WeightsCopy or Weights
            A model that is not mirrored is its only copy.

        Raises
        ------
        TypeError, ValueError
            There is no such node.
        ClosedError
            The weights were closed.
        """
        self._opened()
        if node is not None:
            nodes = limits.nodes()
            if integer(node, "node", 0) not in nodes:
                raise ValueError(f"node: expected one of {format_ranges(nodes)}, got {node}")
        if not self._copies:
            return self
        if node is None:
            node = self._node_of.get(limits.current_cpu() or 0)
        first = next(iter(self._copies))
        return self._copies[self._nearest.get(first if node is None else node, first)]

    @property
    def load(self) -> Literal["map", "copy", "direct"]:
        """How the data came into memory."""
        return self._choice.mode

    @property
    def load_reason(self) -> str:
        """Why it came so, in a few words."""
        return self._choice.reason

    @property
    def blocks(self) -> tuple[Block, ...]:
        """What the tensors lie in: a mapping a file, or one block that all was read into.

        Of a mirrored model, a block for each copy.
        """
        return self._opened().blocks

    @property
    def mapped_bytes(self) -> int:
        """Bytes of `blocks`, or of what was taken of a tape; with headers and padding."""
        return self._opened().mapped_bytes

    def content_hash(self, *, threads: int | None = None, progress: Progress | None = None) -> str:
        """Hash the metadata and all data: the same for a model and a split of it.

        Parameters
        ----------
        threads : int, optional
            That hash; by default the physical cores that this process may use.
        progress : callable, optional
            Called with the bytes that are hashed and all bytes, in this thread, at most 20 times a
            second, and once at the end; what it raises stops the work.

        Returns
        -------
        str
            128 bits in hexadecimal, by xxHash (XXH3); docs/weights.md says of what.

        Raises
        ------
        OSError
            A mapped file has become shorter, or was replaced or written to since it was opened.
        ClosedError
            The weights were closed.
        """
        from unimem.weights.content_hash import content_hash

        self._opened()
        return content_hash(self, mapped=self.load == "map", threads=threads, progress=progress)

    def verify(self) -> Placement:
        """Read from the kernel where the model is: the sum of `blocks`.

        Of a mirrored model, `WeightsCopy.verify` says it of each copy.

        Raises
        ------
        OSError
            The kernel does not tell.
        ClosedError
            The weights were closed.
        """
        return sum_placements([block.verify() for block in self.blocks])

    def repair(self) -> Placement:
        """Move what lies on other nodes than `numa` says, of each copy to its node, and verify.

        Of a mapped model these are the pages of the page cache that this process has mapped, and no
        other has: see `warm`. A `PlacementWarning` tells what cannot be moved.

        Raises
        ------
        ValueError
            The weights were opened without `numa`, or lie on a tape.
        OSError
            The kernel refuses to move pages, as in a container that may not.
        ClosedError
            The weights were closed.
        """
        self._opened()
        self._check_not_on_tape("move the tape's: tape.block.repair()")
        return sum_placements([block.repair() for block in self.blocks])

    def residency(self) -> Residency:
        """Tell what of the model is in RAM, in huge pages, and on which nodes, tensor by tensor.

        Returns
        -------
        Residency
            Of all, and of each tensor in `Residency.tensors`; of a mirrored model, of the first
            copy.

        Raises
        ------
        OSError
            The kernel does not tell.
        ClosedError
            The weights were closed.
        """
        self._opened()
        from unimem.weights import residency

        return residency.measure_residency(self)

    def warm(self, threads: int | None = None, progress: Progress | None = None) -> None:
        """Bring all into RAM and into this process's page tables, so that a touch costs no fault.

        Nothing is lost when it is stopped: what was brought in by then stays.

        Parameters
        ----------
        threads : int, optional
            That read; by default the physical cores that this process may use.
        progress : callable, optional
            As for `content_hash`.

        Raises
        ------
        CapacityError
            It does not fit into the memory that this process may have; nothing was read.
        OSError
            A file has become shorter, or cannot be read.
        ClosedError
            The weights were closed.
        """
        self._opened()
        from unimem.weights import residency

        residency.warm(self, mapped=self.load == "map", threads=threads, progress=progress)

    def _warm_used(self) -> None:
        """Warm all but the tensors of a mapping of which repacked bytes are used instead."""
        self._opened()
        from unimem.weights import residency

        for each in self._copies.values() or (self,):
            residency.warm(each, mapped=self.load == "map", without=self._unused())

    def _require_room(self, what: str, beside_bytes: int) -> None:
        """Refuse `_warm_used` where that does not fit, with other memory beside it."""
        self._opened()
        from unimem.weights import residency

        residency.require_room(
            self,
            mapped=self.load == "map",
            what=what,
            beside_bytes=beside_bytes,
            without=self._unused(),
        )

    def _unused(self) -> Collection[str]:
        is_mapped = self.load == "map"
        found = (one.tensors for one in self._repacked if is_mapped and not one.closed)
        return next(found, {})

    def lock(self, how: Lock = True) -> None:
        """Keep the model in RAM.

        Parameters
        ----------
        how : bool or "onfault"
            True: all of it, now. ``"onfault"``: each page from its first touch on. False: no more.
            Whatever is raised, each file is locked as it was before.

        Raises
        ------
        PlacementError
            The limit on locked memory, which is named, has no room.
        CapacityError
            It does not fit into the memory that this process may have.
        ValueError
            The model lies on a tape, which is to be locked as a whole; an unknown lock.
        OSError
            As for `warm`.
        ClosedError
            The weights were closed.
        """
        self._opened()
        self._check_not_on_tape("make the tape with lock=True")
        policy.check_lock(how, "how")
        from unimem.weights import residency

        residency.lock(self, self.blocks, how, mapped=self.load == "map")

    def _check_not_on_tape(self, remedy: str) -> None:
        if self._tape is not None:
            raise ValueError(
                f"Weights '{self.files[0]}' lie on a tape, which holds more than them: {remedy}"
            )

    def evict(self) -> int:
        """Drop the model's files from the page cache; they come back from the disk when touched.

        Returns
        -------
        int
            Bytes that left it: pages that are mapped elsewhere stay, by other processes or by other
            weights of this one.

        Raises
        ------
        ValueError
            The model lies in memory of its own, or is locked.
        OSError
            A file was replaced.
        ClosedError
            The weights were closed.
        """
        self._opened()
        if self.load != "map":
            raise ValueError(
                f"Weights '{self.files[0]}' lie in memory of their own, not in the page cache "
                f"(load='{self.load}'): close() them to give it back, or open them with load='map'"
            )
        from unimem.weights import residency

        return residency.evict(self)

    def to_device(
        self,
        tape: DeviceTape,
        *,
        progress: Progress | None = None,
        threads: int | None = None,
        staging_bytes: int | None = None,
        stream: Any = None,
    ) -> dict[str, Any]:
        """Bring the tensors to a GPU.

        Threads read the files into pinned memory, while what was read before is copied to the
        device. The files are opened anew, and what is in main memory is not touched.

        Parameters
        ----------
        tape : unimem.cuda.Tape
            What the memory is taken from: the bytes of each file from its first tensor to its last,
            at a multiple of 256 bytes, one file behind the other.
        progress : callable, optional
            Called with the bytes that are on their way and all bytes, in this thread, at most 20
            times a second; when all are there, once with both the same.
        threads : int, optional
            That read, at most 16 of them: by default what the process may use, at most 12.
        staging_bytes : int, optional
            Pinned memory, given back at the end: 32 MiB by default. A small file takes less.
        stream : object, optional
            By default CuPy's current stream. What was queued in it before is waited for, since it
            may use the memory that is taken.

        Returns
        -------
        dict of str to cupy.ndarray
            The tensors by name, in the order of the files, of the dtypes and shapes that
            `Tensor.as_array` has. They are there when this returns: any stream may use them.

        Raises
        ------
        TapeFull
            The tape has no room; nothing was read.
        OSError
            A file cannot be read, or was replaced or written to since it was opened.
        TypeError, ValueError
            No tape of a GPU, no stream, fewer than 1 thread, too little pinned memory; or a tensor
            that a safetensors file puts where a GPU cannot read it.
        MemoryError, PlacementError
            There is no pinned memory.
        ClosedError, FrozenError
            The weights or the tape were closed, or the tape is frozen.

        Notes
        -----
        Whatever is raised, also by `progress` or by an interrupt: no thread is left, nothing is
        being copied any more, and the tape is as before, unless others took from it meanwhile.

        Examples
        --------
        Of the size of the file, a tape has room for all tensors::

            with um.open_weights("model.gguf") as w, cuda.Tape(w.mapped_bytes) as tape:
                arrays = w.to_device(tape)
        """
        self._opened()
        if not isinstance(tape, DeviceTape):
            raise TypeError(
                f"tape: expected a unimem.cuda.Tape, got {type(tape).__name__}: make one with "
                "cuda.Tape(weights.mapped_bytes). In main memory the tensors are already, without "
                "a copy: Tensor.as_array"
            )
        return tape._upload(
            self,
            progress=progress,
            threads=threads,
            staging_bytes=staging_bytes,
            stream=stream,
        )

    @property
    def closed(self) -> bool:
        """Whether the weights were closed, or have lost their memory: a tape took it back."""
        loaded = self._loaded  # which another thread may take away
        return (
            loaded is None or loaded.lifetime.ended or any(block.closed for block in loaded.blocks)
        )

    def close(self) -> None:
        """Give the memory back; what was taken of a tape stays the tape's. Twice is no error.

        Raises
        ------
        BufferError
            Arrays over tensors, or a layout, still use it; nothing is closed then.
        """
        if self._loaded is None:
            return
        if self._tape is None:
            self._check_unused()
            for block in self._loaded.blocks:
                block.close()
        self._end()

    def _end(self) -> None:
        assert self._loaded is not None  # or it was closed already
        self._loaded.lifetime.end("are closed")
        self._loaded = None
        for part in self._parts:
            part.file.header.close()

    def _check_unused(self) -> None:
        for block in () if self._loaded is None else self._loaded.blocks:
            block._check_idle()

    def __enter__(self) -> Self:
        self._opened()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._loaded is None:
            return
        if self._tape is None:
            for block in self._loaded.blocks:
                block.__exit__(kind, error, trace)
        self._end()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("Weights cannot be pickled: open the file in the other process")

    def __repr__(self) -> str:
        name = f"Weights('{self.files[0]}'"
        if len(self._parts) > 1:
            name += f" and {len(self._parts) - 1} more"
        if self.closed:
            return f"{name}, closed)"
        types = ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in self.by_type().items())
        if self._copies:
            types += f", a copy on each of the nodes {format_ranges(self._copies)}"
        return f"{name}, {self.load}, {len(self._tensors)} tensors, bytes: {types or 0})"


def _parts_of(
    copies: Iterable[tuple[ModelPart, ...]], loaded: Loaded, tape: Tape | None
) -> Iterator[ledger.Part]:
    """Say what the memory of a model is for: tensors of a type, and what they do not fill."""
    for block in loaded.blocks:
        first, nbytes = block.address, block.committed_bytes
        if tape is not None:  # where it has the range of all files
            first, nbytes = first + loaded.memory[0].block_offset, loaded.mapped_bytes
        yield ledger.Part("weights:padding", first, nbytes)
    for file, memory in (part for parts in copies for part in parts):
        first = memory.block.address + memory.block_offset - memory.file_offset
        for offset, nbytes, kind in file.header.runs():
            yield ledger.Part(f"weights:{kind}", first + offset, nbytes, nbytes, nbytes)


def open_weights(
    path: str | os.PathLike[str],
    *,
    load: Load = "auto",
    progress: Progress | None = None,
    tape: Tape | None = None,
    threads: int | None = None,
    advice: AccessPattern | None = None,
    verify: bool = True,
    **placement: Unpack[PlacementOptions],
) -> Weights:
    """Open a model: read and check the headers of its files, and bring their data into memory.

    Headers are read by reads, never through a mapping.

    Parameters
    ----------
    path : path-like
        A GGUF file (version 2 or 3, little-endian), or any part of a split one, whose parts lie
        side by side; a safetensors file, or the ``.index.json`` of several. Or the URL of one:
        ``s3://``, ``gs://``, ``az://``, ``hf://``, ``https://`` (see docs/remote.md), which is read
        into memory by ranges, whatever `load` is but ``"map"``.
    load : {"auto", "map", "copy", "direct"}
        ``"map"`` maps the files: nothing is read now, and their pages are the page cache's.
        ``"copy"`` reads them into a block, through the page cache, in several pinned threads.
        ``"direct"`` reads past the page cache (O_DIRECT), which stays as it was. ``"auto"`` maps,
        unless placement that only memory of its own can have, a tape, a network's file system, or
        memory that is short (a cgroup with little room, pressure on the machine) asks for reading:
        then through the page cache when most of the model is there, else past it. `Weights.load`
        and `Weights.load_reason` say what was done.
    progress : callable, optional
        Called with the bytes that are read and all bytes, in this thread, at most 20 times a
        second, and once at the end. What it raises, as an interrupt does, stops the load: nothing
        stays taken, and no thread is left. A mapping that is not warmed reads nothing.
    tape : Tape, optional
        What the memory is taken from, instead of a block of its own: then placement is the tape's.
        When the tape takes it back, the weights are closed.
    threads : int, optional
        That read: by default as many as there are cores, and more for reads past the page cache.
    advice : {"willneed", "sequential", "random"}, optional
        How mapped files will be read first; by default the kernel reads ahead as it sees fit.
    verify : bool
        Of a URL: compare the data with the hash that the server tells of the file, if it does.
    **placement
        See `PlacementOptions`. Of a mapping, `lock` and `warm` hold; of memory of its own all, and
        it is warm anyway. ``numa="mirror"`` reads the model once and copies it to each node; where
        one node has all memory, that changes nothing. With ``load="map"`` and another `numa`, the
        model is warmed, and its pages in the page cache are moved to the nodes.

    Returns
    -------
    Weights

    Raises
    ------
    GGUFError, SafetensorsError
        A file breaks a rule of its format, or is a part of another model: `rule`, `offset` and
        `path` say which and where.
    OSError
        A file is missing, cannot be read or mapped, is no regular file, has become shorter, or was
        replaced or written to meanwhile. Its server cannot be reached or refuses, or its data is
        not what it should be.
    ImportError
        A URL needs the extra ``remote``.
    CapacityError, PlacementError, MemoryError
        It does not fit, or not as it was asked for; nothing was taken.
    TapeFull, FrozenError, ClosedError
        The tape has no room, or is frozen, or was cleared or closed meanwhile.
    TypeError, ValueError
        An option that is unknown, or that does not go with another; no file was opened.

    Examples
    --------
    A copy in huge pages, with nodes taking turns::

        with um.open_weights("model.gguf", pages="thp", numa="interleave") as w:
            embedding = w.tensors["token_embd.weight"].as_array()
    """
    return open_planned(
        path,
        "",
        load=load,
        progress=progress,
        tape=tape,
        threads=threads,
        advice=advice,
        verify=verify,
        placement=placement,
    )


def open_planned(
    path: str | os.PathLike[str],
    why_mapped: str,
    *,
    load: Load,
    progress: Progress | None,
    placement: PlacementOptions,
    tape: Tape | None = None,
    threads: int | None = None,
    advice: AccessPattern | None = None,
    verify: bool = True,
) -> Weights:
    """Open a model as `open_weights`, and map it where a plan does: see `loading.load_model`."""
    check_request(
        load, tape=tape, threads=threads, advice=advice, progress=progress, placement=placement
    )
    flag(verify, "verify")
    with ExitStack() as undo:
        with open_files(path) as model:
            loaded = load_model(
                model,
                load,
                undo,
                tape=tape,
                threads=threads,
                advice=advice,
                progress=progress,
                placement=placement,
                why_mapped=why_mapped,
                verify=verify,
            )
            weights = Weights(model.files, loaded, tape)
        if weights.load == "map":
            _warm_and_lock(weights, threads, progress, placement)
        undo.pop_all()
        return weights


def _warm_and_lock(
    weights: Weights, threads: int | None, progress: Progress | None, placement: PlacementOptions
) -> None:
    """Do for mappings what blocks of their own were made with."""
    warm, lock = placement.get("warm", False), placement.get("lock", False)
    moves = placement.get("numa") is not None and not is_mirrored(placement)
    if warm or moves:  # only pages that are there can be moved
        weights.warm(threads if warm in (True, False) else warm, progress)
    if moves:
        _move_to_nodes(weights, placement)
    if lock:
        try:
            weights.lock(lock)
        except PlacementError as error:
            if placement.get("strict"):
                raise
            policy.warn(error.strerror or str(error))


def _move_to_nodes(weights: Weights, placement: PlacementOptions) -> None:
    """Move the pages of mapped files to where `numa` says; what stays elsewhere is told once."""
    problems: list[str] = []
    for block in weights.blocks:
        try:
            problems += move_pages(block, placement["numa"])
        except OSError as error:  # a container may forbid it
            problems.append(f"numa='{placement['numa']}': {error.strerror or error}")
    if problems:
        text = f"mapping {weights.files[0]}: {'; '.join(dict.fromkeys(problems))}"
        if placement.get("strict"):
            raise PlacementError(text)
        policy.warn(text)


def lock_what_is_mapped(weights: Weights) -> None:
    """Lock the pages of a mapped model that are in RAM, if they could be taken away.

    Where that is not allowed, a warning says so.
    """
    if weights.load != "map":
        return
    exposed = why_model_exposed(part.file for part in weights._parts)
    if exposed:
        try:
            weights.lock("onfault")
        except (CapacityError, PlacementError) as error:
            policy.warn(f"{exposed}, and it cannot be locked: {error}")


def warm_where_it_fits(weights: Weights, threads: int, progress: Progress | None) -> None:
    """Bring a mapped model into RAM, unless it cannot stay there: then a warning says so."""
    try:
        weights.warm(threads, progress)
    except CapacityError as error:
        policy.warn(f"what cannot stay in RAM is read from the disk for every token: {error}")
