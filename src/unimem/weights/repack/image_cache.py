"""The folder that keeps repacked images on disk: found again, replaced whole, and never too many.

There is no index that could be wrong: an image is found by its name, which is the hash of all that
its bytes depend on. The time of its last use is that of its file.
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
from unimem.base.atomic_file import NewFile
from unimem.base.cache_folder import OTHERS_WRITE, cache_folder, check_own_folder, default_bytes
from unimem.base.text import format_bytes
from unimem.errors import FormatError
from unimem.remote.client import is_url
from unimem.system import policy
from unimem.weights.files import identity_of
from unimem.weights.repack.image import Image, is_for, pack_image
from unimem.weights.repack.image_format import image_bytes, key_of
from unimem.weights.repack.repacked import Arrangement
from unimem.weights.tensors import Contents

__all__ = [
    "CacheChoice",
    "CachedImage",
    "ImageCache",
    "check_cache",
    "choose_cache",
]

CacheChoice = bool | str | os.PathLike[str] | None

_SUFFIX = ".repacked"
_TEMPORARY = ".unimem-tmp"  # of `atomic_file`
_SIZE = re.compile(r"([0-9]{1,15})([kmgt]?)(i?b)?", re.I | re.A)
_SCALES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


# ---- which folder -------------------------------------------------------------------------------


def check_cache(cache: CacheChoice) -> None:
    """Raise TypeError or ValueError for what is no `CacheChoice`."""
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
    """Choose where the image of a model is kept; None where it is not.

    Parameters
    ----------
    contents : Contents
        The model.
    cache : bool or path-like, optional
        False: nowhere. True: in `cache_folder`. A path: in this folder. None: as True, unless
        another user owns or may write a file of the model, or the folder that it lies in.
    create : bool
        Whether the folder is made, and the size of the cache checked: False only looks.

    Raises
    ------
    TypeError
        None of these.
    ValueError
        ``UNIMEM_CACHE_BYTES`` is no size.
    OSError
        The folder that was asked for cannot be used.
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
        found.most_bytes()  # before anything is repacked that could not be kept
    return found


