"""The wheel is complete and small, and works without the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from project.test_readme import EXAMPLES, OF_TORCH
from support.project.building import run, tool
from support.project.checkout import ROOT
from support.project.native_page import IN_CHECKOUT, MODEL, PRINTED, blocks, runs, write_programs
from unimem._core.status import VERSION

# The build takes more than a minute. Nothing else shows that the wheel works without the checkout.
pytestmark = pytest.mark.slow

NEEDED = {
    "pytest_unimem/py.typed",
    "unimem/py.typed",
    "unimem_command/py.typed",
    "unimem_exec/py.typed",
    "pytest_unimem/__init__.py",
    "unimem_command/__init__.py",
    "unimem_exec/__init__.py",
    "unimem/cuda/rows.cu",
    *(f"unimem/include/unimem{part}.h" for part in ("", "_formats", "_kv")),
    *(f"unimem/lib/libunimem-{part}.so" for part in ("bench", "bench-runtime", "exec")),
    "unimem/lib/libunimem.so.0",
    *(f"unimem/lib/cmake/unimem/unimem-config{part}.cmake" for part in ("", "-version")),
    "unimem/lib/pkgconfig/unimem.pc",
    "unimem/engine/models/tiny.gguf",
    f"unimem_llm-{VERSION}.dist-info/licenses/LICENSE",
    f"unimem_llm-{VERSION}.dist-info/sboms/sbom.cdx.json",
    "unimem/__init__.pxd",
    "unimem/_core/tape.pxd",
    "unimem/_core/tape.pyi",
}

# The embedded model is 1.1 MB of both.
MOST_WHEEL_BYTES = 3_450_000
MOST_SDIST_BYTES = 4_100_000
INSTALL_RUN = "pip install ./ggml '.[run]'"
BACKEND = "from scikit_build_core.build import build_sdist; print(build_sdist({folder!r}))"

# -S excludes .pth files, and so the editable install; the dependencies are on the path.
PROGRAM = """
import sys
sys.path[:0] = [{target!r}, {site!r}]
import os
from importlib.metadata import entry_points
from importlib.resources import files
import numpy as np
import unimem as um
from unimem.engine import Decoder, embedded_model

