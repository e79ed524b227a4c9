"""Repacking: weights in the order that the kernels of a CPU read fastest, and their images on disk."""
