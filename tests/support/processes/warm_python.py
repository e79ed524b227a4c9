"""Scripts in processes forked from an interpreter that has made the imports.

Importing unimem takes longer than most scripts. The interpreter has no objects of unimem.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
from functools import cache
from pathlib import Path

_HOST = """
import gc, json, os, sys, warnings
import numpy, unimem
try:
    import rich, typer, unimem.cli, unimem.engine
except ImportError:
    pass
gc.freeze()
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        break
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
else:
    sys.exit()
asked = json.loads(line)
for fd, name in enumerate((os.devnull, asked["out"], asked["err"])):
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOCTTY)
    os.dup2(file, fd)
    os.close(file)
os.chdir(asked["folder"])
os.environ.clear()
os.environ.update(asked["environment"])
if asked["strict"]:
    warnings.simplefilter("error")
sys.argv = ["-c", *asked["arguments"]]
exec(compile(asked["script"], "<string>", "exec"), {"__name__": "__main__"})
"""


_turn = threading.Lock()  # the interpreter serves one call at a time


@cache
def _host() -> subprocess.Popen[str]:
    words = [sys.executable, "-c", _HOST]
    host = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    atexit.register(host.communicate, "")
    return host


def start() -> None:
    """Start the interpreter, so that a test does not count it among its remains."""
    _host()


def run_script(
    script: str,
    *arguments: str,
    folder: Path | str = ".",
    strict: bool = False,
    out: str | None = None,
    err: str | None = None,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script, which may be indented, in a process and a folder of its own.

    With `strict`, warnings are errors. `out` and `err` are files for its output, which is returned
    otherwise. The environment is by default that of this process.
    """
    with _turn:
        host = _host()
    assert host.stdin is not None
    assert host.stdout is not None
    with tempfile.TemporaryDirectory(prefix="unimem-script-") as said:
        files = [Path(said, "out"), Path(said, "err")]
        asked = {
            "script": textwrap.dedent(script), "arguments": arguments, "strict": strict,
            "folder": str(Path(folder).resolve()), "out": out or str(files[0]),
            "err": err or str(files[1]), "environment": environment or dict(os.environ),
        }  # fmt: skip
        with _turn:
            host.stdin.write(f"{json.dumps(asked)}\n")
            host.stdin.flush()
            code = int(host.stdout.readline())
        texts = [file.read_text("utf-8") if file.exists() else "" for file in files]
        return subprocess.CompletedProcess(script, code, *texts)
