"""Opened models: metadata and tensors, mapped without a copy or read into placed memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Literal, Self, Unpack
from weakref import WeakSet

from unimem._core import ledger
from unimem._core.block import Block
from unimem._core.load import move_pages
from unimem._core.tape import DeviceTape, Tape
from unimem.base.arguments import integer
from unimem.base.text import format_ranges
from unimem.errors import CapacityError, ClosedError, PlacementError
from unimem.system import limits, policy
from unimem.system.placement import Lock, Placement, PlacementOptions, sum_placements
from unimem.weights import residency
from unimem.weights.files import FileRange, ModelFile, Source
from unimem.weights.large_folios import ask_for_huge_pages, read_anew
from unimem.weights.loading import (
    AccessPattern,
    Load,
    Loaded,
    LoadRequest,
    Progress,
    load_model,
    way_of,
    why_model_exposed,
)
from unimem.weights.node_copies import find_nearest, is_mirrored
from unimem.weights.remote_files import open_files
from unimem.weights.residency import Residency
from unimem.weights.stream.stream import Stream
from unimem.weights.streamed import load_streamed
from unimem.weights.tensors import Contents, ModelPart, StreamedTensor, Tensor


class WeightsCopy(Contents):
    """The copy of a mirrored model on one NUMA node, from `Weights.copies`.

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
        """Ask the kernel for the placement of the copy.

        Raises
        ------
        OSError
            The kernel does not tell.
        """
        self._check_open()
        return self._parts[0].memory.block.verify()

    def residency(self) -> Residency:
        """Measure this copy as `Weights.residency` does."""
        self._check_open()
        return residency.measure_residency(self)

    def __repr__(self) -> str:
        return f"WeightsCopy('{self.files[0]}', on node {self.node})"


