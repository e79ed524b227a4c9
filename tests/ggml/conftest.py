"""A small archive of ggml, and a package index that lists it."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from support.project.checkout import ROOT
from support.project.ggml_archive import FILE, FILES, FOLDER, packed

sys.path.insert(0, str(ROOT / "ggml"))


@pytest.fixture(scope="session")
def archive() -> bytes:
    return packed(FILES)


@pytest.fixture
def source(archive: bytes) -> dict[str, str]:
    """What source.json would say of the archive."""
    return {
        "project": "xllamacpp",
        "version": "1.2.33",
        "file": FILE,
        "sha256": hashlib.sha256(archive).hexdigest(),
        "folder": FOLDER,
        "llama_cpp": "b33",
        "ggml": "0.27.1",
    }


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archive: bytes) -> Iterator[Path]:
    """A served index with the archive; its folder. The cache is empty."""
    folder = tmp_path / "index"
    page = folder / "xllamacpp/index.html"
    page.parent.mkdir(parents=True)
    (folder / FILE).write_bytes(archive)
    page.write_text(f'<a href="../{FILE}#sha256=0">{FILE}</a><a>nothing</a>')
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("UNIMEM_GGML_ARCHIVE", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield folder
    server.shutdown()
    thread.join()
    server.server_close()
