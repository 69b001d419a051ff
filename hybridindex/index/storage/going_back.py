"""After a replacement: back to the generation that was replaced, or on without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hybridindex import filesystem
from hybridindex.errors import BuildError, DiskFullError, FileError, InvalidInputError, NotWritableError
from hybridindex.index.storage.beside import follow, remove_unshared
from hybridindex.index.storage.generation import (
    CURRENT_FILE,
    PREVIOUS_FILE,
    current_name,
    generation_name,
    log_lock,
    other_generations,
    point,
    previous_name,
    read_current,
    remove_generations,
    unfinished,
    writers_lock,
)

__all__ = ["previous_generation", "remove_others", "switch_back"]


def previous_generation(path: Path) -> int | None:
    """The generation that :func:`switch_back` would go back to."""
    name = previous_name(path)
    return None if name is None else int(name.removeprefix("gen-"))


def switch_back(path: Path, check: Callable[[Path], object]) -> int:
    """Makes the previous generation the current one, and the other way round; its number.

    Args:
        check: given the directory of the generation before anything changes; raises where it cannot be used.

    Raises:
        InvalidInputError: there is none. BuildError: another process is writing.
    """
    read_current(path)
    with writers_lock(path):
        name, before = previous_name(path), current_name(path)
        if name is None:
            raise InvalidInputError(
                f"path {str(path)!r} has no generation to go back to: {before or 'the current one'} replaced none, or "
                "what it replaced has been removed"
            )
        # Nobody logs a change meanwhile.
        with log_lock(path):
            check(path / name)
            # A crash between the two leaves the right one current; PREVIOUS then names it too, see previous_name.
            try:
                point(path, CURRENT_FILE, name)
                point(path, PREVIOUS_FILE, before)
            except FileError:
                point(path, CURRENT_FILE, before)
                raise
        number = int(name.removeprefix("gen-"))
        follow(path, number)
    return number


def remove_others(path: Path, serving: int | None = None) -> list[int]:
    """Removes all generations but the current one, and what writers left that died; returns the generations' numbers.

    Args:
        serving: do nothing unless this is the current one.

    Raises:
        BuildError: another process is writing, or something cannot be removed.
    """
    current = read_current(path).name
    replaced = bool(other_generations(path, {current})) or previous_name(path) is not None
    if not replaced and not unfinished(path):
        return []  # nobody who writes waits for this
    try:
        with writers_lock(path):
            for left in unfinished(path):
                if filesystem.is_dir(left):
                    filesystem.discard_tree(left)
                else:
                    filesystem.discard(left)
            if current_name(path) != current or (serving is not None and current != generation_name(serving)):
                return []
            point(path, PREVIOUS_FILE, None)
            removed = remove_generations(path, but={current})
            remove_unshared(path)
            return removed
    except BuildError as error:
        if replaced or isinstance(error, NotWritableError | DiskFullError):
            raise
        return []  # its writer lives
