"""`make release-check` refuses incomplete releases, and a wheel has its bill of materials.

The checks that build take minutes: `make release-check` runs them, and tests/project/test_wheel.py
looks into a wheel.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from pathlib import Path

import pytest

import release_check
import sbom
from index_readme import absolute, dynamic_metadata
from release_check import OpenError, Row, WrongError
from support.project.checkout import ROOT
from unimem._core.status import VERSION

ADDRESS = "https://example.org/owner/unimem"
RELATIVE = re.compile(r"\]\((?!https?:|mailto:|#)")


# ---- the README on an index ---------------------------------------------------------------------


def test_links_lead_to_the_repository() -> None:
    text = (ROOT / "README.md").read_text()
    made = absolute(text, ADDRESS, VERSION)
    assert RELATIVE.search(made) is None
    assert f"]({ADDRESS}/blob/v{VERSION}/docs/benchmarks.md)" in made
    assert f"]({ADDRESS}/raw/v{VERSION}/docs/pressure/pressure.svg)" in made
    # Nothing else is changed.
    back = re.sub(rf"{re.escape(ADDRESS)}/(blob|raw)/v[\d.]+/", "", made)
    assert back == text


def test_links_are_text_while_there_is_no_repository() -> None:
    made = absolute("![a picture](a.svg) [b](b.md#c) [d](https://e) [f](#f)", None, VERSION)
    assert made == "a picture b [d](https://e) [f](#f)"


def test_metadata_takes_the_address_from_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    project = {"version": VERSION, "urls": {"Repository": f"{ADDRESS}/"}}
    made = dynamic_metadata("readme", {}, project)
    assert made["content-type"] == "text/markdown"
    assert f"]({ADDRESS}/blob/v{VERSION}/CHANGELOG.md)" in made["text"]
    assert RELATIVE.search(dynamic_metadata("readme", {}, {"version": VERSION})["text"]) is None
    with pytest.raises(ValueError, match="without settings, got 'version'"):
        dynamic_metadata("version", {}, project)


# ---- the checks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "error", "told"), [
    ("# Changes\n", WrongError, "got None"),
    ("## 9.9.9 (2027-01-31)\n", WrongError, "got '## 9.9.9"),
    (f"## {VERSION}\n## {VERSION} (2027-01-31)\n", WrongError, "as the first section"),
    (f"## {VERSION} (unreleased)\n", OpenError, "write the day"),
])  # fmt: skip
def test_a_changelog_of_another_version_is_refused(
    text: str, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=re.escape(told)):
        release_check.check_changelog(text)


def test_the_changelog_is_by_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## .*$", text, re.M)
    assert headings == [match[0] for match in release_check.HEADING.finditer(text)]
    assert sbom.version() == VERSION
    dated = f"## {VERSION} (2027-01-31)\n"
    assert release_check.check_changelog(dated) == f"{VERSION} of 2027-01-31"


def test_a_tag_is_the_version() -> None:
    assert release_check.check_tag(f"v{VERSION}") == f"v{VERSION}"
    with pytest.raises(OpenError, match=f"v{VERSION}"):
        release_check.check_tag(None)
    for tag in (VERSION, "v9.9.9", f"v{VERSION}rc1", f"unimem-v{VERSION}"):
        with pytest.raises(WrongError, match=f"expected v{VERSION}, .*got '{tag}'"):
            release_check.check_tag(tag)


def test_a_tree_with_changes_is_refused() -> None:
    with pytest.raises(WrongError, match=r"2 files are changed or new: .*: README\.md"):
        release_check.check_tree(" M README.md\n?? notes\n")


def test_what_is_too_large_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.whl"
    file.write_bytes(bytes(10))
    assert release_check.check_size(file, 10) == "10 bytes of 10"
    with pytest.raises(WrongError, match="10 bytes; at most 9"):
        release_check.check_size(file, 9)


def write_wheel(folder: Path, without: str = "", **changed: str) -> Path:
    """Write a wheel of metadata alone, optionally without a file or with another text in it."""
    path = folder / f"unimem_llm-{VERSION}-cp311-cp311-linux_x86_64.whl"
    info = f"unimem_llm-{VERSION}.dist-info"
    files = {
        "LICENSE": ("licenses/LICENSE", (ROOT / "LICENSE").read_text()),
        "sbom": (f"sboms/{sbom.RECORD.name}", sbom.recorded()),
        "METADATA": (
            "METADATA",
            f"Name: unimem-llm\nVersion: {VERSION}\nLicense-Expression: Apache-2.0\n\n# unimem\n",
        ),
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for name, (place, text) in files.items():
            if name != without:
                wheel.writestr(f"{info}/{place}", changed.get(name, text))
    return path


def test_a_wheel_has_its_licence_and_its_bill(tmp_path: Path) -> None:
    assert release_check.check_wheel(write_wheel(tmp_path)) == f"Apache-2.0, unimem-llm {VERSION}"
    for name, place in {
        "LICENSE": "licenses/LICENSE", "sbom": "sboms/sbom.cdx.json", "METADATA": "METADATA",
    }.items():  # fmt: skip
        with pytest.raises(WrongError, match=f"lacks .*{place}"):
            release_check.check_wheel(write_wheel(tmp_path, without=name))


@pytest.mark.parametrize(("name", "text", "told"), [
    ("LICENSE", "MIT", "is not LICENSE"),
    ("sbom", "{}", "is not sbom.cdx.json"),
    ("METADATA", f"Version: {VERSION}\nLicense-Expression: MIT\n\n", "Apache-2.0, got MIT"),
    ("METADATA", "Version: 9.9.9\n\n", f"Version: expected {VERSION}, got 9.9.9"),
])  # fmt: skip
def test_a_wheel_of_something_else_is_refused(
    tmp_path: Path, name: str, text: str, told: str
) -> None:
    with pytest.raises(WrongError, match=re.escape(told)):
        release_check.check_wheel(write_wheel(tmp_path, **{name: text}))


def test_a_description_with_links_to_files_is_refused() -> None:
    pytest.importorskip("readme_renderer", reason="readme_renderer is of the extra `release`")
    told = release_check.check_readme(absolute((ROOT / "README.md").read_text(), ADDRESS, VERSION))
    assert re.fullmatch(r"rendered, \d+ links, all whole", told)
    with pytest.raises(WrongError, match=r"1 links lead nowhere from an index: a/b\.md"):
        release_check.check_readme("[a](a/b.md) [b](https://example.org) [c](#c)")


def test_a_rehearsal_leaves_open_what_a_release_may_not() -> None:
    def is_open() -> str:
        raise OpenError("no tag")

    def is_wrong() -> str:
        raise WrongError("too large")

    checks = {"tag": is_open, "size": is_wrong, "name": lambda: "unimem-llm"}
    last = [Row("WRONG", "size", "too large"), Row("ok", "name", "unimem-llm")]
    assert list(release_check.rows(checks, is_release=False)) == [
        Row("open", "tag", "no tag"), *last,
    ]  # fmt: skip
    assert list(release_check.rows(checks, is_release=True)) == [
        Row("WRONG", "tag", "no tag"), *last,
    ]  # fmt: skip


# ---- the bill of materials ----------------------------------------------------------------------


def test_the_bill_has_what_the_project_requires() -> None:
    """A changed requirement needs `tools/release/sbom.py`; this test needs no library."""
    record = json.loads(sbom.recorded())
    assert record["metadata"]["component"]["version"] == VERSION, "tools/release/sbom.py"
    parts = {part["bom-ref"]: part for part in record["components"]}
    model = parts.pop(sbom.MODEL)
    digest = hashlib.sha256((ROOT / "src" / sbom.MODEL).read_bytes()).hexdigest()
    assert model["hashes"] == [{"alg": "SHA-256", "content": digest}]
    source = json.loads((ROOT / "ggml/source.json").read_text())
    ggml = parts.pop(f"ggml@{source['ggml']}")
    assert ggml["licenses"] == [{"license": {"id": "MIT"}}]
    assert source["sha256"] in [fact["value"] for fact in ggml["properties"]]
    found = set()
    for part in parts.values():
        facts = [(fact["name"], fact["value"]) for fact in part["properties"]]
        extras = tuple(value for name, value in facts if name == "unimem:extra")
        about = dict(facts)
        assert part["scope"] == ("optional" if extras else "required")
        is_compiled_in = about["unimem:role"] == "compiled in"
        found.add((part["name"], about["unimem:requirement"], extras, is_compiled_in))
    wanted = {
        (need.name, str(need.requirement), need.extras, need.is_compiled_in)
        for need in sbom.needs()
    }
    assert found == wanted, "tools/release/sbom.py"
    assert {"numpy", "cython", "torch", "typer"} <= {need.name for need in sbom.needs()}
    assert "pytest" not in {need.name for need in sbom.needs()}
    # Each has a licence, and is what the package depends on.
    assert all(sbom.recorded_licences().values())
    (depends,) = [each["dependsOn"] for each in record["dependencies"] if "dependsOn" in each]
    assert set(depends) == {*parts, sbom.MODEL, ggml["bom-ref"]}


@pytest.mark.slow  # to import the library takes longer than most tests
def test_the_bill_is_what_the_library_makes_of_it() -> None:
    pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib is of the extra `release`")
    assert sbom.bill(sbom.recorded_licences()) == sbom.recorded()
    assert sbom.problem(sbom.recorded()) is None
    assert sbom.problem(sbom.recorded().replace('"required"', '"wanted"')) is not None


@pytest.mark.parametrize(("about", "licence"), [
    ({"license_expression": "MIT", "license": "other"}, "MIT"),
    ({"license": "BSD-3-Clause"}, "BSD-3-Clause"),
    ({"license": "A\nB", "classifier": ["License :: OSI Approved :: Zope"]}, "Zope"),
])  # fmt: skip
def test_licences_are_read_from_metadata(about: dict[str, object], licence: str) -> None:
    assert sbom.licence_of(about) == licence


def test_a_package_without_a_licence_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"some 1\.0 tells no licence"):
        sbom.licence_of({"name": "some", "version": "1.0", "license": ""})
