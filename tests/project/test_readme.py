"""Examples and commands of README.md and documents run as they are, in an empty folder."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from support.kernel.huge_pages import leave_the_pool
from support.processes.warm_python import run_script
from support.project.checkout import ROOT
from support.project.tools import load_tool
from support.servers.model_server import serving
from unimem.engine import embedded_model
from unimem.staging.keeper import drop
from unimem.weights.staged import holders


def blocks(name: str, language: str) -> list[str]:
    """Return the code blocks of a document in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(), re.S)


# The number of Python examples of each document.
N_EXAMPLES = {
    "README.md": 1,
    "docs/accounting.md": 4,
    "docs/plan.md": 2,
    "docs/buffers.md": 3,
    "docs/for-authors.md": 6,
    "docs/for-benchmarkers.md": 0,
    "docs/for-operators.md": 0,
    "docs/kv.md": 4,
    "docs/measure.md": 1,
    "docs/paged.md": 1,
    "docs/placement.md": 4,
    "docs/snapshots.md": 1,
    "docs/store.md": 5,
    "docs/torch.md": 3,
}
FIRST = blocks("README.md", "text")[1]
# A local server answers for this URL, with the model in the package.
SERVED = "/ggml-org/models/resolve/main/tinyllamas/stories260K.gguf"
# Documents with commands, the packages that these need, and some lines of their output.
COMMANDS = {
    "docs/for-operators.md": (
        ("typer", "aiohttp", "huggingface_hub"),
        (r"Fits: .*", r"exit code 3", r"Once upon a time.*", r"read .*", r"engine .*", r"kv .*"),
    ),
    "docs/for-benchmarkers.md": (
        ("typer", "pyperf"),
        (r"np\.empty\(\)\.ctypes\.data: [\d.]+x \([\d.]+ to [\d.]+\)", r".*ratios.*"),
    ),
}


