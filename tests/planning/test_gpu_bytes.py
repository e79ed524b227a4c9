"""GPU arithmetic: whole pages, and the place of each file's data."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.models.make import TINY, write_model
from unimem.backends import cuda_driver
from unimem.buffers.decode_buffers import DecodeBuffers
from unimem.planning.gpu_bytes import (
    ALIGN,
    RESERVE_BYTES,
    bytes_needed,
    list_transfers,
    round_to_pages,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "rounded"), [(0, 0), (1, 2 * MIB), (2 * MIB, 2 * MIB), (2 * MIB + 1, 4 * MIB)]
)
def test_an_allocation_takes_whole_pages(nbytes: int, rounded: int) -> None:
    assert round_to_pages(nbytes) == rounded


def test_all_tensors_lie_in_the_transferred_range(tmp_path: Path) -> None:
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

    monkeypatch.setattr(cuda_driver, "require", require)
    monkeypatch.setattr(cuda_driver, "_drivers", {})
    with pytest.raises(ImportError, match="needs an NVIDIA GPU"):
        um.plan(um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512), device="cuda:0")


def test_sessions_on_a_gpu_and_their_longest_context(host_gpu: Any) -> None:
    dims = um.ModelDims(64, 172, 8, 4, 8, 512, 5, 8192)
    token = 2 * 5 * 4 * 8 * 2  # K and V, in two bytes
    n = 100  # so that they take more than the reserve
    options: dict[str, Any] = {"sessions": n, "device": "cuda:0"}

    def figures(**more: Any) -> tuple[um.Plan, dict[str, int], int]:
        plan = um.plan(dims, **options, **more)
        (needed,) = (one.needed_bytes for one in plan.checks if one.name == "cuda:0")
        return plan, {row.category: row.nbytes for row in plan.rows if row.device}, needed

    host_gpu.total_bytes = 8 << 30
    plan, rows, needed = figures(ctx=4096)
    assert (rows["kv"], plan.history_bytes) == (n * 4 * MIB, 4096 * token)
    assert rows["scratch"] == n * round_to_pages(plan.scratch_bytes)
    assert needed == sum(rows.values())
    batched = figures(ctx=4096, batch=8)[0].scratch_bytes
    assert batched == DecodeBuffers.bytes_needed(replace(dims, max_batch_size=8))
    # Without a context, the default one, beside a reserve for other programs.
    chosen, rows, needed = figures()
    assert (chosen.ctx, chosen.max_ctx, rows["kv"]) == (4096, 8192, n * 4 * MIB)
    assert needed == sum(rows.values()) + RESERVE_BYTES
    assert sum(rows.values()) & RESERVE_BYTES
    # A least context is planned, whether it fits or not.
    fewer = figures(min_ctx=8000)[0]
    assert (fewer.ctx, fewer.fits) == (8000, True)
    # Room for one page of history of each session.
    for more, reserve in (({}, RESERVE_BYTES), ({"ctx": 9}, 0)):
        host_gpu.total_bytes += reserve + sum(rows.values()) - n * 2 * MIB - host_gpu.free_bytes()
        assert figures(**more)[0].max_ctx == 2 * MIB // token
    assert (figures(min_ctx=8000)[0].ctx, figures(min_ctx=8000)[0].fits) == (8000, False)


@pytest.mark.parametrize(
    "option",
    [
        {"load": "stream"},
        {"load": "copy"},
        {"weights_budget": "1M"},
        {"pages": "2m"},
        {"numa": "bind:0"},
        {"lock": True},
        {"strict": True},
    ],
)
def test_what_a_gpu_does_not_have_is_refused(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ValueError, match=f"{name}=.*: a plan for a GPU"):
        um.plan(um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512), device="cuda:0", **option)
