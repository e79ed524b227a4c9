"""The governor: memory that a process gives back when memory gets short, and in which order."""

from __future__ import annotations

import os
import resource
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

from unimem._core.arrays import checked_nbytes
from unimem.base import kernel_files
from unimem.base.arguments import integer
from unimem.base.text import format_bytes
from unimem.base.threads import starting_threads
from unimem.errors import ClosedError
from unimem.kv.cache.cache import KVCache
from unimem.kv.paged import PagedKVCache
from unimem.staging.stage import Stage
from unimem.system import limits
from unimem.system.limits import Limit
from unimem.system.pressure import Notice, Watch, open_watches, wanted_room
from unimem.weights.opened import Weights
from unimem.weights.residency import drop_files

# Default priorities: of slots of streamed weights, prefix caches, memory without tokens, the page
# cache of files, and idle conversations.
_SLOTS, _PREFIXES, _SPARE, _FILES, _IDLE = 5, 10, 20, 30, 40
# Limits are read this often, since a changed limit is not announced.
_LOOK_SECONDS = 0.5
# The first and the longest wait after a look that found nothing to give back: the kernel may
# announce a shortage a thousand times a second, and it may last.
_LEAST_REST_SECONDS, _MOST_REST_SECONDS = 0.05, 1.0
_MOST_EVENTS = 1000
_PAGE_BYTES = resource.getpagesize()


@runtime_checkable
class GivesBack(Protocol):
    """An object for a `Governor`, with memory that it can spare."""

    def give_back(self) -> int:
        """Give that memory back, and return its bytes. Any thread may call it."""


