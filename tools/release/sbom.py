"""The software bill of materials of the wheel, as CycloneDX JSON.

It is recorded beside this file, and CMake puts the record into the wheel, at `.dist-info/sboms`
(PEP 770). So it is the same for every platform: it names what is compiled in and what is installed
beside, by the requirements of pyproject.toml, with the licences of the newest versions.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from uuid import NAMESPACE_URL, uuid5

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tools" / "release" / "sbom.cdx.json"
MODEL = "unimem/engine/models/tiny.gguf"
# Extras for work on the project only.
FOR_WORK = {"test", "check", "docs", "worth", "release"}
# ggml, built from the folder of this name, which no index has.
GGML = ROOT / "ggml"
# Code of these packages goes into the compiled modules.
COMPILED_IN = ("cython", "numpy")


class Need(NamedTuple):
    """A distribution that is installed beside the package, or compiled into it."""

    requirement: Requirement
    extras: tuple[str, ...]  # of unimem; a distribution without one is always installed
    is_compiled_in: bool

    @property
    def name(self) -> str:
        """The normalized name of the distribution."""
        return canonicalize_name(self.requirement.name)


def settings() -> dict[str, Any]:
    """Return pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def version() -> str:
    """Return the version, which the header has."""
    header = (ROOT / "native" / "include" / "unimem.h").read_text()
    return ".".join(re.findall(r"^#define UM_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", header, re.M))


def needs() -> Iterator[Need]:
    """Yield the distributions that the package and its extras name, in the order of their names."""
    sys.path.insert(0, str(ROOT / "tools"))
    from requirements import requirements

    project = settings()["project"]
    extras: dict[str, list[str]] = {text: [] for text in project["dependencies"]}
    for extra in sorted(set(project["optional-dependencies"]) - FOR_WORK):
        for text in set(requirements([extra])):
            if text not in project["dependencies"]:
                extras.setdefault(text, []).append(extra)
    wanted = [Need(Requirement(text), tuple(names), False) for text, names in extras.items()]
    built = map(Requirement, settings()["build-system"]["requires"])
    wanted += [Need(each, (), True) for each in built if each.name in COMPILED_IN]
    yield from sorted(wanted, key=lambda need: (need.name, str(need.requirement), need.extras))


def licences() -> dict[str, str]:
    """Ask the index for the licence of each; pip reads the metadata and installs nothing."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
    found = own_licences()
    wanted = sorted({str(need.requirement) for need in needs() if need.name not in found})
    done = subprocess.run(
        [*command, "--ignore-installed", "--report", "-", *wanted],
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    for item in json.loads(done.stdout)["install"]:
        about = item["metadata"]
        found[canonicalize_name(about["name"])] = licence_of(about)
    return found


def own_licences() -> dict[str, str]:
    """Return the licences of what is built from the folder ggml, by normalized names."""
    project = tomllib.loads((GGML / "pyproject.toml").read_text())["project"]
    return {project["name"]: project["license"], "ggml": "MIT"}


def licence_of(about: Mapping[str, Any]) -> str:
    """Return the licence in core metadata (PEP 566): an SPDX expression if there is one."""
    if expression := about.get("license_expression"):
        return str(expression)
    line = str(about.get("license", "")).strip()
    if line and "\n" not in line:
        return line
    for classifier in about.get("classifier", ()):
        if classifier.startswith("License :: OSI Approved :: "):
            return str(classifier.rsplit(" :: ", 1)[1])
    raise RuntimeError(f"{about['name']} {about['version']} tells no licence")


def bill(of: Mapping[str, str]) -> str:
    """Return the document, given the licence of each distribution by its normalized name."""
    from cyclonedx.contrib.license.factories import LicenseFactory
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentScope, ComponentType
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL

    project, licence = settings()["project"], LicenseFactory()
    root = Component(
        type=ComponentType.LIBRARY, name=project["name"], version=version(),
        bom_ref=f"{project['name']}@{version()}", purl=PackageURL("pypi", name=project["name"]),
        licenses=[licence.make_from_string(project["license"])],
    )  # fmt: skip
    digest = hashlib.sha256((ROOT / "src" / MODEL).read_bytes()).hexdigest()
    model = Component(
        type=ComponentType.MACHINE_LEARNING_MODEL, name=MODEL, bom_ref=MODEL,
        licenses=[licence.make_from_string(project["license"])],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
    )  # fmt: skip
    source = json.loads((GGML / "source.json").read_text())
    ggml = Component(
        type=ComponentType.LIBRARY, name="ggml", version=source["ggml"],
        bom_ref=f"ggml@{source['ggml']}", scope=ComponentScope.OPTIONAL,
        purl=PackageURL("github", "ggml-org", "ggml", f"v{source['ggml']}"),
        licenses=[licence.make_from_string(of["ggml"])],
        properties=[
            Property(name="unimem:part-of", value="unimem-ggml"),
            Property(name="unimem:sources", value=source["file"]),
            Property(name="unimem:sources-sha-256", value=source["sha256"]),
        ],
    )  # fmt: skip
    parts = [model, ggml]
    for need in needs():
        facts = [Property(name="unimem:requirement", value=str(need.requirement))]
        facts += [Property(name="unimem:extra", value=extra) for extra in need.extras]
        role = "compiled in" if need.is_compiled_in else "installed"
        facts.append(Property(name="unimem:role", value=role))
        parts.append(
            Component(
                type=ComponentType.LIBRARY, name=need.name, properties=facts,
                bom_ref=f"{role}: {need.requirement}", purl=PackageURL("pypi", name=need.name),
                licenses=[licence.make_from_string(of[need.name])],
                scope=ComponentScope.OPTIONAL if need.extras else ComponentScope.REQUIRED,
            )
        )  # fmt: skip
    document = Bom(serial_number=uuid5(NAMESPACE_URL, f"{root.purl}@{root.version}"))
    document.metadata.component = root
    for part in parts:
        document.components.add(part)
    document.register_dependency(root, parts)
    made = json.loads(JsonV1Dot6(document).output_as_string())
    del made["metadata"]["timestamp"]  # the same input gives the same file
    return json.dumps(made, indent=2, sort_keys=True) + "\n"


def recorded() -> str:
    """Return the record."""
    return RECORD.read_text()


def recorded_licences() -> dict[str, str]:
    """Return the recorded licences, by the names of distributions."""
    found = {}
    for part in json.loads(recorded())["components"]:
        (licence,) = part["licenses"]
        inner = licence.get("license", {})
        found[part["name"]] = licence.get("expression") or inner.get("id") or inner["name"]
    return found


def problem(document: str) -> str | None:
    """Return what makes a document invalid by CycloneDX's schema, or None."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(document)
    return None if error is None else str(error)


def main() -> str | None:
    """Write the record."""
    document = bill(licences())
    if wrong := problem(document):
        return wrong
    RECORD.write_text(document)
    print(f"{RECORD.relative_to(ROOT)}: {len(json.loads(document)['components'])} components")
    return None


if __name__ == "__main__":
    sys.exit(main())
