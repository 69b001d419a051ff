"""Files that are added to a committed generation, or removed from it: the writers' lock, and the removal.

Codes and attributes are such files: each has a JSON file that names the rest and is the commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridindex import filesystem
from hybridindex.errors import BuildError
from hybridindex.index.storage.generation import writers_lock

__all__ = ["adding_to_generation", "remove_additions"]


@contextmanager
def adding_to_generation(path: Path, folder: Path) -> Iterator[None]:
    """The writers' lock of the index at ``path``, while ``folder``, the generation that is open, is still there.

    Raises:
        BuildError: another process is writing, or the generation was removed.
    """
    with writers_lock(path):
        if not filesystem.is_dir(folder):
            raise BuildError(f"{folder.name} of {path} was replaced and removed; open the index again")
        yield


def remove_additions(folder: Path, commit: str, pattern: str) -> int:
    """Removes the files of ``pattern``, and first the one that commits them, so that a crash leaves no name of a file
    that is gone; returns their bytes. With the lock of :func:`adding_to_generation` held."""
    files = [*filesystem.list_folder(folder, pattern)]
    nbytes = sum(filesystem.stat(file).st_size for file in files)
    filesystem.unlink(folder / commit, missing_ok=True)
    filesystem.sync_folder(folder)
    for file in files:
        filesystem.unlink(file, missing_ok=True)
    return nbytes
