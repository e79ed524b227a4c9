"""First tokens of llama.cpp's conversations in a `KVStore`.

It needs no llama.cpp: states come as bytes, from ``llama_state_seq_get_data`` of any binding, or
from slot files of llama-server. `LlamaStoreCache` is for llama-cpp-python.
"""

from unimem.llama_cpp.identity import model_hash
from unimem.llama_cpp.prefixes import LlamaPrefixes
from unimem.llama_cpp.proxy import SlotProxy
from unimem.llama_cpp.server import LlamaServer
from unimem.llama_cpp.slot_file import SlotFile, read_slot_file, write_slot_file
from unimem.llama_cpp.state import LlamaKV, kv_to_state, state_to_kv
from unimem.llama_cpp.store_cache import LlamaStoreCache
from unimem.llama_cpp.stored import StoredPrefix, stored_prefixes

__all__ = [
    "LlamaKV",
    "LlamaPrefixes",
    "LlamaServer",
    "LlamaStoreCache",
    "SlotFile",
    "SlotProxy",
    "StoredPrefix",
    "kv_to_state",
    "model_hash",
    "read_slot_file",
    "state_to_kv",
    "stored_prefixes",
    "write_slot_file",
]
