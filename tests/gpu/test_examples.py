"""The examples in the twin's docstrings run, and say what they print."""

from __future__ import annotations

import doctest
import inspect

import pytest

from gpu.machine import cuda

CLASSES = sorted(name for name in cuda.__all__ if inspect.isclass(getattr(cuda, name)))


@pytest.mark.parametrize("name", CLASSES)
def test_example(name: str) -> None:
    text = inspect.getdoc(getattr(cuda, name)) or ""
    example = doctest.DocTestParser().get_doctest(text, {}, name, name, 0)
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST).run(example, out=said.append)
    assert result.attempted > 1
    assert result.failed == 0, "".join(said)
