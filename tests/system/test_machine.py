"""The document of a machine's facts, and its schema."""

from __future__ import annotations

import dataclasses
import json

import unimem as um
from support.kernel.invented_machine import CGROUP_MEMORY, GIB, MEMLOCK, QUOTA, Invented, facts
from support.project.documents import check_document


def test_the_document_is_plain_and_complete(machine: Invented) -> None:
    CGROUP_MEMORY(machine)
    facts(memlock=MEMLOCK)(machine)
    found = um.doctor()
    document = json.loads(found.to_json())
    assert document == found.to_dict()
    assert list(document) == ["schema", *[field.name for field in dataclasses.fields(found)]]
    assert document["schema"] == "unimem.doctor/1"
    pages = {"total_pages": 100, "free_pages": 100, "reserved_pages": 0, "surplus_most_pages": 0}
    assert document["pools"]["2m"] == pages | {
        "page_bytes": 2 << 20,
        "available_bytes": 200 << 20,
        "cgroups": [],
        "nodes": {node: {"total_pages": 50, "free_pages": 50} for node in "01"},
    }
    assert document["memory"]["limits"][2]["room_bytes"] == 7 * GIB
    assert document["numa"]["nodes"]["1"]["distances"] == [21, 10]
    assert document["findings"][0]["run"] == "echo 256G > /sys/fs/cgroup/a/memory.max"


def test_documents_of_any_machine_follow_the_schema(machine: Invented) -> None:
    CGROUP_MEMORY(machine)
    facts(memlock=MEMLOCK)(machine)
    QUOTA(machine)
    check_document(um.doctor().to_dict())