def _file_without_version(contents: Contents) -> str:
    """Return a file on a server that may be another one the next time; "" for none."""
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
    key : str
        Its name: the hash of what its bytes depend on.
    path : str
        Its file.
    nbytes : int
        Bytes of the file.
    used : float
        When it was used last: seconds since 1970.
    model : str or None
        The model that it was made of; None of one that is damaged.
    current : bool
        Whether that model is still what it was.
    problem : str or None
        What is wrong with it.
    """

    key: str
    path: str
    nbytes: int
    used: float
    model: str | None
    current: bool
    problem: str | None


class ImageCache:
    """A folder of images, of this user. Any number of threads and processes may use it.

    Parameters
    ----------
    folder : str
        Its absolute path.
    create : bool
        Whether to make it where there is none.

    Raises
    ------
    OSError
        It cannot be made or looked at; PermissionError where other users own it or may write it.
    """

    def __init__(self, folder: str, *, create: bool = False) -> None:
        self.folder = folder
        check_own_folder(folder, create=create)

    def path_of(self, key: str) -> str:
        """Return the file of an image, there or not."""
        return os.path.join(self.folder, key + _SUFFIX)

    def find(self, found: Arrangement, identity: dict[str, Any]) -> Image | None:
        """Open the image of a model, and note that it was used; one that is damaged is removed.

        Parameters
        ----------
        found : Arrangement
            What of the model is repacked.
        identity : dict
            What the image has to be.

        Returns
        -------
        Image or None
            Its header was checked, and its data is not read yet.
        """
        self._sweep()
        key = key_of(identity)
        try:
            image = Image(self.path_of(key))
        except FormatError as error:
            self.discard(key, str(error))
            return None
        except OSError:  # there is none, or none of this user
            return None
        if image.header.key != key or not is_for(image.header, found):
            image.close()
            self.discard(key, f"{image.path}: it is not of what its name says")
            return None
        with suppress(OSError):
            os.utime(image.path)
        return image

    def look(self, found: Arrangement, identity: dict[str, Any]) -> Image | None:
        """Open the image of a model as `find`, and change nothing; one that is damaged is none."""
        key = key_of(identity)
        try:
            image = Image(self.path_of(key))
        except (OSError, FormatError):
            return None
        if image.header.key == key and is_for(image.header, found):
            return image
        image.close()
        return None

    def discard(self, key: str, why: str) -> None:
        """Remove an image that is damaged, and say so in a warning."""
        with suppress(OSError):
            os.unlink(self.path_of(key))
        policy.warn(f"a repacked image of the cache was removed: {why}")

    @contextmanager
    def making(self, identity: dict[str, Any]) -> Iterator[None]:
        """Wait until no other process makes this image, and keep others from it."""
        path = os.path.join(self.folder, f".{key_of(identity)}.lock")
        with ExitStack() as undo:
            with suppress(OSError):  # without a lock both make it, and one result stays
                while True:
                    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                    with ExitStack() as closes:
                        closes.callback(os.close, fd)
                        fcntl.flock(fd, fcntl.LOCK_EX)
                        # Who had it before has removed it.
                        if os.fstat(fd).st_nlink and os.path.samestat(os.stat(path), os.fstat(fd)):
                            closes.pop_all()
                            undo.callback(_unlock, path, fd)
                            break
            yield

    def new_file(self, found: Arrangement, identity: dict[str, Any], model: str) -> NewFile:
        """Begin an image, and remove those for which there is no room any more.

        Parameters
        ----------
        found, identity
            As for `find`.
        model : str
            The path of the model, for `list`.

        Returns
        -------
        NewFile
            With its room on the disk; to be written (`write_image`), and published.

        Raises
        ------
        OSError
            It is larger than all that is kept may be, and nothing has changed; or there is no room
            on the disk, and those that made room for it are gone.
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
        self._make_room(most - nbytes, keep=path)
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(path).st_mode):  # which would not be replaced
                os.unlink(path)
        with ExitStack() as undo:
            new = undo.enter_context(NewFile(path))
            new.allocate(nbytes)
            undo.pop_all()
        return new

    def most_bytes(self) -> int:
        """Return what all images may take: ``UNIMEM_CACHE_BYTES``, or a tenth of the file system.

        Raises
        ------
        ValueError
            The variable is no size.
        """
        text = os.environ.get("UNIMEM_CACHE_BYTES", "")
        if not text:
            return default_bytes(self.folder)
        found = _SIZE.fullmatch(text)
        if found is None:
            raise ValueError(f"UNIMEM_CACHE_BYTES: expected a size as 20G, got {text!r:.40}")
        return int(found[1]) * _SCALES[found[2].lower()]

    def _make_room(self, most: int, *, keep: str) -> None:
        """Remove what was used longest ago, until the rest takes at most so many bytes."""
        self._sweep()
        files = [entry for entry in self._files() if entry[0] != keep]
        total = sum(info.st_size for _, info in files)
        for path, info in sorted(files, key=lambda entry: entry[1].st_mtime_ns):
            if total <= most:
                break
            with suppress(OSError):
                os.unlink(path)
                total -= info.st_size

    def _files(self) -> list[tuple[str, os.stat_result]]:
        found = []
        for name in os.listdir(self.folder):
            if name.endswith(_SUFFIX) and not name.startswith("."):
                path = os.path.join(self.folder, name)
                with suppress(OSError):
                    info = os.stat(path, follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode):
                        found.append((path, info))
        return found

    def _sweep(self) -> None:
        """Remove what processes that were killed have left: what nobody has locked."""
        for name in os.listdir(self.folder):
            if name.startswith(".") and name.endswith((_TEMPORARY, ".lock")):
                with suppress(OSError):
                    _remove_unlocked(os.path.join(self.folder, name))

    def images(self) -> list[CachedImage]:
        """List the images, the one that was used last in front; data is not read."""
        found = [_describe(path, info) for path, info in self._files()]
        return sorted(found, key=lambda image: (-image.used, image.key))

    def drop(self, images: Sequence[CachedImage]) -> None:
        """Remove images; processes that have one mapped keep it."""
        self._sweep()
        for image in images:
            with suppress(FileNotFoundError):
                os.unlink(image.path)

    def verify(
        self, image: CachedImage, progress: Callable[[int, int], object] | None = None
    ) -> str | None:
        """Read an image, and compare every hash: returns what is wrong, and removes it then.

        Raises
        ------
        OSError
            It cannot be read.
        """
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


def _remove_unlocked(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(fd)


def _describe(path: str, info: os.stat_result) -> CachedImage:
    key = os.path.basename(path).removesuffix(_SUFFIX)
    model, current, problem = None, False, None
    try:
        with Image(path) as image:
            model = image.header.model
            current = _is_current(image.header.identity, model)
    except (OSError, FormatError) as error:
        problem = error.rule if isinstance(error, FormatError) else error.strerror or str(error)
    return CachedImage(key, path, info.st_size, info.st_mtime, model, current, problem)


def _is_current(identity: dict[str, Any], model: str) -> bool:
    try:
        return bool(list(identity_of(os.stat(model))) == identity["files"][0])
    except (OSError, ValueError, LookupError, TypeError):
        return False
