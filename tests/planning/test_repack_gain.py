"""Models that gain by repacking, and what their plans say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import unimem as um
from support.models.make import write_model
from unimem.backends.ggml_orders import find_order
from unimem.planning import repack_gain
from unimem.planning.repack_gain import RepackedPart, find_gain, reason_of

MIB = 1 << 20


def contents(nbytes: int, *, in_memory: bool = False) -> Any:
    parts = (SimpleNamespace(file=SimpleNamespace(in_memory=in_memory)),)
    return SimpleNamespace(nbytes=nbytes, _parts=parts)


def arrangement(source_bytes: int) -> Any:
    order = SimpleNamespace(buffer_type=SimpleNamespace(name="CPU_REPACK"))
    return SimpleNamespace(source_bytes=source_bytes, slots=[SimpleNamespace(order=order)] * 2)


@pytest.mark.parametrize(("nbytes", "in_memory", "source_bytes", "gains"), [
    (100 * MIB, False, 60 * MIB, True),
    (100 * MIB, False, 49 * MIB, False),  # less than half
    (40 * MIB, False, 31 * MIB, False),  # little
    (31 * MIB, False, 31 * MIB, False),
    (100 * MIB, True, 60 * MIB, False),  # each process would have a copy
])  # fmt: skip
def test_large_models_of_repackable_types_gain(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, in_memory: bool, source_bytes: int, gains: bool
) -> None:
    monkeypatch.setattr(repack_gain, "arrange", lambda _: arrangement(source_bytes))
    assert (find_gain(contents(nbytes, in_memory=in_memory)) is not None) == gains


def test_without_ggml_nothing_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    def arrange(_: Any) -> Any:
        raise ImportError("ggml")

    monkeypatch.setattr(repack_gain, "arrange", arrange)
    assert find_gain(contents(100 * MIB)) is None


@pytest.mark.skipif(find_order(2, (256, 64)) is None, reason="this CPU has no order for q4_0")
def test_only_this_machines_cpu_repacks_unasked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither another machine's CPU is known, nor does llama.cpp repack as we do."""
    monkeypatch.setattr(repack_gain, "_LEAST_BYTES", 0)
    model = write_model(tmp_path / "q4_0.gguf", kind="q4_0")
    assert um.plan(model, ctx=64).load == "repack"
    assert um.plan(model, ctx=64, machine={"memory": "64G"}).load == "map"
    assert um.plan(model, ctx=64, engine="llama.cpp").load != "repack"


def test_the_reason_names_the_share_and_an_image() -> None:
    found = arrangement(60 * MIB)
    why = reason_of(found, 100 * MIB)
    assert why.startswith("60.0 MiB of 100.0 MiB are of types")
    assert why.endswith("(CPU_REPACK)")
    assert RepackedPart(found, None, is_read=True).reason(why) == why
    image: Any = SimpleNamespace(is_staged=False)
    assert RepackedPart(found, image, is_read=True).reason(why) == (
        f"{why}; a repacked image of it is in the cache"
    )
