"""What sets of buffers are, whatever device they lie on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import unimem as um
from support.processes.interrupts import is_interrupted
from unimem.buffers import buffer_set, decode_buffers

# The names of the interface, with the values of each for dimensions.
BY_HIDDEN = tuple(
    """
    embed_out norm_out o_proj_out residual post_norm_out post_norm_residual down_out
    final_norm_out
""".split()
)
BY_QUERY = ("q_rotated", "rope_q_temp", "attn_out")
BY_KEY = ("k_rotated", "rope_k_temp")
POINTERS = ("batched_k_ptrs", "batched_v_ptrs")
COUNTS = ("batched_kv_lens", "batched_positions")
FLASH = ("flash_partial_out", "flash_partial_m", "flash_partial_l")
UNSCALED = ("temp_dequant", "scratch_attn", *FLASH)
DIMS = um.ModelDims(64, 176, 8, 4, 8, 512, 5, 512, quantized=True, max_batch_size=4)
DTYPES = ("float16", "bfloat16", "float32")


def values_of(d: um.ModelDims) -> dict[str, int]:
    """The values of each buffer, as the interface says."""
    b, q, kv = d.max_batch_size, d.num_attention_heads * d.head_dim, d.num_kv_heads * d.head_dim
    values = dict.fromkeys(BY_HIDDEN, b * d.hidden_size)
    values |= dict.fromkeys(BY_QUERY, b * q)
    values |= dict.fromkeys(BY_KEY, b * kv)
    values |= dict.fromkeys(POINTERS + COUNTS, b)
    values |= {
        "qkv_out": b * (q + 2 * kv),
        "gate_up_out": b * 2 * d.intermediate_size,
        "mlp_act": b * d.intermediate_size,
        "logits": b * d.vocab_size,
        "scratch_attn": q,
        "flash_partial_out": d.num_attention_heads * 32 * d.head_dim,
        "flash_partial_m": d.num_attention_heads * 32,
        "flash_partial_l": d.num_attention_heads * 32,
    }
    if d.quantized:
        values["temp_dequant"] = d.hidden_size * 2 * d.intermediate_size
    return values


NAMES = set(values_of(DIMS))


def dtype_of(name: str, dtype: str) -> str:
    """The dtype of a buffer where the activations have this one."""
    fixed = dict.fromkeys(POINTERS, "uint64") | dict.fromkeys(COUNTS, "int32")
    return (fixed | dict.fromkeys(FLASH, "float32")).get(name, dtype)


def random_dims(n: int, seed: int = 5) -> Iterator[tuple[um.ModelDims, str]]:
    """Dimensions of every divisibility, and a dtype."""
    r = random.Random(seed)
    for _ in range(n):
        kv_heads = r.randint(1, 4)
        # Odd ones, and multiples of any power of two.
        hidden, inner, vocab = (r.randint(1, 40) << r.randint(0, 6) for _ in range(3))
        yield (
            um.ModelDims(
                hidden,
                inner,
                kv_heads * r.randint(1, 4),
                kv_heads,
                2 * r.randint(1, 40),
                vocab,
                r.randint(1, 4),
                r.randint(1, 1000),
                quantized=r.random() < 0.5,
                max_batch_size=r.choice((1, 2, 3, 4, 7, 8, 16)),
            ),
            r.choice(DTYPES),
        )


def power_of_two(nbytes: int) -> int:
    """The largest up to 256 that divides it."""
    return next(power for power in (256, 128, 64, 32, 16, 8, 4, 2, 1) if nbytes % power == 0)


def check_buffers(db: Any, d: um.ModelDims, dtype: str) -> None:
    """The buffers are those of the interface, and lie one behind the other without a gap."""
    values = values_of(d)
    addresses = db.addresses()
    assert addresses.keys() == values.keys()
    assert d.quantized or db.temp_dequant is None
    spans = []
    for name, n in values.items():
        a = getattr(db, name)
        assert (name, a.shape, a.dtype.name) == (name, (n,), dtype_of(name, dtype))
        address = addresses[name]
        assert address % power_of_two(a.nbytes) == 0
        spans.append((address, address + a.nbytes))
    spans.sort()
    assert spans[0][0] % 256 == 0
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(spans))
    total = sum(getattr(db, name).nbytes for name in values)
    assert spans[-1][1] - spans[0][0] == total
    assert db.memory_bytes == total == type(db).bytes_needed(d, dtype)
    assert (db.dims, db.dtype.name, db.MAX_SPLITS) == (d, dtype, 32)


def interrupted(call: Callable[[], object], number: int) -> bool:
    """Call, with Ctrl-C at the line of this number of the module's; whether it got so far."""
    return is_interrupted(call, number, buffer_set.__file__, decode_buffers.__file__)


def check_interrupts_of_swaps(db: Any, address_of: Callable[[Any], int]) -> None:
    """Wherever it happens, names, shaped views and addresses agree."""
    batch = db.batch(2)
    names = ("residual", "post_norm_residual")
    places = {db.addresses()[name] for name in names}
    number = 1
    while interrupted(db.swap_residual, number):
        number += 1
        addresses = db.addresses()
        assert {addresses[name] for name in names} == places
        for name in names:
            found = {address_of(getattr(thing, name)) for thing in (db, batch, db.batch(1))}
            assert found == {addresses[name]}
    assert number > 3


def check_interrupts_of_the_end(make: Callable[[], Any], end: str) -> None:
    """Wherever it happens, the buffers are whole or closed, and can be closed."""
    number, is_over = 1, False
    while not is_over:
        db = make()
        batch, addresses = db.batch(2), db.addresses()
        is_over = not interrupted(getattr(db, end), number)
        if not db.closed:
            assert db.addresses() == addresses
            assert db.logits.shape == (4 * 512,)
            assert batch.logits.shape == (2, 512)
        db.close()
        assert db.closed
        for thing in (db, batch):
            with pytest.raises(um.ClosedError):
                thing.logits  # noqa: B018
        number += 1
    assert number > 30
