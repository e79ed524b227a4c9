"""Fixtures of staged models, for the tests of this room."""

from staging import indexed, leaves_nothing, model, split  # noqa: F401
