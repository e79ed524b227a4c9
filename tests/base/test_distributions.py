"""A distribution of another project with the same import name is noticed."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from unimem.base.distributions import other_distributions, warn_of_namesake
from unimem.system.doctor import doctor


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Install another project's package in a folder."""
    files = {
        "unimem-0.3.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: unimem\nVersion: 0.3.1\n",
        "unimem-0.3.1.dist-info/RECORD": "unimem/__init__.py,,\n",
        "unimem/__init__.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_without_one_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_namesake()
    assert other_distributions() == []


def test_import_and_doctor_say_which_is_which(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(other)])
    said = r"unimem-0\.3\.1\.dist-info: it is another project's.* 'pip uninstall unimem', and inst"
    with pytest.warns(RuntimeWarning, match=said):
        warn_of_namesake()
    assert other_distributions() == ["unimem"]
    finding = next(each for each in doctor().findings if "distribution" in each.what)
    assert finding.run == "pip uninstall unimem"
    assert "this package, the memory layer for LLM inference, is unimem-llm" in finding.why
    code = f"import sys; sys.path.append({str(other)!r}); import unimem"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "RuntimeWarning: " in done.stderr
    assert "pip uninstall unimem" in done.stderr


def test_the_command_says_it_where_the_other_one_wins(other: Path) -> None:
    code = f"""
import sys, unimem_command
# A checkout that is installed in place has a finder before sys.path.
sys.meta_path = [one for one in sys.meta_path if "ScikitBuild" not in type(one).__name__]
sys.path.insert(0, {str(other)!r})
sys.exit(unimem_command.main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "unimem: the package 'unimem' that Python finds is another project's" in done.stderr
