"""Documents name existing paths, and the table of docs/design.md is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.project.checkout import ROOT

GENERATED = ROOT / "docs/benchmarks.md"
DOCUMENTS = sorted(
    {
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *(ROOT / "docs").rglob("*.md"),
    }
    - {GENERATED}
)
FOLDERS = "src|native|bench|tests|tools|docs|examples"


def rows_of_the_map() -> list[list[str]]:
    """Return the paths in each row of the table "To change X, open Y"."""
    text = (ROOT / "docs/design.md").read_text()
    table = text.partition("\n## To change X, open Y\n")[2].partition("\n## ")[0]
    rows = table.partition("|---|---|\n")[2].strip().splitlines()
    return [re.findall(r"`([^`]+)`", row.split(" | ")[1]) for row in rows]


def test_the_map_has_rows_of_few_paths() -> None:
    rows = rows_of_the_map()
    assert len(rows) > 20
    assert {len(paths) for paths in rows} <= {1, 2, 3}


def test_every_path_of_the_map_exists() -> None:
    paths = [path for row in rows_of_the_map() for path in row]
    assert [path for path in paths if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_of_a_document_exists(document: Path) -> None:
    paths = set(re.findall(rf"(?<![\w./])(?:{FOLDERS})/[\w./*-]*\w", document.read_text()))
    assert sorted(path for path in paths if not list(ROOT.glob(path))) == []


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_of_a_document_leads_somewhere(document: Path) -> None:
    lost = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text()):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []


def test_the_list_of_documents_is_whole() -> None:
    folder = ROOT / "docs"
    links = re.findall(r"^- \[[^]]+\]\(([\w/-]+\.md)\)", (folder / "README.md").read_text(), re.M)
    pages = {path.relative_to(folder).as_posix() for path in folder.rglob("*.md")} - {"README.md"}
    assert sorted(links) == sorted(pages)
