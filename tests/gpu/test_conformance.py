"""The caches of the GPU twin pass the contract of all caches, on a GPU."""

from __future__ import annotations

import pytest

from conformance import (
    CacheContract,
    FixedContract,
    FullContract,
    GuestContract,
    LayerContract,
    OwnerContract,
    kind_of,
)
from cuda_kinds import all_kinds
from gpu.machine import bridge

pytestmark = pytest.mark.usefixtures("gives_memory_back")

KINDS = all_kinds(bridge)


class TestCache(CacheContract):
    """All of them."""

    kind = kind_of(KINDS)


class TestFull(FullContract):
    """All of them: none forgets."""

    kind = kind_of(KINDS)


class TestLayers(LayerContract):
    """Those with layers."""

    kind = kind_of([kind for kind in KINDS if kind.n_layers])


class TestOwner(OwnerContract):
    """Those with memory of their own."""

    kind = kind_of([kind for kind in KINDS if kind.owns_memory])


class TestGuest(GuestContract):
    """Those on a tape."""

    kind = kind_of([kind for kind in KINDS if not kind.owns_memory])


class TestFixed(FixedContract):
    """All of them: nothing is allocated, and nothing waited for, once they are made."""

    kind = kind_of(KINDS)
