"""The wheel is whole: it works where nothing of the checkout can be found."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from project import ROOT

# Building it takes more than a minute; that all of it is there without the checkout, nothing else
# shows.
pytestmark = pytest.mark.slow

NEEDED = {
    *(f"{package}/py.typed" for package in ("pytest_unimem", "unimem", "unimem_command")),
    *("pytest_unimem/__init__.py", "unimem_command/__init__.py", "unimem/cuda/rows.cu"),
    *(f"unimem/include/unimem{part}.h" for part in ("", "_formats", "_kv")),
    *(f"unimem/lib/libunimem-{part}.so" for part in ("bench", "bench-runtime", "exec")),
    "unimem/lib/libunimem.so.0",
    *(f"unimem/lib/cmake/unimem/unimem-config{part}.cmake" for part in ("", "-version")),
    *("unimem/lib/pkgconfig/unimem.pc", "unimem/engine/models/tiny.gguf"),
    *("unimem/__init__.pxd", "unimem/_core/tape.pxd", "unimem/_core/tape.pyi"),
}

# -S keeps .pth files out, and with them the editable install; what the wheel needs comes by path.
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
