"""The contract of states, for the caches of `conformance` that know them."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.contracts.conformance import (
    Array,
    Contract,
    Kind,
    check,
    classes_of,
    fill,
    tokens_of,
    unchanged,
)
from support.processes.forks import in_child


class StatelessContract(Contract):
    """What a cache promises that knows states, and has none."""

    def test_there_is_no_state(self, kind: Kind, cache: Any) -> None:
        tokens = tokens_of(kind, 3)
        fill(kind, cache, tokens)
        for layer in range(kind.n_layers):
            with (
                unchanged(kind, cache, tokens),
                pytest.raises(ValueError, match="keeps tokens and no state"),
            ):
                cache.state(layer)
        with unchanged(kind, cache, tokens), pytest.raises(ValueError, match="no layer keeps a"):
            cache.checkpoint()
        assert cache.checkpoints == ()


def write_states(kind: Kind, cache: Any, value: float) -> None:
    """What a pass makes of the states: each layer has another value."""
    for layer in kind.state_layers or ():
        cache.state(layer)[...] = value + layer


class StateContract(Contract):
    """What a cache promises that keeps states beside tokens."""

    def check(self, kind: Kind, cache: Any, tokens: Array, value: float) -> None:
        """The cache has these tokens, and states of this value."""
        check(kind, cache, tokens)
        for layer in kind.state_layers or ():
            state = cache.state(layer).astype("f4")
            assert np.array_equal(state, np.full(state.shape, value + layer if value else 0, "f4"))

    @pytest.fixture
    def gone_on(self, kind: Kind, cache: Any) -> Array:
        """Eight tokens, and a checkpoint behind the first five."""
        tokens = tokens_of(kind, 8)
        fill(kind, cache, tokens[:5])
        write_states(kind, cache, 5)
        assert cache.checkpoint() == 5
        fill(kind, cache, tokens[5:])
        write_states(kind, cache, 8)
        return tokens

    def test_a_state_begins_with_zeros_and_never_moves(self, kind: Kind, cache: Any) -> None:
        assert kind.state_layers
        tokens = tokens_of(kind, kind.capacity)
        self.check(kind, cache, tokens[:0], 0)
        addresses = [cache.state(layer).ctypes.data for layer in kind.state_layers]
        for n in (3, kind.capacity):
            fill(kind, cache, tokens[:n])
            self.check(kind, cache, tokens[:n], 0)  # appending leaves it alone
            write_states(kind, cache, n)
            self.check(kind, cache, tokens[:n], n)
            cache.clear()
            self.check(kind, cache, tokens[:0], 0)
        assert [cache.state(layer).ctypes.data for layer in kind.state_layers] == addresses

    def test_crop_goes_back_to_a_checkpoint(self, kind: Kind, cache: Any, gone_on: Array) -> None:
        cache.crop(5)
        self.check(kind, cache, gone_on[:5], 5)
        assert cache.checkpoints == (5,)
        fill(kind, cache, gone_on[:3])
        write_states(kind, cache, 8)
        self.check(kind, cache, np.concatenate([gone_on[:5], gone_on[:3]]), 8)
        cache.crop(8)  # the end itself
        self.check(kind, cache, np.concatenate([gone_on[:5], gone_on[:3]]), 8)

    def test_where_there_is_no_checkpoint_crop_is_refused(
        self, kind: Kind, cache: Any, gone_on: Array
    ) -> None:
        for wrong in (0, 4, 6, 7):
            with pytest.raises(ValueError, match=r"crop\(n\) with n of 5 goes back"):
                cache.crop(wrong)
            self.check(kind, cache, gone_on, 8)
        with pytest.raises(ValueError, match="expected n of at most 8"):
            cache.crop(9)
        self.check(kind, cache, gone_on, 8)

    def test_a_torn_pass_goes_back_to_a_checkpoint(
        self, kind: Kind, cache: Any, gone_on: Array
    ) -> None:
        kind.append(cache, 0, *kind.arguments(gone_on[:1]))
        for call in (cache.rollback, cache.checkpoint):
            with pytest.raises(RuntimeError):
                call()
        cache.crop(5)
        self.check(kind, cache, gone_on[:5], 5)
        kind.append(cache, 0, *kind.arguments(gone_on[:1]))
        write_states(kind, cache, 6)
        cache.rollback()  # there is a checkpoint of this very position
        self.check(kind, cache, gone_on[:5], 5)

    def test_a_layer_keeps_one_of_both(self, kind: Kind, cache: Any, gone_on: Array) -> None:
        assert kind.state_layers
        for layer in kind.state_layers:
            for call in (
                lambda: kind.append(cache, layer, *kind.arguments(gone_on)),  # noqa: B023
                lambda: cache.layer(layer),  # noqa: B023
            ):
                with pytest.raises(ValueError, match="keeps a state and no tokens"):
                    call()
        for layer in range(kind.n_layers):
            with pytest.raises(ValueError, match="keeps tokens and no state"):
                cache.state(layer)
        for wrong in (-1, 2**31):
            with pytest.raises(ValueError, match="expected a layer from 0 to"):
                cache.state(wrong)
        self.check(kind, cache, gone_on, 8)

    def test_a_view_of_a_state_keeps_its_memory(self, kind: Kind) -> None:
        assert kind.state_layers
        with kind.made() as cache:
            write_states(kind, cache, 3)
            view = cache.state(kind.state_layers[0])
            with pytest.raises(BufferError, match=r"live .*drop them"):
                cache.close()
        assert cache.closed
        assert (view == 3 + kind.state_layers[0]).all()
        address = view.ctypes.data
        del view
        gc.collect()
        assert not kind.is_mapped(address)
        for use in (lambda: cache.state(0), cache.checkpoint, lambda: cache.checkpoints):
            with pytest.raises(um.ClosedError, match="closed"):
                use()

    def test_a_forked_child_has_its_own_states_or_none(
        self, kind: Kind, cache: Any, gone_on: Array
    ) -> None:
        def child() -> bool:
            if kind.in_child:
                cache.crop(5)
                self.check(kind, cache, gone_on[:5], 5)
                return True
            with pytest.raises(um.ClosedError, match="forked child"):
                cache.crop(5)
            return True

        assert in_child(child)
        self.check(kind, cache, gone_on, 8)


class FixedStateContract(Contract):
    """What a cache promises that keeps states, and `Kind.is_fixed`."""

    @pytest.mark.usefixtures("no_collection")
    def test_the_steady_state_costs_nothing(self, kind: Kind, cache: Any) -> None:
        tokens = tokens_of(kind, 8)
        before = kind.counters()
        for _ in range(3):
            for n in range(8):
                fill(kind, cache, tokens[n : n + 1])
                write_states(kind, cache, n)
                cache.checkpoint()
            cache.crop(7)
            cache.clear()
        assert kind.counters() == before


def state_suites(kinds: Sequence[Kind]) -> dict[str, type[Contract]]:
    """The test classes of these kinds, to be put among a module's names."""
    return classes_of(
        {
            StatelessContract: [kind for kind in kinds if kind.state_layers == ()],
            StateContract: [kind for kind in kinds if kind.state_layers],
            FixedStateContract: [kind for kind in kinds if kind.state_layers and kind.is_fixed],
        }
    )
