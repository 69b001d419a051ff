"""After a replacement: back to the generation that was replaced, or on without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hybridindex.errors import InvalidInputError
from hybridindex.index.storage.beside import follow
from hybridindex.index.storage.generation import (
    CURRENT_FILE,
    PREVIOUS_FILE,
    current_name,
    generation_name,
    other_generations,
    point,
    previous_name,
    read_current,
    remove_generations,
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
                "what it replaced is gone since it serves"
            )
        check(path / name)
        # A crash between the two leaves nothing to go back to, and the right one current.
        point(path, CURRENT_FILE, name)
        point(path, PREVIOUS_FILE, before)
        number = int(name.removeprefix("gen-"))
        follow(path, number)
    return number


def remove_others(path: Path, serving: int | None = None) -> list[int]:
    """Removes all generations but the current one; returns their numbers.

    Args:
        serving: do nothing unless this is the current one.

    Raises:
        BuildError: another process is writing.
    """
    current = read_current(path).name
    if not other_generations(path, {current}) and previous_name(path) is None:
        return []  # nobody who writes waits for this
    with writers_lock(path):
        if current_name(path) != current or (serving is not None and current != generation_name(serving)):
            return []
        point(path, PREVIOUS_FILE, None)
        return remove_generations(path, but={current})
