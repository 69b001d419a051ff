"""Snapshots of an index: directories that are indexes themselves, as it was at one moment, while it goes on.

Files that are never changed are linked where the file system can, and copied where it cannot; one that an earlier
snapshot has is linked to that one. The log of changes is copied, up to its last whole change. ``snapshot.json`` says
what all of them were. A snapshot without its ``CURRENT`` file was interrupted, and is none.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hybridindex import filesystem
from hybridindex.errors import (
    BuildError,
    CorruptIndexError,
    FileError,
    IndexExistsError,
    InvalidInputError,
    MissingFileError,
    cannot_write,
)
from hybridindex.index.log.change_log import CHANGE_LOG, log_file
from hybridindex.index.opening import verify
from hybridindex.index.storage.beside import copy_shared, shared_stands_still
from hybridindex.index.storage.checksums import digest_file
from hybridindex.index.storage.commit import Progress, no_progress
from hybridindex.index.storage.generation import CURRENT_FILE, as_path, point, read_current, refuse_share
from hybridindex.index.storage.manifest import MANIFEST_FILE, Manifest, parse_manifest
from hybridindex.index.storage.signed_json import parse_signed, render_signed

__all__ = ["Snapshot", "check_note", "restore", "snapshot"]

#: What the files of a snapshot were when it was written; its format.
_NOTE_FILE, _FORMAT, _VERSION = "snapshot.json", "hybridindex snapshot", 1
#: Larger files are noted by their size alone: smaller ones have their checksums.
_MOST_NOTED = 16 << 20
#: There while a directory is written.
_BEING_WRITTEN = ".being-written"
_count = itertools.count()
#: A compaction may remove a generation while its files are linked; the next one is taken then.
_ATTEMPTS = 5


#: Given the directories of an index and of its copy.
Beside = Callable[[Path, Path], None]


def nothing_beside(path: Path, to: Path) -> None:
    """Copies generations alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What was written."""

    path: Path
    generation: int
    #: Of the last change that it has.
    number: int
    #: Of files that were copied, and of those that were linked.
    copied_bytes: int
    linked_bytes: int


def snapshot(
    path: str | Path,
    to: str | Path,
    *,
    previous: str | Path | None = None,
    beside: Beside = nothing_beside,
    progress: Progress | None = None,
) -> Snapshot:
    """Writes a snapshot of the index at ``path``, which may be searched, changed and compacted meanwhile. It has every
    change that was acknowledged before the call.

    Args:
        to: a new directory, or an empty one.
        previous: an earlier snapshot, whose files are linked where they are the same.
        beside: copies what lies beside the generations, from ``path`` to ``to``, before it is an index.

    Raises:
        InvalidInputError: there is no index, or ``to`` holds something. UnsupportedIndexError: it is a share.
        IndexExistsError: ``to`` holds an index.
        CorruptIndexError: the log of changes is damaged. BuildError, DiskFullError: nothing was left behind.
    """
    path, to = as_path(path), as_path(to, "to")
    if path.resolve() in to.resolve().parents:
        raise InvalidInputError(f"to is {str(to)!r}, within the index; expected a directory elsewhere")
    refuse_share(read_current(path))
    earlier = None if previous is None else read_current(as_path(previous, "previous"))
    return _written(path, to, earlier, beside, progress or no_progress)


def restore(
    from_: str | Path, path: str | Path, *, beside: Beside = nothing_beside, progress: Progress | None = None
) -> Snapshot:
    """Makes an index of a snapshot, every byte of which is compared with its checksum before and after, but for what
    lies beside the generations.

    Args:
        path: a new directory, or an empty one.
        beside: as of :func:`snapshot`.

    Raises:
        As :func:`snapshot`. CorruptIndexError: the snapshot is damaged; nothing was left behind.
    """
    source, path = as_path(from_, "from"), as_path(path)
    verify(source, beside=True)
    check_note(source)
    done = _written(source, path, None, beside, progress or no_progress, is_still=True)
    verify(path, beside=True)
    return done


def _written(
    path: Path, to: Path, earlier: Path | None, beside: Beside, report: Progress, *, is_still: bool = False
) -> Snapshot:
    """``is_still``: nobody changes what is at ``path``."""
    created = _claim(to)
    try:
        for attempt in range(_ATTEMPTS):
            folder = read_current(path)
            try:
                with nullcontext() if is_still else shared_stands_still(folder):
                    done = _copied(folder, to, earlier, report)
                    nbytes = copy_shared(folder, to / folder.name, is_still=is_still)
                beside(path, to)
                if not is_still:
                    _note(to, folder.name, done.number)
                filesystem.remove_folder(to / _BEING_WRITTEN)
                # Last: it is what makes a directory an index.
                point(to, CURRENT_FILE, folder.name)
                return replace(done, copied_bytes=done.copied_bytes + nbytes)
            except MissingFileError:
                filesystem.discard_tree(to / folder.name)
                if attempt + 1 == _ATTEMPTS or read_current(path) == folder:
                    raise
        raise AssertionError("unreachable")
    except BaseException as error:
        with suppress(FileError):
            for entry in filesystem.list_folder(to):
                filesystem.discard_tree(entry) if filesystem.is_dir(entry) else filesystem.discard(entry)
            if created:
                filesystem.remove_folder(to)
        if isinstance(error, MissingFileError):
            raise BuildError(f"{path} was replaced again and again meanwhile; try again") from error
        if isinstance(error, FileError):
            raise cannot_write(error, to, "nothing was left behind") from error
        raise


def _claim(to: Path) -> bool:
    """From now on ``to`` is this call's alone; whether it was not there.

    Raises:
        InvalidInputError: it holds something, or another call writes there. FileError: it cannot be made.
    """
    created = not filesystem.exists(to)
    if not created:
        _refuse_taken(to, filesystem.list_folder(to) if filesystem.is_dir(to) else [to])
    try:
        filesystem.make_folder(to, parents=True, exist_ok=True)
        filesystem.make_folder(to / _BEING_WRITTEN)
    except FileError as error:
        with suppress(FileError):
            _refuse_taken(to, filesystem.list_folder(to))
            if created:
                filesystem.remove_folder(to)
        raise cannot_write(error, to, "nothing was left behind") from error
    try:
        # Another call may have come before.
        _refuse_taken(to, [each for each in filesystem.list_folder(to) if each.name != _BEING_WRITTEN])
    except BaseException:
        with suppress(FileError):
            filesystem.remove_folder(to / _BEING_WRITTEN)
        raise
    return created


def _refuse_taken(to: Path, entries: Sequence[Path]) -> None:
    if not entries:
        return
    if filesystem.exists(to / CURRENT_FILE):
        raise IndexExistsError(f"path {str(to)!r} holds an index; expected a new directory")
    if entries[0].name == _BEING_WRITTEN:
        raise InvalidInputError(f"path {str(to)!r} is being written, or that was interrupted; expected a new directory")
    what = "a file" if entries[0] == to else entries[0].name
    raise InvalidInputError(f"path {str(to)!r} holds {what}; expected a new directory")


def _note(to: Path, generation: str, number: int) -> None:
    """Notes what the files of a generation are, and the ``number`` of the last change."""
    files = {}
    for file in filesystem.list_folder(to / generation):
        if not filesystem.is_link(file) and file.name != CHANGE_LOG:
            size = filesystem.stat(file).st_size
            files[file.name] = [size, digest_file(file) if size <= _MOST_NOTED else None]
    content = {"generation": generation, "number": number, "files": files}
    filesystem.replace_file(to / _NOTE_FILE, render_signed(_FORMAT, _VERSION, content))


def check_note(path: Path) -> None:
    """Compares a snapshot with what it says that it is; nothing where ``path`` is none.

    Raises:
        CorruptIndexError: its files are not what they were. The log may say more: a snapshot is an index, and takes
        changes.
    """
    try:
        raw = filesystem.read_bytes(path / _NOTE_FILE)
    except MissingFileError:
        return
    said = parse_signed(raw, str(path / _NOTE_FILE), _FORMAT, _VERSION, cure="upgrade hybridindex")
    folder = read_current(path)
    if folder.name != said["generation"]:  # compacted
        return
    for name, (size, digest) in said["files"].items():
        try:
            found = filesystem.stat(folder / name).st_size
            is_same = found == size and (digest is None or digest_file(folder / name) == digest)
        except MissingFileError:
            is_same = False
        if not is_same:
            raise CorruptIndexError(
                f"{folder / name} is not what the snapshot had: it is damaged, or the snapshot was changed since as an "
                "index, of which a new snapshot can be taken"
            )
    manifest = parse_manifest(filesystem.read_bytes(folder / MANIFEST_FILE), str(folder))
    number = log_file(folder, manifest).read().place.number
    if number < said["number"]:
        raise CorruptIndexError(f"{folder / CHANGE_LOG} ends with change {number}; the snapshot had {said['number']}")


def _copied(folder: Path, to: Path, earlier: Path | None, report: Progress) -> Snapshot:
    manifest = parse_manifest(filesystem.read_bytes(folder / MANIFEST_FILE), str(folder))
    target = to / folder.name
    filesystem.make_folder(target)
    files = [
        each
        for each in filesystem.list_folder(folder)
        if each.name != CHANGE_LOG and not each.name.endswith(".new") and not filesystem.is_link(each)
    ]
    # At first names alone, or open files where names cannot be: that takes moments. What is linked or open stays,
    # whatever becomes of the generation.
    stage = folder.parent / f".snapshot-{os.getpid()}-{next(_count)}-{to.name}"
    filesystem.discard_tree(stage)
    filesystem.make_folder(stage)
    try:
        with ExitStack() as opened:
            sources = [_held(file, stage, opened) for file in files]
            with suppress(MissingFileError):
                try:
                    filesystem.link(folder / CHANGE_LOG, stage / CHANGE_LOG)
                except FileError:
                    filesystem.copy_file(folder / CHANGE_LOG, stage / CHANGE_LOG)
            log, number = _log_of(stage, manifest)
            copied, linked = len(log), 0
            for done, (file, source) in enumerate(zip(files, sources, strict=True)):
                size = filesystem.stat(source).st_size
                if _linked(source, target / file.name, earlier):
                    linked += size
                else:
                    filesystem.copy_file(source, target / file.name)
                    copied += size
                report("copy", done + 1, len(files))
    finally:
        filesystem.discard_tree(stage)
    if log:
        filesystem.replace_file(target / CHANGE_LOG, log)
    filesystem.sync_folder(target)
    filesystem.sync_folder(to)
    return Snapshot(path=to, generation=manifest.generation, number=number, copied_bytes=copied, linked_bytes=linked)


def _held(file: Path, stage: Path, opened: ExitStack) -> Path:
    """Where the content of ``file`` stays: a link in ``stage``; where the system refuses links, an open file."""
    try:
        filesystem.link(file, stage / file.name)
    except FileError:
        return Path(f"/proc/self/fd/{opened.enter_context(filesystem.open_for_reading(file)).fileno()}")
    return stage / file.name


def _log_of(stage: Path, manifest: Manifest) -> tuple[bytes, int]:
    """The log up to its last whole change, and the number of that; it is only appended to."""
    place = log_file(stage, manifest).read().place
    log = filesystem.read_bytes(stage / CHANGE_LOG)[: place.end] if place.end else b""
    return log, place.number


def _linked(file: Path, to: Path, earlier: Path | None) -> bool:
    """Whether ``to`` is a link now: to the file, or to the same one of an earlier snapshot."""
    with suppress(FileError):
        filesystem.link(file, to)
        return True
    if earlier is not None and _is_same(file, earlier / to.name):
        with suppress(FileError):
            filesystem.link(earlier / to.name, to)
            return True
    return False


def _is_same(file: Path, other: Path) -> bool:
    """By their bytes."""
    with suppress(FileError):
        if filesystem.stat(file).st_size == filesystem.stat(other).st_size:
            return digest_file(file) == digest_file(other)
    return False
