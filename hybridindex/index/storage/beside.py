"""Files that belong to one generation and have a name beside the generations: a link that leads into the current one.

    idx/gen-000002/documents.sqlite
    idx/documents.sqlite            -> gen-000002/documents.sqlite

A rollback lets the links follow. Knows nothing of what is in the files.
"""

from __future__ import annotations

import os
from pathlib import Path

from hybridindex.index.storage.generation import generation_name

__all__ = ["follow", "generation_file", "lead_to"]


def generation_file(path: Path, generation: int, name: str) -> Path:
    """The file ``name`` of a generation; where it has none, the one beside the generations, if that is no link."""
    own, beside = path / generation_name(generation) / name, path / name
    return beside if beside.is_file() and not beside.is_symlink() and not own.exists() else own


def lead_to(path: Path, generation: int, name: str) -> None:
    """Lets ``name`` beside the generations lead to the file of one of them, at once."""
    new = path / f".{name}.new"
    new.unlink(missing_ok=True)
    new.symlink_to(f"{generation_name(generation)}/{name}")
    new.replace(path / name)


def follow(path: Path, generation: int) -> None:
    """Lets links into other generations lead to the files of this one, where it has them."""
    for entry in [entry for entry in path.iterdir() if entry.is_symlink()]:
        parts = Path(os.readlink(entry)).parts
        if len(parts) == 2 and parts[1] == entry.name and (path / generation_name(generation) / entry.name).exists():
            lead_to(path, generation, entry.name)
