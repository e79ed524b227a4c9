from __future__ import annotations

import threading

import numpy as np

from unimem.llama_cpp.slots import ServerSlots


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_the_slot_with_the_longest_prefix_is_taken_then_the_oldest() -> None:
    slots = ServerSlots(3)
    slots.held = [ids(1, 2), ids(1, 2, 3), ids(9)]
    with slots.taken(ids(1, 2, 3, 4)) as first, slots.taken(ids(1, 2, 3, 4)) as second:
        assert (first, second, len(slots)) == (1, 0, 3)
        with slots.taken(ids(1), wanted=2) as third:
            assert third == 2
    with slots.taken(ids(7)) as oldest:
        assert oldest == 2


def test_a_taken_slot_is_waited_for() -> None:
    slots = ServerSlots(1)
    taken = threading.Event()

    def wait() -> None:
        with slots.taken(ids(1)):
            taken.set()

    thread = threading.Thread(target=wait)
    with slots.taken(ids(1)):
        thread.start()
        assert not taken.wait(0.05)
    thread.join()
    assert taken.is_set()


def test_a_slot_that_is_saved_is_waited_for_if_its_prefix_is_longer() -> None:
    slots = ServerSlots(2)
    found: list[int] = []

    def ask(*tokens: int) -> threading.Thread:
        def work() -> None:
            with slots.taken(ids(*tokens)) as slot:
                found.append(slot)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    with slots.taken(ids(1, 2)) as first:
        slots.begin_saving(first, ids(1, 2))
        waits = ask(1, 2, 3)
        ask(7).join()
        assert found == [1]
    waits.join()
    assert found == [1, first]
