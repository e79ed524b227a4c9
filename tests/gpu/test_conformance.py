"""The caches of the GPU twin pass the contract of all caches, on a GPU."""

from __future__ import annotations

import pytest

from cache_kinds import all_kinds
from conformance import suites
from gpu.machine import bridge

pytestmark = pytest.mark.usefixtures("gives_memory_back")

KINDS = all_kinds(bridge)

globals().update(suites(KINDS))
