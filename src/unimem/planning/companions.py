"""Projectors and draft models, which llama.cpp loads beside a model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from unimem.models.shapes import grouped
from unimem.planning.needs import Budget, Need, Storage
from unimem.planning.sources import FileSource
from unimem.weights.remote_files import open_files

if TYPE_CHECKING:
    from unimem.planning.llama_cpp import LlamaSession

_OWN = "mtp"  # of the model's own layers, as llama-server's --spec-type draft-mtp
_NO_IMAGES = "the projector's compute buffers: they follow from the images and sounds that it reads"
# Architectures of drafts that read the states of the model, which then keeps earlier ones.
_READERS = ("eagle3", "dflash")


@dataclass(frozen=True, slots=True)
class Companions:
    """What is loaded beside a model. For one thread.

    Attributes
    ----------
    projector, draft : FileSource or None
        Their files.
    is_own : bool
        Whether the model's own layers are the draft.
    """

    projector: FileSource | None
    draft: FileSource | None
    is_own: bool

    @property
    def predicts(self) -> bool:
        """Whether the model keeps earlier states for the draft."""
        return self.is_own or (self.draft is not None and self.draft.shape.arch in _READERS)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Sentences about what the draft keeps, and about the projector."""
        draft = () if self.draft is None else self.draft.shape.unknown
        return draft if self.projector is None else (*draft, _NO_IMAGES)

    @property
    def is_counted(self) -> bool:
        """Whether all that the draft keeps is known."""
        draft = self.draft
        return draft is None or (draft.shape.is_counted and draft.widths is not None)

    def weights(self, storage: Storage, budget: Budget, sessions: int) -> list[Need]:
        """List the weights: a projector's are read, a draft's are mapped."""
        found = []
        if self.projector is not None:
            nbytes = sum(self.projector.by_type().values())
            found += [Need({"weights:projector": nbytes}, ram_bytes=nbytes)] * sessions
        if self.draft is not None:
            for need in self.draft.weights("map", storage, budget, sessions):
                name = "weights:draft" if need.file_bytes or need.lock_bytes else "other"
                found.append(replace(need, rows={name: need.nbytes}))
        return found

    def caches(self, session: LlamaSession, ctx: int) -> list[Need]:
        """List what the draft keeps and computes; its cache has as many cells as the model's."""
        widths = session.widths
        if self.is_own:
            layers = session.shape.predictors
            if not layers:
                raise ValueError(
                    "draft='mtp': the model has no layers that predict further tokens "
                    "('nextn_predict_layers'): give the file of a draft model"
                )
            shape = replace(session.shape, layers=layers, cache=grouped(layers))
        elif self.draft is not None:
            shape, widths = self.draft.shape, self.draft.widths
        else:
            return []
        own = replace(session, shape=shape, widths=widths, predicts=False, cache_ram=0)
        return own.needs(ctx, suffix=":draft")


@contextmanager
def open_companions(
    mmproj: str | os.PathLike[str] | None, draft: str | os.PathLike[str] | None
) -> Iterator[Companions | None]:
    """Open their files, which may be on a server; yield None without any."""
    with ExitStack() as stack:

        def source(path: str | os.PathLike[str] | None) -> FileSource | None:
            if path is None or path == _OWN:
                return None
            return FileSource(stack.enter_context(open_files(path, tries=1)), is_here=False)

        if mmproj is None and draft is None:
            yield None
        else:
            yield Companions(source(mmproj), source(draft), draft == _OWN)
