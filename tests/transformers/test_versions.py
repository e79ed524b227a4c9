"""The newest two minors of transformers are served, and others get a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra transformers needs torch")

from support.kernel.huge_pages import leave_the_pool
from support.project.checkout import ROOT

pytestmark = pytest.mark.slow

MINORS = ("5.23", "5.24")
try:
    OTHERS = [minor for minor in MINORS if not version("transformers").startswith(f"{minor}.")]
except PackageNotFoundError:
    OTHERS = list(MINORS)
TESTS = ("test_architectures.py", "test_layers.py", "test_states.py")


def run(first: Path, *command: str, timeout: int = 400) -> subprocess.CompletedProcess[str]:
    """Run Python with a folder of packages before the others."""
    environment = os.environ | {"PYTHONPATH": str(first)}
    return subprocess.run(
        [sys.executable, *command],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.parametrize("minor", OTHERS)
def test_another_minor_passes_the_same_tests(minor: str) -> None:
    leave_the_pool()  # others need not wait meanwhile
    folder = ROOT / f"build/transformers-{minor}"
    package = f"transformers=={minor}.*"
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        install = "-m pip install --quiet --no-deps --retries 1 --upgrade --target".split()
        try:
            missing = run(part, *install, str(part), package, timeout=120).returncode != 0
        except subprocess.TimeoutExpired:
            missing = True
        if missing:
            pytest.skip(f"{package} cannot be had")
        part.rename(folder)
    found = run(folder, "-c", "import transformers; print(transformers.__version__)")
    assert found.stdout.startswith(f"{minor}."), found.stderr
    tests = [f"tests/transformers/{name}" for name in TESTS]
    done = run(folder, *"-m pytest -q --all -p no:cacheprovider -p no:xdist".split(), *tests)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_an_older_version_gets_a_sentence(tmp_path: Path) -> None:
    info = tmp_path / "transformers-4.57.6.dist-info"
    for folder in (info, tmp_path / "transformers"):
        folder.mkdir()
    (tmp_path / "transformers/__init__.py").touch()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.6\n")
    done = run(tmp_path, "-c", "import unimem.transformers")
    assert done.returncode == 1
    assert "expected transformers 5.23 or 5.24, got 4.57.6: pip install" in done.stderr
