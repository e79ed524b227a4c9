"""The state that a run of the tests begins from, whatever shell, cron job or CI has started it.

Tests start programs, and these inherit signals, limits and variables: under ``nohup`` an interrupt
would be ignored, and under ``TERM=dumb`` nothing would be coloured.
"""

from __future__ import annotations

import os
import resource
import signal
import tempfile
from pathlib import Path

# What these say changes what unimem, Python, or the programs that tests start do or print.
_VARIABLES = (
    "CLICOLOR",
    "CLICOLOR_FORCE",
    "COLORTERM",
    "COLUMNS",
    "FORCE_COLOR",
    "LINES",
    "NO_COLOR",
    "LANGUAGE",
    "LC_ALL",
    "LC_CTYPE",
    "LC_MESSAGES",
    "LC_NUMERIC",
    "LC_TIME",
    "MAKEFLAGS",
    "MAKELEVEL",
    "MFLAGS",  # of a make that has started the tests
    "MALLOC_ARENA_MAX",
    "OMP_NUM_THREADS",
    "PYTHONIOENCODING",
    "PYTHONOPTIMIZE",
    "PYTEST_ADDOPTS",
    "PYTHONWARNINGS",
    "TMUX",
    "TYPER_USE_RICH",
    "TZ",
)
# Variables of unimem's own that tests are meant to see: where they run.
_KEPT = {"UNIMEM_NUMA_VM"}
_DEFAULT = {
    **{"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TERM": "xterm", "TZ": "UTC"},
    "UNIMEM_CACHE": "off",  # no test finds what another has kept
    "PYTHONUNBUFFERED": "1",  # whoever waits for a line of a script gets it when it is written
}
# A worker of pytest-xdist begins from what its parent has made.
_BEGUN = "PYTEST_XDIST_WORKER"


def begin() -> None:
    """Set signals, umask, limits and variables of this process, and of all that it starts."""
    _set_signals()
    os.umask(0o022)
    for limit in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
        hard = resource.getrlimit(limit)[1]
        # More than this many descriptors make programs slow that close them all.
        soft = min(hard, 4096) if limit == resource.RLIMIT_NOFILE and hard > 0 else hard
        resource.setrlimit(limit, (soft, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for name in (*_VARIABLES, *(name for name in os.environ if name.startswith("UNIMEM_"))):
        if name not in _KEPT:
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
        # The run outlives its terminal, as nohup has it; what it starts does as it would elsewhere.
        signal.signal(signal.SIGHUP, lambda *_: None)


def _set_home() -> None:
    """Take a home that can be written, where caches of others may go."""
    home = Path(tempfile.gettempdir()) / f"unimem-tests-home-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    os.environ["HOME"] = str(home)
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "MPLCONFIGDIR"):
        os.environ.pop(name, None)
