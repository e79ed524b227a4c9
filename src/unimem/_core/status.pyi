from typing import TypedDict

VERSION: str
SOVERSION: int

class CallCounters(TypedDict):
    os_calls: int
    allocations: int
    allocated_bytes: int

class LedgerRow(TypedDict):
    n_mappings: int
    mapped_bytes: int
    high_water_bytes: int

class DeviceRow(TypedDict):
    n_allocations: int
    nbytes: int
    high_water_bytes: int

class Marks:
    def read(self) -> list[int]: ...

class DeviceEntry:
    def __init__(self, device: str, category: str, nbytes: int) -> None: ...

def counters() -> CallCounters: ...
def row_name(category: str) -> str: ...
def ledger() -> dict[str, LedgerRow]: ...
def device_ledger() -> dict[tuple[str, str], DeviceRow]: ...
