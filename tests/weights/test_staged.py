"""Models that processes keep: found by sealed notes, and stale once their files change."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from unimem.system.placement import Placement
from unimem.weights.files import durable_path, version_of
from unimem.weights.staged import NOTE, SCHEMA, Held, holders, holders_of, proc_folder, read_note

PLACED = Placement("4k", 0, 10, 0, 0, 0, 10)
FIELDS: dict[str, Any] = {
    "schema": SCHEMA, "path": "fd/3", "paths": ["fd/3"], "source": "/m.gguf", "versions": [],
    "asked": {}, "backing": "memfd", "nbytes": 10, "granted": asdict(PLACED), "warnings": ["w"],
}  # fmt: skip


def read(note: dict[str, Any], *, seal: bool = True) -> Held | None:
    fd = os.memfd_create(NOTE, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.write(fd, json.dumps(note).encode())
    os.lseek(fd, 0, os.SEEK_SET)
    if seal:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    folder = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY)
    try:
        return read_note(fd, os.getpid(), folder)
    finally:
        os.close(folder)


def test_a_note() -> None:
    held = read(FIELDS)
    assert held is not None
    assert held.path == held.paths[0] == f"{proc_folder()}/fd/3"
    assert (held.granted, held.warnings, held.kept_by) == (PLACED, ("w",), "command")
    assert not held.is_repacked | held.is_unfinished
    shown = held.to_dict()
    assert shown["schema"] == SCHEMA
    assert shown.keys() & {"versions", "arrived", "began"} == set()


@pytest.mark.parametrize(
    "change", [{"schema": "other"}, {"granted": 3}, {"more": 1}, {"program": [1, 2]}]
)
def test_notes_that_do_not_count(change: dict[str, Any]) -> None:
    assert read(FIELDS | change) is None
    assert read(FIELDS, seal=False) is None


def test_changes_of_the_files_make_it_stale(tmp_path: Path) -> None:
    source, copy = tmp_path / "m.gguf", tmp_path / "copy"
    source.write_bytes(bytes(10))
    copy.write_bytes(bytes(10))
    held = read(FIELDS | {"versions": [(str(source), version_of(source.stat()))]})
    assert held is not None
    held = replace(held, paths=(str(copy),))
    assert held.staleness() is None
    assert replace(held, arrived=((0, 0, 1, ""),)).staleness() == "only a part of it has come"
    remote = replace(held, versions=(("s3://b/m.gguf", (0, 0, 10, 0)),))
    assert remote.staleness() is None
    os.truncate(copy, 9)
    assert held.staleness() == f"{copy} was cut off"
    source.write_bytes(bytes(11))
    assert held.staleness() == f"{source} was written to or replaced"
    source.unlink()
    assert held.staleness() == f"{source}: No such file or directory"


def test_this_process_is_a_keeper(tmp_path: Path) -> None:
    before = holders_of(os.getpid())
    model = tmp_path / "m.gguf"
    model.write_bytes(
        Path(um.__file__).with_name("engine").joinpath("models/tiny.gguf").read_bytes()
    )
    with um.stage(model) as staged:
        (held,) = (held for held in holders_of(os.getpid()) if held not in before)
        assert (held.path, held.source, held.kept_by) == (staged.path, str(model), "program")
        assert held in holders()
        assert held.staleness() is None
    assert holders_of(os.getpid()) == before


def test_files_are_known_by_device_and_inode(tmp_path: Path) -> None:
    a, b, link = (tmp_path / name for name in ("a.gguf", "b.gguf", "link.gguf"))
    a.write_bytes(bytes(10))
    b.write_bytes(bytes(10))
    link.symlink_to(a)
    of_a, of_b = ([(str(path), version_of(path.stat()))] for path in (a, b))
    held = read(FIELDS | {"source": str(a), "versions": of_a})
    assert held is not None
    assert held.has_files([(str(link), of_a[0][1])])
    assert not held.has_files(of_b)
    assert not held.has_files([*of_a, *of_b])
    assert not held.was_replaced_by(of_b)
    assert held.has_file(str(link))
    assert not held.has_file(str(b))
    assert not held.has_file(str(tmp_path / "none"))
    b.replace(a)
    assert held.was_replaced_by(of_b)
    assert not held.has_file(str(a))


def test_a_path_through_a_descriptor_is_that_of_its_file(tmp_path: Path) -> None:
    model, link = tmp_path / "a.gguf", tmp_path / "link.gguf"
    model.write_bytes(b"x")
    link.symlink_to(model)
    with model.open("rb") as file:
        fd = file.fileno()
        here = f"/proc/{os.getpid()}/fd/{fd}"
        paths = [f"/dev/fd/{fd}", f"/proc/self/fd/{fd}", here, f"/proc/thread-self/fd/{fd}"]
        assert {durable_path(path) for path in paths} == {str(model)}
        assert durable_path(str(link)) == str(link)
        model.unlink()  # the file has no name any more
        for path in paths[:3]:
            assert durable_path(path) == here
        (tmp_path / "a.gguf (deleted)").write_bytes(b"another")
        assert durable_path(paths[0]) == here
