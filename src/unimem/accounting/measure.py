"""The cost of a stretch of code: memory by category, page faults, allocations, system calls."""

from __future__ import annotations

import functools
import inspect
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, Self, SupportsIndex, TypeVar

from unimem._core.status import Marks, counters, ledger, row_name
from unimem.base.html import preformatted
from unimem.base.text import Surface, fact_lines, format_bytes, format_change, table_lines
from unimem.errors import ClosedError
from unimem.system.heap import malloc_bytes

_T_co = TypeVar("_T_co", covariant=True)
# The names of rows in a report.
_CATEGORIES = tuple(map(row_name, ledger()))


class _Reading(NamedTuple):
    """All figures at one moment."""

    thread: int
    minor_faults: int
    major_faults: int
    thread_minor_faults: int
    thread_major_faults: int
    mapped: list[int]
    n_os_calls: int
    n_allocations: int
    allocated_bytes: int
    malloc_bytes: int | None
    time: float


def _read_counters() -> _Reading:
    process = resource.getrusage(resource.RUSAGE_SELF)
    thread = resource.getrusage(resource.RUSAGE_THREAD)
    native = counters()
    malloc = malloc_bytes()
    return _Reading(
        threading.get_native_id(),
        process.ru_minflt,
        process.ru_majflt,
        thread.ru_minflt,
        thread.ru_majflt,
        [row["mapped_bytes"] for row in ledger().values()],
        native["os_calls"],
        native["allocations"],
        native["allocated_bytes"],
        None if malloc is None else malloc.in_use,
        time.perf_counter(),
    )


class MeasuredFunction(Protocol[_T_co]):
    """A function whose calls are measured.

    Attributes
    ----------
    measured : Measured or None
        Of the last call.
    """

    measured: Measured | None

    def __call__(self, *args: Any, **kwargs: Any) -> _T_co:
        """Call it."""


