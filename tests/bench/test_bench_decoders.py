"""The suites that decode: their sides do the same work, on the memory they are named after."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import unimem as um
from support.models import llama_cpp
from support.project.bench_cases import case_of, cases_of, check_case, pretend_llama_cpp, run_case
from support.project.tiers import slow_after
from unimem.system import limits
from unimem_bench import decoding, huge_pages, models, states
from unimem_bench.decoders import DecoderProcess, SideError
from unimem_bench.llama_cpp import Flags
from unimem_bench.models import ModelShape, write_model
from unimem_bench.suite import Case, Measure, NotMeasured
from unimem_bench.suites import decode, pages
from unimem_bench.suites.decode import MAPPED, REPACKED
from unimem_bench.suites.pages import SIDES

Patch = pytest.MonkeyPatch
PROMPT = [1, *range(20, 50)]
HUGE_PAGE = 2 << 20
IDLE = {"wait_s": 1.0, "wait_cpu_s": 0.0}
FACTS: dict[str, Any] = {"ggml": "0", "features": {"AVX512": "1"}, "start_s": 0.1} | IDLE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture
def model(folder: Path) -> Path:
    return write_model(folder, "15m", "q8_0")


# The slow kinds are also decoded by other tests here.
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind == "q4_k_m" else [pytest.mark.slow])
        for kind in models.KINDS
    ],
)
def test_a_model_is_the_same_to_unimem_and_llama_cpp(folder: Path, kind: models.Kind) -> None:
    path = write_model(folder, "15m", kind)
    with DecoderProcess(path, threads=1, ctx=64, load="map") as ours:
        logits, tokens = ours.greedy(PROMPT, 16)
    theirs, their_logits = llama_cpp.greedy(path, PROMPT, 16, ctx=64)
    assert np.isfinite(logits).all()
    if llama_cpp.has_our_kernels():
        np.testing.assert_array_equal(logits, their_logits[0])
        assert tokens == theirs
    # Other kernels round differently, and quantizing amplifies that.
    assert np.corrcoef(logits, their_logits[0])[0, 1] > 0.999
    assert tokens[:4] == theirs[:4]
    assert len(set(tokens)) > 1


def test_a_model_is_written_once_and_always_the_same(tmp_path: Path) -> None:
    paths = [write_model(tmp_path / name, "15m", "q4_k_m") for name in ("a", "b")]
    assert len({hashlib.sha256(path.read_bytes()).digest() for path in paths}) == 1
    before = paths[0].stat()
    assert write_model(tmp_path / "a", "15m", "q4_k_m").stat() == before
    assert os.listdir(tmp_path / "a") == [paths[0].name]


@pytest.mark.parametrize(("kind", "n_layers", "tied"), [
    ("q4_k_m", 6, True),
    pytest.param("q4_k_m", 22, False, marks=pytest.mark.slow),
    pytest.param("q4_0", 2, False, marks=pytest.mark.slow),
])  # fmt: skip
def test_llama_cpp_s_mixture(
    kind: models.Kind, n_layers: int, tied: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    shape = ModelShape(
        256, layers=n_layers, heads=4, kv_heads=4, inner=256, vocab=300, ctx=64, tied=tied
    )
    monkeypatch.setitem(models.SHAPES, "any", shape)
    source, ftype = write_model(tmp_path, "any", "f16"), models.KINDS[kind]
    theirs = llama_cpp.quantize(source, tmp_path / "theirs.gguf", ftype)
    ours = write_model(tmp_path, "any", kind)
    assert types_of(ours) == types_of(theirs)


def types_of(path: Path) -> dict[str, str]:
    with um.open_weights(path, load="map") as weights:
        return {name: tensor.type for name, tensor in weights.tensors.items()}


def test_a_model_that_cannot_be_written(tmp_path: Path, monkeypatch: Patch) -> None:
    with pytest.raises(ValueError, match="no model '70b': expected one of '15m', '110m'"):
        write_model(tmp_path, "70b", "q8_0")
    with pytest.raises(ValueError, match="no model 'q5': expected one of 'f16', 'q8_0'"):
        write_model(tmp_path, "15m", "q5")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(NotMeasured, match="pip install gguf"):
        write_model(tmp_path, "15m", "q8_0")
    assert os.listdir(tmp_path) == []


def test_what_a_decoder_is_asked_for_is_what_it_has(model: Path) -> None:
    options: Any = {"load": "copy", "pages": "4k", "kv_dtype": "q8_0", "window": 32}
    with DecoderProcess(model, threads=1, ctx=64, **options) as decoder:
        facts = decoder.facts
        assert facts["load"] == "copy"
        pages = {part: found["pages"] for part, found in facts["granted"].items()}
        assert pages == dict.fromkeys(("weights", "kv", "scratch"), "4k")
        assert facts["granted"]["weights"]["resident_bytes"] >= model.stat().st_size * 0.9
        assert facts["peak_rss_bytes"] > facts["anonymous_bytes"] > model.stat().st_size * 0.9
        assert facts["start_s"] > 0
        assert decoder.prefill(PROMPT) > 0
        assert 0 < decoder.python_share(4) < 1
        decoder.require_idle()


def test_a_full_context_starts_anew_and_the_current_folder_is_not_imported(
    model: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "unimem_bench.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    with DecoderProcess(model, threads=1, ctx=64) as decoder:
        _, tokens = decoder.greedy(PROMPT, 64 - len(PROMPT))
        assert decoder.decode(8) > 0  # 31 and 33 tokens fill it
        assert decoder.greedy(PROMPT, 4)[1] == tokens[:4]
        os.kill(decoder.pid, signal.SIGKILL)
        with pytest.raises(SideError, match="the unimem side was ended by SIGKILL"):
            decoder.prefill(PROMPT)


def test_a_decoder_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(SideError, match=r"the unimem side: FileNotFoundError: .*none\.gguf"):
        DecoderProcess(tmp_path / "none.gguf", threads=1, ctx=64)
    with pytest.raises(SideError, match=r"the unimem side cannot be started: .*nothing"):
        DecoderProcess("any", threads=1, ctx=64, python=str(tmp_path / "nothing"))
    script = fake_python(tmp_path, error="out of luck")
    with pytest.raises(SideError, match="the unimem side died with status 3: out of luck"):
        DecoderProcess("any", threads=1, ctx=64, python=script)


def test_a_decoder_that_does_not_sleep_is_found(tmp_path: Path) -> None:
    busy = {"seconds": 1.0, "wait_s": 1.0, "wait_cpu_s": 0.5}
    script = fake_python(tmp_path, FACTS, busy)
    peer: Any = {"kind": "llama.cpp", "library": tmp_path}
    with DecoderProcess("any", threads=1, ctx=64, python=script, **peer) as decoder:
        decoder.require_idle()
        decoder.prefill(PROMPT)
        with pytest.raises(SideError, match=r"the llama\.cpp side used 25% of a CPU while it"):
            decoder.require_idle()


@pytest.mark.usefixtures("invented")
def test_only_the_same_code_must_give_the_same_logits() -> None:
    ours = InventedDecoder(Path(), load="repack")
    for flags, is_alike in (
        (Flags(), True),
        (Flags(repack=False), False),
        (Flags(flash=False), False),
    ):
        theirs: Any = InventedDecoder(Path(), kind="llama.cpp", flags=flags)
        assert decode.is_alike(ours, theirs) == is_alike  # type: ignore[arg-type]
    theirs.facts["features"] = {}
    assert not decode.is_alike(ours, theirs)  # type: ignore[arg-type]


def fake_python(folder: Path, *answers: dict[str, Any], error: str = "") -> str:
    """Return an interpreter that ignores its script: it gives these answers, or an error."""
    code = [f"print({json.dumps(answer)!r}, flush=True); input()" for answer in answers]
    code.append(f"raise SystemExit(print({error!r}, file=__import__('sys').stderr) or 3)")
    (folder / "fake.py").write_text("\n".join(code))
    script = folder / "python"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} {folder}/fake.py\n")
    script.chmod(0o755)
    return str(script)


def reserved_pages() -> int:
    """Count the pages that stay; the rest of the pool goes once unused."""
    if not huge_pages.POOL.exists():
        return 0
    total, surplus = (
        int((huge_pages.POOL / name).read_text()) for name in ("nr_hugepages", "surplus_hugepages")
    )
    return total - surplus


@pytest.fixture
def free_bytes() -> int:
    if os.geteuid() != 0 or not huge_pages.POOL.exists():
        pytest.skip("needs root, and a kernel with huge pages of 2 MiB")
    return limits.huge_pools()["2m"].available_bytes


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_huge_pages_are_given_back(free_bytes: int, error: type[BaseException] | None) -> None:
    before = reserved_pages()
    with huge_pages.reserved(free_bytes):
        assert reserved_pages() == before  # there were enough
    wanted = free_bytes + 3 * HUGE_PAGE
    with (
        suppress(KeyboardInterrupt),
        huge_pages.reserved(wanted),
        um.Block(wanted, pages="2m", strict=True, warm=True),
    ):
        assert reserved_pages() == before + 3
        if error is not None:
            raise error
    assert reserved_pages() == before


RESERVE = """
import sys
from unimem_bench.huge_pages import reserved
with reserved(int(sys.argv[1])):
    print(flush=True)
    sys.stdin.read()
