"""The contract of every cache, whatever it stores and wherever: one suite for all of them.

A test module has a `Kind` for each of its caches: it appends and reads tokens, and declares how
this kind of cache differs. `suites` makes the test classes from these: `CacheContract` is for all
kinds, the other classes for kinds that declare their subject. Tokens are NumPy's float32 arrays
``[n, *kind.token_shape]`` here, wherever a cache keeps them.
"""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import unimem as um
from support.processes.forks import in_child
from support.project.tiers import examples

Array = NDArray[Any]
# What the suite calls an array of a device's own library.
Foreign = Any

FLOATS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float64": np.dtype(np.float64),
}


class Kind(ABC):
    """One kind of cache, as the suite uses it.

    Attributes
    ----------
    name : str
        The name of the tests.
    capacity : int
        Tokens that fit, or that a cache that forgets shows.
    token_shape : tuple of int
        The shape of one token of one layer.
    n_layers : int
        Layers; 0: the cache has no argument `layer`.
    takes : tuple of str
        The dtypes that it accepts.
    forgets : bool
        Whether it drops the oldest tokens and is never full.
    is_fixed : bool
        Whether all memory is taken when it is made, so that its use costs neither an allocation nor
        a system call.
    state_layers : tuple of int, optional
        The layers that keep a state; None: the cache has no method `state`.
    owns_memory : bool
        Whether closing it frees its memory.
    in_child : bool
        Whether a forked child has its own copy; otherwise its use there raises ClosedError.
    layouts : mapping of str to callable
        Layouts of a NumPy array in memory that the cache reads alike.
    dims : tuple of int
        Arguments to make a smaller cache; none: the class has no constructor.
    is_slow : bool
        Whether its tests are left out of the fast tier, which has similar kinds.
    """

    name = ""
    capacity = 24
    token_shape: tuple[int, ...] = ()
    n_layers = 0
    takes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    forgets = False
    is_fixed = True
    state_layers: tuple[int, ...] | None = None
    owns_memory = True
    in_child = True
    layouts: Mapping[str, Callable[[Array], Array]] = {}
    is_slow = False
    dims: tuple[int, ...] = ()

    @abstractmethod
    def make(self) -> Any:
        """Make an empty cache."""

    @abstractmethod
    def arguments(self, tokens: Array) -> tuple[Foreign, ...]:
        """Return arrays of the tokens, in their dtype, as arguments of `append`."""

    @abstractmethod
    def changed(self, argument: Foreign, change: Callable[[Array], Any]) -> Any:
        """Apply a function of NumPy arrays to an argument."""

    @abstractmethod
    def overwrite(self, argument: Foreign) -> None:
        """Zero an argument in place."""

    @abstractmethod
    def append(self, cache: Any, layer: Any, *arguments: Any) -> None:
        """Append, to one layer where there are layers."""

    @abstractmethod
    def read(self, cache: Any, layer: int) -> Array:
        """Copy the tokens that are there, as float32."""

    @abstractmethod
    def stored(self, tokens: Array) -> Array:
        """Return tokens as the cache stores them, as float32."""

    @abstractmethod
    def view(self, cache: Any) -> Any:
        """View the memory of the first layer's tokens, without a copy."""

    @abstractmethod
    def shown(self, view: Any) -> Array:
        """Return the tokens that a view shows, as float32."""

    @abstractmethod
    def address(self, cache: Any) -> int:
        """Return where the memory of the cache begins, which holds at least one token."""

    @abstractmethod
    def is_mapped(self, address: int) -> bool:
        """Return whether memory is mapped at an address."""

    @abstractmethod
    def counters(self) -> Mapping[str, int]:
        """Return the library's costs so far: allocations, and calls of the system or the driver."""

    @contextmanager
    def made(self) -> Iterator[Any]:
        """Make a cache that is closed at the end."""
        cache = self.make()
        try:
            yield cache
        finally:
            cache.__exit__(None, None, None)


def kind_of(kinds: Sequence[Kind]) -> Any:
    """Return the fixture of a contract's class."""

    params = [
        pytest.param(kind, id=kind.name, marks=[pytest.mark.slow] if kind.is_slow else [])
        for kind in kinds
    ]

    @pytest.fixture(params=params)
    def kind(self: Contract, request: pytest.FixtureRequest) -> Kind:
        found: Kind = request.param
        return found

    return kind


