"""The keys of a cluster, in files of its folder that their owner alone can read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybridindex import filesystem
from hybridindex.errors import MissingFileError
from hybridindex.service.auth import new_key

__all__ = ["ADMIN_FILE", "SEARCH_FILE", "ClusterKeys", "key_for_searches", "make_keys", "read_keys"]

#: Of the nodes and the manager, with the role admin; and of clients that only search.
ADMIN_FILE, SEARCH_FILE = "key", "search-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterKeys:
    """What every node of a cluster lets in."""

    admin: str
    search: str


def make_keys(folder: Path) -> ClusterKeys:
    """Those of an earlier start, and new ones for what is missing."""
    found = []
    for name in (ADMIN_FILE, SEARCH_FILE):
        key = _read(folder / name)
        if key is None:
            key = new_key()
            filesystem.replace_file(folder / name, key, permissions=0o600)
        found.append(key)
    return ClusterKeys(admin=found[0], search=found[1])


def read_keys(folder: Path) -> ClusterKeys | None:
    """None: one is not there."""
    admin, search = _read(folder / ADMIN_FILE), _read(folder / SEARCH_FILE)
    return None if admin is None or search is None else ClusterKeys(admin=admin, search=search)


def key_for_searches(folder: Path) -> str | None:
    """The one that allows no more, where it can be read. None: there is none."""
    return _read(folder / SEARCH_FILE) or _read(folder / ADMIN_FILE)


def _read(file: Path) -> str | None:
    try:
        return filesystem.read_text(file).strip() or None
    except MissingFileError:
        return None
