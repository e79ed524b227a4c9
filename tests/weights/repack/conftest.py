"""The fixtures of images."""

from support.models.image_fixtures import cache, model, repacks

__all__ = ["cache", "model", "repacks"]