class Weights(Contents):
    """An opened model, mapped read-only or read into memory of its own. Made by `open_weights`.

    Any number of threads may read; one thread may close it. A forked child has it too: a mapping is
    shared, other memory is copied page by page as either side writes. Leaving a ``with`` closes it
    to new use, and the memory returns with the last view.

    A mirrored model (``numa="mirror"``) has a copy on each of several nodes: `tensors` are those of
    the copy nearest to the calling thread, and `on` and `copies` give each.

    Once it is closed, or a tape took its memory back, its members raise ClosedError.
    """

    def __init__(self, files: list[ModelFile], loaded: Loaded, tape: Tape | None) -> None:
        kept = loaded.kept or ((),) * len(files)
        super().__init__(tuple(map(ModelPart, files, loaded.memory, kept)), loaded.stream)
        self._loaded: Loaded | None = loaded
        self._choice = loaded.choice
        self._tape = tape
        self._repacked: WeakSet[Any] = WeakSet()  # `Repacked` of these weights
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
        sizes = {f"weights:{kind}": n * nbytes for kind, nbytes in self._types_in_memory().items()}
        sizes.pop("weights:slots", None)  # the stream enters them
        padding = loaded.mapped_bytes - sum(sizes.values())
        self._is_lent = loaded.choice.mode == "map" and files[0].memory is not None
        if not self._is_lent:
            ledger.enter(self, sizes | {"weights:padding": padding})

    def _types_in_memory(self) -> dict[str, int]:
        """Return the bytes of the tensors in memory by type, and those of the slots of others."""
        if self._stream is None:
            return self.by_type()
        types: dict[str, int] = {}
        for tensor in self._tensors.values():
            if not isinstance(tensor, StreamedTensor):
                types[tensor.type] = types.get(tensor.type, 0) + tensor.nbytes
        return types | {"slots": self._stream.slot_bytes}

    def _ledger_is_open(self) -> bool:
        return not self.closed

    def _ledger_parts(self) -> tuple[ledger.Part, ...]:
        loaded = self._loaded
        if loaded is None or self.closed:
            return ()
        if not self._ledger:  # slow for a model of very many tensors
            try:
                every = [copy._parts for copy in self._copies.values()] or [self._parts]
                if self._stream is None:
                    self._ledger = tuple(_parts_of(every, loaded, self._tape))
                else:
                    self._ledger = tuple(self._kept_parts(loaded))
            except ClosedError:  # another thread has just closed it
                return ()
        return self._ledger

    def _kept_parts(self, loaded: Loaded) -> Iterator[ledger.Part]:
        """Yield what the memory is for that is no slot; `Stream` has the parts of the slots."""
        block = loaded.blocks[0]
        yield ledger.Part("weights:padding", block.address, block.committed_bytes)
        for tensor in self._tensors.values():
            if not isinstance(tensor, StreamedTensor) and tensor.nbytes:
                n = tensor.nbytes
                yield ledger.Part(f"weights:{tensor.type}", tensor.address, n, n, n)

    def _opened(self) -> Loaded:
        loaded = self._loaded  # another thread may reset it
        if loaded is not None:
            loaded.lifetime.check()
        if loaded is None or self.closed:
            raise ClosedError(f"Weights '{self.files[0]}' are closed")
        return loaded

    def _check_open(self) -> None:
        self._opened()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The model's tensors by name, in the order of its files, read-only.

        For a mirrored model, those of the copy nearest to the calling thread: each use of this
        property gives tensors of one copy.
        """
        self._opened()
        return self.on()._tensors if self._copies else self._tensors

    @property
    def copies(self) -> Mapping[int, WeightsCopy]:
        """The copies of a mirrored model by node; else empty."""
        self._opened()
        return dict(self._copies)

    def on(self, node: int | None = None) -> Contents:
        """Return the copy of a mirrored model that is nearest to a node.

        Parameters
        ----------
        node : int, optional
            By default the node of the CPU that the calling thread runs on now: bind the thread to a
            node (``os.sched_setaffinity``, ``numactl``) to keep it there.

        Returns
        -------
        WeightsCopy or Weights
            The weights themselves if they are not mirrored.

        Raises
        ------
        TypeError, ValueError
            There is no such node.
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
    def stream(self) -> Stream | None:
        """The budget and the figures of a streamed model; None without ``load="stream"``."""
        self._opened()
        return self._stream

    @property
    def load(self) -> Literal["map", "copy", "direct", "stream"]:
        """The load mode that was used."""
        return self._choice.mode

    @property
    def load_reason(self) -> str:
        """Why this mode was used, in a few words."""
        return self._choice.reason

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The memory of the tensors: a mapping for each file, or one block for all of them.

        A mirrored model has one block for each copy.
        """
        return self._opened().blocks

    @property
    def mapped_bytes(self) -> int:
        """Bytes of `blocks`, or the bytes taken from a tape, with headers and padding.

        For a streamed model, of what stays and of the slots, whose number may change.
        """
        loaded = self._opened()
        return loaded.mapped_bytes + (0 if self._stream is None else self._stream.slot_bytes)

    def content_hash(self, *, threads: int | None = None, progress: Progress | None = None) -> str:
        """Hash the metadata and all data; a model and a split of it have the same hash.

        Parameters
        ----------
        threads : int, optional
            Number of threads; by default the physical cores that this process may use.
        progress : callable, optional
            Called with the bytes that are hashed and all bytes, in this thread, at most 20 times a
            second, and once at the end. If it raises, the work stops.

        Returns
        -------
        str
            128 bits in hexadecimal, by xxHash (XXH3); see docs/weights.md.

        Raises
        ------
        OSError
            A mapped file has become shorter, or was replaced or written to since it was opened.
        """
        from unimem.weights.content_hash import content_hash

        self._opened()
        return content_hash(self, mapped=self.load == "map", threads=threads, progress=progress)

    def verify(self) -> Placement:
        """Ask the kernel for the placement of the model: the sum of `blocks`.

        `WeightsCopy.verify` gives that of one copy of a mirrored model. For a buffer, the kernel
        tells of the areas that hold it, and `residency` of it alone.

        Raises
        ------
        OSError
            The kernel does not tell.
        """
        return sum_placements([block.verify() for block in self.blocks])

    def repair(self) -> Placement:
        """Move pages to the nodes of `numa`, and verify; each copy goes to its own node.

        In a mapped model, pages of the page cache can be moved if this process alone has them
        mapped: see `warm`. A `PlacementWarning` says what cannot be moved.

        Raises
        ------
        ValueError
            The weights were opened without `numa`, or lie on a tape or in a buffer.
        OSError
            The kernel refuses to move pages, as in a container that may not.
        """
        self._opened()
        self._check_not_lent()
        self._check_not_on_tape("move the tape's: tape.block.repair()")
        return sum_placements([block.repair() for block in self.blocks])

    def residency(self) -> Residency:
        """Measure how much of the model is in RAM, in huge pages, and on which nodes.

        Returns
        -------
        Residency
            Of the model, and of each tensor in `Residency.tensors`; for a mirrored model, of the
            first copy.

        Raises
        ------
        ValueError
            The model is streamed: what is in memory changes, and `stream` counts it.
        OSError
            The kernel does not tell.
        """
        self._opened()
        if self._stream is not None:
            raise ValueError(
                f"Weights '{self.files[0]}' are streamed, and what is in memory changes: "
                "stream.resident_bytes counts it, and verify() says where it is"
            )
        return residency.measure_residency(self)

    def warm(self, threads: int | None = None, progress: Progress | None = None) -> None:
        """Bring the model into RAM and into this process's page tables: no access faults then.

        If it is stopped, the pages that were brought in stay.

        Parameters
        ----------
        threads, progress
            As for `content_hash`.

        Raises
        ------
        CapacityError
            It does not fit into the memory that this process may have; nothing was read.
        OSError
            A file has become shorter, or cannot be read.
        """
        self._opened()
        residency.warm(self, mapped=self.load == "map", threads=threads, progress=progress)

    def _warm_used(self) -> None:
        """Warm everything but mapped tensors whose repacked bytes are used instead."""
        self._opened()
        for each in self._copies.values() or (self,):
            residency.warm(each, mapped=self.load == "map", without=self._unused())

    def _require_room(self, what: str, beside_bytes: int) -> None:
        """Raise CapacityError if `_warm_used` does not fit, with other memory beside it."""
        self._opened()
        residency.require_room(
            self,
            mapped=self.load == "map",
            what=what,
            beside_bytes=beside_bytes,
            without=self._unused(),
        )

    def _unused(self) -> Collection[str]:
        is_mapped = self.load == "map"
        found = (each.tensors for each in self._repacked if is_mapped and not each.closed)
        return next(found, {})

    def lock(self, how: Lock = True) -> None:
        """Keep the model in RAM.

        Parameters
        ----------
        how : bool or "onfault"
            True: lock all of it now. ``"onfault"``: lock each page at its first access. False:
            unlock. After an error, each file is locked as it was before.

        Raises
        ------
        PlacementError
            The limit on locked memory has no room; the message names it.
        CapacityError
            It does not fit into the memory that this process may have.
        ValueError
            An unknown lock; or the model lies on a tape, locked as a whole, or in a buffer.
        OSError
            As for `warm`.
        """
        self._opened()
        self._check_not_lent()
        self._check_not_on_tape("make the tape with lock=True")
        policy.check_lock(how, "how")
        residency.lock(self, self.blocks, how, mapped=self.load == "map")

    def _check_not_lent(self) -> None:
        if self._is_lent:
            raise ValueError(
                f"Weights '{self.files[0]}' lie in memory of the caller, which is left as it is: "
                "load='copy' makes a copy"
            )

    def _check_not_on_tape(self, remedy: str) -> None:
        if self._tape is not None:
            raise ValueError(
                f"Weights '{self.files[0]}' lie on a tape, which holds more than them: {remedy}"
            )

    def evict(self) -> int:
        """Drop the model's files from the page cache; later accesses read them from the disk.

        Returns
        -------
        int
            Bytes that left the page cache. Pages stay if other processes, or other weights of this
            one, have them mapped.

        Raises
        ------
        ValueError
            The model lies in memory of its own or of the caller, or is locked.
        OSError
            A file was replaced.
        """
        self._opened()
        self._check_not_lent()
        if self.load != "map":
            raise ValueError(
                f"Weights '{self.files[0]}' lie in memory of their own, not in the page cache "
                f"(load='{self.load}'): close() them to give it back, or open them with load='map'"
            )
        return residency.evict(self)

    def to_device(
        self,
        tape: DeviceTape,
        *,
        progress: Progress | None = None,
        threads: int | None = None,
        staging_bytes: int | str | None = None,
        stream: Any = None,
    ) -> dict[str, Any]:
        """Copy the tensors to a GPU.

        Threads read the files into pinned memory while earlier parts are copied to the device. The
        files are opened anew; main memory is not touched.

        Parameters
        ----------
        tape : unimem.cuda.Tape
            Where the memory is taken from: the bytes of each file from its first tensor to its
            last, at multiples of 256 bytes, one file after the other.
        progress : callable, optional
            Called with the bytes under way and all bytes, in this thread, at most 20 times a
            second; and at the end once with both the same.
        threads : int, optional
            Number of reading threads, at most 16; by default the CPUs of the process, at most 12.
        staging_bytes : int or str, optional
            Pinned memory, given back at the end: 32 MiB by default and at most, since pinning more
            costs more than it saves. A small file takes less.
        stream : object, optional
            By default CuPy's current stream. Work queued in it before is waited for, since it may
            use the memory that is taken.

        Returns
        -------
        dict of str to cupy.ndarray
            The tensors by name, in the order of the files, with the dtypes and shapes of
            `Tensor.as_array`. They are complete when this returns: any stream may use them.

        Raises
        ------
        TapeFull
            The tape has no room; nothing was read.
        OSError
            A file cannot be read, or was replaced or written to since it was opened.
        TypeError, ValueError
            Not a GPU's tape, not a stream, fewer than 1 thread, too little pinned memory; or a
            tensor at an address in a safetensors file that a GPU cannot read.
        MemoryError, PlacementError
            No pinned memory is available.
        ClosedError, FrozenError
            The weights or the tape were closed, or the tape is frozen.

        Notes
        -----
        After an error, also from `progress`, and after an interrupt, no thread is left, no copy is
        running, and the tape is as before, unless another thread took from it meanwhile.

        Examples
        --------
        A tape of the file's size has room for all tensors::

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
            self, progress=progress, threads=threads, staging_bytes=staging_bytes, stream=stream
        )

    @property
    def closed(self) -> bool:
        """Whether the weights were closed, or a tape took their memory back."""
        loaded = self._loaded  # another thread may reset it
        return (
            loaded is None or loaded.lifetime.ended or any(block.closed for block in loaded.blocks)
        )

    def close(self) -> None:
        """Give the memory back; memory of a tape remains the tape's. Twice is no error.

        Raises
        ------
        BufferError
            Arrays over tensors, a layout, or an engine that holds pieces of a streamed model still
            use it; nothing is closed then.
        """
        if self._loaded is None:
            return
        if self._tape is None:
            self._check_unused()
            self._end_stream()
            for block in self._loaded.blocks:
                block.close()
        self._end()

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream._close()

    def _end(self) -> None:
        assert self._loaded is not None  # or it was closed already
        self._loaded.lifetime.end("are closed")
        self._loaded = None
        for part in self._parts:
            part.file.header.close()
            if part.file.memory is not None:
                part.file.memory.release()

    def _check_unused(self) -> None:
        for block in () if self._loaded is None else self._loaded.blocks:
            block._check_idle()

    def __enter__(self) -> Self:
        self._opened()
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._loaded is None:
            return
        if self._tape is None:
            blocks = self._loaded.blocks
            try:
                self._end_stream()
            except BufferError:  # the slots go with the engine that holds pieces
                blocks = blocks[:1]
            for block in blocks:
                block.__exit__(*raised)
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
    """Yield what the memory of a model is for: tensors of each type, and padding."""
    for block in loaded.blocks:
        first, nbytes = block.address, block.committed_bytes
        if tape is not None:  # one range holds all files
            first, nbytes = first + loaded.memory[0].block_offset, loaded.mapped_bytes
        yield ledger.Part("weights:padding", first, nbytes)
    for file, memory, _ in (part for parts in copies for part in parts):
        first = memory.block.address + memory.block_offset - memory.file_offset
        for offset, nbytes, kind in file.header.runs():
            yield ledger.Part(f"weights:{kind}", first + offset, nbytes, nbytes, nbytes)


