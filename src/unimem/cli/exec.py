"""`unimem exec`: any program, unmodified, with its large allocations in well-placed memory."""

from __future__ import annotations

import warnings
from typing import Annotated, Any

import typer

from unimem._core.block import Block
from unimem.cli.exits import DOES_NOT_FIT, OK, fail
from unimem.cli.options import check_numa, number_parser
from unimem.errors import PlacementError
from unimem.system import limits
from unimem.system.placement import Pages
from unimem.system.policy import (
    NumaPolicy,
    PlacementChoice,
    Request,
    decide,
    is_prefaulted,
    parse_numa,
)
from unimem_exec import (
    MIN_BYTES,
    NOT_EXECUTABLE,
    NOT_FOUND,
    OPTIONS,
    SPARE,
    environment,
    find_library,
    find_model,
    find_program,
    obstacle,
    policy_text,
    reporter,
    settings,
)
from unimem_exec import start as become

_PROBE_BYTES = {"1g": 1 << 30}
_THP_BYTES = 2 << 20


def _option(name: str, **more: Any) -> Any:
    """Make typer's option of a row of the table that the quick path reads, too."""
    row: dict[str, Any] = {"show_default": "choices" in OPTIONS[name]} | OPTIONS[name] | more
    if choices := row.pop("choices", None):

        def parse(text: str) -> str:
            if text not in choices:
                raise typer.BadParameter(f"expected {', '.join(choices)}; got {text!r:.40}")
            return text

        row |= {"parser": parse, "metavar": "|".join(choices)}
        row["autocompletion"] = lambda: [*choices]
    return typer.Option(f"--{name.replace('_', '-')}", **row)


def exec_(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="The program, and its arguments.")
    ],
    pages: Annotated[Pages, _option("pages")] = "auto",
    numa: Annotated[str | None, _option("numa")] = None,
    lock: Annotated[bool, _option("lock")] = False,
    min_bytes: Annotated[
        int | None, _option("min_bytes", parser=number_parser(4096, 1 << 50, "1M, 64k or 4096"))
    ] = None,
    prefault: Annotated[bool, _option("prefault")] = False,
    strict: Annotated[bool, _option("strict")] = False,
    stage: Annotated[bool, _option("stage")] = False,
    report: Annotated[str | None, _option("report")] = None,
) -> None:
    """Run any program with its large allocations well placed.

    In huge pages, on chosen nodes, locked. Options of the program stand behind its name, or behind
    --.
    """
    check_numa(numa)
    library = find_library()
    if library is None or any(letter in library for letter in " :"):
        raise RuntimeError(
            "libunimem-exec.so is not installed: install unimem-llm anew"
            if library is None
            else f"{library}: the loader takes no path with a blank or a colon: install elsewhere"
        )
    program = find_program(command[0])
    if program is None:
        _end(f"{command[0]}: no such program", NOT_FOUND)
    assert program is not None
    _check_program(program, strict=strict)
    policy = _check_machine(pages, numa, lock=lock, strict=strict)
    more = {} if report is None else reporter(report)
    if stage:
        command = [command[0], *(_staged(word) for word in command[1:])]
    room = limits.tightest().room_bytes if prefault else 0
    text = settings(
        pages=pages,
        min_bytes=min_bytes or MIN_BYTES,
        policy=None if policy is None else policy_text(policy.mode, policy.nodes),
        numa=None if policy is None else str(policy),
        lock=lock,
        strict=strict,
        prefault=(room - room // SPARE, limits.thread_count()),
        touch_pool=is_prefaulted(PlacementChoice(pages, policy, False), limits),
        report=report is not None,
    )
    try:
        become(program, command, environment(library, text, more))
    except OSError as error:
        _end(f"{program}: {error.strerror}", NOT_EXECUTABLE)


def _end(text: str, code: int) -> None:
    raise typer.Exit(fail(text, code))


def _check_program(program: str, *, strict: bool) -> None:
    """Report an obstacle; with `strict`, end there."""
    found = obstacle(program)
    if found is None:
        return
    if strict:
        _end(found, DOES_NOT_FIT)
    fail(f"warning: {found}; it runs as without unimem exec", OK)


def _check_machine(
    pages: Pages, numa: str | None, *, lock: bool, strict: bool
) -> NumaPolicy | None:
    """Try the options on a small block, and return the NUMA policy; end if they are refused."""
    nbytes = _PROBE_BYTES.get(pages, _THP_BYTES)
    wanted = parse_numa(numa)
    is_pool = pages in ("2m", "1g")
    if pages == "thp" or is_pool or numa is not None or lock or strict:
        # A momentary lack of huge pages is a reason only with --strict.
        tried: Pages = pages if is_pool or strict else "auto"
        try:
            with Block(nbytes, pages=tried, numa=numa, lock=lock, strict=True, warm=True):
                pass
        except (PlacementError, MemoryError) as error:
            _end(str(error), DOES_NOT_FIT)
        if pages == "thp" and not strict:
            _warn_of_pages(nbytes)
    if wanted is None:
        return None
    return decide(Request(nbytes, numa=wanted), limits).numa


def _warn_of_pages(nbytes: int) -> None:
    with warnings.catch_warnings(record=True) as told, Block(nbytes, pages="thp", warm=True):
        pass
    for each in told:
        fail(f"warning: {each.message}", OK)


def _staged(word: str) -> str:
    """Stage a model that an argument names, as FILE or --option=FILE; return others unchanged."""
    found = find_model(word)
    if found is None:
        return word
    from unimem.cli.stage import stage_for

    start, path = found
    return start + stage_for(path)
