"""Fetches the pinned sources of ggml and llama.cpp, and unpacks what a build needs.

``python fetch.py FOLDER`` unpacks ggml; with ``--llama``, all of llama.cpp. The archive is a source
distribution of the package index, named by `source.json` and checked by its SHA-256. pip cannot
fetch it: it would build the distribution's metadata first. The archive is kept in the user's cache.
UNIMEM_GGML_ARCHIVE names one that is on this machine, and PIP_INDEX_URL another index.
"""

from __future__ import annotations

import argparse
import hashlib
import html.parser
import json
import os
import shutil
import tarfile
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

INDEX = "https://pypi.org/simple"
HERE = Path(__file__).resolve().parent
SECONDS = 120


def pinned() -> dict[str, Any]:
    """Return what `source.json` names."""
    source: dict[str, Any] = json.loads((HERE / "source.json").read_text())
    return source


class _Links(html.parser.HTMLParser):
    """The addresses of a page of the index."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if tag == "a" and name == "href"]


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        data: bytes = answer.read()
    return data


def links(project: str) -> list[str]:
    """List the addresses of a project's files on the index."""
    page = f"{os.environ.get('PIP_INDEX_URL', INDEX).rstrip('/')}/{project}/"
    parser = _Links()
    parser.feed(_read(page).decode())
    return [urllib.parse.urljoin(page, link) for link in parser.found]


def cache() -> Path:
    """Return the folder that keeps archives."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "unimem-ggml"


def archive(source: dict[str, Any]) -> Path:
    """Return the archive's path; fetch it if no copy is on this machine.

    Raises
    ------
    SystemExit
        The index does not list the file, or its bytes are others than those that are pinned.
    """
    given = os.environ.get("UNIMEM_GGML_ARCHIVE")
    path = Path(given) if given else cache() / source["file"]
    if given or path.exists():
        _check(path, path.read_bytes(), source)
        return path
    wanted = [link for link in links(source["project"]) if f"/{source['file']}" in link]
    if not wanted:
        raise SystemExit(
            f"{source['file']}: the package index does not list it; set UNIMEM_GGML_ARCHIVE to a "
            "copy, or PIP_INDEX_URL to an index that has it"
        )
    data = _read(wanted[0].partition("#")[0])
    _check(Path(wanted[0]), data, source)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)
    return path


def _check(path: Path, data: bytes, source: dict[str, Any]) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != source["sha256"]:
        raise SystemExit(
            f"{path}: expected SHA-256 {source['sha256']} of {source['file']}, got {found}: "
            "delete that copy, or fetch it anew"
        )


def unpack(folder: Path, *, llama: bool = False, source: dict[str, Any] | None = None) -> Path:
    """Unpack the sources into a folder, unless it has those of the same archive.

    Parameters
    ----------
    folder : Path
        Is replaced if it holds other sources.
    llama : bool
        All of llama.cpp, not only ggml.
    source : dict, optional
        What to take, as in `source.json`.

    Returns
    -------
    Path
        `folder`, with ``ggml/`` and ``LICENSE``, or all of llama.cpp, below it.
    """
    source = source or pinned()
    stamp = folder / ".unpacked"
    wanted = f"{source['sha256']} {'llama.cpp' if llama else 'ggml'}\n"
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    prefix = source["folder"] + "/"
    parts = ("",) if llama else ("ggml/", "LICENSE")
    with tarfile.open(archive(source)) as tar:
        for member in tar:
            if member.name.startswith(tuple(prefix + part for part in parts)):
                member.name = member.name.removeprefix(prefix)
                tar.extract(member, folder, filter="data")
    # A template that the archive lacks; ggml's CMake files read it.
    (folder / "ggml" / "ggml.pc.in").touch()
    stamp.write_text(wanted)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama", action="store_true", help="all of llama.cpp")
    options = parser.parse_args()
    unpack(options.folder, llama=options.llama)
