"""The stub of the binding, and the libraries that it chooses from."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.project.checkout import ROOT

binding = pytest.importorskip(
    "unimem_ggml.binding", reason="ggml is not installed: pip install ./ggml"
)


def test_the_stub_has_the_names_of_the_module() -> None:
    stub = ast.parse((ROOT / "ggml/src/unimem_ggml/binding.pyi").read_text())
    declared = {
        ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else node.name
        for node in stub.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AnnAssign)
    }
    assert declared == {name for name in vars(binding) if name[0] != "_"} - {"os"}


def test_the_libraries_name_no_folder_of_their_build() -> None:
    for path in (*binding.LIBRARIES, binding.__file__):
        data = Path(path).read_bytes()
        assert not re.search(rb"\W/[\w./-]+/ggml/src/", data), path
    assert binding.version()["commit"].startswith("b")


def chosen(**environment: str) -> str:
    """Import the binding anew; return the name of its backend, or the error."""
    program = "from unimem_ggml import binding as b; print(b.CPU_LIBRARY)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return Path(done.stdout.strip()).name or done.stderr.splitlines()[-1]


def test_one_build_is_chosen_and_another_can_be() -> None:
    prefix = "libunimem-ggml-cpu"
    names = [path.stem for path in Path(binding.BASE_LIBRARY).parent.glob(f"{prefix}*.so")]
    levels = sorted(name.removeprefix(prefix).removeprefix("-") or "native" for name in names)
    assert chosen(UNIMEM_GGML_CPU="").removesuffix(".so") in names
    assert chosen(UNIMEM_GGML_CPU="best") == (
        f"ImportError: UNIMEM_GGML_CPU=best: expected one of {', '.join(levels)}"
    )
    if "haswell" in levels:
        assert chosen(UNIMEM_GGML_CPU="haswell") == f"{prefix}-haswell.so"
    else:
        assert chosen(UNIMEM_GGML_CPU="native") == f"{prefix}.so"
