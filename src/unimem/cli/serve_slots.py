"""`unimem serve-slots`: a llama-server whose prompts begin with stored prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unimem.base.text import escape
from unimem.cli import terminal
from unimem.cli.exits import OK, fail
from unimem.cli.options import Salt, number_parser, salt_of, value_option
from unimem.cli.store import DiskBytes, Options, Store, StoreChunk, local_model, parse_bytes
from unimem.kv.store.store import KVStore
from unimem.llama_cpp.proxy import SlotProxy
from unimem.llama_cpp.server import LlamaServer
from unimem.remote.client import is_url

_PORT = 8081


def serve_slots(
    server: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="The running llama-server, as http://127.0.0.1:8080. It was started with "
            "--slot-save-path.",
        ),
    ],
    store: Store,
    model: Annotated[
        Path,
        value_option(
            "GGUF",
            "The server's model. Its whole file is hashed, the hash remembered.",
            parser=local_model,
        ),
    ],
    slot_save_path: Annotated[
        str, value_option("DIR", "The server's --slot-save-path, on this machine.")
    ],
    options: Options = "",
    ram_bytes: Annotated[
        int | None,
        value_option(
            "SIZE",
            "The most that chunks take in shared memory, as 4G. [default: 0]",
            parser=parse_bytes,
        ),
    ] = None,
    disk_bytes: DiskBytes = None,
    chunk_tokens: StoreChunk = 256,
    salt: Salt = None,
    port: Annotated[
        int,
        value_option(
            "N",
            f"The port to serve at; 0 takes a free one. [default: {_PORT}]",
            parser=number_parser(0, 65535, "8081 or 0"),
        ),
    ] = _PORT,
    address: Annotated[
        str, value_option("ADDRESS", "The address to serve at. [default: 127.0.0.1]")
    ] = "127.0.0.1",
) -> None:
    """Serve llama-server's interface, with stored prefixes.

    Prompts that begin alike are computed once. Everything passes to the server behind it. Before a
    completion, the longest stored prefix is restored into the slot; afterwards, new tokens are
    stored.
    """
    if not slot_save_path:
        raise typer.BadParameter("--slot-save-path: expected a folder, got ''")
    if not ram_bytes and disk_bytes == 0 and not is_url(store):
        raise typer.BadParameter(
            "--ram-bytes, --disk-bytes: expected one that is not 0 for a folder, got 0 and 0"
        )
    with KVStore(
        store,
        ram_bytes=ram_bytes or 0,
        disk_bytes=disk_bytes,
        chunk_tokens=chunk_tokens,
        salt=salt_of(salt, store),
    ) as opened:
        behind = LlamaServer(server, slot_save_path)
        where = (address, port)
        proxy = SlotProxy(opened, model, behind, where, options=options, log=_log)
        host, number = proxy.address
        host = f"[{host}]" if ":" in host else host
        terminal.show(f"serving http://{host}:{number}, before {escape(behind.url)}\n")
        proxy.serve()


def _log(text: str) -> None:
    fail(text, OK)
