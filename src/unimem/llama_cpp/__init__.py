"""First tokens of llama.cpp's conversations in a `KVStore`.

It needs no llama.cpp: states come as bytes, from ``llama_state_seq_get_data`` of any binding, or
from slot files of llama-server. `LlamaStoreCache` is for llama-cpp-python.
"""

from unimem.llama_cpp.prefixes import LlamaPrefixes
from unimem.llama_cpp.slot_file import SlotFile, read_slot_file, write_slot_file
from unimem.llama_cpp.state import LlamaKV, kv_to_state, state_to_kv
from unimem.llama_cpp.stored import StoredPrefix, stored_prefixes

__all__ = [
    "LlamaKV",
    "LlamaPrefixes",
    "SlotFile",
    "StoredPrefix",
    "kv_to_state",
    "read_slot_file",
    "state_to_kv",
    "stored_prefixes",
    "write_slot_file",
]
