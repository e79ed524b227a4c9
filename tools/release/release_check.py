"""Check everything about a release that can be checked before it: `make release-check`.

It builds the sdist and a wheel from it, into build/release, and prints a row for each check. This
is a rehearsal, in which things that only a release has may be open. With `--tag`, nothing may.
"""

from __future__ import annotations

import argparse
import email.message
import email.parser
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import sbom
from sbom import ROOT, settings, version

DIST = ROOT / "build" / "release"
# Bounds of size, in bytes. A larger file contains something by mistake.
MOST_SDIST_BYTES = 3_300_000
MOST_WHEEL_BYTES = 3_600_000
HEADING = re.compile(r"^## (\S+) \((unreleased|\d{4}-\d{2}-\d{2})\)$", re.M)


class WrongError(Exception):
    """A check that fails; its text says what was found, and what to do."""


class OpenError(Exception):
    """Something that a rehearsal may lack, but a release must have."""


class Row(NamedTuple):
    """A line of the table."""

    state: str
    name: str
    text: str


def run(*command: str | Path) -> str:
    """Run a command in the checkout; return its output, or raise WrongError."""
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-15:]
        raise WrongError(
            "\n".join([f"{Path(command[0]).name} ended with {done.returncode}", *last])
        )
    return done.stdout


# ---- the checkout -------------------------------------------------------------------------------


def check_changelog(text: str) -> str:
    """Check that the newest section is of this version, and says when it was released."""
    first = re.search(r"^## .*$", text, re.M)
    found = first and HEADING.fullmatch(first[0])
    if not first or not found or found[1] != version():
        newest = first and first[0]
        raise WrongError(f"expected '## {version()} (…)' as the first section, got {newest!r}")
    if found[2] == "unreleased":
        raise OpenError(
            f"{version()} is unreleased: write the day, as in '## {version()} (2027-01-31)'"
        )
    return f"{version()} of {found[2]}"


def check_tree(status: str) -> str:
    """Check that git sees no change; `status` is its porcelain."""
    if status:
        n = len(status.splitlines())
        raise WrongError(f"{n} files are changed or new: commit them first: {status.split()[1]}")
    return f"clean, at {run('git', 'rev-parse', '--short', 'HEAD').strip()}"


def check_tag(tag: str | None) -> str:
    """Check the form of a tag."""
    expected = f"v{version()}"
    if tag is None:
        raise OpenError(f"none is given; the tag of this version is {expected}")
    if tag != expected:
        raise WrongError(f"expected {expected}, as in unimem.h, got {tag!r}")
    return tag


def check_address() -> str:
    """Check that links of the README lead somewhere."""
    address = settings()["project"].get("urls", {}).get("Repository")
    if address is None:
        raise OpenError(
            "pyproject.toml has no [project.urls] Repository: links of the README are text"
        )
    return str(address)


def check_abi() -> str:
    """Check that the record of the binary interface is that of the headers."""
    found = run("env", "PYTHONPATH=tests", sys.executable, "-m", "support.project.c_abi")
    header = (ROOT / "native" / "include" / "unimem.h").read_text()
    number = re.search(r"^#define UM_SOVERSION (\d+)$", header, re.M)
    assert number is not None
    record = ROOT / "native" / "abi" / f"{number[1]}.txt"
    if not record.exists() or record.read_text() != found:
        raise WrongError(
            f"{record.name} is another: PYTHONPATH=tests python -m support.project.c_abi --record"
        )
    return f"interface {number[1]}, {len(found.splitlines())} lines"


def check_bill() -> str:
    """Check that the bill of materials is of this version and of these requirements."""
    recorded = sbom.recorded()
    if wrong := sbom.problem(recorded):
        raise WrongError(f"{sbom.RECORD.name} is no CycloneDX: {wrong}")
    try:
        is_current = sbom.bill(sbom.recorded_licences()) == recorded
    except KeyError as error:
        raise WrongError(f"{error} is not in {sbom.RECORD.name}: tools/release/sbom.py") from None
    if not is_current:
        raise WrongError(
            f"{sbom.RECORD.name} is of other requirements or another version: tools/release/sbom.py"
        )
    return f"CycloneDX, licences of {len(sbom.recorded_licences())} components"


# ---- what is published --------------------------------------------------------------------------


