"""A plain NumPy model of a KV cache whose layers differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import unimem as um
from support.contracts.kv_model import NUMPY_DTYPES, Array
from unimem.kv.types import kv_pair


def block_values(dtype: str) -> int:
    """Values of a block, 1 of a float."""
    return 1 if NUMPY_DTYPES[dtype].names is None else 32


def sides_of(spec: um.LayerKV) -> list[tuple[int, str]]:
    """Of K and of V of a layer, the values of a head, and their type."""
    return list(zip((spec.head_dim, spec.v_head_dim), kv_pair(spec.dtype), strict=True))


class LayersModel:
    """The tokens of each layer by position. Its methods are called for what the cache accepts.

    Layers of a window have `n_rows` rows, a multiple of whole pages: what these no longer hold is
    lost, and so is what was not saved, or lies before first tokens that were kept. States are
    arrays by layer, and checkpoints copies of all of them by position.
    """

    def __init__(
        self,
        layers: Sequence[um.LayerKV | um.LayerState],
        n_rows: Sequence[int],
        batch: int,
        most: int,
        n_checkpoints: int = 0,
    ) -> None:
        self.n_rows, self.batch, self.most = n_rows, batch, most
        self.n_checkpoints = n_checkpoints
        self.layers = {i: x for i, x in enumerate(layers) if isinstance(x, um.LayerKV)}
        self.state_layers = {i: x for i, x in enumerate(layers) if isinstance(x, um.LayerState)}
        self.own = [i for i, layer in self.layers.items() if layer.share_of is None]
        self.rings = [i for i in self.own if self.layers[i].window]
        self.plain = [i for i in self.own if not self.layers[i].window]
        self.clear()

    def clear(self) -> None:
        self.first = self.reserved = self.end_of_states = 0
        self.states = {
            i: np.zeros((self.batch, *layer.shape), NUMPY_DTYPES[layer.dtype])
            for i, layer in self.state_layers.items()
        }
        self.checkpoints: dict[int, dict[int, Array]] = {}
        self.end = dict.fromkeys(self.own, 0)
        self.top = dict.fromkeys(self.own, 0)  # rows below were written, or may be
        self.lost = dict.fromkeys(self.own, 0)  # tokens below are not held, for other reasons
        self.tokens: dict[int, dict[int, tuple[Array, Array]]] = {i: {} for i in self.own}

    def source(self, layer: int) -> int:
        """The layer whose rows a layer shows."""
        of = self.layers[layer].share_of
        return layer if of is None else of

    # ---- what can be seen ----

    @property
    def next_position(self) -> int:
        return min(self.end.values(), default=self.end_of_states)

    @property
    def is_whole(self) -> bool:
        return len(set(self.end.values())) <= 1 and not self.reserved

    def oldest(self, layer: int) -> int:
        """The first position that a layer has."""
        if layer in self.plain:
            return self.first
        return max(self.first, self.lost[layer], self.top[layer] - self.n_rows[layer])

    def wanted(self, layer: int, end: int) -> int:
        """The first position that a layer is to show."""
        return min(end, max(self.first, end - (self.layers[layer].window or end)))

    def lacking(self, end: int) -> list[int]:
        """The layers whose window lacks what it would show."""
        return [i for i in self.rings if self.oldest(i) > self.wanted(i, end)]

    def missing(self, end: int) -> int:
        """The position before which they lack it, or 0."""
        return min(end, max((self.oldest(i) for i in self.lacking(end)), default=0))

    def shown(self, layer: int) -> range:
        layer = self.source(layer)
        end = self.end[layer]
        return range(min(end, max(self.oldest(layer), self.wanted(layer, end))), end)

    @property
    def first_position(self) -> int:
        end = self.next_position
        longest = self.plain or self.rings
        wanted = min((self.wanted(i, end) for i in longest), default=self.first)
        return max(wanted, self.missing(end))

    @property
    def seq_len(self) -> int:
        return self.next_position - self.first_position

    def layer(self, layer: int) -> tuple[Array, Array]:
        """K and V that a layer shows, ``[batch, heads, n, dim]`` as stored."""
        shown, spec = self.shown(layer), self.layers[layer]
        out = [
            np.empty(
                (self.batch, spec.n_kv_heads, len(shown), dim // block_values(dtype)),
                NUMPY_DTYPES[dtype],
            )
            for dim, dtype in sides_of(spec)
        ]
        for i, position in enumerate(shown):
            for part, array in enumerate(out):
                array[:, :, i] = self.tokens[self.source(layer)][position][part]
        return out[0], out[1]

    def token_bytes(self, layer: int) -> int:
        spec = self.layers[layer]
        row = sum(
            dim // block_values(dtype) * NUMPY_DTYPES[dtype].itemsize
            for dim, dtype in sides_of(spec)
        )
        return self.batch * spec.n_kv_heads * row

    @property
    def state_bytes(self) -> int:
        """Bytes of all states, each rounded up to 64."""
        return sum(-(-state.nbytes // 64) * 64 for state in self.states.values())

    @property
    def memory_usage_bytes(self) -> int:
        return self.state_bytes + sum(len(self.shown(i)) * self.token_bytes(i) for i in self.own)

    def usage_of(self, n: int) -> int:
        """Bytes of the last n tokens, and the states."""
        rows = (min(n, self.layers[i].window or n) * self.token_bytes(i) for i in self.own)
        return self.state_bytes + sum(rows)

    def least_crop(self) -> int:
        """The smallest n that crop takes."""
        for n in range(self.seq_len):
            if not self.lacking(self.first_position + n):
                return n
        return self.seq_len

    def ways_back(self) -> list[int]:
        """Positions of checkpoints that all layers can go back to; at 0 no window shows a token."""
        return [
            position
            for position in sorted(self.checkpoints)
            if self.first_position <= position <= self.next_position
            and (position == 0 or not self.lacking(position))
        ]

    # ---- what changes it ----

    def checkpoint(self) -> None:
        end = self.next_position
        self.checkpoints[end] = {i: state.copy() for i, state in self.states.items()}
        if len(self.checkpoints) > self.n_checkpoints:
            del self.checkpoints[min(self.checkpoints)]

    def go_back(self, position: int, kinds: Sequence[Sequence[int]]) -> None:
        """To a checkpoint: what was reserved, and what some layers lack, goes, too."""
        self.rollback(kinds, position)
        for i, state in self.checkpoints[position].items():
            self.states[i] = state.copy()
        self.checkpoints = {p: kept for p, kept in self.checkpoints.items() if p <= position}

    def append(self, layer: int, k: Array, v: Array) -> None:
        for i in range(k.shape[2]):
            self.tokens[layer][self.end[layer]] = (k[:, :, i].copy(), v[:, :, i].copy())
            self.end[layer] += 1
        self.top[layer] = max(self.top[layer], self.end[layer])

    def reserve(self, n: int) -> None:
        self.reserved = n
        for i in self.own:
            self.top[i] = max(self.top[i], self.end[i] + n)

    def rollback(self, kinds: Sequence[Sequence[int]], to: int | None = None) -> None:
        """kinds: the layers that share a part, which lose the same tokens."""
        end = self.next_position if to is None else to
        self.end_of_states = end
        for alike in kinds:
            top = max(self.top[i] for i in alike)
            for i in alike:
                self.top[i] = top
        missing = self.missing(end)
        self.first = max(self.first, missing)
        for i in self.rings:
            if self.top[i] - end >= self.n_rows[i]:
                self.lost[i], self.top[i] = end, end
        self.end = dict.fromkeys(self.own, end)
        self.reserved = 0

    def crop(self, n: int) -> None:
        self.end = dict.fromkeys(self.own, self.first_position + n)

    def trim_to(self, n: int, keep_first: int = 0) -> bool:
        if n + keep_first >= self.seq_len:
            return False
        first, end = self.first_position, self.next_position
        kept = end - n - keep_first
        for i in self.plain:
            moved = [self.tokens[i][first + j] for j in range(keep_first)]
            self.tokens[i].update({kept + j: token for j, token in enumerate(moved)})
        if keep_first:
            for i in self.rings:
                self.lost[i] = max(self.lost[i], end - n)
        self.first = kept
        return True

    def forget_unsaved(self, *, is_copy: bool) -> None:
        """Hold what a copy, or a restored snapshot, has: what is shown.

        A file does not say whether tokens before whole windows were dropped.
        """
        first = self.first_position
        widest = max((self.layers[i].window or 0 for i in self.rings), default=0)
        for i in self.rings:
            self.lost[i] = self.shown(i).start
            self.top[i] = self.end[i]
        if not is_copy:
            self.first = first if self.plain or self.seq_len < widest else 0