"""


def test_huge_pages_of_a_killed_process_are_given_back(free_bytes: int) -> None:
    before = reserved_pages()
    command = [sys.executable, "-c", RESERVE, str(free_bytes + 3 * HUGE_PAGE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"\n"
            assert reserved_pages() == before + 3
        finally:
            child.kill()
    deadline = time.monotonic() + 60
    while reserved_pages() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reserved_pages() == before


def test_huge_pages_that_cannot_be_had(tmp_path: Path, monkeypatch: Patch) -> None:
    pool = limits.HugePool(HUGE_PAGE, 5, 0, 0, 0, {})
    monkeypatch.setattr(huge_pages, "huge_pools", lambda: {"2m": pool})
    monkeypatch.setattr(huge_pages, "POOL", tmp_path)
    (tmp_path / "surplus_hugepages").write_text("2")
    count = tmp_path / "nr_hugepages"
    count.write_text("5")
    for says in ("wants 4 more huge pages of 2 MiB, the kernel finds room for 4: ", "Is a dir"):
        with pytest.raises(NotMeasured, match=says), huge_pages.reserved(4 * HUGE_PAGE):
            pass
        if count.is_file():
            assert count.read_text() == "3"  # and the two that go when they are free
            count.unlink()
            count.mkdir()
    monkeypatch.setattr(huge_pages, "huge_pools", dict)
    with (
        pytest.raises(NotMeasured, match="this kernel has no pool of them"),
        huge_pages.reserved(4 * HUGE_PAGE),
    ):
        pass


@pytest.fixture
def tiny(monkeypatch: Patch) -> Iterator[None]:
    monkeypatch.setattr(decoding, "QUICK_SHAPE", "15m")
    monkeypatch.setattr(states, "ready", lambda nbytes, cpus: None)  # needed for times only
    before = reserved_pages()
    yield
    assert reserved_pages() == before


# Cases of Q4_K_M and F16 differ by their file alone, those of 512 tokens by the prompt; in slow
# ones the same sides do other work.
LIKE_OTHERS = re.compile(
    "decode/.*(q4_k_m$|f16|512|q6_k|q4_0-one|q8_0-.*)|context/.*(one-thread|32k)"
)
SLOW = re.compile("decode/(prefill-q4_0|.*-q8_0|.*mxfp4|busy-core|own-.*|.*-.*-)|pages/|context/")
CASES = [
    pytest.param(*case.values, id=name, marks=[pytest.mark.slow] * bool(SLOW.match(name)))
    for case in cases_of("decode", "context", "pages")
    if not LIKE_OTHERS.match(name := str(case.id))
]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("case", CASES)
def test_cases(case: Case, folder: Path, monkeypatch: Patch) -> None:
    try:
        record = run_case(case, folder, monkeypatch)
    except NotMeasured as reason:
        pytest.skip(str(reason))
    check_case(case, record)
    if case.suite == "pages":
        sides = {side.name for side in record.sides} | record.left_out.keys()
        assert sides >= {"THP", "4k", "hugetlb", "mapped file"}
    for name, facts in record.facts.items():
        if name in SIDES and facts["load"] == "repack":
            assert facts["granted"]["repacked"]["pages"] == SIDES[name]
    for name, load in decode.LOADS.items():
        if name in record.facts:
            assert record.facts[name]["load"] == load


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("case", slow_after(1, cases_of("numa")))
def test_cases_of_one_node(case: Case, folder: Path, monkeypatch: Patch) -> None:
    if sum(bool(node.total_bytes) for node in limits.nodes().values()) > 1:
        pytest.skip("this machine has several memory nodes; make test-numa tests these cases")
    if case.name == "asking":
        check_case(case, run_case(case, folder, monkeypatch))
    else:
        with pytest.raises(NotMeasured, match="wants two memory nodes, this machine has one"):
            run_case(case, folder, monkeypatch)


@pytest.mark.usefixtures("tiny")
def test_without_llama_cpp_all_of_its_sides_are_left_out(folder: Path, monkeypatch: Patch) -> None:
    pretend_llama_cpp(monkeypatch, is_built=False)
    case = next(case.values[0] for case in cases_of("decode"))
    record = run_case(case, folder, monkeypatch)
    check_case(case, record)
    assert {side.role for side in record.sides} == {"unimem"}
    assert dict.fromkeys(decoding.PEERS, "not built").items() <= record.left_out.items()


class InventedDecoder:
    """A decoder that starts at once, and drops the weights that it repacks from the page cache."""

    log: ClassVar[list[str]]
    repacks: ClassVar[bool]
    pages: ClassVar[dict[str, str]]

    def __init__(
        self, _: Path, *, kind: str = "unimem", load: str = "auto", **options: Any
    ) -> None:
        self.kind, self.flags = kind, options.get("flags", Flags())
        self.log.append(kind if kind != "unimem" else load)
        found = "map" if load == "auto" or (load == "repack" and not self.repacks) else load
        pages = options.get("pages", "auto")
        granted = {part: {"pages": self.pages.get(part, pages)} for part in ("repacked", "kv")}
        granted["weights"] = {"pages": "4k"}
        self.facts = FACTS | {"load": found, "granted": granted, "warnings": []}

    def close(self) -> None:
        self.log.append("closed")

    def __enter__(self) -> InventedDecoder:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def invented(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Install invented decoders, and return their model file."""
    for name, value in {"log": [], "repacks": True, "pages": {}}.items():
        monkeypatch.setattr(InventedDecoder, name, value, raising=False)
    for module in (decode, decoding, pages):
        monkeypatch.setattr(module, "DecoderProcess", InventedDecoder)
    peer = decoding.Peer(tmp_path, Flags())
    monkeypatch.setattr(decoding, "peers", lambda *_: dict.fromkeys(decoding.PEERS[:2], peer))
    for module in (states, decoding):
        monkeypatch.setattr(module, "read_through", lambda _: InventedDecoder.log.append("read"))
    monkeypatch.setattr(states, "ready", lambda *_: None)
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(8192))
    monkeypatch.setattr(decoding, "prepared", lambda *_: (path, [0]))
    return path


