"""The fixtures of files with weights."""

from support.files.weight_bytes import (
    leaves_no_descriptor,
    leaves_nothing,
    open_folder,
    path,
    weights,
)

__all__ = ["leaves_no_descriptor", "leaves_nothing", "open_folder", "path", "weights"]
