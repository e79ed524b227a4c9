"""Processes that several commands look at."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import unimem as um
from support.processes.running import running

MODEL = Path(um.__file__).parent / "engine" / "models" / "tiny.gguf"
HOLD = """
import sys, unimem as um
weights = um.open_weights(sys.argv[1], load="map")
weights.warm()
"""


@pytest.fixture(scope="module")
def holder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """Start a process that has mapped a model; give its number, and the model."""
    path = Path(shutil.copy(MODEL, tmp_path_factory.mktemp("held") / "held.gguf"))
    with running(HOLD, path) as pid:
        yield pid, path
