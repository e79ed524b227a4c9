"""Pinned sources come from an index, the cache or a given file, and only with the right hash."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

import fetch  # ggml/fetch.py: see conftest.py
from support.project.checkout import ROOT


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


GGML = {
    ".unpacked",
    "LICENSE",
    "ggml/CMakeLists.txt",
    "ggml/ggml.pc.in",
    "ggml/include/ggml.h",
    "ggml/src/ggml-backend-impl.h",
}


def test_sources_are_unpacked_once(index: Path, source: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "sources"
    assert names(fetch.unpack(folder, source=source)) == GGML
    (folder / "ggml/CMakeLists.txt").write_text("ours")
    (index / source["file"]).unlink()
    fetch.unpack(folder, source=source)
    assert (folder / "ggml/CMakeLists.txt").read_text() == "ours"
    # All of llama.cpp replaces it, and comes from the cache.
    assert names(fetch.unpack(folder, llama=True, source=source)) == GGML | {"src/llama.cpp"}


def test_a_given_archive_needs_no_index(
    index: Path, source: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (index / source["file"]).rename(tmp_path / "given.tar.gz")
    monkeypatch.setenv("UNIMEM_GGML_ARCHIVE", str(given))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1")
    assert names(fetch.unpack(tmp_path / "sources", source=source)) == GGML
    assert not fetch.cache().exists()


@pytest.mark.parametrize("where", ["on the index", "in the cache", "given"])
def test_other_bytes_are_refused(
    where: str, index: Path, source: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = index / source["file"]
    if where == "in the cache":
        bad = fetch.cache() / source["file"]
        bad.parent.mkdir(parents=True)
    elif where == "given":
        monkeypatch.setenv("UNIMEM_GGML_ARCHIVE", str(bad))
    bad.write_bytes(b"another")
    with pytest.raises(SystemExit, match=f"expected SHA-256 {source['sha256']} of "):
        fetch.archive(source)
    assert where == "in the cache" or not fetch.cache().exists()


@pytest.mark.usefixtures("index")
def test_a_file_that_the_index_lacks_is_named(source: dict[str, str]) -> None:
    with pytest.raises(SystemExit, match=r"xllamacpp-9\.tar\.gz: the package index does not list"):
        fetch.archive(source | {"file": "xllamacpp-9.tar.gz"})


@pytest.mark.usefixtures("index")
def test_a_cache_that_cannot_be_written_is_no_error(
    source: dict[str, str], archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made in it
    assert fetch.archive(source) == archive


def test_a_user_without_a_home_keeps_a_temporary_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it answers such a user
    assert fetch.cache() == Path(tempfile.gettempdir(), f"cache-{os.getuid()}", "unimem-ggml")


def test_what_is_pinned_is_whole() -> None:
    pinned = fetch.pinned()
    assert pinned["file"] == f"{pinned['project']}-{pinned['version']}.tar.gz"
    assert pinned["folder"].startswith(f"{pinned['project']}-{pinned['version']}/")
    assert len(pinned["sha256"]) == 64
    assert f'version = "{pinned["ggml"]}"' in (ROOT / "ggml/pyproject.toml").read_text()
