"""`unimem inspect`: the contents of a model file, and their part in RAM."""

from __future__ import annotations

import itertools
import json
import math
import mmap
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer

from unimem.base.text import Bar, escape, format_bytes, format_count, table_lines, wrap
from unimem.cli import terminal
from unimem.cli.options import AsJson, path_or_url, value_option
from unimem.cli.terminal import document_head
from unimem.models.families import KeptLayer, in_words
from unimem.planning.sources import shape_of
from unimem.weights.files import ModelFiles, Value
from unimem.weights.gguf import GGUFHeader
from unimem.weights.opened import open_weights
from unimem.weights.remote_files import open_remote
from unimem.weights.residency import Residency, map_resident
from unimem.weights.tensor_lines import columns, json_items, lines
from unimem.weights.tensors import Contents, headers_of

SCHEMA = "unimem.inspect/1"

_WIDTH = 80
_LABEL = 12
_KEY = 40  # columns of keys of the metadata; longer ones are followed by their values
_PICTURE_LINES = 8  # of all files together, if they are fewer
_CUT = " ..."
_PART = 16  # texts that become JSON at once: one may be long
_NUMBERS = 1024
_COLUMNS = "name type shape size offset".split()
_T = TypeVar("_T")


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF or safetensors file, any part of a split one, or the index of several; or "
            "the URL of one (https://, s3://, hf://), whose headers are fetched.",
            show_default=False,
        ),
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="Add a table of all tensors.")] = False,
    residency: Annotated[
        bool, typer.Option("--residency", help="Add a picture of what is in RAM.")
    ] = False,
    metadata: Annotated[
        list[str] | None,
        value_option("KEY", "Show the whole value of this key, and nothing else; may be repeated."),
    ] = None,
    content_hash: Annotated[
        bool, typer.Option("--content-hash", help="Read everything, and add a hash of it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a model file holds, without reading its data."""
    path = path_or_url(model)
    if isinstance(path, str):
        if residency or content_hash:
            raise typer.BadParameter(
                "--residency and --content-hash need the data, but only headers of a URL are read"
            )
        with open_remote(path) as remote:
            contents = headers_of(remote)
            layers = shape_of(contents, remote, remote.index).layers
            _show(contents, layers, metadata, None, None, tensors=tensors, as_json=as_json)
        return
    with open_weights(path, load="map") as weights:
        chooses = metadata is not None and not as_json
        look = digest = None
        if residency and not chooses:
            map_resident(weights)
            look = weights.residency()
        if content_hash and not chooses:
            with terminal.updates("hashing") as update:
                digest = weights.content_hash(progress=update)
        layers = shape_of(weights, ModelFiles(), None).layers
        _show(weights, layers, metadata, look, digest, tensors=tensors, as_json=as_json)


def _show(
    weights: Contents,
    layers: Sequence[KeptLayer],
    keys: list[str] | None,
    look: Residency | None,
    digest: str | None,
    *,
    tensors: bool,
    as_json: bool,
) -> None:
    """Write the document, the values of keys, or the page."""
    if as_json:
        document = _document(weights, layers, keys, look, digest)
        terminal.show_all(itertools.chain(_pieces(document), "\n"))
        return
    if keys is not None:
        for key, value in _chosen(weights, keys).items():
            terminal.show(f"{terminal.surface().heading(_named(key))}\n")
            terminal.show_all(itertools.chain(_whole(value), "\n"))
        return
    facts = _Facts.of(weights)
    _show_facts(weights, facts, layers, digest)
    _show_types(weights, facts)
    _show_metadata(weights)
    if tensors:
        _show_tensors(weights, look)
    if look is not None:
        _show_residency(look)


# ---- what is known of a model -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Facts:
    """The facts of a model in its file; None if missing."""

    format: str
    name: str | None
    architecture: str | None
    context: int | None
    n_tensors: int
    n_parameters: int
    types: dict[str, tuple[int, int]]  # tensors and bytes of each type, the most bytes first

    @classmethod
    def of(cls, weights: Contents) -> _Facts:
        is_gguf = isinstance(weights._parts[0].file.header, GGUFHeader)
        name, architecture = (
            value if isinstance(value := weights.metadata.get(key), str) else None
            for key in ("general.name", "general.architecture")
        )
        context = weights.metadata.get(f"{architecture}.context_length")
        types = sorted(weights._types.items(), key=lambda item: -item[1][1])
        return cls(
            "GGUF" if is_gguf else "safetensors",
            name,
            architecture,
            context if isinstance(context, int) and not isinstance(context, bool) else None,
            len(weights.tensors),
            sum(n_values for _, (_, _, n_values) in types),
            {kind: (n, nbytes) for kind, (n, nbytes, _) in types},
        )


def _chosen(weights: Contents, keys: Iterable[str]) -> dict[str, Value]:
    """Return the values of these keys."""
    chosen = {}
    for key in keys:
        if key not in weights.metadata:
            raise ValueError(f"{weights.files[0]}: its metadata has no key '{key}'")
        chosen[key] = weights.metadata[key]
    return chosen


# ---- the page -----------------------------------------------------------------------------------


def _show_facts(
    weights: Contents, facts: _Facts, layers: Sequence[KeptLayer], digest: str | None
) -> None:
    sizes = [(part.file.path, format_bytes(part.file.nbytes)) for part in weights._parts]
    rows = {
        "model": facts.name or "unknown",
        "architecture": facts.architecture or "unknown",
        "parameters": f"{facts.n_parameters:,} in {format_count(facts.n_tensors, 'tensor')}",
        "context": "unknown" if facts.context is None else f"{facts.context:,} tokens",
        "layers": in_words(layers, briefly=False) or "unknown",
        "format": facts.format,
        "files": "\n".join(f"{escape(path)} ({size})" for path, size in sizes),
        "fingerprint": weights.fingerprint,
    }
    if digest is not None:
        rows["content"] = digest
    surface = terminal.surface()
    for name, value in rows.items():
        text = escape(value, keeps_lines=True)
        # A path stays in one piece, so that it can be copied.
        is_paths = name == "files"
        lines = text.split("\n") if is_paths else wrap(text, _WIDTH - _LABEL - 1, cuts=False)
        label = surface.dim(name.ljust(_LABEL + 1))
        terminal.show(label + ("\n" + " " * (_LABEL + 1)).join(lines) + "\n")
    terminal.show("\n")


def _show_types(weights: Contents, facts: _Facts) -> None:
    total = weights.nbytes
    rows, bars = [], []
    for kind, (n, nbytes) in facts.types.items():
        share = nbytes / total if total else 0.0
        rows.append((kind, str(n), format_bytes(nbytes), f"{share:.1%}"))
        bars.append(Bar(share))
    rows.append(("total", str(len(weights.tensors)), format_bytes(total), ""))
    head = ("type", "tensors", "size", "share")
    lines = table_lines(terminal.surface(), head, rows, bars=[*bars, None])
    terminal.show("\n".join(lines) + "\n")
    headers = [part.file.header for part in weights._parts]
    unknown = [header.unknown_types for header in headers if isinstance(header, GGUFHeader)]
    terminal.show_all(
        f"{_named(name)}: type {number} is not known here: its size is that of the gap to the next "
        "tensor\n"
        for name, number in (pair for each in unknown for pair in each.items())
    )


def _show_metadata(weights: Contents) -> None:
    if not weights.metadata:
        return
    terminal.show("\n" + terminal.surface().heading("metadata") + "\n")
    terminal.show_all(_metadata_lines(weights))


def _metadata_lines(weights: Contents) -> Iterator[str]:
    width = min(_KEY, max(len(escape(key[:_KEY])) for key in weights.metadata))
    for key, value in weights.metadata.items():
        shown = _named(key)
        room = _WIDTH - 2 - (width if len(shown) <= width else min(len(shown), _WIDTH - 22))
        yield f"{shown.ljust(width)}  {_brief(value, room)}\n"


def _named(key: str) -> str:
    return escape(key) or "''"


def _show_tensors(weights: Contents, look: Residency | None) -> None:
    headers = [part.file.header for part in weights._parts]
    files = [escape(Path(path).name) for path in weights.files]
    widths = [max(each) for each in zip(map(len, _COLUMNS), *map(columns, headers), strict=True)]
    head = "  ".join(f"{name:{'<>'[i > 0]}{widths[i]}}" for i, name in enumerate(_COLUMNS))
    head += "  in RAM" if look is not None else ""
    widest = max(map(len, files))
    head += f"  {'file':>{widest}}" if len(files) > 1 else ""

    def shown() -> Iterator[str]:
        yield f"\n{terminal.surface().heading(head)}\n"
        for header, file in zip(headers, files, strict=True):
            end = f"  {file:>{widest}}\n" if len(files) > 1 else "\n"
            for i, line in enumerate(lines(header, widths)):
                part = None if look is None else look.tensors[header.name_at(i)]
                yield line + ("" if part is None else f"  {_percent(part):>6}") + end

    terminal.show_all(shown())


# ---- values -------------------------------------------------------------------------------------


def _brief(value: Value, width: int) -> str:
    """Write a value in one line."""
    if isinstance(value, str):
        text = escape(value[: width + 1])
    elif isinstance(value, (list, np.ndarray)):
        text = f"[{_length(value)}]"
        for item in value[:width]:
            one = (
                f' "{escape(item[:width])}"' if isinstance(item, str) else f" {_brief(item, width)}"
            )
            if len(text) + len(one) > width - len(_CUT):
                return text + _CUT
            text += one
        return text
    else:  # a float32 has 7 digits
        text = f"{value:.7g}" if isinstance(value, float) else _text(value)
    return text if len(text) <= width else text[: width - len(_CUT)].rstrip() + _CUT


def _whole(value: Value) -> Iterator[str]:
    """Write a value in pieces."""
    if not isinstance(value, (list, np.ndarray)):
        yield escape(_text(value), keeps_lines=True)
        return
    for i, part in enumerate(_parts_of(value)):
        yield "\n" * (i > 0) + "\n".join(escape(_text(item)) for item in part)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, np.ndarray)):
        return "[" + ", ".join(map(_text, _listed(value))) + "]"
    return str(value)


