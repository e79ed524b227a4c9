"""A llama-server of the newest llama.cpp, from the wheel of `xllamacpp`.

A Python that has the wheel runs this file: ``PYTHON tools/llama_server.py MODEL FOLDER JSON``. It
writes the server's address, and ends with its standard input. The folder is ``--slot-save-path``,
and the JSON has further parameters by the names of xllamacpp's `CommonParams`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Running(NamedTuple):
    """A server that runs."""

    url: str
    process: subprocess.Popen[bytes]


@contextmanager
def running(python: str, model: Path, folder: Path, **params: Any) -> Iterator[Running]:
    """Run a server in a process of another Python, and end it by a signal that it cannot catch."""
    command = [python, __file__, str(model), str(folder), json.dumps(params)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().decode().strip()
            if not url:
                raise RuntimeError(f"llama-server did not start: {' '.join(command)}")
            yield Running(url, process)
        finally:
            process.kill()


def _serve(model: str, folder: str, given: dict[str, Any]) -> None:
    import xllamacpp  # type: ignore[import-not-found]

    params = xllamacpp.CommonParams()
    params.model.path, params.slot_save_path = model, folder.rstrip("/") + "/"
    params.hostnames, params.port, params.n_gpu_layers = ["127.0.0.1"], 0, 0
    threads = given.pop("threads", 2)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    enums = dict.fromkeys(("cache_type_k", "cache_type_v"), xllamacpp.ggml_type)
    enums["flash_attn_type"] = xllamacpp.llama_flash_attn_type
    for name, value in given.items():
        setattr(params, name, getattr(enums[name], value) if name in enums else value)
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
