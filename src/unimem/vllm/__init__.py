"""Doors for vLLM, which loads them by their names (docs/engines.md).

`KVStoreTier` is a secondary tier: KV chunks that leave vLLM's CPU memory go to a `KVStore`, and
return from it. `CPUOffloading` lets vLLM offload at all on its CPU platform::

    {"spec_name": "CPUOffloading", "spec_module_path": "unimem.vllm", "secondary_tiers": [
        {"type": "KVStoreTier", "module_path": "unimem.vllm", "where": "/var/cache/kv"}]}

Importing it needs vLLM. vLLM's interface is experimental and changes with minor versions: this
package is for 0.33, and runs with 0.32.
"""

try:
    from unimem.vllm.cpu_offloading import CPUOffloading
    from unimem.vllm.tier import KVStoreTier
except ImportError as error:
    raise ImportError(
        "unimem.vllm is loaded by vLLM, and made for version 0.33 of its secondary tiers; "
        f"importing those said: {error}"
    ) from error

__all__ = ["CPUOffloading", "KVStoreTier"]
