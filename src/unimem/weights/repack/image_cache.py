"""The folder that keeps repacked images on disk, within a budget.

The name of an image is the hash of all that its bytes depend on.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from unimem.base.arguments import file_path
from unimem.base.atomic_file import TEMPORARY, NewFile
from unimem.base.cache_folder import (
    OTHERS_WRITE,
    BudgetFolder,
    CachedFile,
    cache_folder,
    check_own_folder,
    default_bytes,
)
from unimem.base.text import format_bytes
from unimem.errors import FormatError
from unimem.remote.client import is_url
from unimem.system import policy
from unimem.weights.files import identity_of
from unimem.weights.repack.arrangement import Arrangement
from unimem.weights.repack.image import Image, is_for, pack_image
from unimem.weights.repack.image_format import image_bytes, key_of
from unimem.weights.tensors import Contents

CacheChoice = bool | str | os.PathLike[str] | None

_SUFFIX = ".repacked"
_IMAGE = re.compile(rf"[^.].*{re.escape(_SUFFIX)}", re.S)
_LEFT_BEHIND = re.compile(rf"\..*({re.escape(TEMPORARY)}|\.lock)", re.S)
_SIZE = re.compile(r"([0-9]{1,15})([kmgt]?)(i?b)?", re.I | re.A)
_SCALES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


# ---- the choice of a folder ---------------------------------------------------------------------


def check_cache(cache: CacheChoice) -> None:
    """Raise TypeError or ValueError unless the value is a `CacheChoice`."""
    if cache is not None and not isinstance(cache, bool):
        try:
            file_path(cache, "cache")
        except TypeError:
            raise TypeError(
                f"cache: expected True, False, a folder or None, got {cache!r:.60}"
            ) from None


def choose_cache(
    contents: Contents, cache: CacheChoice, *, create: bool = True
) -> ImageCache | None:
    """Choose where the image of a model is kept; None to keep no image.

    `cache` is False for nowhere, True for `cache_folder`, or a path. None is as True, unless
    another user owns or may write to a file of the model or its folder. With `create`, the folder
    is made and the size of the cache is checked.

    Raises
    ------
    TypeError
        `cache` is none of these.
    ValueError
        ``UNIMEM_CACHE_BYTES`` is no size.
    OSError
        The requested folder cannot be used.
    """
    if cache is False:
        return None
    if cache is not None and (untold := _file_without_version(contents)):
        policy.warn(f"{untold}: the server tells no version of it, so no image of it is kept")
        return None
    if cache is None or cache is True:
        folder = cache_folder()
        if folder is None or (cache is None and not _is_own_model(contents)):
            return None
    else:
        folder = os.path.abspath(file_path(cache, "cache"))
    try:
        found = ImageCache(folder, create=create)
    except OSError:
        if cache is None:
            return None
        raise
    if create:
        found.most_bytes()  # so that a wrong size is refused before the model is repacked
    return found


def _file_without_version(contents: Contents) -> str:
    """Return a file on a server that reports no version; "" if all have versions."""
    files = (part.file for part in contents._parts)
    return next((one.path for one in files if is_url(one.path) and not one.version[3]), "")


def _is_own_model(contents: Contents) -> bool:
    for part in contents._parts:
        if is_url(part.file.path):
            return False
        path = os.path.realpath(part.file.absolute_path)
        try:
            found = os.stat(path), os.stat(os.path.dirname(path))
        except OSError:
            return False
        if any(info.st_uid != os.geteuid() or info.st_mode & OTHERS_WRITE for info in found):
            return False
    return True


# ---- the folder ---------------------------------------------------------------------------------


class CachedImage(NamedTuple):
    """One image of the folder.

    Attributes
    ----------
    key, path, nbytes : str, str, int
        Its name (the hash of all that its bytes depend on), its file, and the file's bytes.
    used : float
        When it was last used, in seconds since 1970.
    model, current : str or None, bool
        The model that it was made from, and whether that is unchanged.
    problem : str or None
        The fault of a damaged image, whose model is None.
    """

    key: str
    path: str
    nbytes: int
    used: float
    model: str | None
    current: bool
    problem: str | None


class ImageCache:
    """A folder of images of this user. Any number of threads and processes may use it.

    `folder` is its absolute path; `create` makes a missing one. It raises OSError if the folder
    cannot be made or examined, and PermissionError if other users own it or may write to it.
    """

    def __init__(self, folder: str, *, create: bool = False) -> None:
        self.folder = folder
        self._files = BudgetFolder(folder, _IMAGE)
        check_own_folder(folder, create=create)

    def path_of(self, key: str) -> str:
        """Return the path of an image, whether it exists or not."""
        return os.path.join(self.folder, key + _SUFFIX)

    def find(self, found: Arrangement, identity: dict[str, Any]) -> Image | None:
        """Open the image of a model and note its use; remove a damaged image.

        Its header is checked, and its data is not read yet.
        """
        self._sweep()
        try:
            image = self._open(found, identity)
        except FormatError as error:
            self.discard(key_of(identity), str(error))
            return None
        if image is not None:
            with suppress(OSError):
                os.utime(image.path)
        return image

    def look(self, found: Arrangement, identity: dict[str, Any]) -> Image | None:
        """Open the image of a model as `find`, without changes; None for a damaged image."""
        with suppress(FormatError):
            return self._open(found, identity)
        return None

    def _open(self, found: Arrangement, identity: dict[str, Any]) -> Image | None:
        """Open the image of a model; raise FormatError for a damaged image."""
        key = key_of(identity)
        try:
            image = Image(self.path_of(key))
        except OSError:  # missing, or another user's
            return None
        if image.header.key != key or not is_for(image.header, found):
            image.close()
            raise FormatError("it is not of what its name says", None, image.path)
        return image

    def discard(self, key: str, why: str) -> None:
        """Remove a damaged image, with a warning."""
        with suppress(OSError):
            os.unlink(self.path_of(key))
        policy.warn(f"a repacked image of the cache was removed: {why}")

    @contextmanager
    def making(self, identity: dict[str, Any]) -> Iterator[None]:
        """Hold the lock of this image, so that only one process makes it at a time."""
        path = os.path.join(self.folder, f".{key_of(identity)}.lock")
        with ExitStack() as undo:
            with suppress(OSError):  # without a lock, both make it and one result stays
                while True:
                    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                    with ExitStack() as closes:
                        closes.callback(os.close, fd)
                        fcntl.flock(fd, fcntl.LOCK_EX)
                        # The process that held the lock before may have removed the file.
                        if os.fstat(fd).st_nlink and os.path.samestat(os.stat(path), os.fstat(fd)):
                            closes.pop_all()
                            undo.callback(_unlock, path, fd)
                            break
            yield

    def new_file(self, found: Arrangement, identity: dict[str, Any], model: str) -> NewFile:
        """Begin an image, and remove the least recently used images to make room.

        The room on the disk is allocated; the caller writes (`write_image`) and publishes the file.
        `model` is the path of the model, for `images`. Whoever may read the model may read the
        image, if the folder lets them.

        Raises
        ------
        OSError
            The image is larger than the budget, and nothing has changed; or the disk is full, and
            the images that made room are gone.
        ValueError
            The model has too many tensors.
        """
        nbytes = image_bytes(len(pack_image(found, identity, model, None)), found.nbytes)
        path = self.path_of(key_of(identity))
        most = self.most_bytes()
        if nbytes > most:
            raise OSError(
                errno.EFBIG,
                f"the image has {format_bytes(nbytes)}, and the cache at most {format_bytes(most)}"
                ": UNIMEM_CACHE_BYTES sets that",
                path,
            )
        self._sweep()
        others = [file for file in self._files.files() if file.name != os.path.basename(path)]
        self._files.remove_oldest(others, sum(file.nbytes for file in others) + nbytes - most)
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(path).st_mode):  # NewFile would not replace it
                os.unlink(path)
        with ExitStack() as undo:
            new = undo.enter_context(NewFile(path, _mode_of(model)))
            new.allocate(nbytes)
            undo.pop_all()
        return new

    def most_bytes(self) -> int:
        """Return the budget: ``UNIMEM_CACHE_BYTES``, or a tenth of the file system.

        It raises ValueError if the variable is no size.
        """
        text = os.environ.get("UNIMEM_CACHE_BYTES", "")
        if not text:
            return default_bytes(self.folder)
        found = _SIZE.fullmatch(text)
        if found is None:
            raise ValueError(f"UNIMEM_CACHE_BYTES: expected a size as 20G, got {text!r:.40}")
        return int(found[1]) * _SCALES[found[2].lower()]

    def _sweep(self) -> None:
        """Remove unlocked temporary files and locks, which killed processes have left."""
        self._files.sweep(_LEFT_BEHIND)

    def images(self) -> list[CachedImage]:
        """List the images, the most recently used first; data is not read."""
        found = [self._describe(file) for file in self._files.files()]
        return sorted(found, key=lambda image: (-image.used, image.key))

    def _describe(self, file: CachedFile) -> CachedImage:
        path, key = os.path.join(self.folder, file.name), file.name.removesuffix(_SUFFIX)
        model, current, problem = None, False, None
        try:
            with Image(path) as image:
                model = image.header.model
                current = _is_current(image.header.identity, model)
        except (OSError, FormatError) as error:
            problem = error.rule if isinstance(error, FormatError) else error.strerror or str(error)
        return CachedImage(key, path, file.nbytes, file.used_ns / 1e9, model, current, problem)

    def drop(self, images: Sequence[CachedImage]) -> None:
        """Remove images; processes that have an image mapped keep it."""
        self._sweep()
        for image in images:
            with suppress(FileNotFoundError):
                os.unlink(image.path)

    def verify(
        self, image: CachedImage, progress: Callable[[int, int], object] | None = None
    ) -> str | None:
        """Read an image and compare every hash; remove a damaged image and return its fault."""
        try:
            with Image(image.path) as opened:
                if opened.header.key != image.key:
                    return self._removed(image, "it is not of what its name says")
                opened.check(progress=progress)
        except FormatError as error:
            return self._removed(image, error.rule)
        except FileNotFoundError:  # another process has removed it
            return None
        return None

    def _removed(self, image: CachedImage, why: str) -> str:
        with suppress(FileNotFoundError):
            os.unlink(image.path)
        return why


def _unlock(path: str, fd: int) -> None:
    with suppress(OSError):
        os.unlink(path)
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child has the descriptor, too
    os.close(fd)


def _mode_of(model: str) -> int:
    """Return the mode of an image: others may read it if they may read the model."""
    with suppress(OSError, ValueError):
        return 0o600 | stat.S_IMODE(os.stat(model).st_mode) & 0o044
    return 0o600


def _is_current(identity: dict[str, Any], model: str) -> bool:
    try:
        return bool(list(identity_of(os.stat(model))) == identity["files"][0])
    except (OSError, ValueError, LookupError, TypeError):
        return False
