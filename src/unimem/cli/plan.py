"""`unimem plan`: the memory that a model will need, its limits, and remedies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from unimem.cli import terminal
from unimem.cli.exits import AT_LEAST, DOES_NOT_FIT, OK, READS_FROM_DISK
from unimem.cli.options import (
    AsJson,
    Ctx,
    KVType,
    LoadMode,
    NumaOfModel,
    PageSize,
    Threads,
    WeightsBudget,
    Window,
    check_numa,
    path_or_url,
    value_option,
)
from unimem.planning.hosts import find_host
from unimem.planning.llama_cpp import Engine
from unimem.planning.plan import MOST_SESSIONS
from unimem.planning.plan import plan as make_plan
from unimem.planning.result import Plan, Verdict, plan_lines, room_bytes

_EXITS: dict[Verdict, int] = {
    "fits": OK,
    "streams": OK,
    "reads from disk": READS_FROM_DISK,
    "at least": AT_LEAST,
    "does not fit": DOES_NOT_FIT,
}


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF or safetensors file, a part of a split one, or an index of several; or "
            "the URL of one (https://, s3://, hf://), whose headers alone are fetched; without "
            "one, the small model that is in the package.",
            show_default=False,
        ),
    ] = None,
    ctx: Ctx = None,
    min_ctx: Annotated[
        int,
        typer.Option(
            min=1,
            max=2**31 - 1,
            metavar="N",
            help="The least context that is of use: without --ctx, a model that has no room for it "
            "does not fit.",
        ),
    ] = 512,
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
    slots: Annotated[
        str | None,
        value_option(
            "N[:divided]",
            "Conversations of one llama-server: they share the context, or each has an equal part "
            "of it. Unlike --batch and --sessions, they do not multiply it. [default: 1]",
        ),
    ] = None,
    engine: Annotated[
        Engine | None,
        value_option(
            "unimem|llama.cpp",
            "Plan for this engine. [default: unimem for what `unimem run` runs, else llama.cpp]",
        ),
    ] = None,
    mmproj: Annotated[
        str | None,
        value_option("FILE", "A projector that llama.cpp loads beside it. [default: none]"),
    ] = None,
    draft: Annotated[
        str | None,
        value_option(
            "FILE|mtp",
            "A draft model that llama.cpp loads beside it, or the model's own layers that predict "
            "further tokens. [default: none]",
        ),
    ] = None,
    cache_ram: Annotated[
        str | None,
        value_option(
            "SIZE",
            "The most that llama-server keeps of earlier prompts, as its --cache-ram. [default: 8G "
            "for llama.cpp]",
        ),
    ] = None,
    load: LoadMode = "auto",
    weights_budget: WeightsBudget = None,
    device: Annotated[
        str | None,
        value_option(
            "cuda:N", "Put weights, KV cache and scratch memory on this GPU. [default: none]"
        ),
    ] = None,
    pages: PageSize = "auto",
    numa: NumaOfModel = None,
    lock: Annotated[
        bool, typer.Option("--lock", help="Lock all of it in RAM, also a mapped file.")
    ] = False,
    memory: Annotated[
        str | None,
        value_option(
            "SIZE", "Plan for another machine with this much memory, as in 16G. [default: this one]"
        ),
    ] = None,
    cpus: Annotated[
        int | None,
        value_option("N", "Its physical cores. [default: 1]"),
    ] = None,
    pool: Annotated[
        list[str] | None,
        value_option("2m=PAGES", "Its pools of hugetlb pages: 2m=PAGES, 1g=PAGES. [default: none]"),
    ] = None,
    nodes: Annotated[
        int | None,
        value_option("N", "Its NUMA nodes. [default: 1]"),
    ] = None,
    cgroup: Annotated[
        Path | None,
        value_option(
            "PATH", "Plan for a process in this cgroup, as in /sys/fs/cgroup/system.slice."
        ),
    ] = None,
    now: Annotated[
        bool,
        typer.Option(
            "--now", help="Say, too, what the page cache of this moment changes, which may go."
        ),
    ] = False,
    kubernetes: Annotated[
        bool,
        typer.Option(
            "--kubernetes",
            help="Print the requests and limits of a container for it instead, as YAML of "
            "`resources`.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a model will need, and whether it fits."""
    check_numa(numa, mirror=True)
    if kubernetes and as_json:
        raise typer.BadParameter("--kubernetes prints YAML: leave out --json")
    machine = _machine(memory, cpus, pool or [], nodes, cgroup)
    if machine is not None and device is not None:
        raise typer.BadParameter("--device: a GPU is one of this machine's: leave out the other")
    if device is not None and not re.fullmatch(r"cuda:[0-9]{1,4}", device):
        raise typer.BadParameter(f"--device: expected cuda:N, as in cuda:0, got {device!r:.40}")
    if model is None:
        from unimem.engine import embedded_model

        path: Path | str = embedded_model()
    else:
        path = path_or_url(model)
    with _usage():
        made = make_plan(
            path,
            ctx=ctx,
            batch=batch,
            kv_dtype=kv_dtype,
            window=window,
            threads=threads,
            sessions=sessions,
            load=load,
            weights_budget=weights_budget,
            device=device,
            engine=engine,
            slots=slots,
            mmproj=None if mmproj is None else path_or_url(mmproj),
            draft=draft if draft in (None, "mtp") else path_or_url(str(draft)),
            cache_ram=cache_ram,
            machine=machine,
            min_ctx=min_ctx,
            process=True,
            now=now,
            pages=pages,
            numa=numa,
            lock=lock,
        )
    # A URL is shown without its secret parts.
    shown = str(path) if isinstance(path, Path) else None
    if kubernetes:
        text = "\n".join(_resources(made))
    elif as_json:
        text = made.to_json()
    else:
        text = "\n".join(plan_lines(terminal.surface(), made, shown))
    terminal.show(text + "\n")
    if _EXITS[made.verdict] != OK:
        raise typer.Exit(_EXITS[made.verdict])


