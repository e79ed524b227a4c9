"""`unimem stage`: a model once in shared memory, for every process that opens the path."""

from __future__ import annotations

import grp
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, get_args

import typer

from unimem.base.text import escape, format_age, format_bytes
from unimem.cli import terminal
from unimem.cli.exits import OK, fail
from unimem.cli.options import AsJson, NumaNodes, check_numa, value_option
from unimem.remote.client import is_url, shown, url_key
from unimem.staging.backings import Folder, sweep
from unimem.staging.keeper import (
    catch_signals,
    drop,
    exclude_others,
    hold,
    hold_files,
    notify,
    wait_for,
)
from unimem.staging.llama_cpp import RepackedByLlamaCpp, cpu_features, find_repacked
from unimem.staging.readers import find_readers
from unimem.staging.stage import stage as make_stage
from unimem.staging.staging_folder import (
    StagingFolder,
    entries,
    link_into,
    open_staging_folder,
    staged_ns,
)
from unimem.staging.unfinished import find_unfinished
from unimem.system.placement import Pages, sum_placements
from unimem.system.sizes import parse_size
from unimem.weights.files import Version, durable_path
from unimem.weights.opened import open_weights
from unimem.weights.remote_files import open_files
from unimem.weights.staged import Held, holders

_MOST_LEFT = 5  # named
_WAITS = "waiting for another 'unimem stage', which reads a model"


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
    pages: Annotated[
        Pages,
        typer.Option(metavar="|".join(get_args(Pages)), help="The page size of the staged model."),
    ] = "auto",
    numa: NumaNodes = None,
    lock: Annotated[bool, typer.Option("--lock", help="Keep it from being swapped out.")] = False,
    backing: Annotated[
        Literal["auto", "tmpfs", "hugetlb", "memfd", "shm"],
        typer.Option(metavar="auto|tmpfs|hugetlb|memfd|shm", help="The kind of shared memory."),
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
    budget: Annotated[
        str | None,
        value_option(
            "SIZE|none",
            "The most that staged models take from now on, as 40G, or 50% of what this cgroup's "
            "processes may use: the least recently used ones without a reader make room.",
        ),
    ] = None,
    pin: Annotated[
        str | None,
        value_option("PATH|MODEL", "Let the budget never drop what is staged of this model."),
    ] = None,
    unpin: Annotated[
        str | None, value_option("PATH|MODEL", "Let the budget drop it when it is unused.")
    ] = None,
    foreground: Annotated[
        bool,
        typer.Option(
            "--foreground",
            help="Stay until SIGTERM, which drops the model; for containers and systemd's units.",
        ),
    ] = False,
    at: Annotated[
        str | None,
        value_option("DIR", "Link it into this folder under its own name, and print that path."),
    ] = None,
    mode: Annotated[
        str | None,
        value_option(
            "MODE", "Permissions of its files, as 0440 or 0444; in /dev/shm. [default: 0400]"
        ),
    ] = None,
    group: Annotated[
        str | None,
        value_option("GROUP", "Let this group read it, with --mode 0440; in /dev/shm."),
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
    others = {"--list": show or None, "--drop": drop_what, "--pin": pin, "--unpin": unpin}
    only = {"page_cache": page_cache, "as_json": as_json}
    _check_usage(model, asked, budget=budget, others=others, **only)
    for option, value in (("--dry-run", dry_run), ("--yes", yes)):
        if value and drop_what is None:
            raise typer.BadParameter(f"{option} is for --drop")
    keep = _Keep(at, foreground, not no_verify)
    asked |= _access(mode, group, backing)
    _check_keep(model, keep, asked, page_cache=page_cache)
    _fill_standard_streams()
    left = sweep()
    if left and (show or drop_what is not None):
        more = f" and {len(left) - _MOST_LEFT} more" if len(left) > _MOST_LEFT else ""
        _tell(f"left alone: {', '.join(sorted(left)[:_MOST_LEFT])}{more}")
    if budget is not None:
        _set_budget(budget, trims=model is None)
    if show:
        _list(holders(), as_json=as_json)
    elif drop_what is not None:
        _drop(drop_what, dry_run=dry_run, ask=drop_what == "all" and not yes, as_json=as_json)
    elif pin is not None or unpin is not None:
        _pin(pin or unpin or "", is_pinned=pin is not None, as_json=as_json)
    elif model is not None:
        if page_cache:
            asked["backing"] = "page-cache"
        _stage(model, asked, keep, as_json=as_json)


class _Keep(NamedTuple):
    """How a model is kept, beside its placement: a link to it, and the process that waits."""

    at: str | None = None
    foreground: bool = False
    verify: bool = True


def _check_usage(
    model: str | None,
    asked: dict[str, Any],
    *,
    budget: str | None,
    others: dict[str, Any],
    page_cache: bool,
    as_json: bool,
) -> None:
    given = [value for value in (model, *others.values()) if value is not None]
    if len(given) != 1 and (given or budget is None):
        names = "MODEL, --list, --drop, --pin and --unpin"
        raise typer.BadParameter(f"expected one of {names}, or --budget")
    if budget is not None and given and model is None:
        raise typer.BadParameter("--budget goes with a MODEL, or stands alone")
    if as_json and not given:
        raise typer.BadParameter("--json is for a document: --budget alone gives none")
    if "" in given:
        raise typer.BadParameter("expected the path of a model, got ''")
    placed = (asked["backing"], asked["pages"], asked["numa"])
    if page_cache and placed != ("auto", "auto", None):
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


def _access(mode: str | None, group: str | None, backing: str) -> dict[str, Any]:
    """Return the fields of `asked` that let other users read a model; refuse wrong ones."""
    if mode is None and group is None:
        return {}
    if backing not in ("auto", "shm"):
        raise typer.BadParameter(
            f"--mode and --group need --backing shm: a path of {backing} is open to this user alone"
        )
    if mode is not None and not re.fullmatch("0?4[04][04]", mode):
        raise typer.BadParameter(f"--mode: expected 0400, 0440 or 0444, got {mode!r:.40}")
    try:
        is_number = group is None or group.isdecimal()  # containers have no names
        gid = int(group or -1) if is_number else grp.getgrnam(str(group)).gr_gid
    except KeyError:
        raise typer.BadParameter(f"--group: there is no group {group!r:.60}") from None
    return {"backing": "shm", "mode": int(mode or "0440", 8), "group": gid}


def _check_keep(model: str | None, keep: _Keep, asked: dict[str, Any], *, page_cache: bool) -> None:
    given = {
        "--at": keep.at is not None,
        "--foreground": keep.foreground,
        "--mode": "mode" in asked,
    }
    for option, is_given in given.items():
        if is_given and model is None:
            raise typer.BadParameter(f"{option} needs a MODEL")
        if is_given and page_cache and not (option == "--foreground" and asked["lock"]):
            raise typer.BadParameter(
                f"{option} is not for --page-cache, whose path is the model's own"
                + (": no process keeps it without --lock" if option == "--foreground" else "")
            )
    if keep.at == "":
        raise typer.BadParameter("--at: expected a folder, got ''")


def _set_budget(text: str, *, trims: bool) -> None:
    """Keep a budget for all later calls; with `trims`, drop what may go beyond it now."""
    try:
        nbytes = None if text == "none" else parse_size(text, "budget")
    except ValueError as error:
        raise typer.BadParameter(f"--{error}, or none") from None
    folder = open_staging_folder(create=True)
    assert folder is not None
    folder.set_budget(nbytes)
    if nbytes is None:
        _tell("staged models have no budget")
    elif trims:
        with folder.turn(lambda: _tell(_WAITS)):
            beyond = folder.trim(_tell)
        why = f"; {format_bytes(beyond)} beyond it are in use, pinned or staged just now"
        _tell(f"staged models take at most {format_bytes(nbytes)}{why if beyond else ''}")


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
        held = _find(source, asked, versions)
        if held is None:
            held = stack.enter_context(_read_in(model, asked))
        _tell(f"{source} is staged as {held.path}, until: unimem stage --drop {held.path}")
        _tell_of_copies(repacked)
    return held.path


def _stage(model: str, asked: dict[str, Any], keep: _Keep, *, as_json: bool) -> None:
    source = _source(model)
    with open_files(model) as opened:
        repacked = find_repacked(opened, cpu_features())
        versions = opened.versions()
        nbytes = sum(file.nbytes for file in opened.files)
    folder = open_staging_folder(create=keep.at is not None)
    links: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(_alone(source))
        if folder is not None and keep.at is not None:
            stack.push(partial(_without_links, folder))
        found = _find(source, asked, versions, url_key(model))
        if found is not None:
            held = found
        else:
            is_cached = asked["backing"] == "page-cache"
            if asked["lock"] or not is_cached:
                stack.enter_context(_room(source, nbytes))
            made = _warm if is_cached else partial(_read_in, verify=keep.verify)
            held = stack.enter_context(made(model, asked))
        if folder is not None and keep.at is not None:
            links = link_into(os.path.abspath(keep.at), held)
            folder.add_links(held, links)
        # If its path cannot be written, it is not kept.
        if as_json:
            document = _documents([held])[0] | {"reused": found is not None}
            terminal.show(json.dumps(document) + "\n")
        else:
            terminal.show_path(links[0] if links else held.path)
        again = "was staged already" if found is not None else "is staged"
        _tell(f"{source} {again}: {_describe(held)}")
        if not held.is_repacked:
            _tell_of_copies(repacked)
        if held.pid and not keep.foreground:
            _tell(f"process {held.pid} keeps it, until: unimem stage --drop {held.path}")
        for warning in held.warnings:
            _tell(f"warning: {warning}")
        signals = catch_signals() if keep.foreground else None  # it is kept from here on
    if signals is not None:
        notify("READY=1")
        wait_for(held, links, signals, is_ours=found is None)


@contextmanager
def _room(source: str, nbytes: int) -> Iterator[None]:
    """Make room within the budget, and let no other command take it before the ``with`` ends."""
    folder = open_staging_folder()
    if folder is None:
        yield
        return
    with folder.turn(lambda: _tell(f"{source}: {_WAITS}")):
        folder.make_room(nbytes, f"staging {source}", _tell)
        folder.clean(holders())
        yield
        folder.note_use(source)  # before the next one may drop it


def _find(
    source: str, asked: dict[str, Any], versions: list[tuple[str, Version]], key: str = ""
) -> Held | None:
    """Find the same files as `_reuse`, and note their use, so that no budget drops them now."""
    folder = open_staging_folder()
    with nullcontext() if folder is None else folder.uses():
        found = _reuse(source, asked, versions, key)
        if folder is not None and found is not None:
            folder.note_use(found.source)
    return found


def _without_links(folder: StagingFolder, kind: type[BaseException] | None, *_: object) -> None:
    """Remove links to a model that is not kept after all."""
    if kind is not None:
        folder.clean(holders())


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
        placed = {name: value for name, value in asked.items() if name not in ("mode", "group")}
        try:
            made = make_stage(
                model if is_url(model) else source,
                progress=progress, verify=verify, resume=is_url(model), **placed,
            )  # fmt: skip
        except BaseException:
            for held in find_unfinished(source) if is_url(model) else ():
                _tell(
                    f"the first {format_bytes(held.nbytes)} of {source} stay in memory, kept by "
                    f"process {held.pid}: the same command continues them, and 'unimem stage "
                    f"--drop {source}' drops them"
                )
            raise
    if "mode" in asked:
        with ExitStack() as undo:
            undo.enter_context(made)
            assert isinstance(made._place, Folder)
            made._place.let_in(asked["mode"], asked["group"])
            undo.pop_all()
    return hold(made, source, asked, [str(each.message) for each in told])


def _warm(model: str, asked: dict[str, Any]) -> AbstractContextManager[Held]:
    """Read the files into the page cache."""
    source = _source(model)
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
    documents = _documents(found)
    if as_json:
        terminal.show(json.dumps(documents) + "\n")
        return
    now = time.time()
    for held, document in zip(found, documents, strict=True):
        why = held.staleness()
        stale = "" if why is None else f"; {why}"
        program = ", which has staged it itself" if held.kept_by == "program" else ""
        text = f"{held.source}: {_describe(held)}; process {held.pid}{program}{stale}"
        pids = ", ".join(map(str, document["readers"]))
        readers = f"read by {pids}" if pids else "no reader"
        if document["has_hidden_readers"]:
            readers = "read by processes of others"
        pinned = ", pinned" if document["pinned"] else ""
        ages = [f"{format_age(now - document[name])} ago" for name in ("staged", "used")]
        more = f"staged {ages[0]}, last used {ages[1]}, {readers}{pinned}"
        terminal.show(f"{escape(held.path)}\n    {escape(text)}\n    {more}\n")
        for link in document["links"]:
            terminal.show(f"    {escape(link)}\n")
    if not found:
        _tell("nothing is staged")
    folder = open_staging_folder()
    if folder is None:
        return
    folder.clean(found)
    if (budget := folder.budget_bytes) is not None:
        total = format_bytes(sum(held.nbytes for held in found))
        _tell(f"{total} are staged, of a budget of {format_bytes(budget)}")


def _chosen(what: str) -> list[Held]:
    """Find the stages that a text names: a path, or a model."""
    source, kept = _source(what), holders()
    found = [
        held
        for held, entry in zip(kept, entries(kept), strict=True)
        if what in ("all", held.path, *held.paths)
        or source in (held.source, *entry.links)
        or held.has_file(what)
    ]
    if not found and what != "all":
        raise ValueError(f"{what}: nothing is staged under this name: unimem stage --list")
    return found


def _pin(what: str, *, is_pinned: bool, as_json: bool) -> None:
    folder = open_staging_folder(create=True)
    assert folder is not None
    found = _chosen(what)
    for held in found:
        folder.pin(held, is_pinned)
        _tell(f"{held.path}, of {held.source}, is {'pinned' if is_pinned else 'not pinned'}")
    if as_json:
        terminal.show(json.dumps(_documents(found)) + "\n")


def _drop(what: str, *, dry_run: bool, ask: bool, as_json: bool) -> None:
    found = _chosen(what)
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
    documents = _documents(found)
    for held in found:
        if not dry_run:
            drop(held)
        done = "would drop" if dry_run else "dropped"
        _tell(f"{done} {held.path}, of {held.source}")
    if not dry_run and (folder := open_staging_folder()) is not None:
        folder.clean(holders())
    if as_json:
        terminal.show(json.dumps(documents) + "\n")


def _is_asked() -> bool:
    """Whether a person can see a question and answer it."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def _agrees(found: list[Held]) -> bool:
    for held in found:
        _tell(f"{held.path}, of {held.source}: {_describe(held)}")
    n = "1 model" if len(found) == 1 else f"{len(found)} models"
    print(f"Drop {n}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _documents(found: Sequence[Held]) -> list[dict[str, Any]]:
    return [
        held.to_dict()
        | {
            "current": held.staleness() is None,
            "staged": staged_ns(held) / 1e9,
            "used": entry.used_ns / 1e9,
            "pinned": entry.is_pinned,
            "links": list(entry.links),
            "readers": list(readers.pids),
            "has_hidden_readers": readers.has_others,
        }
        for held, entry, readers in zip(found, entries(found), find_readers(found), strict=True)
    ]


def _describe(held: Held) -> str:
    what = " repacked" if held.is_repacked else " of it" if held.is_unfinished else ""
    return f"{format_bytes(held.nbytes)}{what}, {held.backing}, {held.granted}"


def _tell(text: str) -> None:
    fail(text, OK)
