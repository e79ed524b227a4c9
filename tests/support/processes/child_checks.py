"""A prelude of test scripts: checks of errors, of warnings, and of what they leave behind."""

from __future__ import annotations

CHECKS = """
import os, warnings
import unimem as um
from unimem._core.status import ledger

MIB = 1 << 20

def state():
    own = [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]
    return own, len(os.listdir("/proc/self/fd")), {
        name: (row["mapped_bytes"], row["n_mappings"]) for name, row in ledger().items()
    }

def refused(kind, use, *parts):
    before = state()
    try:
        use()
    except kind as error:
        for part in parts:
            assert part in str(error), (part, str(error))
        assert state() == before, (before, state())
        return error
    raise AssertionError(f"no {kind}")

def warned(use, *parts):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = use()
    (warning,) = caught
    assert warning.category is um.PlacementWarning, warning
    for part in parts:
        assert part in str(warning.message), (part, str(warning.message))
    return made
"""
