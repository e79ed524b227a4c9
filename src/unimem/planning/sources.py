"""The sources of a plan: dimensions, a model file's headers, or opened weights."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from unimem._core.block import Block
from unimem.engine.text.pre_tokenizers import unsupported_tokenizer
from unimem.kv.types import block_values, round_up, row_bytes_of
from unimem.models import shapes
from unimem.planning.gpu_bytes import bytes_needed
from unimem.planning.needs import Budget, Mode, Need, Storage
from unimem.planning.repack_gain import RepackedPart, find_gain, reason_of
from unimem.planning.streaming import StreamedWeights
from unimem.planning.widths import Widths, widths_of, widths_of_dims
from unimem.system import policy
from unimem.system.policy import lock_refusal
from unimem.weights import loading
from unimem.weights.files import ModelFiles
from unimem.weights.node_copies import is_mirrored
from unimem.weights.remote_files import RemoteFiles
from unimem.weights.repack.arrangement import arrange
from unimem.weights.repack.image_search import look
from unimem.weights.repack.repack import why_nothing
from unimem.weights.safetensors import SafetensorsHeader
from unimem.weights.tensors import Contents, headers_of
from unimem.weights.whole_hash import is_hash_known

if TYPE_CHECKING:
    from unimem.models.dims import ModelDims
    from unimem.models.shapes import Shape
    from unimem.system.placement import PlacementOptions
    from unimem.weights.files import ModelFile
    from unimem.weights.loading import EngineLoad, LoadChoice
    from unimem.weights.opened import Weights
    from unimem.weights.repack.arrangement import Arrangement

_PADDING = "weights:padding"
_ASKED = "it was asked for"
_ESTIMATED = (
    "the weights: the rows are an estimate, of a dense model of these dimensions without norms and "
    "biases"
)
_NAME_CHARS = 200  # of a name that a file gives itself
_GGML = "its code, tables and threads are not counted: Decoder.report has them"


class ModeChoice(NamedTuple):
    """The choice of a load mode.

    Attributes
    ----------
    mode, reason : str
        The mode, and why.
    is_wish : bool
        Whether the weights are mapped if this does not fit.
    """

    mode: Mode
    reason: str
    is_wish: bool = False


class ModelSource(Protocol):
    """The source of a model's figures."""

    shape: Shape
    facts: dict[str, Any]
    streamed: StreamedWeights | None
    """The pieces and the budget of the last `mode` that was "stream"."""

    @property
    def widths(self) -> Widths | None:
        """The widths of the model's graph, if known."""

    @property
    def no_tokenizer(self) -> str | None:
        """Why the engine cannot tokenize the model's text; None if it can."""

    @property
    def unhashed_bytes(self) -> int:
        """Bytes that the engine's first session or store reads for the hash of the weights."""

    def mode(
        self, load: EngineLoad, placement: PlacementOptions, budget: Budget, *, repacks: bool = True
    ) -> ModeChoice:
        """Return the load mode to plan for; `repacks` lets "auto" repack.

        ValueError is raised for a model that cannot be loaded so.
        """

    def pieces(self, budget: Budget) -> StreamedWeights | None:
        """Return the pieces that the model could be streamed by; None without any."""

    def weights(self, mode: Mode, storage: Storage, budget: Budget, sessions: int) -> list[Need]:
        """List the needs of the weights of `sessions` decoders."""

    def origin(self, storage: Storage) -> str | None:
        """Name the repacked image that the weights are taken from; None if they are repacked."""

    def by_type(self) -> dict[str, int]:
        """Return the bytes of all tensors of each type."""

    def cached_bytes(self) -> int:
        """Return how much of the files is in the page cache."""

    def device_bytes(self) -> int:
        """Return the bytes of the tensors on a GPU, before rounding to pages."""


