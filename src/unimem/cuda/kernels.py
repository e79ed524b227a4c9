"""The kernels of ``rows.cu``, compiled for a device."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from importlib import resources

from unimem.backends.cuda_driver import Driver, Launcher
from unimem.kv.row_kernels import RowKernels

FLOATS = ("f32", "f16", "bf16")
# For each type of rows, the types of tokens that can be written, and of arrays that can be read.
GIVEN = {"f32": FLOATS, "f16": FLOATS, "bf16": FLOATS, "q8_0": FLOATS, "f64": ("f64", "f32")}
WANTED = {"f32": FLOATS, "f16": FLOATS, "bf16": FLOATS, "q8_0": FLOATS, "f64": ()}
NAMES = tuple(
    [f"append_{given}_{stored}" for stored, types in GIVEN.items() for given in types]
    + [f"read_{stored}_{wanted}" for stored, types in WANTED.items() for wanted in types]
)

# Compiling takes a second, and is done once per device.
_compiled: weakref.WeakKeyDictionary[Driver, Mapping[str, Launcher]] = weakref.WeakKeyDictionary()


def launchers(driver: Driver) -> Mapping[str, Launcher]:
    """Return the kernels of a device by name, compiled at the first call."""
    found = _compiled.get(driver)
    if found is None:
        source = resources.files(__package__).joinpath("rows.cu").read_text()
        found = _compiled.setdefault(driver, driver.module(source, NAMES))
    return found


def row_kernels(driver: Driver, stored: str) -> RowKernels:
    """Return the kernels for rows of ``"f32"``, ``"f16"``, ``"bf16"``, ``"q8_0"`` or ``"f64"``."""
    found = launchers(driver)
    return RowKernels(
        {given: found[f"append_{given}_{stored}"] for given in GIVEN[stored]},
        {wanted: found[f"read_{stored}_{wanted}"] for wanted in WANTED[stored]},
        quantizes=stored == "q8_0",
        launch_address=driver.launch_address,
    )
