"""Plans for other machines, from figures, `doctor` documents and cgroups, without this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import unimem as um
from support.kernel.cgroups import SmallCgroup, cgroup_512mb  # noqa: F401 - a fixture
from unimem.base.text import parse_bytes
from unimem.engine import embedded_model
from unimem.planning.hosts import CgroupHost
from unimem.planning.plan import plans_of
from unimem.system import limits
from unimem.system.cgroups import cgroups_above
from unimem.system.limits import Limit
from unimem.weights.remote_files import open_files

DIMS = um.ModelDims(2048, 5632, 32, 4, 64, 32000, 22, 8192)
GIB, MIB = 1 << 30, 1 << 20
ASKED = ("memory_limits", "huge_pools", "nodes", "memlock", "node_weights", "thread_count")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail every question to this machine."""
    for name in (*ASKED, "available_bytes", "require"):
        asked = Mock(side_effect=AssertionError(f"{name} of this machine"))
        monkeypatch.setattr(limits, name, asked)


def checks_of(plan: um.Plan) -> dict[str, tuple[int, int]]:
    return {check.name: (check.available_bytes, check.limit_bytes) for check in plan.checks}


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("model", "threads"), [(DIMS, 8), (embedded_model(), 1)], ids=["dims", "file"]
)
def test_every_limit_is_the_other_machine_s(model: Any, threads: int) -> None:
    machine: dict[str, Any] = {"memory": "16G", "cpus": 8, "pools": {"2m": 4096}, "nodes": 2}
    plan = um.plan(model, machine=machine, pages="2m", numa="bind:1", lock=True, load="copy")
    assert (plan.threads, plan.verdict) == (threads, "fits")
    assert "machine   another one: 16.0 GiB, 8 cores, 2 nodes, pool 2m=4096\n" in str(plan)
    assert checks_of(plan) == {
        # Reserved pages are not free, and half of them lie on a node.
        "memory of the machine": (8 * GIB, 16 * GIB),
        "hugetlb pool of 2m pages": (4 * GIB, 8 * GIB),
        "node 1": (4 * GIB, 8 * GIB),
    }
    um.plan(model, machine=machine, numa="weighted", load="auto")
    alone = um.plan(model, machine={"memory": 16 * GIB}, pages="2m")
    assert alone.threads == 1
    assert checks_of(alone)["hugetlb pool of 2m pages"] == (0, 0)


@pytest.mark.usefixtures("elsewhere")
def test_mirrored_weights_need_room_on_each_node() -> None:
    machine: dict[str, Any] = {"memory": "16G", "cpus": 8, "nodes": 2}
    options: dict[str, Any] = {"machine": machine, "pages": "4k", "ctx": 64}
    one = um.plan(embedded_model(), load="copy", **options)
    both = um.plan(embedded_model(), numa="mirror", **options)
    assert both.load in ("copy", "direct")
    assert both.fits
    assert both.facts["numa"] == "mirror: 2 copies of the weights, on nodes 0-1"
    weights = [row for row in one.rows if row.category.startswith("weights:")]
    assert [row.nbytes for row in both.rows] == [
        row.nbytes * (2 if row in weights else 1) for row in one.rows
    ]
    copy_bytes = sum(row.nbytes for row in weights)
    needed = {check.name: check.needed_bytes for check in both.checks}
    assert (needed["node 0"], needed["node 1"]) == (copy_bytes, copy_bytes)
    assert needed["memory of the machine"] == both.total_bytes
    with pytest.raises(ValueError, match="run a decoder on each node"):
        um.plan(embedded_model(), numa="mirror", load="repack", **options)
    only = um.plan(embedded_model(), numa="mirror:1", **options)
    assert only.rows == one.rows
    assert [check.name for check in only.checks][1:] == ["node 1"]


@pytest.mark.usefixtures("elsewhere")
def test_a_node_without_room_for_a_copy() -> None:
    copy = um.plan(DIMS, load="copy", pages="4k", ctx=64, machine={"memory": "64G"})
    nbytes = sum(row.nbytes for row in copy.rows if row.category.startswith("weights:"))
    options: dict[str, Any] = {"load": "copy", "pages": "4k", "ctx": 64, "numa": "mirror"}
    options["machine"] = {"memory": 2 * nbytes - 2 * MIB, "cpus": 2, "nodes": 2}
    plan = um.plan(DIMS, **options)
    short = [check for check in plan.checks if not check.fits]
    assert [(check.name, check.needed_bytes, check.is_hard) for check in short] == [
        ("node 0", nbytes, False),
        ("node 1", nbytes, False),
    ]
    assert (plan.fits, plan.rows) == (True, copy.rows)  # one copy, anywhere
    assert {"numa": None} in [advice.options for advice in plan.advice]
    with pytest.raises(um.CapacityError, match=r"node [01]"):
        um.plan(DIMS, strict=True, **options).require_fits()


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("memory", "verdict"), [("8G", "fits"), ("2G", "reads from disk"), ("64M", "does not fit")]
)
def test_the_verdict_is_about_the_other_machine(memory: str, verdict: str) -> None:
    plan = um.plan(DIMS, machine={"memory": memory}, ctx=4096)
    assert plan.verdict == verdict
    assert plan.available_bytes == parse_bytes(memory)


