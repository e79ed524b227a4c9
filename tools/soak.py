"""Run everything at once for hours, and report what grows: `make soak`.

    python tools/soak.py [--seconds N] [--folder FOLDER] [--page]

Processes decode, save, restore, stage, drop, trim, grow, fork, and report on each other, each in an
order of its own. One of each kind lives for the whole run, and one is killed at random moments and
restarted. Every few seconds, the resources of the living ones are recorded (resident memory,
descriptors, mappings, threads), and what all of them leave: names in shared memory, files and bytes
of the store, of the cache folder and of the folder for temporary files, and processes.

After the warm-up, the robust slope (Theil and Sen) of each series must be that of something that
does not grow. Ends with status 1 if one grows, a process failed, or something is left at the end.
--page puts the picture and the table into docs/soak.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

from recorded import put, short_commit
from soak_work import KINDS, MARK, NAME, children_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/soak.md"
BEGIN, END = "<!-- made by make soak -->", "<!-- end -->"
SCHEMA = "unimem.soak/1"
MIB = 1 << 20

WARM_UP = 0.25  # of the run
MOST_PAIRS = 400  # the most samples of a series for its slope
# The growth allowed in a whole run: at least this, or this part of the middle of a series.
SLACK = {"rss_bytes": 4 * MIB, "descriptors": 4, "mappings": 24, "threads": 2}
LEFT_SLACK = {"shm_bytes": 8 * MIB, "store_bytes": 8 * MIB, "cache_bytes": 8 * MIB}
LEFT_SLACK |= {"shm_names": 4, "temporary_files": 4, "processes": 2}
SLACK_PART = 0.05


# ---- the samples ----


def look_at(pid: int) -> dict[str, int]:
    """Return the resources of a process; {} if it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        status = (folder / "status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        return {
            "rss_bytes": int(fields["VmRSS"].split()[0]) << 10,
            "descriptors": len(os.listdir(folder / "fd")),
            "mappings": (folder / "maps").read_bytes().count(b"\n"),
            "threads": int(fields["Threads"]),
        }
    except (OSError, KeyError, ValueError):
        return {}


def _files(folder: Path, pattern: str = "**/*") -> Iterator[os.stat_result]:
    for path in folder.glob(pattern):
        with suppress(OSError):
            info = path.lstat()
            if path.is_file():
                yield info


def look_at_folders(folder: Path) -> dict[str, int]:
    """Return the contents of shared memory and of the folders of a run."""
    shm = Path("/dev/shm")  # other programs have names there, too
    found = {"shm_bytes": sum(info.st_blocks * 512 for info in _files(shm, "unimem-*/**/*"))}
    found["shm_names"] = len(list(shm.glob("unimem-*")))
    for name in ("store", "cache"):
        found[f"{name}_bytes"] = sum(info.st_blocks * 512 for info in _files(folder / name))
    found["temporary_files"] = len(list(_files(folder / "tmp")))
    found["processes"] = len(children_of(folder))
    return found


# ---- the run ----


class Worker:
    """A process that works; if `is_killed`, it is killed now and then."""

    def __init__(self, kind: str, folder: Path, *, is_killed: bool) -> None:
        self.kind, self.folder, self.is_killed = kind, folder, is_killed
        self.name = f"{kind}, killed" if is_killed else kind
        self.n_starts = 0
        self.start()

    def start(self) -> None:
        """Start it, or restart it."""
        environment = os.environ | {
            MARK: str(self.folder),
            NAME: self.name,
            "UNIMEM_CACHE": str(self.folder / "cache"),
            "TMPDIR": str(self.folder / "tmp"),
        }
        command = [sys.executable, "-W", "ignore", str(ROOT / "tools/soak_work.py"), self.kind]
        command += [str(self.folder), str(self.n_starts)]
        log = (self.folder / "logs" / f"{self.name}.log").open("ab")
        with log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.n_starts += 1

    def end(self, number: int) -> int:
        """End it by a signal, and return its exit status."""
        self.process.send_signal(number)
        try:
            return self.process.wait(300)  # the machine may be busy
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return -signal.SIGALRM


