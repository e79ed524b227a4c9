"""What the hot calls cost from Python, against the NumPy calls that they stand for.

Three questions: an uninitialised array from a tape against one from ``np.empty``; a plain address
from a tape against a Cython method that does nothing; and one token appended to a KV cache against
two NumPy slice assignments. One thread, pinned; the cost of the loop is taken off.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import unimem as um
from bench.harness import Bench, pin, ratios, stopwatch

N_FLOATS = 4096
N_HEADS, HEAD_DIM = 8, 128

EMPTY_METHOD = """
cdef class Nothing:
    def nothing(self, size_t nbytes, size_t align):
        return None
"""


def main() -> int:
    bench = Bench("calls", __doc__)
    bench.parse()
    bench.facts = {"numpy": np.__version__, "cpu": pin(1)}
    take(bench)
    take_address(bench)
    append(bench)
    return bench.finish()


def take(bench: Bench) -> None:
    """Compare ``Tape.take`` with ``np.empty``, for the three ways to write a dtype."""
    n = 500
    with um.Tape(n * N_FLOATS * 4) as tape:
        forms = {"np.dtype": np.dtype("float32"), "np.float32": np.float32, "name": "float32"}
        for form, dtype in forms.items():
            names = {"take": tape.take, "empty": np.empty, "dtype": dtype}
            title = f"an array of {N_FLOATS} float32, dtype as {form}"
            samples = bench.compare(
                title,
                {
                    "Tape.take": stopwatch(f"take({N_FLOATS}, dtype)", n, names, tape.clear),
                    "np.empty": stopwatch(f"empty({N_FLOATS}, dtype)", n, names),
                },
                unit="ns",
            )
            faster = ratios(samples["np.empty"], samples["Tape.take"])
            bench.at_least(title, "np.empty / Tape.take", faster, 2.0)


def take_address(bench: Bench) -> None:
    """Compare ``Tape.take_address`` with an empty Cython method of two integers."""
    n = 2000
    with um.Tape(n * 64) as tape:
        names = {"take_address": tape.take_address, "nothing": empty_method()}
        title = "an address"
        samples = bench.compare(
            title,
            {
                "Tape.take_address": stopwatch("take_address(64, 64)", n, names, tape.clear),
                "an empty Cython method": stopwatch("nothing(64, 64)", n, names),
            },
            unit="ns",
        )
        times = ratios(samples["Tape.take_address"], samples["an empty Cython method"])
        bench.at_most(title, "take_address / empty method", times, 2.5)


def append(bench: Bench) -> None:
    """Compare ``KVCache.append`` of one token with the same bytes assigned to NumPy slices.

    Both sides walk through the same number of rows, 2 KB each of K and of V. 256 rows stay in most
    second-level caches, so that the call is measured; 4096 rows, shown beside it, do not, and there
    both sides wait for the same memory.
    """
    bench.at_least(*compare_append(bench, 256), 3.0)
    compare_append(bench, 4096)


def compare_append(bench: Bench, n_tokens: int) -> tuple[str, str, list[float]]:
    """Fill a cache and two arrays with `n_tokens` tokens; return title, ratio's name and ratios."""
    shape = (N_HEADS, HEAD_DIM)
    k = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    v = k + np.float16(1)
    keys, values = (np.zeros((n_tokens, *shape), np.float16) for _ in range(2))
    with um.KVCache(1, N_HEADS, HEAD_DIM, n_tokens, dtype="f16") as cache:
        ours = {"append": cache.append, "k": k[None], "v": v[None]}
        theirs = {"keys": keys, "values": values, "k": k, "v": v}
        title = f"one token, 2 KB of K and 2 KB of V, {n_tokens} tokens"
        samples = bench.compare(
            title,
            {
                "KVCache.append": stopwatch("append(0, k, v)", n_tokens, ours, cache.clear),
                "NumPy slices": stopwatch("keys[i] = k; values[i] = v", n_tokens, theirs),
            },
            unit="ns",
        )
        stored = cache.layer(0)
        for name, got, want in (("K", stored[0], k), ("V", stored[1], v)):
            if not np.array_equal(got[0], np.repeat(want[:, None], n_tokens, axis=1)):
                raise AssertionError(f"the cache does not hold the {name} that was appended")
    faster = ratios(samples["NumPy slices"], samples["KVCache.append"])
    return title, "NumPy / KVCache.append", faster


def empty_method() -> Any:
    """Compile a Cython method that takes two integers and does nothing, and return it bound.

    Needs Cython and a C compiler, as building unimem itself does.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "nothing.pyx")
        source.write_text(EMPTY_METHOD)
        module = source.with_suffix(".so")
        run = [sys.executable, "-m", "cython", "-3", str(source)]
        subprocess.run(run, check=True)
        include = sysconfig.get_path("include")
        cc = ["cc", "-O3", "-DNDEBUG", "-fPIC", "-shared", f"-I{include}", "-o", str(module)]
        subprocess.run([*cc, str(source.with_suffix(".c"))], check=True)
        spec = importlib.util.spec_from_file_location("nothing", module)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load {module}")
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded.Nothing().nothing


if __name__ == "__main__":
    raise SystemExit(main())
