"""A block in a notebook."""

from __future__ import annotations

import unimem as um


def test_an_open_block_shows_request_and_placement() -> None:
    with um.Block(8192, name="<kv>", pages="4k", warm=True) as block:
        text = block._repr_html_()
    assert "Block &#x27;&lt;kv&gt;&#x27;" in text or "Block '&lt;kv&gt;'" in text
    assert all(word in text for word in ("8.0 KiB", "4k", "in RAM", "swapped out"))


def test_a_closed_block_is_its_repr() -> None:
    block = um.Block(8192, name="kv")
    block.close()
    assert "closed" in block._repr_html_()
