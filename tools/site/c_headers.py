"""The directive `c-header`: the declarations and comments of a public header, by section."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.util.nodes import nested_parse_with_titles

INCLUDE = Path(__file__).parents[2] / "native" / "include"
SECTION = re.compile(r"^/\* ---- (.*?) ---- \*/$", re.MULTILINE)
# A comment that stands before a declaration, or none, and the declaration.
DECLARATION = re.compile(
    r"^(?:/\*(?P<comment>(?:[^*]|\*(?!/))*)\*/\n)?"
    r"(?P<code>(?:typedef (?:enum|struct) \w+ \{.*?^\} \w+;"
    r"|UM_API [^;{]*;"
    r"|#define UM_(?!API|CHECKED|ATOMIC)\w+ .*?$))",
    re.MULTILINE | re.DOTALL,
)


def text_of(comment: str) -> list[str]:
    """Return a comment's lines without leading stars; other stars are not emphasis.

    reStructuredText wants a blank line before a list, and comments have none there.
    """
    lines = [re.sub(r"^ ?\* ?", "", line).rstrip() for line in comment.strip().splitlines()]
    for i in range(len(lines) - 1, 0, -1):
        if lines[i].startswith("- ") and lines[i - 1] and not lines[i - 1].startswith(("- ", "  ")):
            lines.insert(i, "")
    return [re.sub(r"(\*|_(?!\w))", r"\\\1", line) for line in lines]


def object_of(code: str) -> str:
    """Return Sphinx's directive for a declaration, with what it declares."""
    flat = " ".join(code.replace("UM_API ", "").replace("UM_CHECKED ", "").split())
    if code.startswith("#define"):
        return f".. c:macro:: {code.split()[1]}"
    if named := re.match(r"typedef (enum|struct) (\w+) \{", code):
        return f".. c:{named[1]}:: {named[2]}"
    return f".. c:function:: {flat.rstrip(';')}"


def lines_of(header: str) -> list[str]:
    """Return a header as reStructuredText."""
    text = (INCLUDE / header).read_text()
    titles = SECTION.split(text)
    lines: list[str] = []
    for title, body in zip(["beginning", *titles[1::2]], titles[::2], strict=True):
        found = list(DECLARATION.finditer(body))
        if not found:
            continue
        lines += [title.capitalize(), "-" * len(title), ""]
        for match in found:
            lines += [object_of(match["code"]), ""]
            for line in text_of(match["comment"] or ""):
                lines.append(f"   {line}" if line else "")
            lines.append("")
            if match["code"].startswith("typedef") or match["code"].startswith("#define"):
                lines += ["   .. code-block:: c", ""]
                lines += [f"      {line}" if line else "" for line in match["code"].splitlines()]
                lines.append("")
    return lines


class CHeader(Directive):  # type: ignore[misc]
    """`.. c-header:: unimem.h`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Parse what the header declares."""
        header = self.arguments[0]
        env = self.state.document.settings.env
        env.note_dependency(str(INCLUDE / header))
        content = StringList(lines_of(header), source=header)
        section = nodes.section()
        section.document = self.state.document
        nested_parse_with_titles(self.state, content, section)
        return list(section.children)


def setup(app: Any) -> dict[str, bool]:
    """Register with Sphinx."""
    app.add_directive("c-header", CHeader)
    return {"parallel_read_safe": True}
