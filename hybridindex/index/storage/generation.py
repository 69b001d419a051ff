"""Writing one generation of an index directory so that a crash leaves the old one or the new one, never a mixture.

Covers: the directory's names, the writers' lock, files written beside and synced, the rename that commits, cleaning
up after a crash. Does not know what is in the files.

    idx/CURRENT                  name of the current generation, one line
    idx/gen-000002/...           a committed generation
    idx/.building-gen-000003/    a generation being written; the next writer removes it if its writer died
    idx/.lock                    held by the writer
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from hybridindex.errors import (
    BuildError,
    CorruptIndexError,
    DiskFullError,
    HybridIndexError,
    InvalidInputError,
    NotWritableError,
    UnsupportedIndexError,
)
from hybridindex.index.storage.huge_pages import drop_small_pages
from hybridindex.index.storage.manifest import Manifest, render_manifest

__all__ = ["CURRENT_FILE", "DISK_FULL", "GenerationWriter", "OutFile", "as_path", "read_current", "unusable_path"]

CURRENT_FILE = "CURRENT"
MANIFEST_FILE = "manifest.json"
_LOCK_FILE = ".lock"
_BUILDING = ".building-"
_GENERATION = re.compile(r"gen-([0-9]{6,12})")
#: Files that an index directory may hold beside its generations.
_NEIGHBOURS = re.compile(r"\.lock|CURRENT\.new|control\.sqlite.*|profile\.checkpoint.*")
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
    return NotWritableError(f"{path} cannot be written: {error}")


def read_current(path: Path) -> Path:
    """Directory of the current generation.

    Raises:
        InvalidInputError: there is nothing at ``path``, or it is a file.
        UnsupportedIndexError: the directory is not an index.
        CorruptIndexError: CURRENT is damaged or names a generation that is not there.
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
        if any(_GENERATION.fullmatch(entry.name) for entry in path.iterdir()):
            raise CorruptIndexError(f"{path}: {CURRENT_FILE} is missing although generations exist") from error
        raise UnsupportedIndexError(f"{path} is not a hybridindex directory: it has no {CURRENT_FILE} file") from error
    except OSError as error:
        raise CorruptIndexError(f"{path / CURRENT_FILE} cannot be read: {error}") from error
    name = raw.decode("ascii", errors="replace").removesuffix("\n")
    if not _GENERATION.fullmatch(name) or not raw.endswith(b"\n"):
        raise CorruptIndexError(f"{path / CURRENT_FILE} holds {name[:80]!r}; expected a name like 'gen-000001'")
    if not (path / name).is_dir():
        raise CorruptIndexError(f"{path / CURRENT_FILE} names {name}, which is not there")
    return path / name


class OutFile:
    """A file being written by position. Owner: one :class:`GenerationWriter`; one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        #: Where :meth:`append` writes next, bytes.
        self.position = 0

    def reserve(self, nbytes: int) -> None:
        """Set the length and claim its disk space now, so that a full disk shows before the work is done."""
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
        write_at(self._fd, memoryview(data).cast("B"), offset)

    def sync(self) -> None:
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

    def __init__(self, path: Path, *, lock_timeout_s: float = 0.0) -> None:
        self.path = path
        self.number = 0
        #: Where the files go until :meth:`commit`.
        self.directory = path
        self._lock = FileLock(path / _LOCK_FILE, timeout=lock_timeout_s)
        self._files: list[OutFile] = []
        self._created = False

    def __enter__(self) -> GenerationWriter:
        try:
            self._prepare()
        except BaseException as error:
            self._abandon()
            self._raise_disk_full(error)
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
        try:
            self._lock.acquire()
        except Timeout as error:
            raise BuildError(f"another process is writing to {self.path}; try again when it is done") from error
        for entry in list(self.path.glob(f"{_BUILDING}*")):
            shutil.rmtree(entry, ignore_errors=True)
        found = (_GENERATION.fullmatch(entry.name) for entry in self.path.iterdir())
        self.number = 1 + max((int(match[1]) for match in found if match), default=0)
        self.directory = self.path / f"{_BUILDING}{_generation_name(self.number)}"
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
        """Make the generation current: sync everything, rename, switch CURRENT, remove the old generation."""
        if set(manifest.files) != {file.path.name for file in self._files}:
            raise AssertionError(f"files {sorted(f.path.name for f in self._files)} are not those of the manifest")
        out = self.open_file(MANIFEST_FILE)
        out.append(render_manifest(manifest))
        for file in self._files:
            file.sync()
            file.close()
        _sync_directory(self.directory)
        name = _generation_name(self.number)
        final = self.path / name
        self.directory.rename(final)
        self.directory = final
        _sync_directory(self.path)
        pointer = OutFile(self.path / f"{CURRENT_FILE}.new")
        try:
            pointer.append(f"{name}\n".encode("ascii"))
            pointer.sync()
        finally:
            pointer.close()
        pointer.path.replace(self.path / CURRENT_FILE)
        _sync_directory(self.path)
        # Readers that mapped the old generation keep their mappings.
        for entry in list(self.path.iterdir()):
            if _GENERATION.fullmatch(entry.name) and entry.name != name:
                shutil.rmtree(entry, ignore_errors=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._abandon()
        if error is not None and not self._is_committed():
            self._raise_disk_full(error)

    def _is_committed(self) -> bool:
        # Asked of the disk, not remembered: a Ctrl-C may come between the switch and the next line.
        return self.number > 0 and _current_name(self.path) == _generation_name(self.number)

    def _abandon(self) -> None:
        for file in self._files:
            file.close()
        committed = self._is_committed()
        if not committed and self.directory != self.path:
            shutil.rmtree(self.directory, ignore_errors=True)
            (self.path / f"{CURRENT_FILE}.new").unlink(missing_ok=True)
        if self._created and not committed:
            # Nothing was here before: leave nothing.
            (self.path / _LOCK_FILE).unlink(missing_ok=True)
            if not any(self.path.iterdir()):
                self.path.rmdir()
        self._lock.release()

    def _raise_disk_full(self, error: BaseException) -> None:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            old = "the previous generation is untouched" if _current_name(self.path) else "nothing was left behind"
            raise DiskFullError(f"no room on the file system of {self.path} ({error}); {old}") from error


def _generation_name(number: int) -> str:
    return f"gen-{number:06d}"


def _current_name(path: Path) -> str | None:
    """Name in CURRENT if it is one of a generation that is there; a damaged index is written over."""
    try:
        name = (path / CURRENT_FILE).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return name if _GENERATION.fullmatch(name) and (path / name).is_dir() else None


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
