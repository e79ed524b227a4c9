"""ggml's sizes, and the memory that it takes from malloc."""

from __future__ import annotations

import ctypes

import pytest

from conftest import Run

pytest.importorskip(
    "unimem.backends.ggml",
    reason="the engine needs ggml: pip install '.[run]'",
    exc_type=ImportError,
)

from unimem.backends import ggml


def test_headers_have_the_planned_sizes() -> None:
    for n in (16, 48, 200, 1000, 3000, 20000):
        assert ggml.graph_overhead_custom(n, False) <= n * 68 + 4096
    assert ggml.tensor_overhead() == 368


def test_memory_from_malloc_is_bounded(run_python: Run) -> None:
    """Its calls take at most `own_bytes` from malloc, without malloc's caches of threads."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("this C library has no mallinfo2 (glibc 2.33 has it)")
    done = run_python(
        """
        import ctypes
        from unimem.engine import Decoder, embedded_model
        from unimem.backends import ggml

        names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        Info = type("Info", (ctypes.Structure,), {
            "_fields_": [(name, ctypes.c_size_t) for name in names.split()]})
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = Info

        def handed_out():
            info = mallinfo2()
            return info.uordblks + info.hblkhd

        def counted(call):
            def wrapped(*arguments):
                before = handed_out()
                result = call(*arguments)
                taken[0] += handed_out() - before
                return result
            return wrapped

        taken = [0]
        for name in ("init", "_threadpool_new", "graph_plan"):
            setattr(ggml, name, counted(getattr(ggml, name)))
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        compute = kind(counted(kind(ggml.graph_compute_address)))
        ggml.graph_compute_address = ctypes.cast(compute, ctypes.c_void_p).value
        for n in (1, 2, 16):
            taken[0] = 0
            with Decoder(embedded_model(), ctx=128, threads=n) as decoder:
                "".join(decoder.generate("Once upon a time", 4))
            assert 0 < taken[0] <= ggml.own_bytes(n), (n, taken[0])
        """,
        GLIBC_TUNABLES="glibc.malloc.tcache_count=0",
    )
    assert done.returncode == 0, done.stderr


def test_a_type_behind_the_last_one_has_no_conversion() -> None:
    assert ggml.to_float(ggml.Q8_0) is not None
    assert ggml.to_float(ggml._N_TYPES) is None  # ggml itself would read past its table
    assert ggml.to_float(1 << 20) is None
