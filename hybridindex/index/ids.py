"""Finding repeated ids, for any number of ids, in bounded anonymous memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from hybridindex import filesystem
from hybridindex.index.storage.generation import GenerationWriter
from hybridindex.types import I64

__all__ = ["Duplicates", "find_duplicates"]

_CHUNK = 1 << 20
_EXAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicates:
    """Ids that occur more than once."""

    #: Vectors too many: the number of vectors minus the number of different ids.
    surplus: int
    #: The smallest few of the repeated ids.
    examples: tuple[int, ...]


def find_duplicates(chunks: Iterable[I64], n: int, writer: GenerationWriter) -> Duplicates:
    """Look for repeated ids among ``n`` ids given in chunks; unsorted ones are sorted in a scratch file, in place."""
    scratch = writer.open_file("ids.sort")
    try:
        scratch.reserve(8 * n)
        increasing, last = True, -1
        for part in chunks:
            if not len(part):
                continue
            increasing = increasing and int(part[0]) > last and bool((np.diff(part) > 0).all())
            last = int(part[-1])
            scratch.append(np.ascontiguousarray(part, dtype=np.int64))
        if increasing:
            return Duplicates(surplus=0, examples=())
        ids = filesystem.map_array(scratch.path, np.int64, (n,), mode="r+")
        ids.sort()  # in place: the pages belong to the file
        return _repeats(ids)
    finally:
        writer.drop(scratch)


def _repeats(ids: I64) -> Duplicates:
    surplus, examples = 0, list[int]()
    for repeated in _equal_neighbours(ids):
        surplus += len(repeated)
        for value in np.unique(repeated)[:_EXAMPLES]:
            if len(examples) < _EXAMPLES and int(value) not in examples:
                examples.append(int(value))
    return Duplicates(surplus=surplus, examples=tuple(examples))


def _equal_neighbours(ids: I64) -> Iterator[I64]:
    for start in range(0, len(ids) - 1, _CHUNK):
        part = np.asarray(ids[start : start + _CHUNK + 1])
        yield part[1:][part[1:] == part[:-1]]
