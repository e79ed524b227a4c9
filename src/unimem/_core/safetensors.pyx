# cython: language_level=3, boundscheck=False, wraparound=False
"""The header of a safetensors file."""
