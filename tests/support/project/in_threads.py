"""The tests that pytest-run-parallel may run in threads: `tools/free_threaded.py --here`.

All threads share the fixtures of a test. A test with an object from a fixture runs in one thread,
and so does one that looks at the whole process, or changes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

# Fixtures that threads may share: each thread has its own `tmp_path`, some are functions, and some
# only compare the state before and after a test.
SHARED = set(
    """
    check_quantized codes cpus_of_the_process gives_memory_back in_the_checkout
    leaves_no_thread pool_of_huge_pages reference request tmp_path
""".split()
)
# Functions that count or replace something for all threads, or use the process number in a name.
OF_THE_PROCESS = set(
    """
    catch_warnings counters counts device_ledger getpid ledger mappings measure mock os_faults
    patch report setrlimit setswitchinterval NAME signal tracemalloc
""".split()
)
# Tests that name shared memory or a pool for the whole process, fork, count its calls, look at all
# of its regions, or parse Python, since CPython 3.11 adds up the depth of all threads.
ALONE = set(
    """
    test_growing_moves_nothing test_a_pool_that_is_used_up test_the_path_of_memory
    test_a_pool_that_shrinks_leaves_what_was_given test_children_of_multiprocessing_attach
    test_taking_makes_no_system_call_and_no_allocation
    test_a_forked_child_has_its_own_copy_but_of_a_ring
    test_a_region_that_is_about_to_go_is_left_out test_every_class_that_is_closed_is_among_them
    test_messages_use_the_hint_and_name_existing_extras
""".split()
)


def why_in_one_thread(item: Any) -> str:
    """Explain why a test runs in one thread; "" if several threads may run it."""
    if getattr(item, "originalname", None) in ALONE:
        return "uses what the process has once"
    objects = set(getattr(item, "fixturenames", ())) - _params(item) - SHARED
    if objects:
        return f"takes {', '.join(sorted(objects))} from a fixture"
    function = getattr(item, "function", None)
    function = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    if not isinstance(function, FunctionType):
        return "is no function"
    used = OF_THE_PROCESS & set(_names(function, set()))
    return f"uses {', '.join(sorted(used))}, of the whole process" if used else ""


def _params(item: Any) -> set[str]:
    """Return the parameters of a test that are not passed to a fixture."""
    found: set[str] = set()
    for mark in item.iter_markers("parametrize"):
        if not mark.kwargs.get("indirect"):
            names = mark.args[0]
            found |= set(names.replace(",", " ").split() if isinstance(names, str) else names)
    return found


def _names(function: FunctionType, seen: set[FunctionType]) -> Iterator[str]:
    """Yield the names in a function, and in the functions of the tests that it calls."""
    seen.add(function)
    codes: list[CodeType] = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        for name in code.co_names:
            yield name
            called = function.__globals__.get(name)
            called = getattr(called, "__wrapped__", called)  # a context manager
            if not isinstance(called, FunctionType) or called in seen:
                continue
            if "/tests/" in called.__code__.co_filename:
                yield from _names(called, seen)
