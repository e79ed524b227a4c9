"""The steady state of decoding, counted: no fault, no allocation, no system call, nothing moves."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from conftest import Run
from support.models import decoders  # noqa: F401 - skips where something is missing
from support.models.make import SMALL, small, write_model
from support.project.checkout import ROOT
from unimem.backends import ggml_orders

SHIM = ROOT / "tests" / "support" / "kernel" / "shim" / "count_alloc.c"
COMPILER = shutil.which("cc")

UNIMEM, GGML = 1, 2
Q4_0 = 2  # ggml's number
STREAMED_BYTES = 18 << 20  # a budget for a part of the small mixture
SCRIPT = """
    import ctypes, gc, json, os, resource
    import unimem as um
    from unimem._core.status import counters
    from unimem.engine import Decoder

    shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
    # Of files in the installed package: a checkout may be called unimem, too.
    owners = (("-packages/unimem/", 1), ("libunimem-ggml", 2))
    prompt = [1] + [300 + i % 50 for i in range(149)]
    how = json.loads(os.environ["HOW"])
    with Decoder(os.environ["MODEL"], ctx=512, **how) as decoder:
        for line in open("/proc/self/maps"):
            place, access, *_, path = line.split(maxsplit=5)
            for name, owner in owners:
                if name in path and "x" in access:
                    begin, end = (ctypes.c_size_t(int(a, 16)) for a in place.split("-"))
                    assert shim.count_range(begin, end, owner)
        for function in (shim.count_allocations, shim.count_bytes, shim.count_os_calls):
            function.restype = ctypes.c_long
        decoder.prefill(prompt)
        # The counters must count: a block is mapped by unimem, and a context allocated by ggml.
        shim.count_start()
        um.Block(4096).close()
        from unimem.backends import ggml
        ggml.free(ggml.new_context(decoder.addresses()["mask"], 16))
        shim.count_stop()
        seen = [shim.count_os_calls(1), shim.count_allocations(2)]
        decoder.layout.freeze()
        options = json.loads(os.environ["OPTIONS"])
        for _ in range(8):
            decoder.generate_next_token(**options)
        gc.collect()
        gc.disable()
        before, addresses = counters(), decoder.addresses()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        shim.count_start()
        for _ in range(64):
            decoder.generate_next_token(**options)
        shim.count_stop()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        after, moved = counters(), decoder.addresses()
        print(json.dumps({
            "seen": seen,
            "faults": faults,
            "allocations": [shim.count_allocations(owner) for owner in range(3)],
            "bytes": [shim.count_bytes(owner) for owner in range(3)],
            "os_calls": [shim.count_os_calls(owner) for owner in range(3)],
            "counters": {name: after[name] - before[name] for name in before},
            "moved": sum(addresses[name] != moved[name] for name in addresses),
            "buffers": len(addresses),
            "load": decoder.report().facts["load"],
            "is_mapped": bool(decoder._memory.repacked and decoder._memory.repacked.image),
            "wrapped": decoder.kv.row_of(decoder.kv.next_position) < len(prompt),
        }))
"""


@pytest.mark.skipif(COMPILER is None, reason="no C compiler builds the counting shim")
@pytest.mark.parametrize(
    ("how", "options"),
    [
        ({"threads": 2}, {}),
        ({"threads": 1, "kv_dtype": "q8_0"}, {"temperature": 0.8, "seed": 1}),
        pytest.param({"threads": 1, "window": 40, "kv_dtype": "bf16"}, {}, marks=pytest.mark.slow),
        ({"threads": 2, "load": "repack"}, {}),
        ({"threads": 1, "load": "stream", "weights_budget": "1G"}, {}),
        ({"threads": 1, "load": "stream", "weights_budget": STREAMED_BYTES}, {}),
        pytest.param(
            {"threads": 1, "load": "stream", "weights_budget": "1G"}, {}, marks=pytest.mark.slow
        ),
        pytest.param({"threads": 1, "load": "repack"}, {}, marks=pytest.mark.slow),
        *(pytest.param({"threads": 1}, {}, marks=pytest.mark.slow) for _ in range(2)),
    ],
    ids=[
        "greedy, two threads",
        "chance q8_0",
        "window bf16",
        "repacked",
        "qwen3moe, streamed, all fits",
        "qwen3moe, streamed, few slots",
        "streamed, all fits",
        "repacked, staged",
        "gemma3",
        "qwen3moe",
    ],
)
@pytest.mark.uncounted
def test_steady_state(
    tmp_path: Path,
    run_python: Run,
    how: dict[str, Any],
    options: dict[str, float],
    request: pytest.FixtureRequest,
) -> None:
    is_repacked, has_misses = how.get("load") == "repack", "few slots" in request.node.name
    if is_repacked and ggml_orders.find_order(Q4_0, (256, 64)) is None:
        pytest.skip("this build of ggml has no order for q4_0 on this CPU")
    shim = tmp_path / "count_alloc.so"
    subprocess.run(
        [str(COMPILER), "-std=c17", "-O2", "-shared", "-fPIC", "-o", shim, SHIM, "-ldl"], check=True
    )
    case = request.node.callspec.id.partition(",")[0]
    arch, shape = (case, small(layers=7)) if case in ("gemma3", "qwen3moe") else ("llama", SMALL)
    kind = "q4_0" if is_repacked else "q8_0"
    model = write_model(tmp_path / "model.gguf", arch, shape, kind)
    if "staged" in request.node.name:
        try:
            staged = um.stage(model, repack=True)
        except um.PlacementError as error:
            pytest.skip(f"neither tmpfs nor /dev/shm: {error}")
        request.addfinalizer(staged.close)
        model = Path(staged.path)
    # The kernel may move a page, which seldom counts as a fault.
    # Costs of a token would show in every run.
    for _ in range(4):
        given = {"HOW": json.dumps(how), "OPTIONS": json.dumps(options)}
        done = run_python(SCRIPT, LD_PRELOAD=str(shim), MODEL=str(model), **given)
        assert done.returncode == 0, done.stderr
        counted = json.loads(done.stdout)
        if counted["faults"] == 0:
            break
    assert all(counted["seen"])
    assert counted["wrapped"] is ("window" in how or arch == "gemma3")
    assert counted["load"] == how.get("load", "map")
    assert counted["is_mapped"] is ("staged" in request.node.name)
    assert (counted["faults"], counted["moved"]) == (0, 0)
    assert counted["buffers"] > 50
    assert counted["allocations"][UNIMEM] == 0
    # What is missing is read, with one call or a few for each layer.
    reads = range(64, 64 * 7 * 8) if has_misses else [0]
    assert counted["os_calls"][UNIMEM] in reads
    assert counted["counters"].pop("os_calls") in reads
    assert not any(counted["counters"].values())
    assert counted["os_calls"][GGML] == 0
    # ggml starts its threads for every graph.
    assert counted["allocations"][GGML] <= 2 * 64
    assert counted["bytes"][GGML] <= 64 * 64
