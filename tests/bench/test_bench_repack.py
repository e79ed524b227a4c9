"""The suite `repack`: the source of each side's weights, and the memory that it counts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

import unimem as um
from support.project.bench_cases import (
    case_of,
    cases_of,
    check_case,
    pretend_llama_cpp,
    roles,
    run_case,
)
from unimem_bench import decoding, memory, plain, states
from unimem_bench.llama_cpp import Flags
from unimem_bench.memory import PeakMemory, private_bytes, pss_bytes
from unimem_bench.suite import Case, NotMeasured
from unimem_bench.suites import repack

Patch = pytest.MonkeyPatch
MB = 1 << 20
MODEL_BYTES = 10_000
REST_BYTES = 1000  # of KV cache, scratch and Python
TOKEN_S = 0.05
# Seconds to start, by the source of the weights.
STARTS_S = {"kept": 0.2, "staged": 0.1, "map": 0.1, "repack": 0.9}
STARTS_S |= {"llama.cpp": 1.0, "llama.cpp-mapped": 0.3}
IMAGE = "repacked.unimem"


class InventedProcess:
    """A decoder that uses an image if there is one, and keeps one if it may."""

    log: ClassVar[list[str]]
    repacks: ClassVar[bool]
    keeps: ClassVar[bool]
    other_image: ClassVar[Path | None]

    def __init__(
        self,
        path: str | Path,
        *,
        kind: str = "unimem",
        load: str = "auto",
        images: Path | None = None,
        watch: Callable[[int], object] = lambda pid: None,
        flags: Flags | None = None,
        **options: Any,
    ) -> None:
        assert options == {"threads": 1, "ctx": decoding.N_CTX}
        beside = Path(path).with_name(IMAGE)
        kept = list(images.iterdir()) if images else []
        image, source = None, load
        if flags is not None:
            source = kind if flags == Flags() else f"{kind}-mapped"
        if load == "repack" and beside.exists():
            image, source = beside, "staged"
        elif load == "repack" and kept:
            image, source = kept[0], "kept"
        elif load == "repack" and images and self.keeps:
            (images / "key.repacked").write_bytes(b"repacked")
        self.log.append(source)
        self.pid = len(self.log)
        watch(self.pid)
        load = load if self.repacks else "map"
        image = self.other_image if image and self.other_image else image
        self.facts = {"start_s": STARTS_S[source], "load": load, "features": {}}
        self.facts["image"] = image and str(image)

    def prefill(self, tokens: list[int]) -> float:
        assert len(tokens) == 1
        return 1 / TOKEN_S

    def close(self) -> None:
        pass

    def __enter__(self) -> InventedProcess:
        return self

    def __exit__(self, *_: object) -> None: ...


class InventedStage:
    """A link to a model beside an image."""

    backing, granted = "tmpfs", "huge pages"
    refuses: ClassVar[type[Exception] | None]
    caches: ClassVar[list[str]]  # from which it could be read

    def __init__(self, path: Path, *, repack: bool) -> None:
        assert repack
        if self.refuses is not None:
            raise self.refuses("no room")
        self.caches.append(os.environ["UNIMEM_CACHE"])
        self.folder = path.parent / "staged"
        self.folder.mkdir()
        self.path, self.paths = str(self.folder / path.name), (str(self.folder / IMAGE),)
        Path(self.paths[0]).write_bytes(b"repacked")

    def __enter__(self) -> InventedStage:
        return self

    def __exit__(self, *_: object) -> None:
        Path(self.paths[0]).unlink()
        self.folder.rmdir()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A folder with a model file; all decoders and stages of it are invented."""
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(MODEL_BYTES))
    fresh = {"log": [], "repacks": True, "keeps": True, "other_image": None}
    for name, value in fresh.items():
        monkeypatch.setattr(InventedProcess, name, value, raising=False)
    monkeypatch.setattr(InventedStage, "refuses", None, raising=False)
    monkeypatch.setattr(InventedStage, "caches", [], raising=False)
    for module in (repack, decoding):
        monkeypatch.setattr(module, "DecoderProcess", InventedProcess)
    pretend_llama_cpp(monkeypatch, is_built=True)
    monkeypatch.setattr(decoding, "start_peer", lambda _, name, path, peer, **options: (
        InventedProcess(path, kind="llama.cpp", flags=peer.flags, **options)
    ))  # fmt: skip
    monkeypatch.setattr(decoding, "prepared", lambda *_: (path, [0]))
    monkeypatch.setattr(um, "stage", InventedStage)
    monkeypatch.setattr(states, "ready", lambda *_: None)
    monkeypatch.setattr(states, "drop", lambda _: InventedProcess.log.append("dropped"))
    return tmp_path


