"""Moves ggml to another version: which are on the index, what changes, and the move itself.

``python ggml/update.py`` lists the newest. ``--check`` fetches one and says what it changes of the
interface that the binding uses. ``--take`` writes it into `source.json` and all that follows it,
builds it into this environment, runs the tests of parity and a benchmark, and adds a row to
docs/ggml.md. ``--row`` does the last two for the version that is installed.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import io
import json
import re
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import fetch
import interface

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

# Source distributions that bring llama.cpp. The first names its build in its version.
PROJECTS = ("xllamacpp", "llama-cpp-python")
VERSION_FILES = (
    ("ggml/pyproject.toml", r'(?m)^version = "{}"', 'version = "{}"', False),
    ("pyproject.toml", r'"unimem-ggml=={}\.\*"', '"unimem-ggml=={}.*"', True),
    ("src/unimem/backends/ggml.py", r'(?m)^VERSION = "{}"', 'VERSION = "{}"', True),
)
PARITY = (
    "tests/backends",
    "tests/engine/test_decoder.py",
    "tests/engine/test_decoder_llama_cpp.py",
)
TITLE = "| ggml | llama.cpp | date | CPU | threads | prefill 512 | decode |"
N_PROMPT, N_DECODED, N_ROUNDS = 512, 64, 5


class Release(NamedTuple):
    """A source distribution on the index."""

    project: str
    version: str
    file: str
    url: str


def releases(project: str, links: Iterable[str]) -> list[Release]:
    """List the source distributions that a page of the index links to, the newest last."""
    name = re.compile(rf"/({re.sub('[-_.]', '[-_.]', project)}-(\d+(?:\.\d+)*)\.tar\.gz)(?:#|$)")
    matches = {found[2]: (found[1], link) for link in links if (found := name.search(link))}
    order = sorted(matches, key=lambda version: [int(part) for part in version.split(".")])
    return [Release(project, version, *matches[version]) for version in order]


class Sources(NamedTuple):
    """What an archive says of its ggml."""

    folder: str  # of llama.cpp
    version: str  # of ggml
    licence: str
    headers: str


def look_into(data: bytes) -> Sources:
    """Read what an archive has of ggml.

    Raises
    ------
    SystemExit
        It has none.
    """
    texts: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            if member.isfile() and re.search(
                r"/(ggml/(CMakeLists\.txt|include/\w[\w-]*\.h|src/ggml-backend-impl\.h)|LICENSE)$",
                member.name,
            ):
                file = tar.extractfile(member)
                assert file is not None  # a regular file
                texts[member.name] = file.read().decode()
    cmake = next((name for name in texts if name.endswith("/ggml/CMakeLists.txt")), None)
    if cmake is None:
        raise SystemExit("no folder of the archive has ggml: expected one with ggml/CMakeLists.txt")
    folder = cmake.removesuffix("/ggml/CMakeLists.txt")
    numbers = re.findall(r"set\(GGML_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)\)", texts[cmake])
    return Sources(
        folder,
        ".".join(numbers),
        texts[f"{folder}/LICENSE"],
        "\n".join(text for name, text in sorted(texts.items()) if name.endswith(".h")),
    )


def source_of(release: Release, data: bytes) -> dict[str, str]:
    """Return what `source.json` says of a release whose archive is `data`."""
    found = look_into(data)
    build = release.version.rpartition(".")[2]
    return {
        "project": release.project,
        "version": release.version,
        "file": release.file,
        "sha256": hashlib.sha256(data).hexdigest(),
        "folder": found.folder,
        "llama_cpp": f"b{build}" if release.project == PROJECTS[0] else "unknown",
        "ggml": found.version,
    }


def changed(old: str, new: str) -> list[str]:
    """Describe what headers change of the interface that the binding uses, a line each."""
    names = interface.used(path.read_text() for path in interface.SOURCES)
    return interface.changes(interface.declared(old), interface.declared(new), names)


def rewritten(text: str, pattern: str, form: str, was: str, is_now: str) -> str:
    """Return a text with one version replaced; ValueError unless the pattern is there once."""
    found, n = re.subn(pattern.format(re.escape(was)), form.format(is_now), text)
    if n != 1:
        raise ValueError(f"expected {form.format(was)!r} once, found it {n} times")
    return found


def take(source: Mapping[str, str], licence: str, root: Path = ROOT) -> None:
    """Write a version into `source.json`, the files that name it, and the licence beside them."""
    was = json.loads((root / "ggml/source.json").read_text())["ggml"]
    texts = {}
    for name, pattern, form, is_minor in VERSION_FILES:
        before, after = (
            version.rpartition(".")[0] if is_minor else version for version in (was, source["ggml"])
        )
        texts[name] = rewritten((root / name).read_text(), pattern, form, before, after)
    texts["ggml/source.json"] = json.dumps(source, indent=2) + "\n"
    texts["ggml/LICENSE.ggml"] = licence
    for name, text in texts.items():
        (root / name).write_text(text)


def with_row(page: str, row: Mapping[str, str]) -> str:
    """Return docs/ggml.md with a row at the top of its table, in the order of the title."""
    names = [name.strip() for name in TITLE.strip("|").split("|")]
    head, title, rest = page.partition(TITLE + "\n")
    if not title:
        raise ValueError(f"docs/ggml.md: expected a table with the title {TITLE}")
    rule, _, rows = rest.partition("\n")
    return f"{head}{title}{rule}\n| {' | '.join(row[name] for name in names)} |\n{rows}"


def speeds(threads: int) -> dict[str, float]:
    """Return the medians of tokens a second of a model of 1.1 billion weights in Q4_K_M."""
    from unimem.engine import Decoder
    from unimem_bench.models import write_model

    model = write_model(ROOT / "build/bench", "1.1b", "q4_k_m")
    found: dict[str, list[float]] = {"prefill": [], "decode": []}
    with Decoder(model, ctx=N_PROMPT + N_DECODED + 1, threads=threads) as decoder:
        for _ in range(N_ROUNDS + 1):
            decoder.reset()
            start = time.perf_counter()
            decoder.prefill(list(range(3, N_PROMPT + 3)))
            middle = time.perf_counter()
            for _ in range(N_DECODED):
                decoder.generate_next_token()
            end = time.perf_counter()
            found["prefill"].append(N_PROMPT / (middle - start))
            found["decode"].append(N_DECODED / (end - middle))
    return {name: statistics.median(each[1:]) for name, each in found.items()}  # the first warms


def add_row() -> None:
    """Run the tests of parity and the benchmark, and add the row to docs/ggml.md."""
    subprocess.run([sys.executable, "-m", "pytest", "-q", *PARITY], cwd=ROOT, check=True)
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    measured = speeds(2)
    source, page = fetch.pinned(), ROOT / "docs/ggml.md"
    row = {
        "ggml": source["ggml"],
        "llama.cpp": source["llama_cpp"],
        "date": datetime.date.today().isoformat(),
        "CPU": cpu[1] if cpu else "unknown",
        "threads": "2",
        "prefill 512": f"{measured['prefill']:.0f}",
        "decode": f"{measured['decode']:.1f}",
    }
    page.write_text(with_row(page.read_text(), row))
    print(row)


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project", choices=PROJECTS, help="takes the newest of one project")
    parser.add_argument("--check", action="store_true", help="what the newest changes")
    parser.add_argument("--take", action="store_true", help="move to the newest")
    parser.add_argument("--row", action="store_true", help="measure the installed version")
    asked = parser.parse_args()
    if asked.row:
        add_row()
        return
    pinned = fetch.pinned()
    print(f"pinned: {pinned['file']}, llama.cpp {pinned['llama_cpp']}, ggml {pinned['ggml']}")
    newest = {each: releases(each, fetch.links(each))[-1] for each in PROJECTS}
    for release in newest.values():
        print(f"newest: {release.file}{' (pinned)' * (release.file == pinned['file'])}")
    if not (asked.check or asked.take):
        return
    release = newest[asked.project or pinned["project"]]
    data = fetch.read(release.url.partition("#")[0])
    source, found = source_of(release, data), look_into(data)
    lines = changed(look_into(fetch.archive(pinned)).headers, found.headers)
    print(f"ggml {source['ggml']}: {len(lines)} changes of the used interface", *lines, sep="\n")
    if asked.take:
        take(source, found.licence)
        install = [sys.executable, "-m", "pip", "install", "--no-deps", str(HERE)]
        subprocess.run(install, check=True)
        subprocess.run([sys.executable, __file__, "--row"], check=True)


if __name__ == "__main__":
    main()
