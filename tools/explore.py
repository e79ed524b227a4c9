"""Run the searches of the tests with random examples, round after round.

The first round that fails ends it, after pytest has printed the example and the decorator
``@reproduce_failure`` that repeats it.
"""

from __future__ import annotations

import argparse
import secrets
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def explore(seconds: float, tests: list[str]) -> int:
    """Run rounds until the time is over or one fails; return that one's exit status."""
    end = time.monotonic() + seconds
    n_rounds = 0
    while n_rounds == 0 or time.monotonic() < end:
        seed = secrets.randbelow(2**32)
        print(f"round {n_rounds + 1}, seed {seed}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--explore"]
        command += ["-m", "hypothesis", f"--hypothesis-seed={seed}", *tests]
        if status := subprocess.run(command, cwd=ROOT, check=False).returncode:
            return status
        n_rounds += 1
    print(f"{n_rounds} rounds, and nothing was found")
    return 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Search with random examples.")
    parser.add_argument("--seconds", type=float, default=600, help="begin no round after this")
    parser.add_argument("tests", nargs="*", default=["tests"], help="as pytest takes them")
    arguments = parser.parse_args()
    return explore(arguments.seconds, arguments.tests)


if __name__ == "__main__":
    sys.exit(main())
