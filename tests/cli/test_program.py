"""Parts common to all commands: version, complete help, shell completion and readable sizes."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.project.tiers import slow_after

pytest.importorskip("typer", reason="the command line needs typer: pip install '.[cli]'")

import typer

from support.terminal.screens import run_anew, show
from unimem import cli
from unimem.base.install_hint import install_hint

PROGRAM: Any = typer.main.get_command(cli._app())
COMMANDS: dict[tuple[str, ...], Any] = {(): PROGRAM}
COMMANDS |= {(name,): command for name, command in PROGRAM.commands.items()}


def test_the_version() -> None:
    version = importlib.metadata.version("unimem-llm")
    assert show("--version") == (0, f"unimem {version}\n", "")
    assert show("--version", "plan", "none.gguf").out == f"unimem {version}\n"


@pytest.mark.parametrize("columns", [80, None], ids=["terminal", "pipe"])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0] if words else "unimem")
def test_help_is_complete_at_80_columns(command: tuple[str, ...], columns: int | None) -> None:
    """No word is cut or broken, and each option has its full text."""
    screen = show(*command, "--help", columns=columns, COLUMNS="80")
    assert (screen.code, screen.err) == (0, "")
    assert screen.widest <= 80
    _, *lines = screen.lines
    assert not any("…" in line or "..." in line for line in lines)
    text = " ".join(screen.plain.split())
    for each in COMMANDS[command].params:
        assert all(name in text for name in each.opts if name.startswith("-"))
        assert " ".join((getattr(each, "help", None) or "").split()) in text
    for name, sub in getattr(COMMANDS[command], "commands", {}).items():
        summary = sub.help.split("\n\n")[0].rstrip(".")
        assert f"{name} {' '.join(summary.split())}" in text


# ---- completion ---------------------------------------------------------------------------------

# Completion in bash after `eval "$(unimem --show-completion)"` and the Tab key.
COMPLETE = """
eval "$(_UNIMEM_COMPLETE=source_bash unimem)"
complete -p unimem
COMP_WORDS=(unimem run --kv-dtype "") COMP_CWORD=3
_unimem_completion unimem
echo "${COMPREPLY[@]}"
"""


def test_bash_completes_the_command_s_suggestions(tmp_path: Path) -> None:
    program = tmp_path / "unimem"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nfrom unimem_command import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    made = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.stderr == ""
    how, completions = made.stdout.splitlines()
    assert "-o default" in how  # where there is no completion, names of files
    assert completions == "f32 f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1 iq4_nl"


@pytest.mark.parametrize(("words", "completions"), [
    ("unimem pl", ["plan"]),
    ("unimem run --kv", ["--kv-dtype"]),
    ("unimem plan some/fil", []),
])  # fmt: skip
def test_commands_and_options_are_completed(words: str, completions: list[str]) -> None:
    last = str(len(words.split()) - 1)
    screen = show(_UNIMEM_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=last)
    assert (screen.code, screen.out.split(), screen.err) == (0, completions, "")


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in show("--help").out
    shown = show("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_UNIMEM_COMPLETE=complete_bash" in shown.out


# ---- extras -------------------------------------------------------------------------------------

# A command without some packages: its message, and nothing but a sentence.
WITHOUT = """
import importlib.metadata, sys
sys.modules |= dict.fromkeys(MISSING)
def version(name, of=importlib.metadata.version):
    if name in MISSING:
        raise importlib.metadata.PackageNotFoundError(name)
    return of(name)
importlib.metadata.version = version
from unimem_command import main
sys.exit(main())
"""
ENGINE = ("unimem_ggml", "unimem-ggml", "tokenizers", "sentencepiece", "jinja2")


@pytest.mark.parametrize(("missing", "command", "extra"), slow_after(1, [
    (ENGINE, "run", "run"),
    (("unimem_ggml", "unimem-ggml"), "run", "run"),
]))  # fmt: skip
def test_a_missing_package_is_named_with_its_extra(
    missing: tuple[str, ...], command: str, extra: str
) -> None:
    screen = run_anew(command, code=WITHOUT.replace("MISSING", repr(missing)))
    assert (screen.code, screen.out) == (1, "")
    assert screen.err.endswith(f": {install_hint(extra)}\n")
    assert screen.err.count("\n") == 1


def test_a_plan_needs_no_engine() -> None:
    screen = run_anew("plan", "--ctx", "64", code=WITHOUT.replace("MISSING", repr(ENGINE)))
    assert (screen.code, screen.err) == (0, "")
    assert screen.out.startswith("Fits: ")


# ---- one and several ----------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "words"), [
    (["plan", "--ctx", "1"], "context 1 token ("),
    (["plan", "--ctx", "1", "--batch", "2"], "2 streams"),
    (["run", "-n", "1", "--ctx", "9"], "text 1 token (the limit)"),
    (["run", "-n", "1", "--threads", "1"], "4 layers, KV f16, 1 thread "),
])  # fmt: skip
def test_single_things_are_named_in_the_singular(arguments: list[str], words: str) -> None:
    screen = show(*arguments)
    assert screen.code == 0
    assert words in " ".join(screen.out.split())
