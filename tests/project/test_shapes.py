"""The shapes of functions and classes inside: few parameters, few bases, plain literals."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from support.project.checkout import ROOT

SRC = ROOT / "src"
MOST_PARAMETERS, MOST_BASES = 9, 2
# Public keyword forms: a call names its options. `run` and `stage` are commands.
PUBLIC_FORMS = {
    "Block.__init__", "Decoder.__init__", "KVCache.__init__", "KVRows.storage_bytes",
    "KVStoreTier.__init__", "PagedKVCache.__init__", "chat", "open_weights", "plan", "run",
    "serve_slots", "stage", "store",
}  # fmt: skip
# A function of Cython: its name, and its parameters up to the parenthesis that ends them.
CYTHON = re.compile(
    r"^( *)(?:(?:cdef|cpdef|def)\s+(?!class\b|extern\b)[\w\s*\[\],]*?)(\w+)\(", re.M
)
CYTHON_CLASS = re.compile(r"^(?:cdef )?class (\w+)(?:\(([^)]*)\))?", re.M)
CYTHON_STAR = re.compile(r"""\*[(\[]\s*["'\d][^)\]]*[)\]](?!\s*\*)""")


@cache
def sources() -> dict[str, str]:
    """The text of each file, by its path."""
    files = [path for path in sorted(SRC.rglob("*")) if path.suffix in {".py", ".pyi", ".pyx"}]
    assert len(files) > 150, "the sources were not found"
    return {path.relative_to(SRC).as_posix(): path.read_text() for path in files}


def count_python(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = node.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def python_functions(text: str) -> Iterator[tuple[str, int]]:
    """The qualified name of each function, and how many parameters it has."""

    def walk(node: ast.AST, scope: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", "")
            inside = f"{scope}{name}." if name and not isinstance(child, ast.alias) else scope
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{scope}{child.name}", count_python(child)
            yield from walk(child, inside)

    yield from walk(ast.parse(text), "")


def cython_functions(text: str) -> Iterator[tuple[str, int]]:
    owner = ""
    for line in re.finditer(rf"{CYTHON_CLASS.pattern}|{CYTHON.pattern}", text, re.M):
        if line[1]:
            owner = line[1]
            continue
        parts, depth, start = [""], 0, line.end()
        for char in text[start:]:
            depth += (char in "([{") - (char in ")]}")
            if depth < 0:
                break
            parts = [*parts, ""] if char == "," and depth == 0 else [*parts[:-1], parts[-1] + char]
        names = [part.strip() for part in parts if part.strip().strip("*/")]
        names = names[1:] if names[:1] in (["self"], ["cls"]) else names
        yield f"{owner}.{line[4]}" if line[3] else line[4], len(names)


def functions(path: str, text: str) -> Iterator[tuple[str, int]]:
    if path.endswith(".pyi"):
        return iter(())  # the .pyx has them
    return (cython_functions if path.endswith(".pyx") else python_functions)(text)


def test_functions_inside_have_few_parameters() -> None:
    found = {
        (path, name): n
        for path, text in sources().items()
        for name, n in functions(path, text)
        if n > MOST_PARAMETERS
    }
    inside = {key: n for key, n in found.items() if key[1] not in PUBLIC_FORMS}
    assert sorted(f"{path}: {name} has {n}" for (path, name), n in inside.items()) == []
    assert sorted(PUBLIC_FORMS - {name for _, name in found}) == [], "these need no exception"


@cache
def bases() -> dict[str, tuple[str, ...]]:
    """The names of the bases of each class; names are unique enough within one file."""
    found: dict[str, tuple[str, ...]] = {}
    for path, text in sources().items():
        if path.endswith(".pyx"):
            for name, given in CYTHON_CLASS.findall(text):
                found[f"{path}:{name}"] = tuple(each.strip() for each in given.split(",") if each)
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and not path.endswith(".pyi"):
                names = tuple(ast.unparse(each).partition("[")[0] for each in node.bases)
                found[f"{path}:{node.name}"] = names
    return found


def own_depth(key: str, seen: frozenset[str] = frozenset()) -> int:
    """The length of the longest ladder of our own classes above a class."""
    path = key.partition(":")[0]
    depths = [0]
    for name in bases()[key]:
        short = name.rpartition(".")[2]
        same = f"{path}:{short}"
        places = [same] if same in bases() and same != key else imported(path, short)
        depths += [1 + own_depth(each, seen | {key}) for each in places if each not in seen]
    return max(depths)


def imported(path: str, name: str) -> list[str]:
    """Our own class that a file imports by a name."""
    pattern = rf"from (unimem[\w.]*) c?import (?:\([^)]*\b|[^\n(]*\b){name}\b"
    modules = re.findall(pattern, sources()[path])
    files = [f"{module.replace('.', '/')}{end}" for module in modules for end in (".py", ".pyx")]
    return [f"{file}:{name}" for file in files if f"{file}:{name}" in bases()]


def test_no_class_is_a_ladder_of_our_own() -> None:
    depths = {key: own_depth(key) for key in bases()}
    assert sorted(f"{key} has {n}" for key, n in depths.items() if n > MOST_BASES) == []


def test_no_override_changes_a_signature() -> None:
    found = [path for path, text in sources().items() if "type: ignore[override]" in text]
    assert found == []


def star_literals(path: str, text: str) -> Iterator[int]:
    """The lines in which a literal is unpacked in place."""
    if path.endswith(".pyx"):
        yield from (1 + text[: found.start()].count("\n") for found in CYTHON_STAR.finditer(text))
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Starred) and isinstance(node.value, (ast.Tuple, ast.List, ast.Set)):
            yield node.lineno
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            yield from (v.lineno for k, v in pairs if k is None and isinstance(v, ast.Dict))
        elif isinstance(node, ast.Call):
            given = [each.value for each in node.keywords if each.arg is None]
            yield from (value.lineno for value in given if isinstance(value, ast.Dict))


def test_literals_are_plain() -> None:
    found = [
        f"{path}:{line}" for path, text in sources().items() for line in star_literals(path, text)
    ]
    assert found == []


def test_shapes_are_seen() -> None:
    text = "class A:\n    def f(self, a, *, b=(1, 2)): ...\ndef g(c, *d, **e): ...\n"
    assert [*python_functions(text)] == [("A.f", 2), ("g", 1)]
    text = "cdef class A(B):\n    cdef int f(self, int a, b=(1, 2)) except -1:\n"
    text += "\ndef g(c,\n  d): ...\n"
    assert [*cython_functions(text)] == [("A.f", 2), ("g", 2)]
    text = "(*(1, 2), 3)\n[*a, *[0] * 2]\n{**{1: 2}}\nf(**{'a': 1}, **b)\n"
    assert sorted(star_literals("a.py", text)) == [1, 3, 4]
    assert [*star_literals("a.pyx", text)] == [1]
