"""`unimem plan`: what a model will need, of which limits, and what to do where that is too much."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from unimem.cli import terminal
from unimem.cli.exits import DOES_NOT_FIT
from unimem.cli.options import (
    AsJson,
    Ctx,
    KVType,
    LoadMode,
    NumaNodes,
    PageSize,
    Threads,
    Window,
    check_numa,
)
from unimem.planning.plan import MOST_SESSIONS
from unimem.planning.plan import plan as make_plan
from unimem.planning.result import plan_lines

__all__ = ["plan"]


def plan(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF or safetensors file, a part of a split one, or an index of several; "
            "without one, the small model that is in the package.",
            show_default=False,
        ),
    ] = None,
    ctx: Ctx = None,
    batch: Annotated[
        int, typer.Option(min=1, max=2**20, metavar="N", help="Streams of the KV cache.")
    ] = 1,
    kv_dtype: KVType = "f16",
    window: Window = None,
    threads: Threads = None,
    sessions: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_SESSIONS,
            metavar="N",
            help="Decoders over the same weights; each has a KV cache and scratch memory.",
        ),
    ] = 1,
    load: LoadMode = "auto",
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cuda:N",
            help="A GPU that weights, KV cache and scratch memory shall lie on. [default: none]",
            show_default=False,
        ),
    ] = None,
    pages: PageSize = "auto",
    numa: NumaNodes = None,
    lock: Annotated[
        bool, typer.Option("--lock", help="All of it is locked in RAM, a mapped file, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a model will need, and whether it fits."""
    check_numa(numa)
    if device is not None and not re.fullmatch(r"cuda:[0-9]{1,4}", device):
        raise typer.BadParameter(f"--device: expected cuda:N, as in cuda:0, got {device!r:.40}")
    if model is None:
        from unimem.engine import embedded_model

        model = embedded_model()
    made = make_plan(
        model,
        ctx=ctx,
        batch=batch,
        kv_dtype=kv_dtype,
        window=window,
        threads=threads,
        sessions=sessions,
        load=load,
        device=device,
        pages=pages,
        numa=numa,
        lock=lock,
    )
    text = (
        made.to_json() if as_json else "\n".join(plan_lines(terminal.surface(), made, str(model)))
    )
    terminal.show(text + "\n")
    if not made.fits:
        raise typer.Exit(DOES_NOT_FIT)
