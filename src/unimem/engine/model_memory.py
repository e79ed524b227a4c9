"""How a decoder's model comes into memory: opened or borrowed, mapped, read or repacked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from unimem._core.block import Block
from unimem.engine.checks import check_model
from unimem.engine.graph import Headers
from unimem.engine.nodes import Reader
from unimem.layout import Layout
from unimem.remote.transfers import TRIES
from unimem.system import policy
from unimem.system.placement import PlacementOptions
from unimem.weights.loading import EngineLoad, LoadRequest, Progress, check_load, way_of
from unimem.weights.opened import (
    Weights,
    lock_what_is_mapped,
    open_planned,
    open_weights,
    warm_where_it_fits,
)
from unimem.weights.remote_files import is_url, open_remote
from unimem.weights.repack.repack import repack_and_warm
from unimem.weights.repack.repacked import Repacked
from unimem.weights.tensors import Tensor, headers_of

__all__ = ["ModelMemory"]


class ModelMemory:
    """The weights of one decoder. For one thread.

    Parameters
    ----------
    path_or_weights, load, progress
        As for `Decoder`.
    **asked
        What else `check_model` takes.

    Attributes
    ----------
    weights : Weights
        The opened model.
    repacked : Repacked or None
        What of it lies in another order, since `bring_in`.
    reader : Reader or None
        What of the weights is read, and where; None until they are open.
    model, plan : Model, Plan
        What was checked, and what the decoder needs.
    load, load_reason : str
        How it comes into memory, and why.
    """

    def __init__(
        self,
        path_or_weights: str | os.PathLike[str] | Weights,
        load: EngineLoad,
        progress: Progress | None,
        **asked: Any,
    ) -> None:
        check_load(load, for_engine=True)
        self.repacked: Repacked | None = None
        self.reader: Reader | None = None
        self.is_owned = not isinstance(path_or_weights, Weights)
        reason = None
        layout, numa = asked["layout"], asked["numa"]
        placement: PlacementOptions = {} if numa is None else {"numa": numa}
        if isinstance(path_or_weights, Weights):
            self.weights, opened = path_or_weights, load
            is_theirs = isinstance(layout, Layout) and layout.weights is path_or_weights
            made_for = layout.plan if is_theirs else None
            if load == "auto" and made_for is not None and made_for.load == "repack":
                opened, reason = "repack", made_for.load_reason
        elif is_url(path_or_weights):
            # What it is repacked from stays in memory: there is no file that it could come from.
            way = way_of(path_or_weights, load)
            with open_remote(path_or_weights, TRIES) as remote:
                check_model(headers_of(remote), path_or_weights, load=way, **asked)
            opened = "repack" if load == "repack" else "auto"
            self.weights = open_weights(
                path_or_weights,
                load="direct" if way == "repack" else way,
                progress=progress,
                **placement,
            )
        else:
            # A model that is refused is refused before its data are read.
            with open_weights(path_or_weights, load="map") as weights:
                _, first = check_model(weights, path_or_weights, load=load, **asked)
            opened = "repack" if "repack" in (load, first.load) else "auto"
            reason = first.load_reason
            way = "map" if load == "repack" or opened == "repack" else load
            why_mapped = reason if first.load == "map" else ""
            if opened == "repack":  # the nodes are those of what is repacked
                placement = {}
            request = LoadRequest(
                way, progress=progress, placement=placement, why_mapped=why_mapped
            )
            self.weights = open_planned(path_or_weights, request)

        try:
            self.model, self.plan = check_model(self.weights, self.weights, load=opened, **asked)
            self.load: str = self.plan.load
            self.load_reason = self.plan.load_reason
            if self.load == "repack" and reason is not None:
                self.load_reason = reason
            elif load == "repack" and self.load != "repack":
                policy.warn(f"{self.weights.files[0]} is not repacked: {self.load_reason}")
            self.reader = Reader(self.weights)
        except BaseException:
            self.end()
            raise

    def bring_in(self, layout: Layout, threads: int, progress: Progress | None) -> None:
        """Repack what is to be repacked, placed like the layout's history, and warm what is mapped.

        What stays mapped of a repacked model is locked where its pages could be taken away. Weights
        that were given mapped, and stay so, are left as they are.
        """
        if self.load == "repack":
            asked = layout.history.block.requested
            placement: Any = {name: asked[name] for name in ("pages", "numa", "lock")}
            self.repacked = repack_and_warm(self.weights, threads, progress, **placement)
            if self.is_owned or layout.weights is self.weights:
                lock_what_is_mapped(self.weights)
        elif self.is_owned and self.weights.load == "map":
            warm_where_it_fits(self.weights, threads, progress)

    def adopt(self, headers: Headers) -> None:
        """Point ggml's headers of repacked tensors to these."""
        if self.repacked is not None:
            for name in self.repacked.tensors:
                self.repacked._adopt(headers.weights[name], name)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What the decoder reads: of mirrored weights, one copy."""
        return (self.weights if self.reader is None else self.reader.contents).tensors

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All that the weights lie in."""
        return self.weights.blocks + (() if self.repacked is None else self.repacked.blocks)

    def end(self, kind: type[BaseException] | None = None) -> None:
        """Give back what the decoder has taken; views that are alive keep their memory.

        An image that is being kept is kept first, or by an exception of this kind given up.
        """
        try:
            if self.repacked is not None:
                self.repacked.__exit__(kind)
        finally:
            if self.reader is not None:
                self.reader.end()
            if self.is_owned:
                self.weights.__exit__(None, None, None)
