"""ggml behind its binding: sizes, memory from malloc, and failed checks as errors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from importlib import resources

import pytest

from conftest import Run

pytest.importorskip(
    "unimem.backends.ggml",
    reason="the engine needs ggml: pip install ./ggml '.[run]'",
    exc_type=ImportError,
)

from unimem.backends import ggml


def test_headers_have_the_planned_sizes() -> None:
    for n in (16, 48, 200, 1000, 3000, 20000):
        assert ggml.graph_overhead(n) <= n * 68 + 4096
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
        for name in ("new_context", "new_threadpool", "plan"):
            setattr(ggml, name, counted(getattr(ggml, name)))
        address = ctypes.c_void_p
        kind = ctypes.CFUNCTYPE(ctypes.c_int, address, address, ctypes.c_int, address, address)
        compute = kind(counted(kind(ggml.compute_address)))
        ggml.compute_address = ctypes.cast(compute, ctypes.c_void_p).value
        for n in (1, 2, 16):
            taken[0] = 0
            with Decoder(embedded_model(), ctx=128, threads=n) as decoder:
                "".join(decoder.generate("Once upon a time", 4))
            assert 0 < taken[0] <= ggml.own_bytes(n), (n, taken[0])
        """,
        GLIBC_TUNABLES="glibc.malloc.tcache_count=0",
    )
    assert done.returncode == 0, done.stderr


def test_a_number_behind_the_last_type_is_refused() -> None:
    assert ggml.has_to_float(ggml.Q8_0)
    for number in (-1, ggml.N_TYPES, 1 << 20):  # ggml itself would read past its table
        assert not ggml.has_to_float(number)
        for ask in (ggml.type_name, ggml.type_size, ggml.block_size, lambda n: ggml.row_size(n, 1)):
            with pytest.raises(ValueError, match=f"expected a number below .*, got {number}"):
                ask(number)


@pytest.fixture
def context() -> Iterator[int]:
    memory = ctypes.create_string_buffer(1 << 15)
    made = ggml.new_context(-(-ctypes.addressof(memory) // 64) * 64, 1 << 14)
    yield made
    ggml.free(made)


def test_shapes_that_do_not_fit_raise(context: int) -> None:
    """Each is an assertion of ggml, which would end the process."""
    a, b = (ggml.new_tensor(context, ggml.F32, n, 2) for n in (8, 6))
    ids = ggml.new_tensor(context, ggml.I32, 2)
    wrong: list[Callable[[], int]] = [
        lambda: ggml.mul_mat(context, a, b),
        lambda: ggml.add(context, a, b),
        lambda: ggml.reshape_2d(context, a, 5, 5),
        lambda: ggml.get_rows(context, a, b),
        lambda: ggml.mul_mat_id(context, a, b, ids),
        lambda: ggml.permute(context, a, 0, 1, 2, 9),
        lambda: ggml.new_tensor(context, ggml.F32, 1 << 62, 4),
    ]
    for make in wrong:
        with pytest.raises(ggml.GgmlError, match=r"GGML_ASSERT\(.*\) failed"):
            make()
    assert ggml.mul_mat(context, a, a)  # it goes on


def test_a_full_context_raises_with_what_ggml_logged(context: int) -> None:
    def fill() -> None:
        for _ in range(100):
            ggml.new_tensor(context, ggml.F32, 4)

    with pytest.raises(ggml.GgmlError, match="not enough space in the context's memory pool"):
        fill()
    assert ggml.take_log() == ""


def test_sizes_of_a_header_are_checked(context: int) -> None:
    for ne in ((), (1, 1, 1, 1, 1), (-1,)):
        with pytest.raises(ValueError, match="expected 1 to 4 sizes"):
            ggml.new_tensor(context, ggml.F32, *ne)
    with pytest.raises(ValueError, match="got 0"):
        ggml.Tensor.at(0)


def test_a_build_for_another_cpu_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    if not built_for():
        pytest.skip("this ggml has a build for each CPU")
    ggml._check_cpu()
    monkeypatch.setattr(ggml, "missing_cpu_features", lambda needed: tuple(needed)[:2])
    with pytest.raises(ImportError, match=f"this one lacks {', '.join(built_for()[:2])}; build it"):
        ggml._check_cpu()
    monkeypatch.setattr(ggml, "cpu_features", frozenset)  # hidden: nothing is known
    ggml._check_cpu()


def built_for() -> list[str]:
    return resources.files("unimem_ggml").joinpath("built_for.txt").read_text().split()
