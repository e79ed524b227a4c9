"""Copies of a model on each node: all or none, with one progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.processes.staged_models import TINY
from unimem.staging import each_node
from unimem.staging.each_node import stage_copies


class Staging:
    """Stages that note where they lie, and whether they were closed; the third fails."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.closed: list[Any] = []

    @contextmanager
    def __call__(self, path: Any, progress: Any, **options: Any) -> Iterator[str]:
        if len(self.asked) == 2:
            raise MemoryError
        self.asked.append((options["numa"], options["repack"]))
        progress(1, 10)
        progress(10, 10)
        yield f"stage {len(self.asked)}"
        self.closed.append(options["numa"])


@pytest.mark.parametrize(
    ("nodes", "expected", "last"),
    [((1, 4), {1: "bind:1", 4: "bind:4"}, (20, 20)), ((), {None: None}, (10, 10))],
)
def test_each_node_gets_one(
    monkeypatch: pytest.MonkeyPatch, nodes: Any, expected: dict[Any, Any], last: tuple[int, int]
) -> None:
    monkeypatch.setattr(each_node, "nodes_for_copies", lambda *_: nodes)
    staging, told = Staging(), list[tuple[int, int]]()
    made = stage_copies(
        staging, TINY, {"numa": "mirror"}, lambda *n: told.append(n), {"repack": False}
    )
    assert list(made) == list(expected)
    assert staging.asked == [(numa, False) for numa in expected.values()]
    assert staging.closed == []
    assert told[-1] == last
    assert told == sorted(told)


def test_a_failure_closes_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(each_node, "nodes_for_copies", lambda *_: (0, 1, 2))
    staging = Staging()
    with pytest.raises(MemoryError):
        stage_copies(staging, TINY, {"numa": "mirror"}, None, {"repack": False})
    assert len(staging.asked) == 2
