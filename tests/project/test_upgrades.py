"""Files of earlier versions are read, or refused with the version that they have."""

from __future__ import annotations

import gzip
import importlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.files.snapshot_bytes import MODES
from support.project.checkout import ROOT
from unimem.accounting import published
from unimem.errors import FormatError, SnapshotError
from unimem.kv import snapshot
from unimem.weights import staged
from unimem.weights.repack.image import Image

VERSIONS = sorted((ROOT / "tests/upgrades").iterdir())
SNAPSHOTS = [
    pytest.param(folder, kind, id=f"{folder.name}-{kind}")
    for folder in VERSIONS
    for kind in json.loads((folder / "contents.json").read_text())["snapshots"]
]
by_version = pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: folder.name)


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    """The program that writes the files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        yield importlib.import_module("upgrade_files")


def contents_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "contents.json").read_text())
    return found


def raw_of(folder: Path, name: str) -> bytes:
    return gzip.decompress((folder / f"{name}.gz").read_bytes())


def unpacked(folder: Path, name: str, path: Path) -> Path:
    path.write_bytes(raw_of(folder, name))
    return path


def check_refused(folder: Path, error: ValueError) -> None:
    assert folder.name != um.__version__, error
    assert "version" in str(error)


@contextmanager
def read_or_refused(folder: Path) -> Iterator[None]:
    """Check that a file is read, or, by a later version, refused with its version."""
    try:
        yield
    except FormatError as error:
        check_refused(folder, error)


def test_this_version_has_its_files() -> None:
    assert um.__version__ in [folder.name for folder in VERSIONS]


@by_version
def test_files_are_small(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.iterdir()) < 32 << 10


@pytest.mark.parametrize(("folder", "kind"), SNAPSHOTS)
def test_snapshots_of_all_versions_are_read(
    folder: Path, kind: str, tool: Any, tmp_path: Path
) -> None:
    path = unpacked(folder, f"snapshot-{kind}", tmp_path / "snapshot")
    contents = contents_of(folder)
    said, tokens = contents["snapshots"][kind], contents["tokens"]
    with read_or_refused(folder):
        for mode in MODES:
            restored = um.KVCache.restore(
                path, mode=mode, tokens=tokens, model=contents["model"], verify=True
            )
            with restored as kv:
                assert (kv.seq_len, kv.next_position) == (said["seq_len"], len(tokens))
                assert tool.rows_of(kv) == said["rows"]
        with tool.make_cache(kind) as kv:
            snapshot.read_into(kv, path)
            assert tool.rows_of(kv) == said["rows"]


@by_version
def test_sessions_continue(folder: Path, tool: Any, tmp_path: Path) -> None:
    engine = pytest.importorskip("unimem.engine")
    path = unpacked(folder, "session", tmp_path / "session")
    contents = contents_of(folder)
    with engine.Decoder(engine.embedded_model(), ctx=16, threads=1) as decoder:
        if contents["session"]["model"] != decoder.weights.content_hash():
            with pytest.raises(SnapshotError, match=r"model|version"):
                decoder.resume(path)
            return
        with read_or_refused(folder):
            decoder.resume(path)
            assert decoder.kv.seq_len == len(contents["tokens"])
            assert tool.rows_of(decoder.kv) == contents["session"]["rows"]
            assert decoder.generate_next_token() >= 0


@by_version
def test_a_chunk_of_a_store_is_restored(folder: Path, tool: Any, tmp_path: Path) -> None:
    contents = contents_of(folder)
    said = contents["chunk"]
    unpacked(folder, "chunk", tmp_path / said["name"])
    size = said["chunk_tokens"]
    with (
        um.KVStore(tmp_path, ram_bytes=0, disk_bytes=1 << 22, chunk_tokens=size) as store,
        tool.make_cache("fixed") as kv,
    ):
        n = store.restore_into(kv, contents["tokens"], model=contents["model"])
        if folder.name == um.__version__ or n:  # a chunk's identity contains the version
            assert n == size
            assert tool.rows_of(kv) == said["rows"]


@by_version
def test_an_image_is_read(folder: Path, tmp_path: Path) -> None:
    said = contents_of(folder)["image"]
    path = unpacked(folder, "image", tmp_path / "image")
    with read_or_refused(folder), Image(str(path)) as image:
        assert image.header.key == said["key"]
        assert [tensor.name for tensor in image.header.tensors] == [
            tensor["name"] for tensor in said["tensors"]
        ]
        image.check()


@by_version
def test_the_note_of_a_stage_is_read(folder: Path) -> None:
    said, note = contents_of(folder)["stage"], json.loads(raw_of(folder, "stage"))
    if note["schema"] != staged.SCHEMA:  # another version's note is ignored
        assert folder.name != um.__version__
        return
    found = staged.held_from_note(os.getpid(), 0, note)
    assert (found.source, found.nbytes, found.granted.pages) == (
        said["source"],
        said["nbytes"],
        said["pages"],
    )


@by_version
@pytest.mark.parametrize("name", ["ledger", "placed"])
def test_the_ledger_of_another_process_is_read(folder: Path, name: str) -> None:
    said = contents_of(folder)[name]
    fd = os.memfd_create("upgraded")
    try:
        os.write(fd, raw_of(folder, name))
        found = published._read(fd, said["pid"], said["started"], iter(()))
    except ValueError as error:
        check_refused(folder, error)
        return
    finally:
        os.close(fd)
    assert found is not None
    assert [entry.name for entry in found.entries] == said["names"]
    assert found.counters == said.get("counters", {})
    if name == "placed":
        assert found.placed is not None
        assert found.placed["n_placed"] == said["n_placed"]


@pytest.mark.slow
def test_the_tool_makes_the_same_files(tool: Any) -> None:
    folder = ROOT / "tests/upgrades" / um.__version__
    made = dict(tool.make())
    assert {name for name in made if name != "contents.json"} == {
        path.stem for path in folder.glob("*.gz")
    }
    for name, raw in made.items():
        kept = (folder / name).read_bytes() if name.endswith(".json") else raw_of(folder, name)
        assert raw == kept, name
