"""Install hints name a checkout or a wheel file, since no index has unimem."""

from __future__ import annotations

import ast
import sys
import tomllib

from support.project.checkout import ROOT
from unimem.base.install_hint import install_hint

sys.path.insert(0, str(ROOT / "tools"))
from requirements import requirements


def test_hints_name_both_ways() -> None:
    assert install_hint("run") == (
        "install unimem-llm with the extra 'run': "
        "pip install ./ggml '.[run]' in a checkout, or "
        "pip install ./unimem_ggml-FILE.whl './unimem_llm-FILE.whl[run]' of the two wheels"
    )
    assert install_hint("remote", "ray") == (
        "install unimem-llm with the extras 'remote' and 'ray': pip install '.[remote,ray]' "
        "in a checkout, or pip install './unimem_llm-FILE.whl[remote,ray]' of its wheel"
    )


def test_hints_name_ggml_for_the_extras_that_need_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in project["optional-dependencies"]:
        needs_ggml = any(need.startswith("unimem-ggml") for need in requirements([extra]))
        assert ("./ggml" in install_hint(extra)) is needs_ggml, extra


def test_messages_use_the_hint_and_name_existing_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named: set[str] = set()
    literal = []
    for path in sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]):
        text = path.read_text(encoding="utf-8")
        if "install unimem-llm with" in text and path.name != "install_hint.py":
            literal.append(path.name)
        if "install_hint(" in text:
            named |= {
                value.value
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "install_hint"
                for value in node.args
                if isinstance(value, ast.Constant) and isinstance(value.value, str)
            }
    assert literal == []
    assert {"run", "remote", "bench", "ray", "torch"} <= named
    assert named <= set(extras["optional-dependencies"])