class Measured:
    """The cost of a ``with`` block, so far or in the end.

    Any thread may read it; it is entered once. After a fork it belongs to the parent: in the child,
    an unfinished one raises ClosedError.

    Examples
    --------
    >>> import unimem as um
    >>> with um.measure() as m:
    ...     um.Block(1 << 20, category="scratch").close()
    >>> m.peaks["scratch"], m.growth["scratch"]
    (1048576, 0)
    """

    __slots__ = ("_first", "_last", "_marks", "_most", "_pid")

    def __init__(self) -> None:
        self._pid = 0
        self._marks: Marks | None = None
        self._most: list[int] = []
        self._first: _Reading | None = None
        self._last: _Reading | None = None

    def __enter__(self) -> Self:
        if self._pid:
            raise RuntimeError("it was entered already: use another measure()")
        self._marks = Marks()
        self._pid = os.getpid()
        _read_counters()  # touches the memory of a reading before it counts
        self._first = _read_counters()
        return self

    def __exit__(self, *_: object) -> None:
        last = _read_counters()
        if self._marks is not None and self._pid == os.getpid():
            self._most = self._marks.read()
            self._last = last
        self._marks = None

    def __call__(self, function: Callable[..., _T_co]) -> MeasuredFunction[_T_co]:
        """Return a function that does the same and measures each of its calls.

        Its `measured` is the cost of the last call, None before the first. An ``async`` function is
        measured from its first step to its last, with other tasks in between.
        """
        if not callable(function):
            raise TypeError(f"measure: expected a function, got {type(function).__name__}")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            name = getattr(function, "__qualname__", repr(function))  # a functools.partial lacks it
            raise TypeError(
                f"measure: {name} is a generator: its body does not run in its call. Measure "
                "inside it, 'with um.measure()', or where it is iterated"
            )
        measuring: Any
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def measuring(*args: Any, **kwargs: Any) -> Any:
                with _measure_call(measuring):
                    return await function(*args, **kwargs)

        else:

            @functools.wraps(function)
            def measuring(*args: Any, **kwargs: Any) -> Any:
                with _measure_call(measuring):
                    return function(*args, **kwargs)

        measuring.measured = None
        measured: MeasuredFunction[_T_co] = measuring
        return measured

    # ---- figures ----

    def _span(self) -> tuple[_Reading, _Reading]:
        """Return the first reading, and the last, or one of now."""
        if self._first is None:
            raise RuntimeError("nothing is measured yet: enter it with 'with'")
        if self._last is not None:
            return self._first, self._last
        if self._pid != os.getpid():
            raise ClosedError("this measures the process that began it, and not a forked child")
        return self._first, _read_counters()

    def _difference(self, name: str) -> int:
        first, last = self._span()
        difference: int = getattr(last, name) - getattr(first, name)
        return difference

    @property
    def peaks(self) -> dict[str, int]:
        """The most bytes that were mapped at once during the block, by category of blocks.

        Exact, whichever threads mapped them. The categories are ``weights``, ``scratch``, ``kv``,
        ``staging``, ``diagnostics``, ``logits``, ``tokens`` and ``other``; a part of a block, such
        as a decoder's logits in a report, counts in the category of the block.
        """
        self._span()
        marks = self._marks
        most = self._most if marks is None else marks.read()
        return dict(zip(_CATEGORIES, most, strict=True))

    @property
    def taken(self) -> dict[str, int]:
        """By category, the peak less the bytes that were mapped at the beginning."""
        first, _ = self._span()
        at_first = zip(self.peaks.items(), first.mapped, strict=True)
        return {name: peak - before for (name, peak), before in at_first}

    @property
    def growth(self) -> dict[str, int]:
        """By category, the bytes that are mapped at the end less those at the beginning."""
        first, last = self._span()
        pairs = zip(first.mapped, last.mapped, strict=True)
        differences = (after - before for before, after in pairs)
        return dict(zip(_CATEGORIES, differences, strict=True))

    @property
    def minor_faults(self) -> int:
        """Page faults of the process without disk reads."""
        return self._difference("minor_faults")

    @property
    def major_faults(self) -> int:
        """Page faults of the process that waited for a disk."""
        return self._difference("major_faults")

    @property
    def thread_minor_faults(self) -> int | None:
        """Minor faults of the thread that entered; None if another thread reads or left."""
        return None if self._difference("thread") else self._difference("thread_minor_faults")

    @property
    def thread_major_faults(self) -> int | None:
        """Major faults of the thread that entered; None if another thread reads or left."""
        return None if self._difference("thread") else self._difference("thread_major_faults")

    @property
    def n_os_calls(self) -> int:
        """System calls of unimem's native code, in any thread."""
        return self._difference("n_os_calls")

    @property
    def n_allocations(self) -> int:
        """Heap allocations of unimem's native code, in any thread."""
        return self._difference("n_allocations")

    @property
    def allocated_bytes(self) -> int:
        """Bytes of these allocations."""
        return self._difference("allocated_bytes")

    @property
    def malloc_bytes(self) -> int | None:
        """Growth of malloc's memory in use by any library; None without glibc 2.33.

        It includes CPython's objects above 512 bytes; smaller ones are in arenas of its own.
        """
        first, last = self._span()
        if first.malloc_bytes is None or last.malloc_bytes is None:
            return None
        return last.malloc_bytes - first.malloc_bytes

    @property
    def seconds(self) -> float:
        """Wall-clock seconds."""
        first, last = self._span()
        return last.time - first.time

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        if self._marks is not None:
            raise TypeError("a Measured cannot be pickled: its block goes on. Leave that first")
        return super().__reduce_ex__(protocol)

    def __str__(self) -> str:
        peaks, growth = self.peaks, self.growth
        lines = [
            (name, format_bytes(peaks[name]), format_change(growth[name]))
            for name in _CATEGORIES
            if peaks[name]
        ]
        malloc = self.malloc_bytes
        facts = {
            "minor faults": f"{self.minor_faults}, of this thread {self.thread_minor_faults}",
            "major faults": f"{self.major_faults}, of this thread {self.thread_major_faults}",
            "unimem's system calls": f"{self.n_os_calls}",
            "unimem's allocations": f"{self.n_allocations} of {format_bytes(self.allocated_bytes)}",
            "malloc": "not known" if malloc is None else format_change(malloc),
            "seconds": f"{self.seconds:.6f}",
        }
        surface = Surface()
        shown = [*table_lines(surface, ("memory", "high water", "growth"), lines), ""]
        return "\n".join([*shown, *fact_lines(surface, facts.items())])

    def __repr__(self) -> str:
        if self._first is None:
            return "Measured(not begun)"
        figures = f"{self.minor_faults} faults, {self.n_os_calls} system calls"
        figures += f", {self.n_allocations} allocations, {self.seconds:.6f} s"
        return f"Measured({'' if self._last else 'going on: '}{figures})"

    def _repr_html_(self) -> str:
        return preformatted(str(self))


@contextmanager
def _measure_call(function: Any) -> Iterator[None]:
    measured = Measured()
    try:
        with measured:
            yield
    finally:
        function.measured = measured


def measure() -> Measured:
    """Measure the cost of a ``with`` block, or of each call of a function.

    Returns
    -------
    Measured
        To be entered, or to decorate a function as ``@um.measure()``. Its figures can be read
        during the block and after it. Blocks may be nested, and in several threads; each sees
        everything that the process maps meanwhile.

    Raises
    ------
    CapacityError
        On entry: 64 blocks are being measured.
    RuntimeError
        It is entered a second time, or read before the first.
    TypeError
        It decorates a generator, whose body does not run in its call.

    Notes
    -----
    A measurement itself costs nothing: no page faults, no system call of unimem, no memory of its
    native code. In a loop it measures as zero.

    Examples
    --------
    >>> import unimem as um
    >>> with um.measure() as m:
    ...     block = um.Block(1 << 20, category="scratch", warm=True)
    >>> m.peaks["scratch"], m.growth["scratch"]
    (1048576, 1048576)
    >>> block.close()
    >>> @um.measure()
    ... def nothing():
    ...     pass
    >>> nothing()
    >>> nothing.measured.n_os_calls
    0
    """
    return Measured()
