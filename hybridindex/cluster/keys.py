"""The keys of a cluster, in files of its folder that their owner alone can read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybridindex import filesystem
from hybridindex.errors import MissingFileError
from hybridindex.service.auth import new_key

__all__ = ["KEY_FILES", "ClusterKeys", "key_for_searches", "key_for_writes", "make_keys", "read_keys"]

#: Of the nodes and the manager, with the role admin; of clients that change rows; and of those that only search.
KEY_FILES = _ADMIN, _WRITE, _SEARCH = "key", "write-key", "search-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterKeys:
    """What every node of a cluster lets in."""

    admin: str
    write: str
    search: str


def make_keys(folder: Path) -> ClusterKeys:
    """Those of an earlier start, and new ones for what is missing."""
    found = []
    for name in KEY_FILES:
        key = _read(folder / name)
        if key is None:
            key = new_key()
            filesystem.replace_file(folder / name, key, permissions=0o600)
        found.append(key)
    admin, write, search = found
    return ClusterKeys(admin=admin, write=write, search=search)


def read_keys(folder: Path) -> ClusterKeys | None:
    """None: one is not there."""
    admin, write, search = (_read(folder / name) for name in KEY_FILES)
    if admin is None or write is None or search is None:
        return None
    return ClusterKeys(admin=admin, write=write, search=search)


def key_for_searches(folder: Path) -> str | None:
    """The one that allows no more, where it can be read. None: there is none."""
    return _read(folder / _SEARCH) or _read(folder / _ADMIN)


def key_for_writes(folder: Path) -> str | None:
    """The one that also changes rows, and no more; as :func:`key_for_searches`."""
    return _read(folder / _WRITE) or _read(folder / _ADMIN)


def key_for_upkeep(folder: Path) -> str | None:
    """The one that allows everything, where it can be read. None: there is none."""
    return _read(folder / _ADMIN)


def _read(file: Path) -> str | None:
    try:
        return filesystem.read_text(file).strip() or None
    except MissingFileError:
        return None
