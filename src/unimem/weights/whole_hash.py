"""The hash of all bytes of a model, remembered, so that a model is read whole once.

What was computed with a model is bound to this hash: `content_hash`, which reads everything. It is
remembered under a key that changes with the files: headers and sizes; the device, the inode and the
times of the last change of the data and of the inode of each file; and a sample of its data. A key
is the name of a file in ``hashes`` of the user's cache folder, and the hash its text.

A hash is not remembered while a file may change again under the same times, nor for files on a
server or files that are no longer those that were opened.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from weakref import WeakKeyDictionary

from unimem.base.atomic_file import write_text
from unimem.base.cache_folder import BudgetFolder, cache_folder, check_own_folder
from unimem.remote.client import is_url
from unimem.weights.content_hash import content_hash
from unimem.weights.files import ModelFile, identity_of
from unimem.weights.loading import Progress
from unimem.weights.opened import Weights
from unimem.weights.tensors import Contents

_HASH = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"[0-9a-f]{64}\.hash")
_MOST_FILES = 1024
_N_SAMPLES, _SAMPLE_BYTES = 64, 4096
# File systems count time in steps. A later write within one of them leaves the same times.
_STEP_NS = 2_000_000_000

_by_key: dict[str, str] = {}
# Of models in memory of their own, which do not change.
_by_model: WeakKeyDictionary[Weights, str] = WeakKeyDictionary()


def whole_hash(weights: Weights, progress: Progress | None = None) -> str:
    """Return the `content_hash` of a model, from memory if it is known there.

    Otherwise all data is read, as `Weights.content_hash` does.

    Raises
    ------
    OSError
        A mapped file has become shorter, or was replaced or written to since it was opened.
    """
    key, mapped = _key_of(weights), weights.load == "map"
    found = None if key is None else _find(key)
    if found is None and not mapped:
        found = _by_model.get(weights)
    if found is None:
        found = content_hash(weights, mapped=mapped, progress=progress)
        if key is not None and key == _key_of(weights) and _is_settled(weights):
            _keep(key, found)
        elif not mapped:
            _by_model[weights] = found
    return found


def is_hash_known(contents: Contents) -> bool:
    """Return whether `whole_hash` would not read the data of a model."""
    key = _key_of(contents)
    return key is not None and _find(key) is not None


def _key_of(contents: Contents) -> str | None:
    """Return the key of a model; None if its files are not there as they were opened."""
    digest = hashlib.sha256(contents.fingerprint.encode())
    try:
        for part in contents._parts:
            is_file = part.file.memory is None and not is_url(part.file.path)
            if not is_file or not _add_sample(digest, part.file):
                return None
    except OSError:
        return None
    return digest.hexdigest()


def _add_sample(digest: hashlib._Hash, file: ModelFile) -> bool:
    fd = os.open(file.absolute_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if identity_of(os.fstat(fd)) != (*file.version, file.changed_ns):
            return False
        digest.update(repr(file.identity).encode())
        last = max(file.nbytes - _SAMPLE_BYTES, 0)
        for i in range(_N_SAMPLES):
            digest.update(os.pread(fd, _SAMPLE_BYTES, file.begin + last * i // (_N_SAMPLES - 1)))
    finally:
        os.close(fd)
    return True


def _is_settled(contents: Contents) -> bool:
    """Return whether a write from now on would change the times of the files."""
    newest = max(max(part.file.version[3], part.file.changed_ns) for part in contents._parts)
    return time.time_ns() - newest > _STEP_NS


def _folder() -> Path | None:
    folder = cache_folder()
    return None if folder is None else Path(folder, "hashes")


def _find(key: str) -> str | None:
    folder = _folder()
    if key not in _by_key and folder is not None:
        with suppress(OSError, UnicodeDecodeError):
            check_own_folder(str(folder))
            path = folder / f"{key}.hash"
            text = path.read_text("utf-8")
            if _HASH.fullmatch(text):
                _by_key[key] = text
                os.utime(path)
    return _by_key.get(key)


def _keep(key: str, found: str) -> None:
    _by_key[key] = found
    folder = _folder()
    if folder is None:
        return
    with suppress(OSError):  # it is read again the next time
        check_own_folder(str(folder), create=True)
        write_text(folder / f"{key}.hash", found)
        kept = BudgetFolder(str(folder), _NAME)
        files = kept.files()
        if len(files) > _MOST_FILES:
            kept.remove_oldest(files, sum(file.nbytes for file in files) // 2)
