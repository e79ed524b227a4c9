"""The state that every run of the tests begins from.

Programs inherit signals, limits and variables: under ``nohup`` they would ignore an interrupt, and
under ``TERM=dumb`` they would print no colours.
"""

from __future__ import annotations

import os
import resource
import signal
import tempfile
from collections.abc import Collection
from pathlib import Path

# Variables that change the behaviour or output of unimem, Python, or a program that a test starts.
_VARIABLES = """
    CLICOLOR CLICOLOR_FORCE COLORTERM COLUMNS FORCE_COLOR LINES NO_COLOR LANGUAGE LC_ALL LC_CTYPE
    LC_MESSAGES LC_NUMERIC LC_TIME MAKEFLAGS MAKELEVEL MFLAGS MALLOC_ARENA_MAX OMP_NUM_THREADS
    PYTHONIOENCODING PYTHONOPTIMIZE PYTEST_ADDOPTS PYTHONWARNINGS TMUX TYPER_USE_RICH TZ
""".split()
_KEPT = {"UNIMEM_NUMA_VM"}  # it says where the tests run
_DEFAULT = {
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TERM": "xterm",
    "TZ": "UTC",
    "UNIMEM_CACHE": "off",  # tests share no images
    "PYTHONUNBUFFERED": "1",  # a script's line can be read at once
}
# A worker of pytest-xdist inherits the home of its parent.
_BEGUN = "PYTEST_XDIST_WORKER"


def begin(kept: Collection[str] = ()) -> None:
    """Set signals, umask, limits and variables of this process and of its children.

    Variables in `kept` stay as they are.
    """
    _set_signals()
    os.umask(0o022)
    for limit in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
        hard = resource.getrlimit(limit)[1]
        # Programs that close all descriptors are slow with a larger limit.
        soft = min(hard, 4096) if limit == resource.RLIMIT_NOFILE and hard > 0 else hard
        resource.setrlimit(limit, (soft, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for name in (*_VARIABLES, *(name for name in os.environ if name.startswith("UNIMEM_"))):
        if name not in {*_KEPT, *kept}:
            os.environ.pop(name, None)
    os.environ.update(_DEFAULT)
    if _BEGUN not in os.environ:
        _set_home()


def _set_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGQUIT, signal.SIGTERM, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        # The run outlives its terminal under nohup; its children handle SIGHUP as usual.
        signal.signal(signal.SIGHUP, lambda *_: None)


def _set_home() -> None:
    """Set a home folder that programs may write their caches to."""
    home = Path(tempfile.gettempdir()) / f"unimem-tests-home-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    os.environ["HOME"] = str(home)
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "MPLCONFIGDIR"):
        os.environ.pop(name, None)
