"""Things that any user may put under a name in a shared place, before its owner does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_OTHER = 65534  # the user "nobody"
#: What is said of each kind.
KINDS = {
    "another user's folder": f"a folder of user {_OTHER}, mode 0700",
    "a folder for all": f"a folder of user {os.geteuid()}, mode 0777",
    "a link to a folder": f"a link of user {os.geteuid()}, mode 0777",
    "a link to nothing": f"a link of user {os.geteuid()}, mode 0777",
    "a FIFO": f"a FIFO of user {os.geteuid()}, mode 0600",
    "a file": f"a file of user {os.geteuid()}, mode 0600",
}


def take(path: Path, kind: str) -> None:
    """Put a thing of one of `KINDS` at a path; only root can give a folder away."""
    if kind.startswith("a link"):
        path.symlink_to(path.parent if kind == "a link to a folder" else path.parent / "missing")
    elif kind == "a FIFO":
        os.mkfifo(path, 0o600)
    elif kind == "a file":
        path.touch(0o600)
    else:
        path.mkdir(0o700)
        if kind == "a folder for all":
            path.chmod(0o777)
        elif os.geteuid():
            pytest.skip("only root can give a folder away")
        else:
            os.chown(path, _OTHER, _OTHER)