def _parts_of(value: Sequence[Any] | np.ndarray[Any, Any]) -> Iterator[list[Any]]:
    """Cut an array or a list into lists of items of Python."""
    n = _PART if isinstance(value, list) else _NUMBERS
    return (_listed(value[i : i + n]) for i in range(0, len(value), n))


def _listed(value: Sequence[Any] | np.ndarray[Any, Any]) -> list[Any]:
    return value.tolist() if isinstance(value, np.ndarray) else list(value)


def _length(value: Sequence[Any] | np.ndarray[Any, Any]) -> str:
    if isinstance(value, np.ndarray):
        return f"{len(value):,} {value.dtype}"
    return format_count(len(value), "string" if not value or isinstance(value[0], str) else "array")


# ---- the picture --------------------------------------------------------------------------------

# The cells of the picture, by the part of their range in RAM.
_CELLS = {
    "huge": ("█", "#", "in RAM, in huge pages"),
    "full": ("▓", "=", "in RAM"),
    "part": ("▒", "-", "in part"),
    "none": ("·", ".", "not in RAM"),
    "unknown": ("?", "?", "not told by the kernel"),
}


def _cell(part: Residency) -> str:
    if part.huge_bytes == part.nbytes:
        return "huge"
    if part.resident_bytes == part.nbytes:
        return "full"
    if part.resident_bytes:
        return "part"
    return "unknown" if part.unknown_bytes else "none"


