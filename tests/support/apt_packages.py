"""Programs that tests need, installed by apt where they are missing and this is root."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping

__all__ = ["UnavailableError", "apt", "install", "update_lists"]


class UnavailableError(Exception):
    """What is needed cannot be had here; the text says what to do."""


def apt(*arguments: str) -> None:
    """Run apt-get."""
    command = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=3"]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    answer = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if answer.returncode != 0:
        raise UnavailableError(f"apt-get {shlex.join(arguments)} failed:\n{answer.stderr.strip()}")


def update_lists() -> None:
    """Fetch apt's lists, since a mirror drops what old ones name. Root only.

    Packages may be had although one of the sources does not answer, so a failure is no error here.
    """
    if os.geteuid() == 0:
        with contextlib.suppress(UnavailableError):
            apt("update")


def install(tools: Mapping[str, str]) -> None:
    """Install what is missing of programs, by their packages, which only root may do."""
    missing = [package for tool, package in tools.items() if shutil.which(tool) is None]
    if not missing:
        return
    command = ("install", "-y", "--no-install-recommends", *missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise UnavailableError(
            f"{' and '.join(missing)} must be installed, by root: apt-get {shlex.join(command)}"
        )
    print(f"installing {' and '.join(missing)}", file=sys.stderr)
    apt(*command)
