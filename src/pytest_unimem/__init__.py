"""A pytest fixture that fails a test whose steady state takes memory.

It is a package of its own, since pytest imports it at every start; unimem is imported by the first
test that uses the fixture.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pytest

if TYPE_CHECKING:
    from unimem.accounting.measure import Measured

__all__ = ["SteadyState", "unimem_steady_state"]


@pytest.fixture
def unimem_steady_state() -> SteadyState:
    """Fail the test if unimem takes memory in it, or pages fault: see `SteadyState`."""
    return SteadyState()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Measure the test around its own code, so that the test fails, not its teardown."""
    state = getattr(item, "funcargs", {}).get("unimem_steady_state")
    if not isinstance(state, SteadyState):
        return (yield)
    state.begin()
    try:
        result = yield
        measured = state._stop()
    finally:
        state._stop()
    # A test that marked its own steady state has checked it there.
    if measured is not None and (taken := state._taken(measured)):
        pytest.fail(taken, pytrace=False)
    return result


class SteadyState:
    """The fixture, which marks the steady state of a test.

    The steady state is the block, or the blocks, of ``with unimem_steady_state:``;
    or the rest after `begin`; or the calls of `run`; or else the whole test. In it, unimem may not
    map memory, make system calls or allocate, in any thread, and no page may fault in the thread of
    the test. Garbage is not collected meanwhile. For the thread of the test alone.

    Parameters
    ----------
    allow_faults : int
        Page faults that are allowed.
    all_threads : bool
        Whether faults of all threads of the process count.

    Examples
    --------
    ::

        def test_append(unimem_steady_state):
            with um.KVCache(2, 4, 64, 128) as kv:
                token = np.ones((2, 4, 64), "float32")
                kv.append_all(token, token)
                with unimem_steady_state:
                    kv.append_all(token, token)
    """

    def __init__(self, allow_faults: int = 0, all_threads: bool = False) -> None:
        self._allow_faults = allow_faults
        self._all_threads = all_threads
        self._measured: Measured | None = None
        self._collects = False

    def __call__(self, *, allow_faults: int = 0, all_threads: bool = False) -> Self:
        """Set the options of the class: ``with unimem_steady_state(allow_faults=2):``."""
        self._allow_faults = allow_faults
        self._all_threads = all_threads
        return self

    def begin(self) -> None:
        """Begin the steady state, up to the end of the test and what the test closes.

        A second call begins anew.
        """
        import unimem as um

        self._stop()
        gc.collect()
        self._collects = gc.isenabled()
        gc.disable()
        self._measured = um.measure().__enter__()

    def run(self, step: Callable[[], Any], times: int = 1, tries: int = 4) -> None:
        """Call a step until a try takes nothing: its own cost would appear in every try.

        The kernel seldom takes a page away for a moment, to move it, and the interpreter seldom
        needs a new one.

        Parameters
        ----------
        step : callable
            Called once before anything counts.
        times, tries : int
            Calls in a try, and the most tries.
        """
        __tracebackhide__ = True
        step()
        taken = ""
        for _ in range(tries):
            self.begin()
            for _ in range(times):
                step()
            if not (taken := self._end()):
                return
        pytest.fail(taken)

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        __tracebackhide__ = True
        taken = self._end()
        if taken and error is None:
            pytest.fail(taken)

    def _stop(self) -> Measured | None:
        measured, self._measured = self._measured, None
        if measured is not None:
            measured.__exit__()
            if self._collects:
                gc.enable()
        return measured

    def _end(self) -> str:
        measured = self._stop()
        return "" if measured is None else self._taken(measured)

    def _taken(self, measured: Measured) -> str:
        """Describe the memory that was taken; "" in a steady state."""
        from unimem.base.text import format_bytes

        found = [
            f"{category}: {format_bytes(nbytes)} mapped"
            for category, nbytes in measured.taken.items()
            if nbytes
        ]
        if n := measured.n_os_calls:
            found.append(f"system calls by unimem: {n}")
        if n := measured.n_allocations:
            size = format_bytes(measured.allocated_bytes)
            found.append(f"heap allocations by unimem: {n}, of {size}")
        whose, minor, major = (
            "this thread",
            measured.thread_minor_faults,
            measured.thread_major_faults,
        )
        if minor is None or major is None or self._all_threads:
            whose, minor, major = "all threads", measured.minor_faults, measured.major_faults
        if minor + major > self._allow_faults:
            allowed = f", {self._allow_faults} allowed" if self._allow_faults else ""
            found.append(f"page faults of {whose}: {minor + major}, {major} with a disk{allowed}")
        if not found:
            return ""
        return "\n  ".join(["the steady state took memory:", *found])
