"""Signatures of compiled classes and functions, which Python cannot ask for: those of the stubs."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import unimem

SOURCE = Path(unimem.__file__).parent
FIRST = 100  # before the hooks that take signatures out of docstrings


@cache
def signatures_of(module: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a module's stub by their qualified names."""
    stub = SOURCE.joinpath(*module.split(".")[1:]).with_suffix(".pyi")
    found: dict[str, ast.FunctionDef] = {}
    if not stub.is_file():
        return found

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                found[prefix + node.name] = node  # of overloads, the last

    walk(ast.parse(stub.read_text()).body, "")
    return found


def without_types(node: ast.FunctionDef, is_method: bool) -> str:
    """Return the parameters of a function as text, as in a call's documentation."""
    arguments = node.args
    everything = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    for argument in [*everything, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    text = ast.unparse(arguments)
    if is_method:
        text = text.partition(",")[2].lstrip().removeprefix("/, ").removeprefix("/")
    return f"({text})"


def find(obj: Any) -> tuple[str, ast.FunctionDef] | None:
    """Return the function of a stub that a class or function of Python is, with its name."""
    if inspect.isclass(obj):
        for cls in obj.__mro__:
            for name in ("__init__", "__new__"):
                node = signatures_of(cls.__module__).get(f"{cls.__qualname__}.{name}")
                if node is not None:
                    return f"{cls.__qualname__}.{name}", node
        return None
    module = getattr(obj, "__module__", None)
    if module is None:  # a method of Python's own, or of a class that is compiled
        module = getattr(getattr(obj, "__objclass__", None), "__module__", "builtins")
    node = signatures_of(module).get(obj.__qualname__)
    return None if node is None else (obj.__qualname__, node)


def add_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: Any
) -> tuple[str, None] | None:
    """Give autodoc the signature of a stub where Python has none."""
    if what not in {"class", "method", "function"} or inspect.isfunction(obj):
        return None
    found = find(obj)
    if found is None:
        return None
    qualified, node = found
    is_static = any(getattr(mark, "id", "") == "staticmethod" for mark in node.decorator_list)
    return without_types(node, "." in qualified and not is_static), None


def setup(app: Any) -> dict[str, bool]:
    """Tell Sphinx."""
    app.connect("autodoc-process-signature", add_signature, priority=FIRST)
    return {"parallel_read_safe": True}
