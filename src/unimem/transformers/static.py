"""The layers of a model on a GPU whose steps all look alike, for `torch.compile` and CUDA graphs.

As transformers' StaticCache: attention gets all rows and a mask, and the number of tokens is on the
device, where a graph reads and raises it. The host reads it when it is asked something.
"""

from __future__ import annotations

from typing import Any

import torch

from unimem.errors import CacheFull
from unimem.transformers import operator
from unimem.transformers.layers import Tensors, check_gradients, dims_of
from unimem.transformers.on_device import DeviceGroup, DeviceLayer


class StaticGroup(DeviceGroup):
    """The layers of one kind, each with the number of its rows in a tensor on the device."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.counts: list[torch.Tensor] = []

    def drop_rows(self) -> None:
        """Make the tensors over all rows anew, which stay where they are while there is a cache."""
        super().drop_rows()
        kv: Any = self.kv
        if kv is None:
            return
        self.rows[:] = whole = [kv._tensors(layer) for layer in range(len(self.rows))]
        device = whole[0][0].device
        if not self.counts:
            with torch.inference_mode(False):
                count = torch.zeros((), dtype=torch.int32, device=device)
                self.counts = [count.clone() for _ in whole]
        n = kv.seq_len
        for rows, count in zip(whole, self.counts, strict=True):
            for part in rows:
                part.narrow(2, n, kv.n_rows - n).zero_()  # a mask cannot hide what is no number
            for tensor in (*rows, count):
                torch._dynamo.mark_static_address(tensor)
        self.count(kv.next_position)

    def count(self, n: int) -> None:
        """Note that each layer has n tokens, also on the device."""
        super().count(n)
        for count in self.counts:
            count.fill_(n - self.oldest)

    def sync(self) -> None:
        """Note how many tokens the layers have on the device; raise CacheFull if some were lost."""
        kv: Any = self.kv
        if kv is None:
            return
        rows = torch.stack(self.counts).tolist()
        if max(rows) > kv.n_rows:
            self.count(kv.n_rows + self.oldest)
            kv._finish_restore(kv.n_rows + self.oldest, kv.n_rows)
            raise self._full(max(rows))
        self.lengths[:] = [n + self.oldest for n in rows]
        kv._finish_restore(min(self.lengths), min(rows))

    def check_room(self, n: int) -> None:
        """Raise CacheFull if there is no room for n more tokens."""
        self.sync()
        most = self.require().n_rows
        if (needed := max(self.lengths) - self.oldest + n) > most:
            raise self._full(needed)

    def _full(self, n: int) -> CacheFull:
        most = self.require().n_rows
        return CacheFull(
            f"KVCache: {n} tokens do not fit into {most}: max_seq_len= makes room for more",
            most,
            0,
            n,
        )


class StaticLayer(DeviceLayer):
    """One layer of the cache for transformers whose steps all look alike."""

    group: StaticGroup
    is_compileable = True

    @property
    def length(self) -> int:
        """All tokens so far, which the device counts."""
        self.group.sync()
        return super().length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Tensors:
        """Append tokens, and return all rows; as `Layer.update`.

        Compiled code and graphs cannot raise: there the next call of the host raises CacheFull.
        """
        group = self.group
        if not torch.compiler.is_compiling():
            if group.dims != dims_of(key_states, value_states):
                self.lazy_initialization(key_states, value_states)
            check_gradients(key_states)
            is_captured = key_states.is_cuda and torch.cuda.is_current_stream_capturing()
            if self.index == 0 and not is_captured:
                group.check_room(key_states.shape[2])
        rows, count = group.rows[self.index], group.counts[self.index]
        assert rows is not None
        operator.append_at(*rows, key_states, value_states, count)
        count.add_(key_states.shape[2])
        return rows

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of rows, and the position of the first one."""
        rows = self.rows
        n = self.group.options.max_seq_len if rows is None else rows[0].shape[2]
        assert n is not None
        return n, self.group.oldest

    def get_seq_length(self) -> Any:
        """Return the number of tokens so far: a tensor on the device, if there are rows."""
        if self.rows is None:
            return 0
        return self.group.counts[self.index] + self.group.oldest

    def get_max_length(self) -> int:
        """Return the most tokens that the layer holds."""
        return self.get_mask_sizes(0)[0]