@pytest.mark.usefixtures("invented")
@pytest.mark.parametrize(("kind", "repacks", "started"), slow_after(1, [
    ("q4_0", True, "read auto read repack read copy"),
    ("q4_0", False, "read auto read repack closed read copy"),
    ("q8_0", True, "read auto read repack read copy"),
]))  # fmt: skip
def test_each_side_starts_from_a_file_in_the_page_cache(
    kind: models.Kind, repacks: bool, started: str, folder: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(InventedDecoder, "repacks", repacks)
    measure = Measure(case_of(f"decode/decode-{kind}"), quick=True, folder=folder)
    with ExitStack() as stack:
        sides = decode.start(measure, stack, decode.Work(kind), "decode")
    assert " ".join(InventedDecoder.log) == f"{started} read llama.cpp read llama.cpp"
    left_out = {MAPPED: "as 'unimem', which chooses it"}
    left_out |= {} if repacks else {REPACKED: decoding.NOT_REPACKED}
    assert measure.record().left_out == left_out
    assert sides.keys() == {"unimem", *decode.LOADS, *decoding.PEERS[:2]} - left_out.keys()


@pytest.mark.parametrize(("kind", "repacks", "granted", "refused"), [
    ("q4_k_m", True, {}, None),
    ("q4_k_m", False, {}, "wants repacked weights: no tensor of this model has another order"),
    ("q4_k_m", True, {"repacked": "4k"}, "wants repacked on thp pages, got 4k: without a warning"),
    ("q8_0", True, {}, "wants weights on thp pages, got 4k"),
])  # fmt: skip
def test_a_side_is_on_the_pages_that_it_is_named_after(
    kind: models.Kind, repacks: bool, granted: dict[str, str], refused: str | None,
    invented: Path, monkeypatch: Patch,
) -> None:  # fmt: skip
    monkeypatch.setattr(InventedDecoder, "repacks", repacks)
    monkeypatch.setattr(InventedDecoder, "pages", granted)
    if refused is None:
        assert pages.start_side("THP", kind, invented, 1).facts["load"] == "repack"
        return
    with pytest.raises(NotMeasured, match=refused):
        pages.start_side("THP", kind, invented, 1)
    assert InventedDecoder.log[-1] == "closed"
