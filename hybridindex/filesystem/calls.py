"""Calls by name: looking at files and folders, making, moving and removing them. Threads: any."""

from __future__ import annotations

import errno
import fnmatch
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG

from hybridindex.errors import FileError, file_error

__all__ = [
    "Call",
    "chmod",
    "chown",
    "discard",
    "discard_tree",
    "exists",
    "free_bytes",
    "is_dir",
    "is_file",
    "is_link",
    "link",
    "list_folder",
    "list_tree",
    "lstat",
    "make_folder",
    "others_may_write",
    "performing",
    "readlink",
    "remove_folder",
    "remove_tree",
    "rename",
    "replace",
    "scratch_folder",
    "seen",
    "stat",
    "symlink",
    "sync_folder",
    "unlink",
    "watched",
    "watched_by",
]

_log = logging.getLogger(__name__)

StrPath = str | os.PathLike[str]
#: Of a look at a name: there is nothing of that name.
_NOTHING_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call, before it is made."""

    #: Of names: as the functions here. Of files: "open", "create", "read", "write", "truncate", "punch", "sync", "map".
    #: Of other libraries: "sqlite", "faiss", "lock", "parse".
    name: str
    path: str
    #: The new name, where the call gives one.
    to: str = ""
    #: Where bytes are written, and which.
    offset: int = 0
    data: bytes = b""


#: Sees each call before it is made; raises the OSError with which it shall fail. Of a write it may return how many
#: bytes are taken. None, as always outside tests: nobody looks.
_watcher: Callable[[Call], int | None] | None = None


@contextmanager
def watched_by(watcher: Callable[[Call], int | None]) -> Iterator[None]:
    """For tests: ``watcher`` sees, and may fail, each call of this process."""
    global _watcher
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None


def watched() -> bool:
    return _watcher is not None


def seen(name: str, path: StrPath, *, to: StrPath = "", offset: int = 0, data: memoryview | None = None) -> int | None:
    """Tells the watcher of a call; its answer."""
    if _watcher is None:
        return None
    written = b"" if data is None else bytes(data)
    return _watcher(Call(name=name, path=os.fspath(path), to=os.fspath(to), offset=offset, data=written))


class performing:  # noqa: N801 - used as contextlib's are
    """Around a call: an OSError inside becomes a FileError that names ``path``.

    One without a number is no error of the operating system: a library speaks of the content. It passes.

    No generator: from Python 3.12 on, an error that one translates is in a cycle with the frames of all callers, and so
    with what they hold.
    """

    __slots__ = ("_name", "_path", "_to")

    def __init__(self, name: str, path: StrPath, *, to: StrPath = "") -> None:
        self._name = name
        self._path = path
        self._to = to

    def __enter__(self) -> None:
        try:
            seen(self._name, self._path, to=self._to)
        except OSError as error:
            self._translate(error)
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._translate(error)

    def _translate(self, error: BaseException | None) -> None:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, FileError):
            raise file_error(error, self._name, self._path) from error


def stat(path: StrPath) -> os.stat_result:
    with performing("stat", path):
        return os.stat(path)


def others_may_write(path: StrPath) -> bool:
    """Whether its mode lets more than its owner write it."""
    return bool(stat(path).st_mode & 0o022)


def lstat(path: StrPath) -> os.stat_result:
    """Of a link itself."""
    with performing("stat", path):
        return os.lstat(path)


def _mode(path: StrPath) -> int | None:
    """None: nothing is there, as opposed to what may not be looked at."""
    try:
        return stat(path).st_mode
    except FileError as error:
        if error.errno in _NOTHING_THERE:
            return None
        raise
    except ValueError:  # a null character
        return None


def exists(path: StrPath) -> bool:
    return _mode(path) is not None


def is_file(path: StrPath) -> bool:
    mode = _mode(path)
    return mode is not None and S_ISREG(mode)


def is_dir(path: StrPath) -> bool:
    mode = _mode(path)
    return mode is not None and S_ISDIR(mode)


def is_link(path: StrPath) -> bool:
    try:
        return S_ISLNK(lstat(path).st_mode)
    except FileNotFoundError:
        return False


def list_folder(path: StrPath, pattern: str = "*") -> list[Path]:
    """Its entries whose names fit, sorted."""
    with performing("list_folder", path):
        return sorted(Path(path, name) for name in fnmatch.filter(os.listdir(path), pattern))


def list_tree(path: StrPath, pattern: str = "*") -> list[Path]:
    """What fits at any depth below a folder, sorted."""
    with performing("list_folder", path):
        return sorted(Path(path).rglob(pattern))


def free_bytes(path: StrPath) -> int:
    """Of the file system of ``path``, for this user."""
    with performing("stat", path):
        return shutil.disk_usage(path).free


def make_folder(path: StrPath, *, parents: bool = False, exist_ok: bool = False) -> None:
    """``parents``: those above it, too; the new ones then survive a power cut."""
    if parents and (above := Path(path).parent) != Path(path) and not exists(above):
        make_folder(above, parents=True, exist_ok=True)
    try:
        with performing("make_folder", path):
            os.mkdir(path)
        if parents:
            sync_folder(Path(path).parent)
    except FileError as error:
        if not (exist_ok and error.errno == errno.EEXIST and is_dir(path)):
            raise


def scratch_folder(prefix: str, folder: StrPath | None = None) -> tempfile.TemporaryDirectory[str]:
    """A new folder that goes with the object; among the system's temporary files unless ``folder`` is given."""
    with performing("make_folder", folder or tempfile.gettempdir()):
        return tempfile.TemporaryDirectory(prefix=prefix, dir=folder, ignore_cleanup_errors=True)


