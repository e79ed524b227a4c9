"""What the JSON documents of commands begin with."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

__all__ = ["document_head"]


def document_head(schema: str) -> dict[str, Any]:
    """Give the name of a schema, and the version of unimem that has written a document."""
    return {"schema": schema, "unimem": version("unimem-llm")}
