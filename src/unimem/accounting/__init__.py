"""Accounting: who has which memory, of this process and of others."""
