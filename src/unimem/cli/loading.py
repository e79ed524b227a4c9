"""A model that a command computes with: its options, its way into memory, and what to say of it."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from unimem.base.text import format_bytes, shorten
from unimem.cli import terminal
from unimem.cli.options import check_window
from unimem.cli.other_ways import other_ways
from unimem.errors import PlacementWarning
from unimem.kv.store.store import KVStore
from unimem.kv.types import kv_pair
from unimem.layout import Layout
from unimem.planning.result import Plan
from unimem.system.placement import Pages
from unimem.weights.loading import EngineLoad, way_of
from unimem.weights.opened import Weights, warm_where_it_fits
from unimem.weights.remote_files import open_files
from unimem.weights.tensors import headers_of

if TYPE_CHECKING:
    from unimem.engine import Decoder
    from unimem.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelOptions:
    """The options of a model that is loaded."""

    ctx: int | None
    threads: int | None
    kv_dtype: str
    rotate: bool | None
    window: int | None
    load: EngineLoad
    weights_budget: str | None
    pages: Pages
    numa: str | None


def read_tokenizer(path: Path | str, options: ModelOptions) -> Tokenizer:
    """Return the model's tokenizer; refuse what the engine does not run before data is read."""
    from unimem.engine.model import Model, UnsupportedModel
    from unimem.engine.text.tokenizer import Tokenizer

    way_of(path, options.load, options.weights_budget)  # refuses to stream from a server
    with open_files(path) as files:
        contents = headers_of(files)
        try:
            model = Model.from_weights(contents)
        except UnsupportedModel as error:
            for line in other_ways(path, options.ctx, options.kv_dtype):
                error.add_note(line)
            raise
        model.rotates(options.rotate, *kv_pair(options.kv_dtype))  # or it raises
        return Tokenizer.from_metadata(contents.metadata)


def load_layout(path: Path | str, options: ModelOptions) -> Layout:
    """Make the layout, and read the model into memory of its own, or map it."""
    names = {each.name for each in fields(ModelOptions)} - {"rotate"}
    asked = {name: getattr(options, name) for name in names}
    with terminal.updates("loading") as progress, check_window():
        return Layout.for_model(path, progress=progress, **asked)


def new_decoder(
    layout: Layout, options: ModelOptions, tokenizer: Tokenizer, store: KVStore | None = None
) -> Decoder:
    """Make the decoder, which repacks the model if the plan says so."""
    from unimem.engine import Decoder

    weights, plan = layout.weights, layout.plan
    assert isinstance(weights, Weights)
    assert plan is not None  # for_model made both
    with terminal.updates("loading") as progress:
        decoder = Decoder(
            weights,
            ctx=plan.ctx,
            kv_dtype=plan.kv_dtype,
            rotate=options.rotate,
            window=plan.window,
            threads=options.threads,  # None lets the decoder take fewer than planned
            layout=layout,
            store=store,
            progress=progress,
        )
    decoder._tokenizer = tokenizer
    return decoder


def warm(decoder: Decoder, plan: Plan) -> None:
    """Read a mapped model that fits into RAM, so that no token waits for its pages."""
    if plan.load == "map":
        with terminal.updates("loading") as progress:
            warm_where_it_fits(decoder.weights, plan.threads, progress)


# ---- requests that are not met ----

_COLUMNS = 120
_BEFORE, _BEHIND = "unimem: warning: ", " (--verbose says more)"
# An unmet option in the text of a warning.
_OPTION = re.compile(r"\b(?:pages|numa|lock)=(?:'[^']*'|True)")


class Fallbacks:
    """A context that holds warnings of placement back, to show them as one line.

    Parameters
    ----------
    verbose : bool
        Whether each is shown at once instead.
    """

    def __init__(self, *, verbose: bool) -> None:
        self._verbose = verbose
        self._held: list[str] = []
        self._before: Any = None

    def __enter__(self) -> Self:
        if not self._verbose:
            self._before, warnings.showwarning = warnings.showwarning, self._hold
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            warnings.showwarning, self._before = self._before, None

    def _hold(self, message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, PlacementWarning):
            self._held.append(str(message))
        else:
            self._before(message, category, *where, **more)

    def show(self, plan: Plan) -> None:
        """Show what was held back and what the plan foresees, and hold nothing from now on."""
        self.__exit__()
        if self._held or (plan.verdict == "reads from disk" and not self._verbose):
            warnings.showwarning(
                PlacementWarning(_fallback_line(plan, self._held)), PlacementWarning, "", 0
            )


def _fallback_line(plan: Plan, held: list[str]) -> str:
    """Name the limits that the plan foresaw, or else the options in the warnings."""
    missed = [
        f"{check.name} has {format_bytes(check.available_bytes)} of "
        f"{format_bytes(check.needed_bytes)}"
        for check in plan.checks
        if not (check.fits or check.is_hard)
    ]
    reads = plan.verdict == "reads from disk"
    if not (missed or reads):
        missed = list(dict.fromkeys(_OPTION.findall(" ".join(held))))
    parts = [f"not as asked for: {', '.join(missed)}"] if missed else []
    if reads:
        again = format_bytes(plan.spilled_bytes)
        parts.insert(0, f"{again} of the model are read from disk with every token")
    text = "; ".join(parts) or held[0].partition(": ")[0]
    return shorten(text, _COLUMNS - len(_BEFORE) - len(_BEHIND)) + _BEHIND
