"""The fixtures of files with weights."""

from support.files.weight_bytes import leaves_no_descriptor, leaves_nothing, path, weights

__all__ = ["leaves_no_descriptor", "leaves_nothing", "path", "weights"]
