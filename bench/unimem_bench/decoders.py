"""Decoders to measure, unimem's and llama.cpp's, each in a process of its own.

Each library loads a copy of ggml for the whole process, so they cannot share one, and the layout of
memory differs between processes. A process that waits sleeps.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from unimem.system.placement import Pages
from unimem.weights.loading import EngineLoad
from unimem_bench import llama_build
from unimem_bench.llama_build import NoPeer
from unimem_bench.llama_cpp import Flags

__all__ = ["DecoderProcess", "Kind", "NoPeer", "SideError"]

Kind = Literal["unimem", "llama.cpp"]

# To read a request costs CPU time; threads that wait for work by spinning use a whole CPU.
_IDLE_SHARE, _REQUEST_CPU_S = 0.02, 0.005
_END_S = 10.0  # that a process has to end when asked
_TAIL_LINES = 3  # of the errors of a process that died


class SideError(RuntimeError):
    """The process of a decoder has died, or cannot do what was asked."""


class DecoderProcess:
    """A decoder in a process of its own, with one conversation.

    It computes on the CPUs that this process may use at that moment, with threads bound to cores,
    and ends with `close` or with this process. ``threads=None`` leaves the number to unimem's
    decoder. llama.cpp is the `library`, by default `llama_build.library`, and works as `flags` say.
    `python` is the interpreter, by default this one. `images` is a folder for repacked images, none
    by default. `watch` is called with the process's number before the model is opened. `pages`,
    `numa`, `load` and `window` are options of ``unimem run``, and so is `kv_dtype`, which llama.cpp
    has as well. SideError if the decoder cannot start, NoPeer if llama.cpp is not built.

    `facts` has ``start_s`` (seconds from the path to a decoder that is ready), ``ggml`` and
    ``features`` (its version, and what it was compiled for), ``peak_rss_bytes`` and
    ``anonymous_bytes`` of the process once ready. For unimem it also has ``load``, ``image`` (the
    repacked image that weights came from, or None), ``granted`` (the fields of `unimem.Placement`
    for "weights", "repacked", "kv" and "scratch") and ``warnings``; for llama.cpp, ``llama_cpp``
    (its version) and ``flags``.

    >>> from unimem.engine import embedded_model
    >>> with DecoderProcess(embedded_model(), threads=1, ctx=64) as decoder:
    ...     speeds = decoder.prefill([1, 5, 9]), decoder.decode(4)
    ...     decoder.facts["granted"]["kv"]["resident_bytes"] > 0
    True
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        threads: int | None,
        ctx: int,
        kind: Kind = "unimem",
        python: str | None = None,
        images: str | os.PathLike[str] | None = None,
        watch: Callable[[int], object] | None = None,
        pages: Pages = "auto",
        numa: str | None = None,
        load: EngineLoad = "auto",
        kv_dtype: str = "f16",
        window: int | None = None,
        library: Path | None = None,
        flags: Flags = Flags(),  # noqa: B008 - it is frozen
    ) -> None:
        self.kind, self.flags = kind, flags
        self._ctx = ctx
        self._prompt: list[int] = []
        self._length = 0
        self._n_requests, self._idle_s, self._idle_cpu_s = 0, 0.0, 0.0
        options: dict[str, Any] = {"model": os.fspath(model), "ctx": ctx, "threads": threads}
        options["kv_dtype"] = kv_dtype
        if kind == "unimem":
            options |= {"pages": pages, "numa": numa, "load": load, "window": window}
        else:
            options |= {"library": str(library or llama_build.library()), "flags": asdict(flags)}
        name = "unimem_side" if kind == "unimem" else "llama_cpp_side"
        # -P: nothing is imported from the current folder.
        command = [python or sys.executable, "-P", "-m", f"unimem_bench.{name}"]
        # Unbound threads may share one core.
        bound = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
        if threads is not None:
            bound["OMP_NUM_THREADS"] = str(threads)
        if kind != "unimem":
            bound |= flags.environment()
        # The user's own images are neither used nor changed.
        kept = {"UNIMEM_CACHE": os.fspath(images or "off"), "UNIMEM_CACHE_BYTES": "1t"}
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        try:
            self._process = subprocess.Popen(
                [*command, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=os.environ | bound | kept,
                text=True,
            )
        except OSError as error:
            self._errors.close()
            raise SideError(f"the {kind} side cannot be started: {error}") from error
        self.pid = self._process.pid
        if watch is not None:
            watch(self.pid)
        try:
            self.facts = self._answer()
        except BaseException:
            self.close()
            raise

    def prefill(self, tokens: list[int]) -> float:
        """Start a new conversation with a prompt; return tokens a second."""
        self._prompt = list(tokens)
        self._length = len(tokens)
        return len(tokens) / float(self._ask("prefill", tokens=self._prompt)["seconds"])

    def decode(self, n: int) -> float:
        """Make the next `n` tokens, always the likeliest; return tokens a second.

        If the context has no room, the conversation first restarts with its prompt, unmeasured.
        """
        return n / float(self._decode(n)["seconds"])

    def python_share(self, n: int) -> float:
        """Decode as `decode` does; return the share of time outside ggml's compute call."""
        answer = self._decode(n)
        return 1 - float(answer["compute_s"]) / float(answer["seconds"])

    def greedy(self, tokens: list[int], n: int) -> tuple[NDArray[np.float32], list[int]]:
        """Start with a prompt, and make `n` tokens; return the logits of the prompt, and these."""
        self._prompt = list(tokens)
        self._length = len(tokens) + n
        answer = self._ask("greedy", tokens=self._prompt, n=n)
        return np.frombuffer(base64.b64decode(answer["logits"]), np.float32), answer["tokens"]

    def fill(self, n: int, rows: Path) -> NDArray[np.float32]:
        """Start a new conversation with `n` invented tokens in the cache, and one behind them.

        unimem's side writes their keys and values to `rows`, and llama.cpp's reads them there.
        Returns the logits after the last token.
        """
        self._prompt, self._length = [], n + 1
        answer = self._ask("fill", n=n, rows=str(rows))
        return np.frombuffer(base64.b64decode(answer["logits"]), np.float32)

    def require_idle(self) -> None:
        """Check that the process slept while it waited.

        SideError if it took CPU time from other processes, whose figures are then useless.
        """
        if self._idle_cpu_s > _IDLE_SHARE * self._idle_s + _REQUEST_CPU_S * self._n_requests:
            share = self._idle_cpu_s / self._idle_s
            raise SideError(f"the {self.kind} side used {share:.0%} of a CPU while it waited")

    def _decode(self, n: int) -> dict[str, Any]:
        if self._length + n > self._ctx:
            if not self._prompt:
                raise SideError(f"the {self.kind} side has no room behind {self._length} tokens")
            self.prefill(self._prompt)
        self._length += n
        return self._ask("decode", n=n)

    def _ask(self, do: str, **details: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the epitaph explains it
            self._process.stdin.write(json.dumps({"do": do, **details}) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SideError(self._epitaph(self._process.wait()))
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SideError(f"the {self.kind} side: {answer['error']}")
        self._n_requests += 1
        self._idle_s += answer.pop("wait_s")
        self._idle_cpu_s += answer.pop("wait_cpu_s")
        return answer

    def _epitaph(self, status: int) -> str:
        text = f"the {self.kind} side died with status {status}"
        if status < 0:
            text = f"the {self.kind} side was ended by {signal.Signals(-status).name}"
        if status == -signal.SIGILL:
            text += (
                ", an illegal instruction: its ggml is built for another CPU, or this one has AMX, "
                "for which some versions of GCC compile it wrongly, and need CXXFLAGS='-fno-dse "
                "-fno-tree-dse'"
            )
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        tail = " / ".join([line for line in map(str.strip, lines) if line][-_TAIL_LINES:])
        return f"{text}: {tail}" if tail else text

    def close(self) -> None:
        """End the process and wait for it."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
