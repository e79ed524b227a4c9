"""One pass of one suite, in a process of its own.

``python -m unimem_bench.worker SUITE`` runs the cases of a suite, and writes the record of each as
a line of JSON when it is done, after a line with the machine's conditions. Libraries' own output
goes to standard error.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unimem_bench.questions import QUESTIONS
from unimem_bench.record import CaseRecord
from unimem_bench.suite import Case, Measure, NotMeasured
from unimem_bench.suites import NAMES, load_suite

# What pyperf knows of the moment and `unimem.doctor` does not.
_CONDITIONS = ("aslr", "cpu_config", "cpu_freq", "cpu_temp", "load_avg_1min", "runnable_threads")

TIME_IS_UP = "the time of its suite was up in a quick run of all; alone, the suite takes more"
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the suite that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m unimem_bench.worker", description=__doc__)
    parser.add_argument("suite", choices=NAMES)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case", default="", metavar="TEXT", help="cases whose name has it")
    parser.add_argument("--dir", type=Path, required=True, help="for files that all passes use")
    parser.add_argument("--until", type=float, default=math.inf, help="when the time is up")
    options = parser.parse_args(arguments)
    # The output of a library in C would mix with the records.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        out.write(json.dumps(conditions()) + "\n")
        out.flush()
        cases = load_suite(options.suite).chosen(quick=options.quick, case=options.case)
        cases = cases if options.until == math.inf else asked_first(cases)
        for i, case in enumerate(cases):
            until = share_end(options.until, len(cases) - i)
            late = (
                i > 0 and time.monotonic() > until
            )  # the first is measured also on a slow machine
            record = measure(case, quick=options.quick, folder=options.dir, until=until, late=late)
            out.write(json.dumps(asdict(record)) + "\n")
            out.flush()
    return 0


def asked_first(cases: Sequence[Case]) -> list[Case]:
    """Put what answers a question of the page first: the time may be up before the last cases."""
    asked = {question.case for question in QUESTIONS}
    return sorted(cases, key=lambda case: f"{case.suite}/{case.name}" not in asked)


def share_end(until: float, n: int) -> float:
    """Return when the first of `n` cases has had its share of the time until then."""
    now = time.monotonic()
    return now + (until - now) / n


def measure(
    case: Case, *, quick: bool, folder: Path, until: float = math.inf, late: bool = False
) -> CaseRecord:
    """Run a case pinned to one CPU; return its record, with the reason if it is incomplete.

    Where time is limited, nothing is built; a case that is too `late` does not begin.
    """
    given = Measure(case, quick=quick, folder=folder, builds=until == math.inf, until=until)
    try:
        if late:
            raise NotMeasured(TIME_IS_UP)
        given.pin(1)
        case.run(given)
    except NotMeasured as reason:
        return given.record(str(reason))
    except Exception as error:  # any: other cases are still measured
        return given.record(f"{type(error).__name__}: {error}", is_error=True)
    return given.record()


def conditions() -> dict[str, Any]:
    """Return CPU frequencies, temperature and load from pyperf; {} if it is not installed."""
    try:
        import pyperf
    except ImportError:
        return {}
    # A run needs one value at least.
    found = pyperf.Run([1.0], collect_metadata=True).get_metadata()
    return {name: found[name] for name in _CONDITIONS if name in found}


if __name__ == "__main__":
    # SIGTERM ends a run in order: processes end, huge pages go back, files are deleted.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # The kernel sends it if the run itself was killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of the records is gone
        raise SystemExit(1) from None
