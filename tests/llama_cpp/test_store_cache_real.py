"""The real llama-cpp-python takes the first tokens of its prompts from a store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.contracts.things import MODEL
from support.project.checkout import ROOT
from support.servers.real_llama import python_with

PROMPT = "Once upon a time there was a little girl named Lily. " * 24  # 290 tokens


@pytest.mark.slow
def test_a_new_process_goes_on_from_the_store(tmp_path: Path) -> None:
    python = python_with("llama_cpp")

    def ask(store: str) -> Any:
        paths = [path for path in sys.path if path.endswith("-packages")]
        given = {"model": str(MODEL), "prompt": PROMPT, "store": store, "paths": paths}
        command = [python, str(ROOT / "tools/llama_binding.py"), json.dumps(given)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    plain, first, second = (ask(store) for store in ("", str(tmp_path), str(tmp_path)))
    assert plain["text"] == first["text"] == second["text"] != ""
    assert (first["n_taken"], second["n_taken"]) == (0, 256)