class _Unevictable(NamedTuple):
    """Bytes of mapped files that cannot be dropped: all, those in RAM, those in hugetlb pages."""

    fixed_bytes: int
    taken_bytes: int
    pool_bytes: int

    def plus(self, other: _Unevictable) -> _Unevictable:
        """Return the sums of both."""
        return _Unevictable(*map(sum, zip(self, other, strict=True)))


class DimsSource:
    """Estimated weights of a dense model. For one thread."""

    streamed: StreamedWeights | None = None
    no_tokenizer = None
    unhashed_bytes = 0

    def __init__(self, dims: ModelDims) -> None:
        self.shape = shapes.from_dims(dims, None, (_ESTIMATED,))
        self.widths = widths_of_dims(dims)
        self.facts: dict[str, Any] = {"format": "dimensions"}
        hidden = dims.hidden_size
        layer = hidden * (2 * dims.q_size + 2 * dims.kv_size + 3 * dims.intermediate_size)
        values = 2 * hidden * dims.vocab_size + dims.num_layers * layer
        kind = "q8_0" if dims.quantized else "f16"
        self._types = {kind: row_bytes_of(1, round_up(values, block_values(kind)), kind)}

    def by_type(self) -> dict[str, int]:
        """Return the bytes of all tensors of each type."""
        return self._types

    def mode(
        self,
        load: EngineLoad,
        _placement: PlacementOptions,
        _budget: Budget,
        *,
        repacks: bool = True,
    ) -> ModeChoice:
        """Return the load mode to plan for."""
        if load in ("repack", "stream"):
            raise ValueError(
                f"load='{load}': expected a model file, whose tensors have types and shapes, got "
                "dimensions"
            )
        if load == "auto":
            return ModeChoice("map", "a file would be mapped")
        return ModeChoice(load, _ASKED)

    def weights(self, mode: Mode, storage: Storage, budget: Budget, _sessions: int) -> list[Need]:
        """List the needs of the weights."""
        types = _weight_rows(self._types)
        total = sum(types.values())
        if mode == "map":
            return [_file_need(types, _whole_pages(total), storage, budget)]
        return storage.weights(total, _PADDING, budget, types)

    def pieces(self, _budget: Budget) -> None:
        """Return None: dimensions have no tensors."""

    def origin(self, _storage: Storage) -> None:
        """Return None: dimensions have no images."""

    def cached_bytes(self) -> int:
        """Return 0: dimensions have no files."""
        return 0

    def device_bytes(self) -> int:
        """Return the bytes of the tensors on a GPU, before rounding to pages."""
        return sum(self._types.values())


class _HeaderSource:
    """The common part of sources with headers. For one thread."""

    def __init__(self, contents: Contents, files: ModelFiles, index: str | None) -> None:
        self._contents = contents
        self._held: _Unevictable | None = None
        self._repacked: RepackedPart | None = None
        self.streamed: StreamedWeights | None = None
        self.shape, self.facts = _describe(contents, files, index)
        self._is_here = True

    @cached_property
    def widths(self) -> Widths | None:
        """The widths of the model's graph, if known."""
        if self.facts["format"] == "GGUF":
            return widths_of(self._contents)
        return None if self.shape.dims is None else widths_of_dims(self.shape.dims)

    @cached_property
    def no_tokenizer(self) -> str | None:
        """Why the engine cannot tokenize the model's text; None if it can."""
        return unsupported_tokenizer(self._contents.metadata) if self.shape.is_run else None

    @cached_property
    def unhashed_bytes(self) -> int:
        """Bytes that the engine's first session or store reads for the hash of the weights."""
        if not self.shape.is_run or (self._is_here and is_hash_known(self._contents)):
            return 0
        return self._contents.nbytes

    def pieces(self, budget: Budget) -> StreamedWeights | None:
        """Return the pieces that the model could be streamed by; None without any."""
        model = ModelFiles()
        model.files.extend(part.file for part in self._contents._parts)
        with suppress(ValueError):
            return StreamedWeights.of_files(self._contents, model, {}, budget)
        return None

    def by_type(self) -> dict[str, int]:
        """Return the bytes of all tensors of each type."""
        return self._contents.by_type()

    def origin(self, storage: Storage) -> str | None:
        """Name the repacked image that the weights are taken from; None if they are repacked."""
        return None if self._repacked is None else self._repacked.origin(storage)

    def device_bytes(self) -> int:
        """Return the bytes of the tensors on a GPU, before rounding to pages."""
        return bytes_needed(self._contents)


