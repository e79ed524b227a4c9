"""Plans against limits (small cgroups, pools, locks, nodes), and their advice."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.kernel.cgroups import SmallCgroup, cgroup_1gb, small_cgroup  # noqa: F401 - a fixture
from support.models.plans import DIMS, assert_true, validated
from unimem.accounting import published
from unimem.system import limits
from unimem.system.limits import HugePool, Limit, Node

jsonschema = pytest.importorskip(
    "jsonschema", reason="jsonschema (extra test) checks documents: pip install '.[test]'"
)

GIB, MIB = 1 << 30, 1 << 20


def check_of(plan: um.Plan, name: str) -> Any:
    (check,) = (check for check in plan.checks if name in check.name)
    return check


# ---- a cgroup of 1 GB, and a model of 2 GB ------------------------------------------------------


@pytest.fixture
def large_model(tmp_path: Path) -> Path:
    """Write a model of 2 GB."""
    return write_hole(tmp_path / "large.gguf", "F32", inner=21504, vocab=32000)


def write_hole(path: Path, kind: str, *, inner: int, vocab: int) -> Path:
    """Write a sparse model: only its header is on the disk."""
    pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
    import gguf
    import numpy as np

    types = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        **{"context_length": 512, "embedding_length": 2048, "block_count": 4},
        **{"feed_forward_length": inner, "attention.head_count": 16},
        **{"attention.head_count_kv": 2, "rope.dimension_count": 128},
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    of_layer: dict[str, tuple[int, ...]] = {
        **{"attn_norm": (2048,), "ffn_norm": (2048,)},
        **{"attn_q": (2048, 2048), "attn_k": (256, 2048), "attn_v": (256, 2048)},
        **{"attn_output": (2048, 2048), "ffn_gate": (inner, 2048)},
        **{"ffn_up": (inner, 2048), "ffn_down": (2048, inner)},
    }
    shapes = {f"blk.{i}.{name}": shape for i in range(4) for name, shape in of_layer.items()}
    shapes |= {"token_embd": (vocab, 2048), "output_norm": (2048,)}
    total = 0
    for name, shape in shapes.items():
        number = types[kind] if len(shape) == 2 else types.F32
        values, block_bytes = gguf.GGML_QUANT_SIZES[number]
        row_bytes = shape[-1] // values * block_bytes
        rows = (*shape[:-1], row_bytes)
        writer.add_tensor_info(
            f"{name}.weight", rows, np.dtype(np.uint8), math.prod(rows), raw_dtype=number
        )
        total += -(-math.prod(rows) // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(-(-file.seek(0, 2) // 32) * 32 + total)
    assert path.stat().st_blocks * 512 < MIB
    return path


REFUSE = """
import warnings
import unimem as um
from unimem.system import limits
from unimem._core.status import ledger

path, name = {path!r}, {name!r}
plan = um.plan(path, load="copy")
assert not plan.fits
(worst,) = [check for check in plan.checks if check.name == name]
assert worst.limit_bytes == 1 << 30 and worst.needed_bytes > 2 * 10**9 and not worst.fits
assert plan.advice[0].options == {{"load": "map"}}, plan.advice
assert um.plan(path).fits and um.plan(path).load == "map"
assert um.plan(path).spilled_bytes > 10**9

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def reads():
    fields = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
    return int(fields["rchar"])

makers = [
    lambda: um.open_weights(path, load="copy"),
    lambda: um.Layout.for_model(path, load="copy"),
]
try:
    from unimem.engine import Decoder
    makers.append(lambda: Decoder(path, load="copy"))
except ImportError:
    pass
for make in makers:
    before, read = rss(), reads()
    try:
        make()
    except um.CapacityError as error:
        assert name in str(error), error
    else:
        raise AssertionError("not refused")
    assert all(row["mapped_bytes"] == 0 for row in ledger().values()), ledger()
    assert rss() - before < 32 << 20 and reads() - read < 8 << 20
print("refused", len(makers))
"""


def test_a_copy_too_large_for_a_cgroup_is_refused_first(
    cgroup_1gb: SmallCgroup,  # noqa: F811
    large_model: Path,
) -> None:
    said = cgroup_1gb.run(REFUSE.format(path=str(large_model), name=cgroup_1gb.name))
    assert said.startswith("refused")


RUN = """
import warnings
import unimem as um
from unimem.engine import Decoder

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    with Decoder({path!r}, load="map", threads=2, ctx=64) as decoder:
        in_ram = decoder.weights.residency().resident_bytes
