"""Scripts in processes of their own, which begin with the imports made.

An interpreter that imports unimem anew takes longer than most scripts. One that has it is forked
for each script; it has made nothing of unimem's.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import tempfile
import textwrap
from functools import cache
from pathlib import Path

__all__ = ["run_script"]

_HOST = """
import json, os, sys, warnings
import numpy, unimem
try:
    import unimem.engine
except ImportError:
    pass
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
    file = os.open(name, os.O_RDWR | os.O_CREAT)
    os.dup2(file, fd)
    os.close(file)
os.chdir(asked["folder"])
if asked["strict"]:
    warnings.simplefilter("error")
sys.argv = ["-c"]
exec(compile(asked["script"], "<string>", "exec"), {"__name__": "__main__"})
"""


@cache
def _host() -> subprocess.Popen[str]:
    words = [sys.executable, "-c", _HOST]
    host = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    atexit.register(host.communicate, "")
    return host


def run_script(
    script: str, folder: Path | str = ".", *, strict: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, in a folder; `strict` makes errors of warnings."""
    host = _host()
    assert host.stdin is not None
    assert host.stdout is not None
    with tempfile.TemporaryDirectory(prefix="unimem-script-") as said:
        out, err = Path(said, "out"), Path(said, "err")
        asked = {
            "script": textwrap.dedent(script), "folder": str(Path(folder).resolve()),
            "out": str(out), "err": str(err), "strict": strict,
        }  # fmt: skip
        host.stdin.write(f"{json.dumps(asked)}\n")
        host.stdin.flush()
        code = int(host.stdout.readline())
        return subprocess.CompletedProcess(script, code, out.read_text(), err.read_text())
