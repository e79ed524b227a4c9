"""unimem's memory as tensors of torch, without a copy.

Needs torch (the extra ``torch``). Caches and scratchpads take tensors of torch, and
``torch.from_dlpack`` takes views of all of unimem's memory; this module is for the rest. See
docs/torch.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from unimem._core.block import Block
from unimem._core.dlpack import exported
from unimem.base.arguments import flag, one_of
from unimem.base.install_hint import install_hint
from unimem.errors import ClosedError
from unimem.weights.files import version_of
from unimem.weights.opened import Weights
from unimem.weights.tensors import Tensor

__all__ = ["load_state_dict", "tensor"]


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"unimem.torch needs torch: {install_hint('torch')}; importing it said: {error}"
        ) from error
    return torch


def tensor(view: Any) -> Any:
    """View an array as a tensor of torch, over the same memory.

    Parameters
    ----------
    view : array
        A view of a cache, a tape or a block, a tensor of opened weights, or another array that is
        NumPy's or has ``__dlpack__``. ml_dtypes' types are allowed.

    Returns
    -------
    torch.Tensor
        With the shape, dtype and strides of `view`; it keeps the memory alive. A tensor of type
        ``"f4"`` is torch's ``float4_e2m1fn_x2``, which has two values in each element. torch has no
        read-only tensors: writing to the tensor of a read-only `view` is not allowed, and over a
        mapped file the kernel ends the program (SIGSEGV).

    Raises
    ------
    TypeError
        It is no array, or torch lacks its type or strides, such as the blocks of a ``"q8_0"``
        cache.
    ImportError
        torch is not installed.
    ClosedError
        The memory of `view` was closed.
    """
    torch = _torch()
    if isinstance(view, Tensor):
        if view.type == "f4":
            return tensor(_checked(view, None, view.name)).view(_float4(view))
        view = view.as_array()
    if isinstance(view, np.ndarray):
        if min(view.strides, default=0) < 0:  # torch would end the process
            raise TypeError(
                f"view: expected an array that torch can show, got strides of {view.strides}: "
                "torch has none below 0"
            )
        view = exported(view)
    elif not hasattr(type(view), "__dlpack__"):
        raise TypeError(
            "view: expected an array of NumPy, or another that has __dlpack__, got "
            f"{type(view).__name__}"
        )
    if isinstance(view, torch.Tensor) and (view.is_neg() or view.is_conj()):
        raise TypeError(
            "view: expected an array whose memory has its values, got a tensor that is negated or "
            "conjugated lazily: give .resolve_conj().resolve_neg()"
        )
    try:
        return torch.from_dlpack(view)
    except ClosedError:
        raise
    except (BufferError, RuntimeError, ValueError) as error:
        kind = getattr(view, "dtype", type(view).__name__)
        said = str(error).partition("\n")[0]
        raise TypeError(
            f"view: expected an array that torch can show, got one of {kind}: {said}"
        ) from None


def _float4(given: Tensor) -> Any:
    """Return torch's type of two 4-bit floating-point numbers a byte."""
    kind = getattr(_torch(), "float4_e2m1fn_x2", None)
    if kind is None:
        raise TypeError(
            f"view: expected a torch that has float4_e2m1fn_x2 for tensor '{given.name}', got "
            f"{_torch().__version__}: use torch 2.8, or as_array(), which gives bytes"
        )
    return kind


def _typed(given: Any, source: Tensor, name: str, dtype: Any) -> Any:
    """Return a tensor for a module, 4-bit numbers as such unless the module has bytes."""
    if source.type != "f4" or dtype == _torch().uint8:
        return given
    if dtype != (kind := _float4(source)):  # torch converts to no other type
        raise TypeError(
            f"module: expected '{name}' in {kind} or torch.uint8 for tensor '{source.name}' of "
            f"type f4, got {dtype}"
        )
    return given.view(kind)


# Parameters over a model's memory, by identity; the first makes the table, since it needs torch.
_UNWRITABLE: list[Any] = []


def _refuse_step(optimizer: Any, *_: Any) -> None:
    """Raise RuntimeError before an optimizer writes to a model's memory, for all optimizers."""
    from torch.compiler import is_compiling

    if is_compiling():  # such a step looks at no table
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            # A conversion gives the parameter memory of its own.
            if _UNWRITABLE[0].get(parameter) == parameter.data_ptr():
                raise RuntimeError(
                    "optimizer: expected parameters that may be written, got one of shape "
                    f"{tuple(parameter.shape)} in a model's memory: "
                    "unimem.torch.load_state_dict(module, weights, writable='copy')"
                )


def _guard(parameters: list[Any]) -> None:
    """Let steps of optimizers be refused for these."""
    if not _UNWRITABLE:
        from torch.optim.optimizer import register_optimizer_step_pre_hook
        from torch.utils.weak import WeakIdKeyDictionary

        _UNWRITABLE.append(WeakIdKeyDictionary())
        register_optimizer_step_pre_hook(_refuse_step)
    _UNWRITABLE[0].update({one: one.data_ptr() for one in parameters})


