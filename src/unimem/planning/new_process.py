"""The memory of a process of unimem beside its model, measured in a child, once a machine.

It is remembered for this user, this Python and this version, in ``processes`` in the cache folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from unimem._core import status
from unimem.base import kernel_files
from unimem.base.atomic_file import write_text
from unimem.base.cache_folder import cache_folder, check_own_folder
from unimem.base.kernel_files import parse_kib

# The pages of libraries that it uses again and again. The kernel drops the others if memory is
# short, and a limit on memory that leaves less room has it read them all the time.
_LIBRARY_BYTES = 4 << 20
_PAGES_A_TABLE = 512
_SECONDS = 300

# A run of `unimem run`, and a tokenizer of a vocabulary of its own. The last line is the answer.
_CODE = """
import json, sys
from pathlib import Path

def figure(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(x.split()[1]) << 10 for x in lines if x.startswith(name + ":")), 0)

def most():
    return figure("VmHWM") - figure("RssFile") - figure("RssShmem")

from unimem.cli import main
sys.argv = "unimem run --json --tokens 2 --ctx 64 --threads 1 --prompt Once".split()
Path("/proc/self/clear_refs").write_text("5")
if main():
    raise SystemExit(1)
base = most() + figure("VmPTE") + (figure("Threads") << 4)

import unimem as um
from unimem.engine import embedded_model
from unimem.engine.text.tokenizer import Tokenizer

base -= um.plan(embedded_model(), ctx=64, threads=1).required_bytes
n, letters = 20000, [chr(code) for code in range(0x100, 0x200)]
pairs = [(a, b) for a in letters for b in letters][:n]
tokens = [*letters, *(a + b for a, b in pairs)]
Path("/proc/self/clear_refs").write_text("5")
before, anonymous = most(), figure("RssAnon")
made = Tokenizer({
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
    "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs],
})
kept, making = figure("RssAnon") - anonymous, most() - before
found = {
    "base_bytes": base, "token_bytes": -(-kept // n), "making_bytes": max(1, (making - kept) // n),
}
sys.stdout.write("\\n" + json.dumps(found))
"""


class NewProcess(NamedTuple):
    """What a process takes beside its model.

    Attributes
    ----------
    base_bytes : int
        The interpreter, the libraries, and the kernel's tables for them.
    token_bytes : int
        Each token of a vocabulary with its merge.
    making_bytes : int
        What each token takes beside that while the tokenizer is made, before anything but the
        weights is used.
    """

    base_bytes: int
    token_bytes: int
    making_bytes: int

    def nbytes(self, n_tokens: int, mapped_bytes: int) -> int:
        """Return its bytes with a vocabulary, and with the tables for the pages of the model."""
        tables = mapped_bytes // _PAGES_A_TABLE
        return self.base_bytes + _LIBRARY_BYTES + n_tokens * self.token_bytes + tables


@cache
def measure_process() -> NewProcess | str:
    """Return what a new process takes, as remembered or measured in a child; or why not."""
    path = _file()
    if path is not None:
        with suppress(OSError, UnicodeDecodeError):
            check_own_folder(str(path.parent))
            if (found := _read(path.read_text("utf-8"))) is not None:
                return found
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _CODE],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        return f"the interpreter and its libraries: a process of them fails: {''.join(last)}"
    found = _read(done.stdout)
    if found is None:
        return "the interpreter and its libraries: the kernel does not say what they take"
    if path is not None:
        with suppress(OSError):
            check_own_folder(str(path.parent), create=True)
            write_text(path, json.dumps(found._asdict()))
    return found


def own_bytes() -> int:
    """Return the bytes of this process that go when it ends."""
    return parse_kib(kernel_files.read_fields("/proc/self/status").get("RssAnon"))


def _read(text: str) -> NewProcess | None:
    """Read figures as they are remembered, in the last line; None for others."""
    try:
        found = NewProcess(**json.loads(text.splitlines()[-1]))
    except (ValueError, TypeError, IndexError):
        return None
    is_good = all(isinstance(each, int) and 0 < each < 1 << 40 for each in found)
    return found if is_good else None


def _file() -> Path | None:
    folder = cache_folder()
    # A home may be that of several machines, and of several environments.
    what = os.uname().nodename, os.uname().release, sys.executable, sys.version
    key = hashlib.sha256(repr((*what, status.VERSION)).encode()).hexdigest()[:16]
    return None if folder is None else Path(folder, "processes", f"{key}.json")
