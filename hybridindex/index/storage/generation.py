"""Writing one generation of an index directory so that a crash leaves the old one or the new one, never a mixture.

Covers: the directory's names, the writers' lock, files written beside and synced, the rename that commits, cleaning
up after a crash. Does not know what is in the files.

    idx/CURRENT                  name of the current generation, one line
    idx/PREVIOUS                 name of the one that it replaced and that a rollback goes back to, where there is one
    idx/gen-000002/...           a committed generation
    idx/.building-gen-000003/    a generation being written; the next writer removes it if its writer died
    idx/.lock                    held by the writer
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from hybridindex.errors import (
    BuildError,
    CorruptIndexError,
    DiskFullError,
    HybridIndexError,
    IndexExistsError,
    IndexFormatError,
    InvalidInputError,
    NotWritableError,
    UnreadableIndexError,
    UnsupportedIndexError,
    cannot_write,
    io_cure,
    naming,
)
from hybridindex.index.storage.huge_pages import drop_small_pages
from hybridindex.index.storage.manifest import MANIFEST_FILE, Manifest, render_manifest
from hybridindex.index.storage.standing import describe_standing, find_daemon
from hybridindex.processes import lock_file

__all__ = [
    "CURRENT_FILE",
    "DISK_FULL",
    "PREVIOUS_FILE",
    "GenerationWriter",
    "OutFile",
    "as_path",
    "current_name",
    "generation_name",
    "other_generations",
    "point",
    "previous_name",
    "read_current",
    "remove_generations",
    "unreadable",
    "unusable_path",
    "writers_lock",
]

CURRENT_FILE = "CURRENT"
PREVIOUS_FILE = "PREVIOUS"
_LOCK_FILE = ".lock"
#: A daemon that removes what was replaced holds the lock for a moment.
_LOCK_TIMEOUT_S = 1.0
_BUILDING = ".building-"
_GENERATION = re.compile(r"gen-([0-9]{6,12})")
#: Files that an index directory may hold beside its generations.
_NEIGHBOURS = re.compile(r"\.lock|PREVIOUS|(CURRENT|PREVIOUS)\.new|control\.sqlite.*|profile\.checkpoint.*|daemon\..*")
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: The name itself is wrong, for any writer.
_BAD_NAME = {errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EILSEQ}


def as_path(value: Any, name: str = "path") -> Path:
    """``value`` as a path.

    Raises:
        InvalidInputError: it is no string or path, or holds a null character.
    """
    if not isinstance(value, str | os.PathLike) or isinstance(os.fspath(value), bytes):
        raise InvalidInputError(f"{name} is a {type(value).__name__}; expected a string or a pathlib.Path")
    path = Path(value)
    if "\0" in str(path):
        raise InvalidInputError(f"{name} {str(path)!r} holds a null character; expected a file name")
    return path


def unusable_path(error: OSError | ValueError, path: Path) -> HybridIndexError:
    """What to raise when ``error`` came from making or opening ``path`` for writing."""
    if isinstance(error, ValueError) or error.errno in _BAD_NAME:
        return InvalidInputError(f"path {str(path)!r} cannot be a place to write to: {error}")
    return NotWritableError(f"{path} cannot be written: {error}; {io_cure(error)}")


def unreadable(error: OSError, file: Path) -> IndexFormatError:
    """What to raise when ``error`` came from reading a file of an index: only one that is missing is damage."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return CorruptIndexError(f"{file} cannot be read: {error}")
    return UnreadableIndexError(f"{file} cannot be read: {error.strerror or error}; {io_cure(error)}")


