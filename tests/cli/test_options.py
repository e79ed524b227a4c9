"""Numeric options with units."""

from __future__ import annotations

import pytest

pytest.importorskip("typer", reason="the command line needs typer: pip install '.[cli]'")
import typer

from support.terminal.screens import show
from unimem.cli.options import number_parser


@pytest.mark.parametrize(("text", "value"), [
    ("1", 1), ("8192", 8192), ("8k", 8192), ("8K", 8192), ("1.5k", 1536), ("16G", 16 << 30),
    ("16GiB", 16 << 30), ("2mb", 2 << 20), ("1t", 1 << 40),
])  # fmt: skip
def test_numbers_as_people_write_them(text: str, value: int) -> None:
    assert number_parser(1, 1 << 40, "16G")(text) == value


@pytest.mark.parametrize("text", [
    "", " ", "0", "-1", "-8k", "nan", "inf", "1e3", "k", "8kk", "8 k", "1.5", "0.3k", "1.", "2t",
    "\uff10", "+8", "0x10", "9" * 5000, "8" + "0" * 17 + "t",
], ids=lambda text: text[:8])  # fmt: skip
def test_invalid_numbers_are_refused_with_examples(text: str) -> None:
    with pytest.raises(typer.BadParameter) as refused:
        number_parser(1, 1 << 40, "512M or 16G")(text)
    said = str(refused.value)
    assert said.startswith("expected a whole number from 1 to 1099511627776, as 512M or 16G; got ")
    assert len(said) < 130


def test_options_of_tokens_take_units() -> None:
    said = " ".join(show("plan", "--ctx", "1k", "--window", "0.25k").out.split())
    assert "context 1,024 tokens" in said
    assert "attention sees the last 256," in said
    screen = show("run", "-n", "64k", "--ctx", "1K", "-p", "Hi", "--threads", 1)
    assert screen.code == 3
    assert "65,536 more do not fit in the context of 1,024" in screen.err
    for command, option in (("plan", "--ctx"), ("plan", "--window"), ("run", "--tokens")):
        screen = show(command, option, "many")
        assert screen.code == 2
        said = " ".join(screen.err.split())
        assert f"'{option}'" in said
        assert "as 512, 8192 or 8k; got 'many'" in said
