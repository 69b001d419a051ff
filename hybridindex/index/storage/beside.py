"""Files that belong to generations and have a name beside them: links that lead to the file.

A file that nobody changes lies in its generation:

    idx/gen-000002/documents.sqlite
    idx/documents.sqlite                     -> gen-000002/documents.sqlite

One that changes with the rows belongs to a *lineage*, all generations that were compacted from one build:

    idx/documents-0123456789abcdef.sqlite
    idx/gen-000002/documents.sqlite          -> ../documents-0123456789abcdef.sqlite
    idx/gen-000003/documents.sqlite          -> ../documents-0123456789abcdef.sqlite
    idx/documents.sqlite                     -> documents-0123456789abcdef.sqlite

A rollback lets the links follow. Knows nothing of what is in the files.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from hybridindex import filesystem
from hybridindex.errors import BuildError, CorruptIndexError, FileError, HybridIndexError
from hybridindex.index.storage.generation import (
    current_name,
    generation_name,
    other_generations,
    read_current,
    writers_lock,
)
from hybridindex.index.storage.manifest import MANIFEST_FILE, Manifest, parse_manifest
from hybridindex.processes import lock_file

__all__ = [
    "SHARED_FILES",
    "carry_shared",
    "changes_lock",
    "copy_shared",
    "follow",
    "generation_file",
    "lead_to",
    "lineage_of",
    "missing_shared",
    "remove_unshared",
    "share",
    "shared_file",
    "shared_stands_still",
]

#: How long another process may write the index before a file is not shared.
_WAIT_S = 10.0
#: How long another process may change what is shared before it is not copied.
_CHANGES_S = 30.0
#: Of a lineage, in a name.
_LETTERS = 16
#: Of the names of what lies beside a shared file: SQLite keeps two files there, its writers a lock.
_BESIDES = ("", "-wal", "-shm", ".new", ".lock")
#: Files beside the rows that speak of ids alone, so that all generations of a lineage can share them.
SHARED_FILES = ("documents.sqlite",)


def generation_file(path: Path, generation: int, name: str) -> Path:
    """The file ``name`` of a generation; where it has none, the one beside the generations, if that is no link."""
    own, beside = path / generation_name(generation) / name, path / name
    if filesystem.exists(own) or not filesystem.is_file(beside) or filesystem.is_link(beside):
        return own
    return beside


def lead_to(path: Path, generation: int, name: str) -> None:
    """Lets ``name`` beside the generations lead to the file of one of them, at once."""
    target = f"{generation_name(generation)}/{name}"
    if filesystem.is_link(path / target):
        parts = Path(filesystem.readlink(path / target)).parts
        if len(parts) == 2 and parts[0] == "..":
            target = parts[1]
    _link(path / name, target)


def follow(path: Path, generation: int) -> None:
    """Lets links into other generations, or to what they share, lead to the files of this one, where it has them."""
    for entry in filter(filesystem.is_link, filesystem.list_folder(path)):
        parts = Path(filesystem.readlink(entry)).parts
        own = path / generation_name(generation) / entry.name
        is_ours = (len(parts) == 2 and parts[1] == entry.name) or (
            len(parts) == 1 and _pattern(entry.name).fullmatch(parts[0]) is not None
        )
        if is_ours and filesystem.exists(own):
            lead_to(path, generation, entry.name)


# What generations of one lineage share


def shared_file(path: Path, lineage: str, name: str) -> Path:
    """Where the generations of a lineage have their file."""
    own = Path(name)
    return path / f"{own.stem}-{lineage[:_LETTERS]}{own.suffix}"


def share(path: Path, generation: int, name: str) -> Path:
    """Gives a generation's file to its lineage, if it was not given before; returns where it lies, if there is one.

    The content is copied: who reads the old file goes on with it.

    Raises:
        BuildError: another process writes the index. FileError: nothing has changed for readers.
    """
    folder = path / generation_name(generation)
    shared = shared_file(path, _manifest(folder).lineage, name)
    if _shares(folder, shared, name):
        return shared
    with writers_lock(path, timeout_s=_WAIT_S):
        source, beside = generation_file(path, generation, name), path / name
        others = other_generations(path, {folder.name})
        # A copy that no generation leads to is one of a process that died: nobody changed it.
        if filesystem.is_file(source) and not any(_shares(other, shared, name) for other in others):
            draft = shared.with_name(f"{shared.name}.new")
            filesystem.unlink(draft, missing_ok=True)
            filesystem.copy_file(source, draft)
            filesystem.replace(draft, shared)
            filesystem.sync_folder(path)
        _link(folder / name, f"../{shared.name}")
        if current_name(path) == folder.name and (filesystem.is_link(beside) or source in (beside, folder / name)):
            _link(beside, shared.name)
    return shared


def carry_shared(path: Path, old: Path, new: Path) -> None:
    """Gives a generation that was compacted from another one the files that both share from now on. For who holds the
    writers' lock.

    Args:
        old, new: folders of the generations.

    Raises:
        BuildError, FileError: the old generation has all that it had.
    """
    number = int(old.name.removeprefix("gen-"))
    for name in SHARED_FILES:
        if filesystem.is_link(old / name) or filesystem.exists(generation_file(path, number, name)):
            _link(new / name, f"../{share(path, number, name).name}")


def changes_lock(file: Path, timeout_s: float) -> FileLock:
    """Held by who changes a shared file, or the rows that it speaks of with it."""
    return lock_file(file.with_name(f"{file.name}.lock"), timeout_s=timeout_s)


@contextmanager
def shared_stands_still(folder: Path) -> Iterator[None]:
    """Nobody changes what a generation shares, and rows with it, within.

    Raises:
        BuildError: another process does, for half a minute already.
    """
    with ExitStack() as stack:
        for name in SHARED_FILES:
            if filesystem.is_link(folder / name):
                file = (folder / name).resolve()
                try:
                    stack.enter_context(changes_lock(file, _CHANGES_S))
                except Timeout as error:
                    raise BuildError(f"another process changes {file}; try again when it is done") from error
        yield


def copy_shared(folder: Path, to: Path, *, is_still: bool = False) -> int:
    """Gives the copy of a generation, in ``to``, copies of what the generation shares; their bytes.

    Args:
        is_still: nobody changes it, or may write beside it.

    Raises:
        CorruptIndexError: it is not there, or, with ``is_still``, lies elsewhere. BuildError: it cannot be copied.
        FileError.
    """
    nbytes = 0
    if missing := missing_shared(folder):
        raise CorruptIndexError(f"{missing[0]} of {folder} is gone: it led to {(folder / missing[0]).resolve().name}")
    for name in SHARED_FILES:
        if filesystem.is_link(folder / name):
            file = (folder / name).resolve()
            if is_still and (file.parent != folder.parent.resolve() or not _pattern(name).fullmatch(file.name)):
                raise CorruptIndexError(f"{folder / name} leads to {file}; expected a file of the snapshot's own")
            copy = to.parent / file.name
            # Or else without what is in its log alone.
            log = file.with_name(f"{file.name}-wal")
            immutable = is_still and not (filesystem.exists(log) and filesystem.stat(log).st_size)
            uri = f"{file.as_uri()}?mode=ro{'&immutable=1' if immutable else ''}"
            try:
                with (
                    filesystem.performing("sqlite", copy),
                    closing(sqlite3.connect(uri, uri=True)) as source,
                    closing(sqlite3.connect(copy)) as target,
                ):
                    source.backup(target)
                    damage = target.execute("PRAGMA quick_check(1)").fetchone()[0] if is_still else "ok"
            except sqlite3.Error as error:
                raise BuildError(f"{file} cannot be copied: {error}") from error
            if damage != "ok":
                raise CorruptIndexError(f"{file} is damaged: {damage}")
            _link(to / name, f"../{file.name}")
            nbytes += filesystem.stat(copy).st_size
        if filesystem.exists(to / name):
            lead_to(to.parent, int(to.name.removeprefix("gen-")), name)
    return nbytes


def missing_shared(folder: Path) -> list[str]:
    """Files that a generation shares, and that are not there."""
    return [name for name in SHARED_FILES if filesystem.is_link(folder / name) and not filesystem.exists(folder / name)]


def remove_unshared(path: Path) -> None:
    """Removes what lineages shared of which no generation is left. For who holds the writers' lock."""
    try:
        left = {_manifest(folder).lineage[:_LETTERS] for folder in other_generations(path, set())}
    except (FileError, HybridIndexError):
        return  # nobody knows whose file is whose
    for name in SHARED_FILES:
        kept = {f"{shared_file(path, lineage, name).name}{end}" for lineage in left for end in _BESIDES}
        for entry in filesystem.list_folder(path):
            if _pattern(name).fullmatch(entry.name) and entry.name not in kept:
                filesystem.discard(entry)


