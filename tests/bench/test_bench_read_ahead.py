"""The kernel's read-ahead is set for a measurement, and put back."""

from __future__ import annotations

from pathlib import Path

import pytest

from unimem_bench import read_ahead as module
from unimem_bench.read_ahead import read_ahead
from unimem_bench.suite import NotMeasured


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "read_ahead_kb"
    path.write_text("8192\n")
    monkeypatch.setattr(module, "_PLACES", (f"{tmp_path}/missing-{{}}", str(path)))
    return path


def test_it_is_set_and_put_back(place: Path, tmp_path: Path) -> None:
    with read_ahead(tmp_path, 128) as kib:
        assert (kib, place.read_text()) == (128, "128\n")
    assert place.read_text() == "8192\n"
    with pytest.raises(ZeroDivisionError), read_ahead(tmp_path, 64):
        raise ZeroDivisionError
    assert place.read_text() == "8192\n"


@pytest.mark.parametrize("kib", [None, 8192])
def test_it_is_left_as_it_is(kib: int | None, place: Path, tmp_path: Path) -> None:
    place.chmod(0o400)
    before = place.stat().st_mtime_ns
    with read_ahead(tmp_path, kib) as found:
        assert found == 8192
    assert place.stat().st_mtime_ns == before


def test_what_cannot_be_set(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, text: str) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", refuse)
        with pytest.raises(NotMeasured, match="needs root: Permission"), read_ahead(tmp_path, 128):
            pass
    place.unlink()
    missing = pytest.raises(NotMeasured, match="wants a disk with a read-ahead")
    with missing, read_ahead(tmp_path, 128):
        pass
