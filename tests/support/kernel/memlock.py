"""A prelude that limits locked memory, even for root."""

# The limit applies to processes without CAP_IPC_LOCK.
DROP_LOCK = """
import ctypes, os, resource, warnings
import unimem as um
from unimem.system import limits
from unimem._core.status import ledger

def drop_ipc_lock():
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    data[0] &= ~(1 << 14)
    assert libc.capset(header, data) == 0

def state():
    maps = [line.split()[0] for line in open("/proc/self/maps")]
    return len(os.listdir("/proc/self/fd")), ledger()["other"]["mapped_bytes"]

def limit_memlock(nbytes):
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (nbytes, nbytes))
    drop_ipc_lock()
    limit = limits.memlock()
    assert limit is not None and limit.limit_bytes == nbytes
"""
