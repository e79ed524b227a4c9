# cython: language_level=3, boundscheck=False, wraparound=False
"""Reading mapped files that somebody may truncate."""
