"""The examples of `unimem.cuda` run, over a driver in main memory."""

from __future__ import annotations

from typing import Any

import pytest

from support.project.doc_examples import check_docs

pytestmark = pytest.mark.usefixtures("gives_memory_back")

# Classes whose examples touch no element, which would need a GPU.
EXAMPLES = ("DecodeBuffers", "Grid", "Layout", "Tape")
# Attributes that are set when a block is made.
NOT_THERE = {"category", "name"}


def test_the_names_are_those_of_main_memory(cuda: Any) -> None:
    import unimem as um

    own = {"CAPABILITIES", "set_budget"}
    assert {name for name in cuda.__all__ if not hasattr(um, name)} <= own
    for name in set(cuda.__all__) - own:
        theirs, ours = getattr(um, name), getattr(cuda, name)
        missing = {member for member in dir(theirs) if not member.startswith("_")} - set(dir(ours))
        assert missing == (NOT_THERE if name == "Block" else set()), name


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(cuda: Any, name: str) -> None:
    check_docs(getattr(cuda, name), name)
