"""The Python of the documents is accepted by mypy and pyright, as by a reader's editor."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.project.checkout import ROOT

# Names that a snippet takes from the program of its reader.
GIVEN = {
    "llama-cpp-1": "import unimem as um\nstore = um.KVStore('kv', ram_bytes=1)\n"
    "blob, tokens, prompt_tokens = b'', [1], [1]\n",
    "remote-0": "import unimem as um\nkv, ids = um.KVCache(1, 1, 1, 1), [1]\n",
    # By its own types, a model of transformers 5.23 has no `generate`: its `device` is a property.
    "transformers-0": "# pyright: reportAttributeAccessIssue=false\n",
}
AFTER_THE_ONE_BEFORE = ("transformers-1", "weights-1")
CHECKERS = {
    "mypy": ("--config-file=", "--check-untyped-defs", "--ignore-missing-imports", "--no-pretty"),
    "pyright": ("--project=.",),
}


def snippets() -> dict[str, str]:
    """Return the Python blocks of the documents, by page and number."""
    found: dict[str, str] = {}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)
        for i, text in enumerate(blocks):
            name = f"{page.stem}-{i}"
            before = found[f"{page.stem}-{i - 1}"] if name in AFTER_THE_ONE_BEFORE else ""
            found[name] = GIVEN.get(name, "") + before + text
    return found


@pytest.mark.slow  # each reads the whole package
@pytest.mark.parametrize("checker", CHECKERS)
def test_every_snippet_is_accepted(checker: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} (extra check) is not installed: make check")
    texts = snippets()
    assert len(texts) > 40
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    source = str(ROOT / "src")
    settings: dict[str, object] = {
        "extraPaths": [source],
        "typeCheckingMode": "standard",
        "pythonVersion": "3.11",
    }
    # A snippet shows attributes without using them, and peers may be missing.
    settings |= {"reportUnusedExpression": False, "reportMissingImports": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    words = [sys.executable, "-m", checker, *CHECKERS[checker], "."]
    if checker == "mypy":  # names with a hyphen are no modules
        words = [*words[:-1], "--scripts-are-modules", *sorted(f"{name}.py" for name in texts)]
    env = os.environ | {"MYPYPATH": source}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
