"""Accounting: what the memory of this process, and of others, is for."""