def load_state_dict(
    module: Any,
    weights: Weights,
    *,
    names: Mapping[str, str] | None = None,
    strict: bool = True,
    writable: Literal["copy"] | None = None,
) -> list[str]:
    """Give a module the tensors of a model, without a copy if their dtypes agree.

    If it raises, the module is unchanged.

    Parameters
    ----------
    module : torch.nn.Module
        It may be without memory, as made by ``with torch.device("meta"):``.
    weights : Weights
        An opened model, whose memory the module keeps alive from then on.
    names : mapping of str to str, optional
        Maps names of the module to names of the model's tensors, if they differ.
    strict : bool, default True
        Whether each parameter must be in the model, and each tensor of the model in the module.
    writable : {"copy"}, optional
        ``"copy"``: parameters may be written, and keep `requires_grad`. They are mapped anew, and a
        page is copied when it is first written; weights that are no mapped files are copied at
        once. Neither the file nor `weights` ever changes.

    Returns
    -------
    list of str
        The copied tensors, which the module has in another dtype or on another device; a parameter
        with two names is listed by the first. All others are the model's own memory, and their
        parameters require no gradient, since writing is not allowed: the step of an optimizer
        raises RuntimeError, and other writes are not seen; see `tensor`.

    Raises
    ------
    ValueError
        Names or shapes differ; the message has them.
    TypeError
        `module` or `weights` has a wrong type, or torch lacks the type of a tensor, such as
        ``"q4_K"``.
    ImportError
        torch is not installed.
    ClosedError
        The weights were closed.
    """
    torch = _torch()
    flag(strict, "strict")
    if writable is not None:
        one_of(writable, "writable", ("copy",))
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    if not isinstance(weights, Weights):
        raise TypeError(
            f"weights: expected what open_weights returns, got {type(weights).__name__}"
        )
    own = module.state_dict(keep_vars=True)
    own = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
    called = _called(own, weights, {} if names is None else names)
    # The model usually has one name for a parameter that the module has under several.
    first: dict[int, str] = {}
    for name, value in own.items():
        if called[name] in weights.tensors:
            first.setdefault(id(value), name)
    if strict:
        lacking = {called[name] for name, value in own.items() if id(value) not in first}
        _refuse(lacking, "that the module has and the model has not")
        unused = {*weights.tensors} - {*called.values()}
        _refuse(unused, "that the model has and the module has not")
    made: dict[int, Any] = {}
    copied: list[str] = []
    mapped: list[str] = []
    files = _private_files(weights) if writable else {}
    private: set[str] = set()
    for number, name in first.items():
        value, source = own[name], weights.tensors[called[name]]
        array = _checked(source, tuple(value.shape), name)
        whole = files.get(source.file)
        if called[name] in private:  # each parameter has pages of its own
            whole = None
        private.add(called[name])
        if whole is not None:
            own_pages = whole[source.offset : source.offset + source.nbytes]
            array = own_pages.view(array.dtype).reshape(array.shape)
        given = _typed(tensor(array), source, name, value.dtype)
        device = given.device if value.device.type == "meta" else value.device
        fitted = given.to(device, value.dtype, copy=writable is not None and whole is None)
        (mapped if fitted is given else copied).append(name)
        if isinstance(value, torch.nn.Parameter):
            fitted = torch.nn.Parameter(
                fitted, requires_grad=bool(writable and value.requires_grad)
            )
        made[number] = fitted
    state = {name: made[id(value)] for name, value in own.items() if id(value) in made}
    module.load_state_dict(state, strict=False, assign=True)
    if not writable:
        for name in mapped:  # torch copies requires_grad from the old parameter
            state[name].requires_grad_(False)
        _guard([state[name] for name in mapped])
    return copied


def _private_files(weights: Weights) -> dict[str, np.ndarray[Any, Any]]:
    """Map the files of a mapped model copy-on-write, by path, where they are as they were."""
    made: dict[str, np.ndarray[Any, Any]] = {}
    for part in weights._parts if weights.load == "map" else ():
        file = part.file
        if file.memory is None:
            with suppress(OSError):
                with Block.map(file.absolute_path, mode="c", name=file.path) as block:
                    whole = block.as_array("uint8")
                if version_of(os.stat(file.absolute_path)) == file.version:
                    made[file.path] = whole
    return made


def _called(own: Mapping[str, Any], weights: Weights, names: Mapping[str, str]) -> dict[str, str]:
    """Return the model's name for each of the module's names."""
    if not isinstance(names, Mapping):
        raise TypeError(f"names: expected a mapping of str to str, got {type(names).__name__}")
    _refuse({*names} - {*own}, "in names= that the module has not")
    _refuse({*names.values()} - {*weights.tensors}, "in names= that the model has not")
    return {name: name for name in own} | dict(names)


def _refuse(names: Set[str], what: str) -> None:
    """Raise ValueError if there are any names."""
    if names:
        shown = ", ".join(map(str, sorted(names)[:8])) + (", ..." if len(names) > 8 else "")
        raise ValueError(
            "names: expected those of the module and those of the model to agree, got "
            f"{len(names)} {what}: {shown}; names= maps them, and strict=False leaves out what is "
            "not there"
        )


def _checked(given: Tensor, shape: tuple[int, ...] | None, name: str) -> np.ndarray[Any, Any]:
    """Return a model's tensor as an array; raise unless it fits, of any shape if that is None."""
    array = given.as_array()
    there = given.shape
    if given.type == "f4" and given.shape and given.shape[-1] % 2 == 0:  # two values in a byte
        there = (*given.shape[:-1], given.shape[-1] // 2)
    if array.shape != there:
        raise TypeError(
            f"weights: expected tensor '{given.name}' in a type that torch has, got {given.type}, "
            "whose bytes are no numbers: dequantize() gives float32"
        )
    if shape not in (None, there):
        raise ValueError(
            f"weights: expected tensor '{given.name}' of shape {shape}, as the module has "
            f"'{name}', got {there}"
        )
    return array
