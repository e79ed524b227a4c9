"""The recipes for containers, Kubernetes, systemd and alerts name what is there, and are whole."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.project.checkout import ROOT
from unimem.accounting.prometheus import FAMILIES
from unimem.cli import _app

yaml = pytest.importorskip("yaml", reason="PyYAML (extra test) reads the recipes")
pytest.importorskip("typer", reason="the command line needs typer: pip install '.[run]'")
typer_main = pytest.importorskip("typer.main")

DEPLOY = ROOT / "examples" / "deploy"
UNITS = sorted((DEPLOY / "systemd").iterdir())
METRIC = re.compile(r"unimem_\w+")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def check_command(words: list[str]) -> None:
    """Refuse options that the command does not have."""
    command = typer_main.get_command(_app()).commands[words[0]]
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    assert {word for word in words if word.startswith("-")} <= known, words


def pods() -> dict[str, dict[str, Any]]:
    return {each["kind"]: each["spec"]["template"]["spec"] for each in documents("kubernetes.yaml")}


def containers() -> list[dict[str, Any]]:
    return [
        each
        for pod in pods().values()
        for each in pod["containers"] + pod.get("initContainers", [])
    ]


def test_the_image_is_built_of_this_checkout_for_another_user() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["10001:10001"]
    assert 'ENTRYPOINT ["unimem"]' in lines
    assert sum(line.startswith("FROM python:3.") for line in lines) == 2
    assert (ROOT / "ggml" / "pyproject.toml").exists()
    extras = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", extras, re.M) for extra in ("run", "metrics"))


def test_compose_shares_the_memory_of_one_stage() -> None:
    (compose,) = documents("compose.yaml")
    stage, server = (compose["services"][name] for name in ("stage", "server"))
    assert (stage["ipc"], server["ipc"]) == ("shareable", "service:stage")
    assert all(each["mem_limit"] and each["read_only"] for each in (stage, server))
    assert (DEPLOY / stage["build"]["context"]).resolve() == ROOT
    assert (ROOT / stage["build"]["dockerfile"]).exists()
    check_command(stage["command"])
    at = stage["command"][stage["command"].index("--at") + 1]
    assert server["command"][1].startswith(at)
    assert stage["healthcheck"]["test"][-1].startswith(at)


def test_each_container_is_restricted_and_has_both_requests_and_limits() -> None:
    assert set(pods()) == {"DaemonSet", "Deployment", "Job"}
    for pod in pods().values():
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        volumes = {each["name"] for each in pod["volumes"]}
        for each in pod["containers"]:
            assert {mount["name"] for mount in each.get("volumeMounts", ())} <= volumes
    for each in containers():
        assert each["securityContext"]["readOnlyRootFilesystem"]
        assert not each["securityContext"]["allowPrivilegeEscalation"]
        wants, may = (each["resources"][kind] for kind in ("requests", "limits"))
        assert {"memory"} <= set(may) <= set(wants)
        assert all(wants[name] == may[name] for name in may)
        if each["image"] == "unimem" and "args" in each:
            check_command(each["args"])


def test_the_pods_agree() -> None:
    stage = pods()["DaemonSet"]["containers"][0]
    link = f"{stage['args'][stage['args'].index('--at') + 1]}/{Path(stage['args'][-1]).name}"
    server, metrics = pods()["Deployment"]["containers"]
    assert server["args"][1] == link == stage["livenessProbe"]["exec"]["command"][-1]
    assert pods()["Deployment"]["shareProcessNamespace"]
    (template,) = (
        each["spec"]["template"]
        for each in documents("kubernetes.yaml")
        if each["kind"] == "Deployment"
    )
    port = str(metrics["ports"][0]["containerPort"])
    assert template["metadata"]["annotations"]["prometheus.io/port"] == port
    assert "hugepages-2Mi" in pods()["Job"]["containers"][0]["resources"]["limits"]


def test_alerts_ask_for_metrics_and_labels_that_there_are() -> None:
    (rules,) = documents("alerts.yaml")
    (tests,) = documents("alerts_test.yaml")
    names = set()
    for rule in rules["groups"][0]["rules"]:
        names.add(rule["alert"])
        for metric in METRIC.findall(rule["expr"]):
            family = FAMILIES[metric]
            assert (f"rate({metric}" in rule["expr"]) == (family.kind == "counter")
            for grouped in re.findall(r"by \(([^)]*)\)", rule["expr"]):
                assert set(grouped.split(", ")) <= {"instance", *family.labels}
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        grouped = re.findall(r"by \(([^)]*)\)", rule["expr"])[0]
        assert shown <= set(grouped.split(", "))
    assert {each["alertname"] for each in tests["tests"][0]["alert_rule_test"]} == names


def test_promtool_agrees() -> None:
    if not shutil.which("promtool"):
        pytest.skip("promtool (Debian's package prometheus) is missing")
    for words in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run(
            ["promtool", *words], cwd=DEPLOY, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_a_unit_has_limits_and_starts_a_command_that_there_is(unit: Path) -> None:
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes="#", strict=True)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(unit)
    service = parser["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program == "/opt/unimem/bin/unimem"
    check_command(words)
    assert service["MemoryHigh"]
    assert service["MemoryMax"]
    assert ("--foreground" in words) == (service.get("Type") == "notify")
    assert ("--lock" in words) == (service.get("LimitMEMLOCK") == "infinity")


def test_systemd_agrees(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is missing")
    for unit in UNITS:
        text = unit.read_text().replace("/opt/unimem/bin/unimem", shutil.which("env") or "")
        path = tmp_path / unit.name.replace("@", "@model")
        path.write_text(text)
        done = subprocess.run(
            ["systemd-analyze", "verify", path], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr.strip()) == (0, ""), unit
