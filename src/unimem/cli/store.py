"""`unimem store`: what a store has, its pins and its damage, and slot files of llama.cpp."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from unimem.base.text import escape, format_bytes, format_count
from unimem.cli import terminal
from unimem.cli.options import AsJson, Salt, model_path, number_parser, value_option
from unimem.cli.store_chunks import ChunkWork, parse_seconds
from unimem.cli.terminal import document_head
from unimem.errors import FormatError
from unimem.kv.store.store import KVStore
from unimem.llama_cpp.identity import model_hash
from unimem.llama_cpp.prefixes import LlamaPrefixes
from unimem.llama_cpp.slot_file import read_slot_file, write_slot_file
from unimem.llama_cpp.stored import StoredPrefix, stored_prefixes
from unimem.remote.client import is_url, shown
from unimem.weights.opened import open_weights

_SCHEMA = "unimem.store/1"
_LEAST_KEY = 4
_ON_DISK = ("show", "drop", "verify", "pin", "unpin")
_SHOWN_TOKENS, _SHOWN_CHARACTERS = 64, 60

parse_bytes = number_parser(0, 1 << 60, "8G, 500M or 0")


def local_model(text: str) -> Path:
    """Return the path of a model; typer.BadParameter refuses a URL, and an empty text."""
    if is_url(text):
        raise typer.BadParameter(
            f"expected a file of this machine, got {shown(text)!r:.60}: unimem stage brings it here"
        )
    return model_path(text)


Store = Annotated[
    str, value_option("DIR|URL", "The store: a folder, or a URL as s3://bucket/prefix.")
]
Model = Annotated[
    Path | None,
    value_option(
        "GGUF",
        "The model. Its whole file is hashed, and the hash remembered.",
        parser=local_model,
    ),
]
Options = Annotated[
    str,
    value_option(
        "TEXT", "A name for another way to start llama.cpp: a LoRA, RoPE options. [default: none]"
    ),
]
DiskBytes = Annotated[
    int | None,
    value_option(
        "SIZE",
        "The most that chunks take in the folder, as 20G. [default: a tenth of the disk]",
        parser=parse_bytes,
    ),
]
StoreChunk = Annotated[
    int,
    typer.Option(
        metavar="N", parser=number_parser(1, 1 << 20, "256 or 1k"), help="Tokens of a chunk."
    ),
]


def store(
    action: Annotated[
        Literal["show", "drop", "verify", "pin", "unpin", "list", "import", "export"],
        typer.Argument(
            metavar="ACTION",
            help="show: what is on the disk, by model. drop: remove conversations. verify: read "
            "and check every chunk. pin: keep conversations whatever room is needed. list: show "
            "llama.cpp's prefixes. import: put slot files into the store. export: write a prefix "
            "as a slot file.",
        ),
    ],
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY|FILE|all",
            help="drop, pin, unpin: the beginnings of keys, as show or list shows them, or all. "
            "import: slot files. export: the beginning of a key, and the file to write.",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        str | None,
        value_option("DIR|URL", "The store: a folder, or a URL as s3://bucket/prefix.", "--store"),
    ] = None,
    model: Model = None,
    options: Options = "",
    streams: Annotated[
        int,
        value_option(
            "N",
            "With export: slots of the server, unless they share one cache (--kv-unified). "
            "[default: 1]",
            parser=number_parser(1, 1024, "1 or 4"),
        ),
    ] = 1,
    disk_bytes: DiskBytes = None,
    chunk_tokens: StoreChunk = 256,
    salt: Salt = None,
    pinned_for: Annotated[
        float | None,
        value_option(
            "TIME",
            "With pin: how long, as 30d, 12h or 90m. [default: for ever]",
            "--for",
            parser=parse_seconds,
        ),
    ] = None,
    unused: Annotated[
        float | None,
        value_option("TIME", "With drop: what was not used for this long.", parser=parse_seconds),
    ] = None,
    drops: Annotated[
        bool, typer.Option("--drop", help="With verify, remove damaged chunks.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show, check, drop, pin and exchange stored prefixes.

    `unimem cache` has repacked models.
    """
    words = what or []
    if folder is None:
        raise typer.BadParameter("expected --store with a folder or a URL")
    if action in ("import", "export") and model is None:
        raise typer.BadParameter(f"{action}: expected --model with the GGUF file of the states")
    is_fit, needs = {
        "import": (len(words) > 0, "slot files"),
        "export": (len(words) == 2, "KEY and FILE"),
        "drop": (bool(words) != (unused is not None), "KEY, all or --unused"),
        "pin": (len(words) > 0, "KEY or all"),
        "unpin": (len(words) > 0, "KEY or all"),
    }.get(action, (not words, "nothing"))
    if not is_fit:
        raise typer.BadParameter(f"{action}: expected {needs} behind it, got {' '.join(words)!r}")
    for option, is_given, *of in (
        ("--for", pinned_for is not None, "pin"),
        ("--unused", unused is not None, "drop"),
        ("--drop", drops, "verify"),
        ("--salt-file", salt is not None, "import", "export"),
        ("--options", bool(options), "import"),
        ("--streams", streams != 1, "export"),
        ("--json", as_json, "list", *_ON_DISK),
    ):
        if is_given and action not in of:
            raise typer.BadParameter(f"{option} is for {' and '.join(of)}")
    if disk_bytes == 0 and not is_url(folder):
        raise typer.BadParameter(
            f"--disk-bytes: expected more than 0 for a folder, got 0: {folder}"
        )
    if not is_url(folder) and action in _ON_DISK and not Path(folder).is_dir():
        raise NotADirectoryError(f"{folder}: expected the folder of a store")
    digest = None if model is None else model_hash(model)
    with KVStore(
        folder,
        ram_bytes=0,
        disk_bytes=disk_bytes,
        chunk_tokens=chunk_tokens,
        salt=salt or "",
    ) as opened:
        if action in _ON_DISK:
            seconds = unused if pinned_for is None else pinned_for
            ChunkWork(opened, digest, as_json=as_json).run(action, words, seconds, drops=drops)
        elif action == "list":
            _list(opened, model, stored_prefixes(opened, model=digest), as_json)
        elif action == "import":
            assert digest is not None
            for word in words:
                _import(opened, word, digest, options)
        else:
            assert digest is not None
            _export(opened, words, digest, streams)


