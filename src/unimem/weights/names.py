"""Mappings by the names in headers of model files, which are decoded on each access."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from functools import cached_property
from typing import TypeVar

import numpy as np

_T = TypeVar("_T")


class ByName(Mapping[str, _T]):
    """A mapping of names that are decoded on each access, as their values are.

    A dict of all names would take ten times the bytes of a header that has many short ones; this
    has 16 bytes a name, once one is looked up. `name` and `value` decode the name and the value of
    an index. Any number of threads may use it.
    """

    def __init__(
        self,
        n: int,
        name: Callable[[int], str],
        value: Callable[[int, str], _T],
        whose: str = "file's",
        kind: str = "names",
    ) -> None:
        self._n, self._name, self._value = n, name, value
        self._whose, self._kind = whose, kind

    @cached_property
    def _by_hash(self) -> tuple[memoryview, memoryview]:
        """The hashes of all names, sorted, and the index of each; memory views are the fastest."""
        hashes = np.fromiter(map(hash, self), np.int64, self._n)
        # The default is done in AVX2, which gives a wrong order on an emulated CPU (QEMU 7.2).
        order = np.argsort(hashes, kind="stable")
        return hashes[order].data, order.data

    def _find(self, name: object) -> int | None:
        hashes, order = self._by_hash
        wanted = hash(name)
        i = bisect_left(hashes, wanted)
        while i < self._n and hashes[i] == wanted:
            if self._name(order[i]) == name:
                return int(order[i])
            i += 1
        return None

    def __getitem__(self, name: str) -> _T:
        index = self._find(name)
        if index is None:
            raise KeyError(f"{name!r:.100} is none of the {self._whose} {self._n} {self._kind}")
        return self._value(index, name)

    def __contains__(self, name: object) -> bool:
        return self._find(name) is not None  # Mapping would decode the value

    def __iter__(self) -> Iterator[str]:
        return map(self._name, range(self._n))

    def __len__(self) -> int:
        return self._n

    def __reduce__(self) -> tuple[type[dict[str, _T]], tuple[dict[str, _T]]]:
        return dict, (dict(self),)

    def __repr__(self) -> str:
        whose = self._whose.removesuffix("'s")
        return f"<{self._n} {self._kind} of the {whose}>"

    def items(self) -> ItemsView[str, _T]:
        """View names and values."""
        return _Items(self)

    def values(self) -> ValuesView[_T]:
        """View the values."""
        return _Values(self)

    def _pairs(self) -> Iterator[tuple[str, _T]]:
        for i, name in enumerate(self):
            yield name, self._value(i, name)


class _Items(ItemsView[str, _T]):
    _mapping: ByName[_T]

    def __iter__(self) -> Iterator[tuple[str, _T]]:
        return self._mapping._pairs()


class _Values(ValuesView[_T]):
    _mapping: ByName[_T]

    def __iter__(self) -> Iterator[_T]:
        return (value for _, value in self._mapping._pairs())
