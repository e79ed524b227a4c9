"""unimem's decoder in a process of its own: ``python -m unimem_bench.unimem_side OPTIONS``.

`unimem_bench.decoders` starts it; `unimem_bench.side_server` has the loop.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

import numpy as np

import unimem as um
from unimem.accounting.report import Report
from unimem.backends import ggml_orders
from unimem.engine import Decoder
from unimem.system.placement import Placement, sum_placements
from unimem.weights.opened import warm_where_it_fits
from unimem_bench.side_server import FIRST, Logits, serve


class Unimem:
    """A conversation with a decoder on memory placed as ``unimem run`` places it."""

    def __init__(
        self,
        model: str,
        *,
        ctx: int,
        threads: int | None,
        kv_dtype: str,
        window: int | None,
        **memory: Any,
    ) -> None:
        how: dict[str, Any] = {"threads": threads, "kv_dtype": kv_dtype, "window": window}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start = time.perf_counter()
            layout = um.Layout.for_model(model, ctx=ctx, **how, **memory)
            assert isinstance(layout.weights, um.Weights)  # for_model opened them
            self._decoder = Decoder(layout.weights, ctx=ctx, layout=layout, **how)
            self._load = self._decoder.report().facts["load"]
            if self._load == "map":
                warm_where_it_fits(layout.weights, self._decoder.threads, None)
            self._start_s = time.perf_counter() - start
        self._warnings = [str(warning.message) for warning in caught]
        self.step: Callable[[], int] = self._decoder.generate_next_token

    @property
    def compute_s(self) -> float:
        """As `Side.compute_s`; the rest of a token is Python's part."""
        return self._decoder._forward.compute_ns / 1e9

    def prefill(self, tokens: list[int]) -> Logits:
        """As `Side.prefill`."""
        self._decoder.reset()
        return cast(Logits, self._decoder.prefill(tokens))

    def fill(self, n: int, rows: str) -> Logits:
        """As `Side.fill`, with keys and values of a deviation of 1."""
        decoder, rng = self._decoder, np.random.default_rng(n)
        decoder.reset()
        kv = decoder.kv
        with open(rows, "wb") as file:
            for layer in range(kv.n_layers):
                shape = (2, n, kv.n_kv_heads, kv.head_dim)
                kv.append(layer, *rng.standard_normal(shape, np.float32).astype(np.float16))
            for layer in range(kv.n_layers):
                for part in kv.layer(layer):
                    np.ascontiguousarray(part[0].swapaxes(0, 1)).tofile(file)
        decoder._forward.note_ids(0, np.full(n, FIRST, np.int32))
        return cast(Logits, decoder.prefill([FIRST]))

    def facts(self) -> dict[str, Any]:
        """As `Side.facts`, and where the memory is."""
        repacked = self._decoder._memory.repacked
        build = ggml_orders.build()
        return {
            "start_s": self._start_s,
            "load": self._load,
            "ggml": build["version"],
            "features": build["features"],
            "image": None if repacked is None else repacked.image,
            "granted": granted(self._decoder.report()),
            "warnings": self._warnings,
        }


def granted(report: Report) -> dict[str, dict[str, Any]]:
    """Return where weights, KV cache and scratch memory are, as `unimem.Placement` fields.

    Repacked weights are separate from the rest, which is mapped.
    """
    parts: dict[str, list[Placement]] = {"weights": [], "repacked": [], "kv": [], "scratch": []}
    for row in report.rows:
        part = "repacked" if row.category.endswith(" repacked") else row.category.split(":")[0]
        if part in parts and row.granted is not None:
            parts[part].append(row.granted)
    return {part: asdict(sum_placements(found)) for part, found in parts.items() if found}


if __name__ == "__main__":
    serve(Unimem)