def read_current(path: Path) -> Path:
    """Directory of the current generation.

    Raises:
        InvalidInputError: there is nothing at ``path``, or it is a file.
        UnsupportedIndexError: the directory is not an index.
        CorruptIndexError: CURRENT is damaged or names a generation that is not there.
        UnreadableIndexError: something there may not, or cannot, be read.
    """
    try:
        what = None if path.is_dir() else "is a file" if path.exists() else "does not exist"
    except OSError as error:
        raise InvalidInputError(f"path {str(path)!r} cannot be looked at: {error}") from error
    if what is not None:
        raise InvalidInputError(f"path {str(path)!r} {what}; expected an index directory")
    try:
        raw = (path / CURRENT_FILE).read_bytes()
    except FileNotFoundError as error:
        if _has_generations(path):
            raise CorruptIndexError(f"{path}: {CURRENT_FILE} is missing although generations exist") from error
        raise UnsupportedIndexError(f"{path} is not a hybridindex directory: it has no {CURRENT_FILE} file") from error
    except OSError as error:
        raise unreadable(error, path / CURRENT_FILE) from error
    name = raw.decode("ascii", errors="replace").removesuffix("\n")
    if not _GENERATION.fullmatch(name) or not raw.endswith(b"\n"):
        raise CorruptIndexError(f"{path / CURRENT_FILE} holds {name[:80]!r}; expected a name like 'gen-000001'")
    if not (path / name).is_dir():
        raise CorruptIndexError(f"{path / CURRENT_FILE} names {name}, which is not there")
    return path / name


def _has_generations(path: Path) -> bool:
    try:
        return any(_GENERATION.fullmatch(entry.name) for entry in path.iterdir())
    except OSError as error:
        raise unreadable(error, path) from error


