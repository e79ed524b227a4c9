"""A prelude of test scripts: filters of system calls, as containers and service managers have."""

from __future__ import annotations

# What Docker's default profile refuses to a process without capabilities, among what unimem and its
# libraries may call. The profile lists what is allowed (moby, profiles/seccomp/default.json).
DOCKER_REFUSES = {
    "mount": (165, 40), "umount2": (166, 39), "unshare": (272, 97), "setns": (308, 268),
    "mbind": (237, 235), "set_mempolicy": (238, 237), "get_mempolicy": (239, 236),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "perf_event_open": (298, 241),
    "kcmp": (312, 272), "bpf": (321, 280), "userfaultfd": (323, 282), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "mount_setattr": (442, 442), "set_mempolicy_home_node": (450, 450), "cachestat": (451, 451),
}  # fmt: skip
"""System calls, and their numbers on x86-64 and aarch64 (asm/unistd_64.h, asm-generic/unistd.h)."""

CLONE3 = 435  # which it answers with ENOSYS
NO_SECCOMP = "no seccomp"
FORBID = f"""
import ctypes, errno, struct

def forbid(error, numbers):
    no_new_privs, seccomp, filter_mode = 38, 22, 2
    load_number, jump_if, end, fail, allow = 0x20, 0x15, 0x06, 0x50000, 0x7FFF0000
    n = len(numbers)
    steps = [(load_number, 0, 0, 0)]
    steps += [(jump_if, n - i, 0, number) for i, number in enumerate(numbers)]
    steps += [(end, 0, 0, allow), (end, 0, 0, fail | getattr(errno, error))]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", n + 3, ctypes.addressof(code)))
    libc = ctypes.CDLL(None)
    assert libc.prctl(no_new_privs, 1, 0, 0, 0) == 0
    if libc.prctl(seccomp, filter_mode, program, 0, 0) != 0:
        print("{NO_SECCOMP}")
        raise SystemExit(0)
"""
