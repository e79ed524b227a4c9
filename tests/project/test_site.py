"""The site has all public names, C functions and commands, and fits a phone and a desktop."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import unimem as um
import unimem.engine
import unimem.errors
from support.project.apt_packages import UnavailableError
from support.project.checkout import ROOT
from support.terminal.chromium import find_chromium, look_at

# The build takes ten seconds and uses one folder, so one worker runs all of these.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]

PHONE, DESKTOP = 390, 1280


@pytest.fixture(scope="module")
def site() -> Path:
    pytest.importorskip("sphinx", reason="Sphinx is not installed: make docs")
    build = [sys.executable, "tools/site/build.py"]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    html = ROOT / "build/site/html"
    n_pages = len(list((ROOT / "docs").rglob("*.md")))
    assert int(done.stdout.split()[0]) > n_pages
    return html


def names_of(page: Path) -> set[str]:
    """Return the targets of links on a page."""
    return set(re.findall(r'<dt class="sig[^>]* id="([^"]+)"', page.read_text()))


def test_every_public_name_is_explained(site: Path) -> None:
    names = {f"unimem.{name}" for name in um.__all__ if name not in unimem.errors.__all__}
    names |= {f"unimem.errors.{name}" for name in unimem.errors.__all__}
    names |= {f"unimem.engine.{name}" for name in unimem.engine.__all__}
    names |= {"unimem.cuda.KVCache", "unimem.transformers.KVCache", "unimem.ray.Stager"}
    names |= {"unimem.KVCache.append", "unimem.torch.tensor"}
    names |= {"unimem.vllm.CPUOffloading", "unimem.vllm.KVStoreTier"}
    names |= {"unimem.lmcache.KVStoreAdapter", "unimem.sglang.KVStoreStorage"}
    assert names - names_of(site / "reference/python.html") == set()


def test_compiled_classes_have_their_signatures(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "reference/python.html").read_text())
    assert re.search(r"class unimem\.Block\(nbytes, \*, ", text)
    assert re.search(r"class unimem\.KVCache\(n_layers, n_kv_heads, head_dim, max_seq_len, ", text)
    assert re.search(r"\bappend\(layer, k, v", text)


def test_every_function_of_c_is_explained(site: Path) -> None:
    headers = "".join(path.read_text() for path in (ROOT / "native/include").glob("*.h"))
    declared = {f"c.{name}" for name in re.findall(r"^UM_API [^(]*?(um_\w+)\(", headers, re.M)}
    assert len(declared) > 100
    assert declared - names_of(site / "reference/c.html") == set()


def test_every_command_is_shown(site: Path) -> None:
    text = (site / "reference/command-line.html").read_text()
    for command in ("unimem run", "unimem plan", "unimem stage", "unimem cache"):
        assert f"{command}<a" in text
        assert f"Usage: {command} " in text


def test_search_finds_every_page(site: Path) -> None:
    index = (site / "searchindex.js").read_text()
    # The width is in the name of the shown file.
    pages = {path for path in site.rglob("*.html") if "." not in path.stem}
    listed = re.search(r'"?docnames"?:(\[.*?\])', index)
    assert listed
    names = {str(path.relative_to(site).with_suffix("")) for path in pages}
    assert set(re.findall(r'"([^"]+)"', listed[1])) == names - {"genindex", "search", "py-modindex"}


@pytest.mark.parametrize("page", ["index", "benchmarks", "reference/python", "reference/c"])
def test_pages_fit_their_window(site: Path, page: str) -> None:
    try:
        find_chromium()
    except UnavailableError as error:
        pytest.skip(f"no page was looked at in a browser: {error}")
    for width in (PHONE, DESKTOP):
        seen = look_at(site / f"{page}.html", width)
        assert seen["overflow"] == 0
        assert len(seen["text"]) > 500
