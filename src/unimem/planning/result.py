"""The results of planning: a plan, checks against limits, and advice."""

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
    """A limit, and how much of it a plan needs. Any number of threads may use it.

    Attributes
    ----------
    name : str
        What limits, as `Limit.name`: "memory of the machine", "cgroup /a/b", "commit limit
        (overcommit_memory=2)", "locked memory (memlock)", "hugetlb pool of 2m pages"; "node 0",
        "cuda:0".
    needed_bytes, available_bytes, limit_bytes : int
        What the plan needs in all; what this process may have, including what of the plan it has
        taken already; and the limit itself.
    remedy : str
        A command or a setting that raises it.
    is_hard : bool
        Whether the kernel refuses memory beyond it, or ends the process. At any other limit a block
        falls back to what it can have, and says so, unless it is `strict`.
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
    """One thing to do, and what it saves. Any number of threads may use it.

    Attributes
    ----------
    text : str
        A sentence.
    saves_bytes : int
        How much less memory that cannot be dropped is needed then: of `Plan.required_bytes`, or of
        the rows of a GPU in a plan for one. For a smaller file, an estimate.
    options : dict
        Keyword arguments of `plan` to change; empty where another file or limit is advised.
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
        Each has its `category`, `nbytes` (in whole pages) and `device`.
    checks : tuple of Check
        One for each limit that applies.
    advice : tuple of Advice
        What to do, the cheapest first; empty where all fits and nothing spills.
    unknown : tuple of str
        Sentences that say what could not be planned, and why.
    facts : dict
        ``"model"`` (path), ``"name"``, ``"architecture"``, ``"format"`` ("GGUF", "safetensors",
        "dimensions"), ``"ggml"`` (what it has of its own), as far as they are known; ``"numa"``
        where not all will lie on the nodes that are preferred.
    ctx : int or None
        Tokens of context; None where none is given and the memory of a token is not known.
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
        Why.
    pages : str
        Pages that were asked for.
    numa : str or None
        The NUMA policy that was asked for.
    max_ctx : int or None
        The longest context, up to the model's own, with which nothing spills; where a file spills
        anyway, the longest that fits. 0 where none fits, None where it is not known.
    required_bytes : int
        Main memory that cannot be dropped: all but the pages of a mapped file, unless it is locked.
    spilled_bytes : int
        Bytes of a mapped file that cannot stay in main memory beside the rest.
    available_bytes : int
        Main memory that this process may take now, including what of the weights it has taken
        already: the least of the checks.
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
            How much of it is in main memory already, beside weights.

        Raises
        ------
        CapacityError
            It names the limit that lacks the most, with figures and advice.
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
    """Return the check that lacks the most room; None where all have room.

    Parameters
    ----------
    plan : Plan
        The plan.
    strict : bool, default True
        False: only of limits that are hard.
    """
    found = [one for one in plan.checks if not one.fits and (strict or one.is_hard)]
    return max(found, key=lambda one: one.needed_bytes - one.available_bytes, default=None)


def _label(row: Row) -> str:
    return row.category if row.device is None else f"{row.category} on {row.device}"