assert [w.category for w in told] == [um.PlacementWarning], told
assert {name!r} in str(told[0].message) and "every token" in str(told[0].message)
print(in_ram)
"""


def test_a_spilling_mapped_model_runs_unwarmed(
    cgroup_1gb: SmallCgroup,  # noqa: F811
    large_model: Path,
) -> None:
    pytest.importorskip("unimem_ggml", reason="the engine needs ggml: pip install ./ggml '.[run]'")
    said = cgroup_1gb.run(RUN.format(path=str(large_model), name=cgroup_1gb.name))
    # The first layer is asked for, and nothing else.
    layer = 4 * (3 * 2048 * 21504 + 2 * 2048 * (2048 + 256))
    assert int(said) < layer + 64 * MIB


REPACK = """
import unimem as um
from unimem.engine import Decoder

options = dict(ctx=64, threads=2)
for asked in ({{}}, {{"lock": True, "warm": True}}):
    plan = um.plan({path!r}, load="repack", **options, **asked)
    assert plan.verdict == "fits", plan
    with (
        um.Layout.for_model({path!r}, load="repack", **options, **asked) as layout,
        Decoder(layout.weights, layout=layout, **options) as decoder,
    ):
        assert {{r.category: r.nbytes for r in decoder.report().rows}} == {{
            r.category: r.nbytes for r in plan.rows
        }}
        layout.freeze()
        decoder.prefill([1, 2, 3])
        (block,) = decoder._memory.blocks[1:]
        rest = layout.weights.nbytes // 4
        assert layout.weights.residency().resident_bytes < rest
        mapped, own = (one.verify().locked_bytes for one in decoder._memory.blocks)
        if asked:
            assert own == block.nbytes and mapped < rest, (own, mapped)
        else:  # of the file what a token reads, since others could push it out of so small a cgroup
            assert own == 0 and 0 < mapped < rest, (own, mapped)
