"""Each module of unimem has a test file with its name in the folder of its room."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support.project.checkout import ROOT

PACKAGE, TESTS = ROOT / "src/unimem", ROOT / "tests"


def modules() -> Iterator[Path]:
    """Yield the files of modules, relative to the package, without faces and entry points."""
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in {".py", ".pyx"} and not path.stem.startswith("__"):
            yield path.relative_to(PACKAGE)


def test_each_module_has_a_test_file_that_begins_with_its_name() -> None:
    assert len(list(modules())) > 150
    missing = [
        path.as_posix()
        for path in modules()
        if not (TESTS / path.parent / f"test_{path.stem}.py").is_file()
        and not list((TESTS / path.parent).glob(f"test_{path.stem}_*.py"))
    ]
    assert missing == []


def test_helpers_are_imported_from_their_package() -> None:
    """`from support.files import gguf_files`, not `import gguf_files`."""
    helpers = {path.stem for path in (TESTS / "support").rglob("*.py")} - {"__init__"}
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "."]
            found += [f"{path.name}: {name}" for name in names if name.split(".")[0] in helpers]
    assert found == []


def test_tools_name_tests_that_are_there() -> None:
    table = (ROOT / "tools/mutants/table.py").read_text()
    patterns = set(re.findall(r"tests/[\w/*]+\.py", table))
    assert len(patterns) > 10
    assert sorted(each for each in patterns if not list(ROOT.glob(each))) == []
    lost = []
    for line in (ROOT / "tools/wheels/not_emulated.txt").read_text().splitlines():
        path, _, name = line.partition("::")
        if not line.startswith("#"):
            text = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
            if f"def {name}" not in text:
                lost.append(line)
    assert lost == []
