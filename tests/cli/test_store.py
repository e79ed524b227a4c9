"""`unimem store`: listing prefixes, and slot files in and out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.project.documents import check_document

pytest.importorskip("typer", reason="the command line needs typer: pip install '.[run]'")

from support.files.llama_states import cells, recurrent, same, state
from support.models import make
from support.terminal.screens import show
from unimem.llama_cpp import read_slot_file, write_slot_file

IDS = np.arange(3, 43, dtype=np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.write_model(tmp_path_factory.mktemp("model") / "m.gguf", shape=make.TINY)


def run(folder: Path, *words: object, model: Path | None = None) -> tuple[int, str, str]:
    more = [] if model is None else ["--model", str(model)]
    words = ("store", "--chunk-tokens", 16, "--store", folder / "kv", *words, *more)
    return show(*map(str, words))


def listed(folder: Path, model: Path | None = None) -> Any:
    code, out, err = run(folder, "list", "--json", model=model)
    assert (code, err) == (0, "")
    found = json.loads(out)
    check_document(found)
    return found["prefixes"]


@pytest.mark.parametrize(
    ("kv", "n"), [(state(cells(40)), 32), (state(cells(40), recurrent(40)), 40)]
)
def test_a_slot_file_goes_in_and_out(tmp_path: Path, model: Path, kv: Any, n: int) -> None:
    slot, out = tmp_path / "slot", tmp_path / "out"
    write_slot_file(slot, IDS, kv)
    assert listed(tmp_path) == []
    assert run(tmp_path, "import", slot, model=model) == (
        *(0, f"{slot}: {n} of 40 tokens stored\n", ""),
    )
    (found,) = listed(tmp_path, model)
    assert found["n_tokens"] == n
    assert "text" in found
    key = found["key"][:8]
    code, text, err = run(tmp_path, "export", key, out, "--streams", 3, model=model)
    assert (code, text, err) == (0, f"{out}: {n} tokens\n", "")
    written = read_slot_file(out)
    assert written.tokens.tolist() == IDS[:n].tolist()
    assert written.kv.n_streams == 3
    whole = kv.parts[0].take(0, n)
    assert same(written.kv.parts, (whole, *kv.parts[1:]))
    shown = run(tmp_path, "list")[1]
    assert f"{found['key'][:16]}  {n} tokens, " in shown
    assert "disk: " in shown


def test_another_model_s_prefixes_are_not_there(tmp_path: Path, model: Path) -> None:
    slot, other = tmp_path / "slot", tmp_path / "other.gguf"
    write_slot_file(slot, IDS, state(cells(40)))
    make.write_model(other, shape=make.TINY, seed=1)
    run(tmp_path, "import", slot, model=model)
    (found,) = listed(tmp_path)
    assert listed(tmp_path, other) == []
    code, _, err = run(tmp_path, "export", found["key"], tmp_path / "out", model=other)
    assert code == 1
    assert "expected the beginning of one key of this model" in err


def test_a_tenant_s_slot_file_needs_its_salt(tmp_path: Path, model: Path) -> None:
    slot, secret, out = (tmp_path / name for name in ("slot", "secret", "out"))
    write_slot_file(slot, IDS, state(cells(40)))
    secret.write_text("the secret of A\n")
    assert run(tmp_path, "import", slot, "--salt-file", secret, model=model)[0] == 0
    (found,) = listed(tmp_path, model)
    words = ("export", found["key"], out)
    code, _, err = run(tmp_path, *words, model=model)
    assert (code, out.exists()) == (1, False)
    assert "a chunk of this prefix is damaged, was removed meanwhile, or has another salt" in err
    assert run(tmp_path, *words, "--salt-file", secret, model=model)[0] == 0
    assert read_slot_file(out).tokens.tolist() == IDS[:32].tolist()


def test_chunks_of_another_size_are_listed_as_they_are(tmp_path: Path, model: Path) -> None:
    slot, out = tmp_path / "slot", tmp_path / "out"
    write_slot_file(slot, IDS, state(cells(40)))
    run(tmp_path, "import", slot, model=model)
    for size in (8, 32):
        options = ("--chunk-tokens", str(size), "--store", str(tmp_path / "kv"))
        found = json.loads(show("store", "list", "--json", *options)[1])["prefixes"]
        assert found == listed(tmp_path)
        words = ("export", found[0]["key"], str(out), *options, "--model", str(model))
        code, _, err = show("store", *words)
        assert (code, out.exists()) == (1, False)
        assert f"expected --chunk-tokens 16, as it was stored with, got {size}" in err


@pytest.mark.parametrize(
    ("words", "code", "match"),
    [
        (("import", "slot"), 2, "expected --model"),
        (("export", "key", "out"), 2, "expected --model"),
        (("list", "key"), 2, "expected nothing behind it"),
        (("import", "--model", "MODEL"), 2, "expected slot files behind it"),
        (("export", "key", "--model", "MODEL"), 2, "expected KEY and FILE behind it"),
        (("import", "MODEL", "--model", "MODEL"), 1, "this is no slot file of llama.cpp"),
        (("import", "missing", "--model", "MODEL"), 1, "No such file"),
        (("import", "MODEL", "--model", "missing"), 1, "No such file"),
        (("list", "--streams", "0"), 2, "--streams': expected a whole number from 1 to 1024"),
        (("list", "--chunk-tokens", "0"), 2, "--chunk-tokens': expected a whole number from 1 to"),
        (("list", "--chunk-tokens", "-5"), 2, "got '-5'"),
        (("list", "--disk-bytes", "0"), 2, "--disk-bytes: expected more than 0 for a folder"),
        (("list", "--disk-bytes", "-1"), 2, "--disk-bytes': expected a whole number from 0 to"),
        (("list", "--disk-bytes", "many"), 2, "--disk-bytes"),
        (("list", "--salt-file", "MODEL"), 2, "--salt-file': expected a file with a text in UTF-8"),
        (("list", "--salt-file", "missing"), 2, "expected a file with a text in UTF-8"),
        (("list", "--salt-file", "/dev/null"), 2, "expected a text of 1 to 4096 characters"),
        (("list", "--salt-file", "/proc/version"), 2, "--salt-file is for import and export"),
        (("list", "--model", "s3://b/m.gguf"), 2, "expected a file of this machine, got 's3://b/m"),
        (("list", "--options", "rope"), 2, "--options is for import"),
        (("import", "slot", "--model", "MODEL", "--streams", "4"), 2, "--streams is for export"),
        (("import", "slot", "--model", "MODEL", "--json"), 2, "--json is for list and show"),
    ],
)
def test_wrong_usage(
    tmp_path: Path, model: Path, words: tuple[str, ...], code: int, match: str
) -> None:
    found, _, err = run(tmp_path, *(str(model) if word == "MODEL" else word for word in words))
    assert found == code
    assert match in " ".join(err.split())


def test_a_store_is_named(tmp_path: Path) -> None:
    assert "expected --store" in show("store", "list")[2]
