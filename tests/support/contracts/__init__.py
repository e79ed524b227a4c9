"""Contracts that several classes keep, and plain models to compare them with."""
