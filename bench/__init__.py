"""Benchmarks, one question a file; ``python -m bench.calls`` and so on, from the repository."""
