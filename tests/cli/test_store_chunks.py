"""`unimem store show`, `drop`, `verify`, `pin` and `unpin`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.project.documents import check_document

pytest.importorskip("typer", reason="the command line needs typer: pip install '.[run]'")

from support.files.llama_states import cells, state
from support.files.prefix_stores import CHUNK, MODEL, TOKENS, cache, files_of, needs_notes, opened
from support.models import make
from support.terminal.screens import show
from unimem.llama_cpp import write_slot_file

DAY = 86400


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with two conversations of one model, two chunks in common, and one of another."""
    needs_notes(tmp_path)
    with opened(tmp_path / "kv") as store, cache(4 * CHUNK) as kv:
        for model, tail in ((MODEL, 0), (MODEL, 1000), ("other", 0)):
            tokens = [token + tail * (i >= 2 * CHUNK) for i, token in enumerate(TOKENS[:32])]
            store.put(kv, tokens, model=model)
    return tmp_path / "kv"


def run(folder: Path, *words: object, code: int = 0) -> Any:
    found, out, err = show("store", *map(str, words), "--json", "--store", str(folder))
    assert (found, err) == (code, "")
    document = json.loads(out)
    check_document(document)
    assert document["action"] == words[0]
    return document


def ends(document: Any) -> dict[tuple[str, int, int], Any]:
    return {(each["model"], each["n_tokens"], each["n_branches"]): each for each in document}


def test_show_names_models_and_conversations(folder: Path) -> None:
    found = run(folder, "show")
    sizes = {model["model"]: (model["engine"], model["n_chunks"]) for model in found["models"]}
    assert sizes == {MODEL: ("unimem", 6), "other": ("unimem", 4)}
    assert {*ends(found["prefixes"])} == {(MODEL, 16, 2), (MODEL, 32, 0), ("other", 32, 0)}
    out = show("store", "show", "--store", str(folder))[1]
    assert f"unimem, {MODEL}, 6 chunks, " in out
    assert "  16 tokens, shared by 2, " in out
    assert "disk: 10 chunks, " in out


def test_a_pinned_conversation_stays(folder: Path) -> None:
    shared = ends(run(folder, "show")["prefixes"])[MODEL, 16, 2]["key"]
    assert run(folder, "pin", shared[:8], "--for", "30d")["n_chunks"] == 2
    found = ends(run(folder, "show")["prefixes"])[MODEL, 16, 2]
    assert found["pinned"]
    assert 29 * DAY < found["pinned_until"] - time.time() <= 30 * DAY
    done = run(folder, "drop", "all")
    assert (done["n_chunks"], done["n_kept"], len(files_of(folder))) == (8, 2, 2)
    text = show("store", "show", "--store", str(folder))[1]
    assert "pinned until 2" in text
    assert "8 hits" not in text
    assert run(folder, "unpin", "all")["n_chunks"] == 2
    assert run(folder, "pin", shared[:8])["prefixes"][0]["pinned_until"] is None
    assert (
        "2 chunks, 16.0 KiB unpinned\n" in show("store", "unpin", "all", "--store", str(folder))[1]
    )
    assert run(folder, "drop", "all")["prefixes"] == []
    assert files_of(folder) == []


@pytest.mark.parametrize(("time", "is_pinned"), [("0s", False), ("99999d", True)])
def test_the_ends_of_pins_are_as_asked_for(folder: Path, time: str, is_pinned: bool) -> None:
    assert run(folder, "pin", "all", "--for", time)["n_chunks"] == 10
    assert {each["pinned"] for each in run(folder, "show")["prefixes"]} == {is_pinned}


def test_drop_takes_what_no_other_conversation_needs(folder: Path) -> None:
    found = run(folder, "show")["prefixes"]
    one = next(each["key"] for each in found if (each["model"], each["n_tokens"]) == (MODEL, 32))
    done = run(folder, "drop", one)
    assert done["n_chunks"] == 2
    assert {*ends(done["prefixes"])} == {(MODEL, 32, 0), ("other", 32, 0)}


def test_drop_takes_what_was_not_used(folder: Path) -> None:
    old = time.time() - 31 * DAY
    for path in files_of(folder)[:3]:
        os.utime(path, (old, old))
    assert run(folder, "drop", "--unused", "40d")["n_chunks"] == 0
    assert run(folder, "drop", "--unused", "30d")["n_chunks"] == 3
    assert len(files_of(folder)) == 7


