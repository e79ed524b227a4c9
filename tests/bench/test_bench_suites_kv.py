"""The suites `kv` and `snapshot`: sides do the same work, and impostors are caught."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.project.bench_cases import case_of, cases_of, check_case, run_case, uninstall
from unimem.engine import Decoder
from unimem_bench import kv_rings, models
from unimem_bench.kv_sides import SHAPE, check_holds, tokens
from unimem_bench.suite import Case, NotMeasured
from unimem_bench.suites import snapshot

Patch = pytest.MonkeyPatch
# Peers by their package and case.
PEERS = {
    ("torch", "append"): {"torch", "torch copy_", "torch index_copy_"},
    ("torch", "scratchpad"): {"torch"},
    ("torch", "convert"): {"torch"},
    ("torch", "convert-batch"): {"torch"},
    ("torch", "gather"): {"torch"},
    ("gguf", "dtypes"): {"gguf-py, q8_0"},
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: Patch) -> None:
    """Make snapshots and the model smaller than in a quick run."""
    monkeypatch.setattr(snapshot, "QUICK_SAVED_BYTES", 1 << 20)
    monkeypatch.setitem(models.SHAPES, "wide", replace(models.SHAPES["wide"], layers=2))


@pytest.mark.parametrize("case", cases_of("kv", "snapshot", slow=["kv/append-torch"]))
def test_a_case_measures_what_it_declares(case: Case, tmp_path: Path, monkeypatch: Patch) -> None:
    if case.name == "append-torch":
        pytest.importorskip("torch", reason="torch (extra torch) is not installed")
    record = run_case(case, tmp_path, monkeypatch)
    check_case(case, record)
    # Only the model stays, for the next pass.
    assert {path.suffix for path in tmp_path.iterdir()} <= {".gguf"}


def test_trimming_a_ring_moves_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    record = run_case(case_of("kv/trim-moved"), tmp_path, monkeypatch)
    assert [side.passes for side in record.sides] == [[[0.0]]]


def test_tokens_in_other_rows_count_as_moved() -> None:
    n = 64
    with um.KVCache(2, *SHAPE, n, window=n) as ring:
        for layer in range(2):
            ring.append(layer, *tokens(n))
        before = kv_rings.rows_of_last(ring, 3)
        for layer in range(2):
            ring.append(layer, *tokens(1))
        after = kv_rings.rows_of_last(ring, 3)
    assert before.tolist() == [[n - 3, n - 2, n - 1]] * 4
    assert after.tolist() == [[n - 2, n - 1, 0]] * 4


class WithoutValues(um.KVCache):
    """A cache that appends K twice."""

    def append(self, layer: int, k: Any, v: Any) -> None:
        super().append(layer, k, k)


class WithoutRows(um.Scratchpad):
    """A scratchpad that appends zeros."""

    def append(self, vec: Any) -> None:
        super().append(np.zeros_like(vec))


# Impostors, their cases, and the message.
IMPOSTORS: list[tuple[str, Any, str, str]] = [
    (
        "unimem.KVCache",
        WithoutValues,
        "does not hold what was appended",
        "append paged-append convert convert-batch dtypes batch batch-large ring-append "
        "ring-append-batch ring-read trim trim-moved",
    ),
    ("unimem.Scratchpad", WithoutRows, "unimem does not hold", "scratchpad"),
    (
        "unimem_bench.plain.copy",
        lambda table: 1e-3,
        "C memcpy.* does not hold",
        "append scratchpad paged-append convert batch ring-append trim gather fork",
    ),
    # Half of it.
    ("unimem_bench.suites.kv.BY_INDEX", "keys[i] = k", "NumPy does not hold", "append convert"),
]


@pytest.mark.parametrize(
    ("what", "impostor", "says", "name"),
    [(*row, name) for *row, names in IMPOSTORS for name in names.split()],
)
def test_a_side_that_holds_something_else_is_found_out(
    what: str, impostor: Any, says: str, name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(what, impostor)
    with pytest.raises(AssertionError, match=says):
        run_case(case_of(f"kv/{name}"), tmp_path, monkeypatch)


@pytest.mark.parametrize("found", [
    np.zeros((0, 2)), np.ones((3, 2)), np.ones((4, 2), "float32"), np.array([[1, 1], [1, 2]] * 2),
], ids=["nothing", "half a time more", "another dtype", "another value"])  # fmt: skip
def test_what_a_side_holds_is_compared(found: Any) -> None:
    given = np.ones((2, 2))
    check_holds("it", [np.ones((4, 2))], [given])
    with pytest.raises(AssertionError, match="it does not hold what was appended"):
        check_holds("it", [found], [given])


def test_tokens_differ() -> None:
    for part in tokens(1000):
        assert len({token.tobytes() for token in part}) == 1000


@pytest.mark.parametrize(("package", "name"), PEERS)
def test_peers_may_be_left_out(package: str, name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    uninstall(monkeypatch, package)
    case = case_of(f"kv/{name}")
    record = run_case(case, tmp_path, monkeypatch)
    check_case(case, record)
    assert record.left_out == dict.fromkeys(PEERS[package, name], f"{package} is not installed")


def test_sessions_want_the_engine(tmp_path: Path, monkeypatch: Patch) -> None:
    uninstall(monkeypatch, "unimem_ggml")
    for name in ("first-token", "first-token-small"):
        with pytest.raises(NotMeasured, match="unimem-ggml is not installed"):
            run_case(case_of(f"snapshot/{name}"), tmp_path, monkeypatch)


def test_a_file_system_without_o_direct(tmp_path: Path, monkeypatch: Patch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    record = run_case(case_of("snapshot/save"), tmp_path, monkeypatch)
    assert record.left_out == {"O_DIRECT": f"the file system of {tmp_path} does not take it"}


@pytest.mark.parametrize("what", ["disk", "memory"])
@pytest.mark.parametrize("name", ["save", "restore", "first-token"])
def test_too_little_room_is_said(name: str, what: str, tmp_path: Path, monkeypatch: Patch) -> None:
    if what == "disk":
        usage = type("Usage", (), {"free": 1000})
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    else:
        monkeypatch.setattr("unimem_bench.states.available_bytes", lambda: 1000)
    with pytest.raises(NotMeasured, match=rf"wants .* of {what}.*, 1000 B are free"):
        run_case(case_of(f"snapshot/{name}"), tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("way", "side"), [("write_buffered", "write, fsync"), ("write_direct", "O_DIRECT")]
)
@pytest.mark.parametrize("wrong", ["shorter", "other bytes"])
def test_a_file_that_is_something_else_is_found_out(
    way: str, side: str, wrong: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    real = getattr(snapshot, way)

    def write(path: Path, lanes: Any) -> None:
        real(path, lanes[1:] if wrong == "shorter" else [lanes[1], *lanes[1:]])

    if not snapshot.takes_direct(tmp_path):
        pytest.skip(f"the file system of {tmp_path} does not take O_DIRECT")
    monkeypatch.setattr(snapshot, way, write)
    with pytest.raises(AssertionError, match=side):
        run_case(case_of("snapshot/save"), tmp_path, monkeypatch)


def test_a_file_that_is_not_read_is_found_out(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(snapshot, "read_into", lambda path, room: np.zeros_like(room))
    with pytest.raises(AssertionError, match=r"read\(\) does not hold"):
        run_case(case_of("snapshot/restore"), tmp_path, monkeypatch)


def test_a_session_that_goes_on_otherwise_is_found_out(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Decoder, "resume", lambda decoder, _: decoder.prefill([5, 6, 7]))
    with pytest.raises(AssertionError, match="unimem goes on with another token"):
        run_case(case_of("snapshot/first-token-small"), tmp_path, monkeypatch)
