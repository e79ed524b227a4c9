"""The definitions of vLLM's secondary tiers from its sources, without the packages they need.

`make test-all` puts the sources into build/vllm. Importing ``vllm`` itself would want a hundred
packages; so the packages above the definitions are made here, empty, and point to the sources.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from support.project.checkout import ROOT

FETCHED = ROOT / "build/vllm"
# Packages whose own __init__ imports more than the definitions need.
EMPTY = tuple(
    """
    vllm vllm.v1 vllm.v1.kv_offload vllm.v1.metrics vllm.distributed
    vllm.distributed.kv_transfer vllm.distributed.kv_transfer.kv_connector
    vllm.distributed.kv_transfer.kv_connector.v1
    vllm.distributed.kv_transfer.kv_connector.v1.offloading vllm.utils
    vllm.distributed.device_communicators vllm.v1.kv_offload.cpu
""".split()
)
# The definitions import unused names from these modules: metrics, and code for GPUs.
UNUSED = {
    "vllm.distributed.device_communicators.cuda_wrapper": "CudaRTLibrary",
    "vllm.distributed.device_communicators.shm_broadcast": "check_shm_free_space",
    "vllm.v1.kv_offload.cpu.gpu_worker": "CPUOffloadingWorker",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": "OffloadingConnectorStats",
    "vllm.v1.kv_hints": "KvHintsEnvelope",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping": (
        "canonical_format_id"
    ),
}


def sources() -> Path:
    """Return the folder of the sources; skip if it could not be fetched."""
    found = importlib.util.find_spec("vllm")
    if found is not None and found.origin is not None:
        return Path(found.origin).parent
    if not (FETCHED / "vllm/v1/kv_offload/tiering/base.py").exists():
        pytest.skip("vLLM's sources are not in build/vllm: `make test-all` fetches them")
    return FETCHED / "vllm"


@contextmanager
def imported() -> Iterator[None]:
    """Make the definitions importable, with their imports; undo it afterwards."""
    root = sources()
    before = set(sys.modules)
    for name in EMPTY:
        module: Any = types.ModuleType(name)
        module.__path__ = [str(root.parent.joinpath(*name.split(".")))]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
    log: Any = types.ModuleType("vllm.logger")
    logger: Any = logging.getLogger("vllm")
    log.init_logger = lambda _: types.SimpleNamespace(
        **{name: getattr(logger, name) for name in ("debug", "info", "warning", "error")},
        warning_once=logger.warning,
    )
    sys.modules["vllm.logger"] = log
    for name, unused in UNUSED.items():
        sys.modules[name] = types.ModuleType(name)
        setattr(sys.modules[name], unused, MagicMock)
    platforms: Any = types.ModuleType("vllm.platforms")
    platforms.current_platform = types.SimpleNamespace(is_cpu=lambda: True, device_type="cpu")
    sys.modules["vllm.platforms"] = platforms
    vars(sys.modules["vllm"])["__version__"] = "0.33.0"
    ours = ["vllm", "unimem.vllm", "unimem.vllm.cpu_offloading", "unimem.vllm.tier"]
    if importlib.util.find_spec("torch") is None:  # the definitions import names of types
        sys.modules["torch"] = MagicMock()
        ours.append("torch")
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name in ours or name.startswith("vllm."):
                del sys.modules[name]
        import unimem

        vars(unimem).pop("vllm", None)
