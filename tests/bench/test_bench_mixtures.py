"""Mixtures to measure with: their files, their routing, and the small one that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.project import tiers
from unimem_bench import mixtures, trained_mixture
from unimem_bench.mixtures import write_mixture
from unimem_bench.models import ModelShape
from unimem_bench.suite import NotMeasured
from unimem_bench.trained_mixture import TRAINED

pytest.importorskip("gguf", reason="gguf writes the models")

SMALL = ModelShape(
    hidden=256, layers=2, heads=4, kv_heads=1, inner=64, vocab=512, ctx=64, head_dim=64,
    experts=16, used=4,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixtures, "QUICK_SHAPE", SMALL)


def values(raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the values of Q4_0 blocks."""
    from gguf import quants
    from gguf.constants import GGMLQuantizationType

    return np.asarray(quants.dequantize(raw, GGMLQuantizationType.Q4_0))


def test_the_experts_of_a_file(tmp_path: Path) -> None:
    found = write_mixture(tmp_path, "uniform", quick=True)
    with um.open_weights(found.path) as weights:
        experts = [t.nbytes for name, t in weights.tensors.items() if name.endswith("exps.weight")]
        assert sum(experts) == found.expert_bytes
        assert len(experts) == 3 * SMALL.layers
        down = values(weights.tensors["blk.0.ffn_down_exps.weight"].as_array())
    # With another mean, hidden states would look alike.
    assert abs(float(down.mean())) < 0.02 * float(down.std())
    assert write_mixture(tmp_path, "uniform", quick=True).path == found.path
    assert found.tokens.min() >= 300
    assert found.tokens.max() < SMALL.vocab


def test_what_skews_a_routing(tmp_path: Path) -> None:
    found = write_mixture(tmp_path, "skewed", quick=True)
    with um.open_weights(found.path) as weights:
        embedding = values(weights.tensors["token_embd.weight"].as_array())
        router = weights.tensors["blk.1.ffn_gate_inp.weight"].as_array()
        down = values(weights.tensors["blk.1.ffn_down_exps.weight"].as_array())
        norm = weights.tensors["blk.1.ffn_norm.weight"].as_array()
        assert (embedding[:, :32] == 1).all()
        assert np.unique(embedding[:, 32:]).size > 10
        preferred = np.sort(router[:, :32].sum(1))[::-1]
        wanted = -mixtures.ZIPF * np.log(np.arange(1, SMALL.experts + 1))
        np.testing.assert_allclose(preferred, wanted, atol=1e-5)
        assert (norm[:32] == 1).all()
        assert (down[:, :32] == 0).all()
        assert (down[:, 32:] != 0).any()


def test_a_small_mixture_fills_a_corner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)

    def array(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape, np.float32)

    small = {
        "tokens": np.arange(300, 400),
        "blk.0.attn_norm": array(64),
        "blk.0.attn_q_norm": array(64),
        "blk.0.attn_q": array(128, 64),
        "blk.0.ffn_gate_inp": array(16, 64),
        "blk.0.ffn_down_exps": array(16, 64, 32),
    }
    monkeypatch.setattr(mixtures, "trained_mixture", lambda folder, quick: small)
    found = write_mixture(tmp_path, "trained", quick=True)
    assert found.tokens.tolist() == list(range(300, 400))
    with um.open_weights(found.path) as weights:

        def tensor(name: str) -> Any:
            return weights.tensors[f"{name}.weight"].as_array()

        # The norm of 64 values beside 192 zeros is that of half of their squares' mean root.
        np.testing.assert_allclose(tensor("blk.0.attn_norm")[:64], small["blk.0.attn_norm"] / 2)
        np.testing.assert_array_equal(tensor("blk.0.attn_q_norm"), small["blk.0.attn_q_norm"])
        router = tensor("blk.0.ffn_gate_inp")
        np.testing.assert_array_equal(router[:, :64], small["blk.0.ffn_gate_inp"])
        assert not router[:, 64:].any()
        for name, size in (("blk.0.attn_q", (128, 64)), ("blk.0.ffn_down_exps", (16, 64, 32))):
            whole = values(tensor(name))
            corner = tuple(map(slice, size))
            np.testing.assert_allclose(whole[corner], small[name], atol=0.4)
            whole[corner] = 0
            assert not whole.any()
        assert values(tensor("blk.1.attn_q"))[:, -32:].any()  # what is not in it stays random


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="routing: expected one of"):
        write_mixture(tmp_path, "even")  # type: ignore[arg-type]
    monkeypatch.setattr(trained_mixture, "ROOT", tmp_path)
    with pytest.raises(NotMeasured, match="wants unimem's repository"):
        trained_mixture._tokens()
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(NotMeasured, match="wants torch"):
        write_mixture(tmp_path, "trained", quick=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not tiers.everything, reason="importing torch is slow")
def test_a_small_mixture_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(trained_mixture, "QUICK_STEPS", 2)
    monkeypatch.setattr(trained_mixture, "WINDOW", 32)
    text = np.random.default_rng(1).integers(0, TRAINED.vocab, trained_mixture.HELD_OUT + 999)
    monkeypatch.setattr(trained_mixture, "_tokens", lambda: text)
    found = trained_mixture.trained_mixture(tmp_path, quick=True)
    experts = found["experts"]
    assert experts.shape == (2048, TRAINED.layers, TRAINED.used)
    assert (np.diff(np.sort(experts, -1)) > 0).all()
    assert experts.max() < TRAINED.experts
    wide = (TRAINED.experts, TRAINED.inner, TRAINED.hidden)
    assert found["blk.11.ffn_up_exps"].shape == wide
    assert found["blk.0.ffn_down_exps"].shape == (wide[0], wide[2], wide[1])
    np.testing.assert_array_equal(found["tokens"], text[-trained_mixture.HELD_OUT :])