def tokens_of(kind: Kind, n: int, seed: int = 0) -> Array:
    """Return random tokens."""
    shape = (n, *kind.token_shape)
    tokens: Array = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return tokens


def of_layer(tokens: Array, layer: int) -> Array:
    """Return the tokens of a layer: each layer has different ones."""
    other: Array = tokens + np.asarray(layer, tokens.dtype)
    return other


def fill(kind: Kind, cache: Any, tokens: Array) -> None:
    """Append tokens to all layers."""
    for layer in range(max(kind.n_layers, 1)):
        kind.append(cache, layer, *kind.arguments(of_layer(tokens, layer)))


def check(kind: Kind, cache: Any, tokens: Array) -> None:
    """Check that the cache holds exactly these tokens."""
    assert len(cache) == len(tokens)
    if hasattr(cache, "is_empty"):
        assert cache.is_empty is (len(tokens) == 0)
    for layer in range(max(kind.n_layers, 1)):
        expected = kind.stored(of_layer(tokens, layer))
        found = kind.read(cache, layer)
        assert found.dtype == np.float32
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()


@contextmanager
def unchanged(kind: Kind, cache: Any, tokens: Array) -> Iterator[None]:
    """Check that a failure inside leaves the cache unchanged and usable."""
    yield
    check(kind, cache, tokens)
    assert not cache.closed


SHAPES: dict[str, Callable[[Array], Array]] = {
    "narrower": lambda a: a[..., :-1],
    "wider": lambda a: a.repeat(2, axis=-1),
    "without its last dimension": lambda a: a[..., 0],
    "without its first dimension": lambda a: a[0],
    "with one dimension more": lambda a: a[None, None],
    "no dimension": lambda a: a.reshape(-1)[:1].reshape(()),
    "flat": lambda a: a.reshape(-1),
}
DTYPES = ("int8", "uint16", "int32", "int64", "bool", "complex64", "float64")


def as_dtype(a: Array, dtype: str) -> Array:
    return a.astype(dtype)


NO_ARRAYS: dict[str, Callable[[Array], Any]] = {
    "a list": lambda a: a.tolist(),
    "None": lambda _: None,
    "a number": lambda _: 1.0,
    "bytes": lambda a: a.tobytes(),
    "text": lambda _: "tokens",
}


class Contract:
    """What all contracts share."""

    @pytest.fixture
    def cache(self, kind: Kind) -> Iterator[Any]:
        with kind.made() as cache:
            yield cache


