"""Three tapes for three lifetimes: weights, scratch, history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, Self, TypeVar, Unpack

from unimem._core.block import Block
from unimem._core.tape import Bump, Tape
from unimem.base.arguments import flag
from unimem.base.html import bar, fragment, heading, markup, size, stamp, table
from unimem.errors import ClosedError
from unimem.models.dims import ModelDims
from unimem.planning.plan import plan
from unimem.planning.result import Plan
from unimem.remote.client import is_url
from unimem.system import limits, policy
from unimem.system.heap import warm_python_heap
from unimem.weights.loading import EngineLoad, LoadRequest, Progress, way_of
from unimem.weights.node_copies import is_mirrored
from unimem.weights.opened import Weights, open_planned

if TYPE_CHECKING:
    from unimem.system.placement import PlacementOptions

_MIB = 1 << 20
_TAPES = ("weights", "scratch", "history")
_COLOR = "#3b82c4"

TapeT = TypeVar("TapeT", bound="Bump[Any]")
"""The device's tapes: `unimem.Tape` or `unimem.cuda.Tape`."""


class _Cache(Protocol):
    """An attached cache."""

    @property
    def tape(self) -> Any: ...

    @property
    def closed(self) -> bool: ...

    def clear(self) -> None: ...

    def _freeze(self, frozen: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Stat:
    """The use of a layout's three tapes, in bytes; `str` writes it in MiB.

    Examples
    --------
    >>> str(Stat(3 << 19, 4 << 20, 0, 1 << 20, 1 << 18, 1 << 19))
    'weights: 1.5/4.0 MiB | scratch: 0.0/1.0 MiB | history: 0.2/0.5 MiB'
    """

    weights_used: int
    weights_total: int
    scratch_used: int
    scratch_total: int
    history_used: int
    history_total: int

    def __str__(self) -> str:
        return " | ".join(
            f"{name}: {used / _MIB:.1f}/{total / _MIB:.1f} MiB"
            for name, used, total in (
                ("weights", self.weights_used, self.weights_total),
                ("scratch", self.scratch_used, self.scratch_total),
                ("history", self.history_used, self.history_total),
            )
        )


class Lifetimes(Generic[TapeT]):
    """A `Layout` on any device; `new_tape(size_or_block, name)` makes its tapes."""

    _is_begun = False

    def __init__(
        self, weights: Any, scratch: Any, history: Any, new_tape: Callable[[Any, str], TapeT]
    ) -> None:
        # A flag that is set first: converting a size may call the constructor again.
        if self._is_begun:
            raise RuntimeError("the Layout is made already")
        self._is_begun = True
        self._closed = True
        self._caches: list[_Cache] = []
        self._owns_weights = not isinstance(weights, Weights)
        made: list[TapeT] = []
        try:
            # A tape or weights; a union would let callers use only what both have.
            self.weights: Any
            if isinstance(weights, Weights):
                self.weights = weights
            else:
                self.weights = new_tape(weights, "weights")
                made.append(self.weights)
            self.scratch = new_tape(scratch, "scratch")
            made.append(self.scratch)
            self.history = new_tape(history, "history")
        except BaseException:
            # All or nothing.
            for tape in made:
                tape.close()
            raise
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the Layout is closed")

    def _check_unused(self) -> None:
        self.history._check_unused()
        self.scratch._check_unused()

    def attach(self, cache: _Cache) -> None:
        """Let `clear_talk` clear a cache.

        Parameters
        ----------
        cache : KVCache
            With memory of its own, or on `history`. Clearing keeps the used part of that tape from
            now on: it forgets the tokens and leaves the memory.

        Raises
        ------
        CapacityError, MemoryError
            The layout is frozen, and the cache cannot be warmed; it is not attached.
        """
        self._check_open()
        if not hasattr(cache, "_freeze"):
            raise TypeError(f"cache: expected a KVCache or a Scratchpad, got {cache!r:.60}")
        if self.frozen:
            self._warm([cache])
            cache._freeze(True)
        if cache.tape is self.history:
            self.history.keep()
        self._caches.append(cache)

    def clear_pass(self) -> None:
        """Clear `scratch`, except kept memory, after a forward pass."""
        self._check_open()
        self.scratch.clear()

    def clear_talk(self) -> None:
        """Begin a new conversation: clear the attached caches, `history` and `scratch`."""
        self._check_open()
        for cache in self._caches:
            if not cache.closed:
                cache.clear()
        self.history.clear()
        self.scratch.clear()

    def freeze(self) -> None:
        """End start-up: warm all memory that may be used from now on, so that nothing faults.

        From now on FrozenError refuses every take from `weights` and `history`, takes from
        `scratch` beyond its high-water mark, and tokens for which attached caches would commit
        memory. Clearing, and appending to committed memory, still work. Attached caches keep memory
        that trimming would give back. Only a tape over a file on disk that is mapped with
        ``mode="r+"`` still faults: the kernel writes its pages back, and the next write to each
        faults.

        Raises
        ------
        CapacityError
            Pages that are not in RAM yet do not fit into a limit, which the message names. Nothing
            was touched or frozen.
        MemoryError, PlacementError
            Memory ran out, or ran out on the nodes it is bound to. Nothing is frozen.
        OSError
            The file of mapped weights became shorter. Nothing is frozen.
        """
        self._check_open()
        self._warm([cache for cache in self._caches if not cache.closed])
        if isinstance(self.weights, Bump):
            self.weights.freeze()
        self.history.freeze()
        self.scratch._freeze_at(self.scratch.high_water_bytes)
        self._freeze_caches(True)

    def thaw(self) -> None:
        """Undo `freeze`."""
        self._check_open()
        for tape in (self.weights, self.history, self.scratch):
            if isinstance(tape, Bump):
                tape.thaw()
        self._freeze_caches(False)

    def _warm(self, caches: Sequence[_Cache]) -> None:
        """Warm memory that may be used while frozen; a device's memory needs none."""

    def _freeze_caches(self, frozen: bool) -> None:
        for cache in self._caches:
            if not cache.closed:
                cache._freeze(frozen)

    @property
    def frozen(self) -> bool:
        """Whether the layout is frozen."""
        return self.history.frozen

    @property
    def total_bytes(self) -> int:
        """The size of all three, in bytes."""
        s = self.stat()
        return s.weights_total + s.scratch_total + s.history_total

    @property
    def closed(self) -> bool:
        """Whether the layout was closed, or lost its memory, as in a forked child."""
        parts = (self.weights, self.scratch, self.history)
        return self._closed or any(part.closed for part in parts)

    def stat(self) -> Stat:
        """Return how much of each tape is used."""
        self._check_open()
        if isinstance(self.weights, Weights):
            weights_used = weights_total = self.weights.mapped_bytes
        else:
            weights_used, weights_total = self.weights.used_bytes, self.weights.total_bytes
        return Stat(
            weights_used,
            weights_total,
            self.scratch.used_bytes,
            self.scratch.total_bytes,
            self.history.used_bytes,
            self.history.total_bytes,
        )

    def close(self) -> None:
        """Give the memory back; blocks and weights that were passed in stay open.

        Raises
        ------
        BufferError
            Arrays still use a tape or the weights; all stays open.
        """
        if self._closed:
            return
        self._check_unused()
        if self._owns_weights:
            self.weights.close()
        self.scratch.close()
        self.history.close()
        self._closed = True

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        # Live arrays keep their memory until the last of them goes.
        self.history.__exit__()
        self.scratch.__exit__()
        if self._owns_weights:
            self.weights.__exit__(*exc_info)
        self._closed = True

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Layout cannot be pickled: it is memory of this process. Pickle its sizes, and make "
            "it anew"
        )

    def __repr__(self) -> str:
        return "Layout(closed)" if self.closed else f"Layout({self.stat()})"

    def _repr_html_(self) -> str:
        if self.closed:
            return fragment(markup(repr(self)))
        figures = astuple(self.stat())
        used = zip(_TAPES, figures[::2], figures[1::2], strict=True)
        rows = [
            (name, size(total), size(now), bar(now / max(1, total), _COLOR))
            for name, now, total in used
        ]
        state = "Layout, frozen" if self.frozen else "Layout"
        sums = [("total", size(sum(figures[1::2])), size(sum(figures[::2])), "")]
        lines = table(("tape", "size", "active", ""), rows, foot=sums, align="<>><")
        return fragment(heading(state), stamp(), lines)


