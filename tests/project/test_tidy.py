"""Rules of the house that no linter checks."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import unimem
import unimem.backends.cuda_driver
from support.project.checkout import ROOT

with mock.patch.object(unimem.backends.cuda_driver, "require"):  # no test here uses a device
    import unimem.cuda

# The larger tier has them, and `make check`.
pytestmark = pytest.mark.slow

FOLDERS = ("src", "tests", "native", "bench", "tools", "docs", "examples", ".ci", ".github")
CODE = {".py", ".pyx", ".pxd", ".c", ".h", ".cu"}
MOST_BODY_LINES = 60
TEXT = CODE | {".ipynb", ".md", ".toml", ".txt", ".sh", ".yml", ""}


@cache
def all_files() -> tuple[Path, ...]:
    """Return the files of the repository, except this one, which names what it forbids."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        found += (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return tuple(
        path
        for path in sorted(found)
        if path.suffix in TEXT
        and "__pycache__" not in path.parts
        and path not in (Path(__file__), ROOT / ".git")
    )


def files(suffixes: set[str]) -> list[Path]:
    return [path for path in all_files() if path.suffix in suffixes]


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def lines(suffixes: set[str]) -> Iterator[tuple[str, str]]:
    """Yield every line with its place."""
    for path in files(suffixes):
        name = path.relative_to(ROOT)
        for number, line in enumerate(text_of(path).splitlines(), 1):
            yield f"{name}:{number}", line


def places(pattern: str, suffixes: set[str] = TEXT) -> list[str]:
    """Return the places where a pattern is found."""
    wanted = re.compile(pattern, re.M)
    # Line by line is slow, so this searches only files that match.
    found = []
    for path in files(suffixes):
        if wanted.search(text_of(path)):
            name = path.relative_to(ROOT)
            found += [
                f"{name}:{number}: {line.strip()}"
                for number, line in enumerate(text_of(path).splitlines(), 1)
                if wanted.search(line)
            ]
    return found


# ---- text ----


def test_the_repository_is_found() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in files(TEXT)}
    assert {"README.md", "Makefile", ".ci/run", "src/unimem/_core/tape.pyx"} <= names
    assert len(names) > 60


@pytest.mark.parametrize(
    "pattern",
    [
        r"\b(TODO|FIXME|XXX)\b",
        r"pip install\b.*\bunimem\b",  # it is on no package index
        r"(?<![\w.])/(work|home|Users)/",
    ],
    ids=["a note of work to do", "a package that no index has", "a path of one machine"],
)
def test_no_line_has(pattern: str) -> None:
    assert places(pattern) == []


def test_lines_are_short() -> None:
    assert [place for place, line in lines(CODE) if len(line) > 100] == []


def statements(nodes: list[Any]) -> Iterator[ast.AST]:
    """Yield statements and nested statements, without expressions, most of a tree."""
    for node in nodes:
        yield node
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            yield from statements(getattr(node, field, []))


