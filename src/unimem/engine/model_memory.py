"""How a decoder's model comes into memory: checked, then opened or borrowed, mapped or repacked."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from unimem._core.block import Block
from unimem.backends import ggml
from unimem.engine.advice_op import FileAdvice
from unimem.engine.advised import add_advice, has_room
from unimem.engine.graph import Headers
from unimem.engine.model import Model
from unimem.engine.pieces_op import PieceReader
from unimem.engine.streamed import read_pieces
from unimem.kv.types import kv_pair
from unimem.layout import Layout
from unimem.planning.plan import plan
from unimem.planning.result import Plan
from unimem.remote.client import is_url
from unimem.remote.transfers import TRIES
from unimem.system import limits, policy
from unimem.system.placement import PlacementOptions
from unimem.weights.loading import (
    EngineLoad,
    Lifetime,
    LoadRequest,
    Progress,
    check_load,
    way_of,
)
from unimem.weights.opened import (
    Weights,
    WeightsCopy,
    lock_what_is_mapped,
    open_planned,
    open_weights,
    warm_where_it_fits,
)
from unimem.weights.remote_files import open_remote
from unimem.weights.repack.repack import repack_and_warm
from unimem.weights.repack.repacked import Repacked
from unimem.weights.tensors import Contents, Tensor, headers_of

# Of Python's objects for a model, beside the kernel's tables of pages: the most, and the share of a
# small model's plan.
_MOST_OWN_BYTES, _OWN_SHARE, _PAGES_A_TABLE = 4 << 20, 16, 512

_READERS: WeakKeyDictionary[WeightsCopy, WeakSet[Reader]] = WeakKeyDictionary()


class DecoderOptions(NamedTuple):
    """The options of a decoder that its plan depends on."""

    ctx: int | None
    kv_dtype: str
    rotate: bool | None
    window: int | None
    threads: int | None
    layout: Layout | None
    numa: str | None
    weights_budget: int | str | None = None


def _check_model(
    weights: Contents,
    planned: str | os.PathLike[str] | Weights,
    load: EngineLoad,
    asked: DecoderOptions,
) -> tuple[Model, Plan]:
    """Check that the engine runs a model with these options, and that its plan fits."""
    layout, numa = asked.layout, asked.numa
    if layout is not None and not isinstance(layout, Layout):
        raise TypeError(f"layout: expected a unimem.Layout, got {layout!r:.60}")
    model = Model.from_weights(weights)
    model.check_types(*kv_pair(asked.kv_dtype))
    model.rotates(asked.rotate, *kv_pair(asked.kv_dtype))  # raises if it cannot
    placement: dict[str, Any] = {} if numa is None else {"numa": numa}
    if layout is not None:
        if numa is not None:
            raise ValueError(f"numa={numa!r}: the layout's memory is placed already: leave out one")
        requested = layout.history.block.requested
        placement = {"pages": requested["pages"]}
        if load == "repack":  # repacked weights are placed like the history
            placement["numa"] = requested["numa"]
    needed = plan(
        planned,
        ctx=asked.ctx,
        kv_dtype=asked.kv_dtype,
        window=asked.window,
        threads=asked.threads,
        load=load,
        weights_budget=None if isinstance(planned, Weights) else asked.weights_budget,
        engine="unimem",
        **placement,
    )
    assert needed.ctx is not None  # known for every model that the engine runs
    ggml.require_threads(needed.threads)
    model.check_window(min(needed.ctx, asked.window or needed.ctx))
    # Past the limit of a cgroup, warming would end the process instead of failing.
    tapes = () if layout is None else (layout.scratch, layout.history)
    resident = sum(tape.block.verify().resident_bytes for tape in tapes)
    _with_own(needed).require_fits(strict=False, taken_bytes=resident)
    return model, needed


def _with_own(needed: Plan) -> Plan:
    """Add what a process takes beside its plan, if slots may fill a limit to the last byte."""
    if needed.load != "stream":
        return needed
    memory = {limit.name for limit in limits.memory_limits()}
    nbytes = needed.total_bytes
    own_bytes = min(_MOST_OWN_BYTES, nbytes // _OWN_SHARE) + nbytes // _PAGES_A_TABLE
    checks = [
        replace(one, needed_bytes=one.needed_bytes + own_bytes) if one.name in memory else one
        for one in needed.checks
    ]
    return replace(needed, checks=tuple(checks))


def _check_no_budget(asked: DecoderOptions) -> None:
    if asked.weights_budget is not None:
        raise ValueError(
            f"weights_budget={asked.weights_budget!r}: the weights are opened already: "
            "open them with this budget, or change it with weights.stream.resize()"
        )


class Reader:
    """A reader of mirrored weights, bound to the thread that created it.

    It picks a copy on a node that this thread may run on: the one with the fewest readers, and of
    these the nearest. The thread, and threads that it starts, are bound to the CPUs of that node
    until `end`. `contents` are the weights to read, and `n_cores` the physical cores that compute,
    or None unless the weights are mirrored.
    """

    def __init__(self, weights: Weights) -> None:
        self.contents: Contents = weights
        self.n_cores: int | None = None
        self._copy: WeightsCopy | None = None
        self._thread = threading.get_ident()
        self._bound: tuple[set[int], set[int]] | None = None
        if weights.copies:
            self._choose(weights)

    def _choose(self, weights: Weights) -> None:
        nodes, allowed, nearest = limits.nodes(), limits.cpus(), weights.on()
        here = [
            copy
            for node, copy in weights.copies.items()
            if node in nodes and allowed.intersection(nodes[node].cpus)
        ]

        def order(copy: WeightsCopy) -> tuple[int, bool]:
            return len(_READERS.get(copy, ())), copy is not nearest

        self._copy = min(here, key=order, default=None)
        if self._copy is None:  # no copy is on a node of this thread
            self.contents = nearest
            return
        self.contents = self._copy
        _READERS.setdefault(self._copy, WeakSet()).add(self)
        cpus = allowed.intersection(nodes[self._copy.node].cpus)
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cpus)
        self._bound = before, cpus
        self.n_cores = limits.thread_count(cpus)

    def end(self) -> None:
        """Stop reading, and undo the binding of the thread unless it was bound anew since."""
        if self._copy is not None:
            _READERS[self._copy].discard(self)
            self._copy = None
        if self._bound is not None and threading.get_ident() == self._thread:
            before, cpus = self._bound
            if os.sched_getaffinity(0) == cpus:
                os.sched_setaffinity(0, before)
        self._bound = None


class ModelMemory:
    """The weights of one decoder, for its options. For one thread.

    Attributes
    ----------
    weights : Weights
        The opened model.
    repacked : Repacked or None
        Its repacked tensors, after `bring_in`.
    reader : Reader or None
        The reader of the weights, once they are open.
    pieces : PieceReader or None
        The reader of streamed weights, after `adopt`.
    model, plan : Model, Plan
        The checked model, and what the decoder needs.
    load, load_reason : str
        How the model comes into memory, and why.
    """

    def __init__(
        self,
        path_or_weights: str | os.PathLike[str] | Weights,
        load: EngineLoad,
        progress: Progress | None,
        asked: DecoderOptions,
    ) -> None:
        check_load(load, for_engine=True)
        self.repacked: Repacked | None = None
        self.reader: Reader | None = None
        self.pieces: PieceReader | None = None
        self._advice: list[FileAdvice] = []
        self.is_owned = not isinstance(path_or_weights, Weights)
        reason = None
        layout = asked.layout
        placement: PlacementOptions = {} if asked.numa is None else {"numa": asked.numa}
        if isinstance(path_or_weights, Weights):
            _check_no_budget(asked)
            self.weights, opened = path_or_weights, load
            is_theirs = isinstance(layout, Layout) and layout.weights is path_or_weights
            made_for = layout.plan if layout is not None and is_theirs else None
            if load == "auto" and made_for is not None and made_for.load in ("repack", "stream"):
                opened, reason = made_for.load, made_for.load_reason
        elif is_url(path_or_weights):
            # The source of a repacked model stays in memory: no file could be read again.
            way = way_of(path_or_weights, load, asked.weights_budget)
            with open_remote(path_or_weights, TRIES) as remote:
                _check_model(headers_of(remote), path_or_weights, way, asked)
            opened = "repack" if load == "repack" else "auto"
            self.weights = open_weights(
                path_or_weights,
                load="direct" if way == "repack" else way,
                progress=progress,
                **placement,
            )
        else:
            # Refuse a model before its data are read.
            with open_weights(path_or_weights, load="map") as weights:
                _, first = _check_model(weights, path_or_weights, load, asked)
            opened = "repack" if "repack" in (load, first.load) else "auto"
            reason = first.load_reason
            way = "map" if load == "repack" or opened == "repack" else load
            if first.load == "stream":
                opened = way = "stream"
            why_mapped = reason if first.load == "map" else ""
            if opened == "repack":  # only the repacked tensors are placed
                placement = {}
            request = LoadRequest(
                way, progress=progress, placement=placement, why_mapped=why_mapped,
                budget=first.weights_budget,
            )  # fmt: skip
            self.weights = open_planned(path_or_weights, request)

        try:
            self.model, self.plan = _check_model(self.weights, self.weights, opened, asked)
            self.load: str = self.plan.load
            self.load_reason = self.plan.load_reason
            if self.load in ("repack", "stream") and reason is not None:
                self.load_reason = reason
            elif load == "repack" and self.load != "repack":
                policy.warn(f"{self.weights.files[0]} is not repacked: {self.load_reason}")
            self.reader = Reader(self.weights)
        except BaseException:
            self.end()
            raise

    def bring_in(self, layout: Layout, threads: int, progress: Progress | None) -> None:
        """Repack tensors, placed like the layout's history, and warm what is mapped.

        The mapped rest of a repacked model is locked if its pages might be reclaimed. Opened
        weights that are mapped stay as they are.
        """
        if self.load == "repack":
            requested = layout.history.block.requested
            placement: Any = {name: requested[name] for name in ("pages", "numa", "lock")}
            self.repacked = repack_and_warm(self.weights, threads, progress, **placement)
            if self.is_owned or layout.weights is self.weights:
                lock_what_is_mapped(self.weights)
        elif self.is_owned and self.weights.load == "map":
            warm_where_it_fits(self.weights, threads, progress)

    def adopt(self, headers: Headers, batch: int) -> None:
        """Point ggml's headers at the repacked tensors, or at the slots of streamed ones.

        `pieces` reads those from then on, for up to `batch` tokens at once. The kernel is asked for
        mapped tensors that have no room before they are used.
        """
        stream = self.weights.stream
        if stream is not None:
            self.pieces = read_pieces(headers, self.model, self.tensors, stream, batch)
        elif self.load == "map" and not has_room(self.weights):
            self._advice = add_advice(headers, self.model, self.tensors)
        if self.repacked is not None:
            for name in self.repacked.tensors:
                self.repacked._adopt(headers.weights[name], name)

    def check_files(self) -> None:
        """Raise OSError if the file of streamed weights was written to since it was opened.

        Their slots may move: for a time at which the decoder uses no pieces.
        """
        if self.weights.stream is not None:
            self.weights.stream.check_files()
            self.weights.stream._move_slots()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors that the decoder reads; of mirrored weights, those of one copy."""
        return (self.weights if self.reader is None else self.reader.contents).tensors

    @property
    def lifetime(self) -> Lifetime | None:
        """The lifetime of weights on a tape, which may take their memory back; None for others."""
        return None if self.weights._tape is None else self.weights._opened().lifetime

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All memory of the weights."""
        return self.weights.blocks + (() if self.repacked is None else self.repacked.blocks)

    def end(self, kind: type[BaseException] | None = None) -> None:
        """Give back the decoder's memory; live views keep theirs.

        An image that is being written is completed first, or dropped if `kind` is an exception.
        """
        self._advice = []  # it keeps mappings
        try:
            if self.pieces is not None:
                self.pieces.close()
            if self.repacked is not None:
                self.repacked.__exit__(kind)
        finally:
            if self.reader is not None:
                self.reader.end()
            if self.is_owned:
                self.weights.__exit__(None, None, None)