def _show_residency(look: Residency) -> None:
    surface = terminal.surface()
    width = surface.width
    n_lines = max(1, _PICTURE_LINES // len(look.by_file))
    sign = 0 if terminal.can_show("█▓▒·") else 1
    styles = {"huge": surface.good, "part": surface.bad, "none": surface.dim}
    used = set()
    widest = 0.0
    terminal.show(f"\n{surface.heading('in RAM')}\n")
    for path, whole in look.by_file.items():
        terminal.show(f"{escape(path)}: {_in_words(whole)}\n")
        n = min(n_lines * width, -(-whole.nbytes // mmap.PAGESIZE))
        kinds = [_cell(part) for part in look.ranges(path, max(n, 1))]
        widest = max(widest, whole.nbytes / max(n, 1))
        used.update(kinds)
        for first in range(0, len(kinds), width):
            line = kinds[first : first + width]
            terminal.show(_in_runs(line, sign, styles) + "\n")
    key = [f"{_CELLS[kind][sign]} {_CELLS[kind][2]}" for kind in _CELLS if kind in used]
    key.append(f"a character is {format_bytes(widest)}")
    terminal.show("; ".join(key) + "\n")
    if len(look.by_file) > 1:
        terminal.show(f"all files: {_in_words(look)}\n")


def _in_runs(kinds: Sequence[str], sign: int, styles: Mapping[str, Any]) -> str:
    """Write cells, with the style of equal neighbours once."""
    return "".join(
        styles.get(kind, str)(_CELLS[kind][sign] * len(list(run)))
        for kind, run in itertools.groupby(kinds)
    )


def _in_words(whole: Residency) -> str:
    text = f"{format_bytes(whole.resident_bytes)} of {format_bytes(whole.nbytes)} in RAM"
    text += f" ({_percent(whole)})"
    if whole.huge_bytes:
        text += f", {format_bytes(whole.huge_bytes)} in huge pages"
    if whole.unknown_bytes:
        text += f", {format_bytes(whole.unknown_bytes)} not told by the kernel"
    nodes = [f"{format_bytes(n)} on node {node}" for node, n in whole.nodes.items() if n]
    return ", ".join([text, *nodes])


def _percent(part: Residency) -> str:
    if part.unknown_bytes and not part.resident_bytes:
        return "?"
    return f"{part.resident_bytes / part.nbytes:.0%}" if part.nbytes else "-"


# ---- the JSON document --------------------------------------------------------------------------


_SMALL = (str, int, float)  # values that become JSON with others
_SIZES = ("nbytes", "resident_bytes", "huge_bytes", "unknown_bytes")


def _document(
    weights: Contents,
    layers: Sequence[KeptLayer],
    keys: Sequence[str] | None,
    look: Residency | None,
    digest: str | None,
) -> dict[str, Any]:
    facts = _Facts.of(weights)
    values = weights.metadata if keys is None else _chosen(weights, keys)
    return document_head(SCHEMA) | {
        "files": [{"path": part.file.path, "nbytes": part.file.nbytes} for part in weights._parts],
        "format": facts.format.lower(),
        "name": facts.name,
        "architecture": facts.architecture,
        "context": facts.context,
        "layers": [layer.to_dict() for layer in layers] or None,
        "parameters": facts.n_parameters,
        "nbytes": weights.nbytes,
        "types": [
            {"type": kind, "count": n, "nbytes": nbytes}
            for kind, (n, nbytes) in facts.types.items()
        ],
        "metadata": values.items(),
        "tensors": itertools.chain.from_iterable(
            json_items(part.file.header, part.file.path) for part in weights._parts
        ),
        "fingerprint": weights.fingerprint,
        "content_hash": digest,
        "residency": None
        if look is None
        else _sizes(look)
        | {
            "files": {path: _sizes(part) for path, part in look.by_file.items()},
            "tensors": {name: _sizes(part) for name, part in look.tensors.items()},
        },
    }


def _sizes(part: Residency) -> dict[str, Any]:
    return {
        **{name: getattr(part, name) for name in _SIZES},
        "nodes": {str(node): nbytes for node, nbytes in part.nodes.items()},
    }


def _pieces(value: Any) -> Iterator[str]:
    """Write JSON in pieces: a text of all may be 20 times as long as the header of the file."""
    if isinstance(value, (Mapping, ItemsView)):
        yield from _joined(
            "{", _members(value.items() if isinstance(value, Mapping) else value), "}"
        )
    elif isinstance(value, Iterator):  # of JSON
        yield from _joined("[", ((text,) for text in value), "]")
    elif not isinstance(value, (list, np.ndarray)):
        yield json.dumps(_plain(value), allow_nan=False)
    elif len(value) and isinstance(value[0], (dict, list, np.ndarray)):
        yield from _joined("[", map(_pieces, value), "]")
    else:
        yield from _joined("[", ((_items(part),) for part in _parts_of(value)), "]")


def _items(values: list[Any]) -> str:
    try:
        return json.dumps(values, allow_nan=False)[1:-1]
    except ValueError:
        return json.dumps(list(map(_plain, values)), allow_nan=False)[1:-1]


def _members(pairs: Iterable[tuple[str, Any]]) -> Iterator[Iterable[str]]:
    for is_small, run in itertools.groupby(pairs, lambda pair: isinstance(pair[1], _SMALL)):
        if is_small:
            for part in _parts(run):
                small = {key: _plain(value) for key, value in part}
                yield (json.dumps(small, allow_nan=False)[1:-1],)
        else:
            for key, value in run:
                yield itertools.chain((f"{json.dumps(key)}: ",), _pieces(value))


def _parts(items: Iterator[_T]) -> Iterator[list[_T]]:
    return iter(lambda: list(itertools.islice(items, _PART)), [])


def _joined(begin: str, texts: Iterable[Iterable[str]], end: str) -> Iterator[str]:
    yield begin
    for i, text in enumerate(texts):
        if i:
            yield ", "
        yield from text
    yield end


def _plain(value: Any) -> Any:
    """Convert a value for JSON; numbers that JSON lacks become texts."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
