"""The folder of staged models: what a budget drops, and what is remembered of each model."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from unimem.errors import CapacityError, PlacementError
from unimem.staging import staging_folder
from unimem.staging.readers import Readers
from unimem.staging.staging_folder import (
    StagingFolder,
    entries,
    link_into,
    open_staging_folder,
    staged_ns,
)
from unimem.system import limits
from unimem.weights.staged import Held

SECOND_NS = 10**9
MODELS = "abcd"


def held(name: str, nbytes: int = 10, **changed: Any) -> Held:
    fields: dict[str, Any] = {
        "pid": ord(name), "path": f"/proc/{ord(name)}/fd/3/{name}", "source": f"/models/{name}",
        "paths": (f"/proc/{ord(name)}/fd/3/{name}",), "versions": (), "asked": {},
        "backing": "tmpfs", "nbytes": nbytes, "warnings": (),
        "granted": um.Placement("4k", 4096, 0, 0, 0, 0, 0),
    }  # fmt: skip
    return Held(**fields | changed)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StagingFolder:
    monkeypatch.setenv("UNIMEM_STAGING", str(tmp_path / "kept"))
    made = open_staging_folder(create=True)
    assert made is not None
    return made


class Machine:
    """Four models of 10 bytes, the first used longest ago, and their readers."""

    def __init__(self, folder: StagingFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.found = folder, [held(name) for name in MODELS]
        self.read, self.told, self.slept = "", list[str](), list[float]()
        for number, each in enumerate(self.found):
            self.age(each.source, 100 - number)
        monkeypatch.setattr(staging_folder, "holders", lambda: list(self.found))
        monkeypatch.setattr(staging_folder, "drop", self.found.remove)
        monkeypatch.setattr(staging_folder, "find_readers", self.readers)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def age(self, source: str, seconds: float) -> None:
        self.folder.note_use(source)
        used_ns = time.time_ns() - int(seconds * SECOND_NS)
        os.utime(self.folder._file(source), ns=(used_ns, used_ns))

    def readers(self, found: list[Held]) -> list[Readers]:
        return [Readers((1,) if each.source[-1] in self.read else ()) for each in found]

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        for each in self.found:
            age_s = (time.time_ns() - self.folder.entry(each).used_ns) / SECOND_NS
            self.age(each.source, age_s + seconds + 0.1)

    def left(self) -> str:
        return "".join(each.source[-1] for each in self.found)


@pytest.fixture
def machine(folder: StagingFolder, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(folder, monkeypatch)


@pytest.mark.parametrize(
    ("budget", "asked", "pinned", "read", "left"),
    [
        (50, 10, "", "", "abcd"),
        (40, 1, "", "", "bcd"),
        (40, 11, "", "", "cd"),
        (30, 10, "a", "", "ad"),
        (40, 10, "", "a", "acd"),
        (40, 10, "a", "b", "abd"),
        (40, 10, "abcd", "", None),
        (40, 40, "", "d", None),
        (20, 21, "", "", None),
    ],
)
def test_the_least_recently_used_without_reader_or_pin_goes(
    budget: int, asked: int, pinned: str, read: str, left: str | None, machine: Machine
) -> None:
    machine.folder.set_budget(budget)
    for each in machine.found:
        if each.source[-1] in pinned:
            age_ns = machine.folder.entry(each).used_ns
            machine.folder.pin(each, True)
            os.utime(machine.folder._file(each.source), ns=(age_ns, age_ns))
    machine.read = read
    told: list[str] = []
    if left is not None:
        machine.folder.make_room(asked, "staging e", told.append)
        assert machine.left() == left
        assert len(told) == len(MODELS) - len(left)
        return
    with pytest.raises(CapacityError, match=r"staging e of .* does not fit: the budget") as error:
        machine.folder.make_room(asked, "staging e", told.append)
    assert (error.value.limit, error.value.asked) == (budget, asked)
    assert (machine.left(), told) == (MODELS, [])


def test_without_a_budget_all_stay(machine: Machine) -> None:
    machine.folder.set_budget(10)
    machine.folder.set_budget(None)
    machine.folder.make_room(1 << 40, "staging e", machine.told.append)
    assert machine.folder.trim(machine.told.append) == 0
    assert (machine.left(), machine.told) == (MODELS, [])


@pytest.mark.parametrize("text", ["-1", "9" * 60, "9" * 5000, "40 G", ""])
def test_a_damaged_budget_is_none(machine: Machine, text: str) -> None:
    (Path(machine.folder.path) / "budget").write_text(text)
    assert machine.folder.budget_bytes is None
    machine.folder.make_room(1 << 40, "staging e", machine.told.append)


def test_what_a_program_keeps_is_counted_and_stays(machine: Machine) -> None:
    machine.found[0] = held("a", kept_by="program")
    machine.folder.set_budget(40)
    machine.folder.make_room(10, "staging e", machine.told.append)
    assert machine.left() == "acd"


def test_what_was_staged_just_now_is_waited_for(machine: Machine) -> None:
    for each in machine.found:
        machine.age(each.source, 7)
    machine.folder.set_budget(40)
    machine.folder.make_room(10, "staging e", machine.told.append)
    assert len(machine.slept) == 1
    assert 0 < machine.slept[0] <= 3
    assert "waiting" in machine.told[0]
    assert len(machine.left()) == 3


def test_a_model_that_is_opened_meanwhile_stays(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no reader in the look at all, and has one in the look before it goes."""

    def look(found: list[Held]) -> list[Readers]:
        return [Readers((1,) if found == [held("a")] else ()) for _ in found]

    monkeypatch.setattr(staging_folder, "find_readers", look)
    machine.folder.set_budget(30)
    assert machine.folder.trim(machine.told.append) == 0
    assert machine.left() == "acd"