print("ran", layout.plan.load)
"""


@pytest.mark.uncounted
def test_a_repacked_model_may_fill_most_of_a_cgroup(tmp_path: Path) -> None:
    """Repacked parts of the file never stay beside the result."""
    pytest.importorskip("unimem_ggml", reason="the engine needs ggml: pip install ./ggml '.[run]'")
    from unimem.backends import ggml_orders

    if ggml_orders.find_order(2, (256, 64)) is None:
        pytest.skip("this build of ggml has no order for q4_0 on this CPU")
    path = write_hole(tmp_path / "large.gguf", "Q4_0", inner=8192, vocab=8000)
    with small_cgroup(194 * MIB) as cgroup:
        assert path.stat().st_size > 0.7 * 194 * MIB
        assert cgroup.run(REPACK.format(path=str(path))) == "ran repack\n"


# ---- limits that are invented -------------------------------------------------------------------


def test_a_cgroup_holds_files_read_by_others(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = um.plan(DIMS, ctx=100, pages="4k")
    rest = plan.required_bytes
    file = plan.total_bytes - rest
    for group, spilled in (
        (Limit("cgroup /a", GIB * 9, GIB * 9 - rest - file, ""), 0),
        (Limit("cgroup /a", GIB * 9, GIB * 9 - rest - file + 4096, ""), 4096),
        # Recently used file pages are dropped for other files.
        (Limit("cgroup /a", GIB * 9, GIB * 9 - rest - file + 4096, "", 4096, 4096), 0),
    ):
        memory(64 * GIB, group)
        assert um.plan(DIMS, ctx=100, pages="4k").spilled_bytes == spilled


def test_a_plan_and_a_load_request_the_same(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = um.plan(DIMS, load="copy", ctx=100)
    needed = plan.required_bytes
    mapped = um.plan(DIMS, load="map", ctx=100)
    for missing in (0, 1):
        for room in (
            (Limit("memory of the machine", 9 * GIB, 9 * GIB - needed + missing, ""),),
            (
                Limit("memory of the machine", 64 * GIB, 0, ""),
                Limit("cgroup /a", 9 * GIB, 9 * GIB - needed + missing, "", 4096, 4096),
            ),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(limits, "memory_limits", lambda room=room: room)
                found = [(one.room_bytes, partial(replace, one)) for one in room]
                patch.setattr(limits, "_memory", lambda *_, found=found: found)
                assert um.plan(DIMS, load="copy", ctx=100).fits == fits(limits.require, needed)
                file = mapped.total_bytes - mapped.required_bytes
                for ctx in (100, 200):
                    other = um.plan(DIMS, load="map", ctx=ctx)
                    rest = other.required_bytes
                    assert (other.verdict == "fits") == fits(
                        limits.require_cached, file + rest, 0
                    ), (ctx, room)


def fits(require: Callable[..., None], *nbytes: int) -> bool:
    try:
        require(*nbytes, "it")
    except um.CapacityError:
        return False
    return True


def test_every_limit_is_checked(memory: Any) -> None:
    memory(64 * GIB, Limit("cgroup /a", 8 * GIB, 7 * GIB, "raise a"))
    plan = um.plan(DIMS, load="copy", ctx=100)
    assert [check.name for check in plan.checks] == ["memory of the machine", "cgroup /a"]
    assert [check.fits for check in plan.checks] == [True, False]
    with pytest.raises(um.CapacityError, match="cgroup /a"):
        plan.require_fits()
    assert any("raise a" in advice.text for advice in plan.advice)
    document = validated(plan)
    assert document["checks"][1]["needed_bytes"] == plan.required_bytes


def test_locked_memory(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = Limit("locked memory (memlock)", 8 * MIB, MIB, "ulimit -l unlimited")
    monkeypatch.setattr(limits, "memlock", lambda: limit)
    plan = um.plan(DIMS, ctx=100, pages="4k", lock=True)
    check = check_of(plan, "memlock")
    assert check.needed_bytes == plan.total_bytes - published.NBYTES
    assert (check.available_bytes, check.fits, check.is_hard) == (7 * MIB, False, False)
    plan.require_fits(strict=False)
    with pytest.raises(um.CapacityError, match="memlock"):
        plan.require_fits()
    assert {"lock": False} in [advice.options for advice in plan.advice]
    assert_true(plan, DIMS, pages="4k", lock=True)
    # Locked memory cannot be dropped.
    monkeypatch.setattr(limits, "memlock", lambda: None)
    free = um.plan(DIMS, ctx=100, pages="4k", lock=True)
    assert free.required_bytes == free.total_bytes


def test_a_pool_of_huge_pages(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HugePool(2 * MIB, 10, 10, 0, 0, {0: (10, 10)})
    monkeypatch.setattr(limits, "huge_pools", lambda: {"2m": pool})
    plan = um.plan(DIMS, ctx=100, pages="2m", load="copy")
    check = check_of(plan, "hugetlb pool of 2m pages")
    assert not check.fits
    assert check.available_bytes == 20 * MIB
    assert check.needed_bytes % (2 * MIB) == 0
    assert check.needed_bytes >= plan.total_bytes - published.NBYTES
    assert "nr_hugepages" in check.remedy
    assert {"pages": "thp"} in [advice.options for advice in plan.advice]
    assert_true(plan, DIMS, pages="2m", load="copy")
    # Pool pages do not count against other memory.
    small = replace(DIMS, num_layers=1, vocab_size=512, hidden_size=64, intermediate_size=64)
    inside = um.plan(small, ctx=100, pages="2m", load="copy")
    assert inside.fits
    (ram,) = (check for check in inside.checks if check.is_hard)
    assert ram.needed_bytes == published.NBYTES
    assert inside.required_bytes == inside.total_bytes > 0


def test_bound_blocks_share_the_pool_of_a_node() -> None:
    """A node has 125 pages: one conversation's cache takes 100, and the second lies in RAM."""
    dims = um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512)
    options: dict[str, Any] = {"ctx": 512, "threads": 1, "batch": 655, "numa": "bind:0"}
    machine = {"memory": "900M", "nodes": 2, "pools": {"2m": 250}}
    one, two = (um.plan(dims, machine=machine, sessions=n, **options) for n in (1, 2))
    assert one.fits
    assert one.pool_bytes == two.pool_bytes
    assert 190 * MIB < one.pool_bytes["2m"] <= 250 * MIB
    assert two.checks[0].needed_bytes - one.checks[0].needed_bytes > 190 * MIB
    alone = machine | {"nodes": 1}
    anywhere = um.plan(dims, machine=alone, sessions=2, **options)
    assert anywhere.pool_bytes["2m"] == 2 * one.pool_bytes["2m"]


