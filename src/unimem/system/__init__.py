"""The machine and its limits."""
