"""`unimem stage`: a model once in shared memory, for every process that opens the path."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, Literal

import typer

from unimem.cli import terminal
from unimem.placement import Pages, format_bytes, together
from unimem.placing import parse_numa
from unimem.stage import stage as make_stage
from unimem.stage_held import Held, drop, hold, hold_files, holders
from unimem.stage_places import sweep
from unimem.weights import open_weights

__all__ = ["stage"]


def stage(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF or safetensors file, a part of a split one, or an index of several.",
            show_default=False,
        ),
    ] = None,
    pages: Annotated[Pages, typer.Option(help="Pages that it shall lie in.")] = "auto",
    numa: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="NUMA nodes, such as interleave or bind:0. [default: none]",
            show_default=False,
        ),
    ] = None,
    lock: Annotated[bool, typer.Option("--lock", help="Keep it from being swapped out.")] = False,
    backing: Annotated[
        Literal["auto", "tmpfs", "hugetlb", "memfd", "shm"],
        typer.Option(help="The kind of shared memory."),
    ] = "auto",
    page_cache: Annotated[
        bool,
        typer.Option(
            "--page-cache", help="Read the file itself into the page cache; with --lock, keep it."
        ),
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="Show what is staged.")] = False,
    drop_what: Annotated[
        str | None,
        typer.Option(
            "--drop",
            metavar="PATH|MODEL|all",
            help="End what is staged under this path, of this model, or all.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead (see docs/cli.md).")
    ] = False,
) -> None:
    """Put a model into shared memory once, and print the path that other programs open."""
    _check_usage(model, numa, show=show, drop_what=drop_what, page_cache=page_cache, other=backing)
    sweep()
    if show:
        _list(holders(), as_json=as_json)
    elif drop_what is not None:
        _drop(drop_what, as_json=as_json)
    else:
        assert model is not None
        asked: dict[str, Any] = {"pages": pages, "numa": numa, "lock": lock, "backing": backing}
        if page_cache:
            asked["backing"] = "page-cache"
        _stage(model, asked, as_json=as_json)


def _check_usage(
    model: str | None,
    numa: str | None,
    *,
    show: bool,
    drop_what: str | None,
    page_cache: bool,
    other: str,
) -> None:
    if (model is not None) + show + (drop_what is not None) != 1:
        raise typer.BadParameter("expected one of MODEL, --list and --drop")
    if page_cache and (other != "auto" or numa is not None):
        raise typer.BadParameter(
            "--page-cache has pages and nodes of its own: no --backing, --numa"
        )
    try:
        parse_numa(numa)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


# ---- staging --------------------------------------------------------------------------------


def _stage(model: str, asked: dict[str, Any], *, as_json: bool) -> None:
    source = os.path.abspath(model)
    with _alone(source):
        found = _reuse(source, asked)
        if found is None and asked["backing"] == "page-cache":
            held = _warm(source, asked)
        elif found is None:
            held = _read_in(source, asked)
        else:
            held = found
    if as_json:
        terminal.show(json.dumps(_document(held) | {"reused": found is not None}) + "\n")
    else:
        terminal.show_path(held.path)
    again = "was staged already" if found is not None else "is staged"
    _tell(f"{source} {again}: {_describe(held)}")
    if held.pid:
        _tell(f"process {held.pid} keeps it, until: unimem stage --drop {held.path}")


@contextmanager
def _alone(source: str) -> Iterator[None]:
    """Wait until no other command stages this model."""
    # Without O_NONBLOCK, opening a FIFO would wait for a writer. What is wrong with the file is
    # told by who reads it.
    try:
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        yield
        return
    try:
        # Some network file systems lock only what may be written: there, two may stage it twice.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _reuse(source: str, asked: dict[str, Any]) -> Held | None:
    """Find the same model, staged in the same way; what was made of older files is dropped."""
    of_model = [held for held in holders() if held.source == source]
    for held in of_model:
        if not held.is_current():
            _tell(f"{source} was written to or replaced: what was staged of it is dropped")
            drop(held)
    return next((h for h in of_model if h.asked == asked and h.is_current()), None)


def _read_in(source: str, asked: dict[str, Any]) -> Held:
    with terminal.updates("staging") as progress:
        made = make_stage(source, progress=progress, **asked)
    return hold(made, source, asked)


def _warm(source: str, asked: dict[str, Any]) -> Held:
    """Read the files into the page cache."""
    with open_weights(source, load="map") as weights:
        with terminal.updates("reading") as progress:
            weights.warm(progress=progress)
        if asked["lock"]:  # what keeps it will do so, too: here it is seen whether it may be
            weights.lock()
        granted = together([block.verify() for block in weights.blocks])
        versions = [(part.file.path, part.file.version) for part in weights._parts]
        if asked["lock"]:
            return hold_files(source, versions, granted, asked)
    paths = tuple(path for path, _ in versions)
    nbytes = sum(version[2] for _, version in versions)
    return Held(0, source, paths, source, tuple(versions), asked, "page-cache", nbytes, granted)


# ---- what is staged -------------------------------------------------------------------------


def _list(found: list[Held], *, as_json: bool) -> None:
    if as_json:
        terminal.show(json.dumps([_document(held) for held in found]) + "\n")
        return
    for held in found:
        stale = "" if held.is_current() else "; the model was written to or replaced since"
        path, source = map(terminal.one_line, (held.path, held.source))
        terminal.show(f"{path}\n    {source}: {_describe(held)}; process {held.pid}{stale}\n")
    if not found:
        _tell("nothing is staged")


def _drop(what: str, *, as_json: bool) -> None:
    source = os.path.abspath(what)
    found = [
        held
        for held in holders()
        if what == "all" or what in (held.path, *held.paths) or held.source == source
    ]
    if not found and what != "all":
        raise ValueError(f"{what}: nothing is staged under this name: unimem stage --list")
    for held in found:
        drop(held)
        _tell(f"dropped {held.path}, of {held.source}")
    if as_json:
        terminal.show(json.dumps([_document(held) for held in found]) + "\n")


def _document(held: Held) -> dict[str, Any]:
    return held.to_dict() | {"current": held.is_current()}


def _describe(held: Held) -> str:
    return f"{format_bytes(held.nbytes)}, {held.backing}, {held.granted}"


def _tell(text: str) -> None:
    if sys.stderr is not None:
        print(f"unimem: {terminal.one_line(text)}", file=sys.stderr)
