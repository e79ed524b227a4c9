"""A model staged once on each of several NUMA nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

from unimem.base.arguments import file_path
from unimem.remote.client import shown
from unimem.system.placement import PlacementOptions
from unimem.weights.loading import Progress
from unimem.weights.node_copies import nodes_for_copies
from unimem.weights.remote_files import open_files

_Stage = TypeVar("_Stage", bound=AbstractContextManager[Any])


def stage_copies(
    stage: Callable[..., _Stage],
    path: str | os.PathLike[str],
    placement: PlacementOptions,
    progress: Progress | None,
    options: Mapping[str, Any],
) -> dict[int | None, _Stage]:
    """Stage a model on each node, all or none; if no node has room, once anywhere, by key None."""
    with open_files(path) as model:
        nbytes = sum(file.nbytes for file in model.files)
    nodes = nodes_for_copies(f"staged {shown(file_path(path))}", nbytes, placement)
    made: list[_Stage] = []

    def tell(done: int, of: int) -> None:
        if progress is not None:
            progress(len(made) * of + done, max(1, len(nodes)) * of)

    places: list[int | None] = [*nodes] or [None]
    with ExitStack() as undo:
        for node in places:
            placed = placement | {"numa": None if node is None else f"bind:{node}"}
            made.append(undo.enter_context(stage(path, progress=tell, **options, **placed)))
        undo.pop_all()
    return dict(zip(places, made, strict=True))
