"""Weights that do not fit, and their arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import safetensors_files as st
from cgroups import SmallCgroup, cgroup_512mb  # noqa: F401 - a fixture
from unimem.weights.opened import open_weights
from weight_bytes import (
    LOADS,
    MIB,
    leaves_nothing,  # noqa: F401 - a fixture
    write,
    write_hole,
)

pytestmark = pytest.mark.usefixtures("gives_memory_back", "leaves_nothing")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of some MiB whose tensors are no whole pages."""
    return write(tmp_path / "model.gguf", 3 * MIB + 1, 5000, 2 * MIB)


# ---- arrays ------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", LOADS)
def test_nothing_of_an_array_can_be_written(tmp_path: Path, load: Any) -> None:
    file = tmp_path / "model.safetensors"
    # The second tensor is not aligned.
    file.write_bytes(st.write({"a": ("U8", (1,)), "b": ("F32", (2,))}))
    with open_weights(file, load=load) as weights:
        for tensor in weights.tensors.values():
            array: Any = tensor.as_array()
            while isinstance(array, np.ndarray):
                assert not array.flags.writeable
                array = array.base
        del array


# ---- what does not fit -------------------------------------------------------------------------

IN_512_MB = """
import resource, warnings
import unimem as um
path = {path!r}

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

before = peak()
for load in ("copy", "direct"):
    for options in ({{}}, {{"pages": "4k"}}, {{"progress": print}}):
        try:
            um.open_weights(path, load=load, **options)
        except um.CapacityError as error:
            assert "cgroup" in str(error), error
            assert error.asked > 600 << 20
        else:
            raise SystemExit(f"{{load}} was not refused")
try:
    um.open_weights(path, pages="thp", strict=True)
except um.CapacityError as error:
    assert "a copy of" in str(error), error
else:
    raise SystemExit("strict was not refused")
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    with um.open_weights(path, pages="thp") as weights:
        assert weights.load == "map", weights.load
        assert "does not fit" in weights.load_reason
        try:
            weights.warm()
        except um.CapacityError:
            pass
        else:
            raise SystemExit("warming was not refused")
assert len(told) == 1, told
assert peak() - before < 16 << 20, (before, peak())
print("refused")
"""


def test_what_a_cgroup_has_no_room_for_is_refused_before_anything_is_taken(
    tmp_path: Path,
    cgroup_512mb: SmallCgroup,  # noqa: F811 - the fixture
) -> None:
    file = write_hole(tmp_path / "large.gguf", 640 * MIB)
    assert cgroup_512mb.run(IN_512_MB.format(path=str(file))) == "refused\n"


ON_TAPES = """
import unimem as um
path = {path!r}
with um.Block(300 << 20) as cold, um.Block(250 << 20) as other, um.Tape(cold) as tape:
    tape.take_bytes(100)
    other.warm()
    try:
        um.open_weights(path, tape=tape, load="direct")
    except um.CapacityError as error:
        assert "cgroup" in str(error), error
    else:
        raise SystemExit("it was not refused")
    assert tape.used_bytes == 100
    other.close()
    cold.warm()
    # What is in RAM already needs no room.
    with um.Block(150 << 20, warm=True), um.open_weights(path, tape=tape, load="direct") as weights:
        print(weights.load)
"""


def test_a_tape_without_room_for_its_pages(
    tmp_path: Path,
    cgroup_512mb: SmallCgroup,  # noqa: F811 - the fixture
) -> None:
    file = write_hole(tmp_path / "large.gguf", 280 * MIB)
    assert cgroup_512mb.run(ON_TAPES.format(path=str(file))) == "direct\n"
