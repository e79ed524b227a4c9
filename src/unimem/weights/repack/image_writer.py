"""Writing a repacked image in a thread, while its model is in use."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress

from unimem.base.threads import wait_until

_NICE = 10  # computing goes first, and the image is still written soon
_running: set[Keeping] = set()


class _CancelledError(Exception):
    """The image is no longer wanted."""


class Keeping:
    """An image that a thread of low priority writes. Ending it is for one thread at a time.

    At its end a process waits for the image, and an interrupt gives it up. A killed process leaves
    a temporary file, which the next writer removes. A forked child does not write it.

    `write` gets a callable, calls it every few MiB, and passes on its exceptions. `closes` is
    closed in the thread when `write` has ended. `failed` is called with the error of `write`, in
    the thread that ends this.
    """

    def __init__(
        self,
        write: Callable[[Callable[[], None]], object],
        closes: ExitStack,
        failed: Callable[[Exception], object],
    ) -> None:
        self._write, self._closes, self._failed = write, closes, failed
        self._pid = os.getpid()
        self._is_cancelled = False
        self._error: Exception | None = None
        self._begun = threading.Lock()  # held by the thread that closes `closes`
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to write. If no thread can be started, `failed` gets that error."""
        # A daemon thread, since the wait of `_end_all` can be interrupted, and Python's cannot.
        thread = threading.Thread(target=self._run, name="unimem image", daemon=True)
        _running.add(self)
        try:
            thread.start()
        except RuntimeError as error:
            self.end(cancel=True)
            self._failed(error)

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            with self._closes:
                self._write(self._check)
        except _CancelledError:
            pass
        except Exception as error:
            self._error = error.with_traceback(None)  # a traceback would keep the memory
        finally:
            self._finish()

    def _finish(self) -> None:
        del self._write  # it keeps the memory
        _running.discard(self)
        self._ended.set()

    def _check(self) -> None:
        if self._is_cancelled:
            raise _CancelledError

    def end(self, *, cancel: bool = False) -> None:
        """Wait until the image is kept or given up: by `cancel`, or by an interrupt."""
        if os.getpid() != self._pid:
            return
        self._is_cancelled = self._is_cancelled or cancel
        try:
            if cancel and self._begun.acquire(blocking=False):
                self._closes.close()
                self._finish()
            self._ended.wait()
        except BaseException:
            self._is_cancelled = True
            wait_until(self._ended.is_set)
            raise
        error, self._error = self._error, None
        if error is not None:
            self._failed(error)


def _end_all() -> None:
    for keeping in list(_running):
        keeping.end()


atexit.register(_end_all)
