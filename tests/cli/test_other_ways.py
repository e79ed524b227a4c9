"""`unimem run` of an unsupported model names commands that work."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")

import unimem as um
from support.models.family_models import FAMILIES, write_family
from support.terminal.screens import MAIN, show
from unimem.base.text import format_bytes


def named(*arguments: object) -> tuple[list[str], list[str]]:
    """Return the sentences and commands on standard error for another architecture."""
    code, out, err = show("run", *arguments)
    assert (code, out) == (1, "")
    lines = err.splitlines()
    commands = [line.strip() for line in lines if line.startswith("    ")]
    return [line for line in lines if not line.startswith("    ")], commands


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "a folder, it's one"  # a shell needs quotes for it
    folder.mkdir()
    return write_family(folder / "m.gguf", FAMILIES["gemma2"])


def test_the_plan_includes_the_cache(model: Path) -> None:
    sentences, commands = named(model, "--ctx", "6000", "--kv-dtype", "q8_0")
    assert "architecture 'gemma2' is not supported" in sentences[0]
    plan = um.plan(model, ctx=6000, kv_dtype="q8_0")
    kv = f"{format_bytes(plan['kv'].nbytes)} for the KV cache of 6,000 tokens"
    assert f"{format_bytes(plan.total_bytes)}, with {kv}" in sentences[2]
    assert commands[0].endswith("--ctx 6000 --kv-dtype q8_0")
    assert len(commands) == len(sentences) - 2 == 3


def test_an_unknown_cache_is_explained(tmp_path: Path) -> None:
    keys = {"attention.head_count": 8, "wkv.head_size": 64}
    from dataclasses import replace

    family = replace(FAMILIES["gemma2"], arch="rwkv9", keys=keys)
    sentences, commands = named(write_family(tmp_path / "m.gguf", family))
    assert "without its KV cache, since the file does not say which layers" in sentences[2]
    assert len(commands) == 3


@pytest.mark.slow
def test_the_commands_work(model: Path, tmp_path: Path) -> None:
    """Each runs in a shell; the runtime is a program that opens its argument."""
    _, commands = named(model)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (
        ("unimem", f'exec {sys.executable} -c {shlex.quote(MAIN)} "$@"'),
        ("llama-server", 'head -c 4 "$2"'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    try:
        for command, expected in zip(
            commands, (r"Fits: .*gemma2, GGUF", "GGUF", "GGUF"), strict=True
        ):
            done = subprocess.run(
                ["sh", "-c", command],
                capture_output=True,
                text=True,
                timeout=300,
                env=environment,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert re.search(expected, done.stdout, re.S), command
    finally:
        show("stage", "--drop", model)
