"""Tables of the pool with wrong numbers: chunks are missed, or an OSError says what to do."""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.files.prefix_stores import CHUNK, MODEL, TOKENS, bytes_of, cache, opened, shm
from support.project.tiers import examples
from unimem.kv.store import ram_tier

__all__ = ["shm"]  # a fixture

EDGES = [0, 1, 2, 4095, 4096, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
HEAD = list(ram_tier._HEAD.names or ())
RECORD = ["generation", "first", "count", "nbytes"]
CHANGE = st.tuples(st.sampled_from([*HEAD, *RECORD, "used"]), st.sampled_from(EDGES))


def change(path: Path, changes: list[tuple[str, int]]) -> None:
    """Overwrite numbers of the table, and those of all its chunks."""
    table = np.memmap(path, np.uint8)
    head = table[: ram_tier._HEAD.itemsize].view(ram_tier._HEAD)
    n_units = int(head["n_units"][0])
    used = table[ram_tier._PAGE_BYTES + 8 * n_units :][: 8 * n_units].view(np.uint64)
    records = table[ram_tier._PAGE_BYTES + 16 * n_units :][: ram_tier._RECORD.itemsize * n_units]
    taken = records.view(ram_tier._RECORD)
    for name, value in changes:
        target = used if name == "used" else head[name] if name in HEAD else taken[name]
        target[:] = value % 256**target.itemsize


def test_no_table_gives_other_rows(tmp_path: Path, shm: Path) -> None:
    tokens, other = TOKENS[: 2 * CHUNK], [7, *TOKENS[1 : 2 * CHUNK]]
    ram = {"ram_bytes": 1 << 20, "disk_bytes": 0}

    @settings(max_examples=examples(200))
    @example([("unit_bytes", 0)])
    @example([("n_units", 0)])
    @example([("first", 2**32 - 1)])
    @given(st.lists(CHANGE, min_size=1, max_size=3))
    def search(changes: list[tuple[str, int]]) -> None:
        with (
            warnings.catch_warnings(),
            opened(tmp_path / "s", **ram) as store,
            cache(45) as kv,
            cache() as out,
        ):
            warnings.simplefilter("ignore")  # that chunks were removed
            assert store.put(kv, tokens, model=MODEL) == len(tokens)
            (folder,) = shm.iterdir()
            change(folder / "table", changes)
            with suppress(OSError), opened(tmp_path / "s", **ram) as again:
                assert again.put(kv, other, model=MODEL) in (0, CHUNK, 2 * CHUNK)
                n = again.restore_into(out, tokens, model=MODEL)
                assert bytes_of(out, n) == bytes_of(kv, n)
                out.clear()
            assert store.put(kv, other, model=MODEL) in (0, CHUNK, 2 * CHUNK)
            for wanted in (tokens, other):
                n = store.restore_into(out, wanted, model=MODEL)
                assert bytes_of(out, n) == bytes_of(kv, n)
                out.clear()
            store.stat()
            store.give_back()
        assert list(shm.iterdir()) == []

    search()
