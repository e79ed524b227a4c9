"""The examples in C, C++ and Cython compute the decoder's tokens in memory taken once."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="gguf (extra test) writes the models")
pytest.importorskip(
    "unimem.backends.ggml", reason="the engine needs ggml: its extra is 'run'", exc_type=ImportError
)

from support.models.decoders import greedy
from support.models.make import TINY, write_model
from support.project.building import run, tool
from support.project.checkout import ROOT
from unimem.engine import Decoder, embedded_model

EXAMPLES = ROOT / "examples"
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror"]
# The likeliest of each of the next 30 tokens leads by at least 0.07 deviations.
PROMPT = "Sam went to the park"
N = 30


def flags() -> list[str]:
    return shlex.split(run(sys.executable, "-m", "unimem", "--cflags", "--libs"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the example in C."""
    program = tmp_path_factory.mktemp("llama") / "llama"
    sources = sorted((EXAMPLES / "c").glob("*.c"))
    options = ["-std=c17", "-D_GNU_SOURCE", "-O2", "-Wconversion", *WARNINGS]
    run(tool("cc"), *options, *sources, "-o", program, *flags(), "-lm")
    return program


def model_of(kind: str, folder: Path) -> Path:
    if kind == "embedded":
        return embedded_model()
    return write_model(folder / "m.gguf", "llama", TINY, kind)


def prompt_and_tokens(model: Path) -> tuple[list[int], list[int]]:
    with Decoder(model, threads=1) as decoder:
        prompt = decoder.tokenize(PROMPT) if model == embedded_model() else [1, 5, 9]
        decoder.prefill(prompt)
        return prompt, greedy(decoder, N)


def talk(
    llama: Path, model: Path, n: int, prompt: list[int], **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [str(llama), str(model), str(n), *map(str, prompt)]
    return subprocess.run(
        command,
        env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["embedded", "f32", "f16", "q8_0"])
def test_tokens_in_c_are_those_of_the_decoder(llama: Path, tmp_path: Path, kind: str) -> None:
    model = model_of(kind, tmp_path)
    prompt, tokens = prompt_and_tokens(model)
    done = talk(llama, model, N, prompt)
    assert done.returncode == 0, done.stderr
    assert [int(token) for token in done.stdout.split()] == tokens
    counted = r"29 tokens, [\d.]+ us each: 0 page faults, 0 allocations, 0 calls\n"
    assert re.fullmatch(counted, done.stderr)


def test_more_tokens_make_no_more_allocations(llama: Path, tmp_path: Path) -> None:
    """All allocations of the process count, those of the C library included."""
    shim = tmp_path / "shim.so"
    source = ROOT / "tests" / "support" / "kernel" / "shim" / "total_alloc.c"
    run(tool("cc"), "-O2", "-shared", "-fPIC", source, "-o", shim)
    totals = []
    for n in (2, 60):
        done = talk(llama, embedded_model(), n, [1, 5, 9], LD_PRELOAD=str(shim))
        found = re.search(r"^(\d+) allocations in all$", done.stderr, re.M)
        assert found is not None, done.stderr
        totals.append(int(found[1]))
    assert totals[0] == totals[1] > 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["{model}", "3"], "expected: llama MODEL.gguf N TOKEN..."),
        (["nothing.gguf", "3", "1"], "UM_E_IO: the model cannot be opened"),
        ([__file__, "3", "1"], "UM_E_FORMAT: "),
        (["{qwen2}", "3", "1"], "UM_E_FORMAT: general.architecture"),
        (["{bias}", "3", "1"], "UM_E_FORMAT: tensors that this example does not know"),
        (["{q4_0}", "3", "1"], "UM_E_FORMAT: a matrix that is not of F32, F16 or Q8_0"),
        (["{model}", "3", "99999"], "UM_E_INVALID: token"),
        (["{model}", "600", "1"], "UM_E_FULL: kv"),
    ],
)
def test_the_program_in_c_says_what_is_wrong(
    llama: Path, tmp_path: Path, arguments: list[str], reason: str
) -> None:
    models = {"{model}": embedded_model()}
    path = tmp_path / "m.gguf"
    if arguments[0] == "{bias}":
        models["{bias}"] = write_model(path, "llama", TINY, "f32", bias=True)
    elif arguments[0] in ("{q4_0}", "{qwen2}"):
        named = arguments[0].strip("{}")
        arch, kind = ("llama", named) if named == "q4_0" else (named, "f32")
        models[arguments[0]] = write_model(path, arch, TINY, kind)
    first, *rest = arguments
    command = [llama, models.get(first, first), *rest]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith(reason)


def test_containers_of_cpp_lie_on_a_tape(tmp_path: Path) -> None:
    program = tmp_path / "step"
    source = EXAMPLES / "cpp" / "step.cpp"
    run(tool("c++"), "-std=c++17", "-O2", *WARNINGS, source, "-o", program, *flags())
    first, *rest = run(program).splitlines()
    assert re.fullmatch(r"sum 495\d{4}, \d+ bytes a step", first)
    assert rest == ["1", "full", "UM_E_FULL: tape, 1048576 of 1048576 bytes used"]


TALK = """
import sys
import unimem
from llama import Llama

model, n, *prompt = sys.argv[1:]
with unimem.open_weights(model) as weights:
    llama = Llama(weights, 2)
    print(*llama.generate([*map(int, prompt)], int(n)))
    with unimem.measure() as m:
        llama.prefill([1, 2, 3])
    assert m.n_allocations == m.n_os_calls == 0, m
    llama.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [("setuptools", "setuptools"), ("meson", "mesonpy"), ("scikit-build", "scikit_build_core")],
)
def test_cython_is_built_by(tmp_path: Path, name: str, backend: str) -> None:
    for module in ("Cython", backend):
        pytest.importorskip(module, reason=f"{module} builds the example")
    tool("cc")
    source, target = tmp_path / name, tmp_path / "site"
    shutil.copytree(EXAMPLES / "cython" / name, source)  # a link becomes the file
    prefix = run(sys.executable, "-m", "unimem", "--prefix").strip()
    environment = {
        **os.environ,
        "CMAKE_PREFIX_PATH": prefix,  # no entry point names the folder of an editable install
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_WAIT_POLICY": "passive",
    }
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", *options, str(source)]
    built = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    prompt, tokens = prompt_and_tokens(embedded_model())
    environment["PYTHONPATH"] = f"{target}{os.pathsep}{environment['PYTHONPATH']}"
    command = [sys.executable, "-c", TALK, str(embedded_model()), str(N), *map(str, prompt)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [int(token) for token in done.stdout.split()] == tokens