def _import(store: KVStore, path: str, model: str, options: str) -> None:
    found = read_slot_file(path)
    prefixes = LlamaPrefixes(store, model, found.kv, options=options)
    n = prefixes.put(found.tokens, found.kv, found.checkpoints)
    terminal.show(f"{escape(path)}: {n} of {format_count(len(found.tokens), 'token')} stored\n")


def _export(store: KVStore, words: list[str], model: str, streams: int) -> None:
    key, path = words
    found = [prefix for prefix in stored_prefixes(store, model=model) if prefix.key.startswith(key)]
    if len(key) < _LEAST_KEY or len(found) != 1:
        raise ValueError(
            f"{key:.40}: expected the beginning of one key of this model, at least {_LEAST_KEY} "
            f"digits, got one of {len(found)}: unimem store list"
        )
    (prefix,) = found
    if prefix.chunk_tokens != store.chunk_tokens:
        raise ValueError(
            f"{key}: expected --chunk-tokens {prefix.chunk_tokens}, as it was stored with, got "
            f"{store.chunk_tokens}"
        )
    prefixes = LlamaPrefixes(store, model, prefix.layout, options=prefix.options)
    kv = prefixes.restore(prefix.tokens)
    if kv is None or kv.n_tokens < len(prefix.tokens):
        raise FormatError(
            "a chunk of this prefix is damaged, was removed meanwhile, or has another salt "
            "(--salt-file)",
            None,
            key,
        )
    write_slot_file(path, prefix.tokens, kv._replace(n_streams=streams))
    terminal.show(f"{escape(path)}: {format_count(kv.n_tokens, 'token')}\n")


def _list(store: KVStore, model: Path | None, found: list[StoredPrefix], as_json: bool) -> None:
    texts = _texts(model, found)
    tiers = [tier._asdict() for tier in store.stat().tiers]
    if as_json:
        prefixes = [
            {
                "key": prefix.key,
                "model": prefix.model,
                "options": prefix.options,
                "n_tokens": len(prefix.tokens),
                "nbytes": prefix.nbytes,
                "used": prefix.used,
                "text": text,
            }
            for prefix, text in zip(found, texts, strict=True)
        ]
        where = {"store": store.url or store.folder, "tiers": tiers, "prefixes": prefixes}
        terminal.show(json.dumps(document_head(_SCHEMA) | where) + "\n")
        return
    for prefix, text in zip(found, texts, strict=True):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(prefix.used))
        size = f"{format_count(len(prefix.tokens), 'token')}, {format_bytes(prefix.nbytes)}"
        more = f", {prefix.options}" if prefix.options else ""
        line = f"{prefix.key[:16]}  {size}, used {used}, model {prefix.model[:8]}{more}"
        terminal.show(f"{escape(line)}\n" + (f"    {escape(text)}\n" if text else ""))
    for tier in tiers:
        chunks = format_count(tier["n_chunks"], "chunk")
        line = f"{tier['name']}: {chunks} of all engines, {format_bytes(tier['nbytes'])}"
        terminal.show(f"{line}: {escape(tier['path'])}\n")


def _texts(model: Path | None, found: list[StoredPrefix]) -> list[str | None]:
    """Return how each prefix begins, as far as the model's tokenizer is known."""
    if model is None or not found:
        return [None] * len(found)
    # Only the texts need its packages.
    try:
        from unimem.engine.text.tokenizer import Tokenizer, UnsupportedTokenizer
    except ImportError:
        return [None] * len(found)
    with open_weights(model, load="map") as weights:
        try:
            tokenizer = Tokenizer.from_metadata(weights.metadata)
        except (UnsupportedTokenizer, ValueError):
            return [None] * len(found)

    def text(ids: Any) -> str:
        begin = tokenizer.decode(np.asarray(ids[:_SHOWN_TOKENS]).tolist(), special=True)
        return " ".join(begin.split())[:_SHOWN_CHARACTERS]

    return [text(prefix.tokens) for prefix in found]