def lineage_of(path: Path, fingerprint: str) -> str:
    """The lineage of the generation with this fingerprint; where none has it, or it cannot be read, ``fingerprint``."""
    try:
        for folder in [read_current(path), *other_generations(path, set())]:
            manifest = _manifest(folder)
            if manifest.fingerprint == fingerprint:
                return manifest.lineage
    except (FileError, HybridIndexError):
        pass
    return fingerprint


def _manifest(folder: Path) -> Manifest:
    return parse_manifest(filesystem.read_bytes(folder / MANIFEST_FILE), MANIFEST_FILE)


def _shares(folder: Path, shared: Path, name: str) -> bool:
    own = folder / name
    return filesystem.is_link(own) and filesystem.readlink(own) == f"../{shared.name}" and filesystem.exists(shared)


def _pattern(name: str) -> re.Pattern[str]:
    own = Path(name)
    return re.compile(
        rf"{re.escape(own.stem)}-[0-9A-Za-z]{{1,{_LETTERS}}}{re.escape(own.suffix)}(-wal|-shm|\.new|\.lock)?"
    )


def _link(link: Path, target: str) -> None:
    """At once, in the place of what is there."""
    new = link.with_name(f".{link.name}.new")
    filesystem.unlink(new, missing_ok=True)
    filesystem.symlink(target, new)
    filesystem.replace(new, link)
    filesystem.sync_folder(link.parent)
