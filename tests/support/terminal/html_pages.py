"""What a page of HTML says: its tables, its exact sizes, and whether each tag is closed."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "br", "img", "input", "link"}
Cell = int | str  # the bytes of a size, else the text


@dataclass
class Table:
    """Its head, its rows, and those of its foot."""

    head: list[Cell] = field(default_factory=list)
    rows: list[list[Cell]] = field(default_factory=list)
    foot: list[list[Cell]] = field(default_factory=list)

    def column(self, name: str) -> dict[Cell, Cell]:
        """A column by the first cell of each row, sums included."""
        i = self.head.index(name)
        return {row[0]: row[i] for row in (*self.rows, *self.foot)}


class HtmlPage(HTMLParser):
    """A page that was read."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[Table] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self._row: list[Cell] = []
        self._cell: list[Cell] | None = None
        self.feed(text)
        self.close()
        assert self._open == [], "these are not closed"

    @property
    def text(self) -> str:
        """All that is read, without styles."""
        return " ".join(" ".join(self.texts).split())

    def table(self, *head: str) -> Table:
        """The table whose head has these names."""
        (found,) = (each for each in self.tables if set(head) <= set(each.head))
        return found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag in VOID:
            return
        self._open.append(tag)
        named: dict[str, Any] = dict(attrs)
        if tag == "table":
            self.tables.append(Table())
        elif tag == "tr":
            self._row = []
        elif tag in ("td", "th"):
            self._cell = []
        elif tag == "data" and self._cell is not None:
            self._cell.append(int(named["value"]))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag in ("td", "th") and self._cell is not None:
            first = self._cell[0] if self._cell else ""
            texts = "".join(each for each in self._cell if isinstance(each, str))
            self._row.append(first if isinstance(first, int) else texts)
            self._cell = None
        elif tag == "tr":
            table = self.tables[-1]
            if "thead" in self._open:
                table.head = self._row
            else:
                (table.foot if "tfoot" in self._open else table.rows).append(self._row)

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["style"]:
            return
        self.texts.append(data)
        if self._cell is not None:
            self._cell.append(data)