class Run(NamedTuple):
    """The result of a run.

    `times` are those of the samples, since the beginning, in a run of `seconds`. `series` has as
    many values for each ``"worker: what"``, and for what is left. `n_kills` counts killed
    processes, `counts` has the work of all workers by name, and `failures` says what went wrong.
    """

    seconds: float
    times: list[float]
    series: dict[str, list[int]]
    n_kills: int
    counts: dict[str, int]
    failures: list[str]


def soak(seconds: float, folder: Path, every: float) -> Run:
    """Let processes work in an empty folder, kill some of them, and sample.

    `every` is the seconds between samples; a few of them pass between kills.
    """
    for name in ("store", "cache", "tmp", "logs", "counts", "files"):
        (folder / name).mkdir(mode=0o700)
    rng = random.Random(0)
    workers = [Worker(kind, folder, is_killed=dies) for kind in KINDS for dies in (False, True)]
    run = Run(0, [], {}, 0, {}, [])
    begin, n_kills = time.monotonic(), 0
    killed_at = begin + 2 * every
    try:
        while (now := time.monotonic()) < begin + seconds and not run.failures:
            _sample(run, now - begin, workers, folder)
            run.failures.extend(_failed(workers))
            if now > killed_at:
                victim = rng.choice([worker for worker in workers if worker.is_killed])
                victim.end(signal.SIGKILL)
                victim.start()
                n_kills += 1
                killed_at = now + rng.uniform(0.2, 3) * every
            time.sleep(every)
    finally:
        ended = [(worker, worker.end(signal.SIGTERM)) for worker in workers]
    # A worker that has just started cannot handle the signal yet.
    fine = 0, -signal.SIGTERM
    run.failures.extend(f"{worker.name} ended with {n}" for worker, n in ended if n not in fine)
    run.failures.extend(_left(folder))
    return run._replace(seconds=time.monotonic() - begin, n_kills=n_kills, counts=_counts(folder))


def _sample(run: Run, at: float, workers: Sequence[Worker], folder: Path) -> None:
    found = look_at_folders(folder)
    for worker in workers:
        if not worker.is_killed:
            mine = look_at(worker.process.pid)
            found |= {f"{worker.name}: {what}": value for what, value in mine.items()}
    if not run.series:
        run.series.update({name: [] for name in found})
    if set(found) == set(run.series):  # otherwise a worker has just ended
        run.times.append(at)
        for name, value in found.items():
            run.series[name].append(value)


def _failed(workers: Sequence[Worker]) -> list[str]:
    return [
        f"{worker.name} ended with {worker.process.returncode}: see its log"
        for worker in workers
        if worker.process.poll() is not None
    ]


