"""Build the site: the documents, every public name, the headers, and the help: `make docs`.

In the repository, links lead from file to file; here they are rewritten to lead to pages of the
site. A link that leads nowhere ends the build, as any warning does.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = Path(__file__).parent
FOLDER = ROOT / "build" / "site"
SOURCE, HTML = FOLDER / "source", FOLDER / "html"
# The page of each document on the site. Documents in docs/ keep their names, without folders.
PAGES = {
    ROOT / "README.md": "index.md",
    ROOT / "bench" / "README.md": "harness.md",
    ROOT / "CHANGELOG.md": "changes.md",
    ROOT / "CONTRIBUTING.md": "contributing.md",
    ROOT / "SECURITY.md": "security.md",
    **{path: path.name for path in sorted((ROOT / "docs").rglob("*.md"))},
    ROOT / "docs" / "README.md": "documents.md",
}
# Targets of links that a page of the site replaces.
INSTEAD = {
    ROOT / "native" / "include": "reference/c.md",
    OWN / "pages" / "reference" / "python.md": "reference/python.md",
}
LINK = re.compile(r"\[([^\]]*)\]\(<?(?!https?:|mailto:|#)([^<>)\s#]+)>?(#[^)]*)?\)")


def with_links(document: Path) -> str:
    """Return the text of a document with the links that it has on the site.

    Files that are no pages are copied beside the pages; links to folders become text.
    """

    def lead(match: re.Match[str]) -> str:
        text, link, anchor = match.groups(default="")
        target = Path(os.path.normpath(document.parent / link))
        page = PAGES.get(target) or INSTEAD.get(target)
        if page is None and target.is_dir():
            return text
        if page is None:
            if not target.is_file():
                raise SystemExit(f"{document.relative_to(ROOT)}: {link} is no file")
            page = f"files/{target.relative_to(ROOT)}"
            (SOURCE / page).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(target, SOURCE / page)
        return f"[{text}]({page}{anchor})"

    return LINK.sub(lead, document.read_text())


# A directive of autodoc, and what it explains.
ENTRY = re.compile(r"^\.\. auto(\w+):: unimem\.([\w.]+)((?:\n   :.*)*)$", re.MULTILINE)
SECTION = re.compile(r"^## ([^\n]*)\n\n```{eval-rst}\n(.*?)```$", re.MULTILINE | re.DOTALL)


def page_of(kind: str, name: str) -> str:
    """Return the name of the page of a public name; `plan` and `Plan` have different ones."""
    return ("function-" if kind == "function" else "") + name.replace(".", "-")


def divide_reference() -> None:
    """Give each class, function and module of the reference a page of its own.

    The reference itself becomes a list of them, with the first sentence of each.
    """
    path = SOURCE / "reference" / "python.md"
    folder = path.with_suffix("")
    folder.mkdir()

    def contents(match: re.Match[str]) -> str:
        title, entries = match.groups()
        pages, names = [], []
        for kind, name, options in ENTRY.findall(entries):
            page = page_of(kind, name)
            text = f"# {name}\n\n```{{eval-rst}}\n.. auto{kind}:: unimem.{name}{options}\n```\n"
            (folder / f"{page}.md").write_text(text)
            pages.append(f"python/{page}")
            names.append(f"   unimem.{name}")
        lines = ["```{eval-rst}", ".. autosummary::", "   :nosignatures:", "", *names, "```", ""]
        lines += ["```{toctree}", ":hidden:", "", *pages, "```"]
        return "\n".join([f"## {title}", "", *lines])

    path.write_text(SECTION.sub(contents, path.read_text()))


def put_together() -> None:
    """Write the sources of all pages."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(OWN / "pages", SOURCE)
    contents = SOURCE / "contents.md"
    for document, page in PAGES.items():
        text = with_links(document)
        if page == "index.md":
            text += f"\n{contents.read_text()}"
        (SOURCE / page).write_text(text)
    contents.unlink()
    divide_reference()


def sphinx(builder: str, out: Path) -> int:
    """Run Sphinx; return its exit status."""
    options = ["--fail-on-warning", "--keep-going", "-q", "-b", builder, "-c", str(OWN)]
    command = [sys.executable, "-m", "sphinx", *options, str(SOURCE), str(out)]
    return subprocess.run(command, check=False).returncode


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Make the site.")
    parser.add_argument("--links", action="store_true", help="ask every server that is linked to")
    arguments = parser.parse_args()
    put_together()
    shutil.rmtree(HTML, ignore_errors=True)
    status = sphinx("html", HTML)
    if status == 0 and arguments.links:
        status = sphinx("linkcheck", FOLDER / "links")
    if status == 0:
        n_pages = len(list(HTML.rglob("*.html")))
        n_links = sum(len(LINK.findall(path.read_text())) for path in PAGES)
        print(f"{n_pages} pages, {n_links} links between documents: {HTML / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