def rename(path: StrPath, to: StrPath) -> None:
    """Of a folder, to a new name."""
    with performing("rename", path, to=to):
        os.rename(path, to)


def replace(path: StrPath, to: StrPath) -> None:
    """Gives a file another name, at once; what had it is gone."""
    with performing("replace", path, to=to):
        os.replace(path, to)


def link(path: StrPath, to: StrPath) -> None:
    """A second name for a file."""
    with performing("link", path, to=to):
        os.link(path, to)


def symlink(target: str, path: StrPath) -> None:
    with performing("symlink", path):
        os.symlink(target, path)


def readlink(path: StrPath) -> str:
    with performing("stat", path):
        return os.readlink(path)


def chmod(path: StrPath, mode: int) -> None:
    with performing("chmod", path):
        os.chmod(path, mode)


def chown(path: StrPath, gid: int) -> None:
    """Gives it to a group."""
    with performing("chmod", path):
        os.chown(path, -1, gid)


def unlink(path: StrPath, *, missing_ok: bool = False) -> None:
    try:
        with performing("unlink", path):
            os.unlink(path)
    except FileNotFoundError:
        if not missing_ok:
            raise


def remove_folder(path: StrPath) -> None:
    """An empty one."""
    with performing("remove_folder", path):
        os.rmdir(path)


def remove_tree(path: StrPath) -> None:
    with performing("remove_tree", path):
        shutil.rmtree(path)


def discard(path: StrPath) -> bool:
    """Removes a leftover, if it is there. That it cannot be removed is logged; whether it is gone."""
    return _discard(lambda: unlink(path, missing_ok=True))


def discard_tree(path: StrPath) -> bool:
    """Removes a folder as :func:`discard` does a file."""
    return _discard(lambda: remove_tree(path))


def _discard(remove: Callable[[], None]) -> bool:
    try:
        remove()
    except FileNotFoundError:
        pass
    except FileError as error:
        _log.warning("a leftover stays: %s", error)
        return False
    return True


def sync_folder(path: StrPath) -> None:
    """What was renamed, made or removed in it survives a power cut."""
    with performing("sync_folder", path):
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
