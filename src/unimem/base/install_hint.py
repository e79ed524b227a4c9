"""How to install what is missing: from a checkout or wheels, since no index has unimem."""

from __future__ import annotations

# Extras with the engine, whose ggml is a distribution of its own beside unimem.
_WITH_ENGINE = {"run", "bench", "docs", "test", "worth"}


def install_hint(*extras: str) -> str:
    """Return how to install unimem with some extras, to end a message without a full stop."""
    quoted = " and ".join(f"'{extra}'" for extra in extras)
    names = ",".join(extras)
    wheel = f"'./unimem_llm-FILE.whl[{names}]'"
    if _WITH_ENGINE.isdisjoint(extras):
        folder, wheels = "", f"{wheel} of its wheel"
    else:
        folder, wheels = "./ggml ", f"./unimem_ggml-FILE.whl {wheel} of the two wheels"
    return (
        f"install unimem-llm with the extra{'s' * (len(extras) > 1)} {quoted}: "
        f"pip install {folder}'.[{names}]' in a checkout, or pip install {wheels}"
    )
