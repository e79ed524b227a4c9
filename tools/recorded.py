"""Texts that tools write into documents between two marks, and their commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["commit", "put", "renew", "short_commit"]


def commit() -> str:
    """Return the commit that is checked out, with its day."""
    command = ["git", "log", "-1", "--format=%h of %cs"]
    root = Path(__file__).parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def short_commit() -> str:
    """Return the commit that is checked out, or "unknown"."""
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    root = Path(__file__).parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def put(page: Path, begin: str, text: str, end: str) -> None:
    """Put a text between two marks of a document, in place of the old one."""
    page.write_text(renew(page.read_text(), begin, text, end))


def renew(page: str, begin: str, text: str, end: str) -> str:
    """Return a page with a text between two marks; ValueError if the page lacks them."""
    head, found, rest = page.partition(begin)
    _, behind, tail = rest.partition(end)
    if not found or not behind:
        raise ValueError(f"the page lacks the lines {begin} and {end}")
    return f"{head}{begin}{text}{end}{tail}"
