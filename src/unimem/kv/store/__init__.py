"""The store of prefixes, its tiers and its chunks."""
