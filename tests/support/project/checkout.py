"""The root of the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
"""The checkout."""

STORIES = ROOT.parent / "shared" / "models" / "stories260K.gguf"
"""A model that others trained, which lies beside some checkouts."""

needs_stories = pytest.mark.skipif(
    not STORIES.exists(), reason=f"{STORIES.name} is not beside the checkout"
)
