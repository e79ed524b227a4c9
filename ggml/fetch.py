"""Fetches the pinned sources of ggml and llama.cpp, and unpacks what a build needs.

``python fetch.py FOLDER`` unpacks ggml; with ``--llama``, all of llama.cpp. The archive is a source
distribution of the package index, named by `source.json` and checked by its SHA-256. pip cannot
fetch it: it would build the distribution's metadata first. The archive is kept in the user's cache.
UNIMEM_GGML_ARCHIVE names one that is on this machine, and PIP_INDEX_URL another index.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import html.parser
import io
import json
import os
import shutil
import tarfile
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path

INDEX = "https://pypi.org/simple"
HERE = Path(__file__).resolve().parent
SECONDS = 120


def pinned() -> dict[str, str]:
    """Return what `source.json` names."""
    source: dict[str, str] = json.loads((HERE / "source.json").read_text())
    return source


class _Links(html.parser.HTMLParser):
    """The addresses of a page of the index."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if tag == "a" and name == "href"]


def read(url: str) -> bytes:
    """Return what an address answers."""
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        data: bytes = answer.read()
    return data


def links(project: str) -> list[str]:
    """List the addresses of a project's files on the index."""
    page = f"{os.environ.get('PIP_INDEX_URL', INDEX).rstrip('/')}/{project}/"
    parser = _Links()
    parser.feed(read(page).decode())
    return [urllib.parse.urljoin(page, link) for link in parser.found]


def cache() -> Path:
    """Return the folder that keeps archives; for a user without a home, one of temporary files."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if not base.is_absolute():
        base = Path(tempfile.gettempdir(), f"cache-{os.getuid()}")
    return base / "unimem-ggml"


def archive(source: Mapping[str, str]) -> bytes:
    """Return the archive; fetch it if no copy is on this machine.

    Raises
    ------
    SystemExit
        The index does not list the file, or its bytes are others than those that are pinned.
    """
    given = os.environ.get("UNIMEM_GGML_ARCHIVE")
    path = Path(given) if given else cache() / source["file"]
    if given or os.path.exists(path):
        return _checked(str(path), path.read_bytes(), source)
    wanted = [link for link in links(source["project"]) if f"/{source['file']}" in link]
    if not wanted:
        raise SystemExit(
            f"{source['file']}: the package index does not list it; set UNIMEM_GGML_ARCHIVE to a "
            "copy, or PIP_INDEX_URL to an index that has it"
        )
    data = _checked(wanted[0], read(wanted[0].partition("#")[0]), source)
    with contextlib.suppress(OSError):  # where nothing can be kept, it is fetched again
        _keep(path, data)
    return data


def _keep(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


def _checked(where: str, data: bytes, source: Mapping[str, str]) -> bytes:
    found = hashlib.sha256(data).hexdigest()
    if found != source["sha256"]:
        raise SystemExit(
            f"{where}: expected SHA-256 {source['sha256']} of {source['file']}, got {found}: "
            "delete that copy, or fetch it anew"
        )
    return data


def unpack(folder: Path, *, llama: bool = False, source: Mapping[str, str] | None = None) -> Path:
    """Unpack the sources into a folder, unless it has those of the same archive.

    Parameters
    ----------
    folder : Path
        Is replaced if it holds other sources.
    llama : bool
        All of llama.cpp, not only ggml.
    source : mapping, optional
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
    with tarfile.open(fileobj=io.BytesIO(archive(source))) as tar:
        # Python 3.11.3 and older have no filters; the archive's hash is known.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        for member in tar:
            if member.name.startswith(tuple(prefix + part for part in parts)):
                member.name = member.name.removeprefix(prefix)
                tar.extract(member, folder)
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
