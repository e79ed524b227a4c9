"""The cache folder, and folders with a budget: files are found, swept, and removed by last use."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unimem.base.cache_folder import BudgetFolder, cache_folder, check_own_folder, default_bytes

NAMES = re.compile(r"[a-z]\.kept")


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"UNIMEM_CACHE": "off"}, None),
        ({"UNIMEM_CACHE": "/a/b"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/unimem"),
        ({"XDG_CACHE_HOME": "x", "HOME": "/h"}, "/h/.cache/unimem"),
    ],
)
def test_variables_choose_the_folder(
    variables: dict[str, str], folder: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UNIMEM_CACHE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == folder


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a/b"
    check_own_folder(str(folder), create=True)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert 0 < default_bytes(str(folder)) < 1 << 60
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match="'chmod go-w', or elsewhere"):
        check_own_folder(str(folder), instead="elsewhere")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        check_own_folder(str(tmp_path / "file"))


@pytest.fixture(params=["path", "descriptor"])
def folder(request: Any, tmp_path: Path) -> Iterator[BudgetFolder]:
    """A folder of files a, b and c of 10, 20 and 30 bytes, of which c was used longest ago."""
    for i, name in enumerate("abc"):
        path = tmp_path / f"{name}.kept"
        path.write_bytes(bytes(10 * (i + 1)))
        os.utime(path, ns=(0, 9 - i))
    (tmp_path / "other").touch()
    (tmp_path / "x.kept").symlink_to(tmp_path / "other")
    if request.param == "path":
        yield BudgetFolder(str(tmp_path), NAMES)
        return
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield BudgetFolder(fd, NAMES)
    os.close(fd)


def test_files_are_listed_with_size_and_last_use(folder: BudgetFolder) -> None:
    assert sorted(folder.files()) == [("a.kept", 10, 9), ("b.kept", 20, 8), ("c.kept", 30, 7)]


@pytest.mark.parametrize(
    ("nbytes", "freed", "left"),
    [(0, 0, "abc"), (-5, 0, "abc"), (30, 30, "ab"), (31, 50, "a"), (99, 60, "")],
)
def test_the_least_recently_used_files_go_first(
    folder: BudgetFolder, nbytes: int, freed: int, left: str
) -> None:
    assert folder.remove_oldest(folder.files(), nbytes) == freed
    assert "".join(sorted(file.name[0] for file in folder.files())) == left


def test_files_that_stay_free_nothing(folder: BudgetFolder) -> None:
    def remove(name: str) -> bool:
        return name != "c.kept" and folder.remove(name)

    assert folder.remove_oldest(folder.files(), 1, remove) == 20
    assert not folder.remove("missing")


def test_a_removed_file_is_not_cut(folder: BudgetFolder, tmp_path: Path) -> None:
    """Readers may have it mapped, and would die of a file that is cut."""
    with (tmp_path / "c.kept").open("rb") as mapped:
        folder.remove_oldest(folder.files(), 1)
        assert os.fstat(mapped.fileno()).st_size == 30


def test_only_unlocked_files_are_swept(folder: BudgetFolder, tmp_path: Path) -> None:
    with (tmp_path / "a.kept").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        folder.sweep(NAMES)
    assert [file.name for file in folder.files()] == ["a.kept"]
    assert (tmp_path / "other").exists()
