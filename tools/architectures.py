"""What `unimem.transformers.KVCache` does for today's architectures, as a table of its page.

    python tools/architectures.py [--packages FOLDER] [NAME...]

Tiny models with random weights generate with drafts, with beams, and after a crop, with each kind
of attention; their tokens and logits are compared with those of no cache. ``--packages`` has
another version of transformers. It takes 2 minutes, ends with 1 if a result is wrong or an error
is no sentence, and with names it writes nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections import defaultdict
from datetime import date
from pathlib import Path
from textwrap import fill
from typing import Any

from recorded import put

ROOT = Path(__file__).parents[1]
PAGE, RECORD = ROOT / "docs/transformers.md", ROOT / "bench/results/architectures.json"
BEGIN, END = "<!-- architectures: tools/architectures.py -->\n", "<!-- /architectures -->"
ATTENTIONS, WAYS = ("eager", "sdpa", "unimem"), ("assisted", "beams", "crop")

Cells = dict[str, list[str]]  # "eager assisted": ["refused", "unimem", "why"]


def text(record: dict[str, Any]) -> str:
    """Return the table of a record, whose rows are the architectures with equal cells."""
    found: dict[str, Cells] = record["architectures"]
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, cells in found.items():
        rows[tuple(_equal(cells, attention) for attention in ATTENTIONS)].append(name)
    served = {name for cells, names in rows.items() if set(cells) != {"-"} for name in names}
    whole = rows[("all",) * 3]
    why: dict[str, set[str]] = defaultdict(set)
    for name, cells in found.items():
        for result, by, sentence in cells.values():
            if result == "refused":
                why[f"{by}: {_short(sentence)}"].add(name)
    versions = " and ".join(f"{name} {version}" for name, version in record["versions"].items())
    summary = (
        f"{len(found)} architectures, {versions}, {record['date']}: {len(served)} are served, "
        f"{len(whole)} of them in all nine cells. A cell of the table names what was equal. "
        "Everything else was refused by a sentence; how these begin is below, with the number of "
        "architectures."
    )
    lines = [
        fill(summary, 100),
        "",
        "| eager | sdpa | unimem | architectures |",
        "|---|---|---|---|",
        *(
            f"| {' | '.join(cells)} | {', '.join(names)} |"
            for cells, names in sorted(rows.items(), key=lambda row: -len(row[1]))
        ),
        "",
        *(f"- {sentence} ({len(names)})" for sentence, names in sorted(why.items())),
        "",
    ]
    return "\n".join(lines)


def _equal(cells: Cells, attention: str) -> str:
    equal = [way for way in WAYS if cells[f"{attention} {way}"][0] == "equal"]
    return "all" if len(equal) == len(WAYS) else ", ".join(equal) or "-"


def _short(sentence: str) -> str:
    """Return the beginning of a sentence, without the names of models."""
    sentence = re.sub(r"\b\w+For(CausalLM|ConditionalGeneration)\b", "MODEL", sentence)
    sentence = re.sub(r"(, and )\w+( has)", r"\1MODEL\2", sentence)
    begin = re.match(
        r"(\w+: (?:KVCache[^:]*: |attention 'unimem': )?.*?)(?:[;:.,] |[.]?$)", sentence
    )
    assert begin is not None
    return f"`{begin[1].replace('`', '')}`"


def main() -> int:
    """Try the architectures, and write the record and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="some architectures; all")
    parser.add_argument("--packages", type=Path, help="a folder with transformers")
    given = parser.parse_args()
    sys.path[:0] = [str(ROOT / "tests")]
    if given.packages is not None:
        sys.path.insert(0, str(given.packages))
    warnings.simplefilter("ignore")
    import torch
    import transformers

    from support.models import architecture_table

    transformers.logging.set_verbosity_error()
    found: dict[str, Cells] = {}
    for name in given.names or architecture_table.NAMES:
        cells = architecture_table.cells(name)
        found[name] = {key: list(cell) for key, cell in cells.items()}
        print(name, *(f"{key}: {' '.join(cell)}" for key, cell in cells.items()), sep="\n  ")
    failed = [
        name for name in found for cell in found[name].values() if cell[0] in ("wrong", "died")
    ]
    if not given.names:
        record = {
            "command": "python tools/architectures.py",
            "date": f"{date.today()}",
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "architectures": found,
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        put(PAGE, BEGIN, text(record), END)
    print("failed:", *sorted(set(failed)) or ["none"])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