def test_a_smaller_budget_drops_what_may_go_and_says_what_stays(machine: Machine) -> None:
    machine.folder.set_budget(10)
    machine.read = "ab"
    machine.age("/models/d", 1)
    assert machine.folder.trim(machine.told.append) == 20
    assert machine.left() == "abd"


def test_a_reader_is_a_use(machine: Machine) -> None:
    machine.read = "a"
    machine.folder.set_budget(40)
    machine.folder.make_room(10, "staging e", machine.told.append)
    assert time.time_ns() - machine.folder.entry(machine.found[0]).used_ns < 60 * SECOND_NS


def test_one_at_a_time(folder: StagingFolder) -> None:
    waits, done = threading.Event(), list[str]()

    def second() -> None:
        with folder.turn(waits.set):
            done.append("second")

    thread = threading.Thread(target=second)
    with folder.turn(lambda: pytest.fail("no other has the turn")):
        thread.start()
        assert waits.wait(60)
        done.append("first")
    thread.join()
    assert done == ["first", "second"]


def test_pins_and_links_are_remembered(folder: StagingFolder, tmp_path: Path) -> None:
    model = held("a")
    assert entries([model])[0][1:] == (False, ())
    folder.add_links(model, ["/x"])
    folder.pin(model, True)
    folder.note_use(model.source)
    assert folder.entry(model)[1:] == (True, ("/x",))
    for text in ("{damaged", "[]", "[" * 3000, '{"source": "a", "pinned": 1, "links": []}'):
        Path(folder._file(model.source)).write_text(text)
        folder.clean([])
        assert folder.entry(model)[1:] == (False, ())
    assert staged_ns(model) <= time.time_ns()


def test_links_go_with_their_model(folder: StagingFolder, tmp_path: Path) -> None:
    target = tmp_path / "staged"
    target.touch()
    model = held("a", path=str(target), paths=(str(target),), backing="memfd")
    (link,) = link_into(str(tmp_path / "at"), model)
    assert link == f"{tmp_path}/at/a"
    assert link_into(str(tmp_path / "at"), model) == [link]
    assert os.readlink(link) == str(target)
    folder.add_links(model, [link])
    folder.clean([])
    assert os.path.islink(link)  # it leads somewhere
    target.unlink()
    folder.clean([])
    assert os.listdir(tmp_path / "at") == []
    assert folder._files.files() == []
    (tmp_path / "at" / "a").touch()
    with pytest.raises(FileExistsError, match="Is no link, and stays"):
        link_into(str(tmp_path / "at"), model)


def test_links_in_shared_memory_are_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SHM", str(tmp_path))
    files = tmp_path / "unimem-stage-0"
    files.mkdir()
    paths = (f"{files}/one", f"{files}/two")
    for path in paths:
        Path(path).touch()
    links = link_into(f"{tmp_path}/at", held("a", path=paths[0], paths=paths, backing="shm"))
    assert [os.readlink(link) for link in links] == [
        "../unimem-stage-0/one",
        "../unimem-stage-0/two",
    ]
    moved = tmp_path.rename(tmp_path.with_name("elsewhere"))
    assert os.path.exists(moved / "at" / "one")


def test_the_first_place_that_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNIMEM_STAGING", raising=False)
    monkeypatch.setattr(limits, "SHM", str(tmp_path))
    made = open_staging_folder(create=True)
    assert made is not None
    assert made.path == f"{tmp_path}/unimem-staging-{os.geteuid()}"
    assert os.stat(made.path).st_mode & 0o777 == 0o700
    monkeypatch.setenv("UNIMEM_STAGING", str(tmp_path / "open"))
    assert open_staging_folder() is None
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PlacementError, match="UNIMEM_STAGING names another folder"):
        open_staging_folder(create=True)
