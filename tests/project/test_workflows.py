"""The workflows run existing commands with the fewest permissions."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from support.project.checkout import ROOT

yaml = pytest.importorskip("yaml", reason="PyYAML reads workflows: pip install '.[check]'")

FOLDER = ROOT / ".github" / "workflows"
TEXTS = {path.stem: path.read_text() for path in sorted(FOLDER.iterdir())}
WORKFLOWS: dict[str, Any] = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
JOBS = {
    f"{name}/{job}": body for name, flow in WORKFLOWS.items() for job, body in flow["jobs"].items()
}
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


def commands(script: str) -> Iterator[list[str]]:
    """Return the commands of a script as words, without their prefixes for root."""
    for line in script.splitlines():
        words = shlex.split(line, comments=True)
        if words[:2] == ["sudo", "env"]:
            words = words[3:]
        if words:
            yield words


def used(job: str) -> list[str]:
    """Return the actions of a job, without their versions."""
    return [step["uses"].split("@")[0] for step in JOBS[job]["steps"] if "uses" in step]


def test_there_are_three() -> None:
    assert set(WORKFLOWS) == {"ci", "docs", "publish"}


@pytest.mark.parametrize("job", JOBS)
def test_every_command_is_there(job: str) -> None:
    for step in JOBS[job]["steps"]:
        for words in commands(step.get("run", "")):
            if words[0] == "make":
                assert words[1] in TARGETS, words
            elif words[0] == "bash":
                assert (ROOT / words[1]).is_file(), words
            elif words[:4] == ["python", "-m", "pip", "install"]:
                assert all("==" in word for word in words[4:]), "what is installed is pinned"
            else:
                assert words[:2] == ["python", "-m"], words
                installed = " ".join(each.get("run", "") for each in JOBS[job]["steps"])
                assert f" pip install {words[2]}==" in installed, words


def test_ci_runs_the_stages_of_the_script() -> None:
    stages = re.findall(r"^stage \S+ (\S+)$", (ROOT / ".ci" / "run").read_text(), re.M)
    assert "test-all" in stages
    assert set(stages) <= TARGETS
    assert any("bash .ci/run" in step.get("run", "") for step in JOBS["ci/everything"]["steps"])


def test_ci_covers_each_python_on_both_architectures() -> None:
    matrix = JOBS["ci/tests"]["strategy"]["matrix"]
    minors = [int(each.removeprefix("3.")) for each in matrix["python"]]
    assert minors == list(range(minors[0], 15))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">=3.{minors[0]}"
    for flow in ("ci/tests", "publish/wheels"):
        runners = JOBS[flow]["strategy"]["matrix"]["runner"]
        assert sorted(runner.endswith("-arm") for runner in runners) == [False, True]


@pytest.mark.parametrize("name", TEXTS)
def test_actions_are_pinned_to_commits(name: str) -> None:
    lines = re.findall(r"^.*\buses:.*$", TEXTS[name], re.M)
    pin = re.compile(r" +(?:- )?uses: ([\w-]+/[\w-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)")
    assert [line for line in lines if not pin.fullmatch(line)] == []


def test_an_action_has_one_pin() -> None:
    pins = set(re.findall(r"uses: (\S+)@(\S+ # \S+)", "".join(TEXTS.values())))
    assert len(pins) == len({action for action, _ in pins})


@pytest.mark.parametrize("name", TEXTS)
def test_a_workflow_grants_nothing_and_trusts_no_input(name: str) -> None:
    assert WORKFLOWS[name]["permissions"] == {}
    assert "concurrency" in WORKFLOWS[name]
    assert "secrets" not in TEXTS[name]
    assert "pull_request_target" not in TEXTS[name]


@pytest.mark.parametrize("job", JOBS)
def test_a_job_that_runs_our_code_may_only_read(job: str) -> None:
    body = JOBS[job]
    scripts = [step["run"] for step in body["steps"] if "run" in step]
    assert not any("${{" in script for script in scripts), "values come by the environment"
    assert 0 < body["timeout-minutes"] <= 180
    if scripts:
        assert body["permissions"] == {"contents": "read"}
        (checkout,) = [each for each in body["steps"] if "checkout@" in each.get("uses", "")]
        assert checkout["with"]["persist-credentials"] is False
    else:
        assert "contents" not in body["permissions"]
        assert "environment" in body, "whoever publishes can ask for a review"


@pytest.mark.parametrize("job", JOBS)
def test_what_is_uploaded_is_built_or_in_the_repository(job: str) -> None:
    for step in JOBS[job]["steps"]:
        if step.get("uses", "").startswith("actions/upload-"):
            path = step["with"]["path"]
            assert path.startswith("build/") or (ROOT / path).is_file(), path


def test_what_is_published_was_checked_and_is_attested() -> None:
    assert WORKFLOWS["publish"][True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as True
    assert JOBS["publish/wheels"]["needs"] == "check"
    assert JOBS["publish/publish"]["needs"] == "wheels"
    assert JOBS["publish/publish"]["permissions"] == {"attestations": "write", "id-token": "write"}
    last = used("publish/publish")
    assert last[-3:] == ["actions/attest", "actions/attest", "pypa/gh-action-pypi-publish"]
    assert JOBS["publish/publish"]["environment"]["name"] == "pypi"
