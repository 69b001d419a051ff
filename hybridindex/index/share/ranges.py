"""Sets of lists as ranges of their ids, as files and messages say them. Pure numpy; no I/O."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError

__all__ = ["mask_of", "ranges_of"]


def ranges_of(mask: npt.NDArray[np.bool_]) -> list[list[int]]:
    """(nlist,) bool as [[start, stop), ...]: ascending, none empty, none beside another."""
    padded = np.concatenate([[False], mask, [False]])
    return np.flatnonzero(padded[1:] != padded[:-1]).reshape(-1, 2).tolist()


def mask_of(ranges: Any, nlist: int) -> npt.NDArray[np.bool_]:
    """(nlist,) bool of [[start, stop), ...], in any order.

    Raises:
        InvalidInputError: they are no such ranges, one is empty, or names lists that are not there.
    """
    mask = np.zeros(nlist, dtype=np.bool_)
    if not isinstance(ranges, list | tuple):
        raise InvalidInputError(f"lists is a {type(ranges).__name__}; expected [[start, stop], ...]")
    for each in ranges:
        is_pair = isinstance(each, list | tuple) and len(each) == 2 and all(type(end) is int for end in each)
        if not is_pair or not 0 <= each[0] < each[1] <= nlist:
            raise InvalidInputError(f"lists holds {each!r}; expected [start, stop] with 0 <= start < stop <= {nlist}")
        mask[each[0] : each[1]] = True
    return mask
