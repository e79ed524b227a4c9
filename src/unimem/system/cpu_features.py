"""Instruction sets of this machine's CPUs, and those that a library needs and they lack."""

from __future__ import annotations

import re
from collections.abc import Iterable

from unimem.base import kernel_files

# Usual names that the kernel does not use.
_KERNELS_NAMES = {"sse3": "pni", "lzcnt": "abm", "neon": "asimd", "dotprod": "asimddp"}


def cpu_features() -> frozenset[str]:
    """Return the features of the first CPU by the kernel's names; none if they cannot be read."""
    info = kernel_files.read_fields("/proc/cpuinfo")
    return frozenset(f"{info.get('flags', '')} {info.get('Features', '')}".split())


def missing_cpu_features(needed: Iterable[str]) -> tuple[str, ...]:
    """Return the needed features that this machine's CPUs lack; all, if /proc/cpuinfo is hidden.

    Code for a missing feature ends the process with SIGILL, so this is asked before it is loaded.

    Parameters
    ----------
    needed : iterable of str
        Names of any case, with or without dots and underscores, such as ``"AVX2"``, ``"sse4.1"``,
        ``"avx512_vnni"`` or ``"dotprod"``.

    Returns
    -------
    tuple of str
        Those that are missing, as given and in the given order.

    Examples
    --------
    >>> missing_cpu_features(["no such feature"])
    ('no such feature',)
    """
    has = set(map(_plain, cpu_features()))
    return tuple(name for name in needed if _plain(name) not in has)


def _plain(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return _KERNELS_NAMES.get(plain, plain)