def _resources(plan: Plan) -> Iterator[str]:
    """Write the `resources` of a container of Kubernetes for a plan.

    Requests are the limits: the memory of a model is not given back, and a node that promises more
    than it has ends the pods that take most.
    """
    nbytes = plan.container_bytes
    figures = {"cpu": f'"{plan.threads}"'}
    yield f"# unimem plan: {plan.verdict}, {plan.ctx or 'unknown'} tokens of context"
    if nbytes is None:
        nbytes = room_bytes(plan)
        yield "# the program's own memory is not known, and comes on top"
    figures["memory"] = _mebibytes(nbytes)
    for size, in_pool in plan.pool_bytes.items():
        figures[f"hugepages-{size[:-1]}{size[-1].upper()}i"] = _mebibytes(in_pool)
    yield "resources:"
    for kind in ("requests", "limits"):
        yield f"  {kind}:"
        for name, value in figures.items():
            yield f"    {name}: {value}"


def _mebibytes(nbytes: int) -> str:
    return f"{-(-nbytes >> 20)}Mi"


@contextmanager
def _usage() -> Iterator[None]:
    """Refuse options that do not go with the file or with each other as wrong usage."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        names = "window|slots|engine|draft|mmproj and draft|device|weights_budget|cache_ram"
        names += "|load|pages|numa|lock"
        if re.match(f"({names})[:=]", text):
            text = text.replace("weights_budget", "weights-budget", 1)
            text = text.replace("cache_ram", "cache-ram", 1)
            raise typer.BadParameter(f"--{text}") from None
        raise


def _machine(
    memory: str | None, cpus: int | None, pool: list[str], nodes: int | None, cgroup: Path | None
) -> dict[str, Any] | str | None:
    """Return the `machine` of `unimem.plan` from options; refuse wrong ones."""
    figures: dict[str, Any] = {"memory": memory, "cpus": cpus, "nodes": nodes}
    if pool:
        figures["pools"] = dict(map(_pool, pool))
    figures = {name: value for name, value in figures.items() if value is not None}
    if cgroup is not None and figures:
        raise typer.BadParameter("--cgroup: it is one of this machine: leave out the other one")
    if figures and memory is None:
        raise typer.BadParameter("--cpus, --pool and --nodes need --memory, as in --memory 16G")
    machine = figures or (None if cgroup is None else str(cgroup))
    try:
        find_host(machine)
    except ValueError as error:
        text = str(error).replace("machine:", "cgroup:", 1).replace("pools:", "pool:", 1)
        raise typer.BadParameter(f"--{text}") from None
    return machine


def _pool(text: str) -> tuple[str, int]:
    size, _, pages = text.partition("=")
    if not re.fullmatch(r"[0-9]{1,18}", pages):
        raise typer.BadParameter(f"--pool: expected SIZE=PAGES, as in 2m=4096, got {text!r}")
    return size, int(pages)