def test_the_first_token_of_each_start(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("UNIMEM_CACHE", "mine")
    record = run_case(case_of("repack/first-token"), folder, monkeypatch)
    check_case(case_of("repack/first-token"), record)
    found = {side.name: side.passes[0][0] for side in record.sides}
    wanted = {
        "unimem": "kept", "unimem, staged": "staged", "unimem, mapped": "map",
        "unimem, from the disk": "kept",
        "unimem, first start": "repack", "llama.cpp": "llama.cpp",
        "llama.cpp-mapped": "llama.cpp-mapped",
    }  # fmt: skip
    assert found == pytest.approx({
        name: 1e3 * (STARTS_S[source] + TOKEN_S) for name, source in wanted.items()
    })  # fmt: skip
    assert roles(record)["unimem"][0] == "unimem"
    # Neither the stage nor an image is left.
    assert set(InventedStage.caches) == {"off"}
    assert os.environ["UNIMEM_CACHE"] == "mine"
    assert os.listdir(folder) == ["model.gguf"]


def test_files_are_in_the_page_cache_before_each_start(folder: Path, monkeypatch: Patch) -> None:
    def read(path: Path) -> None:
        InventedProcess.log.append(path.suffix)

    monkeypatch.setattr(states, "read_through", read)
    run_case(case_of("repack/first-token"), folder, monkeypatch)
    measured = " ".join(InventedProcess.log[-17:])
    assert measured == (
        ".gguf .repacked kept .gguf map .gguf repack .gguf .unimem staged .gguf dropped kept "
        ".gguf llama.cpp-mapped .gguf llama.cpp"
    )


@pytest.mark.parametrize(("change", "error", "says"), [
    ({"repacks": False}, NotMeasured, "wants repacked weights: no tensor of this model"),
    ({"keeps": False}, NotMeasured, r"wants a repacked image of .*chmod go-w"),
    ({"other_image": Path("/dev/null")}, AssertionError, "must come from the image .*/dev/null"),
])  # fmt: skip
def test_a_side_whose_weights_come_from_elsewhere_is_not_measured(
    change: dict[str, Any], error: type[Exception], says: str, folder: Path, monkeypatch: Patch
) -> None:
    for name, value in change.items():
        monkeypatch.setattr(InventedProcess, name, value)
    with pytest.raises(error, match=says):
        run_case(case_of("repack/first-token"), folder, monkeypatch)
    assert os.listdir(folder) == ["model.gguf"]


def test_what_cannot_be_staged_is_left_out(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(InventedStage, "refuses", um.PlacementError)
    record = run_case(case_of("repack/first-token"), folder, monkeypatch)
    assert record.left_out == {"unimem, staged": "wants a staged model: no room"}
    assert "unimem, staged" not in roles(record)["unimem"]
    with pytest.raises(NotMeasured, match="wants a staged model: no room"):
        run_case(case_of("repack/sharing"), folder, monkeypatch)


def test_the_peak_is_a_share_of_the_model(folder: Path, monkeypatch: Patch) -> None:
    own_bytes = {"map": 0, "repack": 9000, "llama.cpp-mapped": 0, "llama.cpp": 8000}

    def private(pid: int) -> int:
        return REST_BYTES + own_bytes[InventedProcess.log[pid - 1]]

    for module in (repack, memory):
        monkeypatch.setattr(module, "private_bytes", private)
    cached = {".gguf": 1000, ".repacked": 300}
    monkeypatch.setattr(plain, "cached_bytes", lambda path: cached[path.suffix])
    record = run_case(case_of("repack/peak-memory"), folder, monkeypatch)
    check_case(case_of("repack/peak-memory"), record)
    found = {side.name: side.passes[0] for side in record.sides}
    assert found == {"unimem": [103.0], "llama.cpp": [90.0]}
    assert roles(record)["peer"] == ["llama.cpp"]
    assert os.listdir(folder) == ["model.gguf"]


def test_what_a_process_shares_with_none_is_a_share_of_the_model(
    folder: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(repack, "private_bytes", lambda _: REST_BYTES)
    # Readers take their shares from the process that staged it.
    n_sharing = 0

    def pss(pid: int) -> float:
        nonlocal n_sharing
        n_sharing = InventedProcess.log.count("staged")
        shared = MODEL_BYTES / (1 + n_sharing)
        return shared if pid == os.getpid() else shared + REST_BYTES + 100

    monkeypatch.setattr(repack, "pss_bytes", pss)
    record = run_case(case_of("repack/sharing"), folder, monkeypatch)
    check_case(case_of("repack/sharing"), record)
    assert record.sides[0].passes == [pytest.approx([1.0, 1.0, 1.0])]
    assert InventedStage.caches == ["off"]
    assert n_sharing == repack.N_SHARING


def test_private_memory_and_the_page_cache_are_counted(tmp_path: Path) -> None:
    file, pid = tmp_path / "file", os.getpid()
    file.write_bytes(bytes(4 * MB))
    with PeakMemory(lambda: [file, tmp_path / "none"]) as peak:
        peak.look()
        assert peak.nbytes == 0, "nothing is watched yet"
        before = private_bytes(pid)
        with um.Block(16 * MB, pages="4k", warm=True) as memory:
            peak.watch(pid)
            peak.look()
            most = peak.nbytes
            # The kernel counts per CPU, and sums up later.
            assert most > before + 16 * MB + 4 * MB - 2 * MB
            assert pss_bytes(pid) > memory.nbytes
        peak.look()
        assert peak.nbytes >= most
    assert private_bytes(2**22 + 1) == 0, "there is no such process"


@pytest.mark.slow
@pytest.mark.parametrize("case", cases_of("repack"))
def test_cases(case: Case, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(decoding, "QUICK_SHAPE", "15m")
    monkeypatch.setattr(states, "ready", lambda *_: None)  # needed for times only
    try:
        record = run_case(case, tmp_path, monkeypatch)
    except NotMeasured as reason:
        pytest.skip(str(reason))
    if repack.STAGED in record.left_out:
        pytest.skip(record.left_out[repack.STAGED])
    check_case(case, record)
