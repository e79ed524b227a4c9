"""Commands as a container runs them: its user and calls, a read-only root, and no /dev/shm."""

from __future__ import annotations

import json
import os
import platform
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs typer: pip install '.[run]'")

from support.kernel.seccomp import CLONE3, DOCKER_REFUSES, FORBID, NO_SECCOMP

pytestmark = pytest.mark.slow

# Device nodes are all that is left of /dev, and no file system can be written to.
CONTAINER = """
set -e
mount --make-rprivate /
mount -t tmpfs none /dev
for node in null:3 zero:5 random:8 urandom:9; do
    mknod -m 666 /dev/${node%:*} c 1 ${node#*:}
done
ln -s /proc/self/fd /dev/fd
if [ -n "$CLOSED" ]; then  # others may not go to this Python
    mkdir /dev/closed
    mount --rbind "$CLOSED" /dev/closed
    mount -t tmpfs -o mode=755 none "$CLOSED"
    mkdir "$CLOSED/$NEXT"
    mount --rbind "/dev/closed/$NEXT" "$CLOSED/$NEXT"
fi
while read -r _ _ _ _ place _; do
    [ $place = /proc ] || mount -o remount,bind,ro $place 2>/dev/null || true
done < /proc/self/mountinfo
exec setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all --bounding-set=-all "$@"
"""
SCRIPT = """
import io, json, os
from unittest import mock
from unimem.cli import main
from unimem.engine import embedded_model

def run(*words):
    out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    with mock.patch("sys.stdout", out), mock.patch("sys.stderr", err):
        code = main([*map(str, words)])
    out.flush()
    return code, out.buffer.getvalue().decode(), err.getvalue()

found = {"user": os.geteuid(), "shm": os.path.exists("/dev/shm")}
try:
    open(os.path.join(os.path.dirname(embedded_model()), "written"), "w")
except OSError as error:
    found["write"] = error.errno
forbid("ENOSYS", [CLONE3])
forbid("EPERM", REFUSED)
found["doctor"] = run("doctor", "--json")
found["run"] = run("run", "-n", "8", "--json", "--numa", "interleave")
found["stage"] = run("stage", embedded_model(), "--json")
assert found["stage"][0] == 0, found["stage"]
staged, model = json.loads(found["stage"][1])["path"], embedded_model()
found["read"] = open(staged, "rb").read() == open(model, "rb").read()
found["list"] = run("stage", "--list")
found["budget"] = run("stage", "--budget", "1G")
found["drop"] = run("stage", "--drop", "all")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def contained() -> Any:
    """Run the script once."""
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
        pytest.skip("only root can make a read-only root here, with unshare and setpriv")
    arch = 0 if platform.machine() == "x86_64" else 1
    refused = [numbers[arch] for numbers in DOCKER_REFUSES.values()]
    head = f"CLONE3, REFUSED = {CLONE3}, {refused}\n"
    alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    words = [*alone, "sh", "-c", CONTAINER, "sh", sys.executable, "-B", "-c"]
    words.append(head + FORBID + SCRIPT)
    python = Path(os.path.realpath(sys.executable))
    closed = [each for each in python.parents if not each.stat().st_mode & stat.S_IXOTH]
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "CLOSED": "", "NEXT": ""}
    if closed:
        environment |= {"CLOSED": str(closed[-1])}
        environment |= {"NEXT": python.relative_to(closed[-1]).parts[0]}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if NO_SECCOMP in done.stdout:
        pytest.skip("this kernel has no filters of system calls")
    if done.returncode != 0 and "unshare failed" in done.stderr:
        pytest.skip("this container has no namespaces of its own")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_place_is_as_bare_as_it_says(contained: Any) -> None:
    assert (contained["user"], contained["shm"]) == (65534, False)
    assert contained["write"] in (13, 30)


def test_the_doctor_and_a_run_work(contained: Any) -> None:
    code, text, _ = contained["doctor"]
    assert code == 0
    assert json.loads(text)["schema"].startswith("unimem.doctor/")
    code, text, err = contained["run"]
    assert code == 0, err
    assert json.loads(text)["schema"].startswith("unimem.run/")
    assert "numa" in err  # it could not be had, and this is said


def test_a_model_is_staged_without_mounts_and_shm(contained: Any) -> None:
    code, text, err = contained["stage"]
    assert code == 0, err
    assert json.loads(text)["backing"] == "memfd"
    assert contained["read"]
    assert contained["list"][0] == 0
    assert contained["drop"][0] == 0


def test_a_budget_says_that_it_needs_a_folder(contained: Any) -> None:
    code, out, err = contained["budget"]
    assert (code, out) == (1, "")
    assert "UNIMEM_STAGING names another folder" in err
