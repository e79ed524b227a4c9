"""The bisection: its results and its number of questions."""

import pytest

from unimem.planning.search import find_largest


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 100])
@pytest.mark.parametrize("least", [0, 1, 5])
def test_the_largest_good_number_is_found(most: int, least: int) -> None:
    for limit in range(most + 3):
        assert find_largest(most, limit.__ge__, least=least) == max(least, min(most, limit))


def test_without_a_good_number_the_least_is_returned_untested() -> None:
    asked: list[int] = []

    def is_good(n: int) -> bool:
        asked.append(n)
        return False

    assert find_largest(1000, is_good, least=3) == 3
    assert min(asked) == 4
    assert find_largest(3, is_good, least=3) == 3
    assert find_largest(2, is_good, least=3) == 3
    assert 3 not in asked
    assert find_largest(9, lambda _: False) == 0


def test_a_good_maximum_is_asked_once_and_others_seldom() -> None:
    asked: list[int] = []

    def fits(n: int) -> bool:
        asked.append(n)
        return n <= limit

    limit = most = 2**31 - 1
    assert find_largest(most, fits) == most
    assert asked == [most]
    asked.clear()
    limit = 4097
    assert find_largest(most, fits) == limit
    assert len(asked) <= 33


def test_the_request_may_exceed_the_maximum() -> None:
    for asked, found in ((50, 20), (15, 20), (70, 20), (30, 30)):
        assert find_largest(20, lambda n: n <= 40, asked=asked) == found
    assert find_largest(20, lambda n: n <= 10, asked=30) == 10


@pytest.mark.parametrize(("most", "limit", "asked"), [(1000, 999, 0), (999, 998, 0), (20, 10, 20)])
def test_nothing_is_asked_twice(most: int, limit: int, asked: int) -> None:
    seen: list[int] = []

    def fits(n: int) -> bool:
        seen.append(n)
        return n <= limit

    assert find_largest(most, fits, asked=asked) == limit
    assert len(set(seen)) == len(seen)
