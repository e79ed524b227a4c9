"""Small kernel files: reading them, and the formats of their figures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unimem.base import kernel_files


def test_unreadable_files_are_none(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    assert kernel_files.read_text(absent) is None
    assert kernel_files.read_text(str(tmp_path)) is None
    assert kernel_files.read_number(absent) is None
    assert kernel_files.read_fields(absent) == {}
    assert kernel_files.list_names(absent) == []
    n_open = len(os.listdir("/proc/self/fd"))
    for path, error in ((absent, FileNotFoundError), (str(tmp_path), IsADirectoryError)):
        with pytest.raises(error):
            kernel_files.read_bytes(path)
    assert len(os.listdir("/proc/self/fd")) == n_open


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 16, (1 << 16) + 1, 200_000])
def test_a_file_is_read_to_its_end(tmp_path: Path, nbytes: int) -> None:
    data = os.urandom(nbytes)
    (tmp_path / "file").write_bytes(data)
    n_open = len(os.listdir("/proc/self/fd"))
    assert kernel_files.read_bytes(str(tmp_path / "file")) == data
    folder = os.open(tmp_path, os.O_RDONLY)
    assert kernel_files.read_bytes("file", folder) == data
    os.close(folder)
    assert len(os.listdir("/proc/self/fd")) == n_open


@pytest.mark.parametrize(
    ("text", "number"),
    [("12\n", 12), ("0", 0), ("max\n", None), ("-1", None), ("", None), ("1 2", None)],
)
def test_numbers(tmp_path: Path, text: str, number: int | None) -> None:
    (tmp_path / "file").write_text(text)
    assert kernel_files.read_number(str(tmp_path / "file")) == number


def test_fields(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    Path(path).write_text("model name\t: A CPU\nflags\t:\n\nmodel name\t: Another\nno colon\n")
    assert kernel_files.read_fields(path) == {"model name": "A CPU", "flags": ""}
    Path(path).write_text("pgpgin 12\npgpgout 9\n")
    assert kernel_files.read_fields(path, " ") == {"pgpgin": "12", "pgpgout": "9"}
    Path(path).write_text("Node 1 MemTotal:  5 kB\nNode 1 MemFree:  4 kB\n")
    found = kernel_files.read_fields(path, prefix="Node 1 ")
    assert found == {"MemTotal": "5 kB", "MemFree": "4 kB"}


def test_names_that_are_not_utf8_are_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0::/\xff\n")
    found = kernel_files.read_text(str(tmp_path / "file"))
    assert found is not None
    assert os.fsencode(found) == b"0::/\xff"


def test_figures_in_kib() -> None:
    assert kernel_files.parse_kib("  123 kB") == 123 << 10
    assert kernel_files.parse_kib(b" 4 kB") == 4 << 10
    assert kernel_files.parse_kib(None) == kernel_files.parse_kib("") == 0


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("", ()), ("0", (0,)), ("0,2-3\n", (0, 2, 3)), ("3,1-2,2", (1, 2, 3)), ("1023", (1023,))],
)
def test_lists(text: str, numbers: tuple[int, ...]) -> None:
    assert kernel_files.parse_list(text) == numbers


@pytest.mark.parametrize("text", ["a", "1,", "3-1", "-1", "1-", "0x1", "0-99999999", "1 2"])
def test_invalid_lists(text: str) -> None:
    with pytest.raises(ValueError, match="expected a list of numbers"):
        kernel_files.parse_list(text)
