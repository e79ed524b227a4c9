"""llama.cpp as the peer: how it is built and called, and which of its flags are the best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.models.llama_cpp import llama_library
from unimem.engine import embedded_model
from unimem_bench import llama_build, llama_flags
from unimem_bench.decoders import DecoderProcess, SideError
from unimem_bench.llama_build import NoPeer
from unimem_bench.llama_cpp import (
    DEFAULT,
    Conversation,
    Flags,
    Library,
    PeerModel,
    options,
    state_of,
)

Patch = pytest.MonkeyPatch
PROMPT = [1, 5, 9]
LAYERS, K_BYTES, V_BYTES = 2, 4, 6  # a row


# ---- the build ----


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: Patch) -> list[list[str]]:
    """Record the commands of a build, with sources that are there."""
    found: list[list[str]] = []

    def run(words: list[str]) -> str:
        found.append(words)
        return '{"ggml": "0.26.0"}'

    def unpack(folder: Path, *, llama: bool) -> Path:
        assert llama
        return folder

    fetch = llama_build._fetch()
    monkeypatch.setattr(fetch, "unpack", unpack)
    monkeypatch.setattr(llama_build, "_fetch", lambda: fetch)
    monkeypatch.setattr(llama_build, "_run", run)
    for name in ("bench", "ggml"):
        (tmp_path / name).symlink_to(llama_build.ROOT / name)
    monkeypatch.setattr(llama_build, "ROOT", tmp_path)
    return found


@pytest.mark.uncounted
def test_it_is_built_once_for_each_cpu_and_variant(
    commands: list[list[str]], monkeypatch: Patch
) -> None:
    with pytest.raises(NoPeer, match=r"'python -m unimem_bench\.llama_build' builds it"):
        llama_build.library()
    with pytest.raises(NoPeer, match=r"'python -m unimem_bench\.llama_build --portable' builds"):
        llama_build.library("portable")
    assert commands == []
    built = llama_build.library(build=True)
    configure, build, look = commands
    assert {"-DGGML_NATIVE=ON", "-DCMAKE_BUILD_TYPE=Release"} <= set(configure)
    assert build[-2:] == ["--target", "unimem-peer"]
    assert look[-1] == str(built)
    assert llama_build.facts(built) == {"ggml": "0.26.0"}
    assert llama_build.library() == llama_build.library(build=True) == built
    assert len(commands) == 3
    portable = llama_build.library("portable", build=True)
    assert "-DGGML_NATIVE=OFF" in commands[3]
    monkeypatch.setattr(llama_build, "_cpu_flags", lambda: "sse")
    others = {built, portable, llama_build.library(build=True)}
    assert len(others) == 3


@pytest.mark.uncounted
def test_a_build_that_fails_says_why_and_is_tried_again(
    commands: list[list[str]], monkeypatch: Patch
) -> None:
    def fail(words: list[str]) -> str:
        raise NoPeer(f"{words[3]} fails")

    with monkeypatch.context() as patch:
        patch.setattr(llama_build, "_run", fail)
        with pytest.raises(NoPeer, match="cmake fails"):
            llama_build.library(build=True)
    assert llama_build.library(build=True).name == "libunimem-peer.so"
    assert len(commands) == 3


def test_what_a_program_says_when_it_fails() -> None:
    for words, says in (
        (["sh", "-c", "echo one; echo two >&2; exit 3"], "fails with status 3: one\n\ntwo"),
        (["/nowhere/cmake"], "/nowhere/cmake cannot be started"),
    ):
        with pytest.raises(NoPeer, match=says):
            llama_build._run(words)
    assert llama_build._run(["echo", "well"]) == "well\n"


@pytest.mark.uncounted
def test_sources_that_cannot_be_had(commands: list[list[str]], monkeypatch: Patch) -> None:
    def unpack(folder: Path, *, llama: bool) -> Path:
        raise SystemExit("the package index does not list it")

    monkeypatch.setattr(llama_build._fetch(), "unpack", unpack)
    with pytest.raises(NoPeer, match="cannot be had: the package index does not list it"):
        llama_build.library(build=True)
    assert commands == []


def test_an_installed_package_has_no_sources(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(llama_build, "ROOT", tmp_path)
    with pytest.raises(NoPeer, match="wants unimem's repository"):
        llama_build.library(build=True)


# ---- flags ----


def test_flags_in_words_in_numbers_and_in_the_environment() -> None:
    flags = Flags(repack=False, load_mode="none", huge_pages=True, ubatch=128)
    assert str(flags) == "repack=off, load_mode=none, huge_pages=on, ubatch=128"
    assert (str(Flags()), str(Flags(flash=True))) == ("defaults", "flash=on")
    given = options(flags, n_ctx=64, n_threads=None)
    found = {name: getattr(given, name) for name, *_ in given._fields_}
    wanted = {"repack": 0, "load_mode": 0, "n_ubatch": 128, "n_ctx": 64}
    assert found == dict.fromkeys(found, DEFAULT) | wanted
    assert flags.environment() == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    assert Flags().environment() == {}


class InventedDecoder:
    """llama.cpp whose prompts are fast with small batches, and tokens with mapped weights."""

    started: int
    pid = 1

    def __init__(self, _: Path, *, flags: Flags, **options: Any) -> None:
        assert options["threads"] == 1
        type(self).started += 1
        if flags.load_mode == "none" and not flags.huge_pages:
            raise SideError("no memory")
        self._flags = flags

    def prefill(self, _: list[int]) -> float:
        return 100.0 + (self._flags.ubatch == 128) - 9 * (self._flags.flash is False)

    def decode(self, _: int) -> float:
        return 10.0 + (self._flags == Flags(repack=False))

    def __enter__(self) -> InventedDecoder:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_the_best_flags_are_found_for_each_phase_and_kept(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(InventedDecoder, "started", 0, raising=False)
    monkeypatch.setattr(llama_flags, "DecoderProcess", InventedDecoder)
    library = tmp_path / "llama-1/libunimem-peer.so"
    for _ in range(2):
        best = llama_flags.best_flags(tmp_path, Path("m.gguf"), library, PROMPT, [0])
        assert best["prefill"].flags == Flags(ubatch=128)
        assert best["decode"].flags == Flags(repack=False)
        # Five layouts; then the best of each phase, both without flash attention, and two batches.
        assert InventedDecoder.started == 5 + 6
    tried = best["prefill"].tried
    assert tried["defaults"] == 100
    assert tried["flash=off"] == 91
    assert "repack=off, load_mode=none" not in tried
    (kept,) = (tmp_path / "llama-flags").iterdir()
    assert kept.name == "m-llama-1-1-threads.json"
    assert json.loads(kept.read_text())["decode"]["flags"]["repack"] is False


def test_flags_that_are_not_known_are_defaults_where_time_is_limited(tmp_path: Path) -> None:
    best = llama_flags.best_flags(
        tmp_path, Path("m.gguf"), tmp_path / "lib.so", PROMPT, [0], searches=False
    )
    assert {each.flags for each in best.values()} == {Flags()}
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_llama_cpp_does_not_open_has_no_flags(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise SideError("cannot load it")

    monkeypatch.setattr(llama_flags, "DecoderProcess", refuse)
    with pytest.raises(SideError, match="cannot load it"):
        llama_flags.best_flags(tmp_path, Path("m.gguf"), tmp_path, PROMPT, [0])
    assert list((tmp_path / "llama-flags").iterdir()) == []


# ---- states ----


def words(*values: int) -> bytes:
    return np.array(values, np.uint32).tobytes()


def state(n: int, rows: dict[str, list[bytes]], *, is_transposed: bool) -> bytes:
    """Return a state as llama.cpp writes it: each row is of one byte, as often as it is long."""
    cells = b"".join(words(position, 1, 0) for position in range(n))
    parts = [words(0xAF143CD8, 0, 1, n), cells, words(is_transposed, LAYERS, 0, 0)]
    for lane in rows["k"]:
        parts += [words(1, K_BYTES, 0), lane]
    for lane in rows["v"]:
        by_column = np.frombuffer(lane, "u2").reshape(n, -1).T.tobytes()
        parts += (
            [words(1, 2, V_BYTES // 2), by_column]
            if is_transposed
            else [words(1, V_BYTES, 0), lane]
        )
    return b"".join(parts)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_state_of_many_tokens_is_made_of_one_of_a_token(is_transposed: bool) -> None:
    rng, n = np.random.default_rng(1), 5
    lanes = {"k": [rng.bytes(n * K_BYTES), rng.bytes(n * K_BYTES)]}
    lanes["v"] = [rng.bytes(n * V_BYTES), rng.bytes(n * V_BYTES)]
    first = {"k": [bytes(K_BYTES)] * LAYERS, "v": [bytes(V_BYTES)] * LAYERS}
    one = np.frombuffer(state(1, first, is_transposed=is_transposed), np.uint8)
    by_layer = b"".join(k + v for k, v in zip(lanes["k"], lanes["v"], strict=True))
    made = state_of(one, n, np.frombuffer(by_layer, np.uint8))
    assert made.tobytes() == state(n, lanes, is_transposed=is_transposed)
    with pytest.raises(ValueError, match="expected a state of 112 bytes, and 100 of rows for 5"):
        state_of(one, n, np.frombuffer(by_layer[1:], np.uint8))
    with pytest.raises(ValueError, match="expected 1 stream with 1 token, got 1 with 5"):
        state_of(made, n, np.frombuffer(by_layer, np.uint8))


# ---- the library ----


def test_a_library_of_another_version_is_refused(monkeypatch: Patch) -> None:
    path = llama_library()
    monkeypatch.setattr("ctypes.sizeof", lambda kind: 1)
    with pytest.raises(OSError, match=r"not built from this version of bench/peer/peer\.c"):
        Library(path)


def test_it_computes_and_keeps_what_unimem_does(tmp_path: Path) -> None:
    library, model = llama_library(), embedded_model()
    how: Any = {"threads": 1, "ctx": 256}
    with (
        DecoderProcess(model, **how) as ours,
        DecoderProcess(model, kind="llama.cpp", library=library, **how) as theirs,
    ):
        assert theirs.facts["ggml"] == llama_build.facts(library)["ggml"]
        assert theirs.facts["flags"] == "defaults"
        logits, tokens = ours.greedy(PROMPT, 16)
        their_logits, their_tokens = theirs.greedy(PROMPT, 16)
        assert tokens == their_tokens
        np.testing.assert_allclose(logits, their_logits, atol=1e-4)


# llama.cpp quantizes V for flash attention only.
@pytest.mark.parametrize(
    ("kv_dtype", "flash"), [("f16", True), ("f16", False), ("q8_0", True), ("q4_0", True)]
)
def test_both_go_on_behind_the_same_invented_tokens(
    kv_dtype: str, flash: bool, tmp_path: Path
) -> None:
    library, model = llama_library(), embedded_model()
    how: Any = {"threads": 1, "ctx": 256, "kv_dtype": kv_dtype}
    flags = Flags(flash=flash)
    with (
        DecoderProcess(model, **how) as ours,
        DecoderProcess(model, kind="llama.cpp", library=library, flags=flags, **how) as theirs,
    ):
        logits, others = (side.fill(200, tmp_path / "rows") for side in (ours, theirs))
        np.testing.assert_allclose(logits, others, atol=0.05 * float(logits.std()))
        assert ours.decode(8) > 0
        with pytest.raises(SideError, match="has no room behind 201 tokens"):
            theirs.decode(56)


def test_a_conversation_forgets_and_is_restored(tmp_path: Path) -> None:
    library = Library(llama_library())
    given = options(Flags(repack=False), n_ctx=64, n_threads=1)
    model = PeerModel(library, str(embedded_model()), given)
    talk = Conversation(model, given)
    first = talk.decode(PROMPT).copy()
    kept = talk.state()
    talk.decode([7])
    assert talk.remove(3, 4)
    talk.clear()
    np.testing.assert_array_equal(talk.decode(PROMPT), first)
    talk.set_state(kept)
    with pytest.raises(RuntimeError, match="does not take this state"):
        talk.set_state(kept[4:])
    with pytest.raises(RuntimeError, match="llama_decode answers"):
        talk.decode([10**6])
    talk.close()
    model.close()
    with pytest.raises(RuntimeError, match=r"llama.cpp cannot load .*no.gguf"):
        PeerModel(library, str(tmp_path / "no.gguf"), given)
    quantized = str(tmp_path / "q.gguf")
    with pytest.raises(RuntimeError, match="cannot quantize"):
        library.quantize(str(tmp_path / "no.gguf"), quantized, 7)
