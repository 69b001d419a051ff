"""What is read of a file that cannot be mapped: batches of rows with their ids, in the order of the file."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["BATCH_BYTES", "Batch", "Batches"]

#: About so much is read at a time.
BATCH_BYTES = 8 << 20

_Array = np.ndarray[Any, Any]
#: (n, dim) elements, or these and (n,) ids: what a build takes of an iterator.
Batch = _Array | tuple[_Array, _Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """A file, opened. ``batches`` can be read once; closing it closes the file."""

    #: Rows; None: not known before the end.
    count: int | None
    batches: Generator[Batch]
