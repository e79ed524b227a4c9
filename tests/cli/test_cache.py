"""`unimem cache`: listing, removing and checking images."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import xxhash

from support.project.documents import check_document

pytest.importorskip("typer", reason="the command line needs typer: pip install '.[run]'")

from support.terminal.screens import show
from unimem.weights.files import identity_of
from unimem.weights.repack.image_format import ImageTensor, key_of, pack


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    path.mkdir(0o700)
    monkeypatch.setenv("UNIMEM_CACHE", str(path))
    return path


def keep(folder: Path, name: str) -> str:
    """Keep an image of an existing model; return its key."""
    model = folder.parent / name
    model.touch()
    identity = {"files": [list(identity_of(os.stat(model)))]}
    tensor = ImageTensor("a", "q4_0", (32, 2), "CPU_REPACK", 0, 36, ZEROS)
    key = key_of(identity)
    raw = pack(identity, str(model), [tensor], 36) + bytes(4096)
    (folder / f"{key}.repacked").write_bytes(raw)
    return key


ZEROS = xxhash.xxh3_128_hexdigest(bytes(36))


def document(*arguments: str) -> Any:
    code, out, err = show("cache", *arguments, "--json")
    assert (code, err) == (0, ""), err
    found = json.loads(out)
    check_document(found)
    return found


def test_list(folder: Path) -> None:
    keys = {keep(folder, "a.gguf"), keep(folder, "b.gguf")}
    (folder.parent / "b.gguf").write_text("another")
    found = document("list")
    assert {image["key"] for image in found["images"]} == keys
    states = {os.path.basename(image["model"]): image["current"] for image in found["images"]}
    assert states == {"a.gguf": True, "b.gguf": False}
    (only,) = document("list", str(folder.parent / "a.gguf"))["images"]
    code, out, _ = show("cache", "list", only["key"][:8])
    assert code == 0
    assert "8.0 KiB" in out
    assert "current" in out
    assert str(folder.parent / "a.gguf") in out


def test_drop(folder: Path) -> None:
    first, second = keep(folder, "a.gguf"), keep(folder, "b.gguf")
    (folder.parent / "b.gguf").unlink()
    left = folder / f".{first}.repacked.00000000.unimem-tmp"
    left.touch()
    assert len(document("drop", "all", "--dry-run")["images"]) == 2
    assert len(os.listdir(folder)) == 3
    assert [image["key"] for image in document("drop", "stale")["images"]] == [second]
    assert os.listdir(folder) == [f"{first}.repacked"]
    code, out, _ = show("cache", "drop", first[:6])
    assert (code, os.listdir(folder)) == (0, [])
    assert out.startswith("dropped")
    code, out, err = show("cache", "drop", first)
    assert (code, out) == (1, "")
    assert "no image is kept under this name" in err


def test_verify(folder: Path) -> None:
    good, bad = keep(folder, "a.gguf"), keep(folder, "b.gguf")
    path = folder / f"{bad}.repacked"
    raw = bytearray(path.read_bytes())
    raw[4096 + 7] ^= 1
    path.write_bytes(raw)
    assert document("list")["images"][0]["problem"] is None
    code, out, _ = show("cache", "verify")
    assert code == 1
    assert "the hash of a does not match" in out
    assert os.listdir(folder) == [f"{good}.repacked"]
    assert len(document("verify")["images"]) == 1
    (folder / f"{good}.repacked").write_bytes(raw[:100])
    code, out, _ = show("cache", "verify")
    assert code == 1
    assert "cut off" in out


def test_without_a_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert show("cache", "list")[1] == f"no image in the cache: {folder}\n"
    folder.chmod(0o777)
    assert "Other users" in show("cache", "list")[2]
    folder.chmod(0o700)
    folder.rmdir()
    assert document("list")["limit_bytes"] is None
    assert not folder.exists()
    monkeypatch.setenv("UNIMEM_CACHE", "off")
    assert document("verify")["folder"] is None
    assert "UNIMEM_CACHE=off" in show("cache", "list")[1]