@dataclass(frozen=True, slots=True)
class GovernorEvent:
    """A shortage that a governor noticed, and its response.

    Attributes
    ----------
    time : float
        In seconds since 1970.
    source : str
        The place of the shortage: "machine", "cgroup /a/b", "budget", or "asked".
    reason : str
        The observation.
    shortage_bytes : int
        Bytes that a limit lacks of its wanted room; 0 if threads only waited for memory.
    given_back : tuple of (str, int)
        Names and bytes of what was given back, in this order.
    errors : tuple of str
        Errors of a step or of the callback.
    """

    time: float
    source: str
    reason: str
    shortage_bytes: int = 0
    given_back: tuple[tuple[str, int], ...] = ()
    errors: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes that were given back."""
        return sum(nbytes for _, nbytes in self.given_back)

    def __str__(self) -> str:
        given = ", ".join(f"{format_bytes(nbytes)} of {name}" for name, nbytes in self.given_back)
        text = f"{self.source}: {self.reason}: gave back {given or 'nothing'}"
        return "; ".join((text, *self.errors))


@dataclass(frozen=True, slots=True)
class _Step:
    """One thing that can be given back."""

    priority: int
    name: str
    give_back: Callable[[], int]


@dataclass(frozen=True, slots=True)
class _Shortage:
    """A limit, and the bytes that it lacks."""

    source: str
    reason: str
    nbytes: int


class Governor:
    """Gives memory back that no token needs when memory gets short, before the kernel kills.

    Its thread waits for messages of the kernel, and reads each limit on the memory of this process
    twice a second. If a limit lacks room, steps are taken in the order of their priorities until it
    has enough; if threads only wait for memory, the first step with something to give is taken. No
    token is lost, and no result changes.

    Any thread may call its methods. In a forked child it is stopped.

    Parameters
    ----------
    budget_bytes : int or str, optional
        The most memory of its own (without pages of files) that this process should have in RAM; by
        default only limits of the system count.
    on_pressure : callable, optional
        Called in the governor's thread as ``on_pressure(event)`` after each `GovernorEvent`. Its
        errors are added to the event's `errors`.

    Raises
    ------
    TypeError, ValueError
        An argument is not a size, or not callable.

    Attributes
    ----------
    budget_bytes : int or None
        As given, in bytes.

    Notes
    -----
    The kernel announces shortages by PSI (``/proc/pressure/memory``, and ``memory.pressure`` of a
    cgroup), by ``memory.events``, and in version 1 by ``memory.pressure_level`` and a threshold of
    ``memory.usage_in_bytes``. `watches` says which of these this process may use.

    Examples
    --------
    >>> import unimem as um
    >>> with um.PagedKVCache(1, 2, 8, n_blocks=8) as pool, um.Governor() as governor:
    ...     governor.add(pool).start()
    ...     governor.running
    True
    """

    def __init__(
        self,
        budget_bytes: int | str | None = None,
        *,
        on_pressure: Callable[[GovernorEvent], object] | None = None,
    ) -> None:
        self.budget_bytes = (
            None if budget_bytes is None else checked_nbytes(budget_bytes, "budget_bytes", 1)
        )
        if on_pressure is not None and not callable(on_pressure):
            raise TypeError(
                f"on_pressure: expected a function of an event, got {on_pressure!r:.60}"
            )
        self._on_pressure = on_pressure
        self._lock = threading.Lock()  # of the fields below
        self._steps: list[_Step] = []
        self._events: deque[GovernorEvent] = deque(maxlen=_MOST_EVENTS)
        self._run: _Run | None = None
        self._closed = False
        self._giving = threading.Lock()  # one at a time

    def add(self, what: object, priority: int | None = None) -> Self:
        """Let the governor give something back; it holds it until it is closed.

        Parameters
        ----------
        what : PagedKVCache, KVCache, Decoder, Weights, Stage or an object with ``give_back()``
            A paged cache gives unused blocks and the prefixes in them; another cache gives memory
            without tokens; streamed weights, also those of a decoder, give a quarter of their slots
            beyond the least; weights that were read, and a stage, give the page cache of their
            files. A decoder with a store puts its conversation aside if it had no token for 10 s.
            ``give_back()`` returns bytes, and is called by the governor's thread.
        priority : int, optional
            Lower goes first. By default 5 for streamed weights, 10 for a paged cache, 20 for memory
            without tokens and for other objects, 30 for files, 40 for an idle conversation.

        Returns
        -------
        Governor
            Itself.

        Raises
        ------
        TypeError, ValueError
            `what` is of another type, or weights that are mapped, whose pages tokens read.
        ClosedError
            The governor is closed.
        """
        chosen = None if priority is None else integer(priority, "priority")
        steps = [
            _Step(usual if chosen is None else chosen, name, give_back)
            for name, usual, give_back in _steps_of(what)
        ]
        with self._lock:
            self._check_open()
            self._steps += [step for step in steps if step not in self._steps]
            self._steps.sort(key=lambda step: step.priority)
        return self

    def start(self) -> None:
        """Watch in a thread. Starting twice is no error.

        Raises
        ------
        ClosedError
            The governor is closed.
        OSError
            No descriptors are left.
        """
        with self._lock:
            self._check_open()
            if not self._is_running():
                self._run = _Run(self)

    def stop(self) -> None:
        """End the thread and wait for it; `start` begins anew. Stopping twice is no error."""
        with self._lock:
            run, self._run = self._run, None
        if run is not None:
            run.end()

    def give_back(self, nbytes: int | str | None = None) -> int:
        """Give memory back now, in this thread, and return its bytes.

        Parameters
        ----------
        nbytes : int or str, optional
            Bytes that are enough; by default everything is given back.

        Raises
        ------
        ClosedError
            The governor is closed.
        """
        wanted = None if nbytes is None else checked_nbytes(nbytes, "nbytes")
        with self._lock:
            self._check_open()
        text = "everything" if wanted is None else format_bytes(wanted)
        event = GovernorEvent(time.time(), "asked", f"give_back of {text}", wanted or 0)
        return self._act(event, float("inf") if wanted is None else wanted).nbytes

    @property
    def events(self) -> tuple[GovernorEvent, ...]:
        """The last events, the latest last; at most 1000."""
        with self._lock:
            return tuple(self._events)

    @property
    def given_back_bytes(self) -> int:
        """The bytes that were given back in these events."""
        return sum(event.nbytes for event in self.events)

    @property
    def watches(self) -> tuple[str, ...]:
        """The sources that it watches, and those that it may not use; empty while stopped."""
        with self._lock:
            return self._run.watches if self._run is not None and self._is_running() else ()

    @property
    def running(self) -> bool:
        """Whether its thread watches."""
        with self._lock:
            return self._is_running()

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._closed

    def close(self) -> None:
        """Stop, and release everything that was added. Closing twice is no error."""
        with self._lock:
            self._closed = True
            self._steps = []
        self.stop()

    def __enter__(self) -> Self:
        with self._lock:
            self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a Governor cannot be pickled: it is for the memory of this process")

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self.running else "stopped"
        with self._lock:
            n = len(self._steps)
        return f"Governor({state}, {n} steps, gave back {format_bytes(self.given_back_bytes)})"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the Governor is closed")

    def _is_running(self) -> bool:
        return self._run is not None and self._run.is_alive

    # ---- in the thread ------------------------------------------------------------------------

    def _look(self, notices: Iterable[Notice], found: Iterable[Limit]) -> int | None:
        """Act if memory is short; return the bytes that were given back, None if it is not."""
        told = next((notice for notice in notices if notice.is_pressure), None)
        shortage = find_shortage(found, self.budget_bytes)
        if shortage is not None:
            event = GovernorEvent(time.time(), shortage.source, shortage.reason, shortage.nbytes)
        elif told is not None:
            event = GovernorEvent(time.time(), told.source, told.text)
        else:
            return None
        return self._act(event, event.shortage_bytes, is_new=told is not None).nbytes

    def _act(self, event: GovernorEvent, wanted: float, *, is_new: bool = True) -> GovernorEvent:
        """Take steps until `wanted` bytes came back, at least one that has something to give.

        A continuing shortage without a remedy is no new event.
        """
        given: list[tuple[str, int]] = []
        errors: list[str] = []
        with self._lock:
            steps = list(self._steps)
        with self._giving:
            for step in steps:
                if given and sum(nbytes for _, nbytes in given) >= wanted:
                    break
                try:
                    nbytes = integer(step.give_back(), f"give_back() of {step.name}", 0)
                except Exception as error:  # a caller's code must not end the thread
                    errors.append(f"{step.name}: {type(error).__name__}: {error}")
                    continue
                if nbytes:
                    given.append((step.name, nbytes))
        event = replace(event, given_back=tuple(given), errors=tuple(errors))
        if not (is_new or given):
            return event
        if self._on_pressure is not None:
            try:
                self._on_pressure(event)
            except Exception as error:
                text = f"on_pressure: {type(error).__name__}: {error}"
                event = replace(event, errors=(*event.errors, text))
        with self._lock:
            self._events.append(event)
        return event


class _Run:
    """The thread of a governor, from a start to the stop."""

    def __init__(self, governor: Governor) -> None:
        self._governor = weakref.ref(governor)
        self._pid = os.getpid()
        self._open: list[Watch] = []
        self._limits: tuple[tuple[str, int], ...] = ()
        self.watches: tuple[str, ...] = ()
        self._wake_lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._loop, name="unimem-governor", daemon=True)
        try:
            self._watch(limits.memory_limits())
            with starting_threads():
                self._thread.start()
        except BaseException:
            self._give_descriptors_back()
            raise
        self._end = weakref.finalize(governor, self.end)

    @property
    def is_alive(self) -> bool:
        return os.getpid() == self._pid and self._thread.is_alive()

    def end(self) -> None:
        """Wake the thread, and wait until it has ended; its own callback does not wait."""
        if os.getpid() != self._pid:
            return
        with self._wake_lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        self._end.detach()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self, found: tuple[Limit, ...]) -> None:
        """Reopen all watches; thresholds depend on the old limit."""
        for watch in self._open:
            watch.close()
        self._open, refusals = open_watches()
        self._limits = _figures(found)
        names = ", ".join(limit.name for limit in found)
        self.watches = (
            *(f"{watch.source}: {watch.name}" for watch in self._open),
            f"limits, read every {_LOOK_SECONDS} s: {names}",
            *(f"not {refusal}" for refusal in refusals),
        )

    def _loop(self) -> None:
        try:
            poll, rest = self._new_poll(), 0.0
            while True:
                ready = dict(poll.poll(_LOOK_SECONDS * 1000))
                governor = self._governor()
                if self._wake in ready or governor is None:
                    return
                found = limits.memory_limits()
                given = governor._look(self._read(ready, poll), found)
                del governor  # so that it can be dropped meanwhile
                if _figures(found) != self._limits:
                    self._watch(found)
                    poll = self._new_poll()
                rest = min(max(2 * rest, _LEAST_REST_SECONDS), _MOST_REST_SECONDS)
                if given != 0:
                    rest = 0.0
                elif self._rest(rest):
                    return
        finally:
            self._give_descriptors_back()

    def _new_poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for watch in self._open:
            poll.register(watch.fd, watch.mask)
        return poll

    def _read(self, ready: dict[int, int], poll: select.poll) -> list[Notice]:
        """Take the events. The watch of a removed cgroup is closed."""
        notices = []
        for watch in [watch for watch in self._open if watch.fd in ready]:
            try:
                notice = watch.read() if ready[watch.fd] & watch.mask else None
                is_gone = not ready[watch.fd] & watch.mask
            except OSError:
                notice, is_gone = None, True
            if is_gone:
                poll.unregister(watch.fd)
                self._open.remove(watch)
                watch.close()
            elif notice is not None:
                notices.append(notice)
        return notices

    def _rest(self, seconds: float) -> bool:
        """Ignore the kernel for a while; return whether the thread has to end."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def _give_descriptors_back(self) -> None:
        for watch in self._open:
            watch.close()
        with self._wake_lock:
            os.close(self._wake)
            self._wake = -1


