"""What a plan is made of: a file that nobody has opened, opened weights, or dimensions."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from unimem._core.block import Block
from unimem._core.safetensors import SafetensorsHeader
from unimem.buffers import shapes
from unimem.planning.needs import Budget, Mode, Need, Storage
from unimem.system import policy
from unimem.system.policy import lock_refusal
from unimem.weights import loading
from unimem.weights.tensors import Contents, ModelPart

if TYPE_CHECKING:
    from unimem.buffers.dims import ModelDims
    from unimem.buffers.shapes import Shape
    from unimem.system.placement import PlacementOptions
    from unimem.weights.files import ModelFile, ModelFiles
    from unimem.weights.loading import Load
    from unimem.weights.opened import Weights

__all__ = ["OfDims", "OfFile", "OfWeights", "Source"]

_PADDING = "weights:padding"
_ESTIMATED = (
    "the weights: the rows are an estimate, of a dense model of these dimensions without norms and "
    "biases"
)
_NAME_CHARS = 200  # of a name that a file gives itself
_GGML = (
    "beside these, ggml has its code, tables of its own and a pool of threads, which no plan "
    "counts, and Decoder.report shows"
)


class Source(Protocol):
    """Where weights come from."""

    shape: Shape
    facts: dict[str, Any]

    def mode(self, load: Load, placement: PlacementOptions) -> tuple[Mode, str]:
        """Tell how they come into memory, and why so."""

    def weights(self, mode: Mode, storage: Storage, budget: Budget) -> list[Need]:
        """Say what they take."""

    def by_type(self) -> dict[str, int]:
        """Tell the bytes of all tensors of a type."""

    def cached_bytes(self) -> int:
        """Tell what of the files is in the page cache."""

    def device_bytes(self) -> int:
        """Tell what the tensors take on a GPU, before that is rounded to pages."""


class _Held(NamedTuple):
    """What of mapped files cannot be dropped; what of that is there; and what is in huge pages."""

    fixed_bytes: int
    taken_bytes: int
    pool_bytes: int

    def plus(self, other: _Held) -> _Held:
        """Add up two of them."""
        return _Held(*map(sum, zip(self, other, strict=True)))


class OfDims:
    """Weights of a dense model with these dimensions, by estimate. For one thread."""

    def __init__(self, dims: ModelDims) -> None:
        self.shape = shapes.of_dims(dims, None, (_ESTIMATED,))
        self.facts: dict[str, Any] = {"format": "dimensions"}
        hidden = dims.hidden_size
        layer = hidden * (2 * dims.q_size + 2 * dims.kv_size + 3 * dims.intermediate_size)
        values = 2 * hidden * dims.vocab_size + dims.num_layers * layer
        self._types = {"q8_0": -(-values // 32) * 34} if dims.quantized else {"f16": 2 * values}

    def by_type(self) -> dict[str, int]:
        """Tell the bytes of all tensors of a type."""
        return self._types

    def mode(self, load: Load, _placement: PlacementOptions) -> tuple[Mode, str]:
        """Tell how they come into memory, and why so."""
        if load == "auto":
            return "map", "a file would be mapped"
        return load, "it was asked for"

    def weights(self, mode: Mode, storage: Storage, budget: Budget) -> list[Need]:
        """Say what they take."""
        types = _rows(self._types)
        total = sum(types.values())
        if mode == "map":
            return [_file(types, _whole_pages(total), storage, budget)]
        return [storage.block(total, _PADDING, budget, types)]

    def cached_bytes(self) -> int:
        """Tell what of the files is in the page cache: there are none."""
        return 0

    def device_bytes(self) -> int:
        """Tell what the tensors take on a GPU, before that is rounded to pages."""
        return sum(self._types.values())


class OfFile:
    """Weights in files that were opened for their headers. For one thread.

    Parameters
    ----------
    model : ModelFiles
        The files.
    """

    def __init__(self, model: ModelFiles) -> None:
        self._model = model
        self._contents = Contents(
            tuple(map(ModelPart, model.files, loading.unloaded_memory(model)))
        )
        self._held: _Held | None = None
        self.shape, self.facts = _described(self._contents, model.index)

    def by_type(self) -> dict[str, int]:
        """Tell the bytes of all tensors of a type."""
        return self._contents.by_type()

    def mode(self, load: Load, placement: PlacementOptions) -> tuple[Mode, str]:
        """Tell how they come into memory, and why so."""
        choice = loading.choose(self._model, load, None, placement)
        return choice.mode, choice.reason

    def weights(self, mode: Mode, storage: Storage, budget: Budget) -> list[Need]:
        """Say what they take."""
        if mode == "map":
            self._held = self._held or self._look()
            found = _of_mapping(self._contents, self._held, storage, budget)
        else:
            nbytes = loading.copy_bytes(self._model)
            found = storage.block(nbytes, _PADDING, budget, _rows(self.by_type()))
        return [found, _headers(self._model.files)]

    def _look(self) -> _Held:
        # Nothing of files with a disk behind them is locked yet.
        held = _Held(0, 0, 0)
        for file, fd in zip(self._model.files, self._model.fds, strict=True):
            if file.in_memory:
                with Block._map_fd(fd, 0, file.nbytes, "r", file.path) as block:
                    held = held.plus(_held(file, block))
        return held

    def cached_bytes(self) -> int:
        """Tell what of the files is in the page cache."""
        return loading.cached_bytes(self._model)

    def device_bytes(self) -> int:
        """Tell what the tensors take on a GPU, before that is rounded to pages."""
        from unimem.cuda import upload

        return upload.bytes_needed(self._contents)


class OfWeights:
    """Weights that are in memory. For one thread.

    Parameters
    ----------
    weights : Weights
        Which stay open.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._held: _Held | None = None
        self.shape, self.facts = _described(weights, None)

    def by_type(self) -> dict[str, int]:
        """Tell the bytes of all tensors of a type."""
        return self._weights.by_type()

    def mode(self, load: Load, _placement: PlacementOptions) -> tuple[Mode, str]:
        """Tell how they came into memory, and why so.

        Raises
        ------
        ValueError
            It was asked for another way.
        """
        weights = self._weights
        if load not in ("auto", weights.load):
            raise ValueError(f"load={load!r}: the weights are opened already ({weights.load!r})")
        return weights.load, weights.load_reason

    def weights(self, _mode: Mode, storage: Storage, budget: Budget) -> list[Need]:
        """Say what they take, and have taken."""
        weights = self._weights
        headers = _headers(part.file for part in weights._parts)
        if weights.load == "map":
            self._held = self._held or self._look()
            return [_of_mapping(weights, self._held, storage, budget), headers]
        types, nbytes = _rows(weights.by_type()), weights.mapped_bytes
        on_tape = weights._tape is not None
        in_pool = not on_tape and weights.blocks[0].granted.pages in policy.HUGETLB
        ram = 0 if in_pool else nbytes
        return [Need(_padded(types, nbytes), ram_bytes=ram, taken_bytes=ram), headers]

    def _look(self) -> _Held:
        held = _Held(0, 0, 0)
        for part in self._weights._parts:
            held = held.plus(_held(part.file, part.memory.block))
        return held

    def cached_bytes(self) -> int:
        """Tell what of the files is in the page cache."""
        found = 0
        for part in self._weights._parts:
            found += min(part.memory.block._resident_range(0, part.file.nbytes), part.file.nbytes)
        return found

    def device_bytes(self) -> int:
        """Tell what the tensors take on a GPU, before that is rounded to pages."""
        from unimem.cuda import upload

        return upload.bytes_needed(self._weights)


