"""Examples in docstrings, of Python and Cython modules, run and print what they show."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import unimem
from support.project.doc_examples import check_example

MISSING: dict[str, str] = {}


# Tests elsewhere run the examples of unimem.cuda, which need a GPU, and those of transformers,
# which takes seconds to import; vLLM, LMCache and SGLang are not installed.
ELSEWHERE = {"unimem.cuda", "unimem.transformers", "unimem.vllm", "unimem.lmcache", "unimem.sglang"}


def modules(package: ModuleType = unimem) -> Iterator[ModuleType]:
    yield package
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if info.name.endswith(".__main__") or info.name in ELSEWHERE:
            continue
        try:
            module = importlib.import_module(info.name)
        except ImportError as error:
            # An extra is not installed; modules without one are always there.
            if not info.name.startswith(("unimem.cli", "unimem.engine")):
                raise
            MISSING[info.name] = str(error)
        else:
            yield from modules(module) if info.ispkg else [module]


def documented(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield everything with a docstring: the module, its classes, functions and methods."""
    yield module.__name__, module
    for name, thing in vars(module).items():
        if getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(thing):
            yield f"{module.__name__}.{name}", thing
            for member, value in vars(thing).items():
                yield f"{module.__name__}.{name}.{member}", value
        elif callable(thing):
            yield f"{module.__name__}.{name}", thing


def examples() -> list[doctest.DocTest]:
    found = []
    for module in modules():
        for name, thing in documented(module):
            text = inspect.getdoc(thing) or ""
            if ">>>" in text:
                names = dict(vars(module))
                found.append(doctest.DocTestParser().get_doctest(text, names, name, name, 0))
    return found


EXAMPLES = examples()


def test_there_are_examples_of_every_noun() -> None:
    names = {example.name.rsplit(".", 1)[-1] for example in EXAMPLES}
    nouns = {"Block", "Tape", "Grid", "KVCache", "Layout", "Scratchpad", "PagedScratchpad", "Stat"}
    assert nouns - names == set()


def test_every_module_was_looked_at() -> None:
    if MISSING:
        pytest.skip(f"not installed: {MISSING}")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example(example: doctest.DocTest) -> None:
    check_example(example)
