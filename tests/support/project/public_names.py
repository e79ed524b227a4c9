"""The public names: Python names, members, options, C prototypes and fields of JSON documents.

``PYTHONPATH=tests python -m support.project.public_names`` prints the lists as JSON.
tests/project/test_public_names.py compares the package with the recorded lists: a change of a
public name changes the record in the same commit.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

ROOT: Final = Path(__file__).parents[3]
# Documented modules, by their current names.
MODULES: Final = (
    "unimem",
    "unimem.accounting.published",
    "unimem.cuda",
    "unimem.engine",
    "unimem.kv.prefix",
    "unimem.kv.snapshot",
    "unimem.llama_cpp",
    "unimem.ray",
    "unimem.system.limits",
    "unimem.torch",
)
# Modules that Cython callers import classes from.
CYTHON: Final = (
    "unimem._core.block",
    "unimem._core.grid",
    "unimem._core.tape",
    "unimem.kv.cache",
    "unimem.kv.paged",
    "unimem.kv.scratchpad",
)


def members(thing: Any) -> list[str]:
    """Return the public attributes of a class, with those inherited from unimem."""
    ours = [base for base in thing.__mro__ if base.__module__.startswith("unimem")]
    names = {name for base in ours for name in vars(base)}
    return sorted(name for name in names if not name.startswith("_"))


def python_names() -> dict[str, dict[str, list[str]]]:
    """Return the public names of the documented modules, and the members of classes."""
    # This needs no device.
    with mock.patch.object(importlib.import_module("unimem.backends.cuda_driver"), "require"):
        modules = {name: importlib.import_module(name) for name in MODULES}
    return {
        name: {
            public: members(getattr(module, public))
            if inspect.isclass(getattr(module, public))
            else []
            for public in module.__all__
        }
        for name, module in modules.items()
    }


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*|^[ \t]*#[^\n]*", "", text, flags=re.S | re.M)


def c_names() -> list[str]:
    """Return prototypes, types and constants of the C headers, without comments and attributes."""
    found = set()
    for path in sorted((ROOT / "native/include").glob("*.h")):
        text = without_comments(path.read_text())
        found |= {
            re.sub(r"\b(UM_API|UM_CHECKED)\b", "", " ".join(prototype.split())).strip()
            for prototype in re.findall(r"^UM_API\b[^;]*;", text, re.M)
        }
        found |= set(re.findall(r"\bUM_[A-Z0-9_]+(?=\s*[,=]|\s*\n\})", text))
        found |= set(re.findall(r"^\} (um_\w+);", text, re.M))
    return sorted(found)


def pxd_text(name: str) -> str:
    """Return a module's declarations, or those of the modules that a package imports them from."""
    path = ROOT / "src" / name.replace(".", "/")
    if path.is_dir():
        sources = re.findall(r"^from ([\w.]+) cimport", (path / "__init__.pxd").read_text(), re.M)
        return "".join(pxd_text(source) for source in sources)
    return path.with_suffix(".pxd").read_text()


def cython_names() -> dict[str, list[str]]:
    """Return the classes for ``cimport`` by module, and the C functions of the bindings."""
    texts = {name: pxd_text(name) for name in (*CYTHON, "unimem._core.native")}
    found = {name: sorted(re.findall(r"^cdef class (\w+)", texts[name], re.M)) for name in CYTHON}
    native = re.findall(r"\b(um_\w+)\(", texts["unimem._core.native"])
    return found | {"unimem._core.native": sorted(set(native))}


def options() -> dict[str, list[str]]:
    """Return arguments and options of every command, as in ``--help``."""
    import typer

    command: Any = typer.main.get_command(importlib.import_module("unimem.cli")._app())
    return {
        name: sorted("/".join([*each.opts, *each.secondary_opts]) for each in sub.params)
        for name, sub in command.commands.items()
    }


def fields(schema: Any, path: str = "") -> Iterator[str]:
    """Yield the path of every property in a JSON schema."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "properties":
                for name, of_property in value.items():
                    yield f"{path}/{name}"
                    yield from fields(of_property, f"{path}/{name}")
            elif key == "$defs":
                for name, definition in value.items():
                    yield from fields(definition, f"#{name}")
            else:
                yield from fields(value, path)
    elif isinstance(schema, list):
        for value in schema:
            yield from fields(value, path)


def schemas() -> dict[str, list[str]]:
    """Return the fields of the JSON documents with published schemas."""
    return {
        path.stem: sorted(set(fields(json.loads(path.read_text()))))
        for path in sorted((ROOT / "docs/schemas").glob("*.json"))
    }


def public_names() -> dict[str, Any]:
    return {
        "python": python_names(),
        "cython": cython_names(),
        "c": c_names(),
        "options": options(),
        "json": schemas(),
    }


def as_lines(value: Any) -> str:
    """Write the lists as JSON, with several names in a line."""
    if isinstance(value, dict):
        rows = [f"{json.dumps(key)}: {as_lines(value[key])}" for key in sorted(value)]
        return "{\n" + ",\n".join(rows) + "}"
    lines = [""]
    for name in map(json.dumps, value):
        if lines[-1] and len(lines[-1]) + len(name) > 96:
            lines.append("")
        lines[-1] += f"{name}, "
    return f"[{chr(10).join(line.rstrip() for line in lines).removesuffix(',')}]"


if __name__ == "__main__":
    print(as_lines(public_names()))
