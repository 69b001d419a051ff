"""Writing one generation of an index directory so that a crash leaves the old one or the new one, never a mixture.

Covers: the directory's names, the writers' lock, files written beside and synced, the rename that commits, cleaning
up after a crash. Does not know what is in the files.

    idx/CURRENT                  name of the current generation, one line
    idx/PREVIOUS                 name of the one that it replaced and that a rollback goes back to, where there is one
    idx/gen-000002/...           a committed generation
    idx/.building-gen-000003/    a generation being written; the next writer or daemon removes it if its writer died
    idx/.lock                    held by the writer
    idx/.log.lock                held while a change is logged, and while CURRENT is switched
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from hybridindex import filesystem
from hybridindex.errors import (
    FULL,
    BuildError,
    CorruptIndexError,
    DiskFullError,
    FileError,
    HybridIndexError,
    IndexExistsError,
    IndexFormatError,
    InvalidInputError,
    UnreadableIndexError,
    UnsupportedIndexError,
    cannot_write,
    io_cure,
)
from hybridindex.index.storage.huge_pages import drop_small_pages
from hybridindex.index.storage.manifest import (
    CHANGE_LOG,
    DIGESTS_FILE,
    IDS_FILE,
    MANIFEST_FILE,
    SHARE_FILE,
    Manifest,
    render_manifest,
)
from hybridindex.index.storage.standing import describe_standing, find_daemon
from hybridindex.processes import KeptLock, lock_file

__all__ = [
    "CURRENT_FILE",
    "PREVIOUS_FILE",
    "GenerationWriter",
    "OutFile",
    "as_path",
    "current_name",
    "generation_name",
    "log_lock",
    "log_lock_file",
    "other_generations",
    "point",
    "previous_name",
    "read_current",
    "refuse_share",
    "remove_generations",
    "require_directory",
    "scratch_of",
    "unfinished",
    "unreadable",
    "unusable_path",
    "writers_lock",
]

CURRENT_FILE = "CURRENT"
PREVIOUS_FILE = "PREVIOUS"
_LOCK_FILE = ".lock"
_LOG_LOCK_FILE = ".log.lock"
#: Logging a change takes moments.
_LOG_TIMEOUT_S = 60.0
#: A daemon that removes what was replaced holds the lock for a moment.
_LOCK_TIMEOUT_S = 1.0
_BUILDING = ".building-"
_GENERATION = re.compile(r"gen-([0-9]{6,12})")
#: Files that an index directory may hold beside its generations.
_NEIGHBOURS = re.compile(
    r"(\.log)?\.lock|PREVIOUS|(CURRENT|PREVIOUS)\.new|control\.sqlite.*|profile\.checkpoint.*|(daemon|writer)\..*"
)
#: What is missing, or of another kind, is damage.
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
#: The name itself is wrong, for any writer.
_BAD_NAME = {errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EILSEQ}


def as_path(value: Any, name: str = "path") -> Path:
    """``value`` as a path.

    Raises:
        InvalidInputError: it is no string or path, or holds what no file name may, or what is no UTF-8.
    """
    if not isinstance(value, str | os.PathLike) or isinstance(os.fspath(value), bytes):
        raise InvalidInputError(f"{name} is a {type(value).__name__}; expected a string or a pathlib.Path")
    path = Path(value)
    if "\0" in str(path):
        raise InvalidInputError(f"{name} {str(path)!r} holds a null character; expected a file name")
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        what = f"{name} {str(path)!a} is not UTF-8, as faiss needs names to be"
        raise InvalidInputError(f"{what}; expected another one") from error
    return path


def unusable_path(error: OSError | ValueError, path: Path) -> HybridIndexError:
    """What to raise when ``error`` came from making or opening ``path`` for writing."""
    if not isinstance(error, OSError):
        return InvalidInputError(f"path {str(path)!r} cannot be a place to write to: {error}")
    if error.errno in _BAD_NAME:
        return InvalidInputError(
            f"path {str(path)!r} cannot be a place to write to: {error.strerror}; {io_cure(error)}"
        )
    return cannot_write(error, path, "nothing has changed")


def unreadable(error: OSError, file: Path) -> IndexFormatError:
    """What to raise when ``error`` came from reading a file of an index: only one that is missing is damage."""
    if error.errno in _DAMAGE:
        return CorruptIndexError(f"{file} cannot be read: {error.strerror}")
    return UnreadableIndexError(f"{file} cannot be read: {error.strerror or error}; {io_cure(error)}")


def require_directory(path: Path) -> None:
    """
    Raises:
        InvalidInputError: there is nothing at ``path``, it is a file, or nobody can tell.
    """
    try:
        what = None if filesystem.is_dir(path) else "is a file" if filesystem.exists(path) else "does not exist"
    except OSError as error:
        raise InvalidInputError(
            f"path {str(path)!r} cannot be looked at: {error.strerror}; {io_cure(error)}"
        ) from error
    if what is not None:
        raise InvalidInputError(f"path {str(path)!r} {what}; expected an index directory")


def read_current(path: Path) -> Path:
    """Directory of the current generation.

    Raises:
        InvalidInputError: there is nothing at ``path``, or it is a file.
        UnsupportedIndexError: the directory is not an index.
        CorruptIndexError: CURRENT is damaged or names a generation that is not there.
        UnreadableIndexError: something there may not, or cannot, be read.
    """
    require_directory(path)
    try:
        raw = filesystem.read_bytes(path / CURRENT_FILE)
    except FileNotFoundError as error:
        if _has_generations(path):
            raise CorruptIndexError(f"{path}: {CURRENT_FILE} is missing although generations exist") from error
        raise UnsupportedIndexError(f"{path} is not a hybridindex directory: it has no {CURRENT_FILE} file") from error
    except OSError as error:
        raise unreadable(error, path / CURRENT_FILE) from error
    name = raw.decode("ascii", errors="replace").removesuffix("\n")
    if not _GENERATION.fullmatch(name) or not raw.endswith(b"\n"):
        raise CorruptIndexError(f"{path / CURRENT_FILE} holds {name[:80]!r}; expected a name like 'gen-000001'")
    try:
        there = filesystem.is_dir(path / name)
    except OSError as error:
        raise unreadable(error, path / name) from error
    if not there:
        raise CorruptIndexError(f"{path / CURRENT_FILE} names {name}, which is not there")
    return path / name


def _has_generations(path: Path) -> bool:
    try:
        return any(_GENERATION.fullmatch(entry.name) for entry in filesystem.list_folder(path))
    except OSError as error:
        raise unreadable(error, path) from error


class _Held(threading.local):
    """Directories whose lock the thread has."""

    def __init__(self) -> None:
        self.names: set[str] = set()


_held = _Held()


class OutFile:
    """A file being written by position. Owner: one :class:`GenerationWriter`; one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = filesystem.File(path, "w+", permissions=0o644)
        #: Where :meth:`append` writes next, bytes.
        self.position = 0

    def reserve(self, nbytes: int) -> None:
        """Set the length and claim its disk space now, so that a full disk shows before the work is done."""
        self._file.reserve(nbytes)

    def extend(self, nbytes: int) -> None:
        """Set the length, which claims no disk space: what is not written reads as zeros."""
        self._file.extend(nbytes)

    def append(self, data: Any) -> None:
        """Write a C-contiguous buffer after the last one appended."""
        nbytes = memoryview(data).nbytes
        if nbytes:
            self.write(data, self.position)
            self.position += nbytes

    def write(self, data: Any, offset: int) -> None:
        """Write a non-empty C-contiguous buffer at ``offset`` bytes."""
        self._file.write_at(data, offset)

    def sync(self) -> None:
        self._file.sync()
        drop_small_pages(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class GenerationWriter:
    """Context manager around one new generation: commit it, or leave nothing behind. One thread; holds the lock."""

    def __init__(
        self,
        path: Path,
        *,
        replace: bool = False,
        keep: bool = True,
        number: int | None = None,
        lock_timeout_s: float = _LOCK_TIMEOUT_S,
        prepare: Callable[[Path], None] | None = None,
        finish: Callable[[Path], None] | None = None,
    ) -> None:
        """
        Args:
            replace: an index that stands at ``path`` gets a new generation; otherwise it is refused.
            keep: what was replaced stays, until the next replacement or
                :func:`hybridindex.index.storage.going_back.remove_others`.
            number: of the generation, where no index stands at ``path``; None: the next one.
            prepare: called with the folder of the generation when all its files are safely on disk; may add others.
            finish: called with the folder of the generation when no further change of the old one can be logged, just
                before the new one is made current.
        """
        self.path = path
        self._prepare_generation, self._finish = prepare, finish
        self._replace = replace
        self._keep = keep
        self.number = 0
        self._wanted_number = number
        #: Where the files go until :meth:`commit`.
        self.directory = path
        self._lock_timeout_s = lock_timeout_s
        self._lock: FileLock | None = None
        self._files: list[OutFile] = []
        self._created = False
        self._stood = False
        #: What was written could not be removed.
        self._left = False
        #: CURRENT is being switched.
        self._naming_current = False

    def __enter__(self) -> GenerationWriter:
        try:
            self._prepare()
        except BaseException as error:
            self._abandon()
            self._raise_typed(error)
            if isinstance(error, FileError) or (
                isinstance(error, ValueError) and not isinstance(error, HybridIndexError)
            ):
                raise unusable_path(error, self.path) from error
            raise
        return self

    def _prepare(self) -> None:
        if filesystem.exists(self.path) and not filesystem.is_dir(self.path):
            raise InvalidInputError(f"path {str(self.path)!r} is a file; expected a directory to be made or an index")
        if not filesystem.exists(self.path):
            filesystem.make_folder(self.path, parents=True)
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
        _held.names.add(os.path.abspath(self.path))
        self._stood = _holds_index(self.path)
        if self._stood and not self._replace:
            name = current_name(self.path)
            standing = describe_standing(self.path, None if name is None else self.path / name)
            raise IndexExistsError(
                f"path {str(self.path)!r} holds an index: {standing}; expected a new path, or replace=True "
                "(--replace), which keeps this one on disk until the new one serves"
            )
        if self._stood and (name := current_name(self.path)) is not None:
            refuse_share(self.path / name)
        entries = filesystem.list_folder(self.path)
        for entry in entries:
            if entry.name.startswith(_BUILDING):
                filesystem.discard_tree(entry)
        found = (_GENERATION.fullmatch(entry.name) for entry in entries)
        self.number = self._wanted_number or 1 + max((int(match[1]) for match in found if match), default=0)
        self.directory = scratch_of(self.path, generation_name(self.number))
        filesystem.make_folder(self.directory)

    def open_file(self, name: str) -> OutFile:
        """A new file of the generation; scratch files must be gone (:meth:`drop`) before :meth:`commit`."""
        file = OutFile(self.directory / name)
        self._files.append(file)
        return file

    def drop(self, file: OutFile) -> None:
        """Close and delete a scratch file."""
        file.close()
        self._files.remove(file)
        filesystem.unlink(file.path)

    def commit(self, manifest: Manifest) -> None:
        """Make the generation current: sync everything, rename, switch CURRENT, remove what no rollback needs."""
        beside = {DIGESTS_FILE, CHANGE_LOG, SHARE_FILE, IDS_FILE}
        if set(manifest.files) != {file.path.name for file in self._files} - beside:
            raise AssertionError(f"files {sorted(f.path.name for f in self._files)} are not those of the manifest")
        out = self.open_file(MANIFEST_FILE)
        out.append(render_manifest(manifest))
        for file in self._files:
            file.sync()
            file.close()
        filesystem.sync_folder(self.directory)
        name = generation_name(self.number)
        final = self.path / name
        filesystem.rename(self.directory, final)
        self.directory = final
        filesystem.sync_folder(self.path)
        if self._prepare_generation is not None:
            self._prepare_generation(final)
        # Nobody logs a change of the old one from here on.
        with log_lock(self.path):
            if self._finish is not None:
                self._finish(final)
            replaced = current_name(self.path)
            kept = (_served_name(self.path) or replaced) if self._keep else previous_name(self.path)
            if self._keep:
                point(self.path, PREVIOUS_FILE, kept)
            self._naming_current = True
            point(self.path, CURRENT_FILE, name)
        for entry in other_generations(self.path, but={name, kept}):
            filesystem.discard_tree(entry)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._abandon()
        if error is not None:
            self._raise_typed(error)

    @property
    def is_current(self) -> bool:
        """Whether CURRENT may name the generation."""
        return self._is_committed() is not False

    def _is_committed(self) -> bool | None:
        """None: CURRENT may name the generation, and cannot be read."""
        if not self._naming_current:
            return False
        # Asked of the disk, not remembered: a Ctrl-C may come between the switch and the next line.
        try:
            return current_name(self.path) == generation_name(self.number)
        except FileError:
            return None

    def _abandon(self) -> None:
        for file in self._files:
            with suppress(FileError):  # what it holds is given up, or was synced
                file.close()
        committed = self._is_committed() is not False
        if not committed and self.directory != self.path:
            left = [self.path / f"{pointer}.new" for pointer in (CURRENT_FILE, PREVIOUS_FILE)]
            self._left = not all([filesystem.discard_tree(self.directory), *map(filesystem.discard, left)])
        if self._created and not committed:
            # Nothing was here before: leave nothing.
            filesystem.discard(self.path / _LOCK_FILE)
            with suppress(FileError):  # something else came there meanwhile
                filesystem.remove_folder(self.path)
        if self._lock is not None:
            _held.names.discard(os.path.abspath(self.path))
            self._lock.release()

    def _raise_typed(self, error: BaseException) -> None:
        """Raises what ``error`` means, where it came from our files or of a full disk."""
        if not isinstance(error, FileError):
            return
        committed = self._is_committed()
        if committed is not False:
            name = generation_name(self.number)
            old = f"{name} is current, but a power cut may undo that"
            if committed is None:
                old = f"{CURRENT_FILE} names {name} or the generation before it; both are there"
            raise cannot_write(error, self.path, old) from error
        old = "the previous generation is untouched" if self._stood else "nothing was left behind"
        if self._left:
            old += ", but for files that the next build removes" if self._stood else ", but for unfinished files"
        if error.errno in FULL:
            raise DiskFullError(
                f"no room on the file system of {self.path} ({error.filename}: {error.strerror}); "
                f"{io_cure(error)}; {old}"
            ) from error
        # Others are those of the caller's own input.
        if (self._files or self._stood) and Path(str(error.filename)).is_relative_to(self.path):
            raise cannot_write(error, self.path, old) from error


def refuse_share(folder: Path) -> None:
    """For who copies or changes an index. ``folder``: of a generation.

    Raises:
        UnsupportedIndexError: it is of a share.
    """
    if filesystem.exists(folder / SHARE_FILE):
        raise UnsupportedIndexError(
            f"{folder.parent} is a share: it holds only some lists of an index, and is not copied, exported or "
            "changed; do that with the index that it was made from"
        )


def generation_name(number: int) -> str:
    """Of its directory."""
    return f"gen-{number:06d}"


def _named(path: Path, pointer: str) -> str | None:
    """Name in CURRENT or PREVIOUS if it is one of a generation that is there; a damaged index is written over.

    Raises:
        FileError: it cannot be read now, and may name one.
    """
    try:
        name = filesystem.read_text(path / pointer, encoding="ascii").strip()
    except ValueError:
        return None
    except FileError as error:
        if error.errno in _DAMAGE:
            return None
        raise
    return name if _GENERATION.fullmatch(name) and filesystem.is_dir(path / name) else None


def current_name(path: Path) -> str | None:
    """Of the current generation; None where it is damaged. Raises FileError where it cannot be read now."""
    return _named(path, CURRENT_FILE)


def previous_name(path: Path) -> str | None:
    """What may be gone back to."""
    name = _named(path, PREVIOUS_FILE)
    if name is None or name != current_name(path):
        return name
    # A crash, or an error of the disk, came between the two pointers. A newer one may never have been current.
    return max((entry.name for entry in other_generations(path, {name}) if entry.name < name), default=None)


def _served_name(path: Path) -> str | None:
    """The generation that a daemon serves, where it is there: the one worth going back to."""
    daemon = find_daemon(path)
    if daemon is None or daemon.generation is None:
        return None
    name = generation_name(daemon.generation)
    return name if filesystem.is_dir(path / name) else None


def point(path: Path, pointer: str, name: str | None) -> None:
    """Lets CURRENT or PREVIOUS name a generation, or nothing, at once and safely on disk."""
    if name is None:
        filesystem.unlink(path / pointer, missing_ok=True)
    else:
        beside = OutFile(path / f"{pointer}.new")
        try:
            beside.append(f"{name}\n".encode("ascii"))
            beside.sync()
        finally:
            beside.close()
        filesystem.replace(beside.path, path / pointer)
    filesystem.sync_folder(path)


def other_generations(path: Path, but: set[str | None]) -> list[Path]:
    """Directories of all generations, current or not, but those named."""
    return [e for e in filesystem.list_folder(path) if _GENERATION.fullmatch(e.name) and e.name not in but]


def unfinished(path: Path) -> list[Path]:
    """What is being written, or was when its writer died: for who holds the lock, the latter."""
    pointers = (path / f"{pointer}.new" for pointer in (CURRENT_FILE, PREVIOUS_FILE))
    return [*filesystem.list_folder(path, f"{_BUILDING}*"), *filter(filesystem.exists, pointers)]


def scratch_of(path: Path, name: str) -> Path:
    """Where generation ``name`` is written, under the writers' lock, until it is renamed."""
    return path / f"{_BUILDING}{name}"


def remove_generations(path: Path, but: set[str | None]) -> list[int]:
    """Removes the others, of which readers keep what they mapped; returns their numbers.

    Raises:
        BuildError: one cannot be removed; a second call goes on.
    """
    found = other_generations(path, but)
    try:
        for entry in found:
            filesystem.remove_tree(entry)
    except FileError as error:
        raise cannot_write(error, path, "the current generation is untouched; remove the others again") from error
    return [int(entry.name.removeprefix("gen-")) for entry in found]


@contextmanager
def writers_lock(path: Path, *, timeout_s: float = 0) -> Iterator[None]:
    """Held by whoever changes the directory; the thread of a :class:`GenerationWriter` has it already.

    Raises:
        BuildError: another process is writing, for ``timeout_s`` already.
    """
    if os.path.abspath(path) in _held.names:
        yield
        return
    try:
        with lock_file(path / _LOCK_FILE, timeout_s=timeout_s):
            yield
    except Timeout as error:
        raise BuildError(f"another process is writing to {path}; try again when it is done") from error
    except FileError as error:
        raise cannot_write(error, path, "the index is whole; try again") from error


def log_lock_file(path: Path) -> KeptLock:
    """For :func:`log_lock`, many times."""
    return KeptLock(path / _LOG_LOCK_FILE, timeout_s=_LOG_TIMEOUT_S)


@contextmanager
def log_lock(path: Path, lock: KeptLock | None = None) -> Iterator[None]:
    """Held while a change of the current generation is logged, and while another generation becomes the current one.

    ``lock``: :func:`log_lock_file` of it; None: one is made.

    Raises:
        BuildError: another process holds it for a minute already.
    """
    try:
        with lock or lock_file(path / _LOG_LOCK_FILE, timeout_s=_LOG_TIMEOUT_S):
            yield
    except Timeout as error:
        raise BuildError(f"another process is logging a change of {path}; try again when it is done") from error


def _holds_index(path: Path) -> bool:
    return filesystem.exists(path / CURRENT_FILE) or any(
        _GENERATION.fullmatch(entry.name) for entry in filesystem.list_folder(path)
    )


def _foreign_entry(path: Path) -> str | None:
    """An entry that shows that the directory is not ours."""
    names = [entry.name for entry in filesystem.list_folder(path)]
    if CURRENT_FILE in names:
        text = filesystem.read_text(path / CURRENT_FILE, encoding="ascii", errors="replace")
        return None if _GENERATION.fullmatch(text.strip()) else CURRENT_FILE
    ours = (name for name in names if not name.startswith(_BUILDING) and not _NEIGHBOURS.fullmatch(name))
    return next((name for name in ours if not _GENERATION.fullmatch(name)), None)
