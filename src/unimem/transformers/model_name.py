"""The name of a model: its configuration, every byte of its weights, and its adapters.

A name is ``2-`` and 32 hexadecimal digits. Names of earlier versions have digits only: they are of
samples of the weights, and are refused.

Nothing is remembered. torch counts writes to a tensor, but not those through ``.data``, by which
adapters are merged, nor those of NumPy. Hashing takes about as long as the weights take to be read
from memory once, and less than a token does.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from transformers import PreTrainedModel

from unimem.system import limits
from unimem.weights.content_hash import Hashed, hash_in_threads

_VERSION = "2-"
# Fields of a configuration that do not change what a model computes.
_UNRELATED = {"transformers_version", "architectures", "use_cache", "dtype", "torch_dtype"}
# How PEFT's layers apply their adapters.
_OF_ADAPTERS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
_PIECE_BYTES = 8 << 20

_Place: TypeAlias = tuple[Any, ...]


def model_name(model: PreTrainedModel) -> str:
    """Name a model by its configuration and all of its weights, which are read.

    Raises
    ------
    ValueError
        Weights are neither in memory nor offloaded by Accelerate; or an adapter of PEFT puts tokens
        of its own before those of a text.
    """
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            "model: expected adapters of weights, got one of PEFT that learns a prompt, whose "
            "tokens have no ids: call generate with a cache that is not saved or put into a store"
        )
    fields = model.config.to_dict()
    text = "".join(
        f"{name}={fields[name]!r}\n"
        for name in sorted(fields)
        if not name.startswith("_") and name not in _UNRELATED
    )
    return _VERSION + xxhash.xxh3_128_hexdigest((text + weights_hash(model)).encode())


def weights_hash(module: torch.nn.Module) -> str:
    """Hash all parameters and buffers of a module, whatever their layout, and its adapters."""
    total, tensors = xxhash.xxh3_128(), dict(_tensors(module))
    digests = _digests(tensor for tensor in tensors.values() if not tensor.is_meta)
    for name in sorted(tensors):
        tensor, known = tensors[name], digests
        if tensor.is_meta:  # one at a time, since they may not fit into memory
            tensor = _offloaded(module, name)
            known = _digests([tensor])
        kind = f"{tuple(tensor.shape)} {tensor.dtype}"
        total.update(f"{name} {kind}\n".encode() + known[_place(tensor)])
    for name, part in module.named_modules():
        if isinstance(getattr(part, "merged_adapters", None), list):
            applied = [getattr(part, each, None) for each in _OF_ADAPTERS]
            total.update(f"{name} {applied}\n".encode())
    return total.hexdigest()


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all state by its name: dense tensors, and everything else as torch saves it."""
    state = dict(module.named_buffers(remove_duplicate=False))
    state = {name: value for name, value in state.items() if not _grows(module, name)}
    state |= dict(module.named_parameters(remove_duplicate=False)) | module.state_dict()
    for name, value in state.items():
        yield name, value.detach() if _is_dense(value) else _saved(value)


def _offloaded(module: torch.nn.Module, name: str) -> torch.Tensor:
    """Read what Accelerate has offloaded, such as to a disk."""
    parts = name.split(".")
    for i in reversed(range(len(parts))):
        hook = getattr(module.get_submodule(".".join(parts[:i])), "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            weights, own = getattr(one, "weights_map", None), ".".join(parts[i:])
            # `in` would read the whole tensor.
            with suppress(KeyError):
                if weights is not None:
                    found: torch.Tensor = weights[own].detach()
                    return found
    raise ValueError(
        f"model: expected weights in memory, or offloaded by Accelerate, got {name} on meta: load "
        "it without offloading, such as with device_map='cpu'"
    )


def _grows(module: torch.nn.Module, name: str) -> bool:
    """Return whether a buffer is a table of positions that the length of a text changes.

    Its first values are another buffer, and the configuration says how they change.
    """
    place, _, own = name.rpartition(".")
    grown = turns_by_length(module.get_submodule(place))
    return grown and own.endswith("inv_freq") and "original" not in own


def turns_by_length(part: torch.nn.Module) -> bool:
    """Return whether a part of a model turns keys by the length of the whole text."""
    kind = str(getattr(part, "rope_type", ""))
    return "dynamic" in kind or "longrope" in kind


def _is_dense(value: Any) -> bool:
    """Return whether the elements are all there is to a tensor."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
        and not hasattr(type(value), "__tensor_flatten__")
    )


def _saved(value: Any) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _place(tensor: torch.Tensor) -> _Place:
    """Return what tensors of the same elements have in common."""
    where = str(tensor.device), tensor.data_ptr(), tensor.is_conj(), tensor.is_neg()
    return *where, tensor.dtype, tuple(tensor.shape), tensor.stride()


def _digests(tensors: Iterable[torch.Tensor]) -> dict[_Place, bytes]:
    """Hash the elements of tensors. What has to be copied is copied one by one."""
    by_place = {_place(tensor): tensor for tensor in tensors}
    as_they_are = {place: one for place, one in by_place.items() if _as_elements(one) is one}
    found = _hashes(as_they_are)
    for place, tensor in by_place.items():
        if place not in found:
            found |= _hashes({place: _as_elements(tensor)})
    return found


def _as_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of the same elements in main memory."""
    return tensor.cpu().resolve_conj().resolve_neg().contiguous()


def _hashes(tensors: dict[_Place, torch.Tensor]) -> dict[_Place, bytes]:
    pieces = {place: _pieces(tensor) for place, tensor in tensors.items()}
    work = [Hashed(piece, None) for each in pieces.values() for piece in each]
    threads = limits.thread_count()
    digests = iter(hash_in_threads(work, threads, None, lambda data: data.ctypes.data))
    return {place: b"".join(islice(digests, len(each))) for place, each in pieces.items()}


def _pieces(tensor: torch.Tensor) -> list[NDArray[np.uint8]]:
    data: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return [data[i : i + _PIECE_BYTES] for i in range(0, data.nbytes, _PIECE_BYTES)]
