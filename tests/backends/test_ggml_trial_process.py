"""The program of a trial sees wrong products."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

pytest.importorskip(
    "unimem.backends.ggml",
    reason="the engine needs ggml: pip install ./ggml '.[run]'",
    exc_type=ImportError,
)

from unimem.backends import ggml_orders, ggml_trial_process

if not ggml_orders.all_types():
    pytest.skip("this build of ggml has no orders of its own on this CPU", allow_module_level=True)


def test_a_trial_sees_wrong_products(monkeypatch: pytest.MonkeyPatch) -> None:
    (name, *_) = [one.name for one in ggml_orders.all_types()]
    assert ggml_trial_process.is_sound(name)
    write = ggml_orders.Buffer.write_as

    def spoil(self: Any, order: Any, kind: int, ne: Any, source: int, data: int) -> None:
        write(self, order, kind, ne, source, data)
        ctypes.memset(data, 0, 32)

    monkeypatch.setattr(ggml_orders.Buffer, "write_as", spoil)
    assert not ggml_trial_process.is_sound(name)
