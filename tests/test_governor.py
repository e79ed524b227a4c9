"""The governor: when it acts, in which order, what it says of it, and that it ends."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.files.weight_bytes import MIB, cached_bytes, write
from support.models.make import Shape, write_model
from unimem import governor as module
from unimem.engine import Decoder, embedded_model
from unimem.governor import GovernorEvent, find_shortage
from unimem.system import limits
from unimem.system.limits import Limit
from unimem.system.pressure import Notice

GIB = 1 << 30
ROOMY = Limit("memory of the machine", 64 * GIB, 32 * GIB, "take less")


def wait_for(what: Any) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


class Spare:
    """Memory that is given back once."""

    def __init__(self, nbytes: int, name: str = "", calls: list[str] | None = None) -> None:
        self.nbytes, self.name, self.calls = nbytes, name, [] if calls is None else calls

    def give_back(self) -> int:
        self.calls.append(self.name)
        nbytes, self.nbytes = self.nbytes, 0
        return nbytes


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> list[Limit]:
    """A machine that tells nothing, with limits that a test sets."""
    found = [ROOMY]
    monkeypatch.setattr(limits, "memory_limits", lambda: tuple(found))
    monkeypatch.setattr(module, "open_watches", lambda: ([], []))
    return found


# ---- when it acts -------------------------------------------------------------------------------


def cgroup(limit: int, used: int) -> Limit:
    return Limit("cgroup /a", limit, used, "more")


@pytest.mark.parametrize(
    ("found", "budget", "source", "nbytes"),
    [
        ([ROOMY], None, None, 0),
        ([cgroup(320 * MIB, 310 * MIB)], None, None, 0),  # a thirty-second
        ([cgroup(320 * MIB, 311 * MIB)], None, "cgroup /a", MIB),
        ([cgroup(320 * MIB, 330 * MIB)], None, "cgroup /a", 20 * MIB),
        ([cgroup(64 * GIB, 64 * GIB - 64 * MIB)], None, None, 0),
        ([cgroup(64 * GIB, 64 * GIB - 63 * MIB)], None, "cgroup /a", MIB),
        ([ROOMY, cgroup(320 * MIB, 311 * MIB)], 1, "budget", None),
        ([Limit("memory of the machine", GIB, GIB, "")], None, "machine", 32 * MIB),
        ([Limit("commit limit (overcommit_memory=2)", GIB, GIB, "")], None, None, 0),
        ([ROOMY], 1 << 50, None, 0),
    ],
)
def test_what_is_short(found: Any, budget: Any, source: Any, nbytes: Any) -> None:
    shortage = find_shortage(found, budget)
    assert (shortage and shortage.source) == source
    if shortage is not None and nbytes is not None:
        assert shortage.nbytes == nbytes


@pytest.mark.parametrize(
    ("shortage", "notices", "taken"),
    [
        (0, [], []),
        (0, [Notice("cgroup /a", "usage", False)], []),
        (0, [Notice("machine", "waited", True)], ["a", "b"]),  # a had nothing
        (5 * MIB, [], ["a", "b"]),
        (15 * MIB, [Notice("machine", "waited", True)], ["a", "b", "c"]),
        (99 * MIB, [], ["a", "b", "c", "d"]),
    ],
)
def test_order_and_end_of_the_steps(shortage: int, notices: Any, taken: list[str]) -> None:
    calls: list[str] = []
    limit = cgroup(320 * MIB, 310 * MIB + shortage)
    with um.Governor() as governor:
        governor.add(Spare(9 * MIB, "d", calls), 9).add(Spare(10 * MIB, "b", calls), 3)
        governor.add(Spare(11 * MIB, "c", calls), 3).add(Spare(0, "a", calls), -1)
        governor._look(notices, [limit])
    assert calls == taken
    events = governor.events
    assert len(events) == bool(taken)
    if taken:
        assert events[0].source == ("cgroup /a" if shortage else "machine")
        assert events[0].shortage_bytes == shortage
        assert events[0].nbytes == governor.given_back_bytes > 0


def test_default_priorities(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", MIB)
    with (
        um.open_weights(path, load="copy") as weights,
        um.KVCache(1, 2, 8, 64, grow=True, name="talk") as cache,
        um.PagedKVCache(1, 2, 8, n_blocks=8, name="pool") as pool,
        um.stage(path) as stage,
        um.Governor() as governor,
    ):
        governor.add(stage).add(weights).add(Spare(1)).add(cache).add(pool)
        assert [(step.priority, step.name) for step in governor._steps] == [
            (10, "prefix cache 'pool'"),
            (20, "spare memory of Spare"),
            (20, "spare memory of cache 'talk'"),
            (30, f"page cache of {path}"),
            (30, f"page cache of {path}"),
        ]


def test_a_decoder_gives_the_slots_of_its_weights_first(tmp_path: Path) -> None:
    shape = Shape(hidden=64, layers=2, heads=2, kv_heads=2, inner=64, vocab=320, ctx=64)
    path = write_model(tmp_path / "m.gguf", "qwen3moe", shape)
    with (
        Decoder(path, ctx=64, threads=1, load="stream", weights_budget="1G") as decoder,
        um.Governor() as governor,
    ):
        governor.add(decoder).add(decoder.weights)
        assert [step.name for step in governor._steps] == [
            f"slots of {path}",
            "spare memory of Decoder",
        ]
        before = decoder.weights.mapped_bytes
        assert governor.give_back(1) == before - decoder.weights.mapped_bytes > 0


def test_the_page_cache_of_a_file_that_was_read(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", 2 * MIB)
    os.sync()
    with um.open_weights(path, load="copy") as weights, um.Governor() as governor:
        if os.geteuid() != 0 and not cached_bytes(path):
            pytest.skip("this file system keeps nothing in the page cache")
        assert governor.add(weights).give_back() >= 2 * MIB
        assert cached_bytes(path) == 0
        assert governor.give_back() == 0
        # A file that was replaced is another one's.
        path.unlink()
        write(path, 2 * MIB)
        os.sync()
        assert governor.give_back() == 0
        assert cached_bytes(path) > 0


# ---- what it says -------------------------------------------------------------------------------


def test_errors_are_told_and_end_nothing() -> None:
    class Broken:
        def give_back(self) -> Any:
            raise OSError("no")

    class Odd:
        def give_back(self) -> Any:
            return "much"

    def on_pressure(event: GovernorEvent) -> None:
        seen.append(event)
        raise KeyError("mine")

    seen: list[GovernorEvent] = []
    with um.Governor(on_pressure=on_pressure) as governor:
        governor.add(Broken()).add(Odd()).add(Spare(7))
        assert governor.give_back(3) == 7
    (event,) = governor.events
    assert seen[0].given_back == event.given_back == (("spare memory of Spare", 7),)
    assert [error.split(":")[:2] for error in event.errors] == [
        ["spare memory of Broken", " OSError"],
        ["spare memory of Odd", " TypeError"],
        ["on_pressure", " KeyError"],
    ]
    assert str(event).startswith("asked: give_back of 3 B: gave back 7 B of spare memory of Spare;")


def test_wrong_arguments(tmp_path: Path) -> None:
    for wrong in (0, -1, "1X", True, 1.5):
        with pytest.raises((TypeError, ValueError), match="budget_bytes"):
            um.Governor(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="on_pressure: expected a function"):
        um.Governor(on_pressure=3)  # type: ignore[arg-type]
    governor = um.Governor()
    others: tuple[object, ...] = (None, 3, Spare, object())
    for other in others:
        with pytest.raises(TypeError, match="what: expected a PagedKVCache"):
            governor.add(other)
    with pytest.raises(TypeError, match="priority"):
        governor.add(Spare(1), "high")  # type: ignore[arg-type]
    with (
        um.open_weights(embedded_model(), load="map") as weights,
        pytest.raises(ValueError, match="is mapped, and tokens read its pages"),
    ):
        governor.add(weights)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(governor)
    governor.close()
    governor.close()
    assert governor.closed
    assert repr(governor).startswith("Governor(closed, 0 steps")
    for use in (governor.start, governor.give_back, lambda: governor.add(Spare(1))):
        with pytest.raises(um.ClosedError, match="Governor is closed"):
            use()


# ---- the thread ---------------------------------------------------------------------------------


def test_its_thread_sees_a_limit_that_is_lowered(quiet: list[Limit]) -> None:
    spare = Spare(50 * MIB)
    told = threading.Event()
    with um.Governor(on_pressure=lambda event: told.set()) as governor:
        assert not governor.watches
        governor.add(spare).start()
        governor.start()
        assert governor.running
        (watched,) = governor.watches
        assert watched.startswith("limits, read every 0.5 s: memory of the machine")
        quiet.append(cgroup(320 * MIB, 340 * MIB))
        assert told.wait(60)
        assert governor.events[0].source == "cgroup /a"
        wait_for(lambda: "cgroup /a" in governor.watches[0])
        governor.stop()
        assert not governor.running
        governor.start()
        assert governor.running
    assert not governor.running


class Pipe:
    """A watch that a test writes to."""

    source, name, mask = "cgroup /a", "pipe", 1

    def __init__(self) -> None:
        self.fd, self.end = os.pipe()
        self.n_read = 0

    def read(self) -> Notice | None:
        os.read(self.fd, 1)
        self.n_read += 1
        return Notice(self.source, "pressure", True)

    def close(self) -> None:
        os.close(self.fd)


def test_what_the_kernel_tells(quiet: list[Limit], monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipe()
    monkeypatch.setattr(module, "open_watches", lambda: ([pipe], ["machine: x: no permission"]))
    with um.Governor() as governor:
        governor.add(Spare(3)).start()
        assert governor.watches[0] == "cgroup /a: pipe"
        assert governor.watches[-1] == "not machine: x: no permission"
        os.write(pipe.end, b"1")
        wait_for(lambda: len(governor.events) == 1)
        assert governor.events[0].nbytes == 3
        # A shortage without a remedy is an event, too, and the thread goes on.
        os.write(pipe.end, b"12")
        wait_for(lambda: len(governor.events) == 3)
        os.close(pipe.end)  # as a cgroup that is removed
        wait_for(lambda: not governor._run._open)  # type: ignore[union-attr]
        assert governor.running
    assert [event.nbytes for event in governor.events] == [3, 0, 0]


def test_a_callback_may_close_it(quiet: list[Limit]) -> None:
    quiet.append(cgroup(320 * MIB, 340 * MIB))
    governor = um.Governor(on_pressure=lambda event: governor.close())
    governor.add(Spare(1)).start()
    wait_for(lambda: governor.closed and not governor.running)


def test_a_governor_that_is_dropped_ends(quiet: list[Limit]) -> None:
    governor = um.Governor()
    governor.start()
    thread = governor._run._thread  # type: ignore[union-attr]
    n_open = len(os.listdir("/proc/self/fd"))
    del governor
    wait_for(lambda: not thread.is_alive())
    assert len(os.listdir("/proc/self/fd")) < n_open


def test_a_forked_child_has_it_stopped(quiet: list[Limit]) -> None:
    with um.Governor() as governor:
        governor.start()
        if (pid := os.fork()) == 0:
            ok = not governor.running and governor.watches == ()
            governor.start()
            ok = ok and governor.running
            governor.close()
            os._exit(0 if ok else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert governor.running


def test_a_budget() -> None:
    done = threading.Event()
    block: list[Any] = [np.ones(40 * MIB, np.uint8)]

    class Ballast:
        def give_back(self) -> int:
            block.clear()
            return 40 * MIB

    with um.Governor(module.own_bytes() - 20 * MIB, on_pressure=lambda event: done.set()) as g:
        g.add(Ballast()).start()
        assert done.wait(60)
    assert g.events[0].source == "budget"


# ---- unimem run ---------------------------------------------------------------------------------


MAIN = "import sys; from unimem_command import main; sys.exit(main())"


def test_unimem_run_governed() -> None:
    command = [sys.executable, "-c", MAIN, "run", "-n", "12", "--ctx", "128"]
    done = [
        subprocess.run([*command, *more], capture_output=True, text=True, timeout=120, check=True)
        for more in (["--json"], ["--json", "--governed"], ["--governed"])
    ]
    plain, governed = (json.loads(each.stdout) for each in done[:2])
    assert plain["governor"] is None
    assert plain["output"] == governed["output"]
    assert any("limits" in text for text in governed["governor"]["watches"])
    assert governed["governor"]["given_back_bytes"] >= 0
    assert "governor" in done[2].stdout