def build() -> str:
    """Make the sdist, and a wheel of it."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST)
    return ", ".join(path.name for path in sorted(DIST.iterdir()))


def only(pattern: str) -> Path:
    """Return the one file that was made."""
    found = sorted(DIST.glob(pattern))
    if len(found) != 1:
        raise WrongError(f"expected one {pattern} in {DIST.relative_to(ROOT)}, got {len(found)}")
    return found[0]


def check_size(path: Path, most: int) -> str:
    """Check that a file is no larger than it should be."""
    nbytes = path.stat().st_size
    if nbytes > most:
        raise WrongError(f"{nbytes} bytes; at most {most} were expected")
    return f"{nbytes} bytes of {most}"


def check_wheel(path: Path) -> str:
    """Check that a wheel has its licence and its bill of materials, and is of this version."""
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        folder = f"{path.name.split('-')[0]}-{version()}.dist-info"
        wanted = [f"{folder}/licenses/LICENSE", f"{folder}/sboms/{sbom.RECORD.name}"]
        if missing := [name for name in [*wanted, f"{folder}/METADATA"] if name not in names]:
            raise WrongError(f"{path.name} lacks {', '.join(missing)}")
        if wheel.read(wanted[0]) != (ROOT / "LICENSE").read_bytes():
            raise WrongError(f"{wanted[0]} is not LICENSE")
        if wheel.read(wanted[1]).decode() != sbom.recorded():
            raise WrongError(f"{wanted[1]} is not {sbom.RECORD.name}")
        about = metadata_of(path)
    expected = {"Version": version(), "License-Expression": settings()["project"]["license"]}
    for key, value in expected.items():
        if about[key] != value:
            raise WrongError(f"{key}: expected {value}, got {about[key]}")
    return f"{about['License-Expression']}, {about['Name']} {about['Version']}"


def check_sdist(path: Path) -> str:
    """Check that an sdist has its licence, and what makes the metadata and the bill."""
    with tarfile.open(path) as sdist:
        names = {name.split("/", 1)[-1] for name in sdist.getnames()}
    wanted = {"LICENSE", "README.md", "CHANGELOG.md", "PKG-INFO", "pyproject.toml"}
    wanted |= {f"tools/release/{name}" for name in ("index_readme.py", sbom.RECORD.name)}
    if missing := sorted(wanted - names):
        raise WrongError(f"{path.name} lacks {', '.join(missing)}")
    return f"{len(names)} entries"


def metadata_of(wheel: Path) -> email.message.Message:
    """Return the core metadata of a wheel, with the description as its payload."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        return email.parser.Parser().parsestr(files.read(name).decode())


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("href", "src")]


def check_readme(description: str) -> str:
    """Check that an index renders the description, and that each of its links is whole."""
    import readme_renderer.markdown

    page = readme_renderer.markdown.render(description)
    if page is None:
        raise WrongError("the description cannot be rendered")
    links = _Links()
    links.feed(page)
    if broken := [link for link in links.found if not re.match(r"https?://|mailto:|#", link)]:
        raise WrongError(f"{len(broken)} links lead nowhere from an index: {broken[0]}")
    return f"rendered, {len(links.found)} links, all whole"


def check_twine() -> str:
    """Let twine check what it would upload."""
    run(sys.executable, "-m", "twine", "check", "--strict", only("*.tar.gz"), only("*.whl"))
    return "passed, strict"


# ---- the table ----------------------------------------------------------------------------------


def checks(tag: str | None) -> dict[str, Callable[[], str]]:
    """Return all checks, in the order in which they run."""
    return {
        "changelog": lambda: check_changelog((ROOT / "CHANGELOG.md").read_text()),
        "clean tree": lambda: check_tree(run("git", "status", "--porcelain")),
        "tag": lambda: check_tag(tag),
        "repository": check_address,
        "binary interface": check_abi,
        "bill of materials": check_bill,
        "build": build,
        "sdist": lambda: check_sdist(only("*.tar.gz")),
        "size of the sdist": lambda: check_size(only("*.tar.gz"), MOST_SDIST_BYTES),
        "wheel": lambda: check_wheel(only("*.whl")),
        "size of the wheel": lambda: check_size(only("*.whl"), MOST_WHEEL_BYTES),
        "README": lambda: check_readme(str(metadata_of(only("*.whl")).get_payload())),
        "twine": check_twine,
    }


def rows(wanted: Mapping[str, Callable[[], str]], *, is_release: bool) -> Iterator[Row]:
    """Run checks; yield a row for each."""
    for name, check in wanted.items():
        try:
            yield Row("ok", name, check())
        except OpenError as error:
            yield Row("WRONG" if is_release else "open", name, str(error))
        except WrongError as error:
            yield Row("WRONG", name, str(error))


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Check a release before it is published.")
    parser.add_argument("--tag", help="the tag that is released; without one, this is a rehearsal")
    parser.add_argument("--links", action="store_true", help="ask every server that is linked to")
    parser.add_argument("--wheels", action="store_true", help="make the wheels of all platforms")
    arguments = parser.parse_args()
    wanted = checks(arguments.tag or None)
    if arguments.links:
        wanted["links"] = lambda: run("make", "docs", "LINKS=--links").strip().splitlines()[-1]
    if arguments.wheels:
        wanted["wheels"] = lambda: run("make", "wheels").strip().splitlines()[-1]
    n_wrong = 0
    for row in rows(wanted, is_release=bool(arguments.tag)):
        print(f"{row.state:<5}  {row.name:<18}  {row.text}", flush=True)
        n_wrong += row.state == "WRONG"
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
