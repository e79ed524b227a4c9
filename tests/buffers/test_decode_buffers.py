"""Decode buffers: every byte of one take, at addresses that never change."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import unimem as um
from conftest import Run
from support.contracts import buffer_sets as bs
from support.contracts.buffer_sets import DIMS, NAMES, random_dims
from support.kernel import proc_maps
from unimem._core.status import counters, ledger
from unimem.buffers.buffer_set import total_bytes

pytestmark = pytest.mark.usefixtures("gives_memory_back")


# ---- what there is ----


def test_200_dims() -> None:
    """What is taken is what is counted and what is there, on a tape of its own and on another."""
    assert len(NAMES) == 26
    with um.Tape(64 << 20, pages="4k") as tape:
        for i, (d, dtype) in enumerate(random_dims(200)):
            with um.DecodeBuffers(d, dtype=dtype) as db:
                bs.check_buffers(db, d, dtype)
                assert db.memory_bytes == db.tape.used_bytes == db.tape.total_bytes
            tape.clear()
            tape.take_bytes(i)
            before = -(-i // 256) * 256
            with um.DecodeBuffers(d, dtype=dtype, tape=tape) as db:
                bs.check_buffers(db, d, dtype)
                assert tape.used_bytes == before + db.memory_bytes
                assert min(db.addresses().values()) == tape.block.address + before


def test_no_byte_is_shared() -> None:
    for d, dtype in random_dims(20, seed=6):
        with um.DecodeBuffers(d, dtype=dtype) as db:
            arrays = {name: getattr(db, name) for name in sorted(db.addresses())}
            for i, (name, array) in enumerate(arrays.items()):
                assert proc_maps.address_of(array) == db.addresses()[name]
                assert array.flags.aligned
                assert db.tape.owns(array)
                array.view("uint8")[:] = i
            assert all((a.view("uint8") == i).all() for i, a in enumerate(arrays.values()))
            del array, arrays


def test_a_real_models_buffers_are_aligned() -> None:
    """Mistral 7B: every size is a multiple of 256 bytes but those of one number a sequence."""
    d = um.ModelDims(4096, 14336, 32, 8, 128, 32000, 32, 32768, max_batch_size=8)
    with um.DecodeBuffers(d) as db:
        odd = {name for name, address in db.addresses().items() if address % 256}
        assert odd <= {*bs.POINTERS, *bs.COUNTS}


def test_the_figure_of_the_origin() -> None:
    """It leaves out pointers, lengths, positions and what is dequantized."""
    for d, _ in random_dims(50, seed=7):
        b, hidden, inner, q, kv = (
            d.max_batch_size,
            d.hidden_size,
            d.intermediate_size,
            d.q_size,
            d.kv_size,
        )
        scaled = 8 * hidden + (q + 2 * kv) + 3 * q + 2 * kv + 3 * inner + d.vocab_size
        origin = 2 * (b * scaled + q) + 4 * 32 * (q + 2 * d.num_attention_heads)
        left_out = 24 * b + (2 * hidden * 2 * inner if d.quantized else 0)
        assert um.DecodeBuffers.bytes_needed(d) == origin + left_out


# ---- shaped views ----


def test_batches() -> None:
    widths = {name: n // 4 for name, n in bs.values_of(DIMS).items() if name not in bs.UNSCALED}
    shapes = {
        "temp_dequant": (64, 352),
        "scratch_attn": (64,),
        "flash_partial_out": (8, 32, 8),
        **dict.fromkeys(("flash_partial_m", "flash_partial_l"), (8, 32)),
    }
    with um.DecodeBuffers(DIMS) as db:
        addresses = db.addresses()
        for m in (1, 2, 4):
            batch = db.batch(np.int64(m))
            assert batch is db.batch(m)
            assert (batch.m, type(batch.m)) == (m, int)
            for name in NAMES:
                view, flat = getattr(batch, name), getattr(db, name)
                shape = (m,) if name in bs.POINTERS + bs.COUNTS else (m, widths.get(name))
                assert (name, view.shape) == (name, shapes.get(name, shape))
                assert view.dtype == flat.dtype
                assert proc_maps.address_of(view) == addresses[name]
        db.batch(2).qkv_out[1, 3] = 7
        assert db.qkv_out[128 + 3] == db.batch(4).qkv_out[1, 3] == 7
        del batch, view, flat
    with um.DecodeBuffers(replace(DIMS, quantized=False)) as db:
        assert db.batch(3).temp_dequant is None


@pytest.mark.parametrize("m", [0, -1, 5, 2**40, 1.0, "1", None, (1,), True])
def test_other_batches(m: Any) -> None:
    error, match = (ValueError, f"from 1 to 4, got {m}") if type(m) is int else (TypeError, ".")
    with um.DecodeBuffers(DIMS) as db, pytest.raises(error, match=match):
        db.batch(m)


# ---- the double buffer ----


def test_swapping_moves_no_byte() -> None:
    with um.DecodeBuffers(DIMS) as db:
        four = db.batch(4)
        before, old = db.addresses(), db.residual
        db.residual[:] = 1
        db.post_norm_residual[:] = 2
        db.swap_residual()
        swapped = db.addresses()
        assert swapped["residual"] == before["post_norm_residual"]
        assert swapped["post_norm_residual"] == before["residual"]
        assert set(swapped.values()) == set(before.values())
        assert proc_maps.address_of(db.residual) == swapped["residual"]
        for names in (db, four, db.batch(2)):
            assert (names.residual == 2).all()
            assert (names.post_norm_residual == 1).all()
        assert (old == 1).all()
        db.swap_residual()
        assert db.addresses() == before
        assert (four.residual == 1).all()
        del old, names


# ---- the steady state ----


def test_a_step_takes_nothing() -> None:
    with um.Tape(1 << 20) as tape:
        db = um.DecodeBuffers(DIMS, tape=tape)
        tape.freeze()

        def step() -> None:
            for m in (1, 3):
                batch = db.batch(m)
                batch.embed_out[:] = 1
                np.multiply(batch.mlp_act, 2, out=batch.gate_up_out[:, : DIMS.intermediate_size])
            db.swap_residual()
            db.swap_residual()

        step()
        addresses, n_takes, before, rows = db.addresses(), tape.n_takes, counters(), ledger()
        for _ in range(100):
            step()
        assert db.addresses() == addresses
        assert tape.n_takes == n_takes
        assert counters() == before
        assert ledger() == rows
        db.close()


# ---- what is refused ----


@pytest.mark.parametrize(
    "dtype", ["float16", np.float16, np.dtype("float16"), np.dtype(">f2"), ml_dtypes.bfloat16]
)
def test_ways_to_name_a_dtype(dtype: Any) -> None:
    with um.DecodeBuffers(DIMS, dtype=dtype) as db:
        assert db.dtype == db.logits.dtype == np.dtype(dtype).newbyteorder("=")
        assert db.dtype.isnative


@pytest.mark.parametrize("dtype", ["i4", "int32", "float64", None, np.float64])
def test_other_dtypes(dtype: Any) -> None:
    for call in (um.DecodeBuffers, um.DecodeBuffers.bytes_needed):
        with pytest.raises(ValueError, match="expected one of float16, bfloat16, float32, got"):
            call(DIMS, dtype=dtype)


def test_memory_of_a_tape_is_placed_already() -> None:
    with um.Tape(1 << 20) as tape:
        with pytest.raises(ValueError, match="pages not accepted beside tape="):
            um.DecodeBuffers(DIMS, tape=tape, pages="4k")
        assert tape.used_bytes == 0


def test_a_tape_that_gives_nothing_stays_as_it_was() -> None:
    needed = um.DecodeBuffers.bytes_needed(DIMS)
    with um.Tape(needed + 255) as tape:
        tape.take_bytes(100)
        with pytest.raises(um.TapeFull) as caught:
            um.DecodeBuffers(DIMS, tape=tape)
        assert caught.value.asked == needed
        assert (tape.used_bytes, tape.n_takes) == (100, 1)
        tape.clear()
        um.DecodeBuffers(DIMS, tape=tape).close()
        tape.clear()
        tape.freeze()
        with pytest.raises(um.FrozenError):
            um.DecodeBuffers(DIMS, tape=tape)
        assert tape.used_bytes == 0
    with pytest.raises(um.ClosedError):
        um.DecodeBuffers(DIMS, tape=tape)


def test_more_than_there_can_be() -> None:
    huge = um.ModelDims(2**30, 2**30 - 1, 1, 1, 2, 1, 1, 1, quantized=True)
    with pytest.raises(MemoryError):
        um.DecodeBuffers(huge)
    with um.Tape(4096) as tape:
        with pytest.raises(um.TapeFull):
            um.DecodeBuffers(huge, tape=tape)
        assert tape.used_bytes == 0


def test_sizes_whose_sum_does_not_fit() -> None:
    """Each of them could be, and all together could not."""
    huge = um.ModelDims(2**27, 1, 1, 1, 2, 1, 1, 1, False, 2**31 - 1)
    text = r"decode buffers for these dimensions are \d{19} bytes \(embed_out \d+, .* below 2\*\*63"
    assert um.DecodeBuffers.bytes_needed(huge, "bfloat16") < 2**63
    with um.Tape(4096) as tape:
        on_tape = partial(um.DecodeBuffers, tape=tape)
        for call in (um.DecodeBuffers.bytes_needed, um.DecodeBuffers, on_tape):
            with pytest.raises(ValueError, match=text):
                call(huge, dtype="float32")
        assert tape.used_bytes == 0
    assert total_bytes("buffers", {"a": 2**62, "b": 2**62 - 1}) == 2**63 - 1
    with pytest.raises(ValueError, match=f"buffers for these dimensions are {2**63} bytes"):
        total_bytes("buffers", {"a": 2**62, "b": 2**62})


def test_buffers_are_made_once() -> None:
    with um.DecodeBuffers(DIMS) as db:
        before = db.addresses()
        with pytest.raises(RuntimeError, match="the DecodeBuffers is made already"):
            db.__init__(DIMS)  # type: ignore[misc]
        assert db.addresses() == before
        assert proc_maps.address_of(db.logits) == before["logits"]
    half = um.DecodeBuffers.__new__(um.DecodeBuffers)
    with pytest.raises(ValueError, match="dtype"):
        half.__init__(DIMS, dtype="int8")  # type: ignore[misc]
    assert half.closed
    half.close()
    half.__exit__()
    for call in (half.addresses, lambda: half.residual):
        with pytest.raises(um.ClosedError):
            call()


# ---- interrupts ----


def test_an_interrupted_swap() -> None:
    with um.DecodeBuffers(DIMS) as db:
        bs.check_interrupts_of_swaps(db, proc_maps.address_of)


@pytest.mark.parametrize("end", ["close", "__exit__"])
@pytest.mark.parametrize("owns_tape", [True, False])
def test_an_interrupted_end(owns_tape: bool, end: str) -> None:
    before = ledger()["scratch"]["mapped_bytes"]
    with um.Tape(1 << 20) as tape:
        held = ledger()["scratch"]["mapped_bytes"]
        options: dict[str, Any] = {} if owns_tape else {"tape": tape}

        def make() -> um.DecodeBuffers:
            tape.clear()
            return um.DecodeBuffers(DIMS, **options)

        bs.check_interrupts_of_the_end(make, end)
        assert ledger()["scratch"]["mapped_bytes"] == held
    assert ledger()["scratch"]["mapped_bytes"] == before


# ---- the end ----


@pytest.mark.parametrize("owns_tape", [True, False])
def test_the_end_of_buffers_with_views(owns_tape: bool) -> None:
    """Closing refuses where it would take the memory, and leaving a `with` keeps it."""
    with um.Tape(1 << 20) as tape:
        options: dict[str, Any] = {} if owns_tape else {"tape": tape}
        db = um.DecodeBuffers(DIMS, name="mine", **options)
        batch = db.batch(2)
        db.swap_residual()
        db.residual[:] = 3
        addresses, view = db.addresses(), batch.logits
        if owns_tape:
            with pytest.raises(BufferError, match="'mine' has 1 live views"):
                db.close()
            # Nothing is closed, and nothing has changed.
            assert not db.closed
            assert db.addresses() == addresses
            assert (db.residual == 3).all()
            assert proc_maps.address_of(db.residual) == addresses["residual"]
            db.swap_residual()
            assert (batch.post_norm_residual == 3).all()
            with db:
                pass
        db.close()
        assert db.closed
        assert not tape.closed
        view[:] = 5
        assert (view == 5).all()
        del view


def test_after_the_end() -> None:
    db = um.DecodeBuffers(DIMS)
    batch = db.batch(1)
    db.close()
    db.close()
    for gone in (
        lambda: db.logits,
        lambda: db.temp_dequant,
        lambda: batch.logits,
        db.addresses,
        db.swap_residual,
        lambda: db.batch(1),
        db.__enter__,
    ):
        with pytest.raises(um.ClosedError, match="'decode buffers' is closed"):
            gone()
    assert db.memory_bytes == um.DecodeBuffers.bytes_needed(DIMS)
    assert repr(db) == "DecodeBuffers('decode buffers', closed)"
    with um.Tape(1 << 20) as tape:
        db = um.DecodeBuffers(DIMS, tape=tape)
    assert db.closed
    with pytest.raises(um.ClosedError):
        db.addresses()
    forgotten = um.DecodeBuffers(DIMS)
    with pytest.warns(ResourceWarning, match="unclosed Tape"):
        del forgotten


def test_what_else_they_are() -> None:
    before = ledger()["scratch"]["mapped_bytes"]
    with um.DecodeBuffers(DIMS, name="step", pages="4k", warm=True) as db:
        assert db.tape.block.granted.pages == "4k"
        assert ledger()["scratch"]["mapped_bytes"] - before >= db.memory_bytes
        assert repr(db).startswith("DecodeBuffers('step', 69.3 KiB of float16, batch 4, Tape('st")
        for thing in (db, db.batch(1)):
            with pytest.raises(AttributeError, match="no attribute 'logit'"):
                thing.logit  # type: ignore[union-attr]  # noqa: B018
            for call in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match="cannot be pickled"):
                    call(thing)
    with um.DecodeBuffers(DIMS, dtype="bfloat16") as db:
        assert "of bfloat16, batch 4, Tape(" in repr(db)


def test_a_forked_child(run_python: Run) -> None:
    """It has its own copy, and of shared memory none."""
    done = run_python(
        """
        import os
        import unimem as um

        dims = um.ModelDims(64, 176, 8, 4, 8, 512, 5, 512)
        with um.Tape(1 << 20, shared=True) as tape, um.DecodeBuffers(dims) as own:
            shared = um.DecodeBuffers(dims, tape=tape)
            own.logits[:] = 1
            child = os.fork()
            if child == 0:
                own.logits[:] = 2
                try:
                    shared.addresses()
                except um.ClosedError as error:
                    os._exit(7 if shared.closed and "fork" in str(error) else 1)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            assert (own.logits == 1).all()
            assert not shared.closed
            shared.close()
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