def _figures(found: Iterable[Limit]) -> tuple[tuple[str, int], ...]:
    return tuple((limit.name, limit.limit_bytes) for limit in found)


def find_shortage(found: Iterable[Limit], budget_bytes: int | None) -> _Shortage | None:
    """Find the limit that lacks most of its wanted room; None if all have it."""
    shortages = []
    for limit in found:
        missing = wanted_room(limit.limit_bytes) - (limit.limit_bytes - limit.used_bytes)
        if missing > 0 and not limit.name.startswith("commit "):
            name = "machine" if limit.name == "memory of the machine" else limit.name
            room = f"room for {format_bytes(limit.room_bytes)} of {format_bytes(limit.limit_bytes)}"
            shortages.append(_Shortage(name, room, missing))
    if budget_bytes is not None:
        own = own_bytes()
        if own > budget_bytes:
            reason = f"{format_bytes(own)} in RAM, and {format_bytes(budget_bytes)} allowed"
            shortages.append(_Shortage("budget", reason, own - budget_bytes))
    return max(shortages, key=lambda shortage: shortage.nbytes, default=None)


def own_bytes() -> int:
    """Return the bytes of this process in RAM that belong to no file."""
    fields = (kernel_files.read_text("/proc/self/statm") or "0 0 0").split()
    return (int(fields[1]) - int(fields[2])) * _PAGE_BYTES