def test_an_empty_file_is_dropped_as_well(folder: Path) -> None:
    (folder / f"{'0' * 64}.kv").touch()
    dropped = run(folder, "drop", "all")
    assert (dropped["n_chunks"], dropped["n_kept"]) == (11, 0)


def test_verify_names_each_damaged_chunk(folder: Path) -> None:
    assert run(folder, "verify")["n_chunks"] == 10
    assert run(folder, "verify", "--disk-bytes", "8K")["damaged"] == []  # less than a chunk has
    damaged = files_of(folder)[:3]
    for path in damaged[:2]:
        with open(path, "r+b") as file:
            file.seek(5000)
            file.write(b"\xa5\xa5\xa5\xa5")
    with open(damaged[2], "r+b") as file:
        file.truncate(1 << 40)  # without a block of the disk
    found = run(folder, "verify", code=1)["damaged"]
    assert [each["key"] for each in found if f"it has {1 << 40} b" in each["fault"]] == [
        damaged[2].stem
    ]
    assert sorted(each["key"] for each in found) == [path.stem for path in damaged]
    code, out, _ = show("store", "verify", "--store", str(folder))
    assert (code, out.count("damaged: ")) == (1, 3)
    assert ", 3 damaged\n" in out
    run(folder, "verify", "--drop", code=1)
    assert run(folder, "verify")["n_chunks"] == 7


def test_keys_of_llama_cpp_s_prefixes_are_known(tmp_path: Path) -> None:
    needs_notes(tmp_path)
    model = make.write_model(tmp_path / "m.gguf", shape=make.TINY)
    slot, where = tmp_path / "slot", tmp_path / "kv"
    options = ("--store", str(where), "--chunk-tokens", "16", "--model", str(model))
    for last in (42, 43):
        ids = np.array([*range(3, 42), last], np.int32)
        ids[20:] += last
        write_slot_file(slot, ids, state(cells(40)))
        assert show("store", "import", str(slot), *options)[0] == 0
    keys = [
        each["key"] for each in json.loads(show("store", "list", "--json", *options)[1])["prefixes"]
    ]
    found = run(where, "pin", keys[0], "--model", model)
    assert (found["n_chunks"], found["models"][0]["engine"]) == (2, "llama.cpp")
    run(where, "unpin", keys[0])
    assert run(where, "drop", keys[0])["n_chunks"] == 1  # the other one has the first chunk, too
    with opened(where, chunk_tokens=16) as store, cache(16) as kv:
        store.put(kv, TOKENS[:16], model=MODEL)
    assert run(where, "verify")["n_chunks"] == 3
    for word in ("verify", "drop"):
        assert run(where, word, *["all"] * (word == "drop"), "--model", model)["n_chunks"] == 2


@pytest.mark.parametrize(
    ("words", "code", "match"),
    [
        (("show", "key"), 2, "expected nothing behind it"),
        (("drop",), 2, "expected KEY, all or --unused behind it"),
        (("drop", "all", "--unused", "3d"), 2, "expected KEY, all or --unused behind it"),
        (("pin",), 2, "expected KEY or all behind it"),
        (("pin", "all", "--for", "3 weeks"), 2, "expected a time, as 30d, 12h, 90m or 10s"),
        (("unpin", "all", "--for", "3d"), 2, "--for is for pin"),
        (("pin", "all", "--unused", "3d"), 2, "--unused is for drop"),
        (("show", "--drop"), 2, "--drop is for verify"),
        (("pin", "ffffffffff"), 1, "expected all, or the beginning of one key"),
        (("drop", "a"), 1, "at least 4 digits"),
    ],
)
def test_wrong_usage(folder: Path, words: tuple[str, ...], code: int, match: str) -> None:
    found, _, err = show("store", *words, "--store", str(folder))
    assert found == code
    assert match in " ".join(err.split())


def test_a_folder_that_is_missing_is_not_made(tmp_path: Path) -> None:
    code, _, err = show("store", "show", "--store", str(tmp_path / "none"))
    assert code == 1
    assert "expected the folder of a store" in err
    assert not (tmp_path / "none").exists()