def test_a_machine_from_a_doctor_document() -> None:
    here = um.doctor()
    limit = Limit("memory of the machine", 8 * GIB, 5 * GIB, "less")
    locks = Limit("locked memory (memlock)", MIB, 0, "ulimit")
    there = replace(
        here,
        memory=replace(here.memory, limits=(limit,), memlock=locks),
        cpu=replace(here.cpu, usable_cores=17),
        pools={},
    )
    plan = um.plan(DIMS, machine=there, lock=True, pages="1g", ctx=100)
    assert plan.threads == 17
    found = checks_of(plan)
    assert found["memory of the machine"] == (3 * GIB, 8 * GIB)
    assert found["locked memory (memlock)"] == (MIB, MIB)
    assert found["hugetlb pool of 1g pages"] == (0, 0)


def test_pages_cached_here_do_not_count_there(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = um.plan(embedded_model(), machine={"memory": "1G"})
    needed = plan["other"].nbytes  # the copy of the header, which is read here
    assert plan.checks[0].available_bytes == GIB
    assert plan.checks[0].needed_bytes > needed > 0


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ({}, "expected its 'memory', as in {'memory': '16G'"),
        ({"memory": "16G", "cpu": 8}, "expected 'memory', 'cpus', 'pools', 'nodes'.* got 'cpu'"),
        *(({"memory": wrong}, "memory: expected bytes, or a size such as '16G'")
          for wrong in ("much", "", "16X", "-1G", 0, -1, 1.5, True, None, "9" * 19 + "T")),
        *(({"memory": "1G", "cpus": wrong}, "cpus: expected an integer from 1 to 8192")
          for wrong in (0, "8", 1.5, True, 8193)),
        *(({"memory": "1G", "nodes": wrong}, "nodes: expected an integer from 1 to 1024")
          for wrong in (0, "2", 1025)),
        ({"memory": "1G", "pools": {"3m": 1}}, "pools: expected pages of '2m' or '1g', got '3m'"),
        ({"memory": "1G", "pools": {"2m": -1}}, "pools: 2m: expected an integer from 0"),
        ({"memory": "1G", "pools": {"2m": 513}}, "pools: expected at most the memory, 1.0 GiB"),
        ({"memory": "1G", "pools": 4}, "pools: expected pages by size"),
        ("/nowhere/at/all", "machine: expected the folder of a cgroup"),
        ("", "machine: expected the folder of a cgroup"),
    ],
)  # fmt: skip
def test_invalid_machines(machine: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        um.plan(DIMS, machine=machine)


def test_local_options_are_refused_for_another_machine() -> None:
    for wrong in (16, object(), ["16G"]):
        with pytest.raises(TypeError, match=r"machine: expected the result of unimem\.doctor"):
            um.plan(DIMS, machine=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device='cuda:0': a GPU of this machine"):
        um.plan(DIMS, machine={"memory": "1G"}, device="cuda:0")
    with (
        um.open_weights(embedded_model()) as weights,
        pytest.raises(ValueError, match="opened weights are in memory here: plan their file"),
    ):
        um.plan(weights, machine={"memory": "1G"})


def test_many_machines_are_planned_with_one_opened_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = str(embedded_model())
    options: dict[str, Any] = {"ctx": 64, "kv_dtype": "f16", "load": "copy", "sessions": 3}
    machines: list[Any] = [{"memory": "1G"}, {"memory": "2M"}, um.doctor()]
    expected = [um.plan(path, machine=machine, **options) for machine in machines]
    opened = Mock(wraps=open_files)
    monkeypatch.setattr("unimem.planning.plan.open_files", opened)
    with plans_of(path) as of:
        found = [of(machine, **options) for machine in machines]
    assert opened.call_count == 1
    # The machine's free memory changes meanwhile.
    assert [plan.rows for plan in found] == [plan.rows for plan in expected]
    assert found[:2] == expected[:2]
    assert [plan.verdict for plan in found] == ["fits", "does not fit", "fits"]


def test_a_cgroup_of_this_machine(cgroup_512mb: SmallCgroup) -> None:  # noqa: F811
    for folder in (cgroup_512mb.folder, str(cgroup_512mb.folder)):
        plan = um.plan(DIMS, machine=folder, ctx=4096)
        available, limit = checks_of(plan)[cgroup_512mb.name]
        assert limit == 512 * MIB
        assert available <= limit
        assert plan.verdict == "reads from disk"
        assert plan.facts["machine"] == f"this one, in cgroup {folder}"
    assert "machine" not in um.plan(DIMS).facts
    assert cgroup_512mb.name not in checks_of(um.plan(DIMS, ctx=4096))


def test_the_own_cgroup_is_the_default() -> None:
    own = next(cgroups_above("memory"), None)
    if own is None or not Path(own.folder).is_dir():
        pytest.skip("no memory controller is mounted")
    names = [limit.name for limit in CgroupHost(own.folder).memory_limits()]
    assert names == [limit.name for limit in limits.memory_limits()]


@pytest.mark.usefixtures("elsewhere")
def test_sessions_share_what_is_left_of_a_pool() -> None:
    def in_pool(sessions: int, n_pages: int) -> int:
        machine = {"memory": "16G", "pools": {"2m": n_pages}}
        plan = um.plan(DIMS, machine=machine, ctx=5000, load="copy", sessions=sessions)
        (memory,) = (one for one in plan.checks if one.name == "memory of the machine")
        return (plan.total_bytes - memory.needed_bytes) // (2 * MIB)

    of_one = in_pool(1, 1000)
    assert of_one * 2 * MIB > um.KVCache.storage_bytes(22, 4, 64, 5000)
    for sessions in (1, 2, 3):
        found = [in_pool(sessions, n * of_one) for n in range(5)]
        assert found == [min(n, sessions) * of_one for n in range(5)]