class FileSource(_HeaderSource):
    """Weights in files that were opened for their headers. For one thread.

    Parameters
    ----------
    model : ModelFiles
        The files.
    is_here : bool, default True
        Whether the plan is for this machine, which may have images of them.
    """

    def __init__(self, model: ModelFiles, *, is_here: bool = True) -> None:
        super().__init__(headers_of(model), model, model.index)
        self._model = model
        self._is_here = is_here and not isinstance(model, RemoteFiles)
        self._is_fetched = False  # whether repacked tensors have to come from a server first
        if isinstance(model, RemoteFiles):
            self.facts["read_bytes"] = model.read_bytes
            self.facts["file_bytes"] = sum(file.nbytes for file in model.files)

    def mode(
        self, load: EngineLoad, placement: PlacementOptions, budget: Budget, *, repacks: bool = True
    ) -> ModeChoice:
        """Return the load mode to plan for; `repacks` lets "auto" repack."""
        contents = self._contents
        known = None if self._repacked is None else self._repacked.found
        if load == "stream":
            self.streamed = self._stream(placement, budget)
            return ModeChoice("stream", _ASKED)
        self._is_fetched = load == "repack" and isinstance(self._model, RemoteFiles)
        if load == "repack":
            found = known or arrange(contents)
            if not found.slots:
                return ModeChoice("direct" if self._is_fetched else "map", why_nothing(contents))
            return ModeChoice("repack", self._repack(found).reason(_ASKED))
        pressures = budget.memory_pressure()
        choice = loading.choose(self._model, load, None, placement, budget, pressures)
        if load == "auto" and repacks and self._may_gain(choice, placement, budget):
            gain = known or find_gain(contents)
            if gain is not None:
                why = self._repack(gain).reason(reason_of(gain, contents.nbytes))
                if choice.exposed:
                    why += f"; {choice.exposed}, so what stays mapped is locked"
                return ModeChoice("repack", why, is_wish=True)
        return ModeChoice(choice.mode, choice.reason, is_wish=bool(choice.exposed))

    def _stream(self, placement: PlacementOptions, budget: Budget) -> StreamedWeights:
        path = self._model.files[0].path
        if isinstance(self._model, RemoteFiles):
            raise ValueError(
                f"load='stream' of {path}: a file on a server is not read for each token: "
                "'unimem stage' brings it here"
            )
        if any(file.in_memory for file in self._model.files):
            raise ValueError(
                f"load='stream' of {path}: it is in memory already: load='map' maps it there"
            )
        if is_mirrored(placement):
            raise ValueError(
                f"load='stream' of {path}: slots are one copy, got numa={placement['numa']!r}: "
                "numa='interleave' uses the memory of all nodes"
            )
        return StreamedWeights.of_files(self._contents, self._model, placement, budget)

    def _may_gain(self, choice: LoadChoice, placement: PlacementOptions, budget: Budget) -> bool:
        """Whether "auto" may repack it, also by the limit on locked memory."""
        # The limit on locked memory would have to hold the repacked tensors and the file.
        if self.shape.dims is None or placement.get("lock") or is_mirrored(placement):
            return False
        if not choice.exposed:
            return choice.mode == "map"
        # The remaining tensors stay mapped, and have to be locked.
        nbytes = sum(_whole_pages(file.nbytes) for file in self._model.files)
        return choice.mode != "map" and lock_refusal("onfault", nbytes, budget) is None

    def _repack(self, found: Arrangement) -> RepackedPart:
        if self._repacked is None:
            image = look(self._contents, found) if self._is_here else None
            self._repacked = RepackedPart(found, image, is_read=not self._is_fetched)
        return self._repacked

    def weights(self, mode: Mode, storage: Storage, budget: Budget, sessions: int) -> list[Need]:
        """List the needs of the weights of `sessions` decoders."""
        headers = _headers_need(self._model.files)
        repacked = self._repacked if mode == "repack" else None
        if mode == "stream" and self.streamed is not None:
            return [*self.streamed.needs(storage, budget), headers]
        if mode in ("copy", "direct") or self._is_fetched:
            nbytes = loading.copy_bytes(self._model)
            types = _weight_rows(self.by_type())
            read = storage.weights(nbytes, _PADDING, budget, types)
            more = repacked.needs(storage, budget, sessions) if repacked else ()
            return [*read, *more, headers]
        self._held = self._held or self._measure_held()
        found = _mapping_need(self._contents, self._held, storage, budget, repacked)
        return [found, *(repacked.needs(storage, budget, sessions) if repacked else ()), headers]

    def _measure_held(self) -> _Unevictable:
        # Files with a disk behind them are not locked yet.
        held = _Unevictable(0, 0, 0)
        for file, fd in zip(self._model.files, self._model.fds, strict=False):  # or on a server
            if file.in_memory:
                with Block._map_fd(fd, 0, file.nbytes, "r", file.path) as block:
                    held = held.plus(_measure_unevictable(file, block))
        return held

    def cached_bytes(self) -> int:
        """Return how much of the files is in the page cache."""
        return loading.cached_bytes(self._model)


