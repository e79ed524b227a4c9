"""The states of layers that keep no tokens, such as Mamba's, in memory of unimem."""

from __future__ import annotations

from collections import Counter
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import LinearAttentionLayer

from unimem.kv.cache.cache import KVCache
from unimem.kv.layer_specs import LayerState
from unimem.transformers.layers import Group, Layer, as_tensor, no_copy
from unimem.transformers.operator import NAMES


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """A layer whose states lie in caches of unimem (`LayerState`), and never move."""

    # transformers sets them.
    device: Any
    dtype: Any
    record_past: Any
    is_conv_states_initialized: dict[int, bool]
    is_recurrent_states_initialized: dict[int, bool]

    def __init__(self, number_of_states: int, placement: dict[str, Any]) -> None:
        self._placement = placement
        self._number = number_of_states
        self.caches: list[KVCache] = []
        self.reads, self.writes = Counter[tuple[str, int]](), Counter[int]()  # of states
        self.counts_passes = True  # until compiled code runs, which does not count
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise no_copy(self)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Make room for states like these."""
        before = self._tensors()
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)
        for kind, states in self._kinds():
            for index, state in states.items():
                if state is not None and state is not before.get((kind, index)):
                    states[index] = self._placed(state)

    def note(self, counter: Counter[Any], state: Any) -> None:
        """Count a pass that reads or writes a state."""
        if torch.compiler.is_compiling():
            self.counts_passes = False
        else:
            counter[state] += 1

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Replace a state; return it."""
        state = LinearAttentionLayer.update_recurrent_state(
            self, recurrent_states, state_idx, **kwargs
        )
        self.note(self.writes, state_idx)
        return state

    def _kinds(self) -> tuple[tuple[str, dict[int, torch.Tensor | None]], ...]:
        return ("conv", self.conv_states), ("recurrent", self.recurrent_states)

    def _tensors(self) -> dict[tuple[str, int], torch.Tensor]:
        return {
            (kind, index): state
            for kind, states in self._kinds()
            for index, state in states.items()
            if state is not None
        }

    def _placed(self, state: torch.Tensor) -> torch.Tensor:
        """Return a copy of a state in memory of unimem, if that has its type."""
        if state.dtype not in NAMES or state.is_cuda or not state.numel() or state.dim() < 2:
            return state.clone()
        layer = LayerState(tuple(state.shape[1:]), NAMES[state.dtype])
        batch = state.shape[0]
        kv = KVCache(layers=[layer], max_seq_len=1, batch=batch, **self._placement)
        self.caches.append(kv)
        with torch.inference_mode(False):  # inference tensors could not be written in another mode
            placed = as_tensor(kv.state(0))
        return placed.copy_(state)

    def select(self, source: npt.NDArray[np.int64]) -> None:
        """Keep the states of some streams, in this order."""
        before, self.caches = self.caches, []
        for _, states in self._kinds():
            for number, state in states.items():
                if state is not None:
                    states[number] = self._placed(
                        state.index_select(0, torch.from_numpy(source).to(state.device))
                    )
        _end(before)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each stream."""
        self.select(np.repeat(np.arange(self.n_streams()), repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some streams, by indices or a mask."""
        self.select(np.arange(self.n_streams())[indices.numpy(force=True)])

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Give each stream i the states of stream ``beam_idx[i]``, in place."""
        for state in self._tensors().values():
            state.copy_(state.index_select(0, beam_idx.to(state.device)))

    def n_streams(self) -> int:
        """Return the number of streams, or 0 before the first."""
        return max((state.shape[0] for state in self._tensors().values()), default=0)

    def take(self, other: StateLayer) -> None:
        """Take the states of another layer, in memory of its own."""
        for name in ("has_previous_state", "conv_kernel_size"):
            setattr(self, name, dict(getattr(other, name)))
        self.is_conv_states_initialized = dict(other.is_conv_states_initialized)
        self.is_recurrent_states_initialized = dict(other.is_recurrent_states_initialized)
        self.device, self.dtype, self.record_past = other.device, other.dtype, other.record_past
        self.reads, self.writes = other.reads.copy(), other.writes.copy()
        self.counts_passes = other.counts_passes
        for (_, mine), (_, theirs) in zip(self._kinds(), other._kinds(), strict=True):
            for index, state in theirs.items():
                mine[index] = None if state is None else self._placed(state)

    def reset(self) -> None:
        """Drop the states; the number of streams may change afterwards."""
        past, caches, self.caches = self.record_past, self.caches, []
        self.reads.clear()
        self.writes.clear()
        self.counts_passes = True
        LinearAttentionLayer.__init__(self, number_of_states=self._number)
        self.record_past = past
        _end(caches)


class TokensAndStates(StateLayer, Layer):
    """A layer that keeps tokens and states."""

    is_compileable = False
    device = dtype = None  # transformers sets them
    __repr__ = Layer.__repr__
    get_max_length = Layer.get_max_length
    reset = Layer.reset
    crop = Layer.crop
    batch_repeat_interleave = Layer.batch_repeat_interleave
    batch_select_indices = Layer.batch_select_indices

    def __init__(self, states: int, owner: Any, group: Group, index: int) -> None:
        Layer.__init__(self, owner, group, index)
        StateLayer.__init__(self, states, group.options.placement)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Make room for tokens, ``(keys, values)``, or for states, by keywords."""
        kind = Layer if len(args) == 2 else StateLayer
        kind.lazy_initialization(self, *args, **kwargs)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Give each stream i the tokens and states of stream ``beam_idx[i]``, in place."""
        Layer.reorder_cache(self, beam_idx)
        StateLayer.reorder_cache(self, beam_idx)


def _end(caches: list[KVCache]) -> None:
    for kv in caches:
        kv.__exit__()
