"""Names of a header cost little memory, however many a file has."""

from __future__ import annotations

import contextlib
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.files import gguf_files as gf
from support.files import safetensors_files as st
from unimem.cli.inspect import inspect
from unimem.weights.names import ByName
from unimem.weights.opened import open_weights

N = 5_000
WORDS = [f"{i:x}" for i in range(N)]


def test_a_mapping_by_names() -> None:
    names = ByName(3, "abc".__getitem__, lambda i, name: f"{name}{i}", "box's", "things")
    assert dict(names) == dict(names.items()) == {"a": "a0", "b": "b1", "c": "c2"}
    assert (list(names.values()), len(names), "b" in names) == (["a0", "b1", "c2"], 3, True)
    assert [name in names for name in ("d", "", 1, None)] == [False] * 4
    assert repr(names) == "<3 things of the box>"
    with pytest.raises(KeyError, match="'d' is none of the box's 3 things"):
        names["d"]
    assert ByName(0, "".__getitem__, lambda i, _: i) == {}


def test_names_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unimem.weights.names.hash", lambda _: 7, raising=False)
    names = ByName(3, "abc".__getitem__, lambda i, _: i)
    assert ([names[name] for name in "cab"], "d" in names) == ([2, 0, 1], False)


def gguf(entries: list[list[gf.Part]], tensors: list[list[gf.Part]]) -> bytes:
    head = gf.head(len(tensors), len(entries))
    return gf.with_data(head, *entries, *tensors, nbytes=32 * len(tensors))[0]


def strings(items: list[bytes]) -> bytes:
    array = gf.array(gf.STRING, len(items), *map(gf.string, items))
    return gguf([gf.kv("tokens", gf.ARRAY, array)], [])


CASES: dict[str, Callable[[], bytes]] = {
    "keys.gguf": lambda: gguf([gf.kv(word, gf.UINT8, b"\1") for word in WORDS[:4096]], []),
    "tensors.gguf": lambda: gguf(
        [], [gf.tensor(word, (), gf.F32, 32 * i) for i, word in enumerate(WORDS)]
    ),
    "tokens.gguf": lambda: strings([word.encode() for word in WORDS]),
    "tokens of other characters.gguf": lambda: strings(["a\U0001f600".encode()] * N),
    "tokens of wrong bytes.gguf": lambda: strings([b"\xff"] * N),
    "numbers.gguf": lambda: gguf(
        [gf.kv("numbers", gf.ARRAY, gf.array(gf.UINT8, 10 * N, bytes(10 * N)))], []
    ),
    "keys.safetensors": lambda: st.write({}, dict.fromkeys(WORDS, "")),
    "tensors.safetensors": lambda: st.write(dict.fromkeys(WORDS, ("I8", ()))),
    "dimensions.safetensors": lambda: st.write(dict.fromkeys(WORDS[:2000], ("I8", (1,) * 64))),
}


@pytest.mark.parametrize("options", [{"as_json": True}, {"tensors": True}], ids=" ".join)
@pytest.mark.parametrize("name", CASES)
def test_a_long_header_costs_at_most_ten_times_its_bytes(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(CASES[name]())
    with open_weights(path) as weights:  # what is imported and kept once does not count
        header = weights._parts[0].file.header.nbytes
        assert header > 40_000
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        tracemalloc.start()
        try:
            inspect(str(path), **options)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    # Python does not count the copy of the header, and its table of names, if it has one.
    assert peak < (8 if name.startswith("tokens") else 5) * header
