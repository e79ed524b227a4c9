"""The suites of `unimem bench`, a file each. A new suite is a new file and a name here."""

from __future__ import annotations

from importlib import import_module

from unimem_bench.suite import Suite

# In the order in which they run.
NAMES = tuple(
    """
    calls accounting gguf buffers scaling verify first-touch kv snapshot load decode context runtime
    pages repack exec pressure stream store remote transformers numa gpu
""".split()
)


def load_suite(name: str) -> Suite:
    """Import a suite, one of `NAMES`: its module's ``SUITE``."""
    module = import_module(f"unimem_bench.suites.{name.replace('-', '_')}")
    suite = module.SUITE
    if not isinstance(suite, Suite) or suite.name != name:
        raise TypeError(f"{module.__name__}.SUITE is not the suite {name!r}")
    return suite
