"""What both kinds of scratchpads are compared with: plain NumPy rows."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

import unimem as um
from unimem._core.status import counters

Array = NDArray[Any]
Pad = um.Scratchpad | um.PagedScratchpad

DTYPES = ("float32", "float16", "bfloat16", "float64")
LAYOUTS = st.sampled_from(["plain", "strided", "swapped"])
# What a pad of a dtype takes.
TAKEN = dict.fromkeys(DTYPES[:3], DTYPES[:3]) | {"float64": ("float64", "float32")}


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def converted(rows: Array, dtype: str) -> Array:
    """As NumPy and ml_dtypes convert; of 16 bits into 16 bits, through float32."""
    with np.errstate(all="ignore"):
        return rows.astype(rows.dtype if rows.dtype == np.float64 else np.float32).astype(
            dtype_of(dtype)
        )


def same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def awkward(dtype: str, shape: tuple[int, ...]) -> Array:
    """Numbers of every size, denormals and infinities, and both zeros; no NaN."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=shape) * 10.0 ** rng.integers(-45, 45, size=shape)
    flat = values.reshape(-1)
    special = [0.0, -0.0, np.inf, -np.inf, 1e-45, -6e-8, 65504.0, 65520.0, 1e38, 2.0**-133]
    flat[: len(special)] = special[: flat.size]
    with np.errstate(all="ignore"):
        return flat.reshape(shape).astype(dtype_of(dtype))


class PadAgainstModel(RuleBasedStateMachine):
    """The same calls on a pad and on rows that NumPy concatenates; views are held meanwhile."""

    CAPACITY, DIM = 13, 3
    BLOCK = 0  # tokens of a block; 0: the pad is in one piece

    def new_pad(self, dtype: str) -> Pad:
        raise NotImplementedError

    @initialize(dtype=st.sampled_from(DTYPES))
    def make(self, dtype: str) -> None:
        self.name = dtype
        self.pad: Pad = self.new_pad(dtype)
        self.model = np.empty((0, self.DIM), dtype_of(dtype))
        self.rng = np.random.default_rng(0)
        # Memory that earlier tests have left may be unmapped whenever the collector runs.
        gc.disable()
        self.counters = counters()
        # Views, what they show, and whether their tokens were never cut off since.
        self.views: list[tuple[int, Array]] = []

    def teardown(self) -> None:
        gc.enable()
        if hasattr(self, "pad"):
            if self.views:
                with pytest.raises(BufferError):
                    self.pad.close()
            self.views.clear()
            self.pad.close()

    def rows(self, n: int, given: str) -> Array:
        return self.rng.normal(scale=100, size=(n, self.DIM)).astype(dtype_of(given))

    @rule(given=st.sampled_from(DTYPES), how=LAYOUTS)
    def append(self, given: str, how: str) -> None:
        self.add(self.rows(1, given), how, lambda rows: self.pad.append(rows[0]))

    @rule(n=st.integers(0, 8), given=st.sampled_from(DTYPES), how=LAYOUTS)
    def append_batch(self, n: int, given: str, how: str) -> None:
        self.add(self.rows(n, given), how, self.pad.append_batch)

    def add(self, rows: Array, how: str, call: Callable[[Array], None]) -> None:
        given = rows
        if how == "strided":
            given = np.repeat(rows, 2, axis=1)[:, ::2]
        elif how == "swapped":
            given = rows.astype(rows.dtype.newbyteorder("S"))
        if rows.dtype not in [dtype_of(name) for name in TAKEN[self.name]]:
            with pytest.raises(TypeError):
                call(given)
        elif len(self.model) + len(rows) > self.CAPACITY:
            with pytest.raises(um.CacheFull):
                call(given)
        else:
            call(given)
            self.model = np.concatenate([self.model, converted(rows, self.name)])

    @rule(width=st.sampled_from([0, 2, 4]))
    def append_wrong(self, width: int) -> None:
        rows = np.zeros((2, width), dtype_of(self.name))
        for call, argument in ((self.pad.append, rows[0]), (self.pad.append_batch, rows)):
            with pytest.raises(ValueError, match="shape"):
                call(argument)

    @precondition(lambda self: len(self.model) > 0)
    @rule()
    def append_its_own(self) -> None:
        rows = self.pad.as_array()[-2:].copy()
        self.add(rows, "plain", self.pad.append_batch)

    @rule(n=st.integers(0, 14))
    def crop(self, n: int) -> None:
        if n > len(self.model):
            with pytest.raises(ValueError, match="crop"):
                self.pad.crop(n)
            return
        self.pad.crop(n)
        self.cut(n)

    @rule()
    def clear(self) -> None:
        self.pad.clear()
        self.cut(0)

    def cut(self, n: int) -> None:
        self.model = self.model[:n]
        # A view of what was cut off stays readable, whatever it shows.
        assert all(view.tobytes() is not None for _, view in self.views)
        self.views = [(first, view) for first, view in self.views if first + len(view) <= n]

    @precondition(lambda self: len(self.model) > 0)
    @rule(data=st.data())
    def hold_a_view(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.model) - 1))
        self.views.append((at, self.view(at)))

    def view(self, at: int) -> Array:
        """One token as [1, dim], without a copy."""
        raise NotImplementedError

    @precondition(lambda self: self.views)
    @rule()
    def write_through_a_view(self) -> None:
        at, view = self.views[-1]
        view += 1
        self.model[at] = view[0]

    @rule()
    def drop_views(self) -> None:
        self.views.clear()

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "pad"):
            return
        assert same_bits(np.ascontiguousarray(self.pad.as_array()), self.model)
        assert len(self.pad) == len(self.model)
        assert self.pad.is_empty == (len(self.model) == 0)
        assert all(same_bits(view[0], self.model[at]) for at, view in self.views)
        assert counters() == self.counters
        assert f"len={len(self.model)}, capacity={self.CAPACITY}, dim={self.DIM}" in repr(self.pad)


def check_that_it_is_closed(pad: Any, row: Any) -> None:
    assert pad.closed
    assert repr(pad) == f"{type(pad).__name__}(closed)"
    for call in (
        lambda: pad.append(row),
        lambda: pad.append_batch(row.reshape(1, 8)),
        lambda: pad.crop(0),
        lambda: len(pad),
        pad.as_array,
        pad.clear,
        pad.__enter__,
    ):
        with pytest.raises(um.ClosedError, match="is closed"):
            call()
    pad.close()
    pad.__exit__()
