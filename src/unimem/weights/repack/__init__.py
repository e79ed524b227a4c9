"""Repacking: weights in the order that a CPU's kernels read fastest, and their images."""
