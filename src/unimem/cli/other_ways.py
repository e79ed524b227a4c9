"""What unimem does for a model that its engine does not run."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from unimem.base.text import format_bytes, format_count
from unimem.planning.plan import plan as make_plan
from unimem.remote.client import is_url, shown

_NO_CACHE = "the KV cache: "


def other_ways(path: Path | str, ctx: int | None, kv_dtype: str) -> list[str]:
    """List what unimem does for a model of any architecture, in lines with whole commands.

    Parameters
    ----------
    path : Path or str
        The model, or its URL.
    ctx, kv_dtype
        The options of the run.
    """
    options = ([] if ctx is None else ["--ctx", str(ctx)]) + (
        [] if kv_dtype == "f16" else ["--kv-dtype", kv_dtype]
    )
    name = shown(path) if isinstance(path, str) and is_url(path) else os.fspath(path)
    file = shlex.quote(name)
    staged, run = f"unimem stage {file}", "unimem exec -- COMMAND"
    if name.endswith(".gguf"):
        staged = f'llama-server -m "$({staged})"'
        run = f"unimem exec -- llama-server -m {file}"
    ways = [
        (_planned(path, ctx, kv_dtype), shlex.join(["unimem", "plan", name, *options])),
        ("stage it once in shared memory, for all processes that open its path", staged),
    ]
    if not is_url(name):  # other runtimes do not read URLs
        ways.append(("run that runtime with its large allocations in huge pages", run))
    lines = ["what unimem does for this file, which another runtime computes:"]
    for what, command in ways:
        lines += [f"- {what}:", f"    {command}"]
    return lines


def _planned(path: Path | str, ctx: int | None, kv_dtype: str) -> str:
    """Summarize the model's plan."""
    try:
        made = make_plan(path, ctx=ctx, kv_dtype=kv_dtype)
    except (ValueError, OSError) as error:
        return f"plan it: {error!s:.200}"
    found = f"plan it: {format_bytes(made.total_bytes)}"
    unknown = next((text for text in made.unknown if text.startswith(_NO_CACHE)), None)
    if unknown is not None:
        return f"{found} without its KV cache, since {unknown.removeprefix(_NO_CACHE)}"
    tokens = format_count(made.ctx or 0, "token")
    kv = sum(row.nbytes for row in made.rows if row.category == "kv")
    return f"{found}, with {format_bytes(kv)} for the KV cache of {tokens}"
