"""Backends: foreign libraries, each behind one file: ggml and the driver of a GPU."""
