"""`unimem metrics`: the memory of processes for Prometheus."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Annotated

import typer

from unimem.accounting.prometheus import MetricsCollector, serve, write_metrics
from unimem.accounting.report import report
from unimem.base.atomic_file import write_text
from unimem.base.install_hint import install_hint
from unimem.cli import terminal
from unimem.cli.options import value_option
from unimem.cli.processes import find
from unimem.cli.report import process_number
from unimem.staging.staging_folder import staged_values

_PORT = 9464  # that of OpenTelemetry's exporters
# The interval of searches for processes with a model, which look at all processes.
_FIND_SECONDS = 15.0


def metrics(
    pids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PID",
            help="Processes; without one, all that have a model, also those that come later.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None,
        value_option(
            "N", f"The port to serve at; 0 takes a free one. [default: {_PORT}]", min=0, max=65535
        ),
    ] = None,
    address: Annotated[
        str | None,
        value_option(
            "ADDRESS",
            "The address to serve at; 0.0.0.0 lets other machines read, too. [default: 127.0.0.1]",
        ),
    ] = None,
    textfile: Annotated[
        str | None,
        value_option(
            "FILE", "Write them once instead, for the textfile collector of node_exporter."
        ),
    ] = None,
    llama_names: Annotated[
        bool, typer.Option("--llama-names", help="Add llama.cpp's names of the same memory.")
    ] = False,
) -> None:
    """Serve the memory of processes to Prometheus."""
    if textfile is not None and (port is not None or address is not None):
        raise typer.BadParameter("--textfile is for once: leave out --port and --address")
    if textfile == "":
        raise typer.BadParameter("--textfile: expected the path of a file, got ''")
    numbers = [process_number(pid) for pid in pids or ()]
    if find_spec("prometheus_client") is None:
        raise ImportError(f"metrics need prometheus_client: {install_hint('metrics')}")
    for number in numbers:
        report(number)  # an unreadable process is an error now
    collector = MetricsCollector(
        (lambda: numbers) if numbers else _WithModels().pids,
        llama_names=llama_names,
        more=staged_values,
    )
    if textfile is not None:
        write_text(textfile, write_metrics(collector), 0o644)  # the collector is another user
        return
    server, _ = serve(collector, _PORT if port is None else port, address or "127.0.0.1")
    try:
        host, number = server.server_address[:2]
        shown = f"[{host}]" if ":" in host else host
        terminal.show(f"http://{shown}:{number}/metrics\n")
        while True:  # until a signal comes
            signal.pause()
    finally:
        server.shutdown()
        server.server_close()


class _WithModels:
    """The processes with a model, found anew every 15 seconds. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: list[int] = []
        self._until = 0.0

    def pids(self) -> Iterable[int]:
        """Return their numbers; ended ones are left out at the next search."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._found = [each.pid for each in find().found]
                self._until = time.monotonic() + _FIND_SECONDS
            return list(self._found)