def open_weights(
    path: Source,
    *,
    offset: int = 0,
    nbytes: int | None = None,
    load: Load = "auto",
    progress: Progress | None = None,
    tape: Tape | None = None,
    threads: int | None = None,
    advice: AccessPattern | None = None,
    verify: bool = True,
    budget: int | str | None = None,
    **placement: Unpack[PlacementOptions],
) -> Weights:
    """Open a model: read and check the headers of its files, and bring their data into memory.

    Headers are read by reads, never through a mapping.

    Parameters
    ----------
    path : path-like, int or buffer
        A GGUF file (version 2 or 3, little-endian); any part of a split one, with the other parts
        beside it; a safetensors file, or the ``.index.json`` of several. Or the URL of one:
        ``s3://``, ``gs://``, ``az://``, ``hf://``, ``https://`` (see docs/remote.md), which is read
        into memory by ranges, whatever `load` is, except ``"map"``.
        Or the descriptor of a file, which may be closed afterwards; or the file in memory, anything
        with the buffer protocol, which is viewed without a copy and kept. Both are one file.
    offset, nbytes : int, optional
        For a file inside another one, such as an archive: its first byte and its size, by default
        all and the rest. Offsets of tensors and of errors count from the first byte of the whole.
        Views are aligned if `offset` is a multiple of the file's alignment.
    load : {"auto", "map", "copy", "direct", "stream"}
        ``"map"`` maps the files: nothing is read now, and their pages are the page cache's.
        ``"copy"`` reads them into a block, through the page cache, in several pinned threads.
        ``"direct"`` reads past the page cache (O_DIRECT), which stays as it was. ``"auto"`` maps,
        unless a placement that no mapping can have, a tape, a network file system, or a shortage of
        memory (a cgroup with little room, pressure on the machine) is a reason to read: then
        through the page cache if most of the model is there, else past it. `Weights.load` and
        `Weights.load_reason` say what was done. ``"stream"`` is for GGUF models larger than memory:
        what every token needs is read now and stays, and routed experts (in a model without any,
        whole blocks) are `StreamedTensor`, read past the page cache when they are asked for.
    progress : callable, optional
        Called with the bytes that are read and all bytes, in this thread, at most 20 times a
        second, and once at the end. If it raises, as after an interrupt, the load stops: nothing
        stays taken, and no thread is left. A mapping that is not warmed reads nothing.
    tape : Tape, optional
        Where the memory is taken from, instead of a block of its own; placement is the tape's then.
        When the tape takes it back, the weights are closed.
    threads : int, optional
        Number of reading threads: by default one for each core, and more for reads past the page
        cache.
    advice : {"willneed", "sequential", "random"}, optional
        How mapped files will be read first; by default the kernel reads ahead as it sees fit.
    verify : bool
        For a URL: compare the data with the hash that the server reports, if it reports one.
    budget : int or str, optional
        For ``load="stream"``: the most memory of the weights, what stays and the slots, in bytes,
        as ``"8G"``, or as ``"50%"`` of the least limit on the memory of this process. By default
        what there is room for; an eighth of that stays free. `Weights.stream` changes it.
    **placement
        See `PlacementOptions`. For a mapping, `lock` and `warm` apply; for memory of its own all
        do, and it is always warm. ``numa="mirror"`` reads the model once and copies it to each
        node; if one node has all memory, that changes nothing. With ``load="map"`` and another
        `numa`, the model is warmed, and its pages in the page cache are moved to the nodes.

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
        replaced or written to meanwhile. Its server cannot be reached or refuses, or its data does
        not match its hash.
    ImportError
        A URL needs the extra ``remote``.
    CapacityError, PlacementError, MemoryError
        It does not fit, or not with the requested placement, or the budget is below the least that
        works, which the message names; nothing was taken.
    TapeFull, FrozenError, ClosedError
        The tape has no room, or is frozen, or was cleared or closed meanwhile.
    TypeError, ValueError
        An option is unknown, or conflicts with another; no file was opened.

    Examples
    --------
    A copy in huge pages, with nodes taking turns::

        with um.open_weights("model.gguf", pages="thp", numa="interleave") as w:
            embedding = w.tensors["token_embd.weight"].as_array()
    """
    part = FileRange(offset, nbytes)
    request = LoadRequest(load, progress, tape, threads, advice, verify, placement, part, budget)
    return open_planned(path, request)


