from typing import TypedDict

class Counters(TypedDict):
    os_calls: int
    allocations: int
    allocated_bytes: int

class LedgerRow(TypedDict):
    n_mappings: int
    mapped_bytes: int
    high_water_bytes: int

def counters() -> Counters: ...
def ledger() -> dict[str, LedgerRow]: ...
