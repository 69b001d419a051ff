"""Files of the data cache: atomic writes and seals.

A *sealed* file has a small JSON file beside it (``name.json`` beside ``name``) with its size, its xxh3 checksum and
what it was made from. The data is renamed into place first and the seal second, so a crash in between leaves an
unsealed file, which counts as absent. :func:`check` reads the whole file and so finds a flipped bit.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from hybridindex import filesystem
from hybridindex.errors import FileError

__all__ = ["atomic_path", "check", "digest", "seal", "seal_path", "write_json"]


def digest(path: Path) -> str:
    """xxh3 (128 bit, hex) of a file."""
    return filesystem.file_digest(path, xxhash.xxh3_128)


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``; renamed onto it when the block ends well, removed when it does not."""
    filesystem.make_folder(path.parent, parents=True, exist_ok=True)
    with filesystem.replacing(path) as temporary:
        yield temporary


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """``value`` as indented JSON, atomically."""
    with atomic_path(path) as temporary:
        filesystem.write_bytes(temporary, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def seal_path(path: Path) -> Path:
    """Where the seal of ``path`` lies."""
    return path.with_name(path.name + ".json")


def seal(path: Path, recipe: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    """Seal a file: ``recipe`` is what it was made from (compared by :func:`check`), ``facts`` are notes about it."""
    sealed = {"recipe": dict(recipe), "size": filesystem.stat(path).st_size, "xxh3": digest(path), **facts}
    write_json(seal_path(path), sealed)
    return sealed


def check(path: Path, recipe: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """The seal of an intact file, or None: absent, unsealed, of another recipe, or with other bytes than sealed."""
    try:
        sealed = json.loads(filesystem.read_bytes(seal_path(path)))
        if not isinstance(sealed, dict) or (recipe is not None and sealed.get("recipe") != dict(recipe)):
            return None
        if filesystem.stat(path).st_size != sealed.get("size") or digest(path) != sealed.get("xxh3"):
            return None
    except (FileError, ValueError):
        return None
    return sealed
