"""Buffers of one token: dimensions, shapes, plans, and sets whose addresses never change."""
