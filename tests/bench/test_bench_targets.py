"""Every figure that an issue of unimem asks for is the target of a case, once each time."""

from __future__ import annotations

from collections import defaultdict

from unimem_bench.record import BEST
from unimem_bench.suites import NAMES, load_suite

CASES = [case for name in NAMES for case in load_suite(name).cases]
TARGETS = [(case, target) for case in CASES for target in case.targets]

# Issue and suite; then by kind the limits that "What it must show" of the issue asks for.
ASKED: dict[tuple[int, str], dict[str, list[float]]] = {
    # Two models, beside llama.cpp at its best and with its defaults.
    (2, "decode"): {"speed": [0.85] * 4 + [0.97] * 4, "figure": [0.25] * 2},
    (2, "calls"): {"speed": [2, 2, 2, 3], "cost": [2.5]},  # three ways to write a dtype
    (2, "gguf"): {"speed": [5, 50]},
    (3, "first-touch"): {"speed": [0.95, 0.95, 6, 6]},  # one thread and two
    (3, "verify"): {"speed": [50], "cost": [1]},
    # A token and a megabyte; two batches, two appends to rings, a wrapped read; no row moves.
    (4, "kv"): {"speed": [0.85, 3.5, 15, 15, 20], "cost": [1.05] * 5 + [1.3], "figure": [0]},
    (4, "snapshot"): {"speed": [1, 1, 1.7]},
    (5, "gpu"): {"speed": [0.9, 1, 2, 2, 2, 2, 3]},  # a token and a vector, CuPy and torch
    (5, "buffers"): {"figure": [1, 1.02, 1.03, 1.03, 25, 500, 500, 500, 500]},
    (6, "load"): {"speed": [0.9, 0.95, 0.97, 0.97, 12, 12], "cost": [0.6], "figure": [1]},
    (6, "gguf"): {"cost": [3]},
    (7, "accounting"): {"cost": [1.1] * 4 + [1.25, 3]},
    (8, "scaling"): {"exponent": [0.1] * 7 + [1.1] * 8},
    (11, "decode"): {"speed": [0.97]},
    # A small and a large model beside a neighbour, and a large one alone.
    # Six types, two of them repacked: prompts of two lengths and decode, and by one thread, beside
    # llama.cpp with its defaults.
    (18, "repack"): {"cost": [0.4, 1.1, 1.3], "figure": [2, 105]},
    (18, "decode"): {
        "speed": [0.9, 0.9, 0.98] + [1] * (18 + 8) + [1.05] * 4,
        "figure": [0.1] * 2,
    },
    # Small allocations, and a start; llama.cpp's decode, start and small pages.
    (19, "exec"): {"speed": [1.1], "cost": [0.8, 1.02], "figure": [5, 30]},
    (20, "accounting"): {"figure": [300]},
    # The slowest of a thousand tokens, and the mean: copied, staged, repacked, and under exec.
    (19, "pressure"): {"figure": [1.031] * 4 + [1.3] * 4},
    # Appending torch's tensors beside NumPy's arrays.
    (20, "kv"): {"cost": [2.5]},
    # Two types and two lengths, beside two caches; two updates; a conversation that goes on.
    (20, "transformers"): {"exponent": [0.1], "speed": [1] * 4 + [1.5] * 4 + [5, 10, 20]},
    # Prompts of two lengths: on disk, in RAM, and put; a hit and a miss.
    (21, "store"): {"speed": [8, 8, 10, 10], "cost": [0.05] * 2, "figure": [200] * 2},
    # An object beside the best client, and a prompt whose first tokens are on the server.
    (21, "remote"): {"speed": [0.8, 3]},
    # Quantizing and reading back, of each type of blocks, beside ggml; layers that differ.
    # Weights of two types, beside the same loops on memory of malloc.
    (23, "runtime"): {"cost": [1.1, 1.1]},
    # The same beside its best, and two files as they were written.
    (41, "decode"): {"speed": [1] * (18 + 2) + [1.05] * 12},
    # Decode behind two lengths and a long prompt, three caches, one thread and all.
    (41, "context"): {"speed": [1] * 18},
    (22, "kv"): {"speed": [0.9] * 6 + [1] * 6, "cost": [1.1]},
    (44, "store"): {"cost": [1.15] * 2},
    (46, "exec"): {"cost": [1]},  # a start after free memory has rested
    # Misses beside the best policy; all in memory; tokens beside llama.cpp, with half of the room,
    # a dense model and prompts; what disk and CPU allow; misses of uniform routing; a hit.
    (43, "stream"): {
        "speed": [1 / 1.1] * 8 + [0.97] + [1] * 44 + [1.6] * 2 + [2] * 16 + [10] * 2,
        "cost": [1.25] * 26,
        "figure": [20.4, 35.7, 51, 66.3, 100],
    },
    # Two types of quantized rows; two types under attention "sdpa".
    (45, "transformers"): {"speed": [1] * 2 + [1.3] * 2},
    (47, "gpu"): {"cost": [0.5, 0.6, 0.6, 0.6, 1, 1, 1, 1, 1.1, 1.3]},
}


def test_the_targets_are_those_of_the_issues() -> None:
    found: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case, target in TARGETS:
        found[target.issue, case.suite][target.kind].append(target.limit)
        found[target.issue, case.suite][target.kind].sort()
    assert found == ASKED


def test_a_claim_has_a_side_to_compare_with() -> None:
    for case, target in TARGETS:
        assert (target.other is not None) == (target.kind in ("speed", "cost")), case.name
        assert target.at_least == (target.kind == "speed"), case.name
        assert target.other != target.side, case.name
        assert target.other != BEST or target.kind == "speed", case.name


def test_cases_can_be_read_and_typed_and_what_a_suite_is_for_is_asked() -> None:
    for case in CASES:
        assert case.question.endswith("?"), case.question
        assert case.name == case.name.strip(), case.name
        assert case.unit, case.name
        if case.suite == "scaling":
            assert case.x, case.name
            assert [target.kind for target in case.targets] == ["exponent"], case.name
    for suite, words in {
        "scaling": "take append fork gather plan verify open",
        "pages": "decode prefill",
        "snapshot": "save restore",
    }.items():
        names = " ".join(case.name for case in load_suite(suite).cases)
        assert [word for word in words.split() if word not in names] == []
