"""State machines whose calls meet failing system calls, and must then change nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine

import unimem as um
from support.kernel.os_faults import os_faults
from unimem.system import limits

Refusals = type[Exception] | tuple[type[Exception], ...]


class FaultyCalls(RuleBasedStateMachine):
    """A cache `kv` beside its `model`, and calls that may fail."""

    kv: Any
    model: Any

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.faults = self.stack.enter_context(os_faults())
        self.n_asked, self.refuse_at, self.refused = 0, 0, False
        require = limits.require

        def refusing(nbytes: int, what: str) -> None:
            self.n_asked += 1
            if self.n_asked == self.refuse_at:
                self.refused = True
                raise um.CapacityError(f"{what}: refused by the test", 0, 0, nbytes)
            require(nbytes, what)

        self.stack.enter_context(mock.patch.object(limits, "require", refusing))
        self.any_failed = False
        self.views: list[Any] = []
        self.rng = np.random.default_rng(0)

    def teardown(self) -> None:
        # Last, whatever close() raises: without it the library goes on with the faults' functions.
        with self.stack:
            self.views.clear()
            if hasattr(self, "kv"):
                self.kv.close()

    def attempt(
        self,
        call: Callable[[], Any],
        *,
        must: Refusals = (),
        may: Refusals = (),
        fault: tuple[int, int] | None = None,
    ) -> tuple[Any] | None:
        """The result in a tuple; None when the call was refused, as it had to or was allowed to.

        `fault` is the nth system call and its errno, or the nth question for room and 0.
        """
        nth, error = fault or (0, 0)
        self.faults.arm(nth if error else 0, error)
        self.n_asked, self.refuse_at, self.refused = 0, 0 if error else nth, False
        try:
            result = call()
        except Exception as caught:
            if isinstance(caught, must or may):
                return None
            if (self.faults.failed or self.refused) and isinstance(caught, (MemoryError, OSError)):
                return None
            raise
        finally:
            self.faults.disarm()
            self.refuse_at = 0
            self.any_failed = self.any_failed or self.faults.failed is not None
        assert must == (), f"expected {must}"
        return (result,)

    def part(self, percent: int) -> int:
        """Return a part of the number of tokens; above 100 %, more than there are."""
        seq_len: int = self.model.seq_len
        return seq_len * min(percent, 100) // 100 + max(0, percent - 100)
