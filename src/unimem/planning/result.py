"""What planning makes: a plan, the limits that it was checked against, and advice."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from unimem.accounting.rows import Row
from unimem.errors import CapacityError
from unimem.planning.needs import Mode
from unimem.system.placement import Pages
from unimem.system.text import format_bytes, table

__all__ = ["Advice", "Check", "Plan", "find_worst_check"]

_SCHEMA = "unimem.plan/1"


@dataclass(frozen=True, slots=True)
class Check:
    """A limit, and what a plan needs of it. Any number of threads may use it.

    Attributes
    ----------
    name : str
        What limits, as `Limit.name`: "memory of the machine", "cgroup /a/b", "commit limit
        (overcommit_memory=2)", "locked memory (memlock)", "hugetlb pool of 2m pages"; "node 0",
        "cuda:0".
    needed_bytes, available_bytes, limit_bytes : int
        What is needed of it in all, what this process may have of it, with what of the plan has
        been taken already, and the limit itself.
    remedy : str
        A command or a setting that raises it.
    is_hard : bool
        Whether memory beyond it is refused, or ends the process. Beyond any other limit a block
        takes what it can have instead, and says so, unless it is asked to be `strict`.
    """

    name: str
    needed_bytes: int
    available_bytes: int
    limit_bytes: int
    remedy: str
    is_hard: bool = True

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.needed_bytes <= self.available_bytes


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do, and what it is worth. Any number of threads may use it.

    Attributes
    ----------
    text : str
        A sentence.
    saves_bytes : int
        How much less is needed then of what cannot be dropped: `Plan.required_bytes`, or the rows
        of a GPU in a plan for one. Of a smaller file, an estimate.
    options : dict
        Keyword arguments of `plan` that change; empty where it is another file or limit.
    fits : bool
        Whether the plan fits with this alone, and nothing spills.
    """

    text: str
    saves_bytes: int
    options: dict[str, Any]
    fits: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory that a model needs, by category. Any number of threads may use it.

    Attributes
    ----------
    rows : tuple of Row
        Of each, `category`, `nbytes` (in whole pages) and `device` are known.
    checks : tuple of Check
        Of each limit that applies.
    advice : tuple of Advice
        What to do, in the order of what it costs; empty where all fits and nothing spills.
    unknown : tuple of str
        Sentences: what could not be planned, and why.
    facts : dict
        ``"model"`` (path), ``"name"``, ``"architecture"``, ``"format"`` ("GGUF", "safetensors",
        "dimensions"), ``"ggml"`` (what it has of its own), as far as they are known; ``"numa"``
        where not all will lie on the nodes that are preferred.
    ctx : int or None
        Tokens of context; None where it is not given, and what a token takes is not known.
    batch : int
        Streams of the KV cache.
    kv_dtype : str
        Type of the KV cache.
    window : int or None
        Tokens that attention sees; None for all.
    threads, sessions : int
        Threads that compute; decoders over the same weights.
    load : {"map", "copy", "direct"}
        How a file comes into memory.
    load_reason : str
        Why so.
    pages : str
        Pages that were asked for.
    numa : str or None
        The NUMA policy that was asked for.
    max_ctx : int or None
        The longest context, up to the model's own, with which nothing spills; of a file that
        spills anyway, the longest that fits. 0 where none does, None where it is not known.
    required_bytes : int
        Main memory that cannot be dropped: all but the pages of a mapped file, unless it is locked.
    spilled_bytes : int
        Bytes of a mapped file that cannot stay in main memory beside the rest.
    available_bytes : int
        Main memory that this process may take now, with what of the weights has been taken already:
        the least of the checks.
    scratch_bytes, history_bytes : int
        Sizes of the two tapes of one session. With a window the KV cache lies in memory of its own,
        and the history tape is one page.
    """

    rows: tuple[Row, ...]
    checks: tuple[Check, ...]
    advice: tuple[Advice, ...]
    unknown: tuple[str, ...]
    facts: dict[str, Any]
    ctx: int | None
    batch: int
    kv_dtype: str
    window: int | None
    threads: int
    sessions: int
    load: Mode
    load_reason: str
    pages: Pages
    numa: str | None
    max_ctx: int | None
    required_bytes: int
    spilled_bytes: int
    available_bytes: int
    scratch_bytes: int
    history_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows of main memory."""
        return sum(row.nbytes for row in self.rows if row.device is None)

    @property
    def fits(self) -> bool:
        """Whether every limit has room; pages of a mapped file can be dropped (`spilled_bytes`)."""
        return all(check.fits for check in self.checks)

    def require_fits(self, *, strict: bool = True, taken_bytes: int = 0) -> None:
        """Raise when it does not fit.

        Parameters
        ----------
        strict : bool, default True
            False: only for limits that are hard.
        taken_bytes : int, default 0
            What of it is in main memory already, beside weights.

        Raises
        ------
        CapacityError
            With the limit that has the least room for what it is to hold, its figures, and advice.
        """
        worst = find_worst_check(self, strict=strict)
        if worst is None or worst.needed_bytes <= worst.available_bytes + taken_bytes:
            return
        context = "" if self.ctx is None else f" with a context of {self.ctx} tokens"
        hints = "; ".join([item.text for item in self.advice[:2]] or [worst.remedy])
        raise CapacityError(
            f"the model needs {format_bytes(worst.needed_bytes)}{context}, but "
            f"{format_bytes(worst.available_bytes + taken_bytes)} are available: the least room is "
            f"in {worst.name} (limit {format_bytes(worst.limit_bytes)}): {hints}",
            worst.available_bytes + taken_bytes,
            0,
            worst.needed_bytes,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, numbers and texts, as docs/schemas/plan-1.json has them."""
        return {
            "schema": _SCHEMA,
            "fits": self.fits,
            "total_bytes": self.total_bytes,
            **{
                item.name: getattr(self, item.name)
                for item in fields(self)
                if item.name not in ("rows", "checks", "advice")
            },
            "unknown": list(self.unknown),
            "rows": [
                {"category": row.category, "nbytes": row.nbytes, "device": row.device}
                for row in self.rows
            ],
            "checks": [asdict(check) | {"fits": check.fits} for check in self.checks],
            "advice": [asdict(item) for item in self.advice],
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        lines = [(_label(row), format_bytes(row.nbytes)) for row in self.rows]
        lines.append(("total", format_bytes(self.total_bytes)))
        lines.append(("available", format_bytes(self.available_bytes)))
        if self.max_ctx is None:
            longest = "the longest that fits is not known"
        elif self.max_ctx:
            longest = f"the longest that fits: {self.max_ctx}"
        else:
            longest = "none fits"
        tokens = "not known" if self.ctx is None else f"{self.ctx} tokens"
        told = [f"context: {tokens} ({longest})"]
        told += [f"not known: {text}" for text in self.unknown]
        told += [self.facts["numa"]] if "numa" in self.facts else []
        told += [item.text for item in self.advice]
        return "\n".join([table(("category", "size"), lines), *told])


def find_worst_check(plan: Plan, *, strict: bool = True) -> Check | None:
    """Return the limit that lacks the most; None where all have room.

    Parameters
    ----------
    plan : Plan
        Which.
    strict : bool, default True
        False: only of limits that are hard.
    """
    found = [one for one in plan.checks if not one.fits and (strict or one.is_hard)]
    return max(found, key=lambda one: one.needed_bytes - one.available_bytes, default=None)


def _label(row: Row) -> str:
    return row.category if row.device is None else f"{row.category} on {row.device}"
