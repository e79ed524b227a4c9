"""The memory that the interpreter takes its small objects from."""

from __future__ import annotations

__all__ = ["warm_python_heap"]

# CPython's allocator (Objects/obmalloc.c) keeps sizes apart up to this one, in pools of this many
# bytes, which lie in arenas of a mebibyte.
_LARGEST, _STEP = 512, 16
_POOL_BYTES = 16 << 10
_TOUCHED_BYTES = 2 << 20

# An arena whose objects are all gone would go back to the system.
_kept: list[bytes] = []


def _take(nbytes: int, size: int) -> list[bytes]:
    return [bytes(size - bytes.__basicsize__) for _ in range(nbytes // size + 1)]


def warm_python_heap() -> None:
    """Touch what the small objects of a loop will lie in: 2 MiB, of which at least 1 stays.

    A loop that makes a few objects a token would otherwise touch a new page now and then, which is
    a minor fault. Objects of more than 512 bytes come from the C library and are not meant here.
    """
    # Pools that no object has had yet. All of the arena in the middle was touched: it stays.
    made = _take(_TOUCHED_BYTES, _LARGEST)
    _kept[:] = [made[len(made) // 2]]
    del made
    # And the rest of the pool that each size takes its objects from now.
    smallest = -(-bytes.__basicsize__ // _STEP) * _STEP
    for size in range(smallest, _LARGEST + 1, _STEP):
        _take(_POOL_BYTES, size)
    [float(i) for i in range(_POOL_BYTES // (2 * _STEP) + 1)]
    [object() for _ in range(_POOL_BYTES // _STEP + 1)]