def function_bodies(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the functions of a Python file and their line counts without docstrings.

    A body of one statement is data, and may be long.
    """
    for node in statements(ast.parse(text_of(path)).body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if len(body) > 1:
                yield node.name, (node.end_lineno or 0) - body[0].lineno + 1


def test_functions_are_short() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}, {n} lines"
        for path in files({".py"})
        for name, n in function_bodies(path)
        if n > MOST_BODY_LINES and name not in WRITERS
    ]
    assert found == []


# Writers of a whole invented file or record, with a statement for each part.
WRITERS = {"sample_record", "write_model"}


def test_functions_in_c_are_short() -> None:
    found, n_functions = [], 0
    for path in files({".c"}):
        start: int | None = None
        for number, line in enumerate(text_of(path).splitlines(), 1):
            if start is None and re.search(r"\)\s*\{$", line):
                start = number
            elif line.startswith("}") and start is not None:
                n_functions += 1
                if number - start - 1 > MOST_BODY_LINES:
                    found.append(f"{path.relative_to(ROOT)}:{start}")
                start = None
    assert n_functions > 1000
    assert found == []


def test_no_two_classes_share_a_name() -> None:
    """Twins for GPUs and transformers may share names, and `Node`."""
    where: dict[str, list[str]] = {}
    for folder in ("src/unimem", "bench/unimem_bench"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".pyx"} and path.parent.name not in {"cuda", "transformers"}:
                for name in re.findall(r"^(?:cdef )?class (\w+)", path.read_text(), re.M):
                    where.setdefault(name, []).append(path.name)
    assert len(where) > 150
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {
        "Node": ["prefix.py", "limits.py"]
    }


def test_no_code_is_commented_out() -> None:
    """This checks Cython and C; ruff checks Python."""
    found = []
    for place, line in lines({".pyx", ".pxd"}):
        comment = line.strip().removeprefix("#").strip()
        if line.strip().startswith("#") and not comment.startswith("cython:") and is_code(comment):
            found.append(f"{place}: {comment}")
    found += places(r"^\s*(//|/\*).*[;{]\s*(\*/)?$", {".c", ".h", ".cu"})
    assert found == []


def is_code(text: str) -> bool:
    if re.match(r"(cdef|cpdef|cimport)\b.*[:)\]=\w]$", text):
        return True
    try:
        parsed = ast.parse(text).body
    except SyntaxError:
        return False
    # A comment of one word parses as a name, and a short list as a tuple.
    return any(not isinstance(s, ast.Expr) or isinstance(s.value, ast.Call) for s in parsed)


def test_only_the_command_line_prints() -> None:
    found = [
        place
        for place, line in lines({".py", ".pyx"})
        if place.startswith("src/unimem/")
        and not place.startswith(("src/unimem/cli/", "src/unimem/__main__.py"))
        and re.match(r"\s*print\(", line)
    ]
    assert found == []


# ---- native code ----


def test_one_file_makes_system_calls() -> None:
    headers = r"#include <(sys/(mman|stat|syscall|ioctl)|fcntl|unistd|sched|pthread|numaif)\.h>"
    users = {place.split(":")[0] for place in places(headers, {".c", ".h"})}
    core = [user for user in users if user.startswith("native/src/")]
    assert core == ["native/src/os/os_linux.c"]
    assert [user for user in users if user.startswith("native/include/")] == []


def test_every_source_file_has_its_test() -> None:
    sources = {path.stem for path in (ROOT / "native/src").rglob("*.c")}
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "native/tests").glob("test_*.c")}
    assert sorted(sources - tests) == []


def test_every_system_call_can_be_made_to_fail() -> None:
    calls = re.findall(r"^int (um__os_\w+)\(", (ROOT / "native/src/os/os.h").read_text(), re.M)
    assert "um__os_reserve" in calls
    wrappers = (ROOT / "native/tests/fault_os.c").read_text()
    assert [call for call in calls if call.removeprefix("um__os_") not in wrappers] == []


def test_every_function_of_the_header_is_declared_for_cython() -> None:
    pattern = r"\b(um_[a-z_]+)\("
    header = "".join(path.read_text() for path in sorted((ROOT / "native/include").glob("*.h")))
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    declared = set(re.findall(pattern, (ROOT / "src/unimem/_core/native.pxd").read_text()))
    assert sorted(set(re.findall(pattern, header)) - declared) == []


# ---- the package ----


def module_name(path: Path) -> str:
    return path.relative_to(ROOT / "src").with_suffix("").as_posix().replace("/", ".")


# Importing the room for transformers takes seconds; vLLM is not installed.
ROOMS_WITHOUT_INTERFACE = {"_core", "cli", "cuda", "engine", "transformers", "vllm"}
LEFT_OUT = {"lmcache.py", "sglang.py", "ggml.py"}  # not installed; ggml's own names
MODULES = sorted(
    module_name(path)
    for path in (ROOT / "src/unimem").rglob("*.py")
    if path.name not in {"__init__.py", *LEFT_OUT}
    and not ROOMS_WITHOUT_INTERFACE & set(path.relative_to(ROOT).parts)
    and "\n__all__ = " in text_of(path)
)
STUBS = sorted(module_name(path) for path in (ROOT / "src/unimem").rglob("*.pyx"))


def test_the_public_names_are_all_there_is() -> None:
    modules = {name for name, value in vars(unimem).items() if inspect.ismodule(value)}
    names = {name for name in vars(unimem) if not name.startswith("_")}
    assert sorted(names - modules | {"plan", "report"}) == unimem.__all__
    assert sorted(unimem.__all__) == unimem.__all__


@pytest.mark.parametrize("name", MODULES)
def test_all_names_exist(name: str) -> None:
    module = importlib.import_module(name)
    assert sorted(module.__all__) == list(module.__all__)
    assert [public for public in module.__all__ if not hasattr(module, public)] == []


def members_of(cls: type) -> Iterator[tuple[str, Any]]:
    ours = [base for base in cls.__mro__ if base.__module__.startswith("unimem")]
    for name in dict.fromkeys(name for base in ours for name in vars(base)):
        value = getattr(cls, name)
        is_property = isinstance(value, property) or inspect.isgetsetdescriptor(value)
        if not name.startswith("_") and (callable(value) or is_property):
            yield name, value


def public_things() -> Iterator[tuple[str, Any]]:
    """Yield the public names, and the methods and properties of classes."""
    named = {name: getattr(unimem, name) for name in unimem.__all__}
    named |= {f"cuda.{name}": getattr(unimem.cuda, name) for name in unimem.cuda.__all__}
    del named["cuda.CAPABILITIES"]
    for name, thing in named.items():
        yield name, thing
        if inspect.isclass(thing):
            for member, value in members_of(thing):
                # A plain attribute of a Cython class has no docstring; the class documents it.
                in_class = re.search(rf"^ *(.*, )?{member}\b.* : ", thing.__doc__ or "", re.M)
                if value.__doc__ is not None or not in_class:
                    yield f"{name}.{member}", value


THINGS = dict(public_things())
SECTIONS = {"Parameters", "Returns", "Yields", "Raises", "Warns", "Attributes", "Notes", "Examples"}
SECTIONS |= {"See Also", "References"}


@pytest.mark.parametrize("name", THINGS)
def test_docstrings_are_numpy_style(name: str) -> None:
    text = inspect.getdoc(THINGS[name])
    assert text, f"{name} has no docstring"
    rows = text.splitlines()
    assert rows[0].rstrip().endswith((".", ":")), "the first line is a sentence"
    assert len(rows) == 1 or rows[1] == "", "a blank line behind the first"
    for title, underline in itertools.pairwise(rows):
        if underline and set(underline) == {"-"}:
            assert title in SECTIONS
            assert len(underline) == len(title)


@pytest.mark.parametrize("name", THINGS)
def test_documented_parameters_are_those_of_the_signature(name: str) -> None:
    thing = THINGS[name]
    section = re.search(
        r"^Parameters\n-+\n(.*?)(\n\n\w|\Z)", inspect.getdoc(thing) or "", re.S | re.M
    )
    if section is None or not callable(thing):
        return
    parameters = inspect.signature(thing).parameters
    heads = re.findall(r"^(?! )([^:\n]+?)(?: :.*)?$", section[1], re.M)
    named = {part.strip(" *") for head in heads for part in head.split(",")}
    assert named == set(parameters) - {"self", "cls"}


@pytest.mark.parametrize("name", STUBS)
def test_stubs_name_what_the_module_has(name: str) -> None:
    module = importlib.import_module(name)
    for node in ast.parse((ROOT / "src" / f"{name.replace('.', '/')}.pyi").read_text()).body:
        if isinstance(node, ast.ClassDef) and hasattr(module, node.name):
            cls = getattr(module, node.name)
            in_stub = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            in_stub |= {
                ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)
            }
            there = {member for member in vars(cls) if not member.startswith("_")}
            assert {member for member in in_stub if not member.startswith("_")} == there
        elif isinstance(node, ast.FunctionDef):
            assert hasattr(module, node.name)


# ---- versions ----


def test_one_version() -> None:
    version = unimem.__version__
    header = (ROOT / "native/include/unimem.h").read_text()
    parts = [re.search(rf"UM_VERSION_{p} (\d+)", header) for p in ("MAJOR", "MINOR", "PATCH")]
    assert ".".join(part[1] for part in parts if part) == version
    # The package reads the version from the header, as CMake does.
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = settings["tool"]["scikit-build"]["metadata"]["version"]
    named = re.search(found["regex"], (ROOT / found["input"]).read_text())
    assert named is not None
    assert found["result"].format(**named.groupdict()) == version
    newest = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1].startswith((version, "Unreleased"))
