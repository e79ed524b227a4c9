"""Imports between the rooms of the package run one way, and a newcomer sees few doors.

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
# A room is a folder, or a file at the top. It imports only rooms in lines above its own.
FLOORS = (
    {"errors"},
    {"base"},
    {"system", "remote", "models", "engine/text"},
    {"_core", "backends"},
    {"weights/stream"},
    {"kv", "weights", "buffers"},
    {"kv/snapshot", "weights/repack"},
    {"kv/cache", "staging", "accounting"},
    {"kv/store", "planning", "governor"},
    {"layout"},
    {"cuda"},
    {"torch"},
    {"engine", "transformers", "ray", "vllm", "llama_cpp", "lmcache", "sglang"},
    {"cli", "__main__"},
)
# The benchmarks; modules in one line may import each other.
BENCH_FLOORS = (
    {"record", "stats", "plain", "files", "run_folder", "empty_call"},
    {"rounds", "suite", "questions"},
    {"states", "huge_pages", "models", "weight_files", "buffer_instances", "kv_sides", "kv_rings"}
    | {"side_server", "unimem_side", "llama_cpp_side", "llama_start", "decoders", "decoding"}
    | {"memory", "cgroup", "timed", "timed_side", "kv_quants", "lmcache_side"}
    | {"llama_build", "llama_cpp", "llama_flags", "mixtures", "trained_mixture"}
    | {"policies", "read_ahead"},
    {"suites"},
    {"worker", "run", "advise"},
    {"texts", "tables", "answers", "markdown", "compare", "plots", "page"},
    {"cli"},
)
FLOOR, BENCH_FLOOR = (
    {room: number for number, rooms in enumerate(floors) for room in rooms}
    for floors in (FLOORS, BENCH_FLOORS)
)
MOST_ENTRIES = 27
IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+c?import[ \t]+(\([^)]*\)|[^\n#]+)|c?import[ \t]+([^\n#]+))",
    re.M,
)


def name_of(path: Path, package: str) -> str:
    parts = path.relative_to(PACKAGES[package].parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(package: str) -> dict[str, list[Path]]:
    """Return the files of each module; a module in Cython has up to three."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGES[package].rglob("*")):
        if path.suffix in {".py", ".pyi", ".pyx", ".pxd"}:
            found.setdefault(name_of(path, package), []).append(path)
    return found


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each module that a file imports from, with an imported name, or an empty one."""
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
    """Map each module to its imports within the package."""
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


def room_of(module: str) -> str:
    """Return the folder of a module of unimem, or its name at the top; "" for the face."""
    paths = sources("unimem")[module]
    folder = paths[0].parent.relative_to(PACKAGES["unimem"]).as_posix()
    return paths[0].stem.replace("__init__", "") if folder == "." else folder


def test_every_room_has_its_floor() -> None:
    assert {room_of(name) for name in sources("unimem")} - {""} == set(FLOOR)


def test_every_room_of_the_benchmarks_has_its_floor() -> None:
    there = PACKAGES["unimem_bench"].iterdir()
    rooms = {path.stem for path in there if path.suffix in {"", ".py", ".pyx"}}
    assert rooms - {"__init__", "__pycache__"} == set(BENCH_FLOOR)


def test_rooms_are_two_folders_deep_at_most() -> None:
    assert [room for room in FLOOR if room.count("/") > 1] == []


def test_few_entries() -> None:
    entries = {path.name for path in PACKAGES["unimem"].iterdir()} - {"py.typed", "__pycache__"}
    entries = {name for name in entries if not name.endswith(".pxd")}
    assert len(entries) <= MOST_ENTRIES, sorted(entries)


def test_no_import_runs_upwards(product: dict[str, set[str]]) -> None:
    found = []
    for name, targets in product.items():
        here = room_of(name)
        for target in targets - {"unimem"}:
            there = room_of(target) if here else ""  # the face may import all rooms
            if here != there and FLOOR[there] >= FLOOR[here]:
                found.append(f"{name} imports {target}")
    assert sorted(found) == []


def test_no_import_of_the_benchmarks_runs_upwards() -> None:
    found = []
    for name, targets in graph("unimem_bench").items():
        for target in targets - {"unimem_bench"}:
            here, there = name.split(".")[1], target.split(".")[1]
            if BENCH_FLOOR[there] > BENCH_FLOOR[here]:
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
