# cython: language_level=3, boundscheck=False, wraparound=False
"""Ranges of files into memory, by several threads, with progress."""
