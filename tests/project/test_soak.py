"""`make soak` tells growth from variation, and a short run works."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.project.checkout import ROOT

MIB = 1 << 20


@pytest.fixture(scope="module")
def soak() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        yield importlib.import_module("soak")


def test_one_wild_sample_changes_no_slope(soak: Any) -> None:
    times = [float(i) for i in range(100)]
    assert soak.slope(times, [7.0 * t for t in times]) == 7
    assert soak.slope(times, [7.0 * t + 1e9 * (t == 50) for t in times]) == 7
    assert soak.slope(times, [3.0] * 100) == 0
    assert soak.slope([1.0], [3.0]) == 0
    assert soak.slope([float(i) for i in range(5000)], [2.0 * i for i in range(5000)]) == 2


def test_what_grows_is_told_from_what_varies_and_from_the_warm_up(soak: Any) -> None:
    rng = random.Random(0)
    times = [2.0 * i for i in range(400)]
    series = {
        "a: rss_bytes": [100 * MIB + 20000 * i for i in range(400)],  # 8 MB
        "b: rss_bytes": [100 * MIB + rng.randrange(9 * MIB) for _ in times],
        "a: descriptors": [20 + 10 * min(i, 90) for i in range(400)],
        "b: descriptors": [20 + i // 40 for i in range(400)],
        "shm_names": [i // 20 for i in range(400)],
        "processes": [10 + i % 2 for i in range(400)],
    }
    run = soak.Run(800, times, series, 0, {}, [])
    assert [each.name for each in soak.growths(run) if each.drifts] == [
        "a: rss_bytes",
        "b: descriptors",
        "shm_names",
    ]
    text = "\n".join(soak.lines(run, soak.growths(run), "abcd1234"))
    assert "what grows: a: rss_bytes, b: descriptors, shm_names" in text


@pytest.mark.uncounted
@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    command = [sys.executable, str(ROOT / "tools/soak.py"), "--seconds", "15", "--every", "0.5"]
    command += ["--folder", str(tmp_path), "--record", str(record)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    found = json.loads(record.read_text())
    assert found["failures"] == [], done.stdout
    assert found["n_kills"] > 0
    assert len(found["times"]) > 5
    assert all(len(values) == len(found["times"]) for values in found["series"].values())
    for what in ("decode", "save", "restore", "stage", "put", "report"):
        assert found["counts"][what] > 0, found["counts"]
    assert list(tmp_path.iterdir()) == [record]
