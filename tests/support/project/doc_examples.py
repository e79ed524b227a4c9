"""Examples in docstrings."""

from __future__ import annotations

import doctest
import inspect


def check_example(example: doctest.DocTest) -> None:
    """Run an example, and compare what it prints."""
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST).run(example, out=said.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(said)


def check_docs(thing: object, name: str) -> None:
    """Run the example of a class, of two statements at least."""
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", {}, name, name, 0)
    assert len(example.examples) > 1
    check_example(example)