class WeightsSource(_HeaderSource):
    """Weights that are in memory. For one thread.

    Parameters
    ----------
    weights : Weights
        They stay open.
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights, ModelFiles(), None)
        self._weights = weights

    def mode(
        self,
        load: EngineLoad,
        _placement: PlacementOptions,
        _budget: Budget,
        *,
        repacks: bool = True,
    ) -> ModeChoice:
        """Return how they were loaded, or that they will be repacked; ValueError for others."""
        weights = self._weights
        if load == "repack":
            found = arrange(weights)
            if not found.slots:
                return ModeChoice(weights.load, why_nothing(weights))
            if self._repacked is None:
                is_read = weights.load == "map"
                self._repacked = RepackedPart(found, look(weights, found), is_read=is_read)
            return ModeChoice("repack", self._repacked.reason(_ASKED))
        self.streamed = StreamedWeights.of_weights(weights)
        if load not in ("auto", weights.load):
            raise ValueError(f"load={load!r}: the weights are opened already ({weights.load!r})")
        return ModeChoice(weights.load, weights.load_reason)

    def weights(self, mode: Mode, storage: Storage, budget: Budget, sessions: int) -> list[Need]:
        """List what they have taken, and what `sessions` decoders will repack."""
        weights = self._weights
        headers = _headers_need(part.file for part in weights._parts)
        repacked = self._repacked if mode == "repack" else None
        if weights.load == "map":
            self._held = self._held or self._measure_held()
            found = _mapping_need(weights, self._held, storage, budget, repacked)
        else:
            n_copies = max(1, len(weights.copies))
            kinds = weights._types_in_memory()
            types = {kind: n_copies * n for kind, n in _weight_rows(kinds).items()}
            nbytes = weights.mapped_bytes
            on_tape = weights._tape is not None
            in_pool = not on_tape and weights.blocks[0].granted.pages in policy.HUGETLB
            ram = 0 if in_pool else nbytes
            found = Need(
                _add_padding(types, nbytes),
                ram_bytes=ram,
                taken_bytes=ram,
                is_private=True,
                pool_bytes={weights.blocks[0].granted.pages: nbytes} if in_pool else {},
            )
        return [found, *(repacked.needs(storage, budget, sessions) if repacked else ()), headers]

    def _measure_held(self) -> _Unevictable:
        held = _Unevictable(0, 0, 0)
        for part in self._weights._parts:
            held = held.plus(_measure_unevictable(part.file, part.memory.block))
        return held

    def cached_bytes(self) -> int:
        """Return how much of the files is in the page cache."""
        found = 0
        for part in self._weights._parts:
            found += min(part.memory.block._resident_range(0, part.file.nbytes), part.file.nbytes)
        return found


def shape_of(weights: Contents, files: ModelFiles, index: str | None) -> Shape:
    """Return a model's shape; `files` reads the file beside it, or that of `index`."""
    first = weights._parts[0].file
    if isinstance(first.header, SafetensorsHeader):
        return shapes.from_config(*shapes.read_config(index or first.path, files.read_start))
    return shapes.from_weights(weights)


