"""llama.cpp in a process of its own: ``python -m unimem_bench.llama_cpp_side OPTIONS``.

`unimem_bench.decoders` starts it; `unimem_bench.side_server` has the loop.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from unimem_bench.llama_cpp import (
    KV_TYPES,
    Conversation,
    Flags,
    Library,
    PeerModel,
    options,
    state_of,
)
from unimem_bench.side_server import FIRST, Logits, serve


class LlamaCpp:
    """A conversation through llama.cpp's C API."""

    compute_s: float | None = None

    def __init__(
        self,
        model: str,
        *,
        library: str,
        ctx: int,
        threads: int | None,
        kv_dtype: str,
        flags: dict[str, Any],
    ) -> None:
        self._library = Library(library)
        start = time.perf_counter()
        kv = KV_TYPES[kv_dtype]
        given = options(Flags(**flags), n_ctx=ctx, n_threads=threads, type_k=kv, type_v=kv)
        self._context = Conversation(PeerModel(self._library, model, given), given)
        self._start_s = time.perf_counter() - start
        self._flags = str(Flags(**flags))

    def prefill(self, tokens: list[int]) -> Logits:
        """As `Side.prefill`."""
        self._context.clear()
        self._logits = self._context.decode(tokens)
        return self._logits

    def step(self) -> int:
        """As `Side.step`."""
        token = int(self._logits.argmax())
        self._logits = self._context.decode([token])
        return token

    def fill(self, n: int, rows: str) -> Logits:
        """As `Side.fill`."""
        self.prefill([FIRST])
        one = self._context.state()
        self._context.set_state(state_of(one, n, np.memmap(rows, np.uint8, "r")))
        self._logits = self._context.decode([FIRST])
        return self._logits

    def facts(self) -> dict[str, Any]:
        """As `Side.facts`, and the flags."""
        return {"start_s": self._start_s, "flags": self._flags} | self._library.facts()


if __name__ == "__main__":
    serve(LlamaCpp)
