"""Plans of a model with a projector, a draft model, or layers of its own that predict tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.models.printed_caches import RECORD, write

MIB = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    one = RECORD["files"]["qwen35 predicts"]
    return write(tmp_path / "model.gguf", one["arch"], one["values"])


def rows(path: Path, **options: Any) -> dict[str, int]:
    plan = um.plan(path, ctx=32768, engine="llama.cpp", **options)
    return {row.category: row.nbytes for row in plan.rows}


def test_a_draft_has_weights_and_a_cache_of_as_many_cells(model: Path, tmp_path: Path) -> None:
    one = RECORD["files"]["llama"]
    draft = write(tmp_path / "draft.gguf", one["arch"], one["values"])
    alone, both = rows(model), rows(model, draft=draft, slots="4:divided")
    assert both["kv:draft"] == rows(draft, slots="4:divided")["kv"] == 128 * MIB
    assert both["weights:draft"] == -(-draft.stat().st_size // 4096) * 4096
    assert both["logits"] == 4 * (alone["logits"] + rows(draft)["logits"])
    assert {name: n for name, n in rows(model, slots="4:divided").items() if name == "kv"} == {
        "kv": both["kv"]
    }
    # Each process has its own, and the mapped weights are one.
    twice = rows(model, draft=draft, slots="4:divided", sessions=2)
    assert twice["kv:draft"] == 2 * both["kv:draft"]
    assert twice["weights:draft"] == both["weights:draft"]


def test_own_layers_are_a_draft_and_keep_earlier_states(model: Path) -> None:
    alone, both = rows(model), rows(model, draft="mtp")
    assert both["kv:draft"] == 16 * MIB
    assert "weights:draft" not in both
    # Of one layer of eight, and of six layers' states, three more of each.
    state = 6 * 4 * (3 * (2048 + 2 * 4 * 128) + 2048 * 128)
    assert both["kv"] - alone["kv"] == 3 * state


def test_a_draft_that_reads_states_makes_the_model_keep_them(model: Path, tmp_path: Path) -> None:
    one = RECORD["files"]["dflash"]
    draft = write(tmp_path / "draft.gguf", one["arch"], one["values"])
    assert rows(model, draft=draft)["kv"] == rows(model, draft="mtp")["kv"]


def test_a_projector_is_read_by_each_process(model: Path, tmp_path: Path) -> None:
    projector = write(tmp_path / "mmproj.gguf", "clip", {"vocab_size": 4})
    with um.open_weights(projector) as weights:
        nbytes = weights.nbytes
    assert rows(model, mmproj=projector)["weights:projector"] == nbytes
    plan = um.plan(model, ctx=512, mmproj=projector, sessions=3)
    assert plan["weights:projector"].nbytes == 3 * nbytes
    # It is no file that the kernel could drop.
    alone = um.plan(model, ctx=512, sessions=3)
    assert plan.required_bytes - alone.required_bytes == 3 * nbytes
    assert (plan.verdict, plan.engine) == ("fits", "llama.cpp")


def test_a_draft_of_an_unknown_architecture_is_not_counted(model: Path, tmp_path: Path) -> None:
    draft = write(tmp_path / "draft.gguf", "new", RECORD["files"]["llama"]["values"])
    plan = um.plan(model, ctx=512, draft=draft)
    assert (plan.verdict, plan.fits, plan.is_counted) == ("at least", None, False)
    assert any("'new' is an architecture" in text for text in plan.unknown)


def test_what_is_no_draft_is_refused(model: Path, tmp_path: Path) -> None:
    one = RECORD["files"]["llama"]
    plain = write(tmp_path / "plain.gguf", one["arch"], one["values"])
    with pytest.raises(ValueError, match="draft='mtp': the model has no layers that predict"):
        um.plan(plain, draft="mtp")
    with pytest.raises(FileNotFoundError):
        um.plan(model, mmproj=tmp_path / "no.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(um.GGUFError):
        um.plan(model, draft=tmp_path / "bad.gguf")
