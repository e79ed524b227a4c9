"""The public names are those of the recorded list, so that users' code keeps working."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.project.checkout import ROOT
from support.project.public_names import public_names

pytest.importorskip("typer", reason="the command line needs typer: pip install '.[run]'")
LISTED = json.loads((ROOT / "tests/project/data/public_names.json").read_text())


@pytest.fixture(scope="module")
def found() -> Any:
    return public_names()


@pytest.mark.parametrize("kind", sorted(LISTED))
def test_public_names_are_those_of_the_list(kind: str, found: Any) -> None:
    assert LISTED[kind], "an empty list would hold nothing"
    assert found[kind] == LISTED[kind]
