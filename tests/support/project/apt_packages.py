"""Debian's packages, by apt: installed where this is root, or unpacked into a folder by anybody."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path


class UnavailableError(Exception):
    """What is needed cannot be had here; the text says what to do."""


def apt(*arguments: str, folder: Path | None = None) -> None:
    """Run apt-get, in a folder."""
    command = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=3"]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    answer = subprocess.run(
        [*command, *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if answer.returncode != 0:
        raise UnavailableError(f"apt-get {shlex.join(arguments)} failed:\n{answer.stderr.strip()}")


def update_lists() -> None:
    """Fetch apt's lists, as root only; an old list may name packages that the mirror dropped.

    A failure is no error here, since the other sources may answer.
    """
    if os.geteuid() == 0:
        with contextlib.suppress(UnavailableError):
            apt("update")


def install(tools: Mapping[str, str]) -> None:
    """Install the packages of missing programs; this needs root."""
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


class Packages:
    """Debian packages of an architecture and a release (this machine's by default).

    Their lists are kept in a folder, and nothing is installed. `UnavailableError` says that apt or
    its lists are missing.
    """

    def __init__(self, folder: Path, architecture: str, release: str | None = None) -> None:
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            raise UnavailableError("Debian's packages are wanted, and there is no apt-get here")
        for name in ("lists/partial", "archives/partial"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "status").touch()
        settings = {
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            "Dir::State": folder,
            "Dir::State::status": folder / "status",
            "Dir::Cache": folder,
        }
        if release is not None:
            (folder / "sources").write_text(f"deb {_debian()} {release} main\n")
            settings |= {"Dir::Etc::sourcelist": folder / "sources", "Dir::Etc::sourceparts": "-"}
        self._options = [
            part for name, value in settings.items() for part in ("-o", f"{name}={value}")
        ]
        apt(*self._options, "update")

    def needed_by(self, *names: str) -> list[str]:
        """List the packages and all their dependencies."""
        command = ["apt-cache", *self._options, "depends", "--recurse", "--important", *names]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        return sorted(set(re.findall(r"^([a-z0-9][a-z0-9.+-]+)$", answer.stdout, re.M)))

    def unpack(self, names: Sequence[str], root: Path) -> None:
        """Fetch and unpack packages into a folder; absolute links become relative."""
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as fetched:
            apt(*self._options, "download", *names, folder=Path(fetched))
            for archive in sorted(Path(fetched).glob("*.deb")):
                subprocess.run(["dpkg-deb", "-x", archive, root], check=True)
        for link in (path for path in root.rglob("*") if path.is_symlink()):
            target = link.readlink()
            if target.is_absolute():
                link.unlink()
                link.symlink_to(os.path.relpath(root / target.relative_to("/"), link.parent))


def _debian() -> str:
    """Return the URL of this machine's Debian mirror."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    command += ["Origin: Debian"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [uri for uri in answer.stdout.split() if uri.rstrip("/").endswith("/debian")]
    if not found:
        raise UnavailableError("none of the sources of apt on this machine is Debian's")
    return found[0]
