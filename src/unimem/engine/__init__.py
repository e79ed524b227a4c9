"""A decoder for language models: ggml computes, on memory that unimem placed."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unimem.engine.decoder import Decoder
    from unimem.engine.model import UnsupportedModel

__all__ = ["Decoder", "UnsupportedModel", "embedded_model"]


def __getattr__(name: str) -> Any:
    """Import what needs ggml once it is asked for: planning looks into `unimem.engine.text`."""
    homes = {"Decoder": "decoder", "UnsupportedModel": "model"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{homes[name]}"), name)


def embedded_model() -> Path:
    """Return the path of the small model that is in the package: it writes children's stories.

    Returns
    -------
    pathlib.Path
    """
    return Path(__file__).parent / "models" / "tiny.gguf"
