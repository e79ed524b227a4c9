"""Plans for machines with invented room."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import unimem as um
from support.project.checkout import ROOT
from unimem.planning.result import is_as_asked
from unimem.system import limits
from unimem.system.limits import Limit

jsonschema = pytest.importorskip(
    "jsonschema", reason="jsonschema (extra test) checks documents: pip install '.[test]'"
)


GIB = 1 << 30
SCHEMA = json.loads((ROOT / "docs/schemas/plan-2.json").read_text())


DIMS = um.ModelDims(2048, 5632, 32, 4, 64, 32000, 22, 8192)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the machine, and cgroups in it, have so much room."""

    def set_room(machine: int, *cgroups: Limit) -> None:
        limit = Limit("memory of the machine", 2 * machine, machine, "take less")
        monkeypatch.setattr(limits, "memory_limits", lambda: (limit, *cgroups))

    monkeypatch.setattr(limits, "huge_pools", dict)  # what lies in a pool needs no such room
    return set_room


@pytest.fixture
def room(memory: Any) -> Any:
    """The same, when there is plenty."""
    memory(64 * GIB)
    return memory


def validated(plan: um.Plan) -> dict[str, Any]:
    document = json.loads(plan.to_json())
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    return document  # type: ignore[no-any-return]


def assert_true(plan: um.Plan, model: Any, **options: Any) -> None:
    """Advice is what planning with it says."""
    assert plan.advice
    for advice in plan.advice:
        if not advice.options:
            continue
        other = um.plan(model, **(options | {"ctx": plan.ctx} | advice.options))
        assert advice.saves_bytes == plan.required_bytes - other.required_bytes, advice
        assert advice.fits == is_as_asked(other), advice


@pytest.fixture
def available(room: Any) -> Any:
    return room
