"""One change of an index: ids whose rows go, then rows that come. All of it, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridindex.types import I64, U8

__all__ = ["Change", "merged", "no_ids", "no_rows"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """Resolved: what goes was there, what comes was not, and each row knows its list. Immutable."""

    #: (m,) int64, all different: ids whose rows go.
    gone: I64
    #: (n,) int64, all different: ids of rows that come then.
    ids: I64
    #: (n,) int64, the list of each.
    lists: I64
    #: (n, code_size) uint8, as in ``lists.bin``.
    codes: U8
    #: Their attributes, an Arrow IPC stream of n records; empty: they have none.
    attributes: bytes = b""

    @property
    def nbytes(self) -> int:
        """Of its arrays."""
        return sum(each.nbytes for each in (self.gone, self.ids, self.lists, self.codes)) + len(self.attributes)


def merged(changes: Sequence[Change]) -> Change:
    """Several that speak of different ids, and have no attributes, as one."""
    return Change(
        gone=np.concatenate([change.gone for change in changes]),
        ids=np.concatenate([change.ids for change in changes]),
        lists=np.concatenate([change.lists for change in changes]),
        codes=np.concatenate([change.codes for change in changes]),
    )


def no_ids() -> I64:
    """(0,) int64."""
    return np.empty(0, dtype=np.int64)


def no_rows(code_size: int) -> U8:
    """(0, code_size) uint8."""
    return np.empty((0, code_size), dtype=np.uint8)