EXAMPLES = {f"{name}-{i}": x for name in N_EXAMPLES for i, x in enumerate(blocks(name, "python"))}
OF_TORCH = [name for name, text in EXAMPLES.items() if "import torch\n" in text]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in OF_TORCH else []) for name in EXAMPLES],
)
def test_example_runs(name: str, tmp_path: Path) -> None:
    if name in OF_TORCH:
        pytest.importorskip("torch", reason="torch (extra torch) is not installed")
    if name == "README.md-0":  # in a new interpreter, as a reader does
        command = [sys.executable, "-W", "error", "-c", EXAMPLES[name]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    else:
        done = run_script(EXAMPLES[name], folder=tmp_path, strict=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
    if name == "README.md-0":  # it prints the figures of its tapes
        assert done.stdout == FIRST


@pytest.mark.parametrize("name", N_EXAMPLES)
def test_the_documents_have_their_examples(name: str) -> None:
    assert len(blocks(name, "python")) == N_EXAMPLES[name]


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Return a reader's environment variables; the URL leads to a server on this machine."""
    folder = os.path.dirname(sys.executable)
    if shutil.which("unimem", path=folder) is None:
        pytest.skip(f"the command unimem is not in {folder}")
    with serving() as server:
        server.files[SERVED] = embedded_model().read_bytes()
        new = {"HF_ENDPOINT": server.url, "HF_TOKEN": "", "NO_PROXY": "127.0.0.1"}
        yield os.environ | new | {"PATH": f"{folder}:{os.environ['PATH']}"}


@contextmanager
def run_group(words: list[str], cwd: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a command, and at the end kill its whole process group."""
    with subprocess.Popen(
        words,
        cwd=cwd,
        env=env,
        text=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow  # each of the commands has tests of its own
@pytest.mark.xdist_group("machine")
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_run(name: str, environment: dict[str, str], tmp_path: Path) -> None:
    needs, lines = COMMANDS[name]
    for package in needs:
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[test]'")
    words = ["bash", "-eu", "-c", "\n".join(blocks(name, "sh"))]
    try:
        with run_group(words, cwd=tmp_path, env=environment) as shell:
            out, err = shell.communicate(timeout=300)
    finally:
        left = [each for each in holders() if each.source == str(embedded_model())]
        for each in left:
            drop(each)
    assert shell.returncode == 0, err
    assert "Traceback" not in err
    assert left == []
    assert [line for line in lines if not re.search(f"^{line}$", out, re.M)] == []


@pytest.mark.slow  # compiles what Cython writes
def test_the_cython_module_is_built_by_its_lines(tmp_path: Path) -> None:
    pytest.importorskip("Cython", reason="Cython is of the extra `test`")
    name = "docs/for-authors.md"
    (tmp_path / "scale.pyx").write_text(blocks(name, "cython")[0])
    env = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    (lines,) = [text for text in blocks(name, "sh") if "scale.pyx" in text]
    subprocess.run(["bash", "-eu", "-c", lines], cwd=tmp_path, env=env, check=True)


@pytest.mark.slow  # installs two environments, as a newcomer does
@pytest.mark.timeout(1600)
def test_the_two_commands_run_in_a_fresh_clone(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout of git")
    commands = blocks("README.md", "sh")[1]
    assert [line.split("#")[0].split() for line in commands.splitlines()] == [
        ["make", "run"],
        ["make", "test"],
    ]
    clone = tmp_path / "unimem"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    ours = ("MAKE", "PYTEST", "PYTHON", "UNIMEM", "VIRTUAL_ENV")
    new = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    new |= {"PYTEST_ADDOPTS": "--collect-only"}  # the tests themselves run here already
    leave_the_pool()  # C tests need it
    with run_group(["bash", "-eu", "-c", commands], cwd=clone, env=new) as shell:
        out, err = shell.communicate(timeout=1500)
    assert shell.returncode == 0, f"{out[-5000:]}\n{err[-5000:]}"
    assert "Once upon a time" in out
    assert "This was the fast tier." in out


def test_figures_are_those_of_the_benchmarks() -> None:
    recorded = (ROOT / "docs/benchmarks.md").read_text()
    texts = [(ROOT / name).read_text() for name in N_EXAMPLES]
    ratio = r"\d[\d.]*x (?:faster )?\(\d[\d.]* to \d[\d.]*\)"
    found = [figure for text in texts for figure in re.findall(ratio, text)]
    assert len(found) == 3
    assert [figure for figure in found if figure not in recorded] == []


def test_the_picture_is_what_a_terminal_shows() -> None:
    text = (ROOT / "docs/readme/run.svg").read_text()
    assert "allocations&#160;by&#160;unimem" in text
    assert "@font-face" not in text, "a viewer of the picture fetches nothing"
    tool = load_tool("picture")
    shown = tool.record([sys.executable, "-c", "print('\\x1b[1mbold\\x1b[0m plain')"])
    assert shown == "\x1b[1mbold\x1b[0m plain\n"
    drawn = tool.draw("$ title", shown)
    assert re.search(r'class="unimem-r\d"[^>]*>bold<.*&#160;plain<', drawn)
    assert "$&#160;title" in drawn


def test_each_figure_has_its_peer_at_its_best() -> None:
    """A row beside another side names the figure of that side's best case as well."""
    readme, pressure, recorded = (
        (ROOT / name).read_text()
        for name in ("README.md", "docs/pressure.md", "docs/benchmarks.md")
    )
    rows = {
        name: float(value)
        for name, value in re.findall(
            r"^\| (\S[^|]*?) \|(?:[^|]*\|){2} ([\d.]+) \|", pressure, re.M
        )
    }
    (said,) = re.findall(
        r"takes\s+(\S+) ms and .*? defaults (\S+) ms, but (\S+) ms with `--mlock` and (\S+) ms",
        readme,
        re.S,
    )
    sides = ("unimem", "llama.cpp", "llama.cpp, locked", "llama.cpp, read")
    assert [float(value) for value in said] == [rows[side] for side in sides]
    best = {
        "kv/append": ("C memcpy: 2.20x slower", "2.20x as fast"),
        "convert-batch": ("torch: 1.08x faster", "1.08x the time"),
        "load/staged": (
            "large folios: no difference (0.84 to 1.25)",
            "no difference (0.84 to 1.25)",
        ),
    }
    assert [
        name for name, (there, here) in best.items() if not (there in recorded and here in readme)
    ] == []


def test_speeds_beside_llama_cpp_are_those_of_their_table() -> None:
    readme, table = ((ROOT / name).read_text() for name in ("README.md", "docs/ggml.md"))
    row = next(line for line in readme.splitlines() if "newest llama.cpp" in line)
    rows = re.findall(
        r"\| (Q8_0|Q4_K_M) \| 2 \| (prefill 512|decode) \|.*?\| (\d\.\d\dx) \(", table
    )
    kinds = "Q8_0", "Q4_K_M"
    expected = [ratio for phase in ("prefill 512", "decode") for kind in kinds
                for found, done, ratio in rows if (found, done) == (kind, phase)]  # fmt: skip
    assert re.findall(r"\d\.\d\dx", row) == expected


def test_the_readme_links_few_documents() -> None:
    links = re.findall(r"\]\(((?!https?:)[^)#]+\.md)", (ROOT / "README.md").read_text())
    assert len(set(links)) <= 9
