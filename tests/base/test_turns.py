"""Turns: a thread that waits is next."""

from __future__ import annotations

import threading

from unimem.base.turns import Turn

SECONDS = 100  # for calls that end at once


def test_a_waiting_thread_is_next() -> None:
    """The owner cannot take it again before the waiting thread."""
    turn = Turn()
    order: list[object] = []
    turn.take()

    def wait() -> None:
        with turn:
            order.append("other")

    thread = threading.Thread(target=wait)
    thread.start()
    while not turn.n_waiting:
        thread.join(0.001)
    turn.give()
    with turn:
        order.append("first")
    thread.join(SECONDS)
    assert order == ["other", "first"]
    assert turn.take(0)
    waits = threading.Thread(target=lambda: order.append(turn.take(0.001)))
    waits.start()
    waits.join(SECONDS)
    assert (order[2:], turn.n_waiting) == ([False], 0)
