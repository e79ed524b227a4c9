"""Plans of a model with a projector, a draft model, or its own predicting layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import unimem as um
from planning.test_llama_cpp import FILES, write
