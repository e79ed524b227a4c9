"""JSON documents of commands and reports, which follow the schemas in docs/schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from support.project.checkout import ROOT


def check_document(document: Mapping[str, Any]) -> None:
    """Check a document by the schema that it names, such as ``unimem.plan/1``."""
    jsonschema = pytest.importorskip("jsonschema", reason="for documents: pip install '.[test]'")
    name = document["schema"].removeprefix("unimem.").replace("/", "-")
    schema = json.loads((ROOT / f"docs/schemas/{name}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)


def check_json(thing: Any) -> dict[str, Any]:
    """Check that the JSON of a report is its dict and follows the schema; return it."""
    document: dict[str, Any] = json.loads(thing.to_json())
    check_document(document)
    assert document == thing.to_dict()
    return document