def _describe(
    weights: Contents, files: ModelFiles, index: str | None
) -> tuple[Shape, dict[str, Any]]:
    """Return a model's shape and facts; `files` reads the file beside it."""
    first = weights._parts[0].file
    facts: dict[str, Any] = {"model": index or first.path}
    shape = shape_of(weights, files, index)
    if isinstance(first.header, SafetensorsHeader):
        facts["format"] = "safetensors"
    else:
        facts["format"] = "GGUF"
        name = weights.metadata.get("general.name")
        if isinstance(name, str):
            facts["name"] = name[:_NAME_CHARS]
        if shape.is_run:
            facts["ggml"] = _GGML
    if shape.arch is not None:
        facts["architecture"] = shape.arch[:_NAME_CHARS]
    return shape, facts


def _headers_need(files: Iterable[ModelFile]) -> Need:
    """Return the need of copied headers, which stay while the files are open."""
    nbytes = sum(file.header.copied_bytes for file in files)
    return Need({"other": nbytes}, ram_bytes=nbytes, taken_bytes=nbytes, is_private=True)


def _measure_unevictable(file: ModelFile, block: Block) -> _Unevictable:
    """Measure the part of a mapped file that cannot be dropped: locked, or without a disk."""
    size, placed = file.nbytes, block.verify()
    if not file.in_memory:
        locked = min(placed.locked_bytes, size)
        return _Unevictable(locked, locked, 0)
    if placed.pages in policy.HUGETLB:
        return _Unevictable(0, 0, size)
    return _Unevictable(size, min(block._resident_range(0, size), size), 0)


def _mapping_need(
    weights: Contents,
    held: _Unevictable,
    storage: Storage,
    budget: Budget,
    repacked: RepackedPart | None,
) -> Need:
    """Return the need of mapped files; their repacked tensors are neither read nor kept."""
    nbytes = sum(_whole_pages(part.file.nbytes) for part in weights._parts)
    need = _file_need(_weight_rows(weights.by_type()), nbytes, storage, budget)
    unread = 0 if repacked is None else repacked.found.source_bytes
    ram = max(held.fixed_bytes, need.ram_bytes - held.pool_bytes - unread)
    files = max(0, nbytes - ram - held.pool_bytes)
    return replace(
        need,
        ram_bytes=ram,
        file_bytes=files,
        unread_bytes=min(files, unread),
        taken_bytes=held.taken_bytes,
    )


def _file_need(types: dict[str, int], nbytes: int, storage: Storage, budget: Budget) -> Need:
    """Return the need of a mapped file, which is locked if there is room."""
    locks = storage.locks_file(nbytes, budget)
    return Need(
        _add_padding(types, nbytes),
        ram_bytes=nbytes if locks else 0,
        file_bytes=0 if locks else nbytes,
        lock_bytes=nbytes if storage.lock else 0,
    )


def _weight_rows(types: dict[str, int]) -> dict[str, int]:
    return {f"weights:{kind}": nbytes for kind, nbytes in types.items() if nbytes}


def _add_padding(types: dict[str, int], nbytes: int) -> dict[str, int]:
    padding = nbytes - sum(types.values())
    return types | ({_PADDING: padding} if padding else {})


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
