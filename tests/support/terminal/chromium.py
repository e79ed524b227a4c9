"""A real browser: headless Chromium looks at a page, at the width of a phone or a desktop."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from support.project.apt_packages import UnavailableError, install, update_lists

NAMES = ("chromium", "chromium-browser", "google-chrome")
# The page is in a frame, since no window is as narrow as a phone. What is in the frame is of the
# same origin, so that it can be measured; its own policy lets no script of its own run.
_FRAME = """<!doctype html><body style="margin:0"><iframe width={width} height={height}
style="border:0" srcdoc="{page}"></iframe><pre></pre>"""
_MEASURE = """<script>
onload = () => {
  const frame = document.querySelector("iframe"), page = frame.contentDocument
  const root = page.documentElement, view = frame.contentWindow
  const colors = scheme => {
    root.style.colorScheme = scheme
    const style = view.getComputedStyle(page.body)
    return [style.backgroundColor, style.color]
  }
  const cells = [...page.querySelectorAll("td,th,dd,dt,li,p")]
  const found = {
    overflow: root.scrollWidth - root.clientWidth,
    cut: [...page.querySelectorAll(".scroll")].filter(e => e.scrollWidth > e.clientWidth).length,
    smallest: Math.min(...cells.map(cell => parseFloat(view.getComputedStyle(cell).fontSize))),
    text: page.body.innerText,
    light: colors("light"),
    dark: colors("dark"),
  }
  document.querySelector("pre").textContent = JSON.stringify(found)
  frame.remove()
}
</script>"""

# Many pages of a folder, measured at once, by a browser that takes files for one origin.
_FRAMES = """<!doctype html><body>{frames}<pre></pre><script>
onload = () => {
  const found = {}
  for (const frame of document.querySelectorAll("iframe")) {
    const root = frame.contentDocument.documentElement
    const tables = [...root.querySelectorAll(".table-wrapper")]
    const cut = tables.filter(e => e.scrollWidth > e.clientWidth + 1).length
    found[frame.name] = [root.scrollWidth - root.clientWidth, cut]
  }
  document.body.innerHTML = "<pre></pre>"
  document.querySelector("pre").textContent = JSON.stringify(found)
}
</script>"""


@cache
def find_chromium() -> str:
    """Give the program, which is installed where it is missing and this is root.

    Raises
    ------
    UnavailableError
        It cannot be had.
    """
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        update_lists()
        install({"chromium": "chromium"})
        found = shutil.which("chromium")
    if found is None:
        raise UnavailableError("chromium is not there, though it was installed")
    return found


def dump(address: str, *options: str) -> str:
    """Return the document that a page has become."""
    command = [find_chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-dev-shm-usage", "--hide-scrollbars", *options]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, f"--user-data-dir={folder}", "--dump-dom", address],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    return done.stdout


def _framed(page: Path, width: int, height: int, more: str = "") -> Path:
    text = _FRAME.format(width=width, height=height, page=html.escape(page.read_text()))
    framed = page.with_suffix(f".{width}.html")
    framed.write_text(text + more)
    return framed


def look_at(page: Path, width: int, height: int = 800) -> Any:
    """Lay a page out, and measure it.

    Returns
    -------
    dict
        ``overflow`` (pixels that the page is wider than its window), ``cut`` (tables of which a
        part is seen only after scrolling), ``smallest`` (font, in pixels), ``text`` (what is seen),
        ``light`` and ``dark`` (background and text).
    """
    return _result(dump(_framed(page, width, height, _MEASURE).as_uri()))


def _result(dom: str) -> Any:
    return json.loads(html.unescape(dom.partition("<pre>")[2].partition("</pre>")[0]))


def measure_pages(folder: Path, width: int) -> dict[str, tuple[int, int]]:
    """Return of all pages in a folder the pixels that each is too wide, and its tables cut."""
    frames = "".join(
        f'<iframe width={width} height=800 name="{name}" src="{name}"></iframe>'
        for name in sorted(str(path.relative_to(folder)) for path in folder.rglob("*.html"))
    )
    page = folder / f"all.{width}.html"
    page.write_text(_FRAMES.replace("{frames}", frames))
    try:
        found = _result(dump(page.as_uri(), "--allow-file-access-from-files"))
    finally:
        page.unlink()
    return {name: tuple(figures) for name, figures in found.items()}
