"""Put faults into a Python module, by cosmic-ray, and run its tests with each."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkItem, WorkResult

ROOT = Path(__file__).parents[2]
# Mutations of type hints, or that break the import of the module.
_LEFT_OUT = ("RemoveDecorator", "ReplaceBinaryOperator_BitOr", "ExceptionReplacer")

Place = tuple[int, int, str, int]


@dataclass(frozen=True)
class Result:
    """The result of one fault."""

    key: str
    place: Place
    killed: bool


def copy_package(folder: Path) -> None:
    """Copy `unimem` and its binaries into a folder, so that faults reach nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    built = Path(sysconfig.get_paths()["platlib"]) / "unimem"
    for source in (built, ROOT / "src" / "unimem"):
        shutil.copytree(source, folder / "unimem", dirs_exist_ok=True)


def run_faults(
    folder: Path, name: str, tests: list[str], seconds: float, choice: int | set[Place]
) -> list[Result]:
    """Run the tests of a module with one fault after the other.

    `folder` is a copy that only this call uses. `name` is the module's file within the package,
    such as ``system/limits.py``, and `tests` are arguments of pytest. After `seconds` a run has
    failed: the fault made it loop. `choice` is a number of faults, or their `Result.place`.
    """
    session = folder / "session.sqlite"
    session.unlink(missing_ok=True)
    configuration = folder / "cosmic-ray.toml"
    pytest = f"{sys.executable} -m pytest -q -x -n0 -p no:cacheprovider {' '.join(tests)}"
    configuration.write_text(
        f"""[cosmic-ray]
module-path = ["{folder / "unimem" / name}"]
timeout = {seconds}
excluded-modules = []
test-command = "{pytest}"

[cosmic-ray.distributor]
name = "local"
"""
    )
    environment = os.environ | {
        "PYTHONPATH": f"{folder}:{ROOT / 'tools' / 'no_editable'}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for command in ("init", "exec"):
        subprocess.run(
            [sys.executable, "-m", "cosmic_ray.cli", command, configuration, session],
            cwd=ROOT,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        if command == "init":
            with use_db(str(session), WorkDB.Mode.open) as db:
                _choose(db, choice)
    with use_db(str(session), WorkDB.Mode.open) as db:
        return [
            Result(
                _key(name, item, result), _place(item), result.test_outcome != TestOutcome.SURVIVED
            )
            for item, result in _tried(db)
        ]


def _choose(db: WorkDB, choice: int | set[Place]) -> None:
    """Leave the rest out: the same in every run."""
    items = sorted(db.work_items, key=_place)
    places = [_place(item) for item in items if not _is_left_out(item)]
    if isinstance(choice, int):
        choice = set(random.Random(0).sample(places, min(choice, len(places))))
    for item in items:
        if _place(item) not in choice:
            db.set_result(item.job_id, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))


def _place(item: WorkItem) -> Place:
    mutation = item.mutations[0]
    return *mutation.start_pos, mutation.operator_name, mutation.occurrence


def _is_left_out(item: WorkItem) -> bool:
    mutation = item.mutations[0]
    # Code outside functions is constants and types.
    return mutation.definition_name is None or any(
        part in mutation.operator_name for part in _LEFT_OUT
    )


def _tried(db: WorkDB) -> list[tuple[WorkItem, WorkResult]]:
    results = dict(db.results)
    return [
        (item, results[item.job_id])
        for item in sorted(db.work_items, key=_place)
        if results[item.job_id].worker_outcome == WorkerOutcome.NORMAL
    ]


def _key(name: str, item: WorkItem, result: WorkResult) -> str:
    """Name a fault by its text, so that lines before it may change."""
    changed = [
        " ".join(line[1:].split())
        for line in (result.diff or "").splitlines()
        if line[:1] in "-+" and line[:3] not in ("---", "+++")
    ]
    return f"{name}: {item.mutations[0].definition_name}: {' -> '.join(changed)}"