def _left(folder: Path) -> list[str]:
    """List the remains of processes that are all gone."""
    for pid in children_of(folder):
        with suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 20
    while (pids := children_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [f"process {pid} is left" for pid in pids]


def _counts(folder: Path) -> dict[str, int]:
    total: dict[str, int] = {}
    for path in (folder / "counts").iterdir():
        with suppress(ValueError):  # its writer was killed
            for name, n in json.loads(path.read_text()).items():
                total[name] = total.get(name, 0) + n
    return dict(sorted(total.items()))


# ---- growth ----


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the median slope of all pairs of samples (Theil 1950, Sen 1968), per second.

    From long series, every n-th sample is used.
    """
    step = -(-len(times) // MOST_PAIRS)
    t, v = times[::step], values[::step]
    pairs = ((i, j) for i in range(len(t)) for j in range(i))
    slopes = [(v[i] - v[j]) / (t[i] - t[j]) for i, j in pairs if t[i] != t[j]]
    return median(slopes) if slopes else 0.0


class Growth(NamedTuple):
    """How a series developed after the warm-up."""

    name: str
    middle: float
    growth: float  # over the rest of the run, by the slope
    allowed: float

    @property
    def drifts(self) -> bool:
        """Whether it grew by more than chance."""
        return self.growth > self.allowed


def growths(run: Run) -> list[Growth]:
    """Return the growth of each series of a run."""
    first = next((i for i, at in enumerate(run.times) if at >= WARM_UP * run.seconds), 0)
    times, found = run.times[first:], []
    for name, all_values in run.series.items():
        values = all_values[first:]
        if len(values) < 2:
            continue
        slack = (SLACK | LEFT_SLACK)[name.rpartition(": ")[2]]
        middle = median(values)
        growth = slope(times, values) * (times[-1] - times[0])
        found.append(Growth(name, middle, growth, max(slack, SLACK_PART * middle)))
    return found


# ---- the page ----


def _shown(name: str, value: float) -> str:
    return f"{value / MIB:.1f} MiB" if name.endswith("_bytes") else f"{value:.0f}"


def lines(run: Run, found: Sequence[Growth], commit: str) -> Iterator[str]:
    """Write the text between the markers of the page."""
    yield "![What each process has, over the time of the run](soak/soak.svg)"
    yield ""
    done = ", ".join(f"{n:,} {name}" for name, n in run.counts.items())
    yield f"- {time.strftime('%Y-%m-%d', time.gmtime())}, commit {commit}: {run.seconds:,.0f} s,"
    yield f"  {len(run.times):,} samples, {run.n_kills:,} processes killed"
    yield f"- done: {done}"
    yield f"- failures: {'; '.join(run.failures) or 'none'}"
    yield f"- what grows: {', '.join(each.name for each in found if each.drifts) or 'nothing'}"
    yield ""
    yield "| series | middle | growth after the warm-up | allowed |"
    yield "|---|--:|--:|--:|"
    for each in found:
        figures = (each.middle, each.growth, each.allowed)
        yield f"| {each.name} | {' | '.join(_shown(each.name, n) for n in figures)} |"


def draw(run: Run, path: Path) -> None:
    """Draw the series, a panel for each kind."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "unimem"  # the same run gives the same picture
    from matplotlib import pyplot

    panels = [*SLACK, *LEFT_SLACK]
    figure, axes = pyplot.subplots(5, 2, figsize=(10, 12), sharex=True)
    step = -(-len(run.times) // MOST_PAIRS)
    minutes = [at / 60 for at in run.times][::step]
    for panel, axis in zip(panels, axes.flat, strict=True):
        scale = MIB if panel.endswith("_bytes") else 1
        axis.set_title(panel.replace("_bytes", ", MiB").replace("_", " "), fontsize=9)
        for name, values in run.series.items():
            if name.rpartition(": ")[2] == panel:
                label = name.rpartition(": ")[0] or None
                axis.plot(minutes, [value / scale for value in values[::step]], lw=0.8, label=label)
        axis.axvspan(0, WARM_UP * run.seconds / 60, color="0.93")
        axis.set_ylim(bottom=0)
    axes.flat[0].legend(fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("minutes")
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Run everything at once, and say what grows.")
    parser.add_argument("--seconds", type=float, default=7200)
    parser.add_argument("--every", type=float, default=2, help="seconds between samples")
    parser.add_argument("--folder", type=Path, help="where the processes work; a temporary one")
    parser.add_argument("--record", type=Path, help="where the samples are written, as JSON")
    parser.add_argument("--page", action="store_true", help="put the result into the page")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder, ignore_cleanup_errors=True) as name:
        run = soak(given.seconds, Path(name), given.every)
        if run.failures:
            for path in sorted(Path(name, "logs").iterdir()):
                print(f"{path.name}:", *path.read_text().splitlines()[-20:], sep="\n")
    found = growths(run)
    made = list(lines(run, found, short_commit()))
    print(*made[2:], sep="\n")
    if given.record is not None:
        given.record.write_text(json.dumps({"schema": SCHEMA, **run._asdict()}) + "\n")
    if given.page:
        draw(run, PAGE.parent / "soak/soak.svg")
        text = "\n".join(made)
        put(PAGE, BEGIN, f"\n\n{text}\n\n", END)
    return 1 if run.failures or any(each.drifts for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
