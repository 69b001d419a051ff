"""What SQLite finds wrong in the file of a store, which is only read and not opened as a store: that would upgrade it,
needs a directory that can be written, and makes a new store of an empty file.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from hybridindex import filesystem
from hybridindex.errors import FileError
from hybridindex.store.faults import store_fault

__all__ = ["find_damage_of_file"]

#: Bytes of the header of a SQLite file.
_HEADER_BYTES = 100
_MOST_FINDINGS = 20
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def find_damage_of_file(path: Path | None, *, whole: bool = True) -> list[str]:
    """What is wrong in the file, in words; nothing where it cannot be read now.

    Args:
        path: None: the store is on a server, and has no file.
        whole: False: only whether it was cut off before the end of its header.
    """
    if path is None:
        return []
    try:
        size = filesystem.stat(path).st_size
        if size < _HEADER_BYTES:
            return [
                f"control store {path}: it has {size} bytes, less than the header of a SQLite file, and so no content: "
                "it was cut off, or whoever made it was interrupted; restore it from a copy, or remove it to begin anew"
            ]
        return [f"control store {path}: damaged ({words})" for words in _check(path)] if whole else []
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        return [str(store_fault(error, str(path)))] if code in _DAMAGE else []
    except FileError:
        return []


def _check(path: Path) -> list[str]:
    # Without a log beside it nobody has the store open, and no other file is needed, or made.
    unused = not filesystem.exists(f"{path}-wal")
    uri = f"{path.as_uri()}?{'mode=ro&immutable=1' if unused else 'mode=ro'}"
    with filesystem.performing("sqlite", path), closing(sqlite3.connect(uri, uri=True)) as connection:
        found = [words for (words,) in connection.execute(f"PRAGMA integrity_check({_MOST_FINDINGS})")]
    if unused and filesystem.exists(f"{path}-wal"):
        return _check(path)  # somebody opened it meanwhile, and may have written
    return [words for words in found if words != "ok"]
