"""Plans of streamed weights: the memory to the byte, and what tokens read from the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import unimem as um
from support.models.plans import assert_true, validated
from unimem.planning import hosts
from unimem.planning import plan as planner
from unimem.planning.streaming import Reading
from unimem.system import limits
from unimem.system.disk_speed import DiskSpeed
from unimem.system.disks import Disk
from unimem.system.limits import Limit
from unimem.weights import loading

MIB = 1 << 20
SPEED = DiskSpeed(100 * MIB, 1000 * MIB, "2026-11-28")
DISK = Disk("vda", ("/",), 128 << 10, "/sys/block/vda/queue/read_ahead_kb", SPEED)
N, USED, LAYERS = 8, 3, 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
    from support.models.make import SMALL, write_model

    folder = tmp_path_factory.mktemp("models")
    mixture = write_model(folder / "mixture.gguf", "qwen3moe", SMALL, experts=(N, USED))
    return {"mixture": str(mixture), "dense": str(write_model(folder / "dense.gguf", shape=SMALL))}


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing press on memory, which would have files copied, or leave the page cache."""
    monkeypatch.setattr(hosts, "memory_pressure", lambda: ())
    monkeypatch.setattr(loading, "cached_bytes", lambda model: sum(f.nbytes for f in model.files))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[Disk | None], None]:
    """Put all files on this disk; at first, one of known speed."""

    def give(found: Disk | None) -> None:
        monkeypatch.setattr(planner, "disk_of", lambda path: found)

    give(DISK)
    return give


@pytest.fixture
def mixture(models: dict[str, str], disk: object) -> str:
    return models["mixture"]


def rows(plan: um.Plan) -> dict[str, int]:
    return {row.category: row.nbytes for row in plan.rows}


def weights_of(plan: um.Plan | um.Report) -> dict[str, int]:
    return {row.category: row.nbytes for row in plan.rows if row.category.startswith("weights")}


def streamed(path: str, budget: int | str | None = None, **options: Any) -> um.Plan:
    asked: Any = {"ctx": 64, "threads": 2, "pages": "4k"} | options
    plan = um.plan(path, load="stream", weights_budget=budget, **asked)
    validated(plan)
    return plan


def read_by(plan: um.Plan) -> Reading:
    assert plan.reading is not None
    return plan.reading


def least_bytes(path: str) -> int:
    with pytest.raises(um.CapacityError, match="takes at least") as caught:
        streamed(path, 1)
    return caught.value.asked


@pytest.mark.parametrize("pages", ["4k", "thp"])
@pytest.mark.parametrize("name", ["mixture", "dense"])
def test_the_rows_are_those_of_opened_weights(
    models: dict[str, str], name: str, pages: Any
) -> None:
    path = models[name]
    least = least_bytes(path) if pages == "4k" else 64 * MIB
    for budget in (least, least + 3 * MIB, 1 << 40):
        plan = streamed(path, budget, pages=pages)
        assert plan.weights_budget == budget
        before = weights_of(um.report())
        with um.open_weights(path, load="stream", budget=budget, pages=pages) as weights:
            taken = weights_of(um.report())
            opened = um.plan(weights, ctx=64, threads=2)
        new = {key: n - before.get(key, 0) for key, n in taken.items() if n != before.get(key)}
        assert weights_of(plan) == new == weights_of(opened)
        assert (opened.load, opened.weights_budget) == ("stream", budget)
        assert opened.reading == plan.reading


