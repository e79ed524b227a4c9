"""Damaged files given to the decoder: a result or an exception, never a dead process.

ggml ends the process on a shape, a type or a number that it does not take. Each mutant is opened,
and computed with where it opens, in a process that dies with ggml.
"""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

import unimem as um
from conftest import Run
from support.models import decoders  # noqa: F401 - skips where something is missing
from support.models.make import Shape, write_model
from support.project import tiers
from unimem.backends import ggml

gguf = pytest.importorskip("gguf")

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "qwen3moe")
SLOW = ("qwen2", "qwen3")  # the others cover their features
SHAPE = Shape(hidden=64, layers=2, heads=4, kv_heads=2, inner=96, vocab=300, ctx=64)
N_RANDOM = 160
STEP = 1 if tiers.everything else 5  # of the mutants of an architecture
# Runs mutants: a file, and (offset, bytes) replacements in a copy of it.
SCRIPT = """
    import json, os, pickle
    from unimem.engine import Decoder
    folder = os.environ["FOLDER"]
    mutants = pickle.load(open(folder + "/mutants", "rb"))
    outcomes = {}
    for number, (original, changes) in enumerate(mutants):
        print("mutant", number, original, flush=True)
        data = bytearray(open(original, "rb").read())
        for offset, new in changes:
            data[offset : offset + len(new)] = new
        path = folder + "/mutant.gguf"
        open(path, "wb").write(data)
        try:
            with Decoder(path, ctx=5 + number % 40, threads=1) as decoder:
                decoder.prefill([1, 2, 3])
                for _ in range(2):
                    decoder.generate_next_token()
            outcome = "computed"
        except Exception as error:
            outcome = type(error).__name__
        os.unlink(path)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    print(json.dumps(outcomes))
"""

Mutant = list[tuple[int, bytes]]


def run_all(folder: Path, mutants: list[tuple[Path, Mutant]], run_python: Run) -> dict[str, int]:
    (folder / "mutants").write_bytes(pickle.dumps([(str(path), each) for path, each in mutants]))
    done = run_python(SCRIPT, FOLDER=str(folder))
    last = done.stdout.splitlines()[-1] if done.stdout else ""
    assert done.returncode == 0, f"died ({done.returncode}) in {last}: {done.stderr[-2000:]}"
    outcomes: dict[str, int] = json.loads(last)
    assert sum(outcomes.values()) == len(mutants)
    return outcomes


def header_bytes(path: Path) -> int:
    with um.open_weights(path) as weights:
        return min(tensor.offset for tensor in weights.tensors.values())


def random_bytes_of_the_header(model: Path) -> list[Mutant]:
    rng = np.random.default_rng(0)
    end = header_bytes(model)
    data = model.read_bytes()
    # The vocabulary is most of the header, and not the engine's: half of the mutants spare it.
    tokens = data.index(b"tokenizer.ggml.tokens"), data.index(b"tokenizer.ggml.bos_token_id")
    places = [i for i in range(end) if not tokens[0] <= i < tokens[1]]
    mutants: list[Mutant] = []
    for i in range(N_RANDOM):
        chosen = rng.choice(places if i % 4 else range(end), int(rng.integers(1, 4)))
        flip = 1 << int(rng.integers(0, 8)) if i % 3 == 0 else None
        mutants.append(
            [(int(o), bytes([data[o] ^ (flip or int(rng.integers(1, 256)))])) for o in chosen]
        )
    return mutants


def every_number_of_the_metadata(model: Path) -> list[Mutant]:
    integers = [0, 1, 2, 3, 5, 7, 63, 65, 128, 2**16, 2**31 - 1, 2**31, 2**32 - 1]
    floats = [0.0, -1.0, 1.0, 1e-40, 1e38, float("nan"), float("inf"), -float("inf")]
    mutants: list[Mutant] = []
    data = model.read_bytes()
    fields = gguf.GGUFReader(model).fields
    for name, field in fields.items():
        if not name.startswith(fields["general.architecture"].contents()):
            continue
        offset = data.index(name.encode()) + len(name) + 4
        if field.types == [gguf.GGUFValueType.UINT32]:
            mutants += [[(offset, struct.pack("<I", value))] for value in integers]
        elif field.types == [gguf.GGUFValueType.FLOAT32]:
            mutants += [[(offset, struct.pack("<f", value))] for value in floats]
    assert len(mutants) > 90
    return mutants


def every_tensor_with_another_shape_type_or_place(model: Path) -> list[Mutant]:
    mutants: list[Mutant] = []
    data = model.read_bytes()
    for tensor in gguf.GGUFReader(model).tensors:
        n_dims = len(tensor.shape)
        dims = data.index(tensor.name.encode()) + len(tensor.name) + 4
        kind, offset = dims + 8 * n_dims, dims + 8 * n_dims + 4
        if n_dims == 2:
            ne0, ne1 = (int(n) for n in tensor.shape)
            for shape in ((ne1, ne0), (ne0 // 2, ne1 * 2), (ne0, ne1 - 1)):
                mutants.append([(dims, struct.pack("<QQ", *shape))])
        mutants.append([(dims, struct.pack("<Q", 0))])
        mutants += [[(kind, struct.pack("<I", number))] for number in (0, 1, 2, 26, 28, 30, 14)]
        mutants.append([(offset, struct.pack("<Q", 0))])
    return mutants


@pytest.mark.parametrize(
    "arch",
    [pytest.param(arch, marks=[pytest.mark.slow] * (arch in SLOW)) for arch in ARCHITECTURES],
)
def test_damaged_headers(arch: str, tmp_path: Path, run_python: Run) -> None:
    model = write_model(tmp_path / "model.gguf", arch, SHAPE, "q8_0", tied=True)
    mutants = [
        *random_bytes_of_the_header(model),
        *every_number_of_the_metadata(model),
        *every_tensor_with_another_shape_type_or_place(model),
    ]
    # The fast tier tries different mutants for each architecture.
    first = ARCHITECTURES.index(arch)
    chosen = [(model, mutant) for mutant in mutants[first % STEP :: STEP]]
    outcomes = run_all(tmp_path, chosen, run_python)
    assert len(outcomes) > 2  # some were refused by the reader, some by the engine, some computed


def test_random_weights_of_every_type(tmp_path: Path, run_python: Run) -> None:
    # Any bits are a value of a quantized type, or not a number: tables are not left.
    shape = Shape(hidden=256, layers=1, heads=4, kv_heads=2, inner=256, vocab=300, ctx=64)
    mutants: list[tuple[Path, Mutant]] = []
    # gguf-py writes the files, and may lack a type that ggml has got since.
    known = {kind.name.lower() for kind in gguf.GGMLQuantizationType}
    for kind in sorted(name for name in ggml.MATMUL_TYPES.values() if name.lower() in known):
        path = tmp_path / f"{kind}.gguf"
        mutants += [(write_model(path, shape=shape, kind=kind, random_bits=True), [])] * 2
        if kind not in ("f16", "q8_0", "q4_K") and not tiers.everything:
            continue
        # Experts are sorted by scores that are not numbers.
        path = tmp_path / f"{kind}-experts.gguf"
        write_model(path, "qwen3moe", shape, kind, random_bits=True, experts=(40, 3))
        mutants.append((path, []))
    assert set(run_all(tmp_path, mutants, run_python)) <= {"computed", "ArithmeticError"}
