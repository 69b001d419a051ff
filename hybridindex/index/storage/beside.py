"""Files that belong to one generation and have a name beside the generations: a link that leads into the current one.

    idx/gen-000002/documents.sqlite
    idx/documents.sqlite            -> gen-000002/documents.sqlite

A rollback lets the links follow. Knows nothing of what is in the files.
"""

from __future__ import annotations

from pathlib import Path

from hybridindex import filesystem
from hybridindex.index.storage.generation import generation_name

__all__ = ["follow", "generation_file", "lead_to"]


def generation_file(path: Path, generation: int, name: str) -> Path:
    """The file ``name`` of a generation; where it has none, the one beside the generations, if that is no link."""
    own, beside = path / generation_name(generation) / name, path / name
    if filesystem.exists(own) or not filesystem.is_file(beside) or filesystem.is_link(beside):
        return own
    return beside


def lead_to(path: Path, generation: int, name: str) -> None:
    """Lets ``name`` beside the generations lead to the file of one of them, at once."""
    new = path / f".{name}.new"
    filesystem.unlink(new, missing_ok=True)
    filesystem.symlink(f"{generation_name(generation)}/{name}", new)
    filesystem.replace(new, path / name)
    filesystem.sync_folder(path)


def follow(path: Path, generation: int) -> None:
    """Lets links into other generations lead to the files of this one, where it has them."""
    for entry in filter(filesystem.is_link, filesystem.list_folder(path)):
        parts = Path(filesystem.readlink(entry)).parts
        own = path / generation_name(generation) / entry.name
        if len(parts) == 2 and parts[1] == entry.name and filesystem.exists(own):
            lead_to(path, generation, entry.name)
