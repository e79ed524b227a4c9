"""A move to another version of ggml: what an index has, and the files that are rewritten."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import update  # ggml/update.py: see conftest.py
from support.project.checkout import ROOT
from support.project.ggml_archive import FOLDER, packed

LINKS = [
    "https://files/a/xllamacpp-2026.9.2.tar.gz#sha256=1",
    "https://files/b/xllamacpp-2026.10.1.tar.gz#sha256=2",
    "https://files/c/xllamacpp-2026.10.1-cp311-abi3-manylinux_2_28_x86_64.whl#sha256=3",
    "https://files/d/xllamacpp-2026.11.1rc1.tar.gz",
    "https://files/e/other-9.tar.gz",
]


def test_releases_are_source_distributions_in_order() -> None:
    found = update.releases("xllamacpp", LINKS)
    assert [release.version for release in found] == ["2026.9.2", "2026.10.1"]
    assert found[1] == update.Release(
        "xllamacpp", "2026.10.1", "xllamacpp-2026.10.1.tar.gz", LINKS[1]
    )
    link = "https://files/llama_cpp_python-0.3.36.tar.gz"
    (other,) = update.releases("llama-cpp-python", [link])
    assert other.file == "llama_cpp_python-0.3.36.tar.gz"


def test_an_archive_says_what_is_to_be_pinned(archive: bytes, source: dict[str, str]) -> None:
    release = update.Release("xllamacpp", "1.2.33", source["file"], "https://files")
    assert update.source_of(release, archive) == source
    found = update.look_into(archive)
    assert (found.folder, found.licence) == (FOLDER, "MIT\n")
    assert "ggml_free" in found.headers
    assert "struct ggml_backend_buffer" in found.headers
    other = release._replace(project="llama-cpp-python")
    assert update.source_of(other, archive)["llama_cpp"] == "unknown"
    with pytest.raises(SystemExit, match="no folder of the archive has ggml"):
        update.look_into(packed({"a/LICENSE": ""}))


def test_only_what_the_binding_uses_is_a_change() -> None:
    old = "GGML_API void ggml_free(int c); GGML_API int ggml_of_others(void);"
    assert update.changed(old, old.replace("int ggml_of_others", "long ggml_of_others")) == []
    (line,) = update.changed(old, old.replace("int c", "long c"))
    assert line.startswith("ggml_free\n")


def checkout(folder: Path) -> Path:
    """Copy the files that name the version."""
    names = ["ggml/source.json", "ggml/LICENSE.ggml", *(each[0] for each in update.VERSION_FILES)]
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((ROOT / name).read_bytes())
    return folder


def test_a_move_rewrites_all_that_names_the_version(tmp_path: Path, source: dict[str, str]) -> None:
    root = checkout(tmp_path)
    update.take(source, "MIT of another year\n", root)
    assert json.loads((root / "ggml/source.json").read_text()) == source
    assert (root / "ggml/LICENSE.ggml").read_text() == "MIT of another year\n"
    found = {
        name: re.findall(r'.*"(?:unimem-ggml==)?0\.27.*', (root / name).read_text())
        for name, *_ in update.VERSION_FILES
    }
    assert [len(lines) for lines in found.values()] == [1, 1, 1]
    assert 'version = "0.27.1"' in found["ggml/pyproject.toml"][0]
    assert '"unimem-ggml==0.27.*"' in found["pyproject.toml"][0]
    assert found["src/unimem/backends/ggml.py"] == ['VERSION = "0.27"']
    update.take(source, "MIT\n", root)  # the same once more


def test_a_version_in_an_unknown_place_changes_nothing(
    tmp_path: Path, source: dict[str, str]
) -> None:
    root = checkout(tmp_path)
    (root / "pyproject.toml").write_text("")
    with pytest.raises(ValueError, match=r"expected '\"unimem-ggml==[\d.]+\*\"' once, found it 0"):
        update.take(source, "MIT\n", root)
    assert (root / "ggml/source.json").read_bytes() == (ROOT / "ggml/source.json").read_bytes()


def test_the_newest_row_is_the_first() -> None:
    page = (ROOT / "docs/ggml.md").read_text()
    row = {name.strip(): name.strip() for name in update.TITLE.strip("|").split("|")}
    made = update.with_row(page, row)
    at = made.splitlines().index(update.TITLE)
    assert made.splitlines()[at + 2] == update.TITLE
    assert len(made.splitlines()) == len(page.splitlines()) + 1
    with pytest.raises(ValueError, match=r"docs/ggml.md: expected a table"):
        update.with_row("no table", row)


def test_the_tests_of_parity_are_there() -> None:
    assert [name for name in update.PARITY if not (ROOT / name).exists()] == []
