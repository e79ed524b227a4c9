"""Where the C library and its headers are."""

from __future__ import annotations

from ctypes import CDLL
from pathlib import Path

from unimem._core.library import get_include, get_library


def test_headers_and_library_are_installed() -> None:
    assert "um_block_map" in (Path(get_include()) / "unimem.h").read_text()
    assert CDLL(get_library()).um_huge_page_bytes() % 4096 == 0