assert um.__file__.startswith({target!r}), um.__file__
assert os.path.exists(os.path.join(um.get_include(), "unimem.h"))
assert os.path.exists(um.get_library())
# As scikit-build-core and pkgconf look for them.
(prefix,) = entry_points(group="cmake.prefix", name="unimem")
assert (files(prefix.load()) / "lib/cmake/unimem/unimem-config.cmake").is_file()
(folder,) = entry_points(group="pkg_config", name="unimem")
assert (files(folder.value) / "unimem.pc").is_file()
maps = open("/proc/self/maps").read()
assert um.get_library() in maps, "the modules use another libunimem"
with Decoder(embedded_model()) as decoder:
    print("".join(decoder.generate("Once upon a time", 8)))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel, with a build folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    scripts = Path(sysconfig.get_path("scripts"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "-C", f"build-dir={folder}/build"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(ROOT)],
        check=True,
        env={**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}"},
        stdout=subprocess.DEVNULL,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_what_callers_need_and_no_sources(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wheel.stat().st_size <= MOST_WHEEL_BYTES
    assert wheel.name.startswith("unimem_llm-")
    assert names >= NEEDED
    assert not [name for name in names if name.endswith((".pyx", ".c", "CMakeLists.txt"))]


def test_the_wheel_runs_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    options = ["--quiet", "--no-deps", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True)
    program = PROGRAM.format(target=str(target), site=sysconfig.get_path("purelib"))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_sdist_has_the_sources_and_no_records(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core", reason="scikit-build-core makes the sdist")
    subprocess.run(
        [sys.executable, "-c", BACKEND.format(folder=str(tmp_path))],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    (sdist,) = tmp_path.glob("*.tar.gz")
    assert sdist.stat().st_size <= MOST_SDIST_BYTES
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "PKG-INFO",
        "CMakeLists.txt",
        "native/src/kv/kv.c",
        "src/unimem/kv/cache/cache.pyx",
    } < names
    assert {MODEL, "tests/project/test_wheel.py"} < names
    assert [
        name for name in names if "corpus/" in name or name.endswith((".svg", ".so", ".so.0"))
    ] == []
    assert [name for name in names if name.startswith(("bench/results/", ".ci", "build"))] == []


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment with the wheel, its dependencies, and tools to build a Cython module."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder)
    install = [str(folder / "bin/pip"), "install", "--quiet", str(wheel)]
    install += ["cython>=3.1", "setuptools>=77"]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if "Retrying" in done.stderr and done.returncode:
        pytest.skip(f"nothing was tried in an empty environment, without an index: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return folder


def run_in(environment: Path, *arguments: str | Path) -> str:
    """Run Python there, out of reach of the checkout."""
    return run("env", "-u", "PYTHONPATH", environment / "bin/python", *arguments)


def packages(environment: Path) -> Path:
    (folder,) = environment.glob("lib/python*/site-packages")
    return folder


@pytest.mark.uncounted
def test_an_empty_environment_passes_the_smoke_test(environment: Path) -> None:
    script = ROOT / "tools/wheels/smoke.py"
    told = json.loads(run_in(environment, "-I", script, packages(environment)))
    assert told["python"] == sys.version.split()[0]


def without_extras(
    environment: Path, folder: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run Python there, in a folder; it may fail."""
    command = ["env", "-u", "PYTHONPATH", str(environment / "bin/python"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.uncounted
def test_examples_run_without_extras_or_say_what_is_missing(
    environment: Path, tmp_path: Path
) -> None:
    for name, text in EXAMPLES.items():
        folder = tmp_path / name.replace("/", "-")
        folder.mkdir()
        done = without_extras(environment, folder, "-I", "-c", text)
        if name in OF_TORCH:
            assert "No module named 'torch'" in done.stderr, name
        elif "import Decoder" in text:
            assert f"the extra 'run': {INSTALL_RUN}" in done.stderr, name
        else:
            assert (done.returncode, done.stderr) == (0, ""), name


@pytest.mark.uncounted
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("--version", rf"unimem {VERSION}"),
        ("--help", r" +plan +.*"),
        (f"inspect {ROOT / MODEL}", r"architecture llama"),
        (f"plan {ROOT / MODEL}", r"Fits: .*"),
        ("report PID", r"total +.*"),
        ("doctor", r"kernel +Linux .*"),
    ],
)
def test_commands_run_without_extras(
    environment: Path, tmp_path: Path, arguments: str, shown: str
) -> None:
    words = arguments.replace("PID", str(os.getpid())).split()
    done = without_extras(environment, tmp_path, "-m", "unimem", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(f"^{shown}$", done.stdout, re.M), done.stdout
    says = "ggml" in " ".join(done.stdout.split()) and "the extra 'run'" in done.stdout
    assert says == arguments.startswith("plan"), "a plan says what `unimem run` needs"


@pytest.mark.uncounted
@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        ("run", "run"),
        (f"chat {ROOT / MODEL}", "run"),
        ("plan https://127.0.0.1:1/model.gguf", "remote"),
        ("metrics", "metrics"),
    ],
)
def test_commands_name_the_extra_that_they_need(
    environment: Path, tmp_path: Path, arguments: str, extra: str
) -> None:
    done = without_extras(environment, tmp_path, "-m", "unimem", *arguments.split())
    assert f"install unimem-llm with the extra '{extra}': pip install " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.uncounted
def test_the_page_on_c_runs_with_the_wheel(environment: Path, tmp_path: Path) -> None:
    """The commands of docs/native.md for an installed prefix run word for word."""
    for name in ("gcc", "g++", "cmake", "pkg-config"):
        tool(name)
    home, checkout = tmp_path / "home", tmp_path / "checkout"
    for folder in (home, checkout, tmp_path / "mine"):
        folder.mkdir()
    (home / "unimem").symlink_to(packages(environment) / "unimem")
    shutil.copytree(ROOT / "examples/c", checkout / "examples/c")
    (checkout / MODEL).parent.mkdir(parents=True)
    shutil.copy(ROOT / MODEL, checkout / MODEL)
    write_programs(tmp_path / "mine")
    for commands, start in list(zip(blocks("sh"), PRINTED, strict=True))[1:]:
        is_there = any(text in commands for text in IN_CHECKOUT)
        folder = checkout if is_there else tmp_path / "mine"
        printed = runs(commands, folder, home, str(environment / "bin/python"))
        assert printed.startswith(start), commands


@pytest.mark.uncounted
def test_cython_is_built_with_the_wheel(environment: Path, tmp_path: Path) -> None:
    tool("cc")
    shutil.copytree(ROOT / "examples/cython/setuptools", tmp_path / "llama")
    options = ("--quiet", "--no-deps", "--no-build-isolation", f"--target={tmp_path / 'site'}")
    run_in(environment, "-m", "pip", "install", *options, tmp_path / "llama")
    program = (
        "import sys, unimem; sys.path.append(sys.argv[1]); import llama; print(llama.__file__)"
    )
    assert run_in(environment, "-I", "-c", program, tmp_path / "site").startswith(str(tmp_path))