@pytest.mark.parametrize(
    ("numa", "names", "needed"),
    [
        ("bind:1", ["node 1"], [1.0]),
        ("bind:0-1", ["nodes 0-1"], [1.0]),
        ("interleave", ["node 0", "node 1"], [0.5, 0.5]),
        ("weighted:0,1", ["node 0", "node 1"], [0.75, 0.25]),
        ("preferred:1", [], []),
    ],
)
def test_nodes(
    room: Any, monkeypatch: pytest.MonkeyPatch, numa: str, names: list[str], needed: list[float]
) -> None:
    nodes = {n: Node(n, 8 * GIB, GIB, GIB + n, (n,), (10, 20), True) for n in (0, 1)}
    monkeypatch.setattr(limits, "nodes", lambda: nodes)
    monkeypatch.setattr(limits, "node_weights", lambda _: {0: 3, 1: 1})
    plan = um.plan(DIMS, ctx=100, pages="4k", numa=numa, load="copy")
    checks = [check for check in plan.checks if check.name.startswith("node")]
    assert [check.name for check in checks] == names
    placed = plan.total_bytes - published.NBYTES
    for check, share in zip(checks, needed, strict=True):
        assert check.needed_bytes == pytest.approx(share * placed, abs=8)
        assert not check.is_hard
    # A preferred node is no limit, and the plan states the amount outside it.
    assert ("numa" in plan.facts) == numa.startswith("preferred")
    if numa.startswith("preferred"):
        assert plan.fits
        assert "preferred:1: there is room for 1.0 GiB of 2.1 GiB" in str(plan)
        validated(plan)
    if numa == "bind:1":
        assert checks[0].available_bytes == GIB + 1
        assert not checks[0].fits
        assert {"numa": "preferred:1"} in [advice.options for advice in plan.advice]


def test_a_missing_node_is_not_advised(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {0: Node(0, 8 * GIB, 8 * GIB, 8 * GIB, (0,), (10,), True)}
    monkeypatch.setattr(limits, "nodes", lambda: nodes)
    plan = um.plan(DIMS, ctx=100, pages="4k", numa="bind:99", load="copy")
    advised = [advice.options["numa"] for advice in plan.advice if "numa" in advice.options]
    assert advised == [None]


@pytest.mark.parametrize(
    ("options", "missed"),
    [
        ({"pages": "2m"}, "hugetlb pool of 2m pages"),
        ({"pages": "1g"}, "hugetlb pool of 1g pages"),
        ({"numa": "bind:99"}, "node 99"),
        ({"numa": "interleave:0,99"}, "node 99"),
        ({"lock": True}, "locked memory (memlock)"),
    ],
)
def test_a_fallback_does_not_cut_the_context(
    room: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], missed: str
) -> None:
    nodes = {0: Node(0, 99 * GIB, 99 * GIB, 99 * GIB, (0,), (10,), True)}
    monkeypatch.setattr(limits, "nodes", lambda: nodes)
    limit = Limit("locked memory (memlock)", MIB, 0, "ulimit -l unlimited")
    monkeypatch.setattr(limits, "memlock", lambda: limit)
    for load in ("map", "copy"):
        plan = um.plan(DIMS, load=load, **options)
        assert (plan.ctx, plan.max_ctx) == (4096, DIMS.max_seq_len)
        assert (plan.verdict, plan.fits) == ("fits", True)
        assert [check.name for check in plan.checks if not check.fits] == [missed]
        assert f"Not as asked for: {missed}." in " ".join(str(plan).split())
        # The advice serves the soft limit; the plan itself fits.
        assert {len(advice.options) for advice in plan.advice} <= {0, 1}
        assert not {"ctx", "kv_dtype", "window"} & {k for a in plan.advice for k in a.options}
        validated(plan)
        refused = um.plan(DIMS, load=load, strict=True, **options)
        assert (refused.ctx, refused.max_ctx, refused.verdict) == (1, 0, "does not fit")
        with pytest.raises(um.CapacityError, match=re.escape(missed)):
            refused.require_fits(strict=False)


@pytest.mark.parametrize("options", [{"pages": "2m"}, {"numa": "bind:99"}])
def test_a_layout_falls_back_with_the_whole_context(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    pytest.importorskip("unimem_ggml", reason="the engine needs ggml: pip install ./ggml '.[run]'")
    from unimem.engine import Decoder, embedded_model

    monkeypatch.setattr(limits, "huge_pools", dict)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with um.Layout.for_model(embedded_model(), **options) as layout:
            assert layout.plan is not None
            assert (layout.plan.ctx, layout.plan.verdict) == (512, "fits")
            assert isinstance(layout.weights, um.Weights)
            with Decoder(layout.weights, layout=layout) as decoder:
                assert decoder.ctx == 512
    assert {each.category for each in told} == {um.PlacementWarning}
