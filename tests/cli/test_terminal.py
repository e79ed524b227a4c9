"""Text wrapped to the lines of a terminal."""

from __future__ import annotations

import pytest

pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
from unimem.cli import terminal


@pytest.mark.parametrize(("pieces", "lines"), [
    (["One day, ", "Maya wal", "ked"], ["One day,", "Maya", "walked"]),
    (["1234567 9"], ["1234567", "9"]),
    (["12345678 9"], ["12345678", "9"]),
    (["a\n\n  b"], ["a", "", "  b"]),
    (["ab abcdefghijkl"], ["ab", "abcdefgh", "ijkl"]),
    (["日本語日本語"], ["日本語日", "本語"]),
], ids=str)  # fmt: skip
def test_text_flows_in_lines_of_eight_columns(pieces: list[str], lines: list[str]) -> None:
    flow = terminal.Flow(8)
    shown = "".join(flow.push(piece) for piece in pieces) + flow.flush()
    assert [line.rstrip() for line in shown.split("\n")] == lines


def test_a_long_word_is_shown_as_it_arrives() -> None:
    assert terminal.Flow(8).push("abcdefghij") == "abcdefgh"
