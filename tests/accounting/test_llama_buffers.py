"""The purposes of llama.cpp's buffers, against orders that it makes, and against what it prints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import unimem as um
import unimem_exec as launch
from support.models.llama_cpp import llama_library
from unimem._core.ledger import Entry, Part
from unimem.accounting.llama_buffers import name_buffers
from unimem.accounting.mapped_models import MappedModel
from unimem.accounting.prometheus import MetricsCollector

MIB = 1 << 20
WEIGHTS = {"weights:q4_K": 40 * MIB, "weights:q6_K": 30 * MIB, "weights:f32": MIB}


def model(format_: str = "GGUF", sizes: dict[str, int] = WEIGHTS) -> MappedModel:
    parts = [Part(category, 0, nbytes) for category, nbytes in sizes.items()]
    made = SimpleNamespace(format=format_, areas=(None,), parts=lambda _: parts)
    return cast("MappedModel", made)


def entries(words: str) -> list[Entry]:
    """Return allocations in an order such as ``a40 m20``: aligned ones, and malloc's, in MiB."""
    made = []
    for number, word in enumerate(words.split(), 1):
        nbytes = int(word[1:]) * MIB
        address = (1000 - number) << 30  # the kernel maps downwards
        name = {"a": "aligned_alloc", "m": "malloc"}[word[0]]
        requested = {"nbytes": nbytes, "number": number, "is_stalled": False}
        part = Part("placed", address, nbytes, nbytes)
        made.append(Entry("placed", name, address, nbytes, nbytes, requested, None, (part,)))
    return sorted(made, key=lambda entry: entry.address)


R, KV, C, L, P = "weights:q4_K repacked", "kv", "scratch", "logits", "placed"


@pytest.mark.parametrize(
    ("words", "purposes"),
    [
        ("a39 a144 m20 a75", [R, KV, P, C]),
        ("m9 m2 a39 m2 a2 a144 m20 a75 m2", [P, P, R, P, L, KV, P, C, P]),
        ("a39 a144 a20 m20 a75 a90", [R, KV, KV, P, C, C]),  # two caches; memory that has grown
        ("a144 m20 a75", [KV, P, C]),  # nothing is repacked
        ("a39 a38 m20 a39", [R, KV, P, C]),  # all have the size of the weights
        ("a39 m20 a75", [KV, P, C]),
        ("a39 a144 m20 a75 a144 m20 a70", [R, KV, P, C, KV, P, C]),  # two contexts
        ("a39 a144", [P, P]),  # the context is being made
        ("a75 a30", [P, P]),
        ("m30 m40", [P, P]),
    ],
)
def test_buffers_are_named_by_function_order_and_size(words: str, purposes: list[str]) -> None:
    made = entries(words)
    found = name_buffers(made, [model("safetensors"), model()])
    assert [entry.category for entry in reversed(found)] == purposes
    assert [entry.parts[0].category for entry in reversed(found)] == purposes
    assert [entry.address for entry in found] == [entry.address for entry in made]


def test_other_programs_have_no_such_buffers() -> None:
    made = entries("a39 a144 m20 a75")
    assert name_buffers(made, []) == name_buffers(made, [model("safetensors")]) == made


HOLD = """
import sys
from unimem_bench.llama_cpp import Conversation, Flags, Library, PeerModel, options
given = options(Flags(repack=True, flash=True), n_ctx=1024, n_threads=2)
loaded = PeerModel(Library(sys.argv[2], is_loud=True), sys.argv[1], given)
talk = Conversation(loaded, given)
print("ready", file=sys.stderr, flush=True)
sys.stdin.read()
"""
PRINTED = {"CPU_REPACK model": "repacked", "CPU KV": KV, "CPU compute": C}


@pytest.mark.uncounted
@pytest.mark.slow  # a model of 70 MB is written, and read by llama.cpp
@pytest.mark.skipif(launch.find_library() is None, reason="libunimem-exec.so is not installed")
def test_purposes_are_those_that_llama_cpp_prints(tmp_path: Path) -> None:
    library = llama_library()
    pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
    from unimem_bench.models import write_model

    path = write_model(tmp_path, "110m", "q4_k_m")
    main = "import sys; from unimem_command import main; sys.exit(main())"
    words = [sys.executable, "-c", main, "exec", "--", sys.executable, "-c", HOLD]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stderr"), subprocess.PIPE)
    with subprocess.Popen([*words, path, library], text=True, **pipes) as process:
        assert process.stderr is not None
        lines = list(iter(process.stderr.readline, "ready\n"))
        report = um.report(process.pid)
        metrics = MetricsCollector(lambda: [process.pid], llama_names=True).values()
        process.communicate("")
    printed = Counter[str]()
    for line in lines:
        if found := re.search(r": +(\S+ \S+) buffer size = +([\d.]+) MiB", line):
            printed[PRINTED.get(found[1], "")] += round(float(found[2]) * 100)
    active = Counter[str]()
    for row in report.rows:
        active[row.category.rpartition(" ")[2]] += round((row.active_bytes or 0) / MIB * 100)
    assert all(printed[kind] for kind in PRINTED.values()), lines
    assert {kind: active[kind] for kind in PRINTED.values()} == {
        kind: printed[kind] for kind in PRINTED.values()
    }
    of_name = {name: value / MIB for name, _, value in metrics}
    assert of_name["llamacpp:memory_context_bytes"] >= printed[KV] / 100
    assert of_name["llamacpp:memory_compute_bytes"] >= printed[C] / 100
    facts = report.facts["exec"]
    assert 0 <= facts["became_huge_bytes"] <= facts["became_resident_bytes"]
    assert json.loads(report.to_json())["facts"]["exec"] == facts
