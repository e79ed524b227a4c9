"""The rooms of the package: imports run one way, and a newcomer sees few doors.

Every import counts: those inside functions, those for types only, and those of Cython.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from support.project.checkout import ROOT

PACKAGES = {"unimem": ROOT / "src/unimem", "unimem_bench": ROOT / "bench/unimem_bench"}
# From the ground up. A room imports rooms of lines above its own; those of one line know nothing of
# each other.
FLOORS = (
    {"errors"},
    {"system"},
    {"_core"},
    {"kv"},
    {"weights"},
    {"buffers", "accounting"},
    {"planning"},
    {"layout"},
    {"cuda", "ray", "torch", "transformers", "vllm"},
    {"engine"},
    {"cli", "__main__"},
)
# The same of the benchmarks, but those of one line may know each other.
BENCH_FLOORS = (
    {"record", "stats", "plain", "files", "run_folder"},
    {"rounds", "suite"},
    {"states", "huge_pages", "models", "weight_files", "buffer_instances", "kv_sides", "kv_rings"}
    | {"side_server", "unimem_side", "llama_cpp_side", "llama_start", "decoders", "decoding"}
    | {"memory", "cgroup", "timed", "timed_side", "kv_quants"},
    {"suites"},
    {"worker", "run", "advise"},
    {"texts", "tables", "answers", "markdown", "compare", "plots", "page"},
    {"cli"},
)
FLOOR, BENCH_FLOOR = (
    {room: number for number, rooms in enumerate(floors) for room in rooms}
    for floors in (FLOORS, BENCH_FLOORS)
)
MOST_ENTRIES = 18
IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+c?import[ \t]+(\([^)]*\)|[^\n#]+)|c?import[ \t]+([^\n#]+))",
    re.M,
)


def name_of(path: Path, package: str) -> str:
    parts = path.relative_to(PACKAGES[package].parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(package: str) -> dict[str, list[Path]]:
    """The files of each module: a module in Cython has up to three."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGES[package].rglob("*")):
        if path.suffix in {".py", ".pyi", ".pyx", ".pxd"}:
            found.setdefault(name_of(path, package), []).append(path)
    return found


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Each module that a file imports from, with a name that it imports, or an empty one."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in {".py", ".pyi"}:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: a relative import"
                yield from ((node.module or "", alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names)
        return
    for module, names, modules in IMPORT.findall(text):
        for item in (names or modules).strip("() \n").split(","):
            if word := item.split(" as ")[0].strip():
                yield (module, word) if module else (word, "")


@cache
def graph(package: str) -> dict[str, set[str]]:
    """The modules that each module imports, within the package."""
    modules = sources(package)
    found: dict[str, set[str]] = {}
    for name, paths in modules.items():
        found[name] = set()
        for path in paths:
            for module, item in imported(path):
                target = f"{module}.{item}" if f"{module}.{item}" in modules else module
                if target.split(".")[0] == package and target != name:
                    found[name].add(target)
    return found


@pytest.fixture(scope="module")
def product() -> dict[str, set[str]]:
    found = graph("unimem")
    assert len(found) > 90, "the modules were not found"
    assert sum(map(len, found.values())) > 300, "their imports were not found"
    return found


@pytest.mark.parametrize(("package", "floor"), [("unimem", FLOOR), ("unimem_bench", BENCH_FLOOR)])
def test_every_room_has_its_floor(package: str, floor: dict[str, int]) -> None:
    rooms = {path.stem for path in PACKAGES[package].iterdir() if path.suffix in {"", ".py"}}
    assert rooms - {"__init__", "__pycache__"} == set(floor)


def test_few_entries() -> None:
    entries = {path.name for path in PACKAGES["unimem"].iterdir()} - {"py.typed", "__pycache__"}
    entries = {name for name in entries if not name.endswith(".pxd")}
    assert len(entries) <= MOST_ENTRIES, sorted(entries)


def test_no_import_runs_upwards(product: dict[str, set[str]]) -> None:
    found = []
    for name, targets in (product | graph("unimem_bench")).items():
        for target in targets - {*PACKAGES}:
            if name in PACKAGES:
                continue  # the face, which has all rooms below it
            here, there = name.split(".")[1], target.split(".")[1]
            is_bench = name.startswith("unimem_bench.")
            floor = BENCH_FLOOR if is_bench else FLOOR
            # Of a line of the benchmarks, those below it and itself.
            if here != there and floor[there] >= floor[here] + is_bench:
                found.append(f"{name} imports {target}")
    assert sorted(found) == []


def test_no_room_imports_the_face(product: dict[str, set[str]]) -> None:
    assert sorted(name for name, targets in product.items() if "unimem" in targets) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle_of_modules(package: str) -> None:
    try:
        TopologicalSorter(graph(package)).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        ("a.py", "def f():\n    from unimem.kv import cache", [("unimem.kv", "cache")]),
        ("a.py", "if TYPE_CHECKING:\n    import unimem", [("unimem", "")]),
        ("a.pyx", "from unimem._core cimport (\n  a)", [("unimem._core", "a")]),
        ("a.pxd", "from unimem.kv cimport a as b", [("unimem.kv", "a")]),
        ("a.pxd", "cimport unimem.kv.cache.cache as um", [("unimem.kv.cache.cache", "")]),
        ("a.pyx", "def f():\n    import unimem.cli", [("unimem.cli", "")]),
        ("a.pyx", ">>> import unimem", []),
    ],
)  # fmt: skip
def test_imports(tmp_path: Path, name: str, line: str, expected: list[tuple[str, str]]) -> None:
    (tmp_path / name).write_text(line)
    assert list(imported(tmp_path / name)) == expected
