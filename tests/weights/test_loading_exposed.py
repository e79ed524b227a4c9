"""`auto` copies a file whose mapped pages may be reclaimed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.files.weight_bytes import MIB, write_hole
from support.kernel.cgroups import SmallCgroup
from unimem.engine import Decoder
from unimem.planning import repack_gain as planned
from unimem.system import limits, pressure
from unimem.system.limits import HugePool, Limit, Node
from unimem.system.pressure import Pressure, why_exposed
from unimem.weights import loading
from unimem.weights.files import open_model

pytestmark = pytest.mark.usefixtures("gives_memory_back")

LARGE = 300 * MIB
MACHINE = Limit("memory of the machine", 64 << 30, 60 << 30, "take less")


def cgroup(room: int) -> Limit:
    return Limit("cgroup /a", room + 100 * MIB, 100 * MIB, "echo max > memory.max")


class Facts:
    """A machine with these limits, and nothing else."""

    def __init__(self, *found: Limit) -> None:
        self.found = (MACHINE, *found)

    def memory_limits(self) -> tuple[Limit, ...]:
        return self.found

    def available_bytes(self) -> int:
        return min(limit.room_bytes for limit in self.found)

    def huge_pools(self) -> dict[str, HugePool]:
        return {}

    def nodes(self) -> dict[int, Node]:
        return {}

    def memlock(self) -> Limit | None:
        return None

    def require(self, nbytes: int, what: str) -> None:
        raise AssertionError("a copy is not required")


QUIET, BUSY = Pressure("machine", 4.9, 0.0), Pressure("machine", 5.0, 0.0)


@pytest.mark.parametrize(
    ("room", "pressures", "placement", "load", "reason"),
    [
        (None, [QUIET], {}, "map", "a mapping shares the page cache"),
        (2 * LARGE + MIB, [QUIET], {}, "map", "a mapping shares"),
        (2 * LARGE - MIB, [], {}, "direct", "cgroup /a has room for 599.0 MiB, and could drop"),
        (LARGE + MIB, [], {"strict": True}, "direct", "cgroup /a has room"),
        (LARGE - MIB, [], {}, "map", "cgroup /a.*but a copy of 300.0 MiB does not fit"),
        (LARGE - MIB, [], {"strict": True}, "map", "but a copy of 300.0 MiB does not fit"),
        (LARGE + MIB, [], {"lock": True}, "map", "a mapping shares"),
        (None, [BUSY], {}, "direct", "threads of the machine waited for memory in 5 %"),
        (None, [QUIET, Pressure("cgroup /a", 50, 9)], {}, "direct", "threads of cgroup /a waited"),
    ],
)
def test_auto(
    tmp_path: Path, room: Any, pressures: Any, placement: Any, load: str, reason: str
) -> None:
    facts = Facts() if room is None else Facts(cgroup(room))
    path = write_hole(tmp_path / "model.gguf", LARGE)
    with open_model(path) as model:
        choice = loading.choose(model, "auto", None, placement, facts, pressures)
        assert (choice.mode, choice.warning) == (load, "")
        assert re.search(reason, choice.reason), choice.reason
        assert loading.choose(model, "map", None, placement, facts, pressures).mode == "map"


def test_small_files_and_shared_memory_are_mapped(tmp_path: Path) -> None:
    assert why_exposed(pressure._LEAST_BYTES - 1, [cgroup(0)], [BUSY]) == ""
    assert why_exposed(pressure._LEAST_BYTES, [cgroup(0)], [BUSY]) != ""
    path = write_hole(tmp_path / "model.gguf", 20 * MIB)
    with um.stage(path) as stage, open_model(stage.path) as model:
        assert loading.choose(model, "auto", None, {}, Facts(cgroup(MIB)), [BUSY]).mode == "map"


@pytest.fixture
def small_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that each model is large for the cgroup of this process."""
    monkeypatch.setattr(pressure, "_LEAST_BYTES", 1)
    monkeypatch.setattr(pressure, "_ROOM_FACTOR", 1 << 40)
    monkeypatch.setattr(limits, "memory_limits", lambda: (MACHINE, cgroup(1 << 30)))


def test_a_plan_and_what_it_plans_agree(model: Path, small_room: None) -> None:
    plan = um.plan(model, ctx=64, threads=1)
    assert plan.load in ("copy", "direct")
    assert "cgroup /a" in plan.load_reason
    with um.Layout.for_model(model, ctx=64, threads=1) as layout:
        assert isinstance(layout.weights, um.Weights)
        assert layout.plan is not None
        assert (layout.weights.load, layout.plan.load_reason) == (plan.load, plan.load_reason)
    with Decoder(model, ctx=64, threads=1) as decoder:
        assert decoder.report().facts["load"] == plan.load
        assert decoder.report().total_bytes == plan.total_bytes


def test_a_model_without_room_for_a_copy_is_mapped(
    model: Path, small_room: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = um.plan(model, ctx=64, threads=1).required_bytes
    room = cgroup(whole - MIB)  # the copy fits, and the rest beside it does not
    monkeypatch.setattr(limits, "memory_limits", lambda: (MACHINE, room))
    monkeypatch.setattr(limits, "available_bytes", lambda: room.room_bytes)
    plan = um.plan(model, ctx=64, threads=1)
    assert (plan.load, plan.fits) == ("map", True)
    assert planned.NO_ROOM_TO_COPY in plan.load_reason
    with um.Layout.for_model(model, ctx=64, threads=1) as layout:
        assert isinstance(layout.weights, um.Weights)
        assert (layout.weights.load, layout.weights.load_reason) == ("map", plan.load_reason)
    with Decoder(model, ctx=64, threads=1) as decoder:
        assert decoder.report().facts["load_reason"] == plan.load_reason


@pytest.mark.locks
def test_mapped_parts_of_a_repacked_model_are_locked(
    model: Path, small_room: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned, "_LEAST_BYTES", 0)
    plan = um.plan(model, ctx=64, threads=1)
    if plan.load != "repack":
        pytest.skip("this build of ggml has no order for q4_0 on this CPU")
    assert "so what stays mapped is locked" in plan.load_reason
    with Decoder(model, ctx=64, threads=1) as decoder:
        (block,) = decoder.weights.blocks
        placed = block.verify()
        assert placed.locked_bytes == placed.resident_bytes > 0
        assert decoder.report().facts["load_reason"] == plan.load_reason
    # If nothing may be locked, all of it is copied.
    none = Limit("locked memory (memlock)", 0, 0, "ulimit -l unlimited")
    monkeypatch.setattr(limits, "memlock", lambda: none)
    assert um.plan(model, ctx=64, threads=1).load in ("copy", "direct")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.models.make import write_model

    return write_model(tmp_path_factory.mktemp("model") / "q4_0.gguf", kind="q4_0", gain=0.01)


IN_CGROUP = """
import unimem as um
for path, loads in (({large!r}, ("copy", "direct")), ({small!r}, ("map",))):
    with um.open_weights(path) as weights:
        assert weights.load in loads, weights
        print(weights.load_reason)
"""


def test_in_a_cgroup(tmp_path: Path, cgroup_512mb: SmallCgroup) -> None:
    large, small = (write_hole(tmp_path / f"{n}.gguf", n * MIB) for n in (300, 100))
    script = IN_CGROUP.format(large=str(large), small=str(small))
    first, second = cgroup_512mb.run(script).splitlines()
    assert first.startswith(f"{cgroup_512mb.name} has room for ")
    # The pressure of a busy machine may be another reason.
    assert loading.WHY_MAPPED in second
