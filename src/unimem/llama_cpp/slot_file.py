"""Slot files of llama-server: the tokens of a sequence, its state, and the server's checkpoints."""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unimem.base.arguments import file_path, instance
from unimem.base.atomic_file import write_bytes
from unimem.base.descriptors import Descriptors
from unimem.errors import FormatError
from unimem.kv.token_ids import token_ids
from unimem.llama_cpp.state import (
    LlamaKV,
    begin_of_state,
    check_version,
    kv_to_state,
    state_to_kv,
)

_MAGIC = 0x67677371  # "ggsq" as a number
_HEAD = struct.Struct("<III")  # magic, version, tokens
# The newest servers write a list of tokens as: -1, 1, n, tokens, media. Others write tokens alone.
_MARKED, _MARKED_VERSION = -1, 1
_CHECKPOINTS = struct.pack("<4sI", b"SCKP", 1)


class SlotFile(NamedTuple):
    """What a slot file has.

    `checkpoints` are what layers with windows or states had at earlier numbers of tokens.
    """

    tokens: NDArray[np.int32]
    kv: LlamaKV
    checkpoints: tuple[tuple[int, LlamaKV], ...] = ()


def read_slot_file(path: str | os.PathLike[str]) -> SlotFile:
    """Read a slot file, as ``/slots/N?action=save`` or ``llama_state_seq_save_file`` writes it.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    SlotFile

    Raises
    ------
    FormatError
        It is not a slot file of a known version, or is damaged, or its tokens have images or sound.
    OSError
        It cannot be read.
    """
    name = file_path(path)
    try:
        with Descriptors() as fds:
            fd = fds.add_regular(name)
            nbytes = os.fstat(fd).st_size
            _check_head(os.pread(fd, _HEAD.size, 0), nbytes)
            return _parse(np.fromfile(f"/proc/self/fd/{fd}", np.uint8, nbytes))
    except FormatError as error:
        raise FormatError(error.rule, error.offset, name) from None


def write_slot_file(path: str | os.PathLike[str], tokens: NDArray[np.int32], kv: LlamaKV) -> None:
    """Write a slot file for ``/slots/N?action=restore`` or ``llama_state_seq_load_file``.

    It is of this user alone, unless it replaces a file with other permissions. It is written whole
    or not at all.

    Parameters
    ----------
    path : path-like
    tokens : int32 [kv.n_tokens]
    kv : LlamaKV

    Raises
    ------
    OSError
        It cannot be written.
    """
    write_bytes(path, slot_file_bytes(tokens, kv))


def slot_file_bytes(tokens: NDArray[np.int32], kv: LlamaKV) -> bytes:
    """Return what a slot file has."""
    state = kv_to_state(instance(kv, "kv", LlamaKV)._replace(head=b""))
    ids = token_ids(tokens).astype("<i4")
    return _HEAD.pack(_MAGIC, kv.version, len(ids)) + ids.tobytes() + state


def _check_head(head: bytes, nbytes: int) -> tuple[int, int]:
    """Return the version, and where the state begins in a file of `nbytes`."""
    if len(head) < _HEAD.size:
        raise FormatError(f"the file is cut off inside its header: it has {len(head)} bytes")
    magic, version, n = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise FormatError("this is no slot file of llama.cpp: it does not begin with ggsq", 0)
    check_version(version)
    begin = _HEAD.size + 4 * n
    if begin > nbytes:
        raise FormatError(f"the file is cut off inside its {n} tokens", nbytes)
    return version, begin


def _parse(data: NDArray[np.uint8]) -> SlotFile:
    version, begin = _check_head(data[: _HEAD.size].tobytes(), data.size)
    tokens = _tokens(data[_HEAD.size : begin].view("<i4"))
    try:
        kv, end = begin_of_state(data[begin:], version, _CHECKPOINTS)
        return SlotFile(tokens, kv, _checkpoints(data[begin + end :], version))
    except FormatError as error:
        raise FormatError(error.rule, begin + (error.offset or 0)) from None


def _tokens(packed: NDArray[np.int32]) -> NDArray[np.int32]:
    if packed.size and packed[0] == _MARKED:
        is_known = packed.size > 3 and packed[1] == _MARKED_VERSION and packed[2] >= 0
        if not is_known or packed.size != packed[2] + 4 or packed[-1]:
            raise FormatError("tokens that stand for images or sound are not known", _HEAD.size)
        packed = packed[3:-1]
    if packed.size and packed.min() < 0:
        raise FormatError("a token has a negative number", _HEAD.size)
    return packed.astype(np.int32)


def _checkpoints(data: NDArray[np.uint8], version: int) -> tuple[tuple[int, LlamaKV], ...]:
    if not data.size:
        return ()

    def take(at: int, n: int) -> NDArray[np.uint8]:
        if at + n > data.size:
            raise FormatError("the file is cut off inside its checkpoints", data.size)
        return data[at : at + n]

    found = []
    at = len(_CHECKPOINTS) + 4
    for _ in range(int(take(at - 4, 4).view("<u4")[0])):
        n_tokens = int(take(at, 16)[:8].view("<i8")[0])
        at += 16
        buffers = []
        for _ in range(3):  # of the model, of a draft model, of speculation
            n = int(take(at, 8).view("<u8")[0])
            buffers.append(take(at + 8, n))
            at += 8 + n
        found.append((n_tokens, state_to_kv(buffers[0], version=version)))
    return tuple(found)
