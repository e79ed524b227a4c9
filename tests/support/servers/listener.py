"""An HTTP server for tests that leaves no connection when it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR
from typing import Any

_PATIENCE_SECONDS = 5


class Listener(ThreadingHTTPServer):
    """A server that ends its connections, which clients keep open for their next request."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self._connections: set[Any] = set()
        super().__init__(("127.0.0.1", port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Remember a connection."""
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that has ended."""
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing about connections that were cut on purpose."""

    def end(self) -> None:
        """End all connections, and wait until both sides have closed them.

        Later tests compare the descriptors of this process.
        """
        for connection in tuple(self._connections):
            with suppress(OSError):  # it has just ended
                connection.shutdown(SHUT_RDWR)
        self.server_close()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while _is_in_use(self.server_port) and time.monotonic() < deadline:
            time.sleep(0.001)


def _is_in_use(port: int) -> bool:
    """Whether a process here has a socket of a connection of this port."""
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    own = f":{port:04X}"
    return any(
        fields[9] != "0" and (fields[1].endswith(own) or fields[2].endswith(own))
        for fields in map(str.split, lines)
    )


@contextmanager
def listening(
    handler: type[BaseHTTPRequestHandler], end: threading.Event, port: int = 0
) -> Iterator[int]:
    """Serve on a port of this machine, in a thread, until the end, which `end` tells handlers."""
    listener = Listener(port, handler)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield listener.server_port
    finally:
        end.set()
        listener.shutdown()
        thread.join()
        listener.end()