def open_planned(path: Source, request: LoadRequest) -> Weights:
    """Open a model as `open_weights`, and map it if a plan does: see `LoadRequest.why_mapped`."""
    request.check()
    way_of(path, request.load)  # refuses to stream from a server
    with ExitStack() as undo:
        with open_files(path, part=request.part) as model:
            load = load_streamed if request.load == "stream" else load_model
            loaded = load(model, request, undo)
            weights = Weights(model.files, loaded, request.tape)
        if weights.load == "map":
            _warm_and_lock(weights, request)
        undo.pop_all()
        return weights


def _warm_and_lock(weights: Weights, request: LoadRequest) -> None:
    """Apply to mappings the placement that blocks are made with."""
    placement = request.placement
    warm, lock = placement.get("warm", False), placement.get("lock", False)
    moves = placement.get("numa") is not None and not is_mirrored(placement)
    if warm or moves:  # only pages in RAM can be moved
        weights.warm(request.threads if warm in (True, False) else warm, request.progress)
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
    """Move the pages of mapped files to the nodes of `numa`; one warning names those that stay."""
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
    """Lock the pages of a mapped model that are in RAM, if they may be reclaimed.

    If that is not allowed, a warning says so.
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
    """Bring a mapped model into RAM; if it cannot stay there, warn instead."""
    try:
        ask_for_huge_pages(weights)
        weights.warm(threads, progress)
        if read_anew(weights):
            weights.warm(threads)
    except CapacityError as error:
        policy.warn(f"what cannot stay in RAM is read from the disk for every token: {error}")
