"""A KV cache in main memory and one of a device that get the same calls."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import unimem as um
from support.contracts.kv_model import given, same_bits
from support.gpu.host_gpu import array_of, numpy_of

Array = NDArray[Any]
LAYERS, HEADS, DIM, ROWS = 2, 2, 32, 12


class Twins:
    """A cache in main memory and one of a device, of the same arguments."""

    def __init__(self, **options: Any) -> None:
        from unimem import cuda

        self.host = um.KVCache(LAYERS, HEADS, DIM, ROWS, **options)
        self.cuda = cuda.KVCache(LAYERS, HEADS, DIM, ROWS, **options)
        self.batch = self.host.batch
        self.dtype = self.host.dtype
        self.rng = np.random.default_rng(0)

    def close(self) -> None:
        self.host.close()
        self.cuda.close()

    def __enter__(self) -> Twins:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.host.__exit__(*exc_info)
        self.cuda.__exit__(*exc_info)

    def tokens(self, n: int, dtype: str = "float32", *, token_major: bool = False) -> list[Array]:
        """K and V of n tokens of a layer."""
        shape = (n, HEADS) if token_major else (self.batch, HEADS, n)
        return [given(self.rng, (*shape, dim), dtype) for dim in (DIM, self.host.v_head_dim)]

    def do(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call both: they return the same, or raise the same."""
        outcomes: list[tuple[Any, Any]] = []
        for cache, wrap in ((self.host, lambda a: a), (self.cuda, array_of)):
            own = [wrap(a) if isinstance(a, np.ndarray) else a for a in arguments]
            try:
                outcomes.append((None, getattr(cache, name)(*own, **options)))
            except Exception as error:
                outcomes.append((type(error), str(error)))
        assert outcomes[0] == outcomes[1]
        self.check()
        return outcomes[1]

    def append(self, n: int, dtype: str = "float32", layers: Any = range(LAYERS)) -> Any:
        outcomes = [self.do("append", layer, *self.tokens(n, dtype)) for layer in layers]
        return outcomes[-1]

    def check(self) -> None:
        for name in """
            seq_len next_position is_empty memory_usage_bytes capacity_bytes n_rows row_bytes
            n_layers batch max_seq_len v_head_dim v_row_bytes window grow n_growths budget_bytes
            dtype closed name
        """.split():
            assert getattr(self.host, name) == getattr(self.cuda, name), name
        assert len(self.host) == len(self.cuda)
        assert repr(self.host) == repr(self.cuda)
        first = self.host.next_position - self.host.seq_len
        assert self.host.row_of(first) == self.cuda.row_of(first)
        for layer in range(LAYERS):
            for there, here in zip(self.cuda.layer(layer), self.host.layer(layer), strict=True):
                assert same_bits(numpy_of(there), here)