class OutFile:
    """A file being written by position. Owner: one :class:`GenerationWriter`; one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        #: Where :meth:`append` writes next, bytes.
        self.position = 0

    def reserve(self, nbytes: int) -> None:
        """Set the length and claim its disk space now, so that a full disk shows before the work is done."""
        with naming(self.path):
            if nbytes:
                try:
                    os.posix_fallocate(self._fd, 0, nbytes)
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                        raise
            os.ftruncate(self._fd, nbytes)

    def append(self, data: Any) -> None:
        """Write a C-contiguous buffer after the last one appended."""
        nbytes = memoryview(data).nbytes
        if nbytes:
            self.write(data, self.position)
            self.position += nbytes

    def write(self, data: Any, offset: int) -> None:
        """Write a non-empty C-contiguous buffer at ``offset`` bytes."""
        with naming(self.path):
            write_at(self._fd, memoryview(data).cast("B"), offset)

    def sync(self) -> None:
        with naming(self.path):
            os.fsync(self._fd)
            drop_small_pages(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """The one function through which index bytes reach a file."""
    while data.nbytes:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


class GenerationWriter:
    """Context manager around one new generation: commit it, or leave nothing behind. One thread; holds the lock."""

    def __init__(
        self, path: Path, *, replace: bool = False, keep: bool = True, lock_timeout_s: float = _LOCK_TIMEOUT_S
    ) -> None:
        """
        Args:
            replace: an index that stands at ``path`` gets a new generation; otherwise it is refused.
            keep: what was replaced stays, until the next replacement or
                :func:`hybridindex.index.storage.going_back.remove_others`.
        """
        self.path = path
        self._replace = replace
        self._keep = keep
        self.number = 0
        #: Where the files go until :meth:`commit`.
        self.directory = path
        self._lock_timeout_s = lock_timeout_s
        self._lock: FileLock | None = None
        self._files: list[OutFile] = []
        self._created = False

    def __enter__(self) -> GenerationWriter:
        try:
            self._prepare()
        except BaseException as error:
            self._abandon()
            self._raise_typed(error)
            if isinstance(error, OSError | ValueError) and not isinstance(error, HybridIndexError):
                raise unusable_path(error, self.path) from error
            raise
        return self

    def _prepare(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise InvalidInputError(f"path {str(self.path)!r} is a file; expected a directory to be made or an index")
        if not self.path.exists():
            self.path.mkdir(parents=True)
            self._created = True
        elif foreign := _foreign_entry(self.path):
            raise InvalidInputError(
                f"path {str(self.path)!r} exists and is not an index (it holds {foreign!r}); expected a new path, "
                "an empty directory or an index directory"
            )
        self._lock = lock_file(self.path / _LOCK_FILE, timeout_s=self._lock_timeout_s)
        try:
            self._lock.acquire()
        except Timeout as error:
            raise BuildError(f"another process is writing to {self.path}; try again when it is done") from error
        if not self._replace and _holds_index(self.path):
            name = current_name(self.path)
            standing = describe_standing(self.path, None if name is None else self.path / name)
            raise IndexExistsError(
                f"path {str(self.path)!r} holds an index: {standing}; expected a new path, or replace=True "
                "(--replace), which keeps this one on disk until the new one serves"
            )
        for entry in list(self.path.glob(f"{_BUILDING}*")):
            shutil.rmtree(entry, ignore_errors=True)
        found = (_GENERATION.fullmatch(entry.name) for entry in self.path.iterdir())
        self.number = 1 + max((int(match[1]) for match in found if match), default=0)
        self.directory = self.path / f"{_BUILDING}{generation_name(self.number)}"
        self.directory.mkdir()

    def open_file(self, name: str) -> OutFile:
        """A new file of the generation; scratch files must be gone (:meth:`drop`) before :meth:`commit`."""
        file = OutFile(self.directory / name)
        self._files.append(file)
        return file

    def drop(self, file: OutFile) -> None:
        """Close and delete a scratch file."""
        file.close()
        self._files.remove(file)
        file.path.unlink()

    def commit(self, manifest: Manifest) -> None:
        """Make the generation current: sync everything, rename, switch CURRENT, remove what no rollback needs."""
        if set(manifest.files) != {file.path.name for file in self._files}:
            raise AssertionError(f"files {sorted(f.path.name for f in self._files)} are not those of the manifest")
        with naming(self.path):
            self._commit(manifest)

    def _commit(self, manifest: Manifest) -> None:
        out = self.open_file(MANIFEST_FILE)
        out.append(render_manifest(manifest))
        for file in self._files:
            file.sync()
            file.close()
        _sync_directory(self.directory)
        name = generation_name(self.number)
        final = self.path / name
        self.directory.rename(final)
        self.directory = final
        _sync_directory(self.path)
        replaced = current_name(self.path)
        kept = (_served_name(self.path) or replaced) if self._keep else previous_name(self.path)
        if self._keep:
            point(self.path, PREVIOUS_FILE, kept)
        point(self.path, CURRENT_FILE, name)
        remove_generations(self.path, but={name, kept})

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._abandon()
        if error is not None:
            self._raise_typed(error)

    def _is_committed(self) -> bool:
        # Asked of the disk, not remembered: a Ctrl-C may come between the switch and the next line.
        return self.number > 0 and current_name(self.path) == generation_name(self.number)

    def _abandon(self) -> None:
        for file in self._files:
            file.close()
        committed = self._is_committed()
        if not committed and self.directory != self.path:
            shutil.rmtree(self.directory, ignore_errors=True)
            for pointer in (CURRENT_FILE, PREVIOUS_FILE):
                (self.path / f"{pointer}.new").unlink(missing_ok=True)
        if self._created and not committed:
            # Nothing was here before: leave nothing.
            (self.path / _LOCK_FILE).unlink(missing_ok=True)
            if not any(self.path.iterdir()):
                self.path.rmdir()
        if self._lock is not None:
            self._lock.release()

    def _raise_typed(self, error: BaseException) -> None:
        """Raises what ``error`` means, where it came from our files or of a full disk."""
        if not isinstance(error, OSError) or isinstance(error, HybridIndexError):
            return
        if self._is_committed():
            name = generation_name(self.number)
            raise cannot_write(error, self.path, f"{name} is current, but a power cut may undo that") from error
        old = "the previous generation is untouched" if current_name(self.path) else "nothing was left behind"
        if error.errno in DISK_FULL:
            raise DiskFullError(f"no room on the file system of {self.path} ({error}); {old}") from error
        # Others are those of the caller's own input.
        if self._files and str(error.filename).startswith(str(self.path)):
            raise cannot_write(error, self.path, old) from error


def generation_name(number: int) -> str:
    """Of its directory."""
    return f"gen-{number:06d}"


def _named(path: Path, pointer: str) -> str | None:
    """Name in CURRENT or PREVIOUS if it is one of a generation that is there; a damaged index is written over."""
    try:
        name = (path / pointer).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return name if _GENERATION.fullmatch(name) and (path / name).is_dir() else None


def current_name(path: Path) -> str | None:
    """Of the current generation; None where it is damaged."""
    return _named(path, CURRENT_FILE)


def previous_name(path: Path) -> str | None:
    """What may be gone back to: after a crash between the two pointers they name the same, or nothing that is there."""
    name = _named(path, PREVIOUS_FILE)
    return None if name == current_name(path) else name


def _served_name(path: Path) -> str | None:
    """The generation that a daemon serves, where it is there: the one worth going back to."""
    daemon = find_daemon(path)
    if daemon is None or daemon.generation is None:
        return None
    name = generation_name(daemon.generation)
    return name if (path / name).is_dir() else None


def point(path: Path, pointer: str, name: str | None) -> None:
    """Lets CURRENT or PREVIOUS name a generation, or nothing, at once and safely on disk."""
    if name is None:
        if not (path / pointer).exists():
            return
        (path / pointer).unlink()
    else:
        beside = OutFile(path / f"{pointer}.new")
        try:
            beside.append(f"{name}\n".encode("ascii"))
            beside.sync()
        finally:
            beside.close()
        beside.path.replace(path / pointer)
    _sync_directory(path)


def other_generations(path: Path, but: set[str | None]) -> list[Path]:
    """Directories of all generations, current or not, but those named."""
    return sorted(e for e in path.iterdir() if _GENERATION.fullmatch(e.name) and e.name not in but)


def remove_generations(path: Path, but: set[str | None]) -> list[int]:
    """Removes the others, of which readers keep what they mapped; returns their numbers."""
    found = other_generations(path, but)
    for entry in found:
        shutil.rmtree(entry, ignore_errors=True)
    return [int(entry.name.removeprefix("gen-")) for entry in found]


@contextmanager
def writers_lock(path: Path) -> Iterator[None]:
    """Held by whoever changes the directory.

    Raises:
        BuildError: another process is writing.
    """
    try:
        with lock_file(path / _LOCK_FILE, timeout_s=0):
            yield
    except Timeout as error:
        raise BuildError(f"another process is writing to {path}; try again when it is done") from error
    except OSError as error:
        raise unusable_path(error, path) from error


def _holds_index(path: Path) -> bool:
    return (path / CURRENT_FILE).exists() or any(_GENERATION.fullmatch(entry.name) for entry in path.iterdir())


def _foreign_entry(path: Path) -> str | None:
    """An entry that shows that the directory is not ours."""
    names = sorted(entry.name for entry in path.iterdir())
    if CURRENT_FILE in names:
        try:
            text = (path / CURRENT_FILE).read_text(encoding="ascii")
        except (OSError, ValueError):
            return CURRENT_FILE
        return None if _GENERATION.fullmatch(text.strip()) else CURRENT_FILE
    ours = (name for name in names if not name.startswith(_BUILDING) and not _NEIGHBOURS.fullmatch(name))
    return next((name for name in ours if not _GENERATION.fullmatch(name)), None)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(path):
            os.fsync(fd)
    finally:
        os.close(fd)


def versions() -> Mapping[str, str]:
    """Versions of the libraries that shape the files."""
    from importlib import metadata

    found = {}
    for package in ("hybridindex", "numpy", "faiss-cpu", "faiss-gpu"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
