"""A decoder for language models: ggml computes, on memory that unimem placed."""

from pathlib import Path

from unimem.engine.decoder import Decoder
from unimem.engine.model import UnsupportedModel

__all__ = ["Decoder", "UnsupportedModel", "embedded_model"]


def embedded_model() -> Path:
    """Return the path of the small model that is in the package: it writes children's stories.

    Returns
    -------
    pathlib.Path
    """
    return Path(__file__).parent / "models" / "tiny.gguf"
