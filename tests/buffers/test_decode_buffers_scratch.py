"""Forward scratch: what a pass needs is what is taken, apart or in one another's place."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import unimem as um
from support.contracts.buffer_sets import interrupted, power_of_two, random_dims
from support.kernel import proc_maps
from unimem._core.status import counters

pytestmark = pytest.mark.usefixtures("gives_memory_back")

DIMS = um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512)
NAMES = set(
    """
    residual normalized q k v attention projected ffn_normalized gate up gated ffn_out scores
""".split()
)
# A transformer block: what each step reads, and what it writes.
BLOCK: tuple[tuple[set[str], set[str]], ...] = (
    ({"residual"}, {"normalized"}),
    ({"normalized"}, {"q", "k", "v"}),
    ({"q", "k", "v"}, {"scores", "attention"}),
    ({"attention"}, {"projected"}),
    ({"residual", "projected"}, {"residual"}),
    ({"residual"}, {"ffn_normalized"}),
    ({"ffn_normalized"}, {"gate", "up"}),
    ({"gate", "up"}, {"gated"}),
    ({"gated"}, {"ffn_out"}),
    ({"residual", "ffn_out"}, {"residual"}),
)


def values_of(d: um.ModelDims) -> dict[str, int]:
    values = dict.fromkeys(NAMES, d.hidden_size)
    values |= dict.fromkeys(("q", "attention"), d.num_attention_heads * d.head_dim)
    values |= dict.fromkeys(("k", "v"), d.num_kv_heads * d.head_dim)
    values |= dict.fromkeys(("gate", "up", "gated"), d.intermediate_size)
    return values | {"scores": d.max_seq_len, "logits": d.vocab_size}


def arrays_of(fs: um.ForwardScratch) -> dict[str, Any]:
    return {name: getattr(fs, name) for name in (*NAMES, "logits")}


def test_200_dims() -> None:
    with um.Tape(8 << 20, pages="4k") as tape:
        for d, _ in random_dims(200):
            tape.clear()
            fs = um.ForwardScratch(d, tape=tape)
            addresses, arrays = fs.addresses(), arrays_of(fs)
            assert addresses.keys() == arrays.keys() == values_of(d).keys()
            for name, n in values_of(d).items():
                assert (name, arrays[name].shape, arrays[name].dtype) == (name, (n,), np.float32)
                assert proc_maps.address_of(arrays[name]) == addresses[name]
                assert addresses[name] % power_of_two(arrays[name].nbytes) == 0
            spans = sorted((addresses[name], a.nbytes) for name, a in arrays.items())
            assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(spans))
            total = sum(array.nbytes for array in arrays.values())
            assert fs.peak_scratch_bytes == total - fs.logits.nbytes
            assert tape.used_bytes == total == um.ForwardScratch.bytes_needed(d)
            tape.clear()
            um.ForwardScratch(d, tape=tape, overlap=True)
            assert tape.used_bytes == um.ForwardScratch.bytes_needed(d, overlap=True) <= total + 832


def test_the_formula_and_that_of_the_origin() -> None:
    with um.Tape(8 << 20, pages="4k") as tape:

        def peak(d: um.ModelDims) -> int:
            tape.clear()
            return um.ForwardScratch(d, tape=tape).peak_scratch_bytes

        for d, _ in random_dims(50, seed=8):
            wide = 5 * d.hidden_size + 2 * d.q_size + 2 * d.kv_size
            assert peak(d) == 4 * (wide + 3 * d.intermediate_size + d.max_seq_len)
            # With as many KV heads as heads, and heads that make up the hidden size, there is one
            # hidden vector less.
            full = replace(d, hidden_size=d.q_size, num_kv_heads=d.num_attention_heads)
            origin = 4 * (10 * full.hidden_size + 3 * d.intermediate_size + d.max_seq_len)
            assert origin - peak(full) == 4 * full.hidden_size
            # The batch size does not matter.
            assert peak(replace(d, max_batch_size=1)) == peak(d)


# ---- in one another's place ----


def test_uses_are_those_of_a_block() -> None:
    uses: dict[str, tuple[int, int]] = {}
    for step, (reads, writes) in enumerate(BLOCK):
        for name in reads | writes:
            uses[name] = (uses.get(name, (step, step))[0], step)
    assert uses == um.ForwardScratch.USES


def test_overlap_takes_what_its_plan_says() -> None:
    with um.Tape(8 << 20, pages="4k") as tape:
        for d, _ in random_dims(200, seed=9):
            values = values_of(d)
            plan = um.BufferPlan(
                um.BufferUse(name, 4 * values[name], *use)
                for name, use in um.ForwardScratch.USES.items()
            )
            tape.clear()
            fs = um.ForwardScratch(d, tape=tape, overlap=True)
            assert fs.peak_scratch_bytes == plan.total_bytes
            assert tape.used_bytes == plan.total_bytes + fs.logits.nbytes
            addresses, base = fs.addresses(), tape.block.address
            assert addresses.pop("logits") == base + plan.total_bytes
            assert {name: at - base for name, at in addresses.items()} == plan.offsets
            del fs


def test_overlap_is_smaller() -> None:
    """A model of 7 billion parameters: three feed-forward buffers and the residual, at most."""
    d = um.ModelDims(4096, 14336, 32, 8, 128, 32000, 32, 4096)
    with um.Tape(1 << 20) as tape:
        apart = um.ForwardScratch(d, tape=tape)
        tight = um.ForwardScratch(d, tape=tape, overlap=True)
        assert apart.peak_scratch_bytes == 4 * (5 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14336 + 4096)
        assert tight.peak_scratch_bytes == 4 * (4096 + 3 * 14336)
        del apart, tight


@pytest.mark.parametrize("overlap", [False, True])
def test_a_block_finds_what_it_wrote(overlap: bool) -> None:
    """Every step of every layer writes, and whoever reads finds what was written for him."""
    with um.Tape(8 << 20, pages="4k") as tape:
        for d, _ in random_dims(30, seed=10):
            tape.clear()
            fs = um.ForwardScratch(d, tape=tape, overlap=overlap)
            addresses = fs.addresses()
            fs.residual[:], fs.logits[:] = -1, -2
            written = {"residual": -1.0}
            for number, (reads, writes) in enumerate(BLOCK * 3):
                # What a step writes may not be where it reads, but for the residual itself.
                for name in sorted(writes):
                    getattr(fs, name)[:] = written[name] = 100.0 * number + len(name)
                for name in (reads - writes) | writes:
                    assert (getattr(fs, name) == written[name]).all(), name
            assert (fs.logits == -2).all()
            assert fs.addresses() == addresses
            del fs


# ---- the steady state, and the end ----


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_take_nothing(overlap: bool) -> None:
    with um.Tape(1 << 20) as tape:
        fs = um.ForwardScratch(DIMS, tape=tape, overlap=overlap)
        tape.freeze()
        tape.keep()
        addresses, n_takes, before = fs.addresses(), tape.n_takes, counters()
        for token in range(100):
            fs.residual[:] = token
            np.multiply(fs.residual, 2, out=fs.normalized)
            fs.logits[:64] = fs.normalized
            tape.clear()
        assert (fs.logits[:64] == 198).all()
        assert fs.addresses() == addresses
        assert (tape.n_takes, counters()) == (n_takes, before)
        del fs


@pytest.mark.parametrize("overlap", [False, True])
def test_a_tape_without_room_stays_as_it_was(overlap: bool) -> None:
    with um.Tape(1 << 20) as tape:
        fs = um.ForwardScratch(DIMS, tape=tape, overlap=overlap)
        needed = tape.used_bytes
        fs.close()
    with um.Tape(needed) as tape:
        um.ForwardScratch(DIMS, tape=tape, overlap=overlap).close()
        tape.clear()
        tape.take_bytes(1)
        with pytest.raises(um.TapeFull) as caught:
            um.ForwardScratch(DIMS, tape=tape, overlap=overlap)
        assert (caught.value.asked, tape.used_bytes) == (needed, 1)
        tape.clear()
        tape.freeze()
        with pytest.raises(um.FrozenError):
            um.ForwardScratch(DIMS, tape=tape, overlap=overlap)
        assert tape.used_bytes == 0


def test_it_is_made_once() -> None:
    with um.Tape(1 << 20) as tape, um.ForwardScratch(DIMS, tape=tape) as fs:
        addresses, used = fs.addresses(), tape.used_bytes
        with pytest.raises(RuntimeError, match="the ForwardScratch is made already"):
            fs.__init__(DIMS, tape=tape)  # type: ignore[misc]
        assert (fs.addresses(), tape.used_bytes) == (addresses, used)


def test_the_largest_dimensions_have_a_size() -> None:
    """No dimensions that there can be are too large for it: q_size is what is bounded."""
    most = 2**31 - 1
    huge = um.ModelDims(most, most, 2**25, 1, 2**31 - 2, most, 1, 1)
    with pytest.raises(ValueError, match=r"q_size \* 32"):
        replace(huge, num_attention_heads=2**26)
    assert um.ForwardScratch.bytes_needed(huge) < 2**60


def test_it_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = mock.Mock(wraps=um.BufferPlan)
    monkeypatch.setattr("unimem.buffers.decode_buffers.BufferPlan", planned)
    with um.Tape(1 << 20) as tape:
        um.ForwardScratch(DIMS, tape=tape, overlap=True).close()
    assert planned.call_count == 1


@pytest.mark.parametrize("end", ["close", "__exit__"])
def test_an_interrupted_end(end: str) -> None:
    with um.Tape(1 << 20) as tape:
        number, is_over = 1, False
        while not is_over:
            tape.clear()
            fs = um.ForwardScratch(DIMS, tape=tape)
            is_over = not interrupted(getattr(fs, end), number)
            assert fs.closed or fs.q.shape == (64,)
            fs.close()
            with pytest.raises(um.ClosedError):
                fs.q  # noqa: B018
            number += 1
        assert number > 15


def test_the_end() -> None:
    with um.Tape(1 << 20) as tape:
        with um.ForwardScratch(DIMS, tape=tape) as fs:
            assert repr(fs).startswith("ForwardScratch('forward scratch', 8.0 KiB, Tape(")
            with pytest.raises(TypeError, match="a ForwardScratch cannot be pickled"):
                pickle.dumps(fs)
            logits = fs.logits
        assert fs.closed
        assert not tape.closed
        logits[:] = 1
        for gone in (lambda: fs.logits, lambda: fs.q, fs.addresses):
            with pytest.raises(um.ClosedError, match="ForwardScratch 'forward scratch' is closed"):
                gone()
        fs.close()
        assert repr(fs) == "ForwardScratch('forward scratch', closed)"
        del logits
