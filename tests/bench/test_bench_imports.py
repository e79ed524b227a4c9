"""Which modules of the harness import which: from the command down to plain facts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import unimem_bench

ROOT = Path(unimem_bench.__file__).parent

# Each imports its own group and those before it.
GROUPS = (
    {"record", "stats", "plain", "files", "run_folder"},
    {"rounds", "suite"},
    {"states", "huge_pages", "models", "weight_files", "buffer_instances", "kv_sides", "kv_rings"}
    | {"side_server", "unimem_side", "llama_cpp_side", "llama_start", "decoders", "decoding"},
    {"suites"},
    {"worker", "run", "advise"},
    {"texts", "tables", "markdown", "compare", "plots", "page"},
    {"cli"},
)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"}


def imports(path: Path) -> Iterator[str]:
    """The modules of the harness that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [full if (full := f"{base}.{a.name}")[13:] in MODULES else base
                     for a in node.names]  # fmt: skip
        else:
            continue
        yield from (name[13:] for name in names if name.startswith("unimem_bench."))


def group_of(module: str) -> int:
    (index,) = (i for i, group in enumerate(GROUPS) if module.split(".", maxsplit=1)[0] in group)
    return index


def test_every_module_has_a_group() -> None:
    assert {name.split(".")[0] for name in MODULES} == set().union(*GROUPS)


def test_no_import_runs_upwards() -> None:
    found = {(name, other) for name, path in MODULES.items() for other in imports(path)}
    assert len(found) > 100
    assert {pair for pair in found if group_of(pair[1]) > group_of(pair[0])} == set()


def test_there_is_no_circle() -> None:
    graph = {name: set(imports(path)) for name, path in MODULES.items()}
    assert set(TopologicalSorter(graph).static_order()) == set(MODULES)
