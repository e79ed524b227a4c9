"""`unimem stage`: a model once in shared memory, for every process that opens the path."""

from __future__ import annotations

import json
import os
import sys
import warnings
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Annotated, Any, Literal

import typer

from unimem.base.text import escape, format_bytes
from unimem.cli import terminal
from unimem.cli.options import AsJson, NumaNodes, check_numa, value_option
from unimem.remote.client import is_url, shown, url_key
from unimem.staging.backings import sweep
from unimem.staging.keeper import drop, exclude_others, hold, hold_files
from unimem.staging.llama_cpp import RepackedByLlamaCpp, cpu_features, find_repacked
from unimem.staging.stage import stage as make_stage
from unimem.staging.unfinished import find_unfinished
from unimem.system.placement import Pages, sum_placements
from unimem.weights.files import Version, durable_path
from unimem.weights.opened import open_weights
from unimem.weights.remote_files import open_files
from unimem.weights.staged import Held, holders

__all__ = ["stage", "stage_for"]

_MOST_LEFT = 5  # named


def stage(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF or safetensors file, a part of a split one, or an index of several; or "
            "its URL.",
            show_default=False,
        ),
    ] = None,
    pages: Annotated[Pages, typer.Option(help="The page size of the staged model.")] = "auto",
    numa: NumaNodes = None,
    lock: Annotated[bool, typer.Option("--lock", help="Keep it from being swapped out.")] = False,
    backing: Annotated[
        Literal["auto", "tmpfs", "hugetlb", "memfd", "shm"],
        typer.Option(help="The kind of shared memory."),
    ] = "auto",
    repack: Annotated[
        bool,
        typer.Option(
            "--repack",
            help="Stage its weights in the order that this CPU multiplies fastest, once for all "
            "decoders of unimem; the rest of the model stays in the page cache.",
        ),
    ] = False,
    page_cache: Annotated[
        bool,
        typer.Option(
            "--page-cache", help="Read the file itself into the page cache; with --lock, keep it."
        ),
    ] = False,
    no_verify: Annotated[
        bool,
        typer.Option("--no-verify", help="Of a URL: do not compare with the hash of its server."),
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="Show what is staged.")] = False,
    drop_what: Annotated[
        str | None,
        value_option(
            "PATH|MODEL|all",
            "End what is staged under this path, of this model, or all. On a terminal, 'all' "
            "asks first; a script is not asked.",
            "--drop",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --drop, say what would end, and end nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --drop all, do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Put a model into shared memory, and print the path to open.

    It is read once; llama.cpp and other programs open the path in place of the model's. An
    interrupted download continues with the next call.
    """
    asked: dict[str, Any] = {"pages": pages, "numa": numa, "lock": lock, "backing": backing}
    if repack:
        asked["repack"] = True
    if no_verify and not is_url(model):
        raise typer.BadParameter("--no-verify is for the URL of a model")
    _check_usage(model, asked, show=show, drop_what=drop_what, page_cache=page_cache)
    for option, value in (("--dry-run", dry_run), ("--yes", yes)):
        if value and drop_what is None:
            raise typer.BadParameter(f"{option} is for --drop")
    _fill_standard_streams()
    left = sweep()
    if left and (show or drop_what is not None):
        more = f" and {len(left) - _MOST_LEFT} more" if len(left) > _MOST_LEFT else ""
        _tell(f"left alone: {', '.join(sorted(left)[:_MOST_LEFT])}{more}")
    if show:
        _list(holders(), as_json=as_json)
    elif drop_what is not None:
        _drop(drop_what, dry_run=dry_run, ask=drop_what == "all" and not yes, as_json=as_json)
    else:
        assert model is not None
        if page_cache:
            asked["backing"] = "page-cache"
        _stage(model, asked, as_json=as_json, verify=not no_verify)


def _check_usage(
    model: str | None, asked: dict[str, Any], *, show: bool, drop_what: str | None, page_cache: bool
) -> None:
    if (model is not None) + show + (drop_what is not None) != 1:
        raise typer.BadParameter("expected one of MODEL, --list and --drop")
    if "" in (model, drop_what):
        raise typer.BadParameter("expected the path of a model, got ''")
    others = (asked["backing"], asked["pages"], asked["numa"])
    if page_cache and others != ("auto", "auto", None):
        raise typer.BadParameter(
            "--page-cache has pages and nodes of its own: no --backing, --pages, --numa"
        )
    if page_cache and asked.get("repack"):
        raise typer.BadParameter("--repack puts another order into memory, which no file has")
    if is_url(model) and (page_cache or asked.get("repack")):
        raise typer.BadParameter(
            "--page-cache and --repack need the files of a model: stage the URL first, and give "
            "the path that this prints"
        )
    check_numa(asked["numa"])


def _fill_standard_streams() -> None:
    """Open closed standard streams, whose numbers a child's files must not get."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


# ---- staging --------------------------------------------------------------------------------


def stage_for(model: str) -> str:
    """Stage a model for a command about to start, and return its path; it stays staged."""
    _fill_standard_streams()
    sweep()
    asked: dict[str, Any] = {"pages": "auto", "numa": None, "lock": False, "backing": "auto"}
    source = durable_path(model)
    with open_files(model) as opened:
        repacked = find_repacked(opened, cpu_features())
        versions = opened.versions()
    with ExitStack() as stack:
        stack.enter_context(_alone(source))
        held = _reuse(source, asked, versions) or stack.enter_context(_read_in(model, asked))
        _tell(f"{source} is staged as {held.path}, until: unimem stage --drop {held.path}")
        _tell_of_copies(repacked)
    return held.path


def _stage(model: str, asked: dict[str, Any], *, as_json: bool, verify: bool) -> None:
    source = _source(model)
    with open_files(model) as opened:
        repacked = find_repacked(opened, cpu_features())
        versions = opened.versions()
    with ExitStack() as stack:
        stack.enter_context(_alone(source))
        found = _reuse(source, asked, versions, url_key(model))
        if found is not None:
            held = found
        elif asked["backing"] == "page-cache":
            held = stack.enter_context(_warm(source, asked))
        else:
            held = stack.enter_context(_read_in(model, asked, verify=verify))
        # If its path cannot be written, it is not kept.
        if as_json:
            terminal.show(json.dumps(_document(held) | {"reused": found is not None}) + "\n")
        else:
            terminal.show_path(held.path)
        again = "was staged already" if found is not None else "is staged"
        _tell(f"{source} {again}: {_describe(held)}")
        if not held.is_repacked:
            _tell_of_copies(repacked)
        if held.pid:
            _tell(f"process {held.pid} keeps it, until: unimem stage --drop {held.path}")
        for warning in held.warnings:
            _tell(f"warning: {warning}")


def _tell_of_copies(repacked: RepackedByLlamaCpp) -> None:
    """Say how much of a model each llama.cpp copies."""
    if repacked.nbytes:
        share = repacked.nbytes / repacked.total_bytes
        _tell(
            f"each llama.cpp on this CPU makes a copy of its own of up to "
            f"{format_bytes(repacked.nbytes)} of it ({share:.0%} of the tensors), in another "
            "order: --no-repack keeps all of it shared"
        )


def _alone(source: str) -> AbstractContextManager[None]:
    """Stage it in one process at a time."""
    waits = f"{source}: waiting for a process that stages it, "
    return exclude_others(source, lambda pid: _tell(f"{waits}{pid}"))


def _source(model: str) -> str:
    """Return the identity of a model: an absolute path, or a URL without secret parts."""
    return shown(model) if is_url(model) else durable_path(model)


def _reuse(
    source: str,
    asked: dict[str, Any],
    versions: list[tuple[str, Version]],
    key: str = "",
) -> Held | None:
    """Find the same files, staged in the same way; outdated copies are dropped.

    `versions` are the present ones; `key` is the `url_key` of a URL.
    """
    found = None
    for held in holders():
        if held.kept_by != "command" or held.is_unfinished:
            continue
        is_same = held.source == source if is_url(source) else held.has_files(versions)
        if not is_same and (is_url(source) or not held.was_replaced_by(versions)):
            continue
        why = held.staleness() or _change(held, versions)
        if why is None and is_same and held.asked == asked:
            found = found or held
        elif why is not None and held.key == key:
            _tell(f"{why}: its staged copy is dropped")
            drop(held)
    return found


def _change(held: Held, versions: list[tuple[str, Version]]) -> str | None:
    if not is_url(held.source):
        return None
    if held.versions != tuple(versions):
        return f"{held.source} was replaced on its server"
    if not all(version[-1] for _, version in versions):
        return f"the server does not tell whether {held.source} was replaced"
    return None


def _read_in(
    model: str, asked: dict[str, Any], *, verify: bool = True
) -> AbstractContextManager[Held]:
    source = _source(model)
    with terminal.updates("staging") as progress, warnings.catch_warnings(record=True) as told:
        try:
            made = make_stage(
                model if is_url(model) else source,
                progress=progress, verify=verify, resume=is_url(model), **asked,
            )  # fmt: skip
        except BaseException:
            for held in find_unfinished(source) if is_url(model) else ():
                _tell(
                    f"the first {format_bytes(held.nbytes)} of {source} stay in memory, kept by "
                    f"process {held.pid}: the same command continues them, and 'unimem stage "
                    f"--drop {source}' drops them"
                )
            raise
    return hold(made, source, asked, [str(each.message) for each in told])


def _warm(source: str, asked: dict[str, Any]) -> AbstractContextManager[Held]:
    """Read the files into the page cache."""
    with open_weights(source, load="map") as weights:
        with terminal.updates("reading") as progress:
            weights.warm(progress=progress)
        if asked["lock"]:  # as the keeper will do: this shows whether it is allowed
            weights.lock()
        granted = sum_placements([block.verify() for block in weights.blocks])
        versions = [(part.file.path, part.file.version) for part in weights._parts]
    if asked["lock"]:
        return hold_files(source, versions, granted, asked)
    paths = tuple(path for path, _ in versions)
    nbytes = sum(version[2] for _, version in versions)
    return nullcontext(
        Held(0, source, paths, source, tuple(versions), asked, "page-cache", nbytes, granted, ())
    )


# ---- what is staged -------------------------------------------------------------------------


def _list(found: list[Held], *, as_json: bool) -> None:
    if as_json:
        terminal.show(json.dumps([_document(held) for held in found]) + "\n")
        return
    for held in found:
        why = held.staleness()
        stale = "" if why is None else f"; {why}"
        program = ", which has staged it itself" if held.kept_by == "program" else ""
        text = f"{held.source}: {_describe(held)}; process {held.pid}{program}{stale}"
        terminal.show(f"{escape(held.path)}\n    {escape(text)}\n")
    if not found:
        _tell("nothing is staged")


def _drop(what: str, *, dry_run: bool, ask: bool, as_json: bool) -> None:
    source = _source(what)
    found = [
        held
        for held in holders()
        if what in ("all", held.path, *held.paths) or held.source == source or held.has_file(what)
    ]
    if not found and what != "all":
        raise ValueError(f"{what}: nothing is staged under this name: unimem stage --list")
    of_programs = [held for held in found if held.kept_by == "program"]
    found = [held for held in found if held.kept_by == "command"]
    stay = [
        f"{held.path} goes with process {held.pid}, which has staged it" for held in of_programs
    ]
    if not found and what != "all":
        raise ValueError("; ".join(stay))
    for text in stay:
        _tell(text)
    if found and ask and not dry_run and _is_asked() and not _agrees(found):
        raise ValueError("nothing was dropped")
    for held in found:
        if not dry_run:
            drop(held)
        done = "would drop" if dry_run else "dropped"
        _tell(f"{done} {held.path}, of {held.source}")
    if as_json:
        terminal.show(json.dumps([_document(held) for held in found]) + "\n")


def _is_asked() -> bool:
    """Whether a person can see a question and answer it."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def _agrees(found: list[Held]) -> bool:
    for held in found:
        _tell(f"{held.path}, of {held.source}: {_describe(held)}")
    n = "1 model" if len(found) == 1 else f"{len(found)} models"
    print(f"Drop {n}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _document(held: Held) -> dict[str, Any]:
    return held.to_dict() | {"current": held.staleness() is None}


def _describe(held: Held) -> str:
    what = " repacked" if held.is_repacked else " of it" if held.is_unfinished else ""
    return f"{format_bytes(held.nbytes)}{what}, {held.backing}, {held.granted}"


def _tell(text: str) -> None:
    if sys.stderr is None:
        return
    try:
        print(f"unimem: {escape(text)}", file=sys.stderr)
    except OSError:
        # No one reads it, and the work is done. Python would try again at its end.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stderr.fileno())
