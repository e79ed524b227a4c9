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
from support.terminal.chromium import dump, find_chromium, measure_pages

# The build uses one folder, so one worker runs all of these.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]

PHONE, DESKTOP = 390, 1400


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


def names_of(*pages: Path) -> set[str]:
    """Return the targets of links on pages."""
    text = "".join(page.read_text() for page in pages)
    return set(re.findall(r'<dt class="sig[^>]* id="([^"]+)"', text))


def test_every_public_name_is_explained(site: Path) -> None:
    names = {f"unimem.{name}" for name in um.__all__ if name not in unimem.errors.__all__}
    names |= {f"unimem.errors.{name}" for name in unimem.errors.__all__}
    names |= {f"unimem.engine.{name}" for name in unimem.engine.__all__}
    names |= {"unimem.cuda.KVCache", "unimem.transformers.KVCache", "unimem.ray.Stager"}
    names |= {"unimem.KVCache.append", "unimem.torch.tensor"}
    names |= {"unimem.vllm.CPUOffloading", "unimem.vllm.KVStoreTier"}
    names |= {"unimem.lmcache.KVStoreAdapter", "unimem.sglang.KVStoreStorage"}
    pages = list((site / "reference/python").glob("*.html"))
    assert names - names_of(*pages) == set()
    assert [page.name for page in pages if page.stat().st_size > 200_000] == []


def test_compiled_classes_have_their_signatures(site: Path) -> None:
    pages = [site / f"reference/python/{name}.html" for name in ("Block", "KVCache")]
    text = re.sub(r"<[^>]+>", "", "".join(page.read_text() for page in pages))
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
    pages = set(site.rglob("*.html"))
    listed = re.search(r'"?docnames"?:(\[.*?\])', index)
    assert listed
    names = {str(path.relative_to(site).with_suffix("")) for path in pages}
    assert set(re.findall(r'"([^"]+)"', listed[1])) == names - {"genindex", "search", "py-modindex"}


@pytest.fixture
def browser() -> None:
    try:
        find_chromium()
    except UnavailableError as error:
        pytest.skip(f"no page was looked at in a browser: {error}")


@pytest.mark.usefixtures("browser")
@pytest.mark.parametrize("asked", ["KVCache", "unimem.kvcache"])
def test_a_public_name_is_found_first(site: Path, asked: str) -> None:
    address = f"{(site / 'search.html').as_uri()}?q={asked}"
    found = dump(address, "--virtual-time-budget=10000").partition('class="search"')[2]
    first = re.search(r'<a href="([^"?#]*)', found)
    assert first
    assert first[1].endswith("reference/python/KVCache.html")


@pytest.mark.usefixtures("browser")
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_no_page_is_wider_than_its_window_and_no_table_is_cut(site: Path, width: int) -> None:
    found = measure_pages(site, width)
    assert len(found) > 100
    assert {name: cut for name, cut in found.items() if cut != (0, 0)} == {}
