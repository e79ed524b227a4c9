"""The processes of this machine that have a model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from unimem.accounting.mapped_models import models
from unimem.accounting.published import published
from unimem.system.process import read_process

SCHEMA = "unimem.processes/1"


@dataclass(frozen=True, slots=True)
class ModelProcess:
    """A process that maps model files, or publishes its ledger.

    Attributes
    ----------
    pid, name, command : int, str, str
        As of a `Process`.
    models : tuple of str
        Paths of the model files that it maps, by address.
    has_ledger : bool
        Whether it publishes unimem's memory.
    rss_bytes, pss_bytes : int
        Its memory in RAM, and that by share, where a page that n processes share counts 1/n.
    staged_from : tuple of (str or None)
        For each of `models`, the file that was staged.
    keeps_staged : bool
        Whether it keeps models for others (`unimem stage`, `um.stage`).
    """

    pid: int
    name: str
    command: str
    models: tuple[str, ...]
    has_ledger: bool
    rss_bytes: int
    pss_bytes: int
    staged_from: tuple[str | None, ...] = ()
    keeps_staged: bool = False


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes that were found.

    Attributes
    ----------
    found : tuple of ModelProcess
        The one with most in RAM, by share, first.
    n_hidden : int
        Processes that are not ours to look at.
    """

    found: tuple[ModelProcess, ...]
    n_hidden: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, numbers and texts, as in JSON."""
        return {
            "schema": SCHEMA,
            "processes": [
                asdict(process)
                | {"models": [*process.models], "staged_from": [*process.staged_from]}
                for process in self.found
            ],
            "n_hidden": self.n_hidden,
        }


def find() -> Processes:
    """Find the processes with a model, except this one.

    Only their memory is read: the kernel walks no page tables of other processes.
    """
    found, n_hidden = [], 0
    for pid in _others():
        # Processes may end meanwhile, and threads of the kernel have no memory.
        with suppress(ProcessLookupError, ValueError):
            try:
                areas = read_process(pid, usage=False)
                mapped = {model.path: model for model in models(areas)}
                shown = published(pid)
                # Any program may run under `unimem exec`.
                has_ledger = shown is not None and bool(shown.counters)
                if not (mapped or has_ledger):
                    continue
                process = read_process(pid)
            except PermissionError:
                n_hidden += 1
                continue
            found.append(
                ModelProcess(
                    pid=pid,
                    name=process.name,
                    command=process.command,
                    models=tuple(mapped),
                    has_ledger=has_ledger,
                    rss_bytes=process.rss_bytes,
                    pss_bytes=process.pss_bytes,
                    staged_from=tuple(model.source for model in mapped.values()),
                    keeps_staged=any(model.is_kept for model in mapped.values()),
                )
            )
    found.sort(key=lambda process: -process.pss_bytes)
    return Processes(tuple(found), n_hidden)


def _others() -> Iterator[int]:
    import psutil

    yield from (pid for pid in psutil.pids() if pid != os.getpid())
