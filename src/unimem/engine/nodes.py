"""The copy of mirrored weights that a decoder reads, and the CPUs that it computes on."""

from __future__ import annotations

import os
import threading
from weakref import WeakKeyDictionary, WeakSet

from unimem.system import limits
from unimem.weights.opened import Weights, WeightsCopy
from unimem.weights.tensors import Contents

__all__ = ["Reader"]

_READERS: WeakKeyDictionary[WeightsCopy, WeakSet[Reader]] = WeakKeyDictionary()


class Reader:
    """One that reads weights from the thread that makes it. For that thread.

    Of mirrored weights it takes the copy on a node that this thread may run on: of several, that
    which the fewest others read, and of these the nearest. The thread is bound to the CPUs of that
    node, and so are threads that it starts, until `end`.

    Parameters
    ----------
    weights : Weights
        They stay open.

    Attributes
    ----------
    contents : Weights or WeightsCopy
        What it reads.
    n_cores : int or None
        Physical cores that compute; None where the weights are not mirrored.
    """

    def __init__(self, weights: Weights) -> None:
        self.contents: Contents = weights
        self.n_cores: int | None = None
        self._copy: WeightsCopy | None = None
        self._thread = threading.get_ident()
        self._bound: tuple[set[int], set[int]] | None = None
        if weights.copies:
            self._choose(weights)

    def _choose(self, weights: Weights) -> None:
        nodes, allowed, nearest = limits.nodes(), limits.cpus(), weights.on()
        here = [
            copy
            for node, copy in weights.copies.items()
            if node in nodes and allowed.intersection(nodes[node].cpus)
        ]

        def order(copy: WeightsCopy) -> tuple[int, bool]:
            return len(_READERS.get(copy, ())), copy is not nearest

        self._copy = min(here, key=order, default=None)
        if self._copy is None:  # no thread runs where a copy is
            self.contents = nearest
            return
        self.contents = self._copy
        _READERS.setdefault(self._copy, WeakSet()).add(self)
        cpus = allowed.intersection(nodes[self._copy.node].cpus)
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cpus)
        self._bound = before, cpus
        self.n_cores = limits.thread_count(cpus)

    def end(self) -> None:
        """Read no more. The thread may run where it could before, if it was not bound since."""
        if self._copy is not None:
            _READERS[self._copy].discard(self)
            self._copy = None
        if self._bound is not None and threading.get_ident() == self._thread:
            before, cpus = self._bound
            if os.sched_getaffinity(0) == cpus:
                os.sched_setaffinity(0, before)
        self._bound = None
