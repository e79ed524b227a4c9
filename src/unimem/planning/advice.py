"""Advice on a plan that does not fit, the cheapest for the user first.

Each figure comes from a second plan with the option changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from unimem.base.text import format_bytes, format_count, format_mib
from unimem.planning.result import Advice, Check, Plan, find_worst_check, is_as_asked
from unimem.planning.search import find_largest
from unimem.weights.gguf import tensor_type

_LEAST_WINDOW = 256  # tokens: with fewer, little of a text is remembered
_N_TYPES = 64  # more numbers than ggml has types
# The likely type of a file of few bits, and the bytes of a number of values.
_SMALL_TYPE, _SMALL_VALUES, _SMALL_BYTES = "q4_K", 256, 144
_SHORTER = {"ctx", "window"}  # options that shorten the model's memory of a text
_KV_TYPES = ("f32", "bf16", "f16", "q8_0")


Replan = Callable[[Mapping[str, Any]], Plan]
"""Makes the plan again with these options changed."""


def saved_bytes(before: Plan, after: Plan) -> int:
    """Return the saving of the second plan in memory that cannot be dropped."""
    return _lasting_bytes(before) - _lasting_bytes(after)


def _lasting_bytes(plan: Plan) -> int:
    return _device_bytes(plan) or plan.required_bytes


def _device_bytes(plan: Plan) -> int:
    return sum(row.nbytes for row in plan.rows if row.device is not None)


def advise(plan: Plan, replan: Replan, types: Mapping[str, int]) -> tuple[Advice, ...]:
    """Advise on a plan that does not fit, or whose weights spill to disk.

    `replan` raises ValueError for impossible options; `types` are the bytes of the model's tensors.
    """
    found = []
    together: dict[str, Any] = {}
    for text, options in _list_changes(plan, replan):
        with suppress(ValueError):
            other = replan(options)
            if _helps(plan, other):
                found.append(Advice(text, saved_bytes(plan, other), options, is_as_asked(other)))
                together |= options
    if not any(item.fits and not _SHORTER & item.options.keys() for item in found):
        found += _combine(plan, replan, together)
    if plan.verdict != "fits":
        found += _advise_files(plan, types)
    return (*found, *_advise_limits(plan))


def _helps(plan: Plan, other: Plan) -> bool:
    if is_as_asked(other) or (plan.verdict, other.verdict) == ("reads from disk", "streams"):
        return True
    # Less memory alone is no help for an unmet placement, or a weights' budget.
    if plan.verdict not in ("fits", "streams") and saved_bytes(plan, other) > 0:
        return True
    return len([c for c in other.checks if not c.fits]) < len(
        [c for c in plan.checks if not c.fits]
    )


def _list_changes(plan: Plan, replan: Replan) -> Iterator[tuple[str, dict[str, Any]]]:
    """List single changes of options, those without a cost first."""
    failing = {check.name for check in plan.checks if not check.fits}
    yield from _list_loads(plan)
    if plan.pages in ("2m", "1g"):
        yield "transparent huge pages, which need no pool", {"pages": "thp"}
    full = [one for one in plan.checks if one.name.startswith("node") and not one.fits]
    if plan.numa is not None and full:
        where = plan.numa.partition(":")[2]
        are_there = where and all(one.limit_bytes for one in full)
        is_mirrored = plan.numa.startswith("mirror")
        policy = f"preferred:{where}" if are_there and not is_mirrored else None
        text = "one copy of the weights" if is_mirrored else "let memory come from other nodes, too"
        yield text, {"numa": policy}
    if any("memlock" in name for name in failing):
        yield "do not lock it: then the kernel may swap it out", {"lock": False}
    prompts = sum(row.nbytes for row in plan.rows if row.category == "prompts")
    if prompts:
        most = (prompts >> 20) // plan.sessions

        def fits(n: int) -> bool:
            return is_as_asked(replan({"cache_ram": n << 20}))

        n = find_largest(most - 1, fits)
        text = f"{n:,} MiB of earlier prompts instead of {most:,} (llama-server --cache-ram {n})"
        yield text, {"cache_ram": f"{n}M" if n else "0"}
    if plan.sessions > 1:
        n = find_largest(plan.sessions - 1, lambda n: is_as_asked(replan({"sessions": n})), least=1)
        text = f"{format_count(n, 'conversation')} at a time instead of {plan.sessions:,}"
        yield text, {"sessions": n}
    if plan.batch > 1:
        n = find_largest(plan.batch - 1, lambda n: is_as_asked(replan({"batch": n})), least=1)
        yield f"{format_count(n, 'stream')} instead of {plan.batch:,}", {"batch": n}
    larger = _KV_TYPES.index(plan.kv_dtype) if plan.kv_dtype in _KV_TYPES else len(_KV_TYPES)
    for kind in _KV_TYPES[1 + larger :]:
        if kind != "bf16" and (plan.kv_dtype, kind) != ("bf16", "f16"):
            yield f"a KV cache of {kind} instead of {plan.kv_dtype}", {"kv_dtype": kind}
    if plan.max_ctx and plan.ctx is not None and plan.max_ctx < plan.ctx:
        yield (
            f"a context of {format_count(plan.max_ctx, 'token')}, the longest that fits",
            {"ctx": plan.max_ctx},
        )
    is_own = plan.engine == "unimem" and not _device_bytes(plan)
    if plan.window is None and plan.ctx is not None and is_own:
        window = _choose_window(plan.ctx, replan)
        if window:
            yield f"attention that sees the last {window:,} tokens only", {"window": window}


def _list_loads(plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    """List changes of how the weights come into memory."""
    if plan.load == "stream" and plan.reading is not None:
        whole = plan.reading.whole_bytes
        text = f"a weights budget of {format_bytes(whole)}: then no token reads from the disk"
        yield text, {"weights_budget": whole}
    elif plan.engine == "unimem" and plan.spilled_bytes:
        yield "stream the weights instead of mapping the file", {"load": "stream"}
    if plan.load not in ("map", "stream"):
        done = (
            "as it is instead of repacking it" if plan.load == "repack" else "instead of copying it"
        )
        yield (
            f"map the file {done}: its pages are the page cache's, and are dropped "
            "when memory is short",
            {"load": "map"},
        )


def _choose_window(ctx: int, replan: Replan) -> int:
    """Return the largest of a half, a quarter, ... of the context that fits, or the smallest."""
    window = ctx // 2
    while window >= 2 * _LEAST_WINDOW and not is_as_asked(replan({"window": window})):
        window //= 2
    return window if window >= _LEAST_WINDOW else 0


def _combine(plan: Plan, replan: Replan, options: dict[str, Any]) -> list[Advice]:
    """Return the first combination of changes that fits, or [].

    A shorter context comes last, on top of all others, so that it stays as long as possible.
    """
    tried: dict[str, Any] = {}
    combinations = []
    for name, value in options.items():
        if name not in _SHORTER:
            tried[name] = value
            combinations.append(dict(tried))
    if plan.ctx is not None:
        combinations.append(tried | {"ctx": None})
    for changes in combinations:
        with suppress(ValueError):
            other = replan(changes)
            if "ctx" in changes and plan.ctx and other.max_ctx:
                changes["ctx"] = min(plan.ctx, other.max_ctx)
                other = replan(changes)
            if len(changes) > 1 and is_as_asked(other):
                text = "together: " + ", ".join(f"{k} {v}" for k, v in changes.items())
                return [Advice(text, saved_bytes(plan, other), changes, True)]
    return []


def _advise_files(plan: Plan, types: Mapping[str, int]) -> Iterator[Advice]:
    is_copied = plan.load in ("copy", "direct", "repack")
    if is_copied and "model" in plan.facts and "image" not in plan.facts:
        repack = " --repack" if plan.load == "repack" else ""
        yield Advice(
            f"for several processes, stage the file once ('unimem stage{repack} FILE'): each "
            "then maps it from the path that this prints, and has no copy of its own",
            0,
            {},
            False,
        )
    sizes = {}
    for number in range(_N_TYPES):
        with suppress(ValueError):
            name, values, nbytes = tensor_type(number)
            sizes[name] = values, nbytes
    now = small = 0
    for name, nbytes in types.items():
        values, block = sizes.get(name, (1, 0))
        # Vectors stay float32, and so do types that would not shrink.
        shrinks = name != "f32" and block * _SMALL_VALUES > _SMALL_BYTES * values
        now += nbytes
        small += nbytes // block * values * _SMALL_BYTES // _SMALL_VALUES if shrinks else nbytes
    if small * 10 < now * 9:
        yield Advice(
            f"a file of fewer bits: in {_SMALL_TYPE}, the tensors would take about "
            f"{format_bytes(small)} instead of {format_bytes(now)}",
            now - small,
            {},
            False,
        )


def _advise_limits(plan: Plan) -> Iterator[Advice]:
    """Advise on the limit to raise."""
    worst = find_worst_check(plan)
    if worst is not None:
        missing = worst.needed_bytes - worst.available_bytes
        yield _more(plan, worst, missing)
    elif missing := plan.spilled_bytes or _unslotted_bytes(plan):
        least = min((one for one in plan.checks if one.is_hard), key=lambda c: c.available_bytes)
        yield _more(plan, least, missing)


def _more(plan: Plan, check: Check, missing: int) -> Advice:
    """Advise to raise a limit; of another machine, which is asked for by its memory."""
    remedy = check.remedy
    if check.name == "memory of the machine" and plan.facts.get("machine"):
        whole = max(check.limit_bytes + missing, plan.container_bytes or 0)
        remedy = f"a machine with {format_mib(whole)}"
    return Advice(f"{format_bytes(missing)} more in {check.name}: {remedy}", 0, {}, False)


def _unslotted_bytes(plan: Plan) -> int:
    """Return the memory that is missing for having all of the streamed weights in it."""
    if plan.reading is None or plan.verdict != "streams":
        return 0
    there = sum(row.nbytes for row in plan.rows if row.category.startswith("weights"))
    spare = min(one.available_bytes - one.needed_bytes for one in plan.checks if one.is_hard)
    return max(0, plan.reading.whole_bytes - there - spare)