@pytest.mark.usefixtures("disk")
def test_experts_without_a_slot_are_read(mixture: str) -> None:
    everything = streamed(mixture, 1 << 40)
    whole = read_by(everything).whole_bytes
    assert (everything.verdict, read_by(everything).token_bytes) == ("fits", 0)
    assert sum(weights_of(everything).values()) == whole
    assert streamed(mixture, whole).verdict == "fits"
    with um.open_weights(mixture) as weights:
        tensors = weights.tensors
        experts = sum(t.nbytes for name, t in tensors.items() if "_exps" in name)
        others = sum(t.nbytes for name, t in tensors.items() if "_exps" not in name)
        others -= tensors["token_embd.weight"].nbytes
    for budget in (least_bytes(mixture), whole * 3 // 4, whole - 1):
        plan = streamed(mixture, budget)
        assert (plan.verdict, plan.fits, plan.spilled_bytes) == ("streams", True, 0)
        found = read_by(plan)
        assert found.used_bytes == others + experts * USED // N
        slot = rows(everything)["weights:slots"] / (N * LAYERS)
        share = 1 - int(rows(plan)["weights:slots"] / slot) / (N * LAYERS)
        assert found.token_bytes == pytest.approx(share * experts * USED / N, abs=1)
        assert found.whole_bytes == whole
        assert sum(weights_of(plan).values()) <= budget


@pytest.mark.usefixtures("disk")
def test_layers_without_a_slot_are_read(models: dict[str, str]) -> None:
    path = models["dense"]
    least = least_bytes(path)
    whole = read_by(streamed(path, 1 << 40)).whole_bytes
    with um.open_weights(path) as weights:
        layers = sum(t.nbytes for name, t in weights.tensors.items() if name.startswith("blk."))
    slot = (whole - least) // (LAYERS - 2)
    for n, passing in ((2, 4), (3, 3), (4, 0)):  # two slots are for the layers that pass
        found = read_by(streamed(path, least + (n - 2) * slot))
        assert found.token_bytes == pytest.approx(layers * passing / LAYERS, rel=1e-3)


def test_the_rate_is_of_reading_and_then_computing(
    mixture: str, disk: Callable[[Disk | None], None]
) -> None:
    budget = least_bytes(mixture)
    plan = streamed(mixture, budget)
    found = read_by(plan)
    seconds = found.token_bytes / SPEED.bytes_per_second
    seconds += found.used_bytes / SPEED.memory_bytes_per_second
    assert found.tokens_per_second == pytest.approx(1 / seconds)
    assert (found.disk, found.read_ahead_bytes, found.measured) == ("vda", 128 << 10, "2026-11-28")
    verdict = str(plan).partition("\n")[0]
    assert verdict.startswith("Streams: ")
    assert f" in RAM, {1 / seconds:.0f} tokens/s. Largest context " in verdict
    assert " ms at 100.0 MiB/s, as measured on 2026-11-28, beside " in " ".join(str(plan).split())
    assert "doctor --disk" not in str(plan)
    for unknown in (replace(DISK, speed=None), None):
        disk(unknown)
        plan = streamed(mixture, budget)
        assert read_by(plan).token_bytes == found.token_bytes
        assert (read_by(plan).tokens_per_second, read_by(plan).bytes_per_second) == (None, None)
        assert f"This measures it:\n   unimem doctor --disk {mixture}\n" in str(plan)
        assert "tokens/s" not in str(plan)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give the machine so much room, all of it droppable pages of files."""

    def give(nbytes: int) -> None:
        limit = Limit("memory of the machine", 2 * nbytes, nbytes, "take less")
        monkeypatch.setattr(limits, "memory_limits", lambda: (limit,))

    monkeypatch.setattr(limits, "huge_pools", dict)
    return give


def test_auto_streams_what_would_not_stay(mixture: str, room: Callable[[int], None]) -> None:
    size = os.path.getsize(mixture)
    rest = um.plan(mixture, ctx=64, threads=2, load="map").required_bytes
    for share, verdict, load in ((1.1, "fits", "map"), (0.8, "streams", "stream")):
        room(rest + int(share * size))
        plan = um.plan(mixture, ctx=64, threads=2)
        assert (plan.verdict, plan.load) == (verdict, load)
    assert plan.load_reason == "mapped, it would not stay in memory"
    assert plan.weights_budget is not None
    assert sum(weights_of(plan).values()) <= plan.weights_budget <= 0.8 * size * 7 / 8
    assert plan.weights_budget > 0.8 * size * 7 / 8 - 4096 - rest
    mapped = um.plan(mixture, ctx=64, threads=2, load="map")
    assert mapped.verdict == "reads from disk"
    assert mapped.advice[0].options == {"load": "stream"}
    assert_true(mapped, mixture, load="map", threads=2)
    needed = um.plan(mixture, ctx=64, threads=2, engine="llama.cpp").required_bytes
    room(needed + size // 2)
    other = um.plan(mixture, ctx=64, threads=2, engine="llama.cpp")
    assert (other.verdict, other.load) == ("reads from disk", "map")
    least = streamed(mixture, least_bytes(mixture))
    room(least.required_bytes - rows(least)["other"] - 4096)  # which the plan itself has taken
    assert um.plan(mixture, ctx=64, threads=2, pages="4k", load="auto").load == "map"
    assert streamed(mixture).verdict == "does not fit"


def test_a_context_has_room_beside_the_least_slots(
    mixture: str, room: Callable[[int], None]
) -> None:
    room(streamed(mixture, least_bytes(mixture), ctx=512).required_bytes)
    plan = um.plan(mixture, load="stream", threads=2, pages="4k")
    assert plan.max_ctx is not None
    assert 256 < plan.max_ctx < 1024
    assert plan.ctx == plan.max_ctx
    assert plan.fits


def test_advice_names_the_budget_that_reads_nothing(
    mixture: str, room: Callable[[int], None]
) -> None:
    plan = streamed(mixture, least_bytes(mixture))
    assert plan.advice[0].options == {"weights_budget": read_by(plan).whole_bytes}
    assert plan.advice[0].fits
    assert not any("more in" in advice.text for advice in plan.advice)
    assert_true(plan, mixture, load="stream", threads=2, pages="4k")
    needed = plan.required_bytes + read_by(plan).whole_bytes - least_bytes(mixture)
    room(needed - rows(plan)["other"] - 3 * 4096)
    plan = streamed(mixture)
    assert plan.verdict == "streams"
    assert all("weights_budget" not in advice.options for advice in plan.advice)
    assert plan.advice[-1].text == "12.0 KiB more in memory of the machine: take less"


def test_a_mapped_file_reads_ahead(mixture: str, room: Callable[[int], None], disk: Any) -> None:
    needed = um.plan(mixture, ctx=64, engine="llama.cpp").required_bytes
    room(needed + os.path.getsize(mixture) // 2)
    found = []
    for ahead in (None, 0, 128 << 10, 8 << 20):
        disk(replace(DISK, read_ahead_bytes=ahead))
        plan = um.plan(mixture, ctx=64, load="map", engine="llama.cpp")
        validated(plan)
        found.append(read_by(plan))
    # Of experts alone: whatever every token uses stays.
    assert found[1].token_bytes == found[0].token_bytes
    assert found[0].token_bytes == pytest.approx(plan.spilled_bytes * USED / N, abs=1)
    more = [one.token_bytes - found[0].token_bytes for one in found[2:]]
    parts = LAYERS * USED * 3
    assert 0.3 * parts * (128 << 10) < more[0] < 0.8 * parts * (128 << 10)
    assert more[1] == pytest.approx(64 * more[0], rel=1e-3)
    rate = f"{found[-1].tokens_per_second:.2g} tokens/s."
    assert f" That is at most {rate}" in " ".join(str(plan).split())
    # The engine asks the kernel for experts.
    needed = um.plan(mixture, ctx=64, threads=2, load="map").required_bytes
    room(needed + os.path.getsize(mixture) // 2)
    own = um.plan(mixture, ctx=64, threads=2, load="map", engine="unimem")
    assert read_by(own).token_bytes == pytest.approx(own.spilled_bytes * USED / N, abs=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights_budget": "much"}, r"weights_budget: expected bytes, a size such as '8G'"),
        ({"weights_budget": 0}, r"weights_budget: expected"),
        (
            {"weights_budget": "1G", "load": "map"},
            "weights_budget='1G': load='map' streams nothing",
        ),
        ({"load": "stream", "numa": "mirror:0,1"}, "one copy.*'mirror:0,1'.*interleave"),
    ],
)
def test_wrong_options(mixture: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        um.plan(mixture, **options)


def test_what_cannot_be_streamed(mixture: str) -> None:
    dims = um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512)
    with pytest.raises(ValueError, match="expected a model file"):
        um.plan(dims, load="stream")
    with um.stage(mixture) as staged, pytest.raises(ValueError, match="already: load='map'"):
        um.plan(staged.path, load="stream")
    with um.open_weights(mixture) as weights, pytest.raises(ValueError, match="opened already"):
        um.plan(weights, load="stream")


def test_a_budget_streams_and_shares_are_of_the_machine(mixture: str) -> None:
    there = {"memory": "64M"}
    plan = um.plan(mixture, ctx=64, weights_budget="25%", machine=there)
    assert (plan.load, plan.weights_budget) == ("stream", 16 * MIB)
    assert read_by(plan).disk is None
    with um.open_weights(mixture, load="stream") as weights:
        assert um.plan(weights, ctx=64).verdict == "fits"
