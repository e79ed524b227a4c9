"""A GPU's arithmetic: whole pages, and where each file's data goes."""

from pathlib import Path

import pytest

import unimem as um
from models.make import TINY, write_model
from unimem.planning.device import ALIGN, bytes_needed, list_transfers, round_to_pages
from unimem.system import gpu

MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "rounded"), [(0, 0), (1, 2 * MIB), (2 * MIB, 2 * MIB), (2 * MIB + 1, 4 * MIB)]
)
def test_an_allocation_takes_whole_pages(nbytes: int, rounded: int) -> None:
    assert round_to_pages(nbytes) == rounded


def test_all_tensors_lie_in_what_is_transferred(tmp_path: Path) -> None:
    with um.open_weights(write_model(tmp_path / "m.gguf", shape=TINY)) as weights:
        transfers = {transfer.file.path: transfer for transfer in list_transfers(weights)}
        assert list(transfers) == list(weights.files)
        for tensor in weights.tensors.values():
            of_file = transfers[tensor.file]
            assert of_file.begin <= tensor.offset
            assert tensor.offset + tensor.nbytes <= of_file.begin + of_file.nbytes
        assert all(transfer.at % ALIGN == 0 for transfer in transfers.values())
        assert bytes_needed(weights) == max(transfer.end for transfer in transfers.values())


def test_without_a_gpu_a_plan_for_one_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def require() -> None:
        raise ImportError("unimem.cuda needs an NVIDIA GPU")

    monkeypatch.setattr(gpu, "require", require)
    monkeypatch.setattr(gpu, "_drivers", {})
    with pytest.raises(ImportError, match="needs an NVIDIA GPU"):
        um.plan(um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512), device="cuda:0")