class Layout(Lifetimes[Tape]):
    """The memory of one model and one conversation.

    ============  ==================================  ============================
    tape          contents                            cleared
    ============  ==================================  ============================
    weights       the model, mapped or loaded once    never
    scratch       temporaries of a pass, the logits   `clear_pass`, after a token
    history       the KV cache                        `clear_talk`, a new talk
    ============  ==================================  ============================

    Several threads may take from the tapes, but only one may clear, freeze or close. A forked child
    has its own copy. Memory faults at its first touch; `freeze` touches all used memory, and after
    it nothing faults.

    Parameters
    ----------
    weights : int, str, Block or Weights
        A size in bytes or such as ``"1G"``, a block, or an opened model, which counts as used.
    scratch, history : int, str or Block
        A size, or a block.
    **placement
        See `PlacementOptions`; for tapes given as sizes.

    Attributes
    ----------
    weights : Tape or Weights
        The opened model, or a tape.
    scratch, history : Tape
        The other two.
    plan : Plan or None
        The plan behind the sizes of a layout made by `for_model`.

    Examples
    --------
    >>> import unimem as um
    >>> with um.Layout(1 << 20, 1 << 16, 1 << 20, pages="4k") as layout:
    ...     hidden = layout.scratch.take(1024)
    ...     layout.clear_pass()
    ...     print(layout.stat())
    weights: 0.0/1.0 MiB | scratch: 0.0/0.1 MiB | history: 0.0/1.0 MiB
    """

    def __init__(
        self,
        weights: int | str | Block | Weights,
        scratch: int | str | Block,
        history: int | str | Block,
        **placement: Unpack[PlacementOptions],
    ) -> None:
        def new_tape(size_or_block: int | str | Block, name: str) -> Tape:
            if isinstance(size_or_block, Block):
                return Tape(size_or_block, name=name)
            return Tape(size_or_block, name=name, category=name, **placement)

        super().__init__(weights, scratch, history, new_tape)
        self.plan: Plan | None = None

    def _warm(self, caches: Sequence[_Cache]) -> None:
        tapes = {self.scratch: self.scratch.high_water_bytes}
        used = [self.history, *(cache.tape for cache in caches if cache.tape is not None)]
        if isinstance(self.weights, Tape):
            used.append(self.weights)
        tapes |= {tape: tape.used_bytes for tape in used}
        # A cache with different layers has several pieces.
        alone: list[Any] = [
            part
            for cache in caches
            if cache.tape is None
            for part in getattr(cache, "_pieces", (cache,))
        ]
        cold_bytes = sum(
            _cold_bytes(
                tape.block,
                nbytes,
                # Pages of a file in RAM need more memory: they are copied, or held until on disk.
                0 if tape._is_of_file else tape.block._resident_range(0, nbytes),
            )
            for tape, nbytes in tapes.items()
        ) + sum(
            _cold_bytes(cache.block, cache.capacity_bytes, cache.resident_bytes) for cache in alone
        )
        # First all limits, for everything together, before anything is touched.
        what = "Layout.freeze: warming memory"
        if isinstance(self.weights, Weights):
            self.weights._require_room(what, cold_bytes)
            self.weights._warm_used()
        else:
            limits.require(cold_bytes, what)
        n_threads = limits.thread_count()
        for tape, nbytes in tapes.items():
            # If a file's pages were only read, the first write to each would still fault.
            tape.block._warm_range(0, nbytes, n_threads, write=True)
        for cache in alone:
            cache.warm(n_threads)
        warm_python_heap()

    @classmethod
    def for_model(
        cls,
        path_or_weights: str | PathLike[str] | Weights,
        *,
        ctx: int | None = None,
        batch: int = 1,
        kv_dtype: str = "f16",
        window: int | None = None,
        threads: int | None = None,
        load: EngineLoad = "auto",
        weights_budget: int | str | None = None,
        progress: Progress | None = None,
        **placement: Unpack[PlacementOptions],
    ) -> Layout:
        """Make the layout for a model, with the sizes of `plan`.

        A model that does not fit is refused before it is read. Memory and mapped weights fault at
        their first touch: `freeze` touches them, or ``warm=True`` right here.

        Parameters
        ----------
        path_or_weights : path-like or Weights
            A model file or its URL, which is opened and closed with the layout, or an opened one.
        ctx : int, optional
            Tokens of context; by default the smallest of the model's, 4096 and the most that fit.
        batch, kv_dtype, window, threads, load, weights_budget
            As for `plan`. With a window, or if some layers slide, as in gemma3, the KV cache is not
            on `history`. If `plan` repacks, the layout maps the file, and a `Decoder` with it
            repacks. A model at a URL is read in full first, and repacked tensors lie beside it.
        progress : callable, optional
            As for `open_weights`; only for a file.
        **placement
            See `PlacementOptions`; they also apply to the weights of a file. With
            ``numa="mirror"`` these have a copy on each node, and the tapes lie on the nodes of the
            threads that touch them first.

        Returns
        -------
        Layout

        Raises
        ------
        GGUFError, SafetensorsError, OSError
            The file cannot be used.
        ValueError
            An option is out of range, or the model's dimensions are not known.
        CapacityError, PlacementError, MemoryError
            The model does not fit into the memory that this process may have, or not as requested.
        """
        options: dict[str, Any] = {
            "ctx": ctx,
            "batch": batch,
            "kv_dtype": kv_dtype,
            "window": window,
            "threads": threads,
            "engine": "unimem",
            **placement,
        }
        strict = flag(placement.get("strict", False), "strict")
        given = isinstance(path_or_weights, Weights)
        if isinstance(path_or_weights, Weights):
            weights = path_or_weights
            needed = plan(weights, load=load, **options)
        else:
            remote = is_url(path_or_weights)
            load = way_of(path_or_weights, load, weights_budget)
            before = plan(path_or_weights, load=load, weights_budget=weights_budget, **options)
            before.require_fits(strict=strict)
            if before.load == "stream":
                load = "stream"
            repacks, mapped = before.load == "repack", placement.copy()
            if repacks and not remote:  # these options are for the repacked tensors
                mapped.pop("pages", None)
                mapped.pop("numa", None)
                mapped.pop("warm", None)
                if placement.get("lock"):
                    mapped["lock"] = "onfault"
            if load == "repack":
                load = "direct" if remote else "map"
                if not repacks:
                    policy.warn(f"{before.facts['model']} is not repacked: {before.load_reason}")
            why_mapped = before.load_reason if before.load in ("map", "repack") else ""
            request = LoadRequest(
                load,
                progress=progress,
                placement=mapped,
                why_mapped=why_mapped,
                budget=before.weights_budget,
            )
            weights = open_planned(path_or_weights, request)

        try:
            if not given:  # the file may have changed
                needed = plan(weights, load="repack" if repacks else "auto", **options)
                reason = before.load_reason if repacks or load == "stream" else needed.load_reason
                needed = replace(needed, load_reason=reason)
            ModelDims.from_weights(weights)  # raises if the dimensions are not known
            needed.require_fits(strict=strict)
            if is_mirrored(placement):  # memory that is written has no copies
                placement["numa"] = None
            layout = cls(weights, needed.scratch_bytes, needed.history_bytes, **placement)
        except BaseException:
            if not given:
                weights.close()
            raise
        layout._owns_weights = not given
        layout.plan = needed
        return layout


def _cold_bytes(block: Block, nbytes: int, resident_bytes: int) -> int:
    """Return how much free memory warming takes; hugetlb pages come from their pool."""
    return 0 if block.granted.pages in policy.HUGETLB else max(0, nbytes - resident_bytes)
