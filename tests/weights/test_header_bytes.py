"""TITLE."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from conftest import Run
from support.files import gguf_files as gf
from support.files import safetensors_files as sf
from support.files.weight_bytes import LOADS
from unimem.weights.gguf import GGUFHeader
from unimem.weights.opened import open_weights
from unimem.weights.safetensors import SafetensorsHeader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "file.gguf"
    file.write_bytes(gf.everything())
    return file


def test_metadata_survives_a_truncation_of_the_file(path: Path, run_python: Run) -> None:
    """In a process of its own: it would die if the header were read from the mapping."""
    done = run_python(f"""
        import os
        from unimem.weights.opened import open_weights
        with open_weights({str(path)!r}) as w:
            os.truncate({str(path)!r}, 0)
            values = list(w.metadata.values())
            print(len(values), w.metadata["general.architecture"], len(w.fingerprint))
        """)
    assert done.stdout.split() == [str(5 + 2 * len(gf.CODES)), "none", "32"], done.stderr


@pytest.mark.parametrize(
    ("kind", "raw"),
    [(GGUFHeader, gf.everything()), (SafetensorsHeader, sf.everything())],
    ids=["gguf", "safetensors"],
)
def test_shrinking_file(path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, raw: bytes) -> None:
    path.write_bytes(raw)
    with path.open("rb") as file, pytest.raises(OSError, match="shorter") as caught:
        kind(file.fileno(), len(raw) + (1 << 20), str(path))
    assert str(path) in str(caught.value)

    class ReadThenTruncate(kind):  # type: ignore[misc]
        def __init__(self, _: int, file_nbytes: int, name: str) -> None:
            os.truncate(name, file_nbytes - 1)

    monkeypatch.setattr(f"unimem.weights.files.{kind.__name__}", ReadThenTruncate)
    loads: list[Any] = LOADS
    for load in loads:
        with pytest.raises(OSError, match=r"shorter|replaced or written to") as caught:
            open_weights(path, load=load)
        assert caught.value.filename == str(path)
        os.truncate(path, len(raw))
