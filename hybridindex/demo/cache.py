"""Files of the data cache: atomic writes and seals.

A *sealed* file has a small JSON file beside it (``name.json`` beside ``name``) with its size, its xxh3 checksum and
what it was made from. The data is renamed into place first and the seal second, so a crash in between leaves an
unsealed file, which counts as absent. :func:`check` reads the whole file and so finds a flipped bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

__all__ = ["atomic_path", "check", "digest", "seal", "seal_path", "write_json"]


def digest(path: Path) -> str:
    """xxh3 (128 bit, hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``; renamed onto it when the block ends well, removed when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays last: numpy appends ".npy" to names that lack it.
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """``value`` as indented JSON, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def seal_path(path: Path) -> Path:
    """Where the seal of ``path`` lies."""
    return path.with_name(path.name + ".json")


def seal(path: Path, recipe: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    """Seal a file: ``recipe`` is what it was made from (compared by :func:`check`), ``facts`` are notes about it."""
    sealed = {"recipe": dict(recipe), "size": path.stat().st_size, "xxh3": digest(path), **facts}
    write_json(seal_path(path), sealed)
    return sealed


def check(path: Path, recipe: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """The seal of an intact file, or None: absent, unsealed, of another recipe, or with other bytes than sealed."""
    try:
        sealed = json.loads(seal_path(path).read_text(encoding="utf-8"))
        if not isinstance(sealed, dict) or (recipe is not None and sealed.get("recipe") != dict(recipe)):
            return None
        if path.stat().st_size != sealed.get("size") or digest(path) != sealed.get("xxh3"):
            return None
    except (OSError, ValueError):
        return None
    return sealed