class CacheContract(Contract):
    """What every cache promises."""

    # ---- tokens ----

    def test_a_new_cache_is_empty(self, kind: Kind, cache: Any) -> None:
        check(kind, cache, tokens_of(kind, 0))
        assert not cache.closed

    def test_a_cache_is_made_once(self, kind: Kind, cache: Any) -> None:
        tokens = tokens_of(kind, 5)
        fill(kind, cache, tokens)
        for dims in (kind.dims, (0, *kind.dims[1:])) if kind.dims else ():
            with unchanged(kind, cache, tokens), pytest.raises(RuntimeError, match="made already"):
                cache.__init__(*dims)
        cache.__exit__(None, None, None)
        if kind.dims:
            with pytest.raises(RuntimeError, match="made already"):
                cache.__init__(*kind.dims)
        assert cache.closed

    @pytest.mark.parametrize("parts", [(0, 1, 1, 0), (2, 3), (7, 17), (24,)], ids=str)
    def test_what_was_appended_is_there(
        self, kind: Kind, cache: Any, parts: tuple[int, ...]
    ) -> None:
        tokens = tokens_of(kind, sum(parts))
        first = 0
        for n in parts:
            fill(kind, cache, tokens[first : first + n])
            first += n
            check(kind, cache, tokens[:first])

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_floats_are_converted(self, kind: Kind, cache: Any, dtype: str) -> None:
        tokens = (tokens_of(kind, 5) * 100).astype(FLOATS[dtype])
        if dtype in kind.takes:
            fill(kind, cache, tokens)
            check(kind, cache, tokens)
            return
        with (
            unchanged(kind, cache, tokens[:0]),
            pytest.raises(TypeError, match=f"expected.*, got.*{dtype}"),
        ):
            fill(kind, cache, tokens)

    def test_any_layout_in_memory_is_read(self, kind: Kind) -> None:
        tokens = tokens_of(kind, 5)
        for dtype in kind.takes:
            for name, lay_out in kind.layouts.items():
                given_tokens = tokens.astype(FLOATS[dtype])
                with kind.made() as cache:
                    for layer in range(max(kind.n_layers, 1)):
                        arguments = kind.arguments(of_layer(given_tokens, layer))
                        kind.append(cache, layer, *[kind.changed(a, lay_out) for a in arguments])
                    try:
                        check(kind, cache, given_tokens)
                    except AssertionError as error:
                        raise AssertionError(f"{name} of {dtype}") from error

    def test_the_argument_may_be_changed_afterwards(self, kind: Kind, cache: Any) -> None:
        tokens = tokens_of(kind, 3)
        arguments = [kind.arguments(of_layer(tokens, i)) for i in range(max(kind.n_layers, 1))]
        for layer, own in enumerate(arguments):
            kind.append(cache, layer, *own)
            for argument in own:
                kind.overwrite(argument)
        check(kind, cache, tokens)

    # ---- forgetting ----

    @pytest.mark.parametrize("n", [0, 7, 20])
    def test_crop_keeps_the_first_tokens(self, kind: Kind, cache: Any, n: int) -> None:
        tokens, others = tokens_of(kind, 20), tokens_of(kind, 4, seed=1)
        fill(kind, cache, tokens)
        cache.crop(n)
        check(kind, cache, tokens[:n])
        fill(kind, cache, others)
        check(kind, cache, np.concatenate([tokens[:n], others]))
        cache.crop(np.int64(0))
        check(kind, cache, tokens[:0])

    def test_crop_of_what_is_not_there(self, kind: Kind, cache: Any) -> None:
        tokens = tokens_of(kind, 5)
        fill(kind, cache, tokens)
        for wrong in (6, -1, 2**62, 2**70):
            with unchanged(kind, cache, tokens), pytest.raises(ValueError, match="expected"):
                cache.crop(wrong)
        for wrong_type in (0.5, None, "1"):
            with unchanged(kind, cache, tokens), pytest.raises(TypeError):
                cache.crop(wrong_type)

    def test_clear(self, kind: Kind, cache: Any) -> None:
        tokens = tokens_of(kind, kind.capacity)
        cache.clear()
        for n in (3, kind.capacity):
            fill(kind, cache, tokens[:n])
            cache.clear()
            check(kind, cache, tokens[:0])
        fill(kind, cache, tokens)
        check(kind, cache, tokens)

    @settings(
        max_examples=examples(15),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(data=st.data())
    def test_any_calls_in_any_order(self, kind: Kind, data: st.DataObject) -> None:
        steps = st.lists(
            st.tuples(st.sampled_from(["append", "append", "crop", "clear"]), st.integers(0, 30)),
            max_size=12,
        )
        history = tokens_of(kind, 0)  # of a cache that forgets also what it does not show
        with kind.made() as cache:
            for i, (step, n) in enumerate(data.draw(steps)):
                shown = history[-kind.capacity :] if kind.forgets else history
                if step == "append":
                    tokens = tokens_of(kind, n, seed=i)
                    if len(shown) + n > kind.capacity and not kind.forgets:
                        with pytest.raises(um.CacheFull):
                            fill(kind, cache, tokens)
                    else:
                        fill(kind, cache, tokens)
                        history = np.concatenate([history, tokens])
                elif step == "clear":
                    cache.clear()
                    history = history[:0]
                else:
                    kept = min(n, len(shown))
                    try:
                        cache.crop(kept)
                        history = history[: len(history) - len(shown) + kept]
                    except ValueError:
                        # What would have to be shown again was overwritten.
                        assert kind.forgets
                        assert len(history) > kind.capacity
                check(kind, cache, history[-kind.capacity :] if kind.forgets else history)

    # ---- a call that fails changes nothing ----

    def test_a_wrong_shape(self, kind: Kind, cache: Any) -> None:
        self.refuse(kind, cache, SHAPES, ValueError)

    def test_a_wrong_dtype(self, kind: Kind, cache: Any) -> None:
        dtypes = [dtype for dtype in DTYPES if dtype not in kind.takes]
        casts = {dtype: partial(as_dtype, dtype=dtype) for dtype in dtypes}
        self.refuse(kind, cache, casts, TypeError)

    def test_what_is_no_array(self, kind: Kind, cache: Any) -> None:
        self.refuse(kind, cache, NO_ARRAYS, TypeError)

    def refuse(
        self,
        kind: Kind,
        cache: Any,
        changes: Mapping[str, Callable[[Array], Any]],
        error: type[Exception],
    ) -> None:
        """A wrong argument is refused with what was expected and what was given."""
        tokens = tokens_of(kind, 3)
        fill(kind, cache, tokens)
        for change in changes.values():
            right = kind.arguments(tokens)
            for changed in [{i} for i in range(len(right))] + [set(range(len(right)))]:
                case = [kind.changed(a, change) if i in changed else a for i, a in enumerate(right)]
                with unchanged(kind, cache, tokens), pytest.raises(error, match=r"expected.*got "):
                    kind.append(cache, 0, *case)

    # ---- views ----

    def test_a_view_stays_what_it_was(self, kind: Kind, cache: Any) -> None:
        tokens = tokens_of(kind, 10)
        fill(kind, cache, tokens[:4])
        view = kind.view(cache)
        expected = kind.stored(tokens[:4]).tobytes()
        assert kind.shown(view).tobytes() == expected
        fill(kind, cache, tokens[4:])
        cache.crop(5)
        fill(kind, cache, tokens[:3])
        assert kind.shown(view).tobytes() == expected
        check(kind, cache, np.concatenate([tokens[:5], tokens[:3]]))
        del view

    def test_a_view_of_what_was_forgotten_can_be_read(self, kind: Kind, cache: Any) -> None:
        tokens = tokens_of(kind, kind.capacity)
        fill(kind, cache, tokens)
        view = kind.view(cache)
        cache.clear()
        assert kind.shown(view).shape == tokens.shape
        fill(kind, cache, tokens[:2])
        assert kind.shown(view)[2:].tobytes() == kind.stored(tokens)[2:].tobytes()
        check(kind, cache, tokens[:2])
        del view

    # ---- the end ----

    def test_a_closed_cache_says_so(self, kind: Kind) -> None:
        with kind.made() as cache:
            tokens = tokens_of(kind, 2)
            fill(kind, cache, tokens)
            cache.close()
            cache.close()
            uses: list[Callable[[], Any]] = [
                lambda: kind.append(cache, 0, *kind.arguments(tokens)),
                lambda: kind.append(cache, 0, *kind.arguments(tokens[:0])),
                lambda: kind.read(cache, 0),
                lambda: kind.view(cache),
                lambda: kind.address(cache),
                lambda: len(cache),
                lambda: cache.crop(0),
                cache.clear,
                cache.__enter__,
            ]
            if hasattr(type(cache), "is_empty"):
                uses.append(lambda: cache.is_empty)
            for use in uses:
                with pytest.raises(um.ClosedError, match="closed"):
                    use()
            assert cache.closed
            assert "closed" in repr(cache)

    def test_leaving_the_with_closes(self, kind: Kind) -> None:
        with kind.made() as cache:
            assert cache.__enter__() is cache
            with pytest.raises(KeyError, match="mine"), cache:
                raise KeyError("mine")
            assert cache.closed
            cache.close()
            cache.__exit__(None, None, None)

    def test_a_cache_does_not_pickle(self, kind: Kind, cache: Any) -> None:
        tokens = tokens_of(kind, 3)
        fill(kind, cache, tokens)
        said = r"cannot be pickled: it is memory.*\. [A-Z]\w+ "  # what it is, and what to do
        for use in (pickle.dumps, copy.copy, copy.deepcopy):
            with unchanged(kind, cache, tokens), pytest.raises(TypeError, match=said):
                use(cache)

    def test_repr(self, kind: Kind, cache: Any) -> None:
        fill(kind, cache, tokens_of(kind, 7))
        assert "7" in repr(cache)
        assert "closed" not in repr(cache)

    # ---- fork ----

    def test_a_forked_child_has_its_own_copy_or_none(self, kind: Kind, cache: Any) -> None:
        tokens, others = tokens_of(kind, 5), tokens_of(kind, 2, seed=1)
        fill(kind, cache, tokens)
        arguments = kind.arguments(others)  # a child may have no device to make them on

        def child() -> bool:
            if kind.in_child:
                check(kind, cache, tokens)
                cache.crop(3)
                fill(kind, cache, others)
                check(kind, cache, np.concatenate([tokens[:3], others]))
                return True
            for use in (
                lambda: len(cache),
                lambda: kind.read(cache, 0),
                lambda: kind.append(cache, 0, *arguments),
                cache.clear,
            ):
                with pytest.raises(um.ClosedError, match="forked child"):
                    use()
            cache.close()
            return bool(cache.closed)

        assert in_child(child)
        with unchanged(kind, cache, tokens):
            pass
        fill(kind, cache, others)
        check(kind, cache, np.concatenate([tokens, others]))

    # ---- what it costs ----

    def test_nothing_ever_moves(self, kind: Kind, cache: Any) -> None:
        tokens = tokens_of(kind, kind.capacity)
        fill(kind, cache, tokens[:1])
        address = kind.address(cache)
        for n in (2, 8, 13):
            fill(kind, cache, tokens[:n])
            assert kind.address(cache) == address
        cache.crop(1)
        assert kind.address(cache) == address
        fill(kind, cache, tokens[1:])
        assert kind.address(cache) == address
        cache.clear()
        fill(kind, cache, tokens[:1])
        assert kind.address(cache) == address


class FullContract(Contract):
    """What a cache promises that does not forget: it is full at some time."""

    @pytest.mark.parametrize("held", [0, 22, 24])
    def test_what_does_not_fit_is_refused_whole(self, kind: Kind, cache: Any, held: int) -> None:
        tokens = tokens_of(kind, held)
        fill(kind, cache, tokens)
        for n in (kind.capacity - held + 1, 50 * kind.capacity):
            arguments = kind.arguments(tokens_of(kind, n, seed=1))
            for layer in range(max(kind.n_layers, 1)):
                with (
                    unchanged(kind, cache, tokens),
                    pytest.raises(um.CacheFull, match="asked for") as caught,
                ):
                    kind.append(cache, layer, *arguments)
                error = caught.value
                assert isinstance(error, MemoryError)
                assert 0 <= error.used <= error.limit < error.used + error.asked
        others = tokens_of(kind, kind.capacity - held, seed=2)
        fill(kind, cache, others)  # what fits, fits
        check(kind, cache, np.concatenate([tokens, others]))


class ForgettingContract(Contract):
    """What a cache promises that `Kind.forgets`."""

    def test_it_shows_the_last_tokens(self, kind: Kind, cache: Any) -> None:
        tokens = tokens_of(kind, 40 * kind.capacity)
        first = 0
        for n in (1, 5, 20, 24, 23, 100, 300, 1, 400):
            fill(kind, cache, tokens[first : first + n])
            first += n
            check(kind, cache, tokens[max(first - kind.capacity, 0) : first])


class LayerContract(Contract):
    """What a cache promises that has two layers."""

    def test_a_token_counts_when_every_layer_holds_it(self, kind: Kind, cache: Any) -> None:
        tokens = tokens_of(kind, 3)
        for layer in range(kind.n_layers):
            assert len(cache) == 0
            kind.append(cache, layer, *kind.arguments(of_layer(tokens, layer)))
        check(kind, cache, tokens)

    def test_a_layer_that_is_not_there(self, kind: Kind, cache: Any) -> None:
        tokens = tokens_of(kind, 3)
        fill(kind, cache, tokens)
        wrong: list[tuple[Any, type[Exception]]] = [
            *((layer, ValueError) for layer in (-1, kind.n_layers, 2**31, 2**62)),
            *((layer, TypeError) for layer in (0.5, None, "0")),
        ]
        for layer, error in wrong:
            with unchanged(kind, cache, tokens), pytest.raises(error):
                kind.append(cache, layer, *kind.arguments(tokens))
            with unchanged(kind, cache, tokens), pytest.raises(error):
                kind.read(cache, layer)


class OwnerContract(Contract):
    """What a cache promises that `Kind.owns_memory`: it goes with the cache and the last view."""

    def test_views_outlive_the_with(self, kind: Kind) -> None:
        tokens = tokens_of(kind, 5)
        with kind.made() as cache:
            fill(kind, cache, tokens)
            view, address = kind.view(cache), kind.address(cache)
        assert cache.closed
        assert kind.is_mapped(address)
        assert kind.shown(view).tobytes() == kind.stored(tokens).tobytes()
        del view
        gc.collect()
        assert not kind.is_mapped(address)

    def test_closing_with_live_views_is_refused(self, kind: Kind, cache: Any) -> None:
        tokens = tokens_of(kind, 5)
        fill(kind, cache, tokens)
        view, address = kind.view(cache), kind.address(cache)
        for _ in range(2):
            with (
                unchanged(kind, cache, tokens),
                pytest.raises(BufferError, match=r"live .*drop them"),
            ):
                cache.close()
        fill(kind, cache, tokens)
        del view
        cache.close()
        assert cache.closed
        assert not kind.is_mapped(address)

    def test_a_cache_that_is_dropped_open_warns(self, kind: Kind) -> None:
        cache = kind.make()
        fill(kind, cache, tokens_of(kind, 3))
        address = kind.address(cache)
        with warnings.catch_warnings():
            # A warning that is looked at holds what it is about; what that stands on goes later.
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()  # what earlier tests have left
            one = weakref.ref(cache)
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                del cache
                gc.collect()  # a cycle may hold it, such as of a traceback under a debugger
            said = [str(warning.message) for warning in found]
            found.clear()
            holders = gc.get_referrers(one()) if one() is not None else []
            assert any("unclosed" in text for text in said), f"no warning: held by {holders}"
            del holders
        assert not kind.is_mapped(address)


class GuestContract(Contract):
    """What a cache promises in memory of somebody else, who does not ask it."""

    def test_closing_leaves_the_views_alone(self, kind: Kind, cache: Any) -> None:
        tokens = tokens_of(kind, 5)
        fill(kind, cache, tokens)
        view, address = kind.view(cache), kind.address(cache)
        cache.close()
        assert cache.closed
        assert kind.shown(view).tobytes() == kind.stored(tokens).tobytes()
        del view
        assert kind.is_mapped(address)


class FixedContract(Contract):
    """What a cache promises that `Kind.is_fixed`."""

    @pytest.mark.usefixtures("no_collection")
    def test_the_steady_state_allocates_nothing_and_calls_nobody(
        self, kind: Kind, cache: Any
    ) -> None:
        tokens = tokens_of(kind, kind.capacity)
        before = kind.counters()
        for _ in range(3):
            for i in range(4):
                fill(kind, cache, tokens[i : i + 1])
            fill(kind, cache, tokens[4:20])
            view = kind.view(cache)
            del view
            fill(kind, cache, tokens[20:])
            kind.read(cache, 0)
            cache.crop(kind.capacity - 3)
            fill(kind, cache, tokens[:2])
            cache.clear()
        assert kind.counters() == before


def suites(kinds: Sequence[Kind]) -> dict[str, type[Contract]]:
    """The test classes of these kinds, to be put among a module's names."""
    chosen: dict[type[Contract], list[Kind]] = {
        # With states, crop goes back to checkpoints only: see contracts_of_states.
        CacheContract: [kind for kind in kinds if not kind.state_layers],
        FullContract: [kind for kind in kinds if not kind.forgets],
        ForgettingContract: [kind for kind in kinds if kind.forgets],
        LayerContract: [kind for kind in kinds if kind.n_layers],
        OwnerContract: [kind for kind in kinds if kind.owns_memory],
        GuestContract: [kind for kind in kinds if not kind.owns_memory],
        FixedContract: [kind for kind in kinds if kind.is_fixed and not kind.state_layers],
    }
    return classes_of(chosen)


def classes_of(chosen: Mapping[type[Contract], Sequence[Kind]]) -> dict[str, type[Contract]]:
    """The test classes of contracts, each for its kinds."""
    named = {f"Test{contract.__name__.removesuffix('Contract')}": contract for contract in chosen}
    return {
        name: type(name, (contract,), {"kind": kind_of(chosen[contract])})
        for name, contract in named.items()
        if chosen[contract]
    }
