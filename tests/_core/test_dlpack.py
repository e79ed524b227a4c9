"""Exporting arrays by DLPack."""

from __future__ import annotations

import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from unimem._core.dlpack import ExportedArray, export, exported


def test_numpys_own_arrays_stay_as_they_are() -> None:
    array = np.arange(3.0)
    assert exported(array) is array
    assert np.array_equal(np.from_dlpack(array), array)


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_a_type_of_ml_dtypes_becomes_a_view_that_can_be_exported(kind: type) -> None:
    array: np.ndarray[Any, Any] = np.zeros((2, 3), kind)
    view = exported(array)
    assert isinstance(view, ExportedArray)
    assert np.shares_memory(view, array)
    assert "dltensor" in repr(view.__dlpack__())
    assert "dltensor_versioned" in repr(export(array, max_version=(1, 0)))
    assert type(view + view) is np.ndarray
    assert type(pickle.loads(pickle.dumps(view))) is np.ndarray


def test_a_read_only_array_needs_a_consumer_that_knows_such() -> None:
    array = np.zeros(3, ml_dtypes.bfloat16)
    array.flags.writeable = False
    with pytest.raises(BufferError):
        export(array)
    assert export(array, max_version=(1, 0)) is not None
