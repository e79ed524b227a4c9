"""The hash of a model's folder: it changes with each byte that decides what the model computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.files import safetensors_files as st
from unimem.errors import PlacementWarning
from unimem.weights.files_hash import files_hash


def model(folder: Path, last: int = 1, config: str = "{}") -> Path:
    folder.mkdir()
    data = st.write({"w": ("F32", (4,))})
    (folder / "model.safetensors").write_bytes(data[:-1] + bytes([last]))
    (folder / "config.json").write_text(config)
    return folder


def test_equal_models_have_one_hash_and_others_have_another(tmp_path: Path) -> None:
    found = [
        files_hash(model(tmp_path / name, *changes), "E")
        for name, changes in {"a": (), "b": (), "c": (2,), "d": (1, '{"x": 1}')}.items()
    ]
    assert found[0] == found[1]
    assert len({*found}) == 3


def test_a_folder_without_weights_has_none_and_says_so(tmp_path: Path) -> None:
    with pytest.warns(PlacementWarning, match=r"E's model is known by its name only: .*safetens"):
        assert files_hash(tmp_path, "E") is None
