"""Leaving a ``with`` closes, whatever happened inside."""

from __future__ import annotations

from contextlib import suppress

import pytest

from unimem.base.closing import Closing
from unimem.errors import ClosedError


class Door(Closing):
    n_closed = 0

    def close(self) -> None:
        self.n_closed += 1

    def _check_open(self) -> None:
        if self.n_closed:
            raise ClosedError("the door is closed")


def test_leaving_a_with_closes_and_a_closed_thing_is_not_entered() -> None:
    door = Door()
    with suppress(KeyError), door as entered:
        assert entered is door
        raise KeyError
    assert door.n_closed == 1
    with pytest.raises(ClosedError), door:
        pass
    assert door.n_closed == 1