def _steps_of(what: object) -> Iterator[tuple[str, int, Callable[[], int]]]:
    """Yield the name, the usual priority, and the call of each step."""
    yield _step_of(what)
    weights = getattr(what, "weights", None)  # of a decoder
    if isinstance(weights, Weights) and weights.stream is not None:
        yield _step_of(weights)
    put_aside = getattr(what, "_put_aside_if_idle", None)
    if put_aside is not None and getattr(what, "_store", None) is not None:
        assert isinstance(weights, Weights)
        yield f"idle conversation of {weights.files[0]}", _IDLE, put_aside


def _step_of(what: object) -> tuple[str, int, Callable[[], int]]:
    """Return the name, the usual priority, and the call of a step."""
    if isinstance(what, PagedKVCache):
        return f"prefix cache '{what.name}'", _PREFIXES, what.give_back
    if isinstance(what, KVCache):
        return f"spare memory of cache '{what.name}'", _SPARE, what.give_back
    if isinstance(what, Weights):
        if what.stream is not None:
            return f"slots of {what.files[0]}", _SLOTS, what.stream.give_back
        if what.load == "map":
            raise ValueError(
                f"what: {what.files[0]} is mapped, and tokens read its pages: expected weights "
                "with load='copy' or 'direct', or a Stage"
            )
        files = [(part.file.absolute_path, part.file.version) for part in what._parts]
        return f"page cache of {what.files[0]}", _FILES, lambda: drop_files(files)
    if isinstance(what, Stage):
        versions = what._versions
        return f"page cache of {what.source}", _FILES, lambda: drop_files(versions)
    if isinstance(what, GivesBack) and not isinstance(what, type):
        return f"spare memory of {type(what).__name__}", _SPARE, what.give_back
    raise TypeError(
        "what: expected a PagedKVCache, KVCache, Decoder, Weights, Stage or an object with "
        f"give_back(), got {what!r:.60}"
    )