def _described(weights: Contents, index: str | None) -> tuple[Shape, dict[str, Any]]:
    """Tell a model's shape, and what is said of it."""
    first = weights._parts[0].file
    path = index or first.path
    facts: dict[str, Any] = {"model": path}
    if isinstance(first.header, SafetensorsHeader):
        shape = shapes.of_config(*shapes.config_beside(path))
        facts["format"] = "safetensors"
    else:
        shape = shapes.of_weights(weights)
        facts["format"] = "GGUF"
        name = weights.metadata.get("general.name")
        if isinstance(name, str):
            facts["name"] = name[:_NAME_CHARS]
        if shape.dims is not None:
            facts["ggml"] = _GGML
    if shape.arch is not None:
        facts["architecture"] = shape.arch[:_NAME_CHARS]
    return shape, facts


def _headers(files: Iterable[ModelFile]) -> Need:
    """Say what copies of files' headers take, which are there as long as the files are opened."""
    nbytes = sum(file.header.copied_bytes for file in files)
    return Need({"other": nbytes}, ram_bytes=nbytes, taken_bytes=nbytes)


def _held(file: ModelFile, block: Block) -> _Held:
    """Look at what of a mapped file cannot be dropped: what is locked, or has no disk behind it."""
    size, placed = file.nbytes, block.verify()
    if not file.in_memory:
        locked = min(placed.locked_bytes, size)
        return _Held(locked, locked, 0)
    if placed.pages in policy.HUGETLB:
        return _Held(0, 0, size)
    return _Held(size, min(block._resident_range(0, size), size), 0)


def _of_mapping(weights: Contents, held: _Held, storage: Storage, budget: Budget) -> Need:
    """Say what mapped files take."""
    nbytes = sum(_whole_pages(part.file.nbytes) for part in weights._parts)
    need = _file(_rows(weights.by_type()), nbytes, storage, budget)
    ram = max(held.fixed_bytes, need.ram_bytes - held.pool_bytes)
    return replace(
        need,
        ram_bytes=ram,
        file_bytes=max(0, nbytes - ram - held.pool_bytes),
        taken_bytes=held.taken_bytes,
    )


def _file(types: dict[str, int], nbytes: int, storage: Storage, budget: Budget) -> Need:
    """Say what a mapped file takes, which is locked where there is room for that."""
    locks = bool(storage.lock)
    if locks and not storage.strict:
        locks = lock_refusal(storage.lock, nbytes, budget) is None
    if locks:
        budget.lock(nbytes)
    return Need(
        _padded(types, nbytes),
        ram_bytes=nbytes if locks else 0,
        file_bytes=0 if locks else nbytes,
        lock_bytes=nbytes if storage.lock else 0,
    )


def _rows(types: dict[str, int]) -> dict[str, int]:
    return {f"weights:{kind}": nbytes for kind, nbytes in types.items() if nbytes}


def _padded(types: dict[str, int], nbytes: int) -> dict[str, int]:
    padding = nbytes - sum(types.values())
    return types | ({_PADDING: padding} if padding else {})


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
